"""A receiver for the benchmarks of delivery: answers every POST with 200, some paths never; in a process of its own.

As lean as the floor client, so that neither figure waits for it. Prints its port, then serves until its stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import cast

import uvloop

from vaultevents.devnet.certificates import issue

ANSWER = (  # as long as a common web server's
    b"HTTP/1.1 200 OK\r\nServer: receiver\r\nDate: Sat, 21 Nov 2026 09:00:00 GMT\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 2\r\nConnection: keep-alive\r\n\r\nok"
)
HANGS = b"POST /hang"
SLOW, WEAK = b"POST /slow", b"POST /weak"
TAKES_S = 0.05  # slow ones and weak ones, which refuse what exceeds so many at once:
WEAK_AT_ONCE = 20
REFUSAL = ANSWER.replace(b"200 OK", b"503 Busy")


class Receiver(asyncio.Protocol):
    """One connection; requests carry a `content-length` and come one at a time."""

    at_once = 0  # of the weak path

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data if self._buffer else data
        head_end = data.find(b"\r\n\r\n")
        if head_end < 0:
            self._buffer = data
            return
        length = data[:head_end].lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if len(data) < head_end + 4 + int(length):
            self._buffer = data
            return
        self._buffer = b""
        self.answer(data)

    def answer(self, request: bytes) -> None:
        """A whole request has arrived."""
        if request.startswith((SLOW, WEAK)):
            self._answer_late(weak=request.startswith(WEAK))
        elif not request.startswith(HANGS):
            self._transport.write(ANSWER)

    def _answer_late(self, *, weak: bool) -> None:
        if weak and Receiver.at_once >= WEAK_AT_ONCE:
            self._transport.write(REFUSAL)
            return
        Receiver.at_once += weak
        asyncio.get_running_loop().call_later(TAKES_S, self._late, weak)

    def _late(self, weak: bool) -> None:
        Receiver.at_once -= weak
        if not self._transport.is_closing():
            self._transport.write(ANSWER)


async def serve(scheme: str, folder: Path) -> None:
    context = None if scheme == "http" else issue(folder)[1]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Receiver, "127.0.0.1", 0, ssl=context, backlog=4096)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    await ended.wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], Path(sys.argv[2])))
