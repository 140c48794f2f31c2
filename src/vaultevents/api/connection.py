"""uvicorn's HTTP/1.1, with the bounds that it lacks: size of the header block, time for a request to arrive (A17, T17).

What is not well-formed is answered as a problem, too, and ends the connection: what follows cannot be trusted (T18).
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vaultevents.api import problems
from vaultevents.api.problems import Problem

MAX_HEADER_BYTES: Final = 64 * 1024
MAX_REQUEST_BYTES: Final = 256 * 1024
"""Header block, body and what surrounds a body in chunks; the largest body fits in chunks of one byte."""
ARRIVAL_S: Final = 10.0
"""A request must have arrived in full this long after its first byte, and its first byte after the connection."""

_MALFORMED = Problem("request_malformed", "the request is not well-formed HTTP/1.1")
_UPGRADE = Problem("request_malformed", "send a request that has a body without the header 'Upgrade'")
_HEADERS_TOO_LARGE = Problem("headers_too_large", f"send at most {MAX_HEADER_BYTES} bytes of headers")
_BODY_TOO_LARGE = Problem("body_too_large", f"send at most {MAX_REQUEST_BYTES} bytes in all")
_TOO_SLOW = Problem("request_timeout", f"send the whole request within {ARRIVAL_S:g} seconds")


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_headers = True
        self._received = 0  # bytes since the header block began: the parser keeps a long one to itself
        self._parsed = 0  # bytes of the header block so far: many requests may come in one piece
        self._wrong = _MALFORMED  # what to say when the parser gives up
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._expect()
        self._received += len(data)
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]  # a client that would rather speak another protocol gets HTTP/1.1
            except httptools.HttpParserError:
                self._refuse(self._wrong)
                return
        if self._in_headers and self._received > MAX_HEADER_BYTES:
            self._refuse(_HEADERS_TOO_LARGE)
        elif self._received > MAX_REQUEST_BYTES:
            self._refuse(_BODY_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._parsed = True, 0
        self._expect()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are no headers
            self._count(len(name) + len(value) + len(": \r\n"))
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and any(_tells_of_a_body(name, value) for name, value in self.headers):
            self._wrong = _UPGRADE
            raise ValueError("the parser would take the body for another protocol, or for the next request")
        self.scope["state"]["target"] = self.url
        super().on_headers_complete()
        self._in_headers = False
        if self.expect_100_continue:  # its body may follow a refusal, or not: nothing after it could be believed
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._in_headers, self._received = True, 0
        self._relax()
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > MAX_HEADER_BYTES:
            self._wrong = _HEADERS_TOO_LARGE
            raise ValueError("header block too large")  # the parser makes a HttpParserError of it

    def _expect(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(ARRIVAL_S, self._refuse, _TOO_SLOW)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, problem: Problem) -> None:
        """Ends the connection, with this answer unless the request has one or another is to come first."""
        self._relax()
        if self.transport.is_closing():
            return
        if self._in_headers and self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # what arrived in full before gets its answer, and nothing after it is begun
            return
        if self._in_headers or not (self.cycle.response_started or self.pipeline):
            self.transport.write(self._answer(problem))
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.close()

    def _answer(self, problem: Problem) -> bytes:
        content = problems.body(problem, "", secrets.token_hex(8))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", problems.MEDIA_TYPE.encode()),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        status = f"HTTP/1.1 {problem.status} {problems.CODES[problem.code][1]}".encode()
        return b"\r\n".join([status, *(name + b": " + value for name, value in headers), b"", content])


def _tells_of_a_body(name: bytes, value: bytes) -> bool:
    return name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
