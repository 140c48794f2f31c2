"""Reach receivers through the operator's forward proxy, by CONNECT (RFC 9110 §9.3.6).

The proxy looks up and dials the receiver; its deny list is a second wall behind the rules for URLs. The proxy is the
operator's own, so its address is not judged. A proxy that cannot be used is a fault of this host, never of a receiver.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Final

from vaultevents.core.errors import LocalFault, VaulteventsError
from vaultevents.core.proxies import Proxy, authority

HEAD_LIMIT_BYTES: Final = 16 * 1024
REASON_CHARS: Final = 256
REASON_HEADER: Final = "x-smokescreen-error"
ROLE_HEADER: Final = "x-smokescreen-role"
"""Of the client, for the proxy's rules; other proxies than Smokescreen ignore it."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?\r\n")


class ProxyRefused(VaulteventsError):
    """The proxy works and did not connect to the receiver: it may not, or could not."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the proxy answered {status}: {reason}")
        self.status = status
        self.reason = reason


async def dial_proxy(proxy: Proxy, lookup: Callable[[str], Awaitable[Sequence[str]]]) -> socket.socket:
    """Return a socket that is connected to the proxy; raises `LocalFault`."""
    loop = asyncio.get_running_loop()
    problem: OSError | None = None
    try:
        for address in await _addresses(proxy.host, lookup):
            connected = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            try:
                connected.setblocking(False)
                await loop.sock_connect(connected, (address, proxy.port))
            except OSError as failure:
                connected.close()
                problem = failure.with_traceback(None)
            except BaseException:
                connected.close()
                raise
            else:
                return connected
    except OSError as failure:
        problem = failure.with_traceback(None)
    raise LocalFault("proxy_down", f"the proxy {proxy.name} cannot be reached: {problem or 'it has no address'}")


async def open_tunnel(connected: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Let the proxy connect to the receiver; what is sent on `connected` then goes there.

    Raises `ProxyRefused` with what the proxy said, and `LocalFault` where the proxy is in trouble itself.
    """
    loop = asyncio.get_running_loop()
    target = authority(host, port)
    fields = [f"host: {target}", f"{ROLE_HEADER}: vaultevents"]
    if proxy.authorization is not None:
        fields.append(f"proxy-authorization: {proxy.authorization}")
    head = b""
    try:
        await loop.sock_sendall(connected, "\r\n".join([f"CONNECT {target} HTTP/1.1", *fields, "", ""]).encode())
        while b"\r\n\r\n" not in head and len(head) < HEAD_LIMIT_BYTES:
            data = await loop.sock_recv(connected, HEAD_LIMIT_BYTES)
            if not data:
                break
            head += data
    except TimeoutError:
        raise
    except OSError as problem:
        raise LocalFault("proxy_down", f"the proxy {proxy.name} ended the connection: {problem}") from None
    lines, end, rest = head.partition(b"\r\n\r\n")
    found = _STATUS.match(lines + b"\r\n")
    if not end or found is None:
        raise LocalFault("proxy_down", f"the proxy {proxy.name} gave no HTTP answer to CONNECT")
    status, headers = int(found[1]), _headers(lines)
    if 200 <= status < 300:
        if rest:
            raise LocalFault("proxy_down", f"the proxy {proxy.name} sent bytes before the receiver could")
        return
    reason = headers.get(REASON_HEADER)
    if status == 407 and reason is None and "proxy-authenticate" in headers:
        raise LocalFault("proxy_down", f"the proxy {proxy.name} asks for other credentials: set delivery.proxy_url")
    raise ProxyRefused(status, _printable(reason or (found[2] or b"").decode("latin-1")))


async def _addresses(host: str, lookup: Callable[[str], Awaitable[Sequence[str]]]) -> Sequence[str]:
    try:
        return [str(ip_address(host))]
    except ValueError:
        return await lookup(host)


def _headers(lines: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines.decode("latin-1").split("\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:REASON_CHARS].strip()
