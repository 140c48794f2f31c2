"""The devnet chain is a real chain: hashes, links, blooms, reorgs and scripted finality."""

from __future__ import annotations

import hashlib

import pytest
import rlp
from eth_bloom.bloom import BloomFilter
from eth_hash.auto import keccak

from vaultevents.devnet.blocks import FULL_BLOCK_LOGS, Log, filler, own_logs
from vaultevents.devnet.chain import Absent, At, Chain, Lag
from vaultevents.devnet.header import NO_REQUESTS_HASH
from vaultevents.devnet.rpc import block_json

pytestmark = pytest.mark.integration

NUMBERS = {
    "difficulty", "number", "gasLimit", "gasUsed", "timestamp", "baseFeePerGas", "blobGasUsed", "excessBlobGas"
}  # fmt: skip
HASHED = [
    "parentHash", "sha3Uncles", "miner", "stateRoot", "transactionsRoot", "receiptsRoot", "logsBloom", "difficulty",
    "number", "gasLimit", "gasUsed", "timestamp", "extraData", "mixHash", "nonce", "baseFeePerGas", "withdrawalsRoot",
    "blobGasUsed", "excessBlobGas", "parentBeaconBlockRoot", "requestsHash",
]  # fmt: skip


def header_hash(block: dict[str, str]) -> str:
    """The hash as a client recomputes it from the JSON of a block."""
    items = [
        int(block[name], 16) if name in NUMBERS else bytes.fromhex(block[name].removeprefix("0x")) for name in HASHED
    ]
    return "0x" + keccak(rlp.encode(items)).hex()


def log(address: int, *topics: int) -> Log:
    return Log(address.to_bytes(20), tuple(topic.to_bytes(32) for topic in topics), b"\x07" * 32)


def busy_chain(blocks: int = 12) -> Chain:
    chain = Chain(5)
    for number in range(blocks):
        chain.mine([chain.transaction([log(number, 1, 2), log(3, 4)])], missed_slots=number % 3)
    return chain


def test_every_hash_is_that_of_the_header_and_every_block_links_to_its_parent() -> None:
    chain = busy_chain()
    chain.filler_logs = FULL_BLOCK_LOGS
    chain.mine()
    shown = [block_json(block) for number in range(14) if (block := chain.block(number))]
    assert [one["hash"] for one in shown] == [header_hash(one) for one in shown]
    assert [one["parentHash"] for one in shown[1:]] == [one["hash"] for one in shown[:-1]]
    assert shown[0]["parentHash"] == "0x" + "00" * 32


def test_a_changed_header_field_changes_the_hash() -> None:
    shown = block_json(busy_chain().head)
    assert all(header_hash({**shown, name: "0x" + "01" * 8}) != shown["hash"] for name in HASHED)


def test_the_hash_of_no_requests_is_sha256_of_nothing() -> None:
    assert hashlib.sha256(b"").digest() == NO_REQUESTS_HASH


def test_blooms_equal_those_of_eth_bloom() -> None:
    chain = busy_chain()
    for number in range(13):
        block = chain.block(number)
        assert block is not None
        bloom = BloomFilter.from_iterable(v for one in own_logs(block) for v in (one.log.address, *one.log.topics))
        assert int(bloom).to_bytes(256) == block.header.logs_bloom


def test_full_blocks_set_nine_tenths_of_their_bloom_and_their_logs_rebuild_it() -> None:
    chain = Chain(9)
    chain.filler_logs = FULL_BLOCK_LOGS
    for _ in range(8):
        block = chain.mine([chain.transaction([log(1, 2)])])
        placed = [*own_logs(block), *filler(block)]
        bloom = BloomFilter.from_iterable(v for one in placed for v in (one.log.address, *one.log.topics))
        assert int(bloom).to_bytes(256) == block.header.logs_bloom
        assert int(bloom).bit_count() >= 0.9 * 2048
        assert [one.log_index for one in placed] == list(range(FULL_BLOCK_LOGS + 1))
        assert {one.tx_hash for one in placed} == set(block.transaction_hashes)


def test_slots_pass_without_a_block() -> None:
    chain = Chain(1, genesis_time_s=1000, seconds_per_slot=12)
    block = chain.mine(missed_slots=2)
    assert (block.number, block.slot, block.timestamp_s) == (1, 3, 1036)


def test_the_seed_decides_everything() -> None:
    assert busy_chain().head.hash == busy_chain().head.hash
    assert Chain(1).head.hash != Chain(2).head.hash


def test_a_reorg_forgets_the_dropped_blocks_and_keeps_the_hash_of_a_transaction_that_comes_back() -> None:
    chain = busy_chain()
    chain.finalized = Lag(4)
    dropped = chain.head
    kept, lost = chain.transaction([log(77, 78)], creates=[b"\x01" * 20]), chain.transaction([log(79, 78)])
    chain.mine([kept])
    chain.mine([lost])
    new = chain.reorg(3, [[], [], [], [kept]])
    assert chain.head is new[-1]
    assert chain.head.number == 15
    assert chain.block_by_hash(dropped.hash) is dropped
    assert chain.block(dropped.number) is new[0]
    assert new[0].header.parent_hash == dropped.header.parent_hash
    assert new[0].hash != dropped.hash
    assert chain.included(kept.hash) == (new[-1], 0)
    assert chain.included(lost.hash) is None
    found = chain.logs(0, 99, [(78).to_bytes(32)])
    assert [(item.block, item.tx_hash) for item in found] == [(new[-1], kept.hash)]
    assert (chain.has_code(b"\x01" * 20, 14), chain.has_code(b"\x01" * 20, 15)) == (False, True)


def test_a_final_block_cannot_be_dropped_nor_a_transaction_included_twice() -> None:
    chain = busy_chain()
    with pytest.raises(ValueError, match="final"):
        chain.reorg(3, [[]])
    with pytest.raises(ValueError, match="only once"):
        chain.mine(chain.head.transactions)


def test_finality_follows_the_head_until_a_test_says_otherwise() -> None:
    chain = busy_chain(3)
    assert chain.finalized_number == 1
    chain.freeze_finality()
    chain.mine()
    assert chain.finalized_number == 1
    chain.finalized = At(0)
    assert chain.finalized_number == 0
    chain.finalized = Absent.NULL
    chain.freeze_finality()
    assert chain.finalized_number is None
    chain.finalized = Lag(2)
    assert chain.finalized_number == 2


def test_a_fork_shares_the_blocks_before_it_and_nothing_after() -> None:
    chain = busy_chain()
    fork = chain.fork(5, seed=6)
    assert (fork.head, fork.seed) == (chain.block(5), 6)
    mine, theirs = chain.mine([chain.transaction([log(9, 1)])]), fork.mine([fork.transaction([log(9, 1)])])
    assert theirs.header.parent_hash == chain.blocks(5, 5)[0].hash
    assert fork.block_by_hash(mine.hash) is chain.block_by_hash(theirs.hash) is None
    assert [one.block.number for one in fork.logs(0, 20)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]


def test_no_filler_transaction_is_an_ordinary_one() -> None:
    chain = Chain(5)
    chain.filler_logs = 3
    for _ in range(20):
        chain.mine([chain.transaction([log(9, 1)]) for _ in range(3)])
    hashes = [tx_hash for block in chain.blocks(0, 20) for tx_hash in block.transaction_hashes]
    assert len(hashes) == 80 == len(set(hashes))
