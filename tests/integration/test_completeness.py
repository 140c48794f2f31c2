"""Nodes that leave logs out, and full blocks, in which silence proves nothing: no log is lost (reliability T14)."""

from __future__ import annotations

import pytest

from vaultevents.chain import proofs
from vaultevents.chain.execution import ExecutionOptions
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.logs import Log
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.world import World
from worlds import LogFact, connected, log_facts, truth, watched

pytestmark = pytest.mark.integration

QUICK = ExecutionOptions(retry_wait_s=0.01, log_range_start=25, lone_rereads=3)
SPAN = Span(1, 58)


@pytest.fixture(scope="module")
def made() -> World:
    world = World(11)
    world.history(60)
    return world


async def collect(made: World, *servers: ExecutionServer, rounds: int = 60) -> tuple[list[LogFact], int]:
    """All logs, span after span as a watcher reads them, and how often a span had to be tried again."""
    logs: list[Log] = []
    failures, first = 0, 1
    anchor: Hash32 | None = None
    async with connected(*servers, options=ExecutionOptions(retry_wait_s=0.01, set_aside_s=0.05)) as nodes:
        while first <= SPAN.last and failures < rounds:
            try:
                found = await nodes.read_logs(Span(first, min(first + 9, SPAN.last)), watched(made), anchor)
            except SourceUnavailable:
                failures += 1
                continue
            logs += found.logs
            first, anchor = found.last.number + 1, found.last.hash
    return log_facts(logs), failures


@pytest.mark.parametrize("fault", [Fault.EMPTY_LOGS, Fault.TRUNCATED_LOGS])
@pytest.mark.parametrize("alone", [True, False])
async def test_silence_on_a_tenth_of_the_calls_loses_nothing(made: World, fault: Fault, alone: bool) -> None:
    servers = [ExecutionServer(made.chain) for _ in range(1 if alone else 3)]
    for seed, server in enumerate(servers, start=3):
        server.faults.seed = seed
        server.faults.rates = {fault: 0.1}
    found, failures = await collect(made, *servers)
    assert found == truth(made, SPAN)
    assert failures < 10
    assert sum(server.faults.fired[fault] for server in servers) > 0


async def test_without_the_bloom_check_silence_loses_logs(made: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "unanswered", lambda *_: False)
    server = ExecutionServer(made.chain)
    server.faults.rates = {Fault.EMPTY_LOGS: 0.1}
    server.faults.seed = 3
    found, _ = await collect(made, server)
    assert set(found) < set(truth(made, SPAN))


async def test_silence_in_full_blocks_loses_nothing_either() -> None:
    full = World(5)
    full.chain.filler_logs = FULL_BLOCK_LOGS
    full.history(60)
    server = ExecutionServer(full.chain)
    server.faults.rates = {Fault.EMPTY_LOGS: 0.05}
    found, failures = await collect(full, server)
    assert found == truth(full, SPAN)
    assert failures < 20


async def test_a_log_that_only_another_node_knows_is_not_lost(made: World) -> None:
    """The first node is silent for good, and no block is proven from all of its logs."""
    options = ExecutionOptions(suspicion_share=0.0)
    silent = ExecutionServer(made.chain)
    silent.faults.rates = {Fault.EMPTY_LOGS: 1.0}
    async with connected(silent, ExecutionServer(made.chain), options=options) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
        assert nodes.counters.node_faults == 1
    async with connected(silent, options=options) as nodes:
        assert (await nodes.read_logs(SPAN, watched(made), None)).logs == []  # so that is what the share is for


async def test_a_block_with_more_logs_than_a_node_gives_does_not_stop_the_stream() -> None:
    full = World(5)
    full.chain.filler_logs = FULL_BLOCK_LOGS
    full.history(20)
    span = Span(2, 19)
    async with connected(ExecutionServer(full.chain, max_results=10**6), options=QUICK) as nodes:
        assert log_facts((await nodes.read_logs(span, watched(full), None)).logs) == truth(full, span)
        assert nodes.counters.full_proofs > 0
    options = ExecutionOptions(answer_limit_bytes=150_000, batch_size=5)
    async with connected(ExecutionServer(full.chain), options=options) as nodes:
        assert log_facts((await nodes.read_logs(span, watched(full), None)).logs) == truth(full, span)
        assert nodes.counters.full_proofs_refused > 0
