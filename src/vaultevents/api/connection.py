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
ARRIVAL_S: Final = 10.0
"""A request must have arrived in full this long after its first byte, and its first byte after the connection."""

_MALFORMED = Problem("request_malformed", "the request is not well-formed HTTP/1.1")
_TOO_LARGE = Problem("headers_too_large", f"send at most {MAX_HEADER_BYTES} bytes of headers")
_TOO_SLOW = Problem("request_timeout", f"send the whole request within {ARRIVAL_S:g} seconds")


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_headers = True
        self._received = 0  # bytes since the header block began: the parser keeps a long one to itself
        self._parsed = 0  # bytes of the header block so far: many requests may come in one piece
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deadline is None:
            self._expect()
        self._received += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # a client that would rather speak another protocol gets HTTP/1.1
        except httptools.HttpParserError:
            self._refuse(_TOO_LARGE if self._parsed > MAX_HEADER_BYTES else _MALFORMED)
        else:
            if self._in_headers and self._received > MAX_HEADER_BYTES:
                self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._parsed = True, 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are no headers
            self._count(len(name) + len(value) + len(": \r\n"))
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self.scope["state"]["target"] = self.url
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers, self._received = True, 0
        self._relax()
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > MAX_HEADER_BYTES:
            raise ValueError("header block too large")  # the parser makes a HttpParserError of it

    def _expect(self) -> None:
        self._relax()
        self._deadline = self.loop.call_later(ARRIVAL_S, self._refuse, _TOO_SLOW)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, problem: Problem) -> None:
        self._relax()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else an answer is under way: nothing may get into it
            self.transport.write(self._answer(problem))
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
