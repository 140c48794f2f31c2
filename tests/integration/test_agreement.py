"""Several nodes that have to give the same logs (`execution.agreement`): whom to believe where one alone would be."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from vaultevents.chain.execution import ExecutionChain, ExecutionOptions
from vaultevents.core.errors import ConfigError, SourceUnavailable
from vaultevents.core.logs import TOPICS
from vaultevents.core.spans import Span
from vaultevents.devnet.blocks import PlacedLog
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.node import Node
from vaultevents.devnet.world import World
from worlds import LogFact, connected, log_facts, truth, watched

pytestmark = pytest.mark.integration

SPAN = Span(1, 58)


class Hiding(Node):
    """Has no logs of one block, whoever asks and however."""

    def __init__(self, chain: Chain, block: int) -> None:
        super().__init__(chain)
        self.hidden = block

    def logs(self, query: object) -> list[PlacedLog]:
        return [one for one in super().logs(query) if one.block.number != self.hidden]


def hiding(world: World, block: int) -> ExecutionServer:
    server = ExecutionServer(world.chain)
    server.node = Hiding(world.chain, block)
    return server


@pytest.fixture(scope="module")
def made() -> World:
    world = World(9)
    world.history(60)
    return world


def with_logs(world: World) -> list[int]:
    return sorted({one.block.number for one in world.chain.logs(SPAN.first + 1, SPAN.last - 1, TOPICS)})


async def read(chain: ExecutionChain, world: World) -> list[LogFact]:
    return log_facts((await chain.read_logs(SPAN, watched(world), None, every=False)).logs)


def reading(agreement: int, *servers: ExecutionServer) -> AbstractAsyncContextManager[ExecutionChain]:
    return connected(*servers, options=ExecutionOptions(agreement=agreement, retry_wait_s=0.01))


async def test_a_consistent_lie_is_outvoted_and_its_node_named(made: World) -> None:
    number = with_logs(made)[3]
    async with reading(1, hiding(made, number), ExecutionServer(made.chain)) as chain:
        assert await read(chain, made) != truth(made, SPAN), "the lie must be one that a node alone gets away with"
    honest = ExecutionServer(made.chain), ExecutionServer(made.chain, block_timestamp=False)
    async with reading(2, hiding(made, number), *honest) as chain:
        assert await read(chain, made) == truth(made, SPAN)
        assert chain.counters.node_faults == 1
        liar, *others = chain.memories()
        assert liar.state == "open" and "otherwise" in (liar.problem or "")
        assert {one.state for one in others} == {"closed"}


async def test_where_too_few_agree_nothing_is_read(made: World) -> None:
    first, second, *_ = with_logs(made)
    async with reading(2, hiding(made, first), hiding(made, second)) as chain:
        with pytest.raises(SourceUnavailable, match="at most 1 of them agree, and 2 have to"):
            await read(chain, made)


async def test_a_node_that_is_away_counts_for_nothing(made: World) -> None:
    away = ExecutionServer(made.chain)
    async with reading(2, away, ExecutionServer(made.chain), ExecutionServer(made.chain)) as chain:
        await away.stop()
        assert await read(chain, made) == truth(made, SPAN)


async def test_more_nodes_than_there_are_cannot_have_to_agree(made: World) -> None:
    with pytest.raises(ConfigError, match=r"name more in execution\.urls"):
        async with reading(2, ExecutionServer(made.chain)):
            pass
