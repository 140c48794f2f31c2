"""The sender against real TLS receivers on loopback that answer well, badly, slowly or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop

from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.certificates import Authority
from vaultevents.dispatch import sender as sender_module
from vaultevents.dispatch.sender import EXCERPT_CHARS, Reply, Sender
from vaultevents.egress import Guard

pytestmark = pytest.mark.integration

NAME = "receiver.example"
BODY = b'{"id":"funding_received_a_0XAB"}'
HEADERS = {"content-type": "application/json", "user-agent": "vaultevents/0", "webhook-id": "funding_received_a_0XAB"}
LOOPBACK = UrlRules(allow=(parse_allow("127.0.0.0/8:*"),))
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


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
    total_timeout_s: float = 5.0,
) -> Sender:
    async def lookup(name: str) -> Sequence[str]:
        return answers or ("127.0.0.1",)

    guard = Guard(rules, lookup=lookup)
    ca_file = None if authority is None else authority.ca_path
    return Sender(guard, ca_file=ca_file, connect_timeout_s=connect_timeout_s, total_timeout_s=total_timeout_s)


async def one(answer: Answer | bytes, authority: Authority, total_timeout_s: float = 5.0) -> Reply:
    """The reply to a single delivery."""
    async with receiving(answer, authority.server(NAME)) as receiver:
        async with sender(authority, total_timeout_s=total_timeout_s) as sending:
            reply = await sending.send(receiver.url, BODY, HEADERS)
        assert len(receiver.requests) == 1
        return reply


async def test_a_delivery_arrives_as_it_was_signed(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:
        reply = await sending.send(receiver.url, BODY, HEADERS)
        assert (reply.status, reply.error, reply.retry_after) == (200, None, None)
        assert (reply.excerpt, reply.address) == ("ok", "127.0.0.1")
        assert 0 <= reply.duration_ms < 5000
        head, body = receiver.requests[0]
        assert body == BODY
        lines = head.strip().split("\r\n")
        assert lines[0] == "POST /hook?token=t0ken HTTP/1.1"
        sent = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
        assert sent == {**HEADERS, "host": f"{NAME}:{receiver.port}", "content-length": str(len(BODY))}
        assert receiver.server_names == [NAME]


async def test_connections_are_reused(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:
        replies = [await sending.send(receiver.url, BODY, HEADERS) for _ in range(5)]
        assert {(reply.status, reply.address) for reply in replies} == {(200, "127.0.0.1")}
        assert (receiver.connections, len(receiver.requests)) == (1, 5)


@pytest.mark.parametrize("status", [204, 400, 404, 410, 429, 500, 503])
async def test_any_status_is_a_reply(status: int, authority: Authority) -> None:
    reply = await one(b"HTTP/1.1 %d X\r\nRetry-After: 120\r\nContent-Length: 0\r\n\r\n" % status, authority)
    assert (reply.status, reply.error, reply.retry_after, reply.excerpt) == (status, None, "120", "")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(status: int, authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as target:
        answer = f"HTTP/1.1 {status} X\r\nLocation: {target.url}\r\nContent-Length: 0\r\n\r\n".encode()
        async with receiving(answer, authority.server(NAME)) as receiver, sender(authority) as sending:
            reply = await sending.send(receiver.url, BODY, HEADERS)
            assert (reply.status, reply.error) == (status, None)
            assert target.connections == 0
            assert (await sending.send(target.url, BODY, HEADERS)).status == 200
            assert target.connections == 1, "the control: the target can be reached"


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def test_no_answer_ends_at_the_deadline(authority: Authority) -> None:
    reply = await one(hang, authority, total_timeout_s=0.3)
    assert (reply.status, reply.error, reply.address) == (None, "timeout", "127.0.0.1")
    assert 250 <= reply.duration_ms < 1300


async def test_headers_that_drip_end_at_the_deadline(authority: Authority) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for n in range(1000):
            writer.write(b"x-%d: y\r\n" % n)
            await asyncio.sleep(0.05)

    reply = await one(drip, authority, total_timeout_s=0.4)
    assert (reply.status, reply.error) == (None, "timeout")
    assert reply.duration_ms < 1400


@pytest.mark.parametrize("status", [200, 500])
async def test_a_body_that_drips_does_not_change_what_the_headers_said(status: int, authority: Authority) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 1000\r\n\r\n" % status)
        for _ in range(1000):
            writer.write(b"z")
            await asyncio.sleep(0.05)

    async with receiving(drip, authority.server(NAME)) as receiver, sender(authority, total_timeout_s=0.4) as sending:
        reply = await sending.send(receiver.url, BODY, HEADERS)
        assert (reply.status, reply.error) == (status, None)
        assert set(reply.excerpt) == {"z"}
        assert 350 <= reply.duration_ms < 1400
        await sending.send(receiver.url, BODY, HEADERS)
        assert receiver.connections == 2, "a connection with an unfinished answer is not used again"


async def test_an_endless_body_is_cut(authority: Authority) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % 2**30)
        while True:
            writer.write(bytes(2**16))
            await writer.drain()
            sent += 2**16

    reply = await one(endless, authority)
    assert (reply.status, reply.error) == (200, None)
    assert reply.duration_ms < 2000
    assert sent < 16 * 2**20, "only what fits into the buffers of two sockets ever left"


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", OK[:-2] + b"h"]
)
async def test_a_body_cut_short_does_not_change_what_the_headers_said(head: bytes, authority: Authority) -> None:
    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await writer.drain()
        writer.close()

    reply = await one(cut, authority)
    assert (reply.status, reply.error) == (200, None)


async def test_a_reset_after_the_body_was_read_is_no_answer(authority: Authority) -> None:
    async def reset(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    reply = await one(reset, authority)
    assert (reply.status, reply.error, reply.address) == (None, "reset", "127.0.0.1")


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n"]
)
async def test_an_answer_that_is_not_http(answer: bytes, authority: Authority) -> None:
    reply = await one(answer, authority)
    assert (reply.status, reply.error) == (None, "protocol")


@pytest.mark.parametrize("line", [b"x-%07d: y\r\n" % 0, b"x-long: " + b"y" * 40_000 + b"\r\n"], ids=["many", "long"])
async def test_headers_without_end_are_refused(line: bytes, authority: Authority) -> None:
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(10_000):
            writer.write(line * 100)
            await writer.drain()
            sent += 100 * len(line)

    reply = await one(flood, authority)
    assert (reply.status, reply.error) == (None, "protocol")
    assert reply.duration_ms < 2000
    assert sent < 16 * 2**20


@pytest.mark.parametrize(("lines", "accepted"), [(30, True), (34, False)])
async def test_a_header_block_over_32_kib_is_not_complete(lines: int, accepted: bool, authority: Authority) -> None:
    padding = b"".join(b"x-%02d: %s\r\n" % (n, b"y" * 1000) for n in range(lines))
    reply = await one(OK.replace(b"\r\n\r\n", b"\r\n" + padding + b"\r\n"), authority)
    assert (reply.status, reply.error) == ((200, None) if accepted else (None, "protocol"))


async def test_an_upgrade_is_no_success_and_holds_nothing_up(authority: Authority) -> None:
    reply = await one(b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", authority)
    assert reply.status == 101 or reply.error == "protocol"
    assert reply.duration_ms < 2000


async def test_an_early_hint_is_not_the_answer(authority: Authority) -> None:
    reply = await one(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n", authority
    )
    assert reply.status == 500


async def test_a_compressed_body_is_not_expanded(authority: Authority) -> None:
    bomb = gzip.compress(b"boom" * 2**20)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    reply = await one(head + bomb, authority)
    assert reply.status == 200
    assert "boom" not in reply.excerpt


async def test_an_excerpt_is_short_and_printable(authority: Authority) -> None:
    body = "Fehler: zu groß\x00\x1b[31m\u202e\r\n".encode() + b"\xff" + b"x" * 1000
    reply = await one(b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n" % len(body) + body, authority)
    assert reply.excerpt.startswith("Fehler: zu groß")
    assert reply.excerpt.isprintable()
    assert len(reply.excerpt) == EXCERPT_CHARS


async def test_cookies_are_not_kept(authority: Authority) -> None:
    answer = OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: session=1; Domain=example\r\nSet-Cookie: b=2\r\n\r\n")
    async with receiving(answer, authority.server(NAME)) as receiver, sender(authority) as sending:
        for _ in range(2):
            await sending.send(receiver.url, BODY, HEADERS)
        assert len(receiver.requests) == 2
        assert not any("cookie" in head.lower() for head, _ in receiver.requests)


@pytest.mark.parametrize("fault", ["expired", "self-signed", "unknown authority", "wrong name"])
async def test_a_certificate_that_proves_nothing_ends_the_attempt(
    fault: str, authority: Authority, tmp_path: Path
) -> None:
    contexts: dict[str, Callable[[], ssl.SSLContext]] = {
        "expired": lambda: authority.server(NAME, expired=True),
        "self-signed": lambda: authority.server(NAME, self_signed=True),
        "unknown authority": lambda: Authority(tmp_path).server(NAME),
        "wrong name": lambda: authority.server("other.example", "127.0.0.1"),
    }
    async with receiving(OK, contexts[fault]()) as receiver, sender(authority) as sending:
        reply = await sending.send(receiver.url, BODY, HEADERS)
        assert (reply.status, reply.error) == (None, "tls")
        assert receiver.requests == []


async def test_without_the_extra_ca_file_a_private_authority_is_not_trusted(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as receiver, sender(None) as sending:
        assert (await sending.send(receiver.url, BODY, HEADERS)).error == "tls"
        assert receiver.requests == []


async def test_an_address_in_the_url_needs_a_certificate_for_it(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME, "127.0.0.1")) as receiver, sender(authority) as sending:
        assert (await sending.send(f"https://127.0.0.1:{receiver.port}/", BODY, HEADERS)).status == 200
    async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:
        assert (await sending.send(f"https://127.0.0.1:{receiver.port}/", BODY, HEADERS)).error == "tls"


@pytest.mark.parametrize("answers", [("127.0.0.1",), ("127.0.0.2", "127.0.0.1"), ("127.0.0.2", "10.0.0.1")])
async def test_private_addresses_are_refused(answers: tuple[str, ...], authority: Authority) -> None:
    rules = UrlRules(allow=(parse_allow("127.0.0.2/32:*"),))
    async with receiving(OK, authority.server(NAME)) as canary, sender(authority, *answers, rules=rules) as sending:
        reply = await sending.send(canary.url, BODY, HEADERS)
        assert (reply.status, reply.error, reply.address) == (None, "refused_address", None)
        assert canary.connections == 0


async def test_the_url_is_judged_at_every_attempt(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME, "127.0.0.1")) as canary:
        async with sender(authority, rules=UrlRules()) as sending:
            for url in (
                f"https://127.0.0.1:{canary.port}/",
                "https://127.0.0.1/",
                "http://example.com/",
                canary.url,
                "",
            ):
                reply = await sending.send(url, BODY, HEADERS)
                assert (reply.status, reply.error) == (None, "refused_url"), url
        assert canary.connections == 0


async def test_nobody_listening(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as receiver:
        url = receiver.url
    async with sender(authority) as sending:
        assert (await sending.send(url, BODY, HEADERS)).error == "connect"


@contextlib.asynccontextmanager
async def speaking(first: bytes) -> AsyncIterator[str]:
    """The URL of a server without TLS that says `first` and then waits."""
    accepted: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        writer.write(first)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"https://{NAME}:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()
        for writer in accepted:
            writer.transport.abort()
        await asyncio.sleep(0)


async def test_a_server_without_tls(authority: Authority) -> None:
    async with speaking(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url, sender(authority) as sending:
        reply = await sending.send(url, BODY, HEADERS)
        assert (reply.status, reply.error) == (None, "tls")


async def test_a_handshake_that_hangs_ends_at_the_connect_deadline(authority: Authority) -> None:
    async with speaking(b"") as url, sender(authority, connect_timeout_s=0.2) as sending:
        started = time.monotonic()
        reply = await sending.send(url, BODY, HEADERS)
        assert (reply.status, reply.error) == (None, "connect_timeout")
        assert time.monotonic() - started < 1.2


async def test_a_name_that_does_not_resolve(authority: Authority) -> None:
    async def lookup(name: str) -> Sequence[str]:
        raise OSError("no such name")

    async with Sender(Guard(UrlRules(), lookup=lookup), ca_file=authority.ca_path) as sending:
        reply = await sending.send(f"https://{NAME}/", BODY, HEADERS)
        assert (reply.status, reply.error, reply.address) == (None, "dns", None)


async def test_a_cancelled_delivery_is_cancelled_at_once(authority: Authority) -> None:
    async with receiving(hang, authority.server(NAME)) as receiver, sender(authority) as sending:
        task = asyncio.create_task(sending.send(receiver.url, BODY, HEADERS))
        await receiver.arrived(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_hanging_receiver_holds_up_nobody_else(authority: Authority) -> None:
    async with (
        receiving(hang, authority.server(NAME)) as dead,
        receiving(OK, authority.server(NAME)) as healthy,
        sender(authority, total_timeout_s=1.5) as sending,
    ):
        stuck = [asyncio.create_task(sending.send(dead.url, BODY, HEADERS)) for _ in range(30)]
        await dead.arrived(30)
        replies = [await sending.send(healthy.url, BODY, HEADERS) for _ in range(20)]
        assert {reply.status for reply in replies} == {200}
        assert not any(task.done() for task in stuck)
        assert {(await task).error for task in stuck} == {"timeout"}


LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def on(loop: Callable[[], asyncio.AbstractEventLoop], story: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(story)


@LOOPS
def test_attempts_that_share_connections_each_get_a_reply(
    loop: Callable[[], asyncio.AbstractEventLoop], authority: Authority
) -> None:
    async def story() -> None:
        async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:

            async def stream() -> list[Reply]:
                return [await sending.send(receiver.url, BODY, HEADERS) for _ in range(20)]

            # More streams than idle connections: a connection is taken again the moment it is free.
            streams = await asyncio.gather(*(stream() for _ in range(20)))
            assert {(one.status, one.error, one.excerpt) for some in streams for one in some} == {(200, None, "ok")}
            assert len(receiver.requests) == 400
            assert receiver.connections <= 20

    on(loop, story())


async def test_a_slow_phase_shows_in_its_own_field(authority: Authority) -> None:
    async def slow(name: str) -> Sequence[str]:
        await asyncio.sleep(0.1)
        return ["127.0.0.1"]

    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.15)
        writer.write(OK)

    guard = Guard(LOOPBACK, lookup=slow)
    async with receiving(late, authority.server(NAME)) as receiver, Sender(guard, ca_file=authority.ca_path) as sending:
        fresh = (await sending.send(receiver.url, BODY, HEADERS)).timing
        assert fresh.dns_ms is not None
        assert fresh.connect_ms is not None
        assert fresh.tls_ms is not None
        assert fresh.first_byte_ms is not None
        assert 95 <= fresh.dns_ms < 600
        assert fresh.connect_ms < 90
        assert 145 <= fresh.first_byte_ms < 600
        reused = (await sending.send(receiver.url, BODY, HEADERS)).timing
        assert (reused.dns_ms, reused.connect_ms, reused.tls_ms) == (None, None, None)
        assert reused.first_byte_ms is not None


async def test_a_kept_connection_that_ends_under_a_request_is_not_posted_to_again(authority: Authority) -> None:
    async def once(writer: asyncio.StreamWriter) -> None:
        if len(receiver.requests) == 2:
            writer.transport.abort()
        else:
            writer.write(OK)

    async with receiving(once, authority.server(NAME)) as receiver, sender(authority) as sending:
        assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200
        assert (await sending.send(receiver.url, BODY, HEADERS)).error == "reset"
        assert len(receiver.requests) == 2, "what was written may have arrived"


async def test_a_connection_closed_while_idle_costs_no_attempt(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:
        await sending.send(receiver.url, BODY, HEADERS)
        for writer in receiver.open:
            writer.transport.abort()
        await asyncio.sleep(0.05)
        assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200
        assert receiver.connections == 2


async def test_an_idle_connection_is_let_go(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "KEEP_ALIVE_S", 0.1)
    async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:
        await sending.send(receiver.url, BODY, HEADERS)
        await asyncio.sleep(0.4)
        await sending.send(receiver.url, BODY, HEADERS)
        assert receiver.connections == 2


async def test_idle_connections_are_bounded(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "IDLE_CONNECTIONS", 2)
    together = asyncio.Barrier(5)

    async def all_at_once(writer: asyncio.StreamWriter) -> None:
        await together.wait()
        writer.write(OK)

    async with receiving(all_at_once, authority.server(NAME)) as receiver, sender(authority) as sending:
        for opened in (5, 8):
            await asyncio.gather(*(sending.send(receiver.url, BODY, HEADERS) for _ in range(5)))
            assert receiver.connections == opened, "two of five are kept"


async def test_a_cancelled_attempt_gives_up_its_connection(authority: Authority) -> None:
    async def first_hangs(writer: asyncio.StreamWriter) -> None:
        if len(receiver.requests) == 1:
            await asyncio.sleep(3600)
        writer.write(OK)

    async with receiving(first_hangs, authority.server(NAME)) as receiver, sender(authority) as sending:
        task = asyncio.create_task(sending.send(receiver.url, BODY, HEADERS))
        await receiver.arrived(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200
        assert receiver.connections == 2


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (OK + OK, 200),
        (OK + b"H", 200),
        (OK.replace(b"200 OK", b"200 OK\r\nConnection: close"), 200),
        (OK.replace(b"1.1", b"1.0"), 200),
        (OK.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"), None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 200),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 100 + OK, None),
        (b"HTTP/1.1 101 X\r\n\r\n", 101),
        (OK.replace(b"\r\n", b"\n"), None),
    ],
    ids=[
        "second answer",
        "one byte more",
        "close",
        "HTTP/1.0",
        "two lengths",
        "bad chunk",
        "storm of 100",
        "101",
        "bare line feeds",
    ],
)
async def test_an_answer_that_does_not_end_cleanly_costs_its_connection(
    answer: bytes, status: int | None, authority: Authority
) -> None:
    async with receiving(answer, authority.server(NAME)) as receiver, sender(authority) as sending:
        for opened in (1, 2):
            reply = await sending.send(receiver.url, BODY, HEADERS)
            assert (reply.status, reply.error) == (status, None if status else "protocol")
            assert receiver.connections == opened
            await asyncio.sleep(0.01)


async def test_a_header_cannot_bring_another_line(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:
        for value in ("a\r\nx-b: c", "a\nb", "a\rb", "a\0b"):
            with pytest.raises(ValueError, match="line break"):
                await sending.send(receiver.url, BODY, {"x-a": value})
        assert receiver.connections == 0


ANSWERS = {
    "length": b"HTTP/1.1 429 X\r\nRetry-After: 120\r\nContent-Length: 5\r\n\r\nhello",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    "interim": b"HTTP/1.1 103 X\r\nLink: </a>\r\n\r\nHTTP/1.1 500 X\r\nContent-Length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_an_answer_split_at_any_byte_is_the_same_reply(answer: bytes, authority: Authority) -> None:
    async def split(writer: asyncio.StreamWriter) -> None:
        cut = len(receiver.requests) - 1
        writer.write(answer[:cut])
        await writer.drain()
        await asyncio.sleep(0.002)
        writer.write(answer[cut:])

    async with receiving(split, authority.server(NAME)) as receiver, sender(authority) as sending:
        replies = [await sending.send(receiver.url, BODY, HEADERS) for _ in range(len(answer))]
        assert len({(one.status, one.error, one.retry_after, one.excerpt) for one in replies}) == 1
        assert replies[0].excerpt == "hello"
        assert receiver.connections == 1
