"""A certificate authority for one run, and the certificates of servers, good and bad."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AUTHORITY = "vaultevents devnet CA"
_LIFE = timedelta(days=30)


class Authority:
    """An authority and the certificates that it signs. `ca_path` (PEM, in `directory`) is what a client must trust."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca_path = directory / "ca.pem"
        self.ca_path.write_bytes(_authority(self._key).public_bytes(Encoding.PEM))

    def server(self, *names: str, expired: bool = False, self_signed: bool = False) -> ssl.SSLContext:
        """A server's TLS context for names and addresses. Leaves the last one's key and certificate in `server.pem`."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _server(names, key, key if self_signed else self._key, expired)
        path = self._directory / "server.pem"
        path.touch(mode=0o600)
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        path.write_bytes(key_pem + certificate.public_bytes(Encoding.PEM))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context


def issue(directory: Path) -> tuple[Path, ssl.SSLContext]:
    """An authority's `ca_path`, and the TLS context of a server that is 127.0.0.1 and localhost."""
    authority = Authority(directory)
    return authority.ca_path, authority.server("127.0.0.1", "localhost")


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, life: timedelta) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    builder = (
        _builder(_AUTHORITY, _AUTHORITY, key, _LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
    )
    return builder.sign(key, SHA256())


def _server(
    names: Sequence[str], key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, expired: bool
) -> x509.Certificate:
    issuer = names[0] if signer is key else _AUTHORITY
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = (
        _builder(names[0], issuer, key, -timedelta(days=1) if expired else _LIFE)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(authority, critical=False)
    )
    return builder.sign(signer, SHA256())


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
