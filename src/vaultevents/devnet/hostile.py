"""Receivers that do harm: each breaks TLS, HTTP or patience in one way, on a port of its own.

An answer here is bytes on the wire, written by hand: a real server would refuse to send most of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import socket
import ssl
import struct
import warnings
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from vaultevents.devnet.certificates import Authority

Tls = Literal["good", "expired", "wrong_host", "self_signed", "tls_1_1", "plain_http", "endless_handshake", "silent"]

CANARY: Final = "canary-secret-5b1f"
"""What a receiver that reflects writes into everything it sends."""
METADATA_URL: Final = "https://169.254.169.254/latest/meta-data/"

_DRIP_S: Final = 0.1
_CHUNK: Final = bytes(64 * 1024)
_GIB: Final = 2**30


@dataclass(slots=True)
class Hostile:
    """One receiver that is listening; `requests` are heads and bodies as they arrived, `sent` bytes of answers."""

    url: str
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    connections: int = 0
    sent: int = 0


class Wire:
    """The receiver's end of one connection, and which request this is on it (from 0)."""

    def __init__(self, hostile: Hostile, writer: asyncio.StreamWriter, nth: int) -> None:
        self.nth = nth
        self._hostile = hostile
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._hostile.sent += len(data)
        self._writer.write(data)
        await self._writer.drain()

    async def drip(self, data: bytes) -> None:
        """One byte at a time, each after a pause; begins anew at the end."""
        while True:
            for byte in data:
                await self.send(bytes([byte]))
                await asyncio.sleep(_DRIP_S)

    async def repeat(self, data: bytes, until: float = float("inf")) -> None:
        """The same bytes over and over, as fast as they are taken, until so many were sent."""
        sent = 0
        while sent < until:
            await self.send(data)
            await asyncio.sleep(0)
            sent += len(data)

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Close with RST and not with FIN."""
        connection = self._writer.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Answer = Callable[[Wire, bytes], Awaitable[None]]
"""Writes what follows a request, whose head it is given."""


def saying(data: bytes) -> Answer:
    """Exactly these bytes after each request."""

    async def answer(wire: Wire, _head: bytes) -> None:
        await wire.send(data)

    return answer


def status(line: str, *headers: str, body: bytes = b"") -> bytes:
    """A whole answer with these header lines in this order, duplicates and all."""
    return "\r\n".join([f"HTTP/1.1 {line}", *headers, f"Content-Length: {len(body)}", "", ""]).encode() + body


OK: Final = status("200 OK", body=b"ok")


async def _never(wire: Wire, _head: bytes) -> None:
    await asyncio.Event().wait()


async def _half_a_head(wire: Wire, _head: bytes) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\nContent-Le")
    await asyncio.Event().wait()


async def _dripping_head(wire: Wire, _head: bytes) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\n")
    await wire.drip(b"x-a: b\r\n")


async def _dripping_body(wire: Wire, _head: bytes) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    await wire.drip(b"z")


async def _gigabyte(wire: Wire, _head: bytes) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % _GIB)
    await wire.repeat(_CHUNK, _GIB)


async def _endless_chunks(wire: Wire, _head: bytes) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await wire.repeat(b"10000\r\n" + _CHUNK + b"\r\n")


async def _gzip_bomb(wire: Wire, _head: bytes) -> None:
    bomb = gzip.compress(bytes(2**20)) * 1024  # a GiB of zeros
    await wire.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb))
    await wire.send(bomb)


async def _endless_headers(wire: Wire, _head: bytes) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\n")
    await wire.repeat(b"x-a: b\r\n" * 1000)


async def _million_headers(wire: Wire, _head: bytes) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\n")
    await wire.repeat(b"x-a: b\r\n" * 1000, until=1_000_000 * 8)
    await wire.send(b"Content-Length: 0\r\n\r\n")


async def _endless_header_line(wire: Wire, _head: bytes) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\nx-a: ")
    await wire.repeat(b"b" * 64 * 1024)


async def _interim_storm(wire: Wire, _head: bytes) -> None:
    await wire.repeat(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 100)


async def _reset(wire: Wire, _head: bytes) -> None:
    wire.reset()


async def _closes_when_idle(wire: Wire, _head: bytes) -> None:
    await wire.send(OK)
    await asyncio.sleep(0.05)
    wire.close()


async def _closes_at_the_second(wire: Wire, _head: bytes) -> None:
    if wire.nth:
        wire.close()
    else:
        await wire.send(OK)


async def _broken_chunks(wire: Wire, _head: bytes) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
    await asyncio.sleep(0.05)
    await wire.send(b"ZZ\r\nworld\r\n0\r\n\r\n")


async def _echo(wire: Wire, head: bytes) -> None:
    text = f"{CANARY} you sent ".encode() + head
    await wire.send(status(f"500 {CANARY}", f"x-canary: {CANARY}", f"Server: {CANARY}", body=text))


ANSWERS: Final[Mapping[str, Answer]] = {
    "hangs before headers": _never,
    "hangs inside headers": _half_a_head,
    "drips headers": _dripping_head,
    "drips a body": _dripping_body,
    "streams a gigabyte": _gigabyte,
    "streams chunks without end": _endless_chunks,
    "gzip bomb": _gzip_bomb,
    "headers without end": _endless_headers,
    "a million headers": _million_headers,
    "a header line without end": _endless_header_line,
    "interim answers without end": _interim_storm,
    "redirects to metadata": saying(status("302 Found", f"Location: {METADATA_URL}")),
    "resets after reading": _reset,
    "closes when idle": _closes_when_idle,
    "closes at the second request": _closes_at_the_second,
    "broken chunks": _broken_chunks,
    "sets a cookie": saying(status("200 OK", f"Set-Cookie: session={CANARY}; Path=/; Secure", "Set-Cookie: b=2")),
    "echoes a secret": _echo,
    "speaks no HTTP": saying(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    "is gone": saying(status("410 Gone")),
}
"""The receivers whose TLS is good, by what they do after each request."""

BAD_TLS: Final[Mapping[str, Tls]] = {
    "certificate expired": "expired",
    "certificate of another host": "wrong_host",
    "certificate self-signed": "self_signed",
    "TLS 1.1 only": "tls_1_1",
    "plain HTTP": "plain_http",
    "handshake without end": "endless_handshake",
    "accepts and says nothing": "silent",
}
"""Those with whom no request ever gets through."""


class HostileReceivers:
    """Any number of hostile receivers on 127.0.0.1; `directory` gets the authority's `ca.pem`."""

    def __init__(self, directory: Path) -> None:
        self._authority = Authority(directory)
        self.ca_path = self._authority.ca_path
        self._servers: list[asyncio.Server] = []
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

        self._tls_1_1 = _only_tls_1_1(self._authority)

    async def start(self, answer: Answer, tls: Tls = "good") -> Hostile:
        """Listen on a free port."""
        hostile = Hostile("")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._open[task] = writer
            hostile.connections += 1
            with contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError, OSError):
                await self._serve(hostile, answer, tls, reader, writer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=self._context(tls))
        self._servers.append(server)
        hostile.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
        return hostile

    async def stop(self) -> None:
        """Stop listening and end every connection."""
        for server in self._servers:
            server.close()
        for task, writer in self._open.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*self._open, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close in the next turn of the loop

    async def _serve(
        self, hostile: Hostile, answer: Answer, tls: Tls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        match tls:
            case "plain_http":
                await Wire(hostile, writer, 0).send(status("400 Bad Request"))
            case "endless_handshake":
                await Wire(hostile, writer, 0).drip(b"\x16\x03\x03\x40\x00\x02" + bytes(2**14))
            case "silent":
                await asyncio.Event().wait()
            case "tls_1_1":
                await _shake_hands(self._tls_1_1, reader, writer)
                hostile.requests.append((b"a client that speaks TLS 1.1", b""))
            case _:
                await _answer_all(hostile, answer, reader, writer)

    def _context(self, tls: Tls) -> ssl.SSLContext | None:
        match tls:
            case "plain_http" | "endless_handshake" | "silent" | "tls_1_1":
                return None
            case "wrong_host":
                return self._authority.server("other.example", "127.0.0.9")
            case _:
                return self._authority.server("127.0.0.1", expired=tls == "expired", self_signed=tls == "self_signed")


async def _answer_all(
    hostile: Hostile, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    for nth in itertools.count():
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await reader.readexactly(int(lengths[0]) if lengths else 0)
        hostile.requests.append((head, body))
        await answer(Wire(hostile, writer, nth), head)


def _only_tls_1_1(authority: Authority) -> ssl.SSLContext:
    context = authority.server("127.0.0.1")
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it is what this receiver is for
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


async def _shake_hands(context: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """By hand, because asyncio closes without the alert that names the reason."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=True)
    while True:
        try:
            tls.do_handshake()
            return
        except ssl.SSLWantReadError:
            pass
        finally:
            writer.write(outgoing.read())
        if not (data := await reader.read(2**14)):
            raise ConnectionResetError
        incoming.write(data)
