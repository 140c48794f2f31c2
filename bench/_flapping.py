"""A receiver that behaves as receivers do in a bad month; in a process of its own. Its path says how it answers.

    /ok     at once                              /close  at once, and closes the connection
    /page   at once, with a page of 128 KiB      /slow   after two seconds
    /flap   503 for 10 s of each 30 s            /reset  resets every fifth connection instead
    /odd    503 to each first attempt

Prints its port, then serves until its stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import count
from pathlib import Path

import uvloop
from _receiver import Receiver

from vaultevents.devnet.certificates import issue

PATHS = ("/ok", "/close", "/page", "/slow", "/flap", "/reset", "/odd")
PAGE = b"x" * 131_072
SLOW_S = 2.0
_requests = count()


def _answer(status: bytes, body: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), more, body)


OK, REFUSED = _answer(b"200 OK", b"ok"), _answer(b"503 Service Unavailable", b"later")
CLOSING = _answer(b"200 OK", b"ok", b"Connection: close\r\n")
LARGE = _answer(b"200 OK", PAGE)


class Flapping(Receiver):
    """One connection."""

    def answer(self, request: bytes) -> None:
        """Answer as the path says."""
        path = request.split(b" ", 2)[1].decode()
        match path:
            case "/close":
                self._transport.write(CLOSING)
                self._transport.close()
            case "/page":
                self._transport.write(LARGE)
            case "/slow":
                asyncio.get_running_loop().call_later(SLOW_S, self._transport.write, OK)
            case "/reset" if next(_requests) % 5 == 0:
                self._transport.abort()
            case "/flap" if time.monotonic() % 30 < 10:
                self._transport.write(REFUSED)
            case "/odd" if b"x-vaultevents-attempt: 1\r\n" in request.lower():
                self._transport.write(REFUSED)
            case _:
                self._transport.write(OK)


async def serve(folder: Path) -> None:
    """Serve until stdin ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Flapping, "127.0.0.1", 0, ssl=issue(folder)[1], backlog=4096)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    await ended.wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[2])))
