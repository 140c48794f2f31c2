"""Reading an honest devnet node: heads, identity, creation blocks, and every log of a span in every way of reading."""

from __future__ import annotations

from functools import partial

import pytest

from simulation_fixtures import connected, log_facts, truth, watched
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy, Identity
from vaultevents.chain.upstream.learned_range import LearnedRange
from vaultevents.core.errors import ConfigError, InputError, SourceUnavailable, WrongNetwork
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS
from vaultevents.devnet.chain import Absent, At, Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration

QUICK = ExecutionOptions(retry_wait_s=0.01)

reading = partial(connected, options=QUICK)


def simulation(blocks: int = 120, seed: int = 7) -> Simulation:
    made = Simulation(seed)
    made.history(blocks)
    return made


def anchor(made: Simulation, span: Span) -> Hash32:
    return Hash32(block.hash) if (block := made.chain.block(span.first - 1)) else Hash32(bytes(32))


@pytest.mark.parametrize(
    ("text", "number"), [("finalized", 8), ("safe", 9), ("latest-0", 10), ("latest-4", 6), ("latest-99", 0)]
)
async def test_the_head_is_the_one_that_was_asked_for(text: str, number: int) -> None:
    chain = Chain(1)
    for _ in range(10):
        chain.mine()
    async with reading(ExecutionServer(chain), head=text) as nodes:
        head = await nodes.head()
        block = chain.block(number)
        assert block is not None
        assert (head.number, head.hash, head.timestamp_s) == (number, block.hash, block.timestamp_s)


@pytest.mark.parametrize(
    "text", ["latest", "latest-", "latest--1", "pending", "Finalized", "", "latest-1 ", "latest-١"]
)
def test_another_head_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="finalized, safe, or latest-N"):
        HeadPolicy.parse(text)


def test_heads_are_written_as_they_are_read() -> None:
    assert [str(HeadPolicy.parse(text)) for text in ("finalized", "safe", "latest-7")] == [
        "finalized",
        "safe",
        "latest-7",
    ]


def test_senseless_settings_are_refused() -> None:
    for wrong in (
        {"batch_size": 0},
        {"total_timeout_s": 0.0},
        {"set_aside_s": -1.0},
        {"blooms_per_day": -1},
        {"ask": 0},
    ):
        with pytest.raises(ConfigError):
            ExecutionOptions(**wrong)
    with pytest.raises(InputError, match="configured twice"):
        ExecutionChain(["http://127.0.0.1:1"] * 2, head=HeadPolicy())
    with pytest.raises(InputError, match="at least one"):
        ExecutionChain([], head=HeadPolicy())


@pytest.mark.parametrize("absent", list(Absent))
async def test_without_a_finalized_block_nothing_less_final_is_read(absent: Absent) -> None:
    chain = Chain(1)
    chain.mine()
    chain.finalized = absent
    server = ExecutionServer(chain)
    async with reading(server) as nodes:
        with pytest.raises(SourceUnavailable, match=r"does not know its finalized block.*nothing less final") as caught:
            await nodes.head()
        assert caught.value.node == nodes.nodes[0]
        chain.finalized = At(1)
        assert (await nodes.head()).number == 1


async def test_a_header_that_no_node_has_is_an_outage_and_not_a_guess() -> None:
    async with reading(ExecutionServer(Chain(1))) as nodes:
        assert (await nodes.header(0)).number == 0
        with pytest.raises(SourceUnavailable, match="does not have block 5"):
            await nodes.header(5)


@pytest.mark.parametrize("other", ["chain id", "genesis"])
async def test_a_node_of_another_network_is_not_used(other: str) -> None:
    chain = Chain(1)
    right, wrong = ExecutionServer(chain), ExecutionServer(chain)
    if other == "chain id":
        wrong.faults.rates = {Fault.WRONG_CHAIN_ID: 1.0}
    else:
        wrong.node.chain = Chain(2, chain_id=chain.chain_id)
    async with reading(wrong, right) as nodes:
        genesis = chain.block(0)
        assert genesis is not None
        nodes.expect(Identity(chain.chain_id, Hash32(genesis.hash)))
        assert await nodes.identity() == Identity(chain.chain_id, Hash32(genesis.hash))
        asked = wrong.exchanges
        await nodes.head()
        assert wrong.exchanges == asked
        assert nodes.counters.wrong_network == 1


async def test_a_first_block_that_does_not_hash_is_a_fault_and_not_another_network() -> None:
    chain = Chain(1)
    right, wrong = ExecutionServer(chain), ExecutionServer(chain)
    wrong.faults.rates = {Fault.WRONG_GENESIS: 1.0}
    async with reading(wrong, right) as nodes:
        genesis = chain.block(0)
        assert genesis is not None
        assert (await nodes.identity()).genesis_hash == genesis.hash
        assert (nodes.counters.wrong_network, nodes.counters.node_faults) == (0, 1)


async def test_the_only_node_of_another_network_is_refused_until_it_is_right() -> None:
    chain = Chain(1)
    server = ExecutionServer(chain)
    async with reading(server) as nodes:
        nodes.expect(await nodes.identity())
        await nodes.head()
        server.faults.rates = {Fault.WRONG_CHAIN_ID: 1.0}
        nodes.expect(Identity(chain.chain_id, Hash32(chain.head.hash)))
        with pytest.raises(WrongNetwork, match="belongs to another network"):
            await nodes.head()
        server.faults.stop()
        await nodes.head()


async def test_the_creation_block_is_found_by_bisection() -> None:
    made = simulation(60)
    late = made.add_vault("acme", "acme-late")
    born = made.chain.head.number
    for _ in range(40):
        made.step()
    async with reading(ExecutionServer(made.chain)) as nodes:
        assert await nodes.creation_block(Address(late.address)) == born
        assert await nodes.creation_block(Address(made.registrations[0].address)) == 1
        with pytest.raises(InputError, match="has no code at the finalized block"):
            await nodes.creation_block(Address(bytes(20)))


async def test_with_nothing_watched_no_logs_are_asked_for() -> None:
    made = simulation(40)
    server = ExecutionServer(made.chain)
    async with reading(server) as nodes:
        found = await nodes.read_logs(Span(1, 30), Watched(frozenset(), frozenset()), None)
        assert (found.logs, found.times_s, found.last.number) == ([], {}, 30)
    assert server.calls == {"eth_getBlockByNumber": 1}


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("block_timestamp", [True, False])
@pytest.mark.parametrize(("max_range", "max_results"), [(None, None), (7, None), (None, 12)])
async def test_every_way_of_reading_gives_every_log(
    every: bool, block_timestamp: bool, max_range: int | None, max_results: int | None
) -> None:
    made, span = simulation(), Span(1, 118)
    server = ExecutionServer(made.chain, block_timestamp=block_timestamp, max_range=max_range, max_results=max_results)
    options = ExecutionOptions(log_range_start=50, batch_size=20)
    async with reading(server, options=options) as nodes:
        found = await nodes.read_logs(span, watched(made), anchor(made, span), every=every)
    assert log_facts(found.logs) == truth(made, span)
    assert found.last.number == 118
    ours = {log.block_number for log in found.logs if log.address in watched(made).vaults | watched(made).queues}
    assert ours
    assert {n: block.timestamp_s for n in ours if (block := made.chain.block(n))} == found.times_s
    assert any(log.address not in watched(made).vaults | watched(made).queues for log in found.logs)
    assert nodes.counters.node_faults == 0


async def test_edges_read_far_fewer_headers() -> None:
    made, span = simulation(), Span(1, 118)
    read_headers = []
    edges, whole = ExecutionOptions(headers="edges"), ExecutionOptions(headers="every")
    for options, every in ((edges, True), (whole, False), (edges, False)):
        server = ExecutionServer(made.chain)
        async with reading(server, options=options) as nodes:
            await nodes.read_logs(span, watched(made), None, every=every)
        read_headers.append(server.calls["eth_getBlockByNumber"])
        assert server.calls["eth_getBlockByHash"] == 0, "a block is read once, with its transactions"
    ours = watched(made)
    held = {number for number, _, _, address, _ in truth(made, span) if address in ours.vaults | ours.queues}
    assert read_headers == [len(held) + headers for headers in (118, 118, 2)]


@pytest.mark.parametrize("style", ["infura", "ankr", "reth", "alchemy"])
@pytest.mark.parametrize(("max_range", "max_results"), [(9, None), (None, 12)])
async def test_limits_are_learned_and_grown_out_of_in_every_providers_words(
    style: str, max_range: int | None, max_results: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, span = simulation(), Span(1, 118)
    server = ExecutionServer(made.chain, limit_style=style, max_range=max_range, max_results=max_results)
    async with reading(server) as nodes:
        assert log_facts((await nodes.read_logs(span, watched(made), None)).logs) == truth(made, span)
        assert nodes.counters.ranges_refused > 0
        server.node.max_range = server.node.max_results = None
        monkeypatch.setattr(LearnedRange, "FORGOTTEN_S", 0.0)  # an hour has passed
        refused = nodes.counters.ranges_refused
        asked = []
        for _ in range(8):
            before = server.calls["eth_getLogs"]
            assert log_facts((await nodes.read_logs(span, watched(made), None)).logs) == truth(made, span)
            asked.append(server.calls["eth_getLogs"] - before)
        assert nodes.counters.ranges_refused == refused
        assert asked[-1] < asked[0]


async def test_blocks_that_are_still_too_large_one_by_one_are_read_by_address_or_receipts() -> None:
    made = simulation()
    server = ExecutionServer(made.chain, max_results=1)
    async with reading(server) as nodes:
        found = await nodes.read_logs(Span(1, 118), watched(made), None)
        assert log_facts(found.logs) == truth(made, Span(1, 118))
        assert nodes.counters.node_faults == 0


async def test_full_blooms_cost_receipts_within_the_budget_but_never_stall() -> None:
    made = Simulation(5)
    made.chain.filler_logs = FULL_BLOCK_LOGS
    made.history(60)
    span = Span(2, 59)
    for budget in (1_000, 7, 0):
        server = ExecutionServer(made.chain)
        options = ExecutionOptions(blooms_per_day=budget)
        async with reading(server, options=options) as nodes:
            found = await nodes.read_logs(span, watched(made), anchor(made, span))
            assert log_facts(found.logs) == truth(made, span)
            assert nodes.counters.node_faults == 0
            settled, unsettled = nodes.counters.blooms_settled, nodes.counters.blooms_unsettled
            possible = settled + unsettled
            assert len(span) // 4 < possible <= len(span) - len(found.times_s)
            assert settled == min(budget, possible)
            assert server.calls["eth_getBlockReceipts"] == settled + len(found.times_s)


async def test_a_lagging_node_is_not_believed_to_have_seen_silence() -> None:
    made, span = simulation(), Span(1, 118)
    behind, right = ExecutionServer(made.chain, behind=20), ExecutionServer(made.chain)
    async with reading(behind, right) as nodes:
        assert log_facts((await nodes.read_logs(span, watched(made), None)).logs) == truth(made, span)
        assert nodes.counters.unavailable == 1
        assert [memory.state for memory in nodes.node_states()] == ["open", "closed"]
    async with reading(ExecutionServer(made.chain, behind=20)) as nodes:
        with pytest.raises(SourceUnavailable, match="does not have block 118"):
            await nodes.read_logs(span, watched(made), None)
