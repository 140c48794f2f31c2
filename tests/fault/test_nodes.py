"""Nodes in every kind of trouble, three together and alone, under the stream as the daemon runs it: lost 0, extra 0.

The first node, the preferred one, is the bad one. What the outbox has at the end is compared with the chain's own
record, and nothing that is not in that record may be stored on the way. Broken builds are caught by the same stories.
"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest

from vaultevents.chain import proofs, settling
from vaultevents.chain.execution import ExecutionChain, ExecutionOptions, HeadPolicy, Identity
from vaultevents.core.errors import NodeFault
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32
from vaultevents.devnet.acts import Funding, log_of
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS, PlacedLog
from vaultevents.devnet.chain import Absent, At, Chain, Lag
from vaultevents.devnet.execution import Balancer, ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.node import Node
from vaultevents.devnet.world import World
from vaultevents.store.cursors import first_block
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.watch import watcher
from vaultevents.watch.hint import Hint
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.streams import Stream, follow
from worlds import Rows, drive, open_at, register, rows

pytestmark = pytest.mark.fault

BLOCKS, FORK, BEGUN = 120, 40, 60
LAG = 20
HANG_S = 0.4
OPTIONS = ExecutionOptions(
    headers="every",  # in backfills, too: with fewer headers the audit behind them finds what silence has hidden
    retry_wait_s=0.01,
    set_aside_s=0.1,
    log_range_start=25,
    answer_limit_bytes=2**20,
)


Trouble = Callable[[ExecutionServer, World], None]


class Serving(Protocol):
    async def start(self) -> str: ...
    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How the stream stood when it had everything, or when nothing had moved for a while."""

    lost: int
    extra: int

    @property
    def is_right(self) -> bool:
        return not (self.lost or self.extra)


@dataclass(frozen=True, slots=True)
class Story:
    """A stream that is being read while its chain may grow."""

    database: Database
    world: World

    async def extra(self) -> int:
        """What is stored and not, or not so, in the chain's own record."""
        wanted = self.world.expected()
        return sum(wanted.get(key) != body for key, body in (await rows(self.database)).items())

    async def grow(self, blocks: int) -> None:
        for number in range(blocks):
            self.world.step()
            if number % 5 == 4:
                await asyncio.sleep(0.01)

    async def ending(self, patience_s: float = 3.0, behind: int = 0) -> Ending:
        """Once all is read, up to `behind` blocks before the end, or nothing has moved for `patience_s`."""
        assert self.world.chain.finalized_number is not None
        last = self.world.chain.finalized_number - behind
        loop = asyncio.get_running_loop()
        seen, since_s = None, loop.time()
        while loop.time() - since_s < patience_s:
            if (now := await self._progress()) != seen:
                seen, since_s = now, loop.time()
            position, backfills, _ = now
            if position >= last and not backfills:
                break
            await asyncio.sleep(0.03)
        return Ending(
            len(self.world.expected(through=last).keys() - (await rows(self.database)).keys()), await self.extra()
        )

    async def _progress(self) -> tuple[int, list[int], int]:
        outbox = Outbox(self.database)
        live = await outbox.live("logs")
        assert live is not None
        backfills = [one.position for one in await outbox.backfills("logs")]
        return live.position, backfills, len(await rows(self.database))


@asynccontextmanager
async def followed(
    database: Database, world: World, *servers: Serving, begun: int = BEGUN, options: ExecutionOptions = OPTIONS
) -> AsyncIterator[Story]:
    """The logs of a world read as the daemon does it: live from block `begun` on, with a backfill of what is before."""
    await register(database, world)
    await open_at(database, world, begun)
    genesis = world.chain.block(0)
    assert genesis is not None
    async with AsyncExitStack() as stack:
        urls = []
        for server in servers:
            urls.append(await server.start())
            stack.push_async_callback(server.stop)
        chain = await stack.enter_async_context(ExecutionChain(urls, head=HeadPolicy(), options=options))
        chain.expect(Identity(world.chain.chain_id, Hash32(genesis.hash)))
        stream = Stream(LogsSource(chain), "block", first_block, 10, 0.02, backfill_step=10)
        task = asyncio.create_task(follow(stream, Outbox(database), lambda _: None, Hint()))
        try:
            yield Story(database, world)
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "BACKOFF_S", (0.03,))


def world_of(seed: int, blocks: int = BLOCKS, chain: Chain | None = None) -> World:
    world = World(seed, chain=chain, events_per_block=1.5)
    world.history(blocks, blocks)
    return world


def forked(world: World, at: int, blocks: int, seed: int = 99) -> Chain:
    """A branch of which each block pays to a watched vault: whoever believes it tells what never was."""
    vault = world.registrations[0].address
    branch = world.chain.fork(at, seed) if at else Chain(seed)
    for _ in range(blocks):
        branch.mine([branch.transaction([log_of(Funding(vault, 10**18))])])
    return branch


def lags(server: ExecutionServer, _: World) -> None:
    server.node.behind = LAG


def lies_and_fails(server: ExecutionServer, _: World) -> None:
    server.faults.rates = {Fault.EMPTY_LOGS: 0.01, Fault.TRUNCATED_LOGS: 0.02, Fault.ERROR: 0.05}
    server.faults.once(Fault.EMPTY_LOGS, 2)


def is_another_chain(server: ExecutionServer, world: World) -> None:
    server.node.chain = forked(world, 0, 2 * BLOCKS)


def is_on_another_fork(server: ExecutionServer, world: World) -> None:
    server.node.chain = forked(world, FORK, 2 * BLOCKS)


def is_pruned(server: ExecutionServer, _: World) -> None:
    server.node.oldest = BLOCKS


def has_lost_its_receipts(server: ExecutionServer, _: World) -> None:
    server.node.oldest_logs = BLOCKS


def hangs(server: ExecutionServer, _: World) -> None:
    server.faults.rates = {Fault.HANG: 1.0}


def options_for(trouble: Trouble) -> ExecutionOptions:
    return replace(OPTIONS, total_timeout_s=HANG_S) if trouble is hangs else OPTIONS


def limit_rate(server: ExecutionServer, trouble: Trouble) -> None:
    """A burst of 429, each with `Retry-After: 1`, from the one that also fails in other ways."""
    if trouble is lies_and_fails:
        server.faults.once(Fault.HTTP_429, 2)


def heal(server: ExecutionServer, world: World) -> None:
    server.node.chain, server.node.behind, server.node.oldest, server.node.oldest_logs = world.chain, 0, 0, 0
    server.faults.stop()


AT_FIRST: Sequence[Trouble] = (lags, lies_and_fails, is_pruned, has_lost_its_receipts, hangs)
LATER: Sequence[Trouble] = (is_another_chain, is_on_another_fork)
"""Those that a node shows by what does not link to the blocks before."""


@pytest.mark.parametrize("trouble", [*AT_FIRST, *LATER])
async def test_one_bad_node_of_three_loses_nothing_and_invents_nothing(database: Database, trouble: Trouble) -> None:
    world = world_of(31)
    bad, *good = (ExecutionServer(world.chain) for _ in range(3))
    if trouble in AT_FIRST:
        trouble(bad, world)
    async with followed(database, world, bad, *good, options=options_for(trouble)) as story:
        assert (await story.ending(behind=LAG if trouble is lags else 0)).is_right
        trouble(bad, world)
        limit_rate(bad, trouble)
        await story.grow(40)
        assert (await story.ending(behind=LAG if trouble is lags else 0)).is_right


@pytest.mark.parametrize("trouble", [*AT_FIRST, *LATER])
async def test_one_bad_node_alone_invents_nothing_and_loses_nothing_in_the_end(
    database: Database, trouble: Trouble
) -> None:
    world = world_of(32)
    node = ExecutionServer(world.chain)
    if trouble in AT_FIRST:
        trouble(node, world)
    async with followed(database, world, node, options=options_for(trouble)) as story:
        if trouble in LATER:
            assert (await story.ending()).is_right
            trouble(node, world)
        await story.grow(40)
        await asyncio.sleep(0.2)
        assert await story.extra() == 0
        if trouble is lies_and_fails:  # this one is got over without help
            assert (await story.ending()).is_right
            limit_rate(node, trouble)
            await story.grow(20)
            assert (await story.ending(patience_s=20)).is_right
            assert node.faults.fired[Fault.EMPTY_LOGS] > 1
        heal(node, world)
        assert (await story.ending()).is_right


async def test_a_node_that_becomes_another_chain_in_the_middle_of_a_run_is_left(database: Database) -> None:
    world = world_of(33)
    turning, good = ExecutionServer(world.chain), ExecutionServer(world.chain)
    async with followed(database, world, turning, good) as story:
        assert (await story.ending()).is_right
        for chain in (forked(world, 0, 400), world.chain, forked(world, BLOCKS // 2, 400)):
            await story.grow(20)
            turning.node.chain = chain
            await asyncio.sleep(0.1)
        await story.grow(20)
        assert (await story.ending()).is_right


@pytest.mark.parametrize("seed", [34, None])
async def test_a_balancer_before_a_lagging_node_loses_nothing(database: Database, seed: int | None) -> None:
    """One URL, so one lonely node, whose head is from one machine and whose logs are from another (I1)."""
    world = world_of(34)
    lagging, *good = (ExecutionServer(world.chain, behind=LAG if number == 0 else 0) for number in range(3))
    async with followed(database, world, Balancer(seed, lagging, *good)) as story:
        for _ in range(10):
            await story.grow(10)
            await asyncio.sleep(0.02)
        assert (await story.ending()).is_right
    assert lagging.exchanges > 20


@pytest.mark.parametrize("nodes", [1, 3])
async def test_finality_in_trouble_moves_nothing_and_after_1000_blocks_all_is_read(
    database: Database, nodes: int
) -> None:
    world = world_of(35, BEGUN + 2)
    servers = [ExecutionServer(world.chain) for _ in range(nodes)]
    stall = At(BEGUN)
    async with followed(database, world, *servers) as story:
        assert (await story.ending()).is_right
        before = await rows(database)
        for position in (Absent.NULL, Absent.UNKNOWN, At(10), At(0), stall):
            world.chain.finalized = position
            world.history(1000 if position is stall else 10, 500 if position is stall else 10)
            await asyncio.sleep(0.1)
            assert await rows(database) == before
        world.chain.finalized = Lag(2)
        assert (await story.ending()).is_right
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
        self.told, _ = await self._process.communicate()


async def test_100_mb_from_one_node_cost_neither_memory_nor_events(database: Database) -> None:
    world = world_of(36)
    huge = Endless()
    tracemalloc.start()
    try:
        async with followed(database, world, huge, ExecutionServer(world.chain)) as story:
            assert (await story.ending()).is_right
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert b"asked" in huge.told
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
    """In the middle of a run, and then all over again by a replay (I15)."""
    world = world_of(37)
    first, second = ExecutionServer(world.chain), ExecutionServer(world.chain)
    second.node = Shouting(world.chain, max_range=7, limit_style="alchemy", block_timestamp=False)
    async with followed(database, world, first, second) as story:
        await story.grow(20)
        await first.stop()
        await story.grow(20)
        assert (await story.ending()).is_right
    assert second.exchanges > 0
    stored = await rows(database)
    assert await replayed(database, world, second) == stored


async def replayed(database: Database, world: World, server: ExecutionServer) -> Rows:
    """What is stored after a replay of everything, which must find every row as it would write it."""
    outbox, final = Outbox(database), world.chain.finalized_number
    assert final is not None
    url = await server.start()
    async with ExecutionChain([url], head=HeadPolicy(), options=OPTIONS) as chain:
        cursor = await outbox.begin_replay("logs", Span(0, final))
        done = [one.committed for one in await drive(LogsSource(chain), outbox, cursor, 25)]
    await server.stop()
    assert not any(one.inserted or one.different for one in done)
    return await rows(database)


async def test_full_blocks_are_read_but_a_build_that_takes_each_positive_bloom_for_a_fault_stalls(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bloom of these blocks is positive by chance; one node alone."""

    async def distrust(node: Any, _nodes: Any, part: Any, _terms: Any) -> None:
        if part.unanswered(sorted(part.headers)):
            raise NodeFault(node.name, "a bloom is positive and there is no log")

    chain = Chain(38)
    chain.filler_logs = FULL_BLOCK_LOGS
    world = world_of(38, 30, chain)
    options = ExecutionOptions(retry_wait_s=0.01, lone_rereads=2)
    with monkeypatch.context() as broken:
        broken.setattr(settling, "_ask_another", distrust)
        async with followed(database, world, ExecutionServer(chain), begun=0, options=options) as story:
            ending = await story.ending(patience_s=0.5)
            assert ending.lost > 0 and ending.extra == 0
            broken.undo()
            assert (await story.ending()).is_right


async def test_a_build_without_the_bloom_check_loses_logs(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "unanswered", lambda *_: False)
    monkeypatch.setattr(settling, "_doubtful", lambda part, terms: proofs.watched_blocks(part.blocks, terms.watched))
    world = world_of(32)
    node = ExecutionServer(world.chain)
    node.faults.once(Fault.EMPTY_LOGS, 4)
    async with followed(database, world, node) as story:
        await story.grow(40)
        ending = await story.ending()
    assert ending.lost > 0 and ending.extra == 0


async def test_a_build_that_reads_by_number_only_believes_another_fork(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "check_parent", lambda *_: None)
    world = world_of(31)
    bad, good = (ExecutionServer(world.chain) for _ in range(2))
    is_on_another_fork(bad, world)
    async with followed(database, world, bad, good) as story:
        ending = await story.ending(patience_s=0.7)
    assert ending.lost > 0 and ending.extra > 0
