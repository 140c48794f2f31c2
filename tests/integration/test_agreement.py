"""Several nodes that have to give the same logs (`execution.agreement`): whom to believe where one alone would be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from vaultevents.chain.execution import ExecutionChain, ExecutionOptions, HeadPolicy, LogRange
from vaultevents.core.errors import ConfigError, SourceUnavailable
from vaultevents.core.logs import TOPICS
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address
from vaultevents.devnet.blocks import PlacedLog
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.world import World

pytestmark = pytest.mark.integration

SPAN = Span(1, 58)


class Hiding(ExecutionServer):
    """Has no logs of one block, whoever asks and however."""

    def __init__(self, world: World, block: int, **options: Any) -> None:
        super().__init__(world.chain, **options)
        real = self.node.logs

        def hidden(query: object) -> list[PlacedLog]:
            return [one for one in real(query) if one.block.number != block]

        self._hidden = hidden

    def _logs(self, query: object, key: str) -> list[Any]:
        return [self._raw(placed) for placed in self._hidden(query)]


@pytest.fixture(scope="module")
def made() -> World:
    world = World(9)
    world.history(60)
    return world


def with_logs(world: World) -> list[int]:
    return sorted({one.block.number for one in world.chain.logs(SPAN.first + 1, SPAN.last - 1, TOPICS)})


async def read(world: World, chain: ExecutionChain) -> LogRange:
    vaults = frozenset(Address(one.address) for one in world.registrations)
    queues = frozenset(Address(one.queue) for one in world.registrations if one.queue is not None)
    return await chain.read_logs(SPAN, Watched(vaults, queues), None, every=False)


def found(world: World, logs: LogRange) -> bool:
    truth = [(one.block.number, one.log_index) for one in world.chain.logs(SPAN.first, SPAN.last, TOPICS)]
    return [(log.block_number, log.log_index) for log in logs.logs] == truth


@asynccontextmanager
async def reading(agreement: int, *servers: ExecutionServer) -> AsyncIterator[ExecutionChain]:
    urls = [await server.start() for server in servers]
    try:
        options = ExecutionOptions(agreement=agreement, retry_wait_s=0.01)
        async with ExecutionChain(urls, head=HeadPolicy(), options=options) as chain:
            yield chain
    finally:
        for server in servers:
            await server.stop()


async def test_a_consistent_lie_is_outvoted_and_its_node_named(made: World) -> None:
    number = with_logs(made)[3]
    async with reading(1, Hiding(made, number), ExecutionServer(made.chain)) as chain:
        assert not found(made, await read(made, chain)), "the lie must be one that a node alone gets away with"
    honest = ExecutionServer(made.chain), ExecutionServer(made.chain, block_timestamp=False)
    async with reading(2, Hiding(made, number), *honest) as chain:
        assert found(made, await read(made, chain))
        assert chain.counters.node_faults == 1
        liar, *others = chain.memories()
        assert liar.state == "open" and "otherwise" in (liar.problem or "")
        assert {one.state for one in others} == {"closed"}


async def test_where_too_few_agree_nothing_is_read(made: World) -> None:
    first, second, *_ = with_logs(made)
    async with reading(2, Hiding(made, first), Hiding(made, second)) as chain:
        with pytest.raises(SourceUnavailable, match="at most 1 of them agree, and 2 have to"):
            await read(made, chain)


async def test_a_node_that_is_away_counts_for_nothing(made: World) -> None:
    away = ExecutionServer(made.chain)
    async with reading(2, away, ExecutionServer(made.chain), ExecutionServer(made.chain)) as chain:
        await away.stop()
        assert found(made, await read(made, chain))
    with pytest.raises(ConfigError, match=r"name more in execution\.urls"):
        async with reading(2, ExecutionServer(made.chain)):
            pass
