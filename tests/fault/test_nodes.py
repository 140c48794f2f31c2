"""Nodes in every kind of trouble, three together and alone, under the stream as the daemon runs it: lost 0, extra 0.

The first node, the preferred one, is the bad one. What the outbox has at the end is compared with the chain's own
record, and nothing that is not in that record may be stored on the way. Broken builds are caught by the same scenarios.
"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from typing import Any

import pytest

from fault_injection import (
    BEGUN,
    BLOCKS,
    LAG,
    OPTIONS,
    TROUBLES,
    Trouble,
    followed,
    forked,
    heal,
    is_on_another_fork,
    simulation_of,
)
from simulation_fixtures import Rows, drive, rows, truth, whole
from timeouts import WAIT_TIMEOUT_S
from vaultevents.chain.execution import logs, verification
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.chain.execution.log_range import LogQuery
from vaultevents.core.spans import Span
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS, PlacedLog
from vaultevents.devnet.chain import Absent, At, Chain, Lag
from vaultevents.devnet.execution import Balancer, ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.node import Node
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.watch import watcher
from vaultevents.watch.logs import LogsSource

pytestmark = pytest.mark.fault


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "BACKOFF_S", (0.03,))


every_trouble = pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.begin.__name__)


@every_trouble
async def test_one_bad_node_of_three_loses_nothing_and_invents_nothing(database: Database, trouble: Trouble) -> None:
    simulation = simulation_of(31)
    bad, *good = (ExecutionServer(simulation.chain) for _ in range(3))
    if trouble.from_the_start:
        trouble.begin(bad, simulation)
    async with followed(database, simulation, bad, *good, options=trouble.options) as scenario:
        assert (await scenario.ending(behind=trouble.behind)).is_right
        trouble.begin(bad, simulation)
        bad.faults.once(Fault.HTTP_429, trouble.bursts)
        await scenario.grow(40)
        assert (await scenario.ending(behind=trouble.behind)).is_right


@every_trouble
async def test_one_bad_node_alone_invents_nothing_and_loses_nothing_in_the_end(
    database: Database, trouble: Trouble
) -> None:
    simulation = simulation_of(32)
    node = ExecutionServer(simulation.chain)
    if trouble.from_the_start:
        trouble.begin(node, simulation)
    async with followed(database, simulation, node, options=trouble.options) as scenario:
        if not trouble.from_the_start:
            assert (await scenario.ending()).is_right
            trouble.begin(node, simulation)
        await scenario.grow(40)
        await asyncio.sleep(0.2)
        assert await scenario.extra() == 0
        if trouble.heals_itself:
            assert (await scenario.ending()).is_right
            node.faults.once(Fault.HTTP_429, trouble.bursts)
            await scenario.grow(20)
            assert (await scenario.ending()).is_right
            assert node.faults.fired[Fault.EMPTY_LOGS] > 1
        heal(node, simulation)
        assert (await scenario.ending()).is_right


async def test_a_node_that_becomes_another_chain_in_the_middle_of_a_run_is_left(database: Database) -> None:
    simulation = simulation_of(33)
    turning, good = ExecutionServer(simulation.chain), ExecutionServer(simulation.chain)
    async with followed(database, simulation, turning, good) as scenario:
        assert (await scenario.ending()).is_right
        for chain in (forked(simulation, 0, 400), simulation.chain, forked(simulation, BLOCKS // 2, 400)):
            await scenario.grow(20)
            turning.node.chain = chain
            await asyncio.sleep(0.1)
        await scenario.grow(20)
        assert (await scenario.ending()).is_right


@pytest.mark.parametrize("seed", [34, None])
async def test_a_balancer_before_a_lagging_node_loses_nothing(database: Database, seed: int | None) -> None:
    """One URL, so one lonely node, whose head is from one machine and whose logs are from another (rule C2)."""
    simulation = simulation_of(34)
    lagging, *good = (ExecutionServer(simulation.chain, behind=LAG if number == 0 else 0) for number in range(3))
    async with followed(database, simulation, Balancer(seed, lagging, *good)) as scenario:
        for _ in range(10):
            await scenario.grow(10)
            await asyncio.sleep(0.02)
        assert (await scenario.ending()).is_right
    assert lagging.exchanges > 20


@pytest.mark.parametrize("nodes", [1, 3])
async def test_finality_in_trouble_moves_nothing_and_after_1000_blocks_all_is_read(
    database: Database, nodes: int
) -> None:
    simulation = simulation_of(35, BEGUN + 2)
    servers = [ExecutionServer(simulation.chain) for _ in range(nodes)]
    stall = At(BEGUN)
    async with followed(database, simulation, *servers) as scenario:
        assert (await scenario.ending()).is_right
        before = await rows(database)
        for position in (Absent.NULL, Absent.UNKNOWN, At(10), At(0), stall):
            simulation.chain.finalized = position
            simulation.history(1000 if position is stall else 10, 500 if position is stall else 10)
            await asyncio.sleep(0.1)
            assert await rows(database) == before
        simulation.chain.finalized = Lag(2)
        assert (await scenario.ending()).is_right
    assert len(await rows(database)) > len(before) + 500


ENDLESS = """
import asyncio, sys
async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    print("asked", flush=True)
    writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: 104857600\\r\\n\\r\\n")
    for _ in range(100):
        writer.write(bytes(2**20))
        await writer.drain()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""


class Endless:
    """A node that answers every question with 100 MB, in a process of its own so that its memory is not ours."""

    async def start(self) -> str:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ENDLESS, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        return f"http://127.0.0.1:{int(await self._process.stdout.readline())}"

    async def stop(self) -> None:
        self._process.kill()
        self.reported, _ = await self._process.communicate()


async def test_100_mb_from_one_node_cost_neither_memory_nor_events(database: Database) -> None:
    simulation = simulation_of(36)
    huge = Endless()
    tracemalloc.start()
    try:
        async with followed(database, simulation, huge, ExecutionServer(simulation.chain)) as scenario:
            assert (await scenario.ending()).is_right
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert b"asked" in huge.reported
    assert peak < 12 * 2**20


class Shouting(Node):
    """The same chain in another node's handwriting: hex in upper case, logs last first, no times in them."""

    def logs(self, query: object) -> list[PlacedLog]:
        return Node.logs(self, query)[::-1]

    def log_json(self, placed: PlacedLog) -> dict[str, Any]:
        shouted: dict[str, Any] = _shouted(Node.log_json(self, placed))
        return shouted

    def call(self, method: str, params: list[Any]) -> Any:
        return _shouted(Node.call(self, method, params))


def _shouted(value: Any) -> Any:
    match value:
        case str(text) if text.startswith("0x"):
            return "0x" + text[2:].upper()
        case dict():
            return {name: _shouted(one) for name, one in value.items()}
        case list():
            return [_shouted(one) for one in value]
    return value


async def test_a_provider_that_is_swapped_gives_identical_ids_and_bodies(database: Database) -> None:
    """In the middle of a run, and then all over again by a replay (rule E1)."""
    simulation = simulation_of(37)
    first, second = ExecutionServer(simulation.chain), ExecutionServer(simulation.chain)
    second.node = Shouting(simulation.chain, max_range=7, limit_style="alchemy", block_timestamp=False)
    async with followed(database, simulation, first, second) as scenario:
        await scenario.grow(20)
        await first.stop()
        await scenario.grow(20)
        assert (await scenario.ending()).is_right
    assert second.exchanges > 0
    stored = await rows(database)
    assert await replayed(database, simulation, second) == stored


async def replayed(database: Database, simulation: Simulation, server: ExecutionServer) -> Rows:
    """What is stored after a replay of everything, which must find every row as it would write it."""
    outbox, final = Outbox(database), simulation.chain.finalized_number
    assert final is not None
    url = await server.start()
    async with ExecutionChain([url], head=HeadPolicy(), options=OPTIONS) as chain:
        cursor = await outbox.begin_replay("logs", Span(0, final))
        done = [one.committed for one in await drive(LogsSource(chain), outbox, cursor, 25)]
    await server.stop()
    assert not any(outcome.inserted or outcome.different for outcome in done)
    return await rows(database)


@pytest.mark.parametrize("budget", [10_000, 0])
async def test_full_blocks_whose_blooms_are_all_positive_by_chance_stall_nothing(
    database: Database, budget: int
) -> None:
    chain = Chain(38)
    chain.filler_logs = FULL_BLOCK_LOGS
    simulation = simulation_of(38, 30, chain)
    node = ExecutionServer(chain)
    options = ExecutionOptions(retry_wait_s=0.01, blooms_per_day=budget)
    async with followed(database, simulation, node, begun=0, options=options) as scenario:
        assert (await scenario.ending()).is_right
    held = {number for number, *_ in truth(simulation, whole(simulation))}
    asked = node.calls["eth_getBlockReceipts"]
    assert asked > len(held) if budget else asked <= len(held)


async def test_a_build_without_the_bloom_check_loses_logs(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogQuery, "may_be_in", lambda *_: False)
    simulation = simulation_of(32)
    node = ExecutionServer(simulation.chain)
    node.faults.once(Fault.EMPTY_LOGS, 4)
    async with followed(database, simulation, node) as scenario:
        await scenario.grow(40)
        ending = await scenario.ending()
    assert ending.lost > 0 and ending.extra == 0


async def test_a_build_that_neither_links_blocks_nor_compares_nodes_believes_another_fork(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "check_parent", lambda *_: None)
    monkeypatch.setattr(logs, "_same_chain", lambda claims, *_: claims[:1])
    simulation = simulation_of(31)
    bad, good = (ExecutionServer(simulation.chain) for _ in range(2))
    is_on_another_fork(bad, simulation)
    async with followed(database, simulation, bad, good) as scenario:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while not await scenario.extra():
                await asyncio.sleep(0.03)
        ending = await scenario.ending()
    assert ending.extra > 0
