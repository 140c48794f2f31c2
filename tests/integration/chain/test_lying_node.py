"""The lying node is consistent: whatever method is asked, and by whichever key, the false answer is the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from block_hashes import header_hash, root_of, transactions_root
from lying_node import EARLY_FORK, LATE_FORK, STALE_BLOCKS, TOPICS, Lie, LyingServer, watched_addresses
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.header import bloom_of
from vaultevents.devnet.node import Node
from vaultevents.devnet.rpc import RpcError
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration

BLOCKS = 100
Json = dict[str, Any]

FALSE_LOGS = (Lie.HIDE, Lie.ZERO_BLOOM, Lie.ALTER, Lie.INVENT, Lie.UNDECODABLE, Lie.TRUNCATED)
PICTURES = (*FALSE_LOGS, Lie.FALSE_HEADER, Lie.FORGED_BLOCK, Lie.RENAMED, Lie.EARLY_FORK, Lie.LATE_FORK)


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    made = Simulation(51, events_per_block=1.5)
    made.history(BLOCKS)
    return made


async def picture(simulation: Simulation, lie: Lie | None) -> Node:
    """The node behind a server that answers with a lie, or the truth."""
    return ExecutionServer(simulation.chain).node if lie is None else LyingServer(simulation, lie).node


def block_of(node: Node, number: int) -> Json:
    found: Json = node.call("eth_getBlockByNumber", [hex(number), False])
    return found


def receipts_of(node: Node, block: Json) -> list[Json]:
    found: list[Json] = node.call("eth_getBlockReceipts", [block["hash"]])
    return found


def logs_of(node: Node, **query: Any) -> list[Json]:
    return [node.log_json(placed) for placed in node.logs(query)]


@pytest.mark.parametrize("lie", PICTURES)
async def test_every_method_shows_the_same_picture(simulation: Simulation, lie: Lie) -> None:
    node = await picture(simulation, lie)
    everything: list[Json] = []
    for number in range(BLOCKS):
        block = block_of(node, number)
        assert node.call("eth_getBlockByHash", [block["hash"], False]) == block
        receipts = receipts_of(node, block)
        assert receipts == node.call("eth_getBlockReceipts", [hex(number)])
        assert [receipt["transactionHash"] for receipt in receipts] == block["transactions"]
        assert receipts == [node.call("eth_getTransactionReceipt", [tx_hash]) for tx_hash in block["transactions"]]
        from_receipts = [log for receipt in receipts for log in receipt["logs"]]
        assert logs_of(node, blockHash=block["hash"]) == from_receipts
        assert logs_of(node, fromBlock=hex(number), toBlock=hex(number)) == from_receipts
        assert {log["blockHash"] for log in from_receipts} <= {block["hash"]}
        assert [int(log["logIndex"], 16) for log in from_receipts] == list(range(len(from_receipts)))
        everything += from_receipts
    last = hex(BLOCKS - 1)
    assert logs_of(node, fromBlock="0x0", toBlock=last) == everything
    addresses = ["0x" + address.hex() for address in sorted(watched_addresses(simulation))]
    topics = ["0x" + topic.hex() for topic in TOPICS]
    chosen = [log for log in everything if log["address"] in addresses and log["topics"] and log["topics"][0] in topics]
    assert logs_of(node, fromBlock="0x0", toBlock=last, topics=[topics], address=addresses) == chosen
    assert node.call("eth_getBlockByNumber", ["finalized", False]) == block_of(
        node, simulation.chain.finalized_number or 0
    )


CONTRADICTED = {
    Lie.HIDE: {"root"},
    Lie.ZERO_BLOOM: {"root", "hash"},
    Lie.ALTER: {"root"},
    Lie.INVENT: {"root"},
    Lie.UNDECODABLE: {"root"},
    Lie.TRUNCATED: {"root"},
    Lie.FALSE_HEADER: {"hash"},
    Lie.FORGED_BLOCK: {"link"},
    Lie.RENAMED: {"transactions"},
    Lie.EARLY_FORK: set[str](),
    Lie.LATE_FORK: set[str](),
}
"""Which proofs a false picture fails: of a header's hash, its roots of receipts and transactions, the parent's link."""


@pytest.mark.parametrize("lie", [None, *PICTURES])
async def test_a_lie_is_contradicted_by_exactly_these_proofs(simulation: Simulation, lie: Lie | None) -> None:
    node, truth = await picture(simulation, lie), await picture(simulation, None)
    numbers = range(1, BLOCKS)
    blocks = [block_of(node, number) for number in numbers]
    receipts = [receipts_of(node, block) for block in blocks]
    failed = {
        "hash": sum(header_hash(block) != block["hash"] for block in blocks),
        "root": sum(root_of(found) != block["receiptsRoot"] for block, found in zip(blocks, receipts, strict=True)),
        "transactions": sum(
            transactions_root(node.call("eth_getBlockByHash", [block["hash"], True])) != block["transactionsRoot"]
            for block in blocks
        ),
        "link": sum(after["parentHash"] != before["hash"] for before, after in pairwise(blocks)),
    }
    print(lie, failed)
    assert {proof for proof, blocks_failed in failed.items() if blocks_failed} == CONTRADICTED.get(
        lie or Lie.STALE, set()
    )
    true_receipts = [receipts_of(truth, block_of(truth, number)) for number in numbers]
    assert (receipts == true_receipts) is (lie is None)


async def test_an_invented_log_is_in_the_true_bloom(simulation: Simulation) -> None:
    node, truth = await picture(simulation, Lie.INVENT), await picture(simulation, None)
    invented = 0
    for number in range(1, BLOCKS):
        block = block_of(node, number)
        logs = logs_of(node, blockHash=block["hash"])
        added = len(logs) - len(logs_of(truth, blockHash=block["hash"]))
        values = [bytes.fromhex(text[2:]) for log in logs for text in (log["address"], *log["topics"])]
        assert bloom_of(values) == int(block["logsBloom"], 16)
        assert added in (0, 1)
        invented += added
    assert invented > 10


async def test_nodes_that_are_stale_or_without_receipts(simulation: Simulation) -> None:
    stale, withheld, pruned = [
        await picture(simulation, lie) for lie in (Lie.STALE, Lie.WITHHELD_RECEIPTS, Lie.PRUNED_RECEIPTS)
    ]
    truth = await picture(simulation, None)
    head = simulation.chain.head.number
    assert stale.call("eth_blockNumber", []) == hex(head - STALE_BLOCKS)
    for number in (5, EARLY_FORK - 1, EARLY_FORK, head):
        block = block_of(truth, number)
        asked: list[tuple[str, list[Any]]] = [("eth_getBlockReceipts", [block["hash"]])]
        asked += [("eth_getTransactionReceipt", [tx_hash]) for tx_hash in block["transactions"]]
        for method, params in asked:
            assert withheld.call(method, params) is None
            if number < EARLY_FORK:
                with pytest.raises(RpcError, match="pruned history unavailable"):
                    pruned.call(method, params)
            else:
                assert pruned.call(method, params) == truth.call(method, params)


async def test_a_branch_grows_with_the_chain_and_agrees_up_to_its_fork() -> None:
    made = Simulation(52)
    made.history(BLOCKS)
    for lie, common in ((Lie.EARLY_FORK, EARLY_FORK), (Lie.LATE_FORK, LATE_FORK)):
        node = LyingServer(made, lie).node
        made.history(7)
        assert node.head == made.chain.head.number
        agreeing = [block_of(node, number)["hash"] == hex_hash(made, number) for number in range(node.head + 1)]
        assert agreeing == [number <= common for number in range(node.head + 1)]


def hex_hash(simulation: Simulation, number: int) -> str:
    (block,) = simulation.chain.blocks(number, number)
    return "0x" + block.hash.hex()


async def test_a_lie_begins_at_its_block_and_ends_when_the_node_becomes_honest(simulation: Simulation) -> None:
    server, truth = LyingServer(simulation, Lie.ALTER, since=50), ExecutionServer(simulation.chain)

    def false_blocks() -> set[int]:
        numbers = (hex(number) for number in range(BLOCKS))
        queries = [{"fromBlock": number, "toBlock": number} for number in numbers]
        return {at for at, query in enumerate(queries) if logs_of(server.node, **query) != logs_of(truth.node, **query)}

    assert false_blocks() and min(false_blocks()) >= 50
    server.be_honest()
    assert false_blocks() == set()


async def test_forged_blocks_hold_their_filler() -> None:
    made = Simulation(53)
    made.chain.filler_logs = FULL_BLOCK_LOGS
    made.history(12)
    node = await picture(made, Lie.FORGED_BLOCK)
    blocks = [block_of(node, number) for number in range(1, 12)]
    assert any(after["parentHash"] != before["hash"] for before, after in pairwise(blocks))
    for block in blocks:
        assert header_hash(block) == block["hash"]
        receipts = receipts_of(node, block)
        assert root_of(receipts) == block["receiptsRoot"]
        values = [
            bytes.fromhex(text[2:])
            for receipt in receipts
            for log in receipt["logs"]
            for text in (log["address"], *log["topics"])
        ]
        assert bloom_of(values) == int(block["logsBloom"], 16)
