"""A forward proxy on loopback that speaks CONNECT, as Smokescreen does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

Refusal = Callable[[str], bytes | None]
"""What the proxy answers to a CONNECT for `host:port` instead of opening it; None opens it."""

OPENED = b"HTTP/1.1 200 Connection established\r\n\r\n"
DENIED = b"HTTP/1.1 407 Request rejected by proxy\r\nX-Smokescreen-Error: denied by rule\r\nContent-Length: 0\r\n\r\n"


@dataclass
class ConnectProxy:
    """Looks every name up as loopback, and keeps what it was asked."""

    refuse: Refusal = lambda target: None
    port: int = 0
    heads: list[str] = field(default_factory=list)
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def targets(self) -> list[str]:
        return [head.split(" ")[1] for head in self.heads]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            target = head.split(" ")[1]
            refusal = self.refuse(target)
            if refusal is not None:
                writer.write(refusal)
                await writer.drain()
            else:
                there, onward = await asyncio.open_connection("127.0.0.1", int(target.rpartition(":")[2]))
                self.open.add(onward)
                writer.write(OPENED)
                await asyncio.gather(_copy(reader, onward), _copy(there, writer))
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def connect_proxy(refuse: Refusal | None = None) -> AsyncIterator[ConnectProxy]:
    proxy = ConnectProxy() if refuse is None else ConnectProxy(refuse)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for writer in proxy.open:
            writer.transport.abort()
        await asyncio.sleep(0)
