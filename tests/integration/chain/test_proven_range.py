"""Logs derived from headers and receipts alone: the chain's own record, whatever eth_getLogs may say (rule I6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import evm
from simulation_fixtures import LogFact, log_facts, truth
from vaultevents.chain.execution import receipts, wire
from vaultevents.chain.execution.block_proofs import ProvenRange
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.logs import ETHER_FUNDED, TOPICS, Log
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, hex_text
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.node import Node
from vaultevents.devnet.rpc import METHOD_NOT_FOUND, RpcError
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration

QUICK = ExecutionOptions(retry_wait_s=0.01, batch_size=20)
SPAN = Span(1, 58)

Meddle = Callable[[str, Any], Any]


@pytest.fixture(scope="module")
def made() -> Simulation:
    simulation = Simulation(11, report_every=12)
    simulation.history(60)
    return simulation


class Meddled(Node):
    """A node whose results are changed."""

    def __init__(self, chain: Chain, meddle: Meddle) -> None:
        super().__init__(chain)
        self.meddle = meddle

    def call(self, method: str, params: list[Any]) -> Any:
        return self.meddle(method, super().call(method, params))


async def derive(
    simulation: Simulation, meddle: Meddle | None = None, span: Span = SPAN
) -> tuple[ProvenRange, ExecutionServer]:
    server = ExecutionServer(simulation.chain)
    if meddle is not None:
        server.node = Meddled(simulation.chain, meddle)
    oracle = Address(simulation.lazy_oracle)
    try:
        async with ExecutionChain([await server.start()], head=HeadPolicy(), options=QUICK) as chain:
            return await chain.prove_range(span, None, {oracle}), server
    finally:
        await server.stop()


def events(logs: list[Log]) -> list[LogFact]:
    return log_facts(log for log in logs if log.topics[0] in TOPICS)


def without_receipts(method: str, result: Any) -> Any:
    if method == "eth_getBlockReceipts":
        raise RpcError(METHOD_NOT_FOUND, "the method eth_getBlockReceipts does not exist/is not available")
    return result


def with_receipts(change: Callable[[list[Any]], Any]) -> Meddle:
    """The receipts of each block that has logs changed."""

    def meddle(method: str, result: Any) -> Any:
        has_logs = method == "eth_getBlockReceipts" and any(receipt["logs"] for receipt in result)
        return change(result) if has_logs else result

    return meddle


def with_log(**changed: str) -> Meddle:
    """The first log of each block changed."""

    def change(receipts: list[Any]) -> list[Any]:
        at = next(at for at, receipt in enumerate(receipts) if receipt["logs"])
        first, *rest = receipts[at]["logs"]
        receipts[at] = {**receipts[at], "logs": [{**first, **changed}, *rest]}
        return receipts

    return with_receipts(change)


def each(**changed: str) -> Meddle:
    """Every receipt of each block with logs changed."""
    return with_receipts(lambda receipts: [{**receipt, **changed} for receipt in receipts])


OTHER_HASH = "0x" + "ab" * 32
OTHER_DATA = with_log(data="0x" + "00" * 31 + "07")


async def test_the_logs_of_the_chain_come_without_eth_getlogs_and_every_hash_is_rebuilt(made: Simulation) -> None:
    found, server = await derive(made)
    assert events(found.logs) == truth(made, SPAN)
    assert {log.address for log in found.logs if log.topics[0] not in TOPICS} == {made.lazy_oracle}
    assert server.calls["eth_getLogs"] == 0
    assert (found.hashes_rebuilt, found.roots_rebuilt) == (len(SPAN), found.blocks_read)
    silent = len(SPAN) - len({number for number, *_ in truth(made, SPAN)})
    assert server.calls["eth_getBlockReceipts"] == found.blocks_read <= len(SPAN) - silent + silent // 2
    last = made.chain.block(SPAN.last)
    assert last is not None and found.last.hash == last.hash


async def test_without_receipts_of_whole_blocks_they_are_asked_one_by_one(made: Simulation) -> None:
    found, server = await derive(made, without_receipts)
    assert events(found.logs) == truth(made, SPAN)
    assert (found.roots_rebuilt, server.calls["eth_getLogs"]) == (found.blocks_read, 0)
    assert server.calls["eth_getTransactionReceipt"] >= found.blocks_read


async def test_full_blocks_are_read_whole() -> None:
    chain = Chain(3)
    chain.filler_logs = FULL_BLOCK_LOGS
    full = Simulation(5, chain=chain)
    full.history(12)
    found, _ = await derive(full, span=Span(1, 12))
    assert events(found.logs) == truth(full, Span(1, 12))
    assert found.roots_rebuilt == found.blocks_read > 8


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        (OTHER_DATA, "do not make up the block's receipts root"),
        (with_log(address="0x" + "5e" * 20), "do not make up the block's receipts root"),
        (with_receipts(lambda receipts: [{**receipt, "logs": []} for receipt in receipts]), "make up the block's"),
        (each(status="0x0"), "do not make up the block's receipts root"),
        (each(cumulativeGasUsed="0x1"), "do not make up the block's receipts root"),
        (each(logsBloom="0x" + "00" * 256), "do not make up the block's receipts root"),
        (each(type="0x1"), "do not make up the block's receipts root"),
        (each(transactionHash=OTHER_HASH), "are not those of its transactions"),
        (with_receipts(lambda receipts: receipts[:-1]), "are not those of its transactions"),
        (with_receipts(lambda receipts: [*receipts, receipts[-1]]), "are not those of its transactions"),
        (with_receipts(lambda _: {}), "are no list"),
        (with_receipts(lambda receipts: [None for _ in receipts]), "does not have the known form"),
        (each(status="yes"), "does not have the known form"),
        (with_log(address="0x1234"), "not 20 hexadecimal bytes"),
    ],
)
async def test_receipts_that_are_not_those_of_the_header_are_a_fault(
    made: Simulation, lie: Meddle, problem: str
) -> None:
    with pytest.raises(NodeFault, match=problem):
        await derive(made, lie)


@pytest.mark.parametrize(
    "lie",
    [
        with_log(logIndex="0x5"),
        with_log(blockHash=OTHER_HASH),
        with_log(transactionHash=OTHER_HASH),
        with_log(blockNumber="0x0"),
    ],
)
async def test_what_a_log_says_of_its_place_is_not_looked_at(made: Simulation, lie: Meddle) -> None:
    right, _ = await derive(made)
    found, _ = await derive(made, lie)
    assert found.logs == right.logs


async def test_without_the_root_check_an_altered_log_gets_through(
    made: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unchecked(taken: receipts._Receipts, _: object) -> receipts.BlockLogs:
        return receipts.BlockLogs(taken.header, tuple(taken.logs), tuple(taken.tx_indices))

    monkeypatch.setattr(receipts._Receipts, "proven", unchecked)
    found, _ = await derive(made, OTHER_DATA)
    assert events(found.logs) != truth(made, SPAN)


async def test_receipts_of_an_unknown_type_are_counted_as_not_proven(made: Simulation) -> None:
    found, _ = await derive(made, each(type="0x7e"))
    assert events(found.logs) == truth(made, SPAN)
    assert found.blocks_read - found.roots_rebuilt >= 28


async def test_a_pruned_block_is_reported_and_nothing_is_taken_for_empty(made: Simulation) -> None:
    def gone(method: str, result: Any) -> Any:
        return None if method in ("eth_getBlockReceipts", "eth_getTransactionReceipt") else result

    with pytest.raises(SourceUnavailable, match="gives neither the receipts of block"):
        await derive(made, gone)


async def test_a_header_that_does_not_hash_to_its_block_is_a_fault(
    made: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_bloom(method: str, result: Any) -> Any:
        return {**result, "logsBloom": "0x" + "00" * 256} if method == "eth_getBlockByNumber" else result

    with pytest.raises(NodeFault, match="does not hash to the hash given for it"):
        await derive(made, no_bloom)
    monkeypatch.setattr(wire, "compute_hash", lambda fields: bytes.fromhex(fields.hash[2:]))
    found, _ = await derive(made, no_bloom)
    assert found.logs == [], "without that check the block is taken for one without logs"


async def test_a_header_with_unknown_fields_rules_nothing_out(made: Simulation) -> None:
    """A node cannot hide a log by a field that it invents: the block's receipts are read whatever its bloom says."""

    def later_fork(method: str, result: Any) -> Any:
        if method != "eth_getBlockByNumber":
            return result
        return {**result, "logsBloom": "0x" + "00" * 256, "inclusionListRoot": OTHER_HASH}

    found, _ = await derive(made, later_fork)
    assert events(found.logs) == truth(made, SPAN)
    assert found.hashes_rebuilt + found.blocks_read == len(SPAN)


@pytest.mark.anvil
async def test_a_real_node_makes_the_same_hashes_and_roots(tmp_path: Path) -> None:
    with evm.running(tmp_path) as node:
        vault = node.deploy("StakingVault")
        receipts = [node.fund(vault, amount) for amount in (1, 2)]
        head = node.number()
        proving = replace(QUICK, strict=True)
        async with ExecutionChain([node.url], head=HeadPolicy("latest"), options=proving) as chain:
            found = await chain.prove_range(Span(0, head), None, set())
            read = await chain.read_logs(Span(0, head), Watched(frozenset({Address(vault)})), None)
    assert [(log.topics[0], int.from_bytes(log.data)) for log in found.logs] == [(ETHER_FUNDED, 1), (ETHER_FUNDED, 2)]
    assert (found.hashes_rebuilt, found.roots_rebuilt) == (head + 1, found.blocks_read)
    assert read.logs == found.logs
    assert [hex_text(log.tx_hash) for log in read.logs] == [receipt["transactionHash"] for receipt in receipts]
