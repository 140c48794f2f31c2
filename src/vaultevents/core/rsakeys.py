"""RSA keys of customers (rule A14): which ones are registered, how people tell them apart, a client's own."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
    load_pem_public_key,
)

from vaultevents.core.errors import InputError

MIN_KEY_BITS: Final = 2048
MAX_KEY_BITS: Final = 8192
MAX_EXPONENT_BITS: Final = 64  # a longer one only makes each verification slow

_PEM_LABEL = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----")
_PUBLIC_ADVICE: Final = "make one with 'openssl pkey -in private.pem -pubout'"
_KEY_ADVICE: Final = "make one with 'openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048'"


def parse_public_key(pem: bytes) -> bytes:
    """A customer's public key in PEM (SubjectPublicKeyInfo or PKCS#1) as DER SubjectPublicKeyInfo.

    RSA of 2048 to 8192 bits with an odd exponent above 1; raises `InputError`, which never repeats what was given.
    """
    labels = _PEM_LABEL.findall(pem)
    if any(label.endswith(b"PRIVATE KEY") for label in labels):
        raise InputError(
            "this is a private key, which must never leave its owner: treat it as disclosed, make a new pair, and "
            "register the public half ('openssl pkey -in private.pem -pubout')"
        )
    if any(label.endswith(b"CERTIFICATE") for label in labels):
        raise InputError(
            "this is a certificate: register the public key in it ('openssl x509 -in certificate.pem -noout -pubkey')"
        )
    if labels not in ([b"PUBLIC KEY"], [b"RSA PUBLIC KEY"]):
        raise InputError(f"this is not exactly one public key in PEM: {_PUBLIC_ADVICE}")
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"the public key is damaged or of an unknown kind: {_PUBLIC_ADVICE}") from None
    if not isinstance(key, RSAPublicKey):
        raise InputError(f"the public key is not RSA, which RS256 needs: {_KEY_ADVICE}")
    _check_strength(key)
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _check_strength(key: RSAPublicKey) -> None:
    if not MIN_KEY_BITS <= key.key_size <= MAX_KEY_BITS:
        raise InputError(
            f"the RSA key has {key.key_size} bits, and {MIN_KEY_BITS} to {MAX_KEY_BITS} are accepted: {_KEY_ADVICE}"
        )
    numbers = key.public_numbers()
    if numbers.n % 2 == 0 or numbers.e.bit_length() > MAX_EXPONENT_BITS:  # an even exponent or 1 does not even load
        raise InputError(f"the RSA key has an unusual modulus or exponent, which is not safe: {_KEY_ADVICE}")


def load_public_key(der: bytes) -> RSAPublicKey:
    """The key that `parse_public_key` gave; anything else is a bug and a `ValueError`."""
    key = load_der_public_key(der)
    if not isinstance(key, RSAPublicKey):
        raise ValueError("not an RSA key")
    return key


def fingerprint(der: bytes) -> str:
    """How people tell keys apart: `SHA256:` and the digest of the DER SubjectPublicKeyInfo in unpadded base64."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(der).digest()).decode("ascii").rstrip("=")


def load_private_key(pem: bytes) -> RSAPrivateKey:
    """A client's own key in PEM, unencrypted; raises `InputError`, which never repeats what was given."""
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise InputError(
            "the private key is encrypted: decrypt a copy with 'openssl pkey -in private.pem -out plain.pem'"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"this is not a private key in PEM: {_KEY_ADVICE}") from None
    if not isinstance(key, RSAPrivateKey):
        raise InputError(f"the private key is not RSA, which RS256 needs: {_KEY_ADVICE}")
    _check_strength(key.public_key())
    return key
