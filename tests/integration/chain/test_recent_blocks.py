"""Final blocks that were read are not asked for again, and what does not fit is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from simulation_fixtures import connected, log_facts, truth, watched, whole
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions
from vaultevents.chain.execution.recent_blocks import RecentBlock, RecentBlocks
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.logs import Header
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration

Connected = tuple[Simulation, ExecutionServer, ExecutionChain]


@pytest.fixture
async def reader() -> AsyncIterator[Connected]:
    made = Simulation(5, validators=40)
    made.history(60)
    server = ExecutionServer(made.chain)
    options = ExecutionOptions(retry_wait_s=0.0, set_aside_s=0.0, attempts=1, blooms_per_day=0)
    async with connected(server, options=options) as chain:
        yield made, server, chain


async def test_each_block_is_asked_for_once(reader: Connected) -> None:
    made, server, chain = reader
    span = Span(1, whole(made).last)
    found = await chain.read_logs(span, watched(made), None, live=True)
    assert server.calls["eth_getBlockByNumber"] >= len(span)
    server.calls.clear()
    again = await chain.read_logs(span, Watched(oracles=frozenset({Address(bytes(20))})), None, live=True)
    assert again.headers == {number: found.headers[number] for number in again.headers}
    assert server.calls["eth_getBlockByNumber"] <= 4
    server.calls.clear()
    blocks = await chain.read_withdrawals(span, None, None)
    assert not server.calls
    assert [block.hash for block in blocks] == [found.headers[number].hash for number in range(1, span.last + 1)]
    assert [len(block.withdrawals) for block in blocks] == [
        len(block.withdrawals) for block in made.chain.blocks(1, span.last)
    ]


async def test_blocks_that_are_not_kept_are_read_and_linked(reader: Connected) -> None:
    made, server, chain = reader
    last = whole(made).last
    await chain.read_logs(Span(1, last - 9), watched(made), None, live=True)
    server.calls.clear()
    blocks = await chain.read_withdrawals(Span(1, last), None, None)
    assert server.calls["eth_getBlockByNumber"] == 9
    assert [block.number for block in blocks] == list(range(1, last + 1))


async def test_blocks_of_another_chain_are_not_used(reader: Connected) -> None:
    made, server, chain = reader
    span = whole(made)
    other = made.chain.fork(20, seed=9)
    for _ in range(span.last - 20):
        other.mine()
    server.node.chain = other
    await chain.read_logs(span, watched(made), None, live=True)
    server.node.chain = made.chain
    found = await chain.read_logs(span, watched(made), None, live=True)
    assert log_facts(found.logs) == truth(made, span)
    server.node.chain = other
    await chain.read_logs(span, watched(made), None, live=True)
    server.node.chain = made.chain
    block = made.chain.block(19)
    assert block is not None
    with pytest.raises(SourceUnavailable, match="is not linked"):  # the kept ones to what the node gives now
        await chain.read_withdrawals(Span(20, span.last + 1), Hash32(block.hash), None)
    blocks = await chain.read_withdrawals(Span(20, span.last + 1), Hash32(block.hash), None)
    final = made.chain.blocks(20, span.last + 1)
    assert [block.hash for block in blocks] == [block.hash for block in final]


def test_few_blocks_are_kept() -> None:
    def header(number: int, parent: int) -> Header:
        return Header(number, _hash(number), _hash(parent), number, bytes(256), _hash(0), _hash(0))

    recent = RecentBlocks(most=3)
    recent.add([RecentBlock(header(number, number - 1), b"") for number in range(1, 6)])
    assert [block.header.number for block in recent.first_of(Span(3, 9))] == [3, 4, 5]
    assert recent.first_of(Span(2, 9)) == []
    assert recent.linked_to(_hash(5), Span(2, 5)) is None
    assert [found.number for found in recent.linked_to(_hash(5), Span(3, 5)) or ()] == [3, 4, 5]
    recent.add([RecentBlock(header(4, 77), b"")])
    assert recent.linked_to(_hash(5), Span(3, 5)) is None
    assert [block.header.number for block in recent.first_of(Span(3, 9))] == [3]


def _hash(number: int) -> Hash32:
    return Hash32(number.to_bytes(32))
