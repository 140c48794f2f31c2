"""Logs derived from headers and receipts alone: the chain's own record, whatever eth_getLogs may say (I6)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eth_hash.auto import keccak

import evm
from vaultevents.chain.execution import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.chain.receipts import header_hash
from vaultevents.chain.trie import list_root
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.logs import ETHER_FUNDED, TOPICS, Log
from vaultevents.core.spans import Span
from vaultevents.core.units import Address
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.node import Node
from vaultevents.devnet.rpc import METHOD_NOT_FOUND, RpcError
from vaultevents.devnet.trie import ordered_root
from vaultevents.devnet.world import World
from worlds import LogFact, log_facts, truth

pytestmark = pytest.mark.integration

QUICK = ExecutionOptions(retry_wait_s=0.01, batch_size=20)
SPAN = Span(1, 58)

Meddle = Callable[[str, Any], Any]


@pytest.fixture(scope="module")
def made() -> World:
    world = World(11, report_every=12)
    world.history(60)
    return world


class Meddled(Node):
    """A node whose results are changed."""

    def __init__(self, chain: Chain, meddle: Meddle) -> None:
        super().__init__(chain)
        self.meddle = meddle

    def call(self, method: str, params: list[Any]) -> Any:
        return self.meddle(method, super().call(method, params))


async def derive(world: World, meddle: Meddle | None = None, span: Span = SPAN) -> tuple[Any, ExecutionServer]:
    server = ExecutionServer(world.chain)
    if meddle is not None:
        server.node = Meddled(world.chain, meddle)
    oracle = Address(world.lazy_oracle)
    try:
        async with ExecutionChain([await server.start()], head=HeadPolicy(), options=QUICK) as chain:
            return await chain.derive_logs(span, None, {oracle}), server
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
        has_logs = method == "eth_getBlockReceipts" and any(one["logs"] for one in result)
        return change(result) if has_logs else result

    return meddle


def with_log(**changed: str) -> Meddle:
    """The first log of each block changed."""

    def change(receipts: list[Any]) -> list[Any]:
        at = next(at for at, one in enumerate(receipts) if one["logs"])
        first, *rest = receipts[at]["logs"]
        receipts[at] = {**receipts[at], "logs": [{**first, **changed}, *rest]}
        return receipts

    return with_receipts(change)


async def test_the_logs_of_the_chain_come_without_eth_getlogs_and_every_hash_is_rebuilt(made: World) -> None:
    found, server = await derive(made)
    assert events(found.logs) == truth(made, SPAN)
    assert {log.address for log in found.logs if log.topics[0] not in TOPICS} == {made.lazy_oracle}
    assert server.calls["eth_getLogs"] == 0
    assert (found.hashes_rebuilt, found.roots_rebuilt) == (len(SPAN), found.blocks_read)
    silent = len(SPAN) - len({number for number, *_ in truth(made, SPAN)})
    assert server.calls["eth_getBlockReceipts"] == found.blocks_read <= len(SPAN) - silent + silent // 2
    last = made.chain.block(SPAN.last)
    assert last is not None and found.last.hash == last.hash


async def test_a_node_without_receipts_is_asked_all_logs_of_a_block_which_must_make_up_its_bloom(made: World) -> None:
    found, server = await derive(made, without_receipts)
    assert events(found.logs) == truth(made, SPAN)
    assert (found.roots_rebuilt, server.calls["eth_getLogs"]) == (0, found.blocks_read)


async def test_full_blocks_are_read_whole() -> None:
    chain = Chain(3)
    chain.filler_logs = FULL_BLOCK_LOGS
    full = World(5, chain=chain)
    full.history(12)
    found, _ = await derive(full, span=Span(1, 12))
    assert events(found.logs) == truth(full, Span(1, 12))
    assert found.roots_rebuilt == found.blocks_read > 8


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        (with_log(data="0x" + "00" * 31 + "07"), "do not make up the block's receipts root"),
        (with_log(logIndex="0x5"), "are not numbered"),
        (with_log(blockHash="0x" + "ab" * 32), "is one of another block"),
        (with_log(transactionHash="0x" + "ab" * 32), "another's log"),
        (with_receipts(lambda found: found[:-1]), "are not of its transactions"),
        (with_receipts(lambda found: [{**one, "logs": []} for one in found]), "make up the block's receipts root"),
        (with_receipts(lambda found: [{**one, "status": "0x0"} for one in found]), "make up the block's receipts root"),
        (with_receipts(lambda _: {}), "the known form"),
    ],
)
async def test_receipts_that_are_not_those_of_the_header_are_a_fault(made: World, lie: Meddle, told: str) -> None:
    with pytest.raises(NodeFault, match=told):
        await derive(made, lie)


async def test_receipts_of_an_unknown_kind_are_not_believed_but_the_bloom_is_asked(made: World) -> None:
    found, server = await derive(made, with_receipts(lambda found: [{**one, "type": "0x7e"} for one in found]))
    assert events(found.logs) == truth(made, SPAN)
    assert server.calls["eth_getLogs"] == found.blocks_read - found.roots_rebuilt >= 28


async def test_a_pruned_block_is_told_and_nothing_is_taken_for_empty(made: World) -> None:
    gone = with_receipts(lambda _: None)
    with pytest.raises(SourceUnavailable, match="does not have the receipts of block"):
        await derive(made, gone)


async def test_a_header_that_does_not_hash_to_its_block_proves_nothing_so_the_block_is_read(made: World) -> None:
    def no_bloom(method: str, result: Any) -> Any:
        return {**result, "logsBloom": "0x" + "00" * 256} if method == "eth_getBlockByNumber" else result

    found, _ = await derive(made, no_bloom)
    assert events(found.logs) == truth(made, SPAN)
    silent = sum(not any(block.header.logs_bloom) for block in made.chain.blocks(1, 58))
    assert found.hashes_rebuilt == silent < len(SPAN)


@pytest.mark.parametrize("size", [0, 1, 2, 15, 16, 17, 127, 128, 129, 300])
def test_the_root_of_a_list_is_that_of_another_implementation(size: int) -> None:
    values = [keccak(bytes([at % 7])) * (at % 5 + 1) if at % 3 else bytes([at % 256]) for at in range(size)]
    assert list_root(values) == ordered_root(values)


@pytest.mark.anvil
async def test_a_real_node_makes_the_same_hashes_and_roots(tmp_path: Path) -> None:
    with evm.running(tmp_path) as node:
        vault = node.deploy("StakingVault")
        for amount in (1, 2):
            node.fund(vault, amount)
        head = node.number()
        assert all(header_hash(node.block(at)) == bytes.fromhex(node.block(at)["hash"][2:]) for at in range(head + 1))
        async with ExecutionChain([node.url], head=HeadPolicy("latest"), options=QUICK) as chain:
            found = await chain.derive_logs(Span(0, head), None, set())
    assert [(log.topics[0], int.from_bytes(log.data)) for log in found.logs] == [(ETHER_FUNDED, 1), (ETHER_FUNDED, 2)]
    assert (found.hashes_rebuilt, found.roots_rebuilt) == (head + 1, found.blocks_read)
