"""Headers and signatures of a delivery: Standard Webhooks v1 and the optional plain form (rules D1, D2 and D12)."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from vaultevents.core.errors import ConfigError

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 (the public prefix, not a secret)
SECRET_BYTES: Final = 32

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64}")
_SENT: Final = ("content-type", "user-agent", "webhook-id", "webhook-timestamp", "webhook-signature")
_FRAMING: Final = ("host", "content-length", "transfer-encoding", "connection", "expect", "upgrade", "te", "trailer")
_TAKEN: Final = frozenset((*_SENT, *_FRAMING, "x-vaultevents-attempt"))


def new_secret(random_bytes: bytes) -> str:
    """The `secretToken` made of 32 random bytes (rule D2)."""
    if len(random_bytes) != SECRET_BYTES:
        raise ValueError(f"a webhook secret is made of {SECRET_BYTES} random bytes, got {len(random_bytes)}")
    return SECRET_PREFIX + base64.b64encode(random_bytes).decode("ascii")


@lru_cache(maxsize=4096)
def _key(secret_text: str) -> bytes:
    """The bytes that key the HMAC: what base64 says after the prefix, with or without padding."""
    encoded = secret_text.removeprefix(SECRET_PREFIX).rstrip("=")
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a webhook secret is not base64 after its prefix") from None
    if not key:
        raise ValueError("a webhook secret is empty")
    return key


def check_secret(text: str) -> str:
    """A secret that somebody else made, without white space around it; raises `ConfigError`, which never quotes it.

    Standard Webhooks asks for 24 to 64 random bytes.
    """
    text = text.strip()
    try:
        length = len(_key(text)) if text.startswith(SECRET_PREFIX) else 0
    except ValueError:
        length = 0
    if not 24 <= length <= 64:
        raise ConfigError(f"write {SECRET_PREFIX} and then 24 to 64 random bytes in base64 ('openssl rand -base64 32')")
    return text


def sign(secret_texts: Sequence[str], webhook_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of `webhook-signature`: one `v1,<base64>` per valid secret, newest first, separated by spaces.

    Each is HMAC-SHA256 of `id.timestamp.body`; an id with a point would be ambiguous: `ValueError` (rule E9).
    """
    if "." in webhook_id:
        raise ValueError("an id with a point cannot be signed")
    if not secret_texts:
        raise ValueError("a delivery needs at least one secret")
    content = b"%s.%d.%s" % (webhook_id.encode(), timestamp_s, body)
    return " ".join([f"v1,{_base64(hmac.digest(_key(text), content, 'sha256'))}" for text in secret_texts])


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def plain_signature(secret_text: str, body: bytes) -> str:
    """Hex HMAC-SHA256 of the raw body, keyed with the text of the secret as it was shown, prefix and all (rule D1)."""
    return hmac.digest(secret_text.encode(), body, "sha256").hex()


def check_plain_header(name: str) -> str:
    """The name of the operator's plain signature header, in lower case; raises `ConfigError`."""
    if not _TOKEN.fullmatch(name) or name.lower() in _TAKEN:
        raise ConfigError(f"'{name}' cannot be the plain signature header: choose an unused name such as x-signature")
    return name.lower()


def delivery_headers(
    *,
    secret_texts: Sequence[str],
    webhook_id: str,
    timestamp_s: int,
    body: bytes,
    attempt_number: int,
    version: str,
    plain_header: str | None = None,
) -> dict[str, str]:
    """All headers of one attempt (rule D12): `timestamp_s` is that of the attempt, `webhook_id` the envelope's `id`."""
    headers = {
        "content-type": "application/json",
        "user-agent": f"vaultevents/{version}",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": sign(secret_texts, webhook_id, timestamp_s, body),
        "x-vaultevents-attempt": str(attempt_number),
    }
    if plain_header is not None:
        headers[plain_header] = plain_signature(secret_texts[0], body)
    return headers
