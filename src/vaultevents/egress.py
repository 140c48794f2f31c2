"""The one guarded way to a URL that somebody else chose (rule D10).

    URL ─▶ vet ─▶ look up once ─▶ judge ALL addresses ─▶ judge the one being dialled ─▶ compare the peer ─▶ request
        one strict parser       one bad: none is used   literals meet the guard here   before a byte is sent

A kept-alive connection stays bound to the address that was judged. There are no redirects unless the caller asks for
them, no proxy or credentials from the environment, no cookies and no decompression.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import AddrInfoType, Connection
from aiohttp.tracing import Trace
from yarl import URL

from vaultevents.core.errors import LocalFault, VaulteventsError
from vaultevents.core.webhooks import UrlRules, check_url
from vaultevents.resolver import SystemLookup, has_route

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""From a DNS name to all its addresses as text; raises `OSError` when there is no answer."""

HEADER_LINE_BYTES: Final = 8190
HEADER_LINES: Final = 64
READ_BUFFER_BYTES: Final = 16 * 1024
# Common servers close an idle connection after 5 s. Letting go earlier avoids posting into a connection being closed.
KEEP_ALIVE_S: Final = 4.0
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENETDOWN}


class EgressRefused(VaulteventsError):
    """A connection that the rules forbid; nothing was sent."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host
        self.reason = reason


def is_own_address(address: str) -> bool:
    """Whether this host has the address: the kernel then answers from that very address. Sends nothing.

    Raises `LocalFault` where there is no descriptor to find out with: the address must not pass unseen.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0]) == address
    except OSError as problem:
        if problem.errno in _EXHAUSTED:
            raise LocalFault("local", str(problem)) from None
        return False


def _is_local_fault(problem: OSError, address: str) -> bool:
    """Return whether dialling `address` failed for want of something on this host."""
    if problem.errno == errno.EADDRNOTAVAIL:  # no free port, unless it has no address of that family
        return has_route(address)
    if problem.errno == errno.ENETUNREACH:  # no route here, unless a router on the way said so
        return ":" not in address and not has_route(address)
    return problem.errno in _EXHAUSTED


class Guard(AbstractResolver):
    """Judges every URL and address of one session by `rules`. `lookup` and its budget in seconds can be replaced."""

    def __init__(self, rules: UrlRules, *, lookup: Lookup | None = None, lookup_timeout_s: float = 2.0) -> None:
        self._rules = rules
        self._system = SystemLookup()
        self.lookup: Lookup = self._system if lookup is None else lookup
        self._lookup_timeout_s = lookup_timeout_s
        self._permitted = lru_cache(maxsize=4096)(self._judge)
        self._vetted = lru_cache(maxsize=4096)(self._vet)

    def vet(self, url: str) -> URL:
        """The URL for a request, judged by the rules of today, without a look-up; raises `InputError`."""
        return self._vetted(url)

    def _vet(self, url: str) -> URL:
        return URL(check_url(url, self._rules), encoded=True)

    def _judge(self, address: str, port: int) -> bool:
        try:
            return self._rules.permits(ip_address(address), port)
        except ValueError:
            return False

    def check(self, host: str, address: str, port: int) -> None:
        """Raises `EgressRefused` unless `address`, which `host` stands for, may be dialled at `port`."""
        if not self._permitted(address, port):
            raise EgressRefused(host, f"its address {address} is not allowed at port {port}")
        if is_own_address(address) and not self._rules.allows(ip_address(address), port):
            raise EgressRefused(host, f"its address {address} is this host's own")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """All addresses of a name, each of them permitted; `OSError` for no answer, `EgressRefused` if any is not.

        Raises `LocalFault` when this host could not ask.
        """
        try:
            async with asyncio.timeout(self._lookup_timeout_s):
                addresses = await self.lookup(host)
        except TimeoutError:
            raise socket.gaierror(socket.EAI_AGAIN, f"no answer within {self._lookup_timeout_s} s") from None
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "the name has no address")
        for address in addresses:
            self.check(host, address, port)
        return [_resolved(host, address, port) for address in addresses]

    async def addresses(self, host: str, port: int) -> list[ResolveResult]:
        """`resolve`, also for an address written in the URL, which needs no look-up and is judged the same."""
        if not is_address(host):
            return await self.resolve(host, port)
        self.check(host, host, port)
        return [_resolved(host, host, port)]

    def open_socket(self, info: AddrInfoType) -> socket.socket:
        """A socket for the address about to be dialled. Addresses written in the URL skip `resolve`, never this."""
        family, kind, protocol, _, target = info
        address, port = str(target[0]), int(target[1])
        self.check(address, address, port)
        return socket.socket(family, kind, protocol)

    def check_peer(self, host: str, peer: Sequence[Any]) -> str:
        """The address at the other end of a connection; raises `EgressRefused` if it is none that may be dialled."""
        if not self._permitted(str(peer[0]), int(peer[1])):
            raise EgressRefused(host, f"the connection ended at {peer[0]}, which is not allowed")
        return str(peer[0])

    async def dial(self, host: str, resolved: Sequence[ResolveResult], within_s: float) -> socket.socket:
        """A connected socket to the first of the addresses that answers; each has an equal share of the time left.

        Raises `EgressRefused`, `TimeoutError`, `LocalFault`, or the `OSError` of the last address.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        failure: OSError | None = None
        for number, one in enumerate(resolved):
            target = (one["host"], one["port"])
            try:
                dialled = self.open_socket((one["family"], socket.SOCK_STREAM, 0, "", target))
            except OSError as problem:
                if problem.errno in _EXHAUSTED or isinstance(problem, LocalFault):
                    raise LocalFault("local", str(problem)) from None
                failure = problem  # such as a family that this host does not have
                continue
            try:
                dialled.setblocking(False)
                async with asyncio.timeout((end_s - loop.time()) / (len(resolved) - number)):
                    await loop.sock_connect(dialled, target)
                self.check_peer(host, dialled.getpeername())
            except OSError as problem:
                dialled.close()
                if _is_local_fault(problem, one["host"]):
                    raise LocalFault("local", str(problem)) from None
                failure = problem
            except BaseException:
                dialled.close()
                raise
            else:
                return dialled
        try:
            raise failure or TimeoutError()
        finally:
            del failure  # its traceback keeps this frame

    async def close(self) -> None:
        await self._system.close()

    def judge_name(self, host: str, port: int) -> None:
        """Judge the host of a URL that somebody else looks up and dials: an address as ever, a name by `vet` alone.

        Raises `EgressRefused`.
        """
        if is_address(host):
            self.check(host, host, port)


def is_address(host: str) -> bool:
    """Test whether the host of a URL is an IP address, not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _resolved(host: str, address: str, port: int) -> ResolveResult:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=socket.AI_NUMERICHOST)


class _GuardedConnector(aiohttp.TCPConnector):
    """Connections, new or kept alive, are handed out only when their other end is permitted."""

    def __init__(self, guard: Guard, **options: Any) -> None:
        super().__init__(resolver=guard, use_dns_cache=False, socket_factory=guard.open_socket, **options)
        self._guard = guard

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        try:
            found = None if connection.transport is None else connection.transport.get_extra_info("peername")
            if found is None:
                raise aiohttp.ServerDisconnectedError()
            self._guard.check_peer(req.host, found)
        except BaseException:
            connection.close()
            raise
        return connection

    async def close(self, *, abort_ssl: bool = False) -> None:
        await super().close(abort_ssl=abort_ssl)
        await self._guard.close()


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Verifies certificates and names by the system's roots, and by those of `ca_file` (PEM)."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if ca_file is not None:
        context.load_verify_locations(cafile=ca_file)
    return context


def open_session(guard: Guard, *, ca_file: Path | None = None, connect_timeout_s: float = 5.0) -> aiohttp.ClientSession:
    """A client session behind `guard`, which it owns; `connect_timeout_s` covers DNS, TCP and TLS together (rule D4).

    `ca_file` (PEM) is trusted besides the system's roots: for private receivers. Post only to what `guard.vet` returns.
    """
    connector = _GuardedConnector(guard, ssl=tls_context(ca_file), limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        requote_redirect_url=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s, ceil_threshold=3600),
        read_bufsize=READ_BUFFER_BYTES,
        max_line_size=HEADER_LINE_BYTES,
        max_field_size=HEADER_LINE_BYTES,
        max_headers=HEADER_LINES,
    )
