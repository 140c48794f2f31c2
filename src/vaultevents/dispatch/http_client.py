"""A kept connection to a receiver that carries one POST at a time (RFC 9112), parsed by httptools.

    idle ──begin()──▶ waiting ──headers──▶ reading the body ──its end──▶ idle
                        └── anything else: closed, with what is known ──┘

Everything that a receiver may send is bounded: 32 KiB of headers, 64 lines of them, 16 interim answers, 16 KiB of the
body. What comes after the end of an answer belongs to none, so its connection is not used again.

A closed connection drops its parser, buffers and callbacks, so that reference counting frees it at once: the parser
refers back to its connection, and the garbage collector runs rarely.
"""

from __future__ import annotations

import asyncio
import select
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Final, cast

import httptools
import msgspec

HEADERS_LIMIT_BYTES: Final = 32 * 1024
HEADERS_LIMIT_LINES: Final = 64
INTERIM_LIMIT: Final = 16
BODY_LIMIT_BYTES: Final = 16 * 1024
READ_BUFFER_BYTES: Final = 64 * 1024


class ReceiverResponse(msgspec.Struct):
    """What came back on a connection: a final `status` with complete headers, or none and the `failure`."""

    status: int | None = None
    retry_after: bytes | None = None
    body: bytes = b""
    first_byte_at_s: float | None = None
    failure: Exception | None = None


_NO_RESPONSE: Final = ReceiverResponse()
"""That of an idle connection; nothing is written to it."""


class Malformed(Exception):
    """What came back is no HTTP answer, or more than it may be."""


class Connection(asyncio.BufferedProtocol):
    """The protocol of one transport. `address` is where it leads; `usable` while another POST may be sent.

    The caller has to call `expire` when `deadline_s` (loop's clock) is over: a timer for each POST costs too much.
    Transports read into `read_buffer`, which all connections of a loop share: each read is copied out before the next.
    Else uvloop would allocate 256 KiB for each read over TLS, which the system maps and unmaps each time. It is a view
    because asyncio's TLS slices it for a second record, and a slice of a bytearray is a copy.
    """

    def __init__(self, address: str | None, read_buffer: memoryview) -> None:
        self.address = address
        self.usable = True
        self.idle_since_s = 0.0
        self.deadline_s = 0.0
        self._read_buffer = read_buffer
        self._loop = asyncio.get_running_loop()
        self._done: Callable[[ReceiverResponse], None] | None = None
        self._answer = _NO_RESPONSE
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._poll: select.poll | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)  # goes on after an answer that left the connection usable

    def is_quiet(self) -> bool:
        """Return whether an idle connection may carry another POST: it is open and nothing waits to be read from it.

        Bytes that nobody asked for would be taken for the next answer, and an end that was not read yet would fail it.
        """
        if not self.usable or self._transport is None:
            return False
        if self._poll is None:
            if not hasattr(select, "poll"):  # Windows
                return True
            self._poll = select.poll()
            self._poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        if self._poll.poll(0):
            self.close()
        return self.usable

    def begin(self, deadline_s: float, done: Callable[[ReceiverResponse], None]) -> None:
        """A POST whose request is about to be written; `done` is called with its answer, or with what ended it."""
        self._answer = ReceiverResponse()
        self._header_bytes = self._header_lines = self._unparsed_bytes = self._interim = 0
        self._is_sent = self._in_body = self._ended = self._begun_again = False
        self._done = done
        self.deadline_s = deadline_s

    def write(self, request: bytes) -> None:
        """Sends the whole request, unless the connection has ended meanwhile."""
        if self._done is not None and self._transport is not None:
            self._is_sent = True
            self._transport.write(request)

    def close(self) -> None:
        """End the connection at once; what was under way is reported to nobody."""
        transport = self._transport
        self._release()
        if transport is not None:
            transport.abort()

    def _release(self) -> None:
        self.usable = False
        self._done = self._transport = self._parser = self._poll = None
        self._answer = _NO_RESPONSE

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._done is None:  # nobody asked for anything
            self.close()
            return
        if not self._is_sent:  # such as a 408 for having been idle: it answers nothing of ours
            self._fail(ConnectionResetError("an answer came before its request"))
            return
        answer, parser = self._answer, self._parser
        assert parser is not None
        if answer.first_byte_at_s is None:
            answer.first_byte_at_s = self._loop.time()
        try:
            parser.feed_data(bytes(self._read_buffer[:nbytes]))
        except httptools.HttpParserUpgrade:
            self._finish(keep=False)
            return
        except Exception as problem:  # a callback's, which httptools wraps, or its own
            self._fail(Malformed(str(problem)))
            return
        if self._ended:
            self._finish(keep=self._reusable and not self._begun_again)
        elif self._in_body:
            if len(answer.body) >= BODY_LIMIT_BYTES:
                self._finish(keep=False)
        else:
            self._unparsed_bytes += nbytes
            if self._unparsed_bytes > HEADERS_LIMIT_BYTES:
                self._fail(Malformed("headers without end"))

    def eof_received(self) -> None:
        """The receiver sends no more: a body without a length ends here, and the transport closes itself."""
        self._lost(None)

    def connection_lost(self, problem: Exception | None) -> None:
        self._lost(problem)
        self._release()

    def _lost(self, problem: Exception | None) -> None:
        self.usable = False
        if self._done is not None:
            self._fail(problem or ConnectionResetError("the connection ended without an answer"))

    def expire(self) -> None:
        """The time of the POST that is under way is over."""
        self._fail(TimeoutError())

    def _fail(self, problem: Exception) -> None:
        """Complete headers have decided already: what goes wrong after them changes nothing (rule D3)."""
        if self._done is not None and not self._in_body:
            self._answer.status = None
            self._answer.failure = problem
        self._finish(keep=False)

    def _finish(self, *, keep: bool) -> None:
        done, answer = self._done, self._answer
        if done is None:
            return
        self._done = None
        self._answer = _NO_RESPONSE
        if not keep:
            self.close()
        done(answer)  # which may post again: nothing of this answer is needed after it

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._begun_again = self._ended

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        self._header_lines += 1
        if self._header_bytes > HEADERS_LIMIT_BYTES or self._header_lines > HEADERS_LIMIT_LINES:
            raise Malformed("too many headers")
        if len(name) == 11 and name.lower() == b"retry-after" and not self._ended:
            self._answer.retry_after = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if not self._ended and (status >= 200 or status == 101):
            self._answer.status = status
            self._in_body = True

    def on_body(self, data: bytes) -> None:
        answer = self._answer
        if not self._ended and len(answer.body) < BODY_LIMIT_BYTES:
            answer.body += data[: BODY_LIMIT_BYTES - len(answer.body)]

    def on_message_complete(self) -> None:
        if self._in_body:
            self._ended = True
            assert self._parser is not None
            self._reusable = self._parser.should_keep_alive()
        else:
            self._answer.retry_after = None  # that of an interim answer
            self._interim += 1
            if self._interim > INTERIM_LIMIT:
                raise Malformed("interim answers without end")


class Pool:
    """Connections by the origin they lead to: idle ones, and who waits for one.

    Idle connections are closed after `keep_s` without use, and when there are more than `at_most`. Of one origin only
    `dials` are being opened at a time, and with as many open a caller waits up to `patience_s` for one that
    becomes free: a handshake costs some twenty POSTs, and a burst needs few connections where answers are quick.
    """

    def __init__(self, keep_s: float, at_most: int, dials: int, patience_s: float) -> None:
        self._keep_s = keep_s
        self._at_most = at_most
        self._dials = dials
        self._patience_s = patience_s
        self._idle: dict[Hashable, list[Connection]] = {}
        self._number = 0
        self._open: Counter[Hashable] = Counter()
        self._dialling: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[tuple[float, asyncio.Future[Connection | None]]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, origin: Hashable) -> Connection | None:
        """The connection that was used last, so that those that are not needed end."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            self._number -= 1
            if connection.is_quiet():
                return connection
            self._forget(self._open, origin)
        return None

    async def wait(self, origin: Hashable, until_s: float) -> Connection | None:
        """A connection that somebody gave back, or None: now it may be dialled, and `dialled` has to be called.

        Raises `TimeoutError` soon after `until_s` of the loop's clock.
        """
        if self._may_dial(origin) and self._open[origin] < self._dials:
            self._dialling[origin] += 1
            return None
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Connection | None] = loop.create_future()
        if origin not in self._waiting:
            self._waiting[origin] = deque()
            loop.call_later(self._patience_s, self._lose_patience, origin)
        self._waiting[origin].append((until_s, turn))
        try:
            return await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # meant for the one that gave up
                given = turn.result()
                if given is None:
                    self.dialled(origin, None)
                else:
                    self.put(origin, given)
            raise

    def dialled(self, origin: Hashable, connection: Connection | None) -> None:
        """A dial is over; None when it failed. The connection is the caller's until it is `put`."""
        self._forget(self._dialling, origin)
        if connection is not None:
            self._open[origin] += 1
        if self._open[origin] < self._dials:
            self._let_dial(origin)

    def put(self, origin: Hashable, connection: Connection) -> None:
        """Hands it on or keeps it if another POST may be sent on it, and closes it if there are too many."""
        if connection.usable and self._hand(origin, connection):
            return
        if self._number >= self._at_most:
            connection.close()
        if not connection.usable:
            self._forget(self._open, origin)
            if self._open[origin] < self._dials:
                self._let_dial(origin)
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.setdefault(origin, []).append(connection)
        self._number += 1
        if self._timer is None:
            self._timer = loop.call_later(self._keep_s / 4, self._sweep)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _may_dial(self, origin: Hashable) -> bool:
        return self._dialling[origin] < self._dials

    def _let_dial(self, origin: Hashable) -> None:
        """Wake one waiter that may dial."""
        if self._may_dial(origin) and self._hand(origin, None):
            self._dialling[origin] += 1

    def _lose_patience(self, origin: Hashable) -> None:
        """Wake all that may dial, and fail those whose time is over."""
        waiting, now_s = self._waiting[origin], asyncio.get_running_loop().time()
        while waiting and waiting[0][0] <= now_s:
            _, turn = waiting.popleft()
            if not turn.done():
                turn.set_exception(TimeoutError())
        while self._may_dial(origin) and self._hand(origin, None):
            self._dialling[origin] += 1
        if waiting:
            asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience, origin)
        else:
            del self._waiting[origin]

    def _hand(self, origin: Hashable, connection: Connection | None) -> bool:
        waiting = self._waiting.get(origin)
        while waiting:
            _, turn = waiting.popleft()
            if not turn.done():
                turn.set_result(connection)
                return True
        return False

    @staticmethod
    def _forget(counts: Counter[Hashable], origin: Hashable) -> None:
        counts[origin] -= 1
        if not counts[origin]:
            del counts[origin]

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() - self._keep_s
        kept: dict[Hashable, list[Connection]] = {}
        for origin, connections in self._idle.items():
            for connection in connections:
                if connection.usable and connection.idle_since_s > until_s:
                    kept.setdefault(origin, []).append(connection)
                else:
                    connection.close()
                    self._forget(self._open, origin)
        self._idle = kept
        self._number = sum(map(len, kept.values()))
        self._timer = loop.call_later(self._keep_s / 4, self._sweep) if kept else None
