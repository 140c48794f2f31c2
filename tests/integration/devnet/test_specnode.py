"""The node made from the executable specification, and our readers and rules against the specification's own data."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise

import aiohttp
import pytest
import rlp
from eth_hash.auto import keccak

from specbuild import GWEI_PER_ETH, MISSED_SLOTS
from specchain import GENESIS_S, OTHER_VAULT, VAULT, Expected, SpecChain, built_once, expected
from specnode import SpecNode
from vaultevents.chain.beacon.client import BeaconChain, BeaconOptions, Payload
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.events import (
    Observation,
    ValidatorActivated,
    ValidatorExited,
    ValidatorWithdrawalCompleted,
)
from vaultevents.core.spans import Span
from vaultevents.core.units import WEI_PER_GWEI, Address, Hash32, Pubkey
from vaultevents.core.validators import observe, validators_head
from vaultevents.core.withdrawals import fold

pytestmark = pytest.mark.integration

HEADS = (32, 41, 42, 56, 63, 64, 79, 88, 104, 120, 128)
"""Head slots: the first finality, in missed slots, with a finalized block that is older than its epoch, and later."""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> SpecChain:
    return built_once(tmp_path_factory, worker_id)


@pytest.fixture
def node(chain: SpecChain) -> Iterator[SpecNode]:
    with SpecNode(chain) as serving:
        yield serving


@asynccontextmanager
async def reading(node: SpecNode, *, ssz: bool = False) -> AsyncIterator[tuple[BeaconChain, ExecutionChain]]:
    """Our readers, with the clock of the chain."""
    async with (
        BeaconChain([node.url], BeaconOptions(ssz=ssz), clock=lambda: node.now_s) as beacon,
        ExecutionChain([node.url], head=HeadPolicy(), options=ExecutionOptions(batch_size=20)) as execution,
    ):
        beacon.expect(await beacon.identity())
        yield beacon, execution


def test_blocks_are_linked_on_both_layers_and_withdrawals_have_no_gap(chain: SpecChain) -> None:
    assert {block.slot for block in chain.blocks} == set(range(129)) - MISSED_SLOTS
    for number, (before, after) in enumerate(pairwise(chain.blocks), start=1):
        assert after.parent_root == before.root
        assert after.execution_header["parentHash"] == "0x" + before.execution_hash.hex()
        assert (after.execution_number, after.execution_time_s) == (number, chain.time_s(after.slot))
    indices = [paid.index for block in chain.blocks for paid in block.withdrawals]
    assert indices == list(range(len(indices)))
    assert len(indices) > 300
    assert chain.blocks[0].execution_time_s < GENESIS_S == chain.time_s(0)


def test_the_execution_headers_are_what_was_hashed(chain: SpecChain) -> None:
    numbers = {"difficulty", "number", "gasLimit", "gasUsed", "timestamp", "baseFeePerGas", "blobGasUsed"}
    numbers.add("excessBlobGas")
    for block in chain.blocks:
        fields = {name: text for name, text in block.execution_header.items() if name != "hash"}
        items = [
            rlp.encode(int(text, 16)) if name in numbers else rlp.encode(bytes.fromhex(text[2:]))
            for name, text in fields.items()
        ]
        body = b"".join(items)
        assert len(body) > 255
        assert keccak(b"\xf9" + len(body).to_bytes(2) + body) == block.execution_hash


def test_finality_follows_the_head_and_once_its_block_is_older_than_its_epoch(chain: SpecChain) -> None:
    checkpoints = [block.finalized for block in chain.blocks]
    slots = {checkpoint.epoch: chain.block_of(checkpoint).slot for checkpoint in checkpoints}
    assert [*slots] == [0, *range(2, 15)]
    assert {epoch for epoch, slot in slots.items() if slot < epoch * chain.slots_per_epoch} == {5}
    assert all(checkpoint.root == chain.block_of(checkpoint).root for checkpoint in checkpoints if checkpoint.epoch)
    assert {*slots.values()} == set(chain.states)


def test_the_chain_holds_what_it_promises(chain: SpecChain) -> None:
    events = expected(chain, VAULT, chain.last_slot)
    turns = {(event.event_type, event.validator_index): event.epoch for event in events if event.amount_gwei is None}
    assert turns == {
        **{("validator_activated", index): 0 for index in range(6)},
        ("validator_activated", 6): 8,
        ("validator_activated", 7): 8,
        ("validator_activated", 64): 12,
        ("validator_exited", 1): 9,
        ("validator_exited", 2): 9,
    }
    paid = {(e.validator_index, e.epoch): e.amount_gwei for e in events if e.amount_gwei is not None}
    assert paid[0, 0] is not None
    assert paid[0, 0] > 1.5 * GWEI_PER_ETH
    assert paid[4, 10] == 3 * GWEI_PER_ETH  # two requests
    assert max(amount for (index, _), amount in paid.items() if index == 1 and amount) > 32 * GWEI_PER_ETH
    assert max(amount for (index, _), amount in paid.items() if index == 2 and amount) < 0.01 * GWEI_PER_ETH
    assert chain.blocks[-1].validators[5].balance_gwei > 64 * GWEI_PER_ETH  # consolidated
    in_block = [Counter(paid.validator_index for paid in block.withdrawals) for block in chain.blocks]
    assert max(count for counts in in_block for count in counts.values()) == 2
    assert any(len(withdrawals) > 1 for withdrawals in _by_epoch(chain).values())
    assert len(expected(chain, OTHER_VAULT, chain.last_slot)) > 300


def _by_epoch(chain: SpecChain) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for block in chain.blocks:
        for paid in block.withdrawals:
            if paid.address == VAULT and paid.validator_index != 4:
                found.setdefault((paid.validator_index, block.slot // 8), []).append(paid.index)
    return found


def test_what_is_due_only_grows_with_the_head(chain: SpecChain) -> None:
    due = [expected(chain, VAULT, head) for head in range(chain.last_slot + 1)]
    assert all(set(before) <= set(after) for before, after in pairwise(due))
    assert (due[31], len(due[32])) == ([], 8)
    assert len(due[-1]) > 30
    exits = [head for head, events in enumerate(due) if any(e.event_type == "validator_exited" for e in events)]
    assert exits[0] == 72  # the first slot of epoch 9, though that epoch is not final yet


async def test_routes_answer_as_the_beacon_api_says(node: SpecNode) -> None:
    node.head_slot = 57
    states, headers = f"{node.url}/eth/v1/beacon/states", f"{node.url}/eth/v1/beacon/headers"
    async with aiohttp.ClientSession() as session:

        async def get(url: str) -> tuple[int, dict[str, object]]:
            async with session.get(url) as response:
                return response.status, await response.json()

        async def post(url: str, body: object) -> tuple[int, dict[str, object]]:
            async with session.post(url, json=body) as response:
                return response.status, await response.json()

        for path, status in {
            f"{headers}/head": 200,
            f"{headers}/genesis": 200,
            f"{headers}/39": 200,
            f"{headers}/40": 404,
            f"{headers}/58": 404,
            f"{headers}/nonsense": 400,
            f"{headers}/0x{'12' * 32}": 404,
            f"{states}/finalized/validators/7": 200,
            f"{states}/finalized/validators/64": 404,
            f"{states}/head/validators/64": 200,
            f"{states}/head/validators/x": 400,
            f"{states}/head/validators?{'&'.join(f'id={n}' for n in range(65))}": 414,
            f"{node.url}/eth/v1/elsewhere": 404,
            f"{node.url}/eth/v2/debug/beacon/states/finalized": 406,
        }.items():
            assert (await get(path))[0] == status, path
        _, header = await get(f"{headers}/finalized")
        assert header["finalized"] is True
        _, every = await get(f"{states}/finalized/validators")
        some = [await post(f"{states}/finalized/validators", {"ids": ["3", "64", "5"]})]
        some.append(await get(f"{states}/finalized/validators?id=3&id=64&id=5"))
        records = every["data"]
        assert isinstance(records, list)
        assert len(records) == 64
        assert all((status, answer["data"]) == (200, [records[3], records[5]]) for status, answer in some)


async def test_the_execution_node_gives_tags_batches_and_nothing_beyond_its_head(node: SpecNode) -> None:
    node.head_slot = 57
    positions = ["finalized", "safe", "latest", "earliest", "0x37", "0x38", "0x37"]
    calls = [
        {"jsonrpc": "2.0", "id": at, "method": "eth_getBlockByNumber", "params": [position, False]}
        for at, position in enumerate(positions)
    ]
    async with aiohttp.ClientSession() as session, session.post(node.url, json=calls) as response:
        blocks = [answer["result"] for answer in await response.json()]
    assert [block and int(block["number"], 16) for block in blocks] == [38, 45, 54, 0, None, None, None]
    assert {len(block["logsBloom"]) for block in blocks if block} == {514}
    assert [withdrawal["index"] for withdrawal in blocks[2]["withdrawals"]] == [
        hex(withdrawal.index) for withdrawal in node.head.withdrawals
    ]


@pytest.mark.parametrize("ssz", [False, True])
async def test_our_readers_and_rules_find_what_the_specification_holds(node: SpecNode, ssz: bool) -> None:
    async with reading(node, ssz=ssz) as (beacon, execution):
        time = (await beacon.identity()).time
        assert time == ChainTime(GENESIS_S, 6000, 8)
        for head in HEADS:
            node.head_slot = head
            for vault in (VAULT, OTHER_VAULT):
                found = await _turns(beacon, time, vault, head) + await _payments(beacon, execution, time, vault)
                assert sorted(found) == sorted(expected(node.chain, vault, head)), head
    assert bool(node.calls["GET /eth/v2/debug/beacon/states/finalized"]) is ssz
    assert bool(node.calls["GET /eth/v1/beacon/states/finalized/validators"]) is not ssz


async def test_the_finalized_payload_is_the_finalized_execution_block_of_the_specification(node: SpecNode) -> None:
    async with reading(node) as (beacon, execution):
        for head in HEADS:
            node.head_slot = head
            found = await beacon.payload("finalized")
            assert found == Payload(node.final.execution_number, Hash32(node.final.execution_hash), node.final.slot)
            final = await execution.final_head()
            assert (final.number, final.hash) == (found.number, found.hash)
        for slot in MISSED_SLOTS:
            assert await beacon.payload(slot) is None
        for block in node.chain.blocks[:20]:
            assert await beacon.payload(block.slot) == Payload(
                block.execution_number, Hash32(block.execution_hash), block.slot
            )
    assert node.calls["GET /eth/v1/beacon/blinded_blocks/finalized"] == len(HEADS)
    assert node.calls["GET /eth/v2/beacon/blocks/finalized"] == 0


async def _turns(beacon: BeaconChain, time: ChainTime, vault: bytes, head: int) -> list[Expected]:
    finality, scan = await beacon.finality(), await beacon.scan(frozenset({Address(vault)}))
    through = validators_head(time.epoch_of(head), time.epoch_of(finality.block_slot))
    asked = await beacon.validators([record.index for record in scan.records])
    assert asked == scan.records
    return [_plain(one) for one in observe(asked, Span(0, through), time)]


async def _payments(beacon: BeaconChain, execution: ExecutionChain, time: ChainTime, vault: bytes) -> list[Expected]:
    final = await execution.final_head()
    through = time.epoch_at(final.timestamp_s) - 1
    first = await execution.first_block_at(time.epoch_start_s(0))
    assert first == 1
    blocks = await execution.read_withdrawals(Span(first, final.number), Hash32((await execution.header(0)).hash), None)
    blocks = [block for block in blocks if time.epoch_at(block.timestamp_s) <= through]
    pubkeys: dict[int, Pubkey] = {
        record.index: record.pubkey for record in await beacon.tail(0) + await beacon.tail(64)
    }
    return [_plain(one) for one in fold(blocks, frozenset({Address(vault)}), pubkeys, time)]


def _plain(one: Observation) -> Expected:
    match one.payload:
        case ValidatorActivated(index, _, epoch):
            return Expected("validator_activated", index, epoch, None, one.at_ms)
        case ValidatorExited(index, _, epoch):
            return Expected("validator_exited", index, epoch, None, one.at_ms)
        case ValidatorWithdrawalCompleted(index, _, epoch, amount_wei):
            amount_gwei, rest = divmod(amount_wei, WEI_PER_GWEI)
            assert rest == 0
            return Expected("validator_withdrawal_completed", index, epoch, amount_gwei, one.at_ms)
    raise AssertionError(one)


async def test_before_the_first_finality_nothing_is_read(node: SpecNode) -> None:
    node.head_slot = 31
    async with reading(node) as (beacon, execution):
        with pytest.raises(SourceUnavailable, match="has not finalized yet"):
            await beacon.finality()
        with pytest.raises(SourceUnavailable, match="does not know its finalized block"):
            await execution.final_head()
        assert (await execution.identity()).chain_id == node.chain.chain_id
