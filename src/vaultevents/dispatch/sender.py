"""One POST to a receiver: vetted address, deadlines, no redirects (rules D3, D4, D10 and D12).

    URL ─▶ vet ─▶ a kept connection ──────────────────────────────────────────────▶ POST ─▶ Reply
                ├▶ look up, judge all ─▶ dial the judged one, compare its peer ─▶ TLS ─┤
                └▶ with a proxy: dial it, CONNECT to the receiver ──────────────▶ TLS ─┘

Whatever the receiver does is a `Reply`; an exception is a bug of ours or a cancellation. A POST is written once: what
happened to one that got no answer is unknown, and the next attempt is the dispatcher's to make.

Kept connections belong to an owner and an origin, so that no answer to one owner's POST is taken for another's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self

import msgspec
import structlog

from vaultevents.core.errors import InputError, LocalFault
from vaultevents.core.proxies import Proxy
from vaultevents.core.timing import NO_TIMING, Timing
from vaultevents.dispatch.http_client import READ_BUFFER_BYTES, Connection, Malformed, Pool, ReceiverResponse
from vaultevents.egress import KEEP_ALIVE_S, EgressRefused, Guard, is_address, tls_context
from vaultevents.proxy import ProxyRefused, dial_proxy, open_tunnel

log = structlog.get_logger("sender")

ErrorKind = Literal[
    "refused_url",
    "refused_address",
    "dns",
    "tls",
    "connect_timeout",
    "connect",
    "timeout",
    "reset",
    "protocol",
    "proxy",  # it works, and did not connect to the receiver
    "local",  # this and the next two are faults of this host (core/retries.py, LOCAL_FAULTS): nothing was sent
    "resolver",
    "proxy_down",
    "sealed",  # the webhook's secret cannot be opened: nothing was sent
]

EXCERPT_CHARS: Final = 256
RETRY_AFTER_CHARS: Final = 64
IDLE_CONNECTIONS: Final = 4096
TARGETS: Final = 16_384
DIALS: Final = 16
PATIENCE_S: Final = 0.01
OVERDUE_S: Final = 0.05
"""How often it is looked for attempts whose time is over, so they last longer by at most this."""

# The first that fits names the failure of an answer: special before general.
_KINDS: Final[tuple[tuple[type[Exception], ErrorKind], ...]] = (
    (TimeoutError, "timeout"),
    (Malformed, "protocol"),
    (ssl.SSLError, "tls"),
    (OSError, "reset"),
)


class Reply(msgspec.Struct, frozen=True):
    """What came back: a `status` with complete headers, or the `error` that prevented one; exactly one of them is set.

    `retry_after` is that header's text, `excerpt` at most 256 printable characters of the body, or what is wrong on
    this host; `address` the one connected to, unknown behind a proxy. An attempt that failed after it was sent may
    have arrived: it is unknown, not refused.
    """

    status: int | None
    error: ErrorKind | None
    retry_after: str | None
    excerpt: str
    duration_ms: int
    address: str | None
    timing: Timing = NO_TIMING


class _Origin(NamedTuple):
    """Where connections lead, and for whom; URLs of an origin share them where their owner is the same."""

    owner: str
    host: str
    port: int
    is_tls: bool


@dataclass(frozen=True, slots=True)
class _Target:
    """What is the same for every POST of an owner to a URL: its origin, and how a request to it begins."""

    origin: _Origin
    head: bytes


class _NotConnected(Exception):
    """There is no connection: `kind` says why, `address` which one was there already, `problem` what is wrong here."""

    def __init__(self, kind: ErrorKind, address: str | None = None, problem: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.address = address
        self.problem = problem


class Sender:
    """Posts deliveries over connections kept per owner and origin; a context manager that owns them and the guard.

    With a `proxy` every connection goes through it, and nothing is looked up here.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        ca_file: Path | None = None,
        proxy: Proxy | None = None,
        connect_timeout_s: float = 5.0,
        total_timeout_s: float = 15.0,
    ) -> None:
        self._guard = guard
        self._tls = tls_context(ca_file)
        self._proxy = proxy
        self._connect_timeout_s = connect_timeout_s
        self._total_timeout_s = total_timeout_s
        self._pool = Pool(KEEP_ALIVE_S, IDLE_CONNECTIONS, DIALS, PATIENCE_S)
        self._read_buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        self._busy: set[Connection] = set()
        self._unsent: list[tuple[Connection, bytes]] = []
        self._watch: asyncio.TimerHandle | None = None
        self._target = lru_cache(maxsize=TARGETS)(self._parse)

    async def __aenter__(self) -> Self:
        self._clock = asyncio.get_running_loop().time
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for connection in tuple(self._busy):
            connection.close()
        self._pool.close()
        await self._guard.close()

    def _parse(self, url: str, owner: str) -> _Target:
        """Raises `InputError` for a URL that today's rules refuse (rule D10); the rules of a process do not change."""
        vetted = self._guard.vet(url)
        origin = _Origin(owner, vetted.raw_host or "", vetted.port or 443, vetted.scheme == "https")
        head = f"POST {vetted.raw_path_qs} HTTP/1.1\r\nhost: {vetted.host_port_subcomponent}\r\n"
        return _Target(origin, head.encode("ascii"))

    def try_post(
        self, url: str, body: bytes, headers: Mapping[str, str], done: Callable[[Reply], None], owner: str = ""
    ) -> bool:
        """One attempt, if a kept connection is at hand: `done` is called with its reply, unless this sender closes.

        False: nothing was done, `send` has to. It is the quick way of a busy dispatcher, without a task of its own.
        """
        try:
            target = self._target(url, owner)
        except InputError:
            return False
        connection = self._pool.take(target.origin)
        if connection is None:
            return False
        self._post(target, connection, body, headers, (self._clock(), NO_TIMING), done)
        return True

    async def send(self, url: str, body: bytes, headers: Mapping[str, str], owner: str = "") -> Reply:
        """One attempt, over within the total deadline. A header with a line break is a `ValueError`.

        Connections are shared between attempts of the same `owner` only.
        """
        started_s = self._clock()
        try:
            target = self._target(url, owner)
        except InputError:
            return Reply(None, "refused_url", None, "", 0, None)
        _header_lines(headers)
        timing = NO_TIMING
        connection = self._pool.take(target.origin)
        if connection is None:
            try:
                connection, timing = await self._connect(target.origin, started_s)
            except _NotConnected as problem:
                duration_ms = _ms(self._clock() - started_s)
                return Reply(None, problem.kind, None, problem.problem, duration_ms, problem.address)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def answered(came: Reply) -> None:
            if not reply.cancelled():  # by a caller that does not know it yet
                reply.set_result(came)

        self._post(target, connection, body, headers, (started_s, timing), answered)
        try:
            return await reply
        except asyncio.CancelledError:
            if not reply.done() or reply.cancelled():
                connection.close()
                self._give_back(target.origin, connection)
            raise

    def _post(
        self,
        target: _Target,
        connection: Connection,
        body: bytes,
        headers: Mapping[str, str],
        begun: tuple[float, Timing],
        done: Callable[[Reply], None],
    ) -> None:
        request = b"%scontent-length: %d\r\n%s\r\n%s" % (target.head, len(body), _header_lines(headers), body)

        def answered(answer: ReceiverResponse) -> None:
            reply = _reply(answer, connection.address, begun[0], self._clock(), begun[1])
            self._give_back(target.origin, connection)
            done(reply)

        self._busy.add(connection)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(OVERDUE_S, self._end_overdue)
        connection.begin(begun[0] + self._total_timeout_s, answered)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsent.append((connection, request))

    def _write(self) -> None:
        """Sends what one turn of the loop has begun in one go: a receiver wakes up once for many of them."""
        unsent, self._unsent = self._unsent, []
        for connection, request in unsent:
            connection.write(request)

    def _end_overdue(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(OVERDUE_S, self._end_overdue) if self._busy else None
        now_s = self._clock()
        for connection in [busy for busy in self._busy if busy.deadline_s <= now_s]:
            connection.expire()

    def _give_back(self, origin: _Origin, connection: Connection) -> None:
        self._busy.discard(connection)
        self._pool.put(origin, connection)

    async def _connect(self, origin: _Origin, started_s: float) -> tuple[Connection, Timing]:
        """A connection within the time for DNS, TCP and TLS together, and how long each of them took.

        It may be one that became free meanwhile.
        """
        until_s = started_s + min(self._connect_timeout_s, self._total_timeout_s)
        try:
            freed = await self._pool.wait(origin, until_s)
        except TimeoutError:
            raise _NotConnected("connect_timeout") from None
        if freed is not None:
            return freed, NO_TIMING
        connection = None
        try:
            connection, timing = await self._dial(origin, until_s)
        finally:
            self._pool.dialled(origin, connection)
        return connection, timing

    async def _dial(self, origin: _Origin, until_s: float) -> tuple[Connection, Timing]:
        kind: ErrorKind = "dns"
        address = None
        started_s = self._clock()
        try:
            async with asyncio.timeout_at(until_s):
                if self._proxy is None:
                    resolved = await self._guard.addresses(origin.host, origin.port)
                    known_s = self._clock()
                    kind = "connect"
                    dialled = await self._guard.dial(origin.host, resolved, until_s - known_s)
                    address = str(dialled.getpeername()[0])
                else:
                    known_s, kind = started_s, "proxy_down"
                    self._guard.judge_name(origin.host, origin.port)
                    dialled = await dial_proxy(self._proxy, self._guard.lookup)
                    kind = "connect"
                    await self._tunnel(dialled, self._proxy, origin)
                connected_s, kind = self._clock(), "tls"
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(address, self._read_buffer),
                    sock=dialled,
                    ssl=self._tls if origin.is_tls else None,
                    server_hostname=origin.host if origin.is_tls else None,
                    ssl_handshake_timeout=self._total_timeout_s if origin.is_tls else None,
                )
        except EgressRefused:
            raise _NotConnected("refused_address") from None
        except LocalFault as fault:
            raise _NotConnected(fault.kind, problem=fault.problem) from None
        except ProxyRefused as refusal:
            log.info("proxy_refused", host=origin.host, port=origin.port, status=refusal.status, reason=refusal.reason)
            raise _NotConnected("proxy") from None
        except TimeoutError:
            if kind == "proxy_down":
                raise _NotConnected(kind, problem="the proxy cannot be reached: it does not answer") from None
            raise _NotConnected("connect_timeout", address) from None
        except OSError:
            raise _NotConnected(kind, address) from None
        encrypted_s = self._clock()
        timing = Timing(
            dns_ms=None if self._proxy is not None or is_address(origin.host) else _ms(known_s - started_s),
            connect_ms=_ms(connected_s - known_s),
            tls_ms=_ms(encrypted_s - connected_s) if origin.is_tls else None,
        )
        return connection, timing

    @staticmethod
    async def _tunnel(dialled: socket.socket, proxy: Proxy, origin: _Origin) -> None:
        try:
            await open_tunnel(dialled, proxy, origin.host, origin.port)
        except BaseException:
            dialled.close()
            raise


def _header_lines(headers: Mapping[str, str]) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if "\0" in lines or lines.count("\r") != len(headers) or lines.count("\n") != len(headers):
        raise ValueError("a header has a line break")
    return lines.encode("latin-1")


def _reply(answer: ReceiverResponse, address: str | None, started_s: float, ended_s: float, timing: Timing) -> Reply:
    first_byte_ms = None if answer.first_byte_at_s is None else _ms(answer.first_byte_at_s - started_s)
    error = None
    if answer.failure is not None:
        error = next(kind for error_type, kind in _KINDS if isinstance(answer.failure, error_type))
    retry_after = None
    if answer.retry_after is not None:
        retry_after = answer.retry_after.decode("latin-1")[:RETRY_AFTER_CHARS] or None
    return Reply(
        answer.status,
        error,
        retry_after,
        _printable(answer.body) if answer.body else "",
        _ms(ended_s - started_s),
        address,
        Timing(timing.dns_ms, timing.connect_ms, timing.tls_ms, first_byte_ms),
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _printable(data: bytes) -> str:
    text = data[: 4 * EXCERPT_CHARS].decode("utf-8", "replace")
    if text.isprintable():
        return text[:EXCERPT_CHARS].strip()
    return "".join(c if c.isprintable() else " " for c in text)[:EXCERPT_CHARS].strip()
