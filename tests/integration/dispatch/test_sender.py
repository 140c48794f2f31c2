"""The sender against real TLS receivers on loopback: where it connects, whom it trusts, which connections it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path

import pytest
import uvloop

from sender_factories import BODY, HEADERS, LOOPBACK, NAME, OK, hang, receiving, sender
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.certificates import Authority
from vaultevents.dispatch import sender as sender_module
from vaultevents.dispatch.sender import Reply, Sender
from vaultevents.egress import Guard

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


async def test_a_delivery_arrives_as_it_was_signed(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:
        reply = await sending.send(receiver.url, BODY, HEADERS)
        assert (reply.status, reply.error, reply.retry_after) == (200, None, None)
        assert (reply.excerpt, reply.address) == ("ok", "127.0.0.1")
        assert 0 <= reply.duration_ms < 15_000
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
        reply = await sending.send(url, BODY, HEADERS)
        assert (reply.status, reply.error) == (None, "connect_timeout")


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
        sender(authority, total_timeout_s=5) as sending,
    ):
        stuck = [asyncio.create_task(sending.send(dead.url, BODY, HEADERS)) for _ in range(30)]
        await dead.arrived(30)
        replies = [await sending.send(healthy.url, BODY, HEADERS) for _ in range(20)]
        assert {reply.status for reply in replies} == {200}
        assert not any(task.done() for task in stuck)
        assert {(await task).error for task in stuck} == {"timeout"}


LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def on(loop: Callable[[], asyncio.AbstractEventLoop], scenario: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario)


@LOOPS
def test_attempts_that_share_connections_each_get_a_reply(
    loop: Callable[[], asyncio.AbstractEventLoop], authority: Authority
) -> None:
    async def scenario() -> None:
        async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:

            async def stream() -> list[Reply]:
                return [await sending.send(receiver.url, BODY, HEADERS) for _ in range(20)]

            # More streams than idle connections: a connection is taken again the moment it is free.
            streams = await asyncio.gather(*(stream() for _ in range(20)))
            assert {(item.status, item.error, item.excerpt) for some in streams for item in some} == {(200, None, "ok")}
            assert len(receiver.requests) == 400
            assert receiver.connections <= 20

    on(loop, scenario())


async def test_a_slow_phase_shows_in_its_own_field(authority: Authority) -> None:
    async def slow(name: str) -> Sequence[str]:
        await asyncio.sleep(0.3)
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
        assert fresh.dns_ms >= 295
        assert fresh.connect_ms < fresh.dns_ms
        assert fresh.first_byte_ms >= 145
        reused = (await sending.send(receiver.url, BODY, HEADERS)).timing
        assert (reused.dns_ms, reused.connect_ms, reused.tls_ms) == (None, None, None)
        assert reused.first_byte_ms is not None


@pytest.mark.parametrize("how", ["closed", "aborted"])
async def test_a_kept_connection_that_ends_under_a_request_is_not_posted_to_again(
    how: str, authority: Authority
) -> None:
    async def once(writer: asyncio.StreamWriter) -> None:
        if len(receiver.requests) != 2:
            writer.write(OK)
        elif how == "closed":
            writer.close()
        else:
            writer.transport.abort()

    async with receiving(once, authority.server(NAME)) as receiver, sender(authority) as sending:
        assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200
        assert (await sending.send(receiver.url, BODY, HEADERS)).error == "reset"
        assert len(receiver.requests) == 2, "what was written may have arrived"
        assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200
        assert receiver.connections == 2


async def test_a_connection_closed_while_idle_costs_no_attempt(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:
        await sending.send(receiver.url, BODY, HEADERS)
        for writer in receiver.open:
            writer.transport.abort()
        await asyncio.sleep(0.05)
        assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200
        assert receiver.connections == 2


async def test_a_connection_closed_right_after_its_answer_costs_no_attempt(authority: Authority) -> None:
    async def last(writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        writer.close()

    async with receiving(last, authority.server(NAME)) as receiver, sender(authority) as sending:
        replies = [await sending.send(receiver.url, BODY, HEADERS) for _ in range(20)]
        assert {(reply.status, reply.error) for reply in replies} == {(200, None)}
        assert receiver.connections == len(receiver.requests) == 20


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


async def test_attempts_that_are_cancelled_at_their_deadline_keep_no_other_from_its_own(authority: Authority) -> None:
    async def first_answers(writer: asyncio.StreamWriter) -> None:
        if len(receiver.requests) > 1:
            await asyncio.sleep(3600)
        writer.write(OK)

    async with (
        receiving(first_answers, authority.server(NAME)) as receiver,
        sender(authority, total_timeout_s=0.5) as sending,
    ):
        assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200
        others: list[asyncio.Task[Reply]] = []

        def cancel_others(_: Reply) -> None:
            for other in others:
                other.cancel()

        assert sending.try_post(receiver.url, BODY, HEADERS, cancel_others)
        others += [asyncio.create_task(sending.send(receiver.url, BODY, HEADERS)) for _ in range(8)]
        await asyncio.wait(others)
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            assert (await sending.send(receiver.url, BODY, HEADERS)).error == "timeout"


async def test_a_header_cannot_bring_another_line(authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:
        for value in ("a\r\nx-b: c", "a\nb", "a\rb", "a\0b"):
            with pytest.raises(ValueError, match="line break"):
                await sending.send(receiver.url, BODY, {"x-a": value})
        assert receiver.connections == 0
