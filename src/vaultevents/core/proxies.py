"""The operator's forward proxy, as a setting names it."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes, urlsplit

from vaultevents.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Proxy:
    """Where the proxy is, and what it wants to see in `Proxy-Authorization`."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """`host:port`, without credentials."""
        return authority(self.host, self.port)


def parse_proxy(url: str) -> Proxy:
    """Read `http://[user:password@]host:port`; raises `ConfigError`, whose text never repeats the URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    plain = parts.scheme == "http" and parts.path in ("", "/") and not parts.query and not parts.fragment
    if not plain or not parts.hostname or not port or not parts.hostname.isascii():
        raise ConfigError("write the proxy as http://host:port or http://user:password@host:port")
    if parts.username is None:
        return Proxy(parts.hostname, port)
    credentials = unquote_to_bytes(parts.username) + b":" + unquote_to_bytes(parts.password or "")
    return Proxy(parts.hostname, port, f"Basic {b64encode(credentials).decode()}")


def authority(host: str, port: int) -> str:
    """Return `host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
