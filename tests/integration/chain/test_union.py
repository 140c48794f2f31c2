"""Several nodes are asked at once which blocks hold logs: one honest node suffices, a liar is named (rule C2)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from lying_node import Lie, LyingServer
from simulation_fixtures import LogFact, connected, log_facts, truth, watched
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions
from vaultevents.chain.execution.jsonrpc import RpcNode
from vaultevents.chain.execution.logs import CONTESTED_AT_ONCE
from vaultevents.chain.upstream.pool import NodePool
from vaultevents.core.errors import ChainDisagreement, SourceUnavailable
from vaultevents.core.logs import TOPICS
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32
from vaultevents.devnet.acts import Funding, log_of
from vaultevents.devnet.blocks import PlacedLog
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.node import Node
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration

T = TypeVar("T")
SPAN = Span(1, 98)
QUICK = ExecutionOptions(retry_wait_s=0.01, set_aside_s=60.0)

both_ways = pytest.mark.parametrize("every", [True, False])


class Hiding(Node):
    """Has no logs of some blocks, by whatever they are asked for; headers and receipts are true."""

    def __init__(self, chain: Chain, hidden: set[int]) -> None:
        super().__init__(chain)
        self.hidden = hidden

    def logs(self, query: object) -> list[PlacedLog]:
        return [placed for placed in super().logs(query) if placed.block.number not in self.hidden]


class Flooding(Node):
    """Claims a payment to a watched vault in every block that has no log of the queried topics."""

    vault = bytes(20)
    hidden: frozenset[int] = frozenset()

    def logs(self, query: Any) -> list[PlacedLog]:
        found = [placed for placed in super().logs(query) if placed.block.number not in self.hidden]
        if "fromBlock" not in query:
            return found
        held = self.hidden | {placed.block.number for placed in found}
        false = log_of(Funding(self.vault, 10**18))
        blocks = self.chain.blocks(int(query["fromBlock"], 16), int(query["toBlock"], 16))
        invented = [PlacedLog(block, bytes(32), 0, 0, false) for block in blocks if block.number not in held]
        return sorted([*found, *invented], key=lambda placed: placed.block.number)


def hiding(simulation: Simulation, hidden: set[int]) -> ExecutionServer:
    server = ExecutionServer(simulation.chain)
    server.node = Hiding(simulation.chain, hidden)
    return server


def flooding(simulation: Simulation, *hidden: int) -> ExecutionServer:
    server = ExecutionServer(simulation.chain)
    node = server.node = Flooding(simulation.chain)
    node.vault, node.hidden = simulation.registrations[0].address, frozenset(hidden)
    return server


@pytest.fixture(scope="module")
def made() -> Simulation:
    simulation = Simulation(9, events_per_block=0.5)
    simulation.history(100)
    return simulation


def with_logs(simulation: Simulation) -> list[int]:
    return sorted({placed.block.number for placed in simulation.chain.logs(SPAN.first, SPAN.last, TOPICS)})


async def read(
    chain: ExecutionChain, simulation: Simulation, *, every: bool = False, live: bool = False
) -> list[LogFact]:
    return log_facts((await chain.read_logs(SPAN, watched(simulation), None, every=every, live=live)).logs)


@both_ways
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_what_one_node_hides_another_gives_and_the_liar_is_named(made: Simulation, at: int, every: bool) -> None:
    servers = [ExecutionServer(made.chain) for _ in range(3)]
    servers[at] = hiding(made, {with_logs(made)[3]})
    async with connected(*servers, options=QUICK) as chain:
        assert await read(chain, made, every=every) == truth(made, SPAN)
        assert (chain.counters.claims_disproved, chain.counters.node_faults) == (1, 1)
        liar = chain.node_states()[at]
        assert liar.state == "open"
        assert f"hides logs of block {with_logs(made)[3]}: it gave 0 watched logs" in (liar.problem or "")
        assert [memory.state for memory in chain.node_states()].count("closed") == 2


async def test_two_nodes_that_hide_different_blocks_give_all_of_them_together(made: Simulation) -> None:
    first, second, *_ = with_logs(made)
    async with connected(hiding(made, {first}), hiding(made, {second}), options=QUICK) as chain:
        assert await read(chain, made) == truth(made, SPAN)
        assert [memory.state for memory in chain.node_states()] == ["open", "open"]


@both_ways
async def test_one_honest_node_suffices_against_two_that_hide_the_same(made: Simulation, every: bool) -> None:
    hidden = set(with_logs(made))
    servers = hiding(made, hidden), hiding(made, hidden), ExecutionServer(made.chain)
    async with connected(*servers, options=QUICK) as chain:
        assert await read(chain, made, every=every) == truth(made, SPAN)
        assert [memory.state for memory in chain.node_states()] == ["open", "open", "closed"]


async def test_without_the_union_what_the_first_node_hides_is_lost(
    made: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask_first(
        nodes: NodePool[RpcNode], question: Callable[[RpcNode], Awaitable[T]], **_: object
    ) -> list[tuple[RpcNode, T]]:
        return [(nodes.nodes[0], await question(nodes.nodes[0]))]

    monkeypatch.setattr(NodePool, "ask_each", ask_first)
    hidden = with_logs(made)[3]
    async with connected(hiding(made, {hidden}), ExecutionServer(made.chain), options=QUICK) as chain:
        assert await read(chain, made) == [fact for fact in truth(made, SPAN) if fact[0] != hidden]


async def test_as_many_nodes_are_asked_as_the_option_says_in_their_order(made: Simulation) -> None:
    for ask, asked in ((1, [True, False, False]), (2, [True, True, False]), (None, [True, True, True])):
        servers = [ExecutionServer(made.chain) for _ in range(3)]
        async with connected(*servers, options=ExecutionOptions(ask=ask)) as chain:
            found = await chain.read_logs(SPAN, watched(made), None, every=False)
            assert log_facts(found.logs) == truth(made, SPAN)
            assert found.witnesses == sum(asked)
        assert [server.calls["eth_getLogs"] > 0 for server in servers] == asked
        assert [server.calls["eth_getBlockReceipts"] > 0 for server in servers] == [True, False, False]


@pytest.mark.parametrize("trouble", [Fault.HTTP_500, Fault.ERROR, Fault.HTML, Fault.NULL_BLOCK, Fault.REMOVED])
async def test_a_node_that_does_not_answer_counts_for_nothing(made: Simulation, trouble: Fault) -> None:
    failing, honest = ExecutionServer(made.chain), ExecutionServer(made.chain)
    failing.faults.rates = {trouble: 1.0}
    async with connected(failing, honest, options=QUICK) as chain:
        found = await chain.read_logs(SPAN, watched(made), None)
        assert log_facts(found.logs) == truth(made, SPAN)
        assert found.witnesses == 1


async def test_a_silent_node_delays_a_live_reading_only_by_what_is_usual_for_it(made: Simulation) -> None:
    silent, honest = ExecutionServer(made.chain), ExecutionServer(made.chain)
    silent.faults.rates = {Fault.HANG: 1.0}
    async with connected(honest, silent, options=ExecutionOptions(total_timeout_s=280.0)) as chain:
        found = await chain.read_logs(SPAN, watched(made), None, live=True)
        assert log_facts(found.logs) == truth(made, SPAN)
        assert found.witnesses == 1


@both_ways
async def test_a_flood_of_false_claims_is_cut_short(made: Simulation, every: bool) -> None:
    for servers in ((flooding(made), ExecutionServer(made.chain)), (ExecutionServer(made.chain), flooding(made))):
        async with connected(*servers, options=QUICK) as chain:
            assert await read(chain, made, every=every) == truth(made, SPAN)
            in_vain = chain.counters.blocks_proven - len(with_logs(made))
            assert 0 < in_vain <= CONTESTED_AT_ONCE < len(SPAN) - len(with_logs(made))
            read_once = chain.counters.blocks_proven
            assert await read(chain, made, every=every) == truth(made, SPAN)
            assert chain.counters.blocks_proven == read_once + len(with_logs(made)), "the liar is not asked again"


@both_ways
@pytest.mark.parametrize("honest_nodes", [1, 2])
async def test_a_flood_is_cut_short_also_where_its_node_was_disproved_before(
    made: Simulation, every: bool, honest_nodes: int
) -> None:
    honest = [ExecutionServer(made.chain) for _ in range(honest_nodes)]
    async with connected(flooding(made, with_logs(made)[0]), *honest, options=QUICK) as chain:
        assert await read(chain, made, every=every) == truth(made, SPAN)
        assert chain.counters.blocks_proven - len(with_logs(made)) <= CONTESTED_AT_ONCE


async def test_a_flood_of_a_lone_node_costs_blocks_but_gives_nothing_false(made: Simulation) -> None:
    async with connected(flooding(made), options=QUICK) as chain:
        assert await read(chain, made) == truth(made, SPAN)
        assert chain.counters.blocks_proven == len(SPAN)


@both_ways
@pytest.mark.parametrize("liar_first", [True, False])
async def test_two_final_chains_stop_the_stream_with_both_sides_named(
    made: Simulation, every: bool, liar_first: bool
) -> None:
    servers = [LyingServer(made, Lie.EARLY_FORK), ExecutionServer(made.chain)]
    async with connected(*(servers if liar_first else servers[::-1]), options=QUICK) as chain:
        with pytest.raises(ChainDisagreement) as caught:
            await read(chain, made, every=every)
        assert all(name in str(caught.value) for name in chain.nodes)
        assert f"give two blocks {SPAN.last}" in str(caught.value)
        with pytest.raises(ChainDisagreement, match="nothing is sent until they agree"):
            await chain.final_head()


async def test_a_span_before_the_fork_is_read_all_the_same(made: Simulation) -> None:
    before = Span(1, 30)
    async with connected(LyingServer(made, Lie.EARLY_FORK), ExecutionServer(made.chain), options=QUICK) as chain:
        found = await chain.read_logs(before, watched(made), None)
        assert log_facts(found.logs) == truth(made, before)


async def test_without_final_blocks_the_preferred_node_is_followed(made: Simulation) -> None:
    branch = LyingServer(made, Lie.LATE_FORK)
    for servers, count in (((ExecutionServer(made.chain), branch), 1), ((ExecutionServer(made.chain),) * 1, 1)):
        async with connected(*servers, options=QUICK) as chain:
            found = await chain.read_logs(SPAN, watched(made), None, final=False)
            assert log_facts(found.logs) == truth(made, SPAN)
            assert found.witnesses == count


async def test_a_node_alone_is_asked_where_that_is_wanted_whatever_the_others_say(made: Simulation) -> None:
    hidden = with_logs(made)[3]
    async with connected(hiding(made, {hidden}), ExecutionServer(made.chain), options=QUICK) as chain:
        liar, honest = chain.nodes
        found = await chain.read_logs(SPAN, watched(made), None, every=False, only=liar)
        assert log_facts(found.logs) == [fact for fact in truth(made, SPAN) if fact[0] != hidden]
        also = await chain.read_logs(SPAN, watched(made), None, every=False, only=liar, also={hidden})
        assert log_facts(also.logs) == truth(made, SPAN)
        assert chain.node_states()[0].state == "open"
        found = await chain.read_logs(SPAN, watched(made), None, every=False, only=honest)
        assert log_facts(found.logs) == truth(made, SPAN)


async def test_what_is_known_to_be_final_is_not_given_up_for_what_all_nodes_say_now(made: Simulation) -> None:
    server = ExecutionServer(made.chain)
    async with connected(server, options=QUICK) as chain:
        final = await chain.final_head()
        server.node.chain = made.chain.fork(50, 77)
        for _ in range(60):
            server.node.chain.mine()
        with pytest.raises(SourceUnavailable, match="was final"):
            await chain.read_logs(Span(60, final.number), watched(made), None)
        other = server.node.chain.block(59)
        assert other is not None
        with pytest.raises(SourceUnavailable, match="was final"):
            await chain.read_logs(Span(60, final.number), watched(made), Hash32(other.hash))
