"""Bound uvicorn's HTTP/1.1: size and time of requests, one at a time, answers that are read (rules A17 and T17).

A connection parses no request while another is handled or its answer waits to be read: what a client sends meanwhile
stays in the kernel. What is not well-formed is answered as a problem and ends the connection (rule T18).
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vaultevents.api import problems
from vaultevents.api.admission import Slot
from vaultevents.api.problems import Problem

MAX_HEADER_BYTES: Final = 64 * 1024
MAX_REQUEST_BYTES: Final = 256 * 1024
"""Header block, body and what surrounds a body in chunks; the largest body fits in chunks of one byte."""
ARRIVAL_S: Final = 10.0
"""A request must have arrived in full this long after its first byte, and its first byte after the connection."""
READ_BYTES: Final = 16 * 1024
"""What is read at once, and so the most that a connection holds of requests that wait."""
UNREAD_BYTES: Final = 16 * 1024
"""While more than this of its answers is unread, a connection serves no further request."""
LEAST_BYTES_PER_S: Final = 64 * 1024
"""A large answer has so much more time to be read."""
UNVERIFIED_PAUSE_S: Final = 0.1
"""After a request that did not verify, a connection serves the next one so much later (rule T17)."""
LINGER_S: Final = 1.0
"""After the last answer a client has this long to read it before the connection is cut (RFC 9112 §9.6)."""

_MALFORMED = Problem("request_malformed", "the request is not well-formed HTTP/1.1")
_HOST = Problem("request_malformed", "send the header 'Host' once, with the name of the service")
_HEADERS_TOO_LARGE = Problem("headers_too_large", f"send at most {MAX_HEADER_BYTES} bytes of headers")
_BODY_TOO_LARGE = Problem("body_too_large", f"send at most {MAX_REQUEST_BYTES} bytes in all")
_TOO_SLOW = Problem("request_timeout", f"send the whole request within {ARRIVAL_S:g} seconds")
_HOST_VALUE = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=%:\[\]]*")
_EMPTY_LINE = b"\r\n\r\n"
_FRAMING = (b"content-length", b"transfer-encoding")


class Verification:
    """Whether a request is of a known key; the middleware sets it. It has no reference to the connection."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = False


class BoundedProtocol(HttpToolsProtocol):
    """Serve one connection, on which an answer may stay unread for `answer_s`."""

    def __init__(self, *arguments: Any, slot: Slot, answer_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.flow: _Flow
        self._slot = slot
        self._answer_s = answer_s
        self._unparsed = b""
        self._parsed_to = 0  # of `_unparsed`
        self._seam = b""  # the last bytes before `_parsed_to`, where an empty line may have begun
        self._in_headers = True
        self._receiving = False  # part of a request has been parsed
        self._received = 0  # bytes of this request
        self._body_left: int | None = None  # bytes of a body whose length is known
        self._framing: bytes | None = None  # of a body that the parser would take for another protocol
        self._muted = False  # the parser reads a header block that was handled already
        self._wrong = _MALFORMED  # the answer when the parser fails
        self._ending = False
        self._verification = Verification()
        self._pausing: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.flow = _Flow(transport)
        transport.set_write_buffer_limits(high=UNREAD_BYTES)
        self._slot.opened(transport.abort)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        self._skip_pause()
        self._unset_keepalive_if_required()
        self._slot.release()
        self._ending, self._unparsed = True, b""
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]  # which has a reference to this connection

    def data_received(self, data: bytes) -> None:
        if not self._ending:
            self._unparsed = self._unparsed[self._parsed_to :] + data
            self._parsed_to = 0
            self._parse()

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self._ending:
            self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_keepalive_if_required()
        self._parse()

    def _parse(self) -> None:
        """Parse what was read until a request is complete; the rest waits, and nothing more is read meanwhile."""
        if self._ending or self.transport.is_closing():
            return
        while self._parsed_to < len(self._unparsed) and not self._occupied():
            self._unset_keepalive_if_required()
            self._expect()
            piece = self._next_piece()
            self._received += len(piece)
            if self._in_headers and self._received > MAX_HEADER_BYTES:
                self._refuse(_HEADERS_TOO_LARGE)
            elif self._received > MAX_REQUEST_BYTES:
                self._refuse(_BODY_TOO_LARGE)
            else:
                self._parse_piece(piece)
        waiting = self._parsed_to < len(self._unparsed)
        if waiting and not self.flow.held:
            self.flow.hold()
        elif self.flow.held and not waiting:
            self.flow.release()

    def _occupied(self) -> bool:
        """Is a request handled, are answers unread, or does a pause last?"""
        if self._receiving or self.cycle is None:
            return False
        return not self.cycle.response_complete or self.flow.write_paused or self._pausing is not None

    def _end_pause(self) -> None:
        self._pausing = None
        self._parse()

    def _next_piece(self) -> bytes:
        """Take bytes that complete at most one request: a request ends with an empty line or a body of known length."""
        data, begin = self._unparsed, self._parsed_to
        if self._body_left is not None:
            end = min(begin + self._body_left, len(data))
            self._body_left -= end - begin
        elif (split := (self._seam + data[begin : begin + 3]).find(_EMPTY_LINE)) >= 0:
            end = begin + split + len(_EMPTY_LINE) - len(self._seam)
        else:
            found = data.find(_EMPTY_LINE, begin)
            end = found + len(_EMPTY_LINE) if found >= 0 else len(data)
        self._parsed_to = end
        self._seam = (self._seam + data[max(begin, end - 3) : end])[-3:]
        return data[begin:end]

    def _parse_piece(self, piece: bytes) -> None:
        try:
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:  # a client that prefers another protocol gets HTTP/1.1 (RFC 9110 §7.8)
                if self._framing is not None:
                    self._parse_body_alone(self._framing)
        except httptools.HttpParserError:
            self._refuse(self._wrong)

    def _parse_body_alone(self, framing: bytes) -> None:
        """Give the body of a request with `Upgrade` to a parser that has not seen that header."""
        self._framing = None
        self.parser = httptools.HttpRequestParser(self)
        self._muted = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        self._muted = False

    def on_message_begin(self) -> None:
        if self._muted:
            return
        if self._occupied():
            raise ValueError("a second request in one piece")
        super().on_message_begin()
        self._receiving = True

    def on_url(self, url: bytes) -> None:
        if not self._muted:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are no headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._muted:
            return
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1") or not _plausible(hosts):
            self._wrong = _HOST
            raise ValueError("not one host (RFC 9112 §3.2)")
        self._verification = Verification()
        self.scope["state"] |= {"target": self.url, "verification": self._verification}
        super().on_headers_complete()
        self.cycle.transport = _AnswerTransport(self.transport, self._end)  # type: ignore[assignment]  # all it uses
        self._in_headers = False
        framing = [(name, value) for name, value in self.headers if name in _FRAMING]
        if len(framing) == 1 and framing[0][0] == b"content-length":
            self._body_left = int(framing[0][1])
        if self.parser.should_upgrade() and framing and self._body_left != 0:
            self._framing = b"".join(b"%s: %s\r\n" % field for field in framing)
        if self.expect_100_continue:  # its body may follow a refusal, or not: nothing after it can be trusted
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        if self._framing is not None:
            return
        self._in_headers, self._receiving, self._received = True, False, 0
        self._seam, self._body_left = b"", None
        self._relax()
        super().on_message_complete()
        if self.cycle.response_complete:
            self._await_reader()
        else:
            self._slot.busy()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if not self._ending and not self.transport.is_closing():
            self._slot.idle()
            if not self._receiving:
                self._await_reader()
            if not self._verification.passed:
                self._pausing = self.loop.call_later(UNVERIFIED_PAUSE_S, self._end_pause)
            self._parse()

    def _await_reader(self) -> None:
        """Give the client time to read the answer, and then until the keep-alive ends to send another request."""
        size = self.transport.get_write_buffer_size()
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            min(self._answer_s + size / LEAST_BYTES_PER_S, self.timeout_keep_alive), self._check_reader
        )

    def _check_reader(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            left_s = max(0.0, self.timeout_keep_alive - self._answer_s)
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)

    def _expect(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(ARRIVAL_S, self._refuse, _TOO_SLOW)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _skip_pause(self) -> None:
        if self._pausing is not None:
            self._pausing.cancel()
            self._pausing = None

    def shutdown(self) -> None:
        if not self._ending:
            super().shutdown()

    def _refuse(self, problem: Problem) -> None:
        """End the connection, with this answer unless the request has another already."""
        if self._ending or self.transport.is_closing():
            return
        if self._in_headers or not self.cycle.response_started:
            self.transport.write(answer(problem, self.server_state.default_headers))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._end()

    def _end(self) -> None:
        """End the connection once the client has read the last answer; what it still sends is dropped.

        Closing at once, with input unread, would make the kernel reset the connection and drop the answer.
        """
        self._relax()
        self._skip_pause()
        self._unset_keepalive_if_required()
        if self._ending:
            return
        self._ending, self._unparsed, self._parsed_to = True, b"", 0
        self._slot.idle()
        if self.flow.held:
            self.flow.release()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
        self._deadline = self.loop.call_later(LINGER_S, self._linger, self._answer_s)

    def _linger(self, left_s: float) -> None:
        if left_s > 0 and self.transport.get_write_buffer_size():
            self._deadline = self.loop.call_later(LINGER_S, self._linger, left_s - LINGER_S)
        else:
            self.transport.abort()


class SmallReads(asyncio.BufferedProtocol):
    """Read at most `buffer` at once for a protocol; the event loops read 256 KiB for one without a buffer.

    All connections of an event loop share the buffer: it is empty again when `buffer_updated` returns.
    """

    def __init__(self, protocol: BoundedProtocol, buffer: memoryview) -> None:
        self._protocol = protocol
        self._buffer = buffer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(bytes(self._buffer[:nbytes]))


class _Flow(FlowControl):
    """Do not read while input waits, whatever a response cycle asks for."""

    held = False

    def hold(self) -> None:
        self.held = True
        self.pause_reading()

    def release(self) -> None:
        self.held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class _AnswerTransport:
    """The transport as a response cycle sees it: `close` ends the connection only when the answer is read."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, end


def answer(problem: Problem, default_headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a whole answer that ends the connection."""
    request_id = secrets.token_hex(8)
    content = problems.body(problem, "", request_id)
    headers = [
        *default_headers,
        *((name.encode(), value.encode()) for name, value in problem.headers.items()),
        (b"content-type", problems.MEDIA_TYPE.encode()),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),
        (b"x-request-id", request_id.encode()),
    ]
    status = f"HTTP/1.1 {problem.status} {problems.CODES[problem.code][1]}".encode()
    return b"\r\n".join([status, *(name + b": " + value for name, value in headers), b"", content])


def _plausible(hosts: Sequence[bytes]) -> bool:
    return all(_HOST_VALUE.fullmatch(host.strip(b" \t")) for host in hosts)
