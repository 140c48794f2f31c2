"""Closed connections to receivers are freed at once, by reference counting: the garbage collector runs rarely."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import uvloop

from sender_factories import BODY, HEADERS, NAME, OK, Answer, receiving, sender
from timeouts import WAIT_TIMEOUT_S
from vaultevents.devnet.certificates import Authority
from vaultevents.dispatch import sender as sender_module
from vaultevents.dispatch.http_client import Connection

pytestmark = pytest.mark.integration

DELIVERIES = 20
CLOSE = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
HTTP_1_0 = b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"
LARGE = b"HTTP/1.1 500 Broken\r\nContent-Length: %d\r\n\r\n" % 2**17 + bytes(2**17)
GARBAGE = b"SSH-2.0-OpenSSH_9.2\r\n\r\n"
TWO_ANSWERS = OK + OK


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def ended(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\nno length")
    writer.close()


PROFILES: dict[str, tuple[Answer | bytes, int | str]] = {
    "Connection: close": (CLOSE, 200),
    "HTTP/1.0": (HTTP_1_0, 200),
    "128 KB": (LARGE, 500),
    "reset": (reset, "reset"),
    "silent": (silent, "timeout"),
    "no HTTP": (GARBAGE, "protocol"),
    "two answers": (TWO_ANSWERS, 200),
    "end without a length": (ended, 200),
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def until_freed(connections: list[weakref.ref[Connection]]) -> int:
    """Wait for the transports to end; return how many connections are left."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while any(connection() is not None for connection in connections):
                await asyncio.sleep(0.01)
    return sum(connection() is not None for connection in connections)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_closed_connection_leaves_nothing_to_the_collector(
    profile: str,
    loop: Callable[[], asyncio.AbstractEventLoop],
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[Connection]] = []

    class Watched(Connection):
        def __init__(self, address: str | None, read_buffer: memoryview) -> None:
            super().__init__(address, read_buffer)
            made.append(weakref.ref(self))

    monkeypatch.setattr(sender_module, "Connection", Watched)
    answer, outcome = PROFILES[profile]

    async def deliver() -> int:
        async with (
            receiving(answer, authority.server(NAME)) as receiver,
            sender(authority, total_timeout_s=0.5 if profile == "silent" else WAIT_TIMEOUT_S) as sending,
        ):
            replies = await asyncio.gather(*(sending.send(receiver.url, BODY, HEADERS) for _ in range(DELIVERIES)))
            assert {reply.error or reply.status for reply in replies} == {outcome}
            assert len(made) == DELIVERIES
            return await until_freed(made)

    with without_collector(), asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(deliver()) == 0


@pytest.mark.parametrize("fault", ["nobody listens", "wrong name"])
def test_a_failed_dial_leaves_nothing_to_the_collector(fault: str, authority: Authority) -> None:
    async def dial() -> int:
        name = "other.example" if fault == "wrong name" else NAME
        async with receiving(OK, authority.server(name)) as receiver, sender(authority) as sending:
            url = receiver.url if fault == "wrong name" else f"https://{NAME}:1/"
            error = (await sending.send(url, BODY, HEADERS)).error  # what is made once for all is made now
            gc.collect()
            for _ in range(DELIVERIES):
                assert (await sending.send(url, BODY, HEADERS)).error == error
            await asyncio.sleep(0.1)
            return gc.collect()

    with without_collector(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(dial()) < DELIVERIES
