"""Nodes that leave logs out, and full blocks, in which blooms prove nothing: no log is lost (rule T14)."""

from __future__ import annotations

from typing import Any

import pytest

from simulation_fixtures import LogFact, connected, log_facts, truth, watched
from vaultevents.chain.execution.block_proofs import Budget
from vaultevents.chain.execution.client import ExecutionOptions
from vaultevents.chain.execution.log_range import LogQuery
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.logs import Log
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32
from vaultevents.devnet.acts import Funding, log_of
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.floods import flood
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration

SPAN = Span(1, 58)


@pytest.fixture(scope="module")
def made() -> Simulation:
    simulation = Simulation(11)
    simulation.history(60)
    return simulation


@pytest.fixture(scope="module")
def full() -> Simulation:
    simulation = Simulation(5)
    simulation.chain.filler_logs = FULL_BLOCK_LOGS
    simulation.history(60)
    return simulation


def silent(
    simulation: Simulation, rate: float = 1.0, seed: int = 3, fault: Fault = Fault.EMPTY_LOGS
) -> ExecutionServer:
    server = ExecutionServer(simulation.chain)
    server.faults.seed, server.faults.rates = seed, {fault: rate}
    return server


def options(**changes: Any) -> ExecutionOptions:
    return ExecutionOptions(retry_wait_s=0.01, set_aside_s=0.05, **changes)


def with_logs(simulation: Simulation) -> int:
    return len({number for number, *_ in truth(simulation, SPAN)})


async def collect(
    made: Simulation, *servers: ExecutionServer, read_options: ExecutionOptions | None = None, rounds: int = 60
) -> tuple[list[LogFact], int]:
    """All logs, span after span as a watcher reads them, and how often a span had to be tried again."""
    logs: list[Log] = []
    failures, first = 0, 1
    anchor: Hash32 | None = None
    async with connected(*servers, options=read_options or options()) as nodes:
        while first <= SPAN.last and failures < rounds:
            try:
                found = await nodes.read_logs(Span(first, min(first + 2, SPAN.last)), watched(made), anchor)
            except SourceUnavailable:
                failures += 1
                continue
            logs += found.logs
            first, anchor = found.last.number + 1, found.last.hash
    return log_facts(logs), failures


@pytest.mark.parametrize("fault", [Fault.EMPTY_LOGS, Fault.TRUNCATED_LOGS])
@pytest.mark.parametrize(("nodes", "rate"), [(1, 0.1), (1, 0.5), (3, 0.1)])
async def test_silence_in_a_share_of_the_answers_loses_nothing(
    made: Simulation, fault: Fault, nodes: int, rate: float
) -> None:
    servers = [silent(made, rate, seed, fault) for seed in range(3, 3 + nodes)]
    found, failures = await collect(made, *servers)
    assert found == truth(made, SPAN)
    assert failures < 10
    assert sum(server.faults.fired[fault] for server in servers) > 0


async def test_a_lone_node_that_is_always_silent_loses_nothing_within_the_budget(made: Simulation) -> None:
    async with connected(silent(made), options=options()) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
        assert nodes.counters.blooms_settled == with_logs(made)
        assert nodes.counters.blooms_unsettled == 0


async def test_without_the_bloom_check_the_silence_of_a_lone_node_loses_logs(
    made: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogQuery, "may_be_in", lambda *_: False)
    found, _ = await collect(made, silent(made, 0.5))
    assert set(found) < set(truth(made, SPAN))


async def test_a_budget_bounds_what_blooms_cost_and_what_it_leaves_is_counted(made: Simulation) -> None:
    for budget in (0, 5):
        async with connected(silent(made), options=options(blooms_per_day=budget)) as nodes:
            found = await nodes.read_logs(SPAN, watched(made), None)
            assert len(found.times_s) == nodes.counters.blocks_proven == nodes.counters.blooms_settled == budget
            assert nodes.counters.blooms_unsettled == with_logs(made) - budget
            assert set(log_facts(found.logs)) <= set(truth(made, SPAN))


async def test_live_and_past_blocks_have_budgets_of_their_own(made: Simulation) -> None:
    async with connected(silent(made), options=options(blooms_per_day=100)) as nodes:
        for live in (False, False, False, False, True):
            found = await nodes.read_logs(SPAN, watched(made), None, live=live)
        assert log_facts(found.logs) == truth(made, SPAN)
        assert nodes.counters.blooms_unsettled > 0


async def test_a_log_that_only_another_node_gives_is_not_lost_whatever_the_budget(made: Simulation) -> None:
    for every in (True, False):
        servers = silent(made), ExecutionServer(made.chain)
        async with connected(*servers, options=options(blooms_per_day=0)) as nodes:
            assert log_facts((await nodes.read_logs(SPAN, watched(made), None, every=every)).logs) == truth(made, SPAN)
            assert nodes.counters.claims_disproved == 1
            assert nodes.counters.blooms_settled == nodes.counters.blooms_unsettled == 0


async def test_with_completeness_by_receipts_nodes_that_all_hide_logs_lose_nothing(made: Simulation) -> None:
    read_options = options(completeness="receipts", blooms_per_day=0)
    for servers in ([silent(made)], [silent(made), silent(made)]):
        async with connected(*servers, options=read_options) as nodes:
            found = await nodes.read_logs(SPAN, watched(made), None, every=False)
            assert log_facts(found.logs) == truth(made, SPAN)
    async with connected(silent(made), silent(made), options=options()) as nodes:
        assert (await nodes.read_logs(SPAN, watched(made), None)).logs == [], "so that is what the option is for"


async def test_silence_in_full_blocks_loses_nothing_either(full: Simulation) -> None:
    found, failures = await collect(full, silent(full, 0.3))
    assert found == truth(full, SPAN)
    assert failures < 20


async def test_full_blooms_cost_nothing_where_there_are_two_nodes(full: Simulation) -> None:
    first, second = ExecutionServer(full.chain), ExecutionServer(full.chain)
    async with connected(first, second, options=options()) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(full), None)).logs) == truth(full, SPAN)
        assert nodes.counters.blocks_proven == with_logs(full)
        assert nodes.counters.blooms_settled == nodes.counters.blooms_unsettled == 0
    assert second.calls["eth_getBlockReceipts"] == 0


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_block_with_more_logs_than_a_node_gives_is_read_by_address(nodes: int) -> None:
    """10,004 logs of a watched topic in one block, of which a node gives 10,000 (so that a range of one is refused)."""
    simulation = Simulation(5)
    simulation.history(10)
    placed = simulation.chain.mine(
        [*flood(simulation.chain, 10_004), simulation.chain.transaction(watched_logs(simulation))]
    )
    for _ in range(3):
        simulation.chain.mine()
    span = Span(1, placed.number)
    servers = [ExecutionServer(simulation.chain, max_results=10_000) for _ in range(nodes)]
    async with connected(*servers, options=options()) as chain:
        found = await chain.read_logs(span, watched(simulation), None, every=False)
        assert log_facts(found.logs) == truth(simulation, span)
        assert found.times_s[placed.number] == placed.timestamp_s
        assert chain.counters.ranges_refused > 0
        assert chain.counters.node_faults == chain.counters.claims_disproved == 0


async def test_a_block_that_is_refused_by_address_too_is_read_from_its_receipts() -> None:
    simulation = Simulation(5)
    simulation.history(10)
    vault = simulation.registrations[0].address
    placed = simulation.chain.mine(flood(simulation.chain, 10_004, vault))
    for _ in range(3):
        simulation.chain.mine()
    span = Span(placed.number - 2, placed.number)
    async with connected(ExecutionServer(simulation.chain, max_results=1_000), options=options()) as nodes:
        found = await nodes.read_logs(span, watched(simulation), None, every=False)
    assert log_facts(found.logs) == truth(simulation, span)
    assert len(found.logs) >= 10_004


async def test_answers_larger_than_the_limit_are_read_piece_by_piece(full: Simulation) -> None:
    limited = options(answer_limit_bytes=150_000, batch_size=5)
    async with connected(ExecutionServer(full.chain), options=limited) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(full), None)).logs) == truth(full, SPAN)
        assert nodes.counters.node_faults == nodes.counters.unavailable == 0


def watched_logs(simulation: Simulation) -> list[Any]:
    """A payment to a registered vault."""
    return [log_of(Funding(simulation.registrations[0].address, 10**18))]


def test_a_budget_is_spent_and_comes_back_over_a_day() -> None:
    now_s = 0.0
    budget = Budget(1_000, lambda: now_s)
    assert [budget.take(600), budget.take(600), budget.take(1)] == [600, 400, 0]
    now_s += 86.3
    assert budget.take(10) == 0, "a block is read when all of its share is there"
    now_s += 0.2
    assert budget.take(10) == 1
    now_s += 43_200
    assert budget.take(2_000) == 500
    now_s += 10 * 86_400
    assert budget.take(2_000) == 1_000, "a day's share is the most that is saved"
    assert Budget(0, lambda: now_s).take(1) == 0
