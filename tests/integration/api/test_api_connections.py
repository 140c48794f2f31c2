"""Connections of the API server: what is pipelined, never read, idle or too many costs neither memory nor good clients.

The application here is the smallest: what is tested is the server before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from api_fixtures import ApiResponse, read_answer
from timeouts import WAIT_TIMEOUT_S, until
from vaultevents.api.connection import UNVERIFIED_PAUSE_S, BoundedProtocol
from vaultevents.api.server import ServerOptions, bind, serve, url_of
from vaultevents.devnet.certificates import issue

pytestmark = pytest.mark.integration

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n"
HELD = b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE_BYTES = 300_000


@dataclass
class Served:
    """A server whose requests to `/held` are answered when the test says so; `/unknown` does not verify."""

    host: str
    port: int
    release: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[str] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append(scope["path"])
        if scope["path"] != "/unknown":
            scope["state"]["verification"].passed = True
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/held":
            await self.release.wait()
        content = b"x" * LARGE_BYTES if scope["path"] == "/large" else scope["path"].encode() + body
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", str(len(content)).encode())],
            }
        )
        await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def serving(options: ServerOptions) -> AsyncIterator[Served]:
    listener, stop = bind(options), asyncio.Event()
    parts = urlsplit(url_of(listener, options))
    assert parts.hostname is not None
    assert parts.port is not None
    served = Served(parts.hostname, parts.port)
    task = asyncio.create_task(serve(served, listener, options, time.time, stop))
    try:
        yield served
    finally:
        served.release.set()
        await close(served.clients)
        stop.set()
        await task


@dataclass(frozen=True, slots=True)
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes = GET) -> ApiResponse:
        self.writer.write(request)
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            return await read_answer(self.reader)

    async def ended(self) -> bool:
        """Wait until the server has ended the connection."""
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            try:
                return await self.reader.read() is not None
            except ConnectionError:
                return True


async def connect(served: Served, address: str = "127.0.0.1") -> Client:
    client = Client(*await asyncio.open_connection(served.host, served.port, local_addr=(address, 0)))
    served.clients.append(client)
    return client


async def close(clients: Sequence[Client]) -> None:
    for client in clients:
        client.writer.close()
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def test_pipelined_requests_whose_answers_nobody_reads() -> None:
    """A good client is answered meanwhile, memory stays, and the others are ended though they go on sending."""
    async with serving(ServerOptions(port=0, answer_s=1.0)) as served:
        good = await connect(served)
        await good.ask()
        before_mb = rss_mb()
        junk = GET * (256 * 1024 // len(GET))
        hostile = []
        for _ in range(8):
            peer = socket.socket()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect((served.host, served.port))
            peer.setblocking(False)
            hostile.append(peer)
        ended: set[socket.socket] = set()

        def push() -> None:
            for peer in hostile:
                try:
                    peer.send(junk)
                except BlockingIOError:
                    pass
                except OSError:
                    ended.add(peer)

        waits, peaks = [], []
        give_up_at = time.monotonic() + WAIT_TIMEOUT_S
        while len(ended) < len(hostile):
            assert time.monotonic() < give_up_at, f"{len(hostile) - len(ended)} connections are still served"
            push()
            began_s = time.monotonic()
            assert (await good.ask()).status == 200
            waits.append(time.monotonic() - began_s)
            peaks.append(rss_mb())
        grown_mb = max(peaks) - before_mb
        print(f"{grown_mb:.1f} MB more, the good client waited {max(waits) * 1000:.0f} ms at most")
        assert grown_mb < 30
        assert max(waits) < 5
        for peer in hostile:
            peer.close()


async def test_a_client_that_reads_slowly_gets_every_answer_in_order() -> None:
    """The bound on unread answers is for those who read nothing."""
    async with serving(ServerOptions(port=0, answer_s=2.5)) as served:
        client = await connect(served)
        for number in range(300):
            client.writer.write(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number)
        client.writer.write(LARGE * 5)
        for number in range(300):
            assert (await client.ask(b"")).body == b"/%d" % number
        for _ in range(5):
            await asyncio.sleep(0.6)
            assert len((await client.ask(b"")).body) == LARGE_BYTES


async def test_requests_that_do_not_verify_are_served_slowly() -> None:
    """A flood of them would take the time of all others; only the connection that sends them waits."""
    async with serving(ServerOptions(port=0)) as served:
        client, other = await connect(served), await connect(served)
        began_s = time.monotonic()
        client.writer.write(b"GET /unknown HTTP/1.1\r\nhost: x\r\n\r\n" * 6)
        client.writer.write(b"GET /last HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        assert (await client.ask(b"")).body == b"/unknown"
        assert (await other.ask()).status == 200
        assert served.begun.count("/last") == 0
        assert [(await client.ask(b"")).body for _ in range(7)] == [b"/unknown"] * 5 + [b"/last"] * 2
        assert time.monotonic() - began_s >= 6 * UNVERIFIED_PAUSE_S


async def test_a_large_answer_that_is_never_read_is_given_up() -> None:
    async with serving(ServerOptions(port=0, answer_s=0.5)) as served:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect((served.host, served.port))
        peer.sendall(LARGE * 50)
        await until(lambda: _cut_off(peer))
        assert len(served.begun) < 5
        peer.close()


def _cut_off(peer: socket.socket) -> bool:
    """Does the server refuse what is sent? Nothing is read."""
    try:
        peer.send(b"\r\n")
    except ConnectionError:
        return True
    return False


async def test_requests_in_any_pieces_are_the_same_requests() -> None:
    """One request at a time is parsed, wherever the pieces end: each gets its answer, in order, and nothing else."""
    random.seed(20261122)
    requests, bodies = [], []
    for number in range(120):
        body = random.randbytes(random.choice((0, 1, 7, 400))) + random.choice((b"", b"\r\n\r\n", GET))
        head = b"POST /%d HTTP/1.1\r\nhost: x\r\n" % number
        framing = random.choice(("length", "chunks", "none"))
        if framing == "none":
            requests.append(random.choice((b"", b"\r\n")) + b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number)
            body = b""
        elif framing == "length":
            requests.append(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        else:
            size = random.choice((1, 3, 1000))
            parts = [body[at : at + size] for at in range(0, len(body), size)]
            chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n"
            trailer = random.choice((b"", b"x-trailer: y\r\n"))
            requests.append(head + b"transfer-encoding: chunked\r\n\r\n" + chunked + trailer + b"\r\n")
        bodies.append(b"/%d" % number + body)
    whole = b"".join(requests)
    async with serving(ServerOptions(port=0)) as served:
        for longest in (1, 5, 100, 20_000):
            client = await connect(served)

            async def send(client: Client = client, longest: int = longest) -> None:
                at = 0
                while at < len(whole):
                    size = random.randint(1, longest)
                    client.writer.write(whole[at : at + size])
                    at += size
                    if longest > 50 or random.random() < 0.02:
                        await asyncio.sleep(0)
                await client.writer.drain()

            sending = asyncio.create_task(send())
            assert [(await client.ask(b"")).body for _ in bodies] == bodies
            await sending
            assert (await client.ask()).body == b"/"
            client.writer.close()


async def test_the_longest_idle_connection_makes_room() -> None:
    async with serving(ServerOptions(port=0, max_connections=4, connections_per_address=4)) as served:
        clients = [await connect(served) for _ in range(4)]
        for client in clients:
            await client.ask()
        await clients[0].ask()  # now the second is idle longest
        newcomer = await connect(served)
        assert (await newcomer.ask()).status == 200
        assert await clients[1].ended()
        for client in (clients[0], clients[2], clients[3]):
            assert (await client.ask()).status == 200


async def test_where_none_is_idle_others_wait_to_be_accepted() -> None:
    async with serving(ServerOptions(port=0, max_connections=3)) as served:
        busy = [await connect(served) for _ in range(3)]
        for client in busy:
            client.writer.write(HELD)
        await until(lambda: served.begun == ["/held"] * 3)
        waiting = await connect(served)  # accepted by the kernel alone
        waiting.writer.write(GET)
        await asyncio.sleep(0.2)
        assert served.begun == ["/held"] * 3
        served.release.set()
        assert (await waiting.ask(b"")).status == 200
        for client in busy[1:]:
            assert (await client.ask(b"")).body == b"/held", "a request under way is never ended for another"


async def test_one_address_does_not_fill_the_server() -> None:
    async with serving(ServerOptions(port=0, max_connections=20, connections_per_address=5)) as served:
        other = await connect(served, "127.0.0.2")
        await other.ask()
        crowd = [await connect(served) for _ in range(12)]
        for client in crowd[-5:]:
            assert (await client.ask()).status == 200
        assert all([await client.ended() for client in crowd[:-5]])
        for client in crowd[-5:]:
            client.writer.write(HELD)
        await until(lambda: served.begun.count("/held") == 5)
        refused = await (await connect(served)).ask(b"")
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "too_many_connections", "1")
        assert (await other.ask()).status == 200
        assert (await (await connect(served, "127.0.0.3")).ask()).status == 200


async def test_a_trusted_proxy_is_many_clients() -> None:
    options = ServerOptions(port=0, connections_per_address=2, trusted_proxies=("127.0.0.2/32",))
    async with serving(options) as served:
        proxied = [await connect(served, "127.0.0.2") for _ in range(10)]
        for client in proxied:
            assert (await client.ask()).status == 200
        direct = [await connect(served) for _ in range(3)]
        assert await direct[0].ended()
        for client in proxied:
            assert (await client.ask()).status == 200


async def test_a_connection_ends_with_its_keep_alive_and_leaves_nothing() -> None:
    """Without the garbage collector, which the daemon lets run rarely."""
    async with serving(ServerOptions(port=0)) as served:
        gc.collect()
        gc.disable()
        try:
            for request in (
                GET,
                GET.replace(b"host", b"connection: close\r\nhost"),
                b"nonsense\r\n\r\n",
                GET + GET[:9],
            ):
                for _ in range(25):
                    client = await connect(served)
                    await client.ask(request)
                    await close([client])
            await until(lambda: _connections() == 0)
        finally:
            gc.enable()


async def test_connections_over_tls_are_bounded_from_the_accept_on(tmp_path: Path) -> None:
    """Those that never shake hands make room like idle ones; requests in pieces are answered as in the clear."""
    ca_path, _ = issue(tmp_path)
    pem = tmp_path / "server.pem"
    async with serving(ServerOptions(port=0, certificate_file=pem, key_file=pem, max_connections=3)) as served:
        silent = [await connect(served) for _ in range(6)]
        for _ in range(2):
            context = ssl.create_default_context(cafile=ca_path)
            client = Client(*await asyncio.open_connection(served.host, served.port, ssl=context))
            served.clients.append(client)
            for piece in (GET[:7], GET[7:] + GET + LARGE[:9], LARGE[9:]):
                client.writer.write(piece)
                await asyncio.sleep(0.05)
            assert [(await client.ask(b"")).body for _ in range(2)] == [b"/"] * 2
            assert len((await client.ask(b"")).body) == LARGE_BYTES
        assert all([await client.ended() for client in silent[:5]])


@pytest.mark.parametrize(
    "test",
    [
        test_a_client_that_reads_slowly_gets_every_answer_in_order,
        test_requests_that_do_not_verify_are_served_slowly,
        test_requests_in_any_pieces_are_the_same_requests,
        test_the_longest_idle_connection_makes_room,
        test_a_connection_ends_with_its_keep_alive_and_leaves_nothing,
    ],
)
def test_the_daemons_event_loop_does_the_same(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The daemon runs on uvloop, whose transports differ in what they read and when they write."""
    uvloop.run(test())


def _connections() -> int:
    return sum(isinstance(found, BoundedProtocol) for found in gc.get_objects())


SERVER = """
import asyncio, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
from vaultevents.devnet.certificates import issue
from vaultevents.api.server import ServerOptions, bind, serve, url_of

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})

async def main():
    options = ServerOptions(port=0, max_connections=int(sys.argv[1]), connections_per_address=1000)
    listener = bind(options)
    print(url_of(listener, options), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)
    serving = asyncio.create_task(serve(app, listener, options, time.time, stop))
    while not stop.is_set():
        await asyncio.sleep(0.1)
        open("/dev/null").close()  # what a delivery needs
    await serving
    print("ended", flush=True)

asyncio.run(main())
"""


async def test_connections_leave_descriptors_for_others() -> None:
    """Idle connections fail neither deliveries, which need a descriptor each, nor good clients."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, "30", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    parts = urlsplit((await process.stdout.readline()).decode().strip())
    assert parts.hostname is not None
    assert parts.port is not None
    served = Served(parts.hostname, parts.port)
    try:
        for _ in range(150):
            await connect(served)
        for _ in range(5):
            good = await connect(served)
            assert (await good.ask()).status == 200
            await asyncio.sleep(0.1)
    finally:
        await close(served.clients)
        output, _ = await process.communicate(b"")
    assert b"ended" in output
