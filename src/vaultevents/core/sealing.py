"""Secrets at rest and in memory (rules D2 and A14): sealed with AES-256-GCM, hashed with a key, never printed.

The sealing key and the id of a master key are both derived from it (HKDF-SHA256), so that neither reveals the other.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from contextlib import suppress
from typing import Final, NoReturn, SupportsIndex

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from vaultevents.core.errors import ConfigError, OperatorError

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12


class SealBroken(OperatorError):
    """A sealed secret does not open: altered, moved to another row, or sealed with another master key."""


class Secret:
    """A text that no log, format string, traceback of values or pickle shows; `reveal()` is the only way to it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return format("***", spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a secret is not pickled")


class MasterKey:
    """The operator's key of 32 bytes. `id` names it in rows and reveals nothing of it.

    While keys are rotated it knows the `previous` one: what that one sealed still opens.
    """

    __slots__ = ("_cipher", "_previous", "id")

    def __init__(self, key: bytes, previous: MasterKey | None = None) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a master key has {KEY_BYTES} bytes, got {len(key)}")
        self.id: Final = _derive(key, b"id").hex()[:16]
        self._cipher: Final = AESGCM(_derive(key, b"seal"))
        self._previous: Final = previous

    @property
    def known(self) -> tuple[MasterKey, ...]:
        """All keys that may have sealed something, newest first."""
        return (self, *(self._previous.known if self._previous is not None else ()))

    def __repr__(self) -> str:
        return f"MasterKey(id={self.id})"


def _derive(key: bytes, use: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"vaultevents " + use).derive(key)


def parse_master_key(text: str, previous: MasterKey | None = None) -> MasterKey:
    """A master key as base64 (either alphabet, padded or not) or hex; raises `ConfigError`, which never quotes it."""
    text = text.strip()
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return MasterKey(bytes.fromhex(text), previous)
    encoded = text.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"the master key must be {KEY_BYTES} bytes in base64 or hex: make one with 'openssl rand -base64 32'"
        )
    return MasterKey(key, previous)


def seal(key: MasterKey, secret: Secret, aad: str, nonce: bytes) -> bytes:
    """`nonce`, ciphertext and tag as one value for the row named by `aad`; `nonce` is 12 fresh random bytes."""
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes, got {len(nonce)}")
    return nonce + key._cipher.encrypt(nonce, secret.reveal().encode(), aad.encode())


def open_sealed(key: MasterKey, blob: bytes, aad: str) -> Secret:
    """What was sealed for the row `aad` with this key or one before it; raises `SealBroken`."""
    for known in key.known:
        with suppress(InvalidTag, ValueError):
            return Secret(known._cipher.decrypt(blob[:NONCE_BYTES], blob[NONCE_BYTES:], aad.encode()).decode())
    raise SealBroken(
        f"the secret of {aad} does not open with master key {key.id}: use the key it was sealed with, "
        "or restore the row from a backup if it was altered or moved"
    )


class HashKey:
    """The key under which API keys are hashed (rule A14): random and itself sealed, so it survives a key rotation."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a hash key has {KEY_BYTES} bytes, got {len(key)}")
        self._key: Final = key

    def __repr__(self) -> str:
        return "HashKey(***)"


def keyed_hash(key: HashKey, text: str) -> bytes:
    """HMAC-SHA256, 32 bytes: how API keys are stored, and what binds a page's cursor to its account."""
    return hmac.digest(key._key, text.encode(), "sha256")
