"""The one guarded way to a URL that somebody else chose (decisions D10).

    URL ─▶ vet ─▶ look up once ─▶ judge ALL addresses ─▶ judge the one being dialled ─▶ compare the peer ─▶ request
        one strict parser       one bad: none is used   literals meet the guard here   before a byte is sent

A kept-alive connection stays bound to the address that was judged. There are no redirects unless the caller asks for
them, no proxy or credentials from the environment, no cookies and no decompression.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import AddrInfoType, Connection
from aiohttp.tracing import Trace
from yarl import URL

from vaultevents.core.errors import VaulteventsError
from vaultevents.core.webhooks import UrlRules, check_url

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""From a DNS name to all its addresses as text; raises `OSError` when there is no answer."""

HEADER_LINE_BYTES: Final = 8190
HEADER_LINES: Final = 64
READ_BUFFER_BYTES: Final = 16 * 1024
# Common servers close an idle connection after 5 s. Letting go earlier avoids posting into a connection being closed.
KEEP_ALIVE_S: Final = 4.0
# A dead name server holds a thread for up to some 20 s; this many dead names do not delay the others.
LOOKUP_THREADS: Final = 64


class EgressRefused(VaulteventsError):
    """A connection that the rules forbid; nothing was sent."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host
        self.reason = reason


class SystemLookup:
    """The system's resolver on threads of its own, shared by overlapping look-ups of one name.

    With the event loop's few default threads, a handful of webhooks with a dead name server would stop all others.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="dns")
        self._pending: dict[str, asyncio.Future[list[str]]] = {}

    async def __call__(self, name: str) -> list[str]:
        answer = self._pending.get(name)
        if answer is None:
            answer = asyncio.get_running_loop().run_in_executor(self._threads, _addresses, name)
            self._pending[name] = answer
            answer.add_done_callback(lambda done: self._forget(name, done))
        return await asyncio.shield(answer)

    def _forget(self, name: str, done: asyncio.Future[list[str]]) -> None:
        self._pending.pop(name, None)
        if not done.cancelled():
            done.exception()  # every waiter may have given up already

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses(name: str) -> list[str]:
    # As bytes: the interpreter's own IDNA rules are not those the name was checked with.
    found = socket.getaddrinfo(name.encode("ascii"), None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def is_own_address(address: str) -> bool:
    """Whether this host has the address: the kernel then answers from that very address. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0]) == address
    except OSError:
        return False


class Guard(AbstractResolver):
    """Judges every URL and address of one session by `rules`. `lookup` and its budget in seconds can be replaced."""

    def __init__(self, rules: UrlRules, *, lookup: Lookup | None = None, lookup_timeout_s: float = 1.0) -> None:
        self._rules = rules
        self._system = SystemLookup()
        self._lookup: Lookup = self._system if lookup is None else lookup
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
        """All addresses of a name, each of them permitted; `OSError` for no answer, `EgressRefused` if any is not."""
        try:
            async with asyncio.timeout(self._lookup_timeout_s):
                addresses = await self._lookup(host)
        except TimeoutError:
            raise socket.gaierror(socket.EAI_AGAIN, f"no answer within {self._lookup_timeout_s} s") from None
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "the name has no address")
        for address in addresses:
            self.check(host, address, port)
        return [_resolved(host, address, port) for address in addresses]

    async def addresses(self, host: str, port: int) -> list[ResolveResult]:
        """`resolve`, also for an address written in the URL, which needs no look-up and is judged the same."""
        try:
            ip_address(host)
        except ValueError:
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

        Raises `EgressRefused`, `TimeoutError`, or the `OSError` of the last address.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        problem: OSError = TimeoutError()
        for number, one in enumerate(resolved):
            target = (one["host"], one["port"])
            dialled = self.open_socket((one["family"], socket.SOCK_STREAM, 0, "", target))
            try:
                dialled.setblocking(False)
                async with asyncio.timeout((end_s - loop.time()) / (len(resolved) - number)):
                    await loop.sock_connect(dialled, target)
                self.check_peer(host, dialled.getpeername())
            except OSError as failure:
                dialled.close()
                problem = failure
            except BaseException:
                dialled.close()
                raise
            else:
                return dialled
        raise problem

    async def close(self) -> None:
        self._system.close()


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
    """A client session behind `guard`, which it owns; `connect_timeout_s` covers DNS, connect and TLS together (D4).

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
