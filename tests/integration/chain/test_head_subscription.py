"""New heads over WebSocket: a stream looks at once, and no socket costs more than the poll interval (rule I10)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

import evm
import timeouts
from simulation_fixtures import in_background, open_at, reading, register, rows
from vaultevents.chain.execution.head_subscription import NewHeads, SocketTerms
from vaultevents.core.errors import InputError, SourceUnavailable
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.loopback import LoopbackServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.wakeup import Wakeup, until
from vaultevents.watch.watcher import run

pytestmark = pytest.mark.integration

SECRET = "k3y-that-must-not-show"
QUICK = SocketTerms(answer_s=0.3, quiet_s=0.4, spacing_s=0.05)
NEVER_S = 3600.0


def socket_url(http_url: str) -> str:
    return f"{http_url.replace('http', 'ws', 1)}/v2/{SECRET}?key={SECRET}"


@asynccontextmanager
async def woken(*heads: NewHeads) -> AsyncIterator[Wakeup]:
    """A wakeup that these sockets give."""
    wakeup = Wakeup()
    async with AsyncExitStack() as stack:
        for head in heads:
            await stack.enter_async_context(in_background(head.follow(wakeup.give)))
        yield wakeup


async def next_wakeup(wakeup: Wakeup) -> None:
    await asyncio.wait_for(wakeup.next().wait(), timeouts.WAIT_TIMEOUT_S)


async def complete(database: Database, simulation: Simulation) -> None:
    """Until the outbox has exactly what the chain's own record says."""

    async def is_complete() -> bool:
        return await rows(database) == simulation.expected()

    await timeouts.until_true(is_complete)


@asynccontextmanager
async def followed(
    database: Database, simulation: Simulation, node: ExecutionServer, wakeup: Wakeup, poll_s: float
) -> AsyncIterator[None]:
    """The logs of a simulation, read live as the daemon does."""
    await register(database, simulation)
    async with reading(node) as source:
        await open_at(database, simulation, 0)
        outbox = Outbox(database)
        live = await outbox.live("logs")
        assert live is not None
        async with in_background(run(source, outbox, live, step=50, poll_s=poll_s, wakeup=wakeup)):
            yield


@asynccontextmanager
async def announcing(*nodes: ExecutionServer) -> AsyncIterator[list[str]]:
    """The sockets of nodes."""
    try:
        yield [socket_url(await node.start()) for node in nodes]
    finally:
        for node in nodes:
            await node.stop()


async def test_a_new_head_is_read_at_once_and_finality_is_looked_at_after_each(database: Database) -> None:
    """The heads are finalized ones, and polling alone would take an hour."""
    simulation = Simulation(7)
    simulation.history(20, 30)
    node, teller = ExecutionServer(simulation.chain), ExecutionServer(simulation.chain)
    async with (
        announcing(teller) as (url,),
        woken(NewHeads(url)) as wakeup,
        followed(database, simulation, node, wakeup, NEVER_S),
    ):
        await complete(database, simulation)
        await timeouts.until(lambda: teller.subscriptions == 1)
        for _ in range(5):
            simulation.step()
            await complete(database, simulation)


async def test_a_hint_that_comes_while_a_stream_reads_is_not_missed() -> None:
    wakeup = Wakeup()
    before = wakeup.next()
    wakeup.give()
    await asyncio.wait_for(until(before, NEVER_S), timeouts.WAIT_TIMEOUT_S)
    began = asyncio.get_running_loop().time()
    await until(wakeup.next(), 0.05)
    assert asyncio.get_running_loop().time() - began >= 0.04


async def answers_subscription(socket: web.WebSocketResponse) -> None:
    asked = await socket.receive_json()
    await socket.send_json({"jsonrpc": "2.0", "id": asked["id"], "result": "0x1"})


async def floods(socket: web.WebSocketResponse) -> None:
    await answers_subscription(socket)
    while True:
        await socket.send_str("a head, believe me")
        await asyncio.sleep(0.001)  # the flooded reader runs in the same loop and needs a turn to read


async def sends_too_much(socket: web.WebSocketResponse) -> None:
    await answers_subscription(socket)
    await socket.send_str("x" * 2**21)
    await socket.receive()


async def sends_too_much_at_once(socket: web.WebSocketResponse) -> None:
    await socket.send_str("x" * 2**21)
    await socket.receive()


async def refuses(socket: web.WebSocketResponse) -> None:
    asked = await socket.receive_json()
    error = {"code": -32601, "message": f"notifications not supported at wss://host/v2/{SECRET}"}
    await socket.send_json({"id": asked["id"], "error": error})


async def never_answers(socket: web.WebSocketResponse) -> None:
    while True:
        await socket.receive()


async def speaks_bytes(socket: web.WebSocketResponse) -> None:
    await socket.send_bytes(b"\xff\xfe")


async def is_quiet(socket: web.WebSocketResponse) -> None:
    await answers_subscription(socket)
    await socket.receive()


async def leaves(socket: web.WebSocketResponse) -> None:
    await answers_subscription(socket)


BAD = {
    one.__name__: one
    for one in (sends_too_much, sends_too_much_at_once, refuses, never_answers, speaks_bytes, is_quiet, leaves)
}


@asynccontextmanager
async def speaking(behave: Callable[[web.WebSocketResponse], Awaitable[None]]) -> AsyncIterator[str]:
    """The URL of a socket with manners of its own."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await behave(socket)
        return socket

    server = LoopbackServer(answer)
    try:
        yield socket_url(await server.start())
    finally:
        await server.stop()


async def test_bad_sockets_cost_the_poll_interval_and_nothing_else(database: Database) -> None:
    """Beside a dead and a frozen one all is read by polling; a flooding one then hurries nobody."""
    simulation = Simulation(8)
    simulation.history(10, 10)
    node, frozen, gone = (ExecutionServer(simulation.chain) for _ in range(3))
    loop = asyncio.get_running_loop()
    async with announcing(frozen, gone) as urls:
        await gone.stop()
        heads = [NewHeads(url, QUICK) for url in urls]
        async with woken(*heads) as wakeup, followed(database, simulation, node, wakeup, poll_s=0.2):
            await timeouts.until(lambda: frozen.subscriptions == 1)
            frozen.frozen = True
            for _ in range(5):
                simulation.step()
                await complete(database, simulation)
            async with speaking(floods) as flood, in_background(NewHeads(flood, QUICK).follow(wakeup.give)):
                await next_wakeup(wakeup)
                asked, began_s = node.exchanges, loop.time()
                await asyncio.sleep(1)
                assert node.exchanges - asked <= (loop.time() - began_s) * (1 / 0.2 + 1 / QUICK.spacing_s) + 2


async def test_a_flood_gives_hints_one_by_one() -> None:
    loop = asyncio.get_running_loop()
    async with speaking(floods) as url, woken(NewHeads(url, QUICK)) as wakeup:
        began_s = loop.time()
        for _ in range(10):
            await next_wakeup(wakeup)
        assert loop.time() - began_s >= 9 * QUICK.spacing_s


@pytest.mark.parametrize("behave", BAD.values(), ids=BAD)
async def test_a_bad_socket_is_left_with_a_reason_and_tried_again(
    behave: Callable[[web.WebSocketResponse], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vaultevents.chain.execution.head_subscription.reconnect_pauses", lambda: iter([0.0, NEVER_S]))
    connected = 0

    async def counted(socket: web.WebSocketResponse) -> None:
        nonlocal connected
        connected += 1
        await behave(socket)

    with capture_logs() as logged:
        async with speaking(counted) as url, woken(NewHeads(url, QUICK)):
            await timeouts.until(lambda: connected == 2)
    lost = [entry for entry in logged if entry["event"] == "newheads_lost"]
    assert lost and all(entry["node"].startswith("ws://127.0.0.1#") for entry in lost)
    assert SECRET not in repr(logged)


@pytest.mark.parametrize("fault", [Fault.HTML, Fault.HTTP_500, Fault.HTTP_429, Fault.HANG])
async def test_a_server_that_opens_no_socket_is_reported(fault: Fault) -> None:
    node = ExecutionServer(Chain(1))
    async with announcing(node) as (url,):
        node.faults.rates = {fault: 1.0}
        with pytest.raises(SourceUnavailable) as caught:
            await NewHeads(url, QUICK).chain_id()
        assert SECRET not in repr((caught.value, caught.value.__cause__, caught.value.__context__))
        node.faults.stop()
        assert await NewHeads(url).chain_id() == 1337


async def test_no_redirect_is_followed() -> None:
    node = ExecutionServer(Chain(1))

    async def redirect(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=302, headers={"location": elsewhere})

    server = LoopbackServer(redirect)
    async with announcing(node) as (url,):
        elsewhere = url.replace("ws", "http", 1)
        try:
            with pytest.raises(SourceUnavailable, match="cannot be reached"):
                await NewHeads(socket_url(await server.start())).chain_id()
        finally:
            await server.stop()


def test_another_url_is_refused_without_being_shown() -> None:
    for url in (f"http://node/{SECRET}", f"ws:///{SECRET}", f"wss://node:port/{SECRET}"):
        with pytest.raises(InputError, match="write ws://host") as caught:
            NewHeads(url)
        assert SECRET not in str(caught.value)


@pytest.mark.anvil
async def test_anvil_announces_its_blocks(tmp_path: Path) -> None:
    with evm.running(tmp_path) as chain:
        heads = NewHeads(chain.url.replace("http", "ws"))
        assert await heads.chain_id() == 31337
        async with woken(heads) as wakeup:
            given = wakeup.next()
            async with asyncio.timeout(timeouts.WAIT_TIMEOUT_S):
                while not given.is_set():
                    chain.mine()
                    await asyncio.sleep(0.05)
