"""A sender, and TLS receivers on loopback whose answers a scenario writes byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.certificates import Authority
from vaultevents.dispatch.sender import Reply, Sender
from vaultevents.egress import Guard

NAME = "receiver.example"
BODY = b'{"id":"funding_received_a_0XAB"}'
HEADERS = {"content-type": "application/json", "user-agent": "vaultevents/0", "webhook-id": "funding_received_a_0XAB"}
LOOPBACK = UrlRules(allow=(parse_allow("127.0.0.0/8:*"),))
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Receiver:
    """A TLS server that reads whole requests and lets the test write the bytes of the answer."""

    answer: Answer
    port: int = 0
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    connections: int = 0
    server_names: list[str | None] = field(default_factory=list)
    open: set[asyncio.StreamWriter] = field(default_factory=set)
    arrival: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"https://{NAME}:{self.port}/hook?token=t0ken"

    async def arrived(self, count: int) -> None:
        while len(self.requests) < count:
            self.arrival.clear()
            await self.arrival.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length"))
                self.requests.append((head, await reader.readexactly(length)))
                self.arrival.set()
                await self.answer(writer)
                await writer.drain()


@contextlib.asynccontextmanager
async def receiving(answer: Answer | bytes, tls: ssl.SSLContext) -> AsyncIterator[Receiver]:
    async def write(writer: asyncio.StreamWriter) -> None:
        assert isinstance(answer, bytes)
        writer.write(answer)

    receiver = Receiver(write if isinstance(answer, bytes) else answer)
    tls.sni_callback = lambda _socket, name, _context: receiver.server_names.append(name)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for writer in receiver.open:
            writer.transport.abort()
        await asyncio.sleep(0)


def sender(
    authority: Authority | None,
    *answers: str,
    rules: UrlRules = LOOPBACK,
    connect_timeout_s: float = 5.0,
    total_timeout_s: float = 15.0,
) -> Sender:
    async def lookup(name: str) -> Sequence[str]:
        return answers or ("127.0.0.1",)

    guard = Guard(rules, lookup=lookup)
    ca_file = None if authority is None else authority.ca_path
    return Sender(guard, ca_file=ca_file, connect_timeout_s=connect_timeout_s, total_timeout_s=total_timeout_s)


async def one(answer: Answer | bytes, authority: Authority, total_timeout_s: float = 15.0) -> Reply:
    """The reply to a single delivery."""
    async with receiving(answer, authority.server(NAME)) as receiver:
        async with sender(authority, total_timeout_s=total_timeout_s) as sending:
            reply = await sending.send(receiver.url, BODY, HEADERS)
        assert len(receiver.requests) == 1
        return reply


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)
