"""Devnet blocks that real nodes rarely have: headers of later forks, equal times, floods of logs, new receipt types.

Hashes are compared with those of an encoder for tests, which is held against a real Amsterdam header of Sepolia.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from eth_hash.auto import keccak
from hexbytes import HexBytes

from block_hashes import AMSTERDAM, FUTURE, PRAGUE, header_hash, root_of, signed, transactions_root
from vaultevents.core.logs import ETHER_FUNDED, TOPICS
from vaultevents.devnet.acts import Funding, log_of
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.envelopes import Envelope
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.floods import UNREGISTERED, mine_flood
from vaultevents.devnet.node import Node
from vaultevents.devnet.rpc import block_json
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration


def _typed_transaction() -> Any:
    """Import `eth_account`, which raises the recursion limit so far that deep JSON ends the process in other tests."""
    limit = sys.getrecursionlimit()
    try:
        return import_module("eth_account.typed_transactions.typed_transaction").TypedTransaction
    finally:
        sys.setrecursionlimit(limit)


TypedTransaction = _typed_transaction()
SEPOLIA = Path(__file__).parents[2] / "data" / "headers" / "sepolia-11856337.json"


def test_the_encoder_for_tests_hashes_a_real_amsterdam_header() -> None:
    header = json.loads(SEPOLIA.read_text())
    assert tuple(name for name in header if name != "hash") == AMSTERDAM
    assert header_hash(header, AMSTERDAM) == header["hash"]
    swapped = (*PRAGUE, "slotNumber", "blockAccessListHash")
    assert header["hash"] not in (header_hash(header, PRAGUE), header_hash(header, swapped))


def forked_chain() -> Chain:
    """Prague up to block 3, Amsterdam from 4, a fork with an unknown field from 8; blocks 0 to 11."""
    chain = Chain(5)
    chain.mine()
    chain.schedule_fork("amsterdam", 4)
    chain.schedule_fork("future", 8)
    for number in range(10):
        chain.mine([chain.transaction([log_of(Funding(b"\x01" * 20, number))])], missed_slots=number % 2)
    return chain


def fields_of(number: int) -> tuple[str, ...]:
    return PRAGUE if number < 4 else AMSTERDAM if number < 8 else FUTURE


def test_headers_change_in_mid_run_and_hash_with_exactly_their_fields() -> None:
    shown = [block_json(block) for block in forked_chain().blocks(0, 11)]
    assert len(shown) == 12
    for number, block in enumerate(shown):
        fields = fields_of(number)
        assert tuple(name for name in block if name in FUTURE) == fields
        assert header_hash(block, fields) == block["hash"]
        for other in {PRAGUE, AMSTERDAM, FUTURE}:
            if other != fields and all(name in block for name in other):
                assert header_hash(block, other) != block["hash"]
    assert [block["parentHash"] for block in shown[1:]] == [block["hash"] for block in shown[:-1]]


def test_the_fields_of_amsterdam_have_their_forms_and_the_slot_is_that_of_the_block() -> None:
    chain = forked_chain()
    for block in chain.blocks(4, 11):
        shown = block_json(block)
        assert len(shown["blockAccessListHash"]) == 66
        assert shown["slotNumber"] == hex(block.slot)
    assert len({block_json(block)["blockAccessListHash"] for block in chain.blocks(4, 11)}) == 8


def test_without_a_fork_nothing_changes_and_a_branch_keeps_the_schedule() -> None:
    plain, forked = Chain(5), Chain(5)
    forked.schedule_fork("amsterdam", 3)
    for chain in (plain, forked):
        for _ in range(4):
            chain.mine()
    assert [block.hash for block in plain.blocks(0, 2)] == [block.hash for block in forked.blocks(0, 2)]
    assert plain.blocks(3, 3)[0].hash != forked.blocks(3, 3)[0].hash
    branch = forked.fork(1, seed=6)
    branch.mine()
    assert ["slotNumber" in block_json(branch.mine()) for _ in range(2)] == [True, True]
    assert "slotNumber" not in block_json(branch.blocks(2, 2)[0])


def test_only_known_forks_of_blocks_to_come_can_be_scheduled() -> None:
    chain = Chain(1)
    chain.mine()
    with pytest.raises(ValueError, match="block 1 exists already"):
        chain.schedule_fork("amsterdam", 1)
    with pytest.raises(ValueError, match="osaka is not a fork: choose one of amsterdam, future"):
        chain.schedule_fork("osaka", 9)  # type: ignore[arg-type]


def test_consecutive_blocks_can_have_the_same_time() -> None:
    chain = Chain(1, genesis_time_s=1000, seconds_per_slot=12)
    chain.mine()
    chain.blocks_per_timestamp = 3
    for _ in range(7):
        chain.mine()
    assert [block.timestamp_s for block in chain.blocks(0, 8)] == [1000, 1012, 1012, 1024, 1024, 1024, 1036, 1036, 1036]
    assert all(first.slot < second.slot for first, second in pairwise(chain.blocks(0, 8)))
    assert len({block.hash for block in chain.blocks(0, 8)}) == 9


def test_a_simulation_keeps_its_truth_where_times_are_equal() -> None:
    simulation = Simulation(7)
    simulation.chain.blocks_per_timestamp = 4
    simulation.history(60)
    times = [block.timestamp_s for block in simulation.chain.blocks(1, 60)]
    assert 15 <= len(set(times)) <= 17
    assert len(simulation.expected()) > 40


@pytest.mark.parametrize("logs", [10_004, 100_000])
def test_a_flood_is_one_block_of_nobodys_logs_over_many_transactions(logs: int) -> None:
    simulation = Simulation(7)
    simulation.history(5)
    before = simulation.expected(through=simulation.chain.head.number)
    block = mine_flood(simulation.chain, logs)
    simulation.history(3)
    found = simulation.chain.logs(block.number, block.number, TOPICS)
    assert [placed.log_index for placed in found] == list(range(logs))
    assert {(placed.log.address, placed.log.topics) for placed in found} == {(UNREGISTERED, (ETHER_FUNDED,))}
    assert UNREGISTERED not in {registration.address for registration in simulation.registrations}
    assert len(block.transactions) == -(-logs // 2000) > 1
    assert before.keys() <= simulation.expected(through=simulation.chain.head.number).keys()
    assert not any(str(block.timestamp_s * 1000) in body.decode() for body in simulation.expected().values())


async def test_a_flood_exceeds_what_a_provider_gives_by_topic_but_not_by_address() -> None:
    simulation = Simulation(7)
    vault = simulation.registrations[0].address
    mine_flood(simulation.chain, 10_004)
    number = simulation.chain.head.number
    async with asking(simulation.chain, max_results=10_000) as ask:
        topics = {"topics": [["0x" + topic.hex() for topic in TOPICS]]}
        edges = {"fromBlock": hex(number), "toBlock": hex(number)}
        assert (await ask("eth_getLogs", edges | topics))["error"]["code"] == -32005
        address = {"address": ["0x" + vault.hex()]}
        by_hash = {"blockHash": block_json(simulation.chain.head)["hash"]}
        assert (await ask("eth_getLogs", by_hash | topics | address))["result"] == []
        receipts = (await ask("eth_getBlockReceipts", by_hash["blockHash"]))["result"]
    assert [len(receipt["logs"]) for receipt in receipts] == [2000] * 5 + [4]
    assert root_of(receipts) == block_json(simulation.chain.head)["receiptsRoot"]


OP_STACK = (("depositNonce", 258), ("depositReceiptVersion", 1))


@pytest.mark.parametrize("fields", [(), OP_STACK], ids=["of the known form", "of another form"])
def test_receipts_of_an_unknown_type_have_the_root_of_their_own_form(fields: tuple[tuple[str, int], ...]) -> None:
    simulation = Simulation(7)
    simulation.chain.transaction_kind, simulation.chain.receipt_fields = 0x7E, fields
    simulation.history(20)
    names = tuple(name for name, _ in fields)
    node, unknown = Node(simulation.chain), 0
    for block in simulation.chain.blocks(2, 20):
        receipts = node.call("eth_getBlockReceipts", [hex(block.number)])
        unknown += len(receipts)
        assert {receipt["type"] for receipt in receipts} <= {"0x7e"}
        assert root_of(receipts, names) == "0x" + block.header.receipts_root.hex()
        if receipts and fields:
            assert root_of(receipts) != "0x" + block.header.receipts_root.hex()
        assert all(
            dict(fields).items() <= {name: int(receipt[name], 16) for name in names}.items() for receipt in receipts
        )
    assert unknown > 10


@pytest.mark.parametrize("filler", [0, FULL_BLOCK_LOGS])
def test_ordinary_receipts_keep_their_root(filler: int) -> None:
    simulation = Simulation(7)
    simulation.chain.filler_logs = filler
    simulation.history(12)
    node = Node(simulation.chain)
    for block in simulation.chain.blocks(0, 12):
        receipts = node.call("eth_getBlockReceipts", [hex(block.number)])
        assert root_of(receipts) == "0x" + block.header.receipts_root.hex()


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 0x7E])
@pytest.mark.parametrize("filler", [0, 5])
def test_transactions_have_the_hashes_and_the_root_of_their_fields(kind: int, filler: int) -> None:
    simulation = Simulation(7)
    simulation.chain.transaction_kind, simulation.chain.filler_logs = kind, filler
    simulation.history(20)
    node, seen = Node(simulation.chain), 0
    for block in simulation.chain.blocks(2, 20):
        shown = node.call("eth_getBlockByNumber", [hex(block.number), True])
        by_hash = node.call("eth_getBlockByHash", [shown["hash"], True])
        assert by_hash == shown and transactions_root(shown) == shown["transactionsRoot"]
        hashes = node.call("eth_getBlockByNumber", [hex(block.number), False])["transactions"]
        assert [transaction["hash"] for transaction in shown["transactions"]] == hashes
        assert ["0x" + keccak(signed(transaction)).hex() for transaction in shown["transactions"]] == hashes
        receipts = node.call("eth_getBlockReceipts", [shown["hash"]])
        assert [receipt["transactionHash"] for receipt in receipts] == hashes
        assert [receipt["type"] for receipt in receipts] == [
            transaction["type"] for transaction in shown["transactions"]
        ]
        assert root_of(receipts) == shown["receiptsRoot"]
        seen += len(hashes)
    assert seen > 10


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_typed_transactions_are_those_of_another_implementation(kind: int) -> None:
    for nonce in range(1, 7):
        envelope = Envelope(kind, 1337, seed=9, nonce=nonce, creates=nonce == 5 and kind < 3)
        decoded = TypedTransaction.from_bytes(HexBytes(envelope.encoded()))
        assert decoded.transaction_type == kind
        fields = envelope.fields()
        assert decoded.as_dict()["nonce"] == nonce
        assert (decoded.vrs()[1], decoded.vrs()[2]) == (fields["r"], fields["s"])


Ask = Callable[..., Any]


@asynccontextmanager
async def asking(chain: Chain, **settings: Any) -> AsyncIterator[Ask]:
    """A function that puts one call to a node over HTTP and returns the whole answer."""
    server = ExecutionServer(chain, **{name: value for name, value in settings.items() if name.startswith("max_")})
    for name, value in settings.items():
        setattr(server.node, name, value)
    url = await server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:

            async def ask(method: str, *params: Any) -> Any:
                call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": list(params)}
                async with session.post(url, json=call) as response:
                    return await response.json()

            yield ask
    finally:
        await server.stop()


async def test_receipts_can_be_asked_by_number_tag_hash_and_object() -> None:
    simulation = Simulation(7)
    simulation.history(20)
    block = simulation.chain.blocks(1, 1)[0]
    block_hash, tx_hash = block_json(block)["hash"], block_json(block)["transactions"][0]
    async with asking(simulation.chain) as ask:
        by_hash = (await ask("eth_getBlockReceipts", block_hash))["result"]
        for where in ("0x1", {"blockHash": block_hash}, {"blockHash": block_hash, "requireCanonical": True}):
            assert (await ask("eth_getBlockReceipts", where))["result"] == by_hash
        assert (await ask("eth_getBlockReceipts", {"blockNumber": "0x1"}))["result"] == by_hash
        assert (await ask("eth_getTransactionReceipt", tx_hash))["result"] == by_hash[0]
        final = (await ask("eth_getBlockByNumber", "finalized", False))["result"]
        assert (await ask("eth_getBlockReceipts", "finalized")) == await ask("eth_getBlockReceipts", final["hash"])
        unknown = "0x" + "99" * 32
        for nothing in ("0xffff", unknown, {"blockHash": unknown}, {"blockNumber": "0xffff"}):
            assert (await ask("eth_getBlockReceipts", nothing))["result"] is None
        assert (await ask("eth_getTransactionReceipt", unknown))["result"] is None
        assert (await ask("eth_getBlockReceipts", {"blockHash": "0x1"}))["error"]["code"] == -32602


async def test_receipts_of_a_block_that_a_reorg_removed_are_still_given_by_hash() -> None:
    simulation = Simulation(7)
    simulation.chain.mine([simulation.chain.transaction([log_of(Funding(b"\x01" * 20, 1))])])
    removed = block_json(simulation.chain.head)["hash"]
    simulation.chain.reorg(1, [[]])
    async with asking(simulation.chain) as ask:
        receipts = (await ask("eth_getBlockReceipts", removed))["result"]
        assert [receipt["blockHash"] for receipt in receipts] == [removed]
        assert (await ask("eth_getBlockReceipts", hex(simulation.chain.head.number)))["result"] == []


@pytest.mark.parametrize("pruned_receipts", ["error", "null"])
async def test_a_node_can_have_pruned_its_receipts(pruned_receipts: str) -> None:
    simulation = Simulation(7)
    simulation.history(20)
    simulation.chain.mine([simulation.chain.transaction([log_of(Funding(b"\x01" * 20, 1))])])
    head = block_json(simulation.chain.head)
    old = block_json(simulation.chain.blocks(1, 1)[0])
    async with asking(simulation.chain, oldest_receipts=10, pruned_receipts=pruned_receipts) as ask:
        assert (await ask("eth_getBlockByNumber", "0x1", False))["result"] == old
        assert len((await ask("eth_getLogs", {"fromBlock": "0x1", "toBlock": "0x1"}))["result"]) > 0
        for gone in (
            await ask("eth_getBlockReceipts", "0x1"),
            await ask("eth_getBlockReceipts", old["hash"]),
            await ask("eth_getTransactionReceipt", old["transactions"][0]),
        ):
            reported = gone["error"]["code"] if "error" in gone else gone["result"]
            assert reported == (4444 if pruned_receipts == "error" else None)
        assert len((await ask("eth_getBlockReceipts", head["hash"]))["result"]) == 1


async def test_methods_can_be_missing() -> None:
    methods = frozenset({"eth_getBlockReceipts", "eth_getLogs"})
    async with asking(Simulation(7).chain, missing_methods=methods) as ask:
        for method, params in (("eth_getBlockReceipts", "0x1"), ("eth_getLogs", {})):
            assert (await ask(method, params))["error"]["code"] == -32601
        assert (await ask("eth_blockNumber"))["result"] == "0x1"
