"""The devnet's beacon chain: validators that keep the protocol's rules, withdrawals without gaps, and a Beacon API."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
import rlp
from eth_hash.auto import keccak

from vaultevents.devnet.beacon import Beacon, beacon_root
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.blocks import Block, Payout, Withdrawal, withdrawals_root
from vaultevents.devnet.chain import Absent, At, Chain, Lag
from vaultevents.devnet.faults import Fault, Faults
from vaultevents.devnet.rpc import block_json
from vaultevents.devnet.trie import EMPTY_TRIE_ROOT, ordered_root
from vaultevents.devnet.validators import FAR_FUTURE_EPOCH, ValidatorRegistry, paid_address, paying
from vaultevents.devnet.world import World

pytestmark = pytest.mark.integration

VAULT, OTHER = b"\x11" * 20, b"\xee" * 20


def world_of(seed: int = 21, blocks: int = 200, validators: int = 40, **settings: Any) -> World:
    world = World(seed, validators=validators, **settings)
    world.history(blocks, events=30)
    return world


def blocks_of(world: World) -> list[Block]:
    return world.chain.blocks(0, world.chain.head.number)


# Withdrawals on the chain


def test_the_root_of_withdrawals_is_that_of_a_real_client() -> None:
    # Block 108 of a local Capella network, made by Lodestar 1.5.1 and @ethereumjs/client 0.10.5.
    vault = bytes.fromhex("1111" + "aa" * 16 + "2222")
    block = (
        Withdrawal(418, 63, OTHER, 0x251B85),
        Withdrawal(419, 0, vault, 0x231395),
        Withdrawal(420, 1, vault, 32 * 10**9),
        Withdrawal(421, 2, vault, 0x7AC59),
    )
    assert withdrawals_root(block).hex() == "c170b08b6146d38a07ab45dd495da93b6d5b47215560da599bc71b677c29b7a4"
    assert withdrawals_root(()) == EMPTY_TRIE_ROOT
    assert withdrawals_root(block[:3]) != withdrawals_root(block)


def test_a_trie_with_short_nodes_and_with_more_than_a_byte_of_positions_has_the_root_of_its_nodes() -> None:
    # One entry: a single leaf at the path 8-0, two digits, so the flag is 20.
    assert ordered_root([b"one"]) == keccak(rlp.encode([b"\x20\x80", b"one"]))
    # Two entries: positions 0 and 1 part at the first digit; both leaves are short and stand in the branch itself.
    branch: list[Any] = [b""] * 17
    branch[8], branch[0] = [b"\x30", b"one"], [b"\x31", b"two"]
    assert ordered_root([b"one", b"two"]) == keccak(rlp.encode(branch))
    many = [bytes([number]) * 40 for number in range(200)]
    assert len({ordered_root(many[:count]) for count in (127, 128, 129, 200)}) == 4


def test_headers_commit_to_withdrawals_and_the_index_has_no_gap() -> None:
    world = world_of()
    blocks = blocks_of(world)
    for parent, block in pairwise(blocks):
        header = block.header
        assert header.withdrawals_root == withdrawals_root(block.withdrawals)
        assert (header.hash(), header.parent_hash) == (block.hash, parent.hash)
    indices = [one.index for block in blocks for one in block.withdrawals]
    assert indices == list(range(len(indices)))
    assert len(indices) > 150
    assert world.chain.head.next_withdrawal == len(indices)


def test_the_json_of_a_block_has_its_withdrawals_as_quantities() -> None:
    chain = Chain(1)
    chain.mine(payouts=[Payout(5, VAULT, 10)])
    block = chain.mine(payouts=[Payout(2**40 + 1, OTHER, 32 * 10**9), Payout(7, VAULT, 1)])
    assert block_json(block)["withdrawals"] == [
        {"index": "0x1", "validatorIndex": "0x10000000001", "address": "0x" + "ee" * 20, "amount": "0x773594000"},
        {"index": "0x2", "validatorIndex": "0x7", "address": "0x" + "11" * 20, "amount": "0x1"},
    ]
    assert block_json(chain.mine())["withdrawals"] == []


def test_after_a_reorg_the_index_goes_on_from_the_blocks_that_are_left() -> None:
    chain = Chain(1)
    chain.finalized = Lag(5)
    for number in range(4):
        chain.mine(payouts=[Payout(number, VAULT, 1)] * number)
    assert chain.head.next_withdrawal == 6
    chain.reorg(2, [[]])
    assert [one.index for one in chain.mine(payouts=[Payout(9, VAULT, 1)]).withdrawals] == [1]


def test_a_world_without_validators_has_the_same_chain_as_before_and_no_withdrawals() -> None:
    world = World(21)
    world.history(40, events=80)
    assert world.chain.head.hash.hex() == "f1c26db4b72356a76d48b613bf8d3d8d8ee81492ad7e736da652b18c2c3760e6"
    assert all(block.withdrawals == () for block in blocks_of(world))
    assert world.beacon.registry.validators == []
    assert {key[1].split("_")[0] for key in world.expected()} == {"funding", "withdrawal"}


def test_validators_change_nothing_for_contracts() -> None:
    contracts = ("funding_received", "withdrawal_claimed")

    def payloads(validators: int) -> list[str]:
        world = World(4, validators=validators)
        world.history(60, events=60)
        return [event_id for _, event_id in world.expected(event_types=contracts)]

    assert payloads(0) == payloads(40)
    assert len(payloads(0)) > 50


# The registry


def test_epochs_are_written_once_and_five_ahead() -> None:
    registry = ValidatorRegistry(8)
    genesis = registry.append(0, bytes(48), paying(1, VAULT), active=True)
    later = registry.append(20, bytes(48), paying(2, VAULT))
    with pytest.raises(ValueError, match="less than 5 epochs"):
        registry.activate(later.index, 31, 7)
    registry.activate(later.index, 31, 8)
    with pytest.raises(ValueError, match="is decided"):
        registry.activate(later.index, 32, 9)
    with pytest.raises(ValueError, match="is not active"):
        registry.exit(later.index, 40, 10)
    registry.exit(genesis.index, 40, 10)
    with pytest.raises(ValueError, match="is decided"):
        registry.exit(genesis.index, 41, 11)
    with pytest.raises(ValueError, match="does not exist"):
        registry.activate(later.index, 19, 20)
    with pytest.raises(ValueError, match="before the last deposit"):
        registry.append(19, bytes(48), bytes(32))
    with pytest.raises(ValueError, match="only genesis"):
        registry.append(30, bytes(48), bytes(32), active=True)


def test_credentials_change_only_in_the_ways_of_the_protocol() -> None:
    registry = ValidatorRegistry(8)
    registry.append(0, bytes(48), b"\0" + b"\x05" * 31, active=True)
    for credentials in (paying(2, VAULT), bytes(32)):
        with pytest.raises(ValueError, match="cannot change"):
            registry.change_credentials(0, 50, credentials)
    registry.change_credentials(0, 50, paying(1, VAULT))
    with pytest.raises(ValueError, match="cannot change"):
        registry.change_credentials(0, 60, paying(2, OTHER))
    registry.change_credentials(0, 60, paying(2, VAULT))
    seen = [registry.record(0, slot) for slot in (49, 50, 59, 60)]
    assert [one and one.credentials[0] for one in seen] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "credentials, address",
    [
        (paying(1, VAULT), VAULT),
        (paying(2, VAULT), VAULT),
        (bytes(12) + VAULT, None),
        (b"\xb0" + bytes(11) + VAULT, None),
        (b"\x01" + bytes(10) + b"\x01" + VAULT, None),
    ],
)
def test_only_two_kinds_of_credentials_pay_an_address(credentials: bytes, address: bytes | None) -> None:
    assert paid_address(credentials) == address


def test_a_state_shows_what_was_decided_by_then_and_nothing_that_came_later() -> None:
    registry = ValidatorRegistry(8)
    registry.append(0, bytes(48), paying(1, VAULT), active=True)
    registry.append(20, b"\x01" * 48, paying(1, VAULT))
    registry.activate(1, 30, 9)
    registry.exit(0, 33, 10, slashed=True)
    assert [registry.count(slot) for slot in (0, 19, 20)] == [1, 1, 2]
    assert (registry.record(1, 19), registry.record(2, 99), registry.record(-1, 99)) == (None, None, None)

    def epochs(index: int, slot: int) -> tuple[int, int, int, bool]:
        record = registry.record(index, slot)
        assert record is not None
        return record.activation_epoch, record.exit_epoch, record.withdrawable_epoch, record.slashed

    far = FAR_FUTURE_EPOCH
    assert [epochs(1, slot) for slot in (29, 30)] == [(far, far, far, False), (9, far, far, False)]
    assert [epochs(0, slot) for slot in (32, 33)] == [(0, far, far, False), (0, 10, 74, True)]


def test_up_to_four_epochs_after_any_final_block_every_decision_of_the_world_is_in_its_state() -> None:
    world = world_of(3)
    beacon = world.beacon
    hidden = 0
    for block in blocks_of(world):
        state = beacon.finality(block.number).block
        epochs = beacon.epoch_of(state.slot)
        for validator in beacon.registry.validators:
            record = beacon.registry.record(validator.index, state.slot)
            for decided, shown in (
                (validator.activation, record and record.activation_epoch),
                (validator.exit, record and record.exit_epoch),
            ):
                if decided is not None and decided.epoch <= epochs + 4:
                    assert shown == decided.epoch
                hidden += decided is not None and shown in (FAR_FUTURE_EPOCH, None)
    assert hidden > 1000


# The world


def kinds_of_withdrawals(world: World) -> set[str]:
    own = {one.address for one in world.registrations}
    of_blocks: Counter[tuple[int, int]] = Counter()
    of_epochs: dict[tuple[int, int], set[int]] = defaultdict(set)
    kinds: set[str] = set()
    for block in blocks_of(world):
        epoch, place = divmod(block.slot, world.beacon.slots_per_epoch)
        kinds |= set() if block.withdrawals else {"an empty list"}
        for one in block.withdrawals:
            if one.address not in own:
                kinds.add("foreign")
            elif one.validator_index >= 2**40:
                kinds.add("of a builder")
            else:
                of_blocks[one.validator_index, block.number] += 1
                of_epochs[one.validator_index, epoch].add(block.number)
                kinds.add("full" if one.amount_gwei >= 31 * 10**9 else "partial")
                kinds |= {0: {"in the first slot"}, 7: {"in the last slot"}}.get(place, set())
                kinds |= {"one gwei"} if one.amount_gwei == 1 else set()
    kinds |= {"several in a block"} if max(of_blocks.values()) > 1 else set()
    kinds |= {"in several blocks of an epoch"} if any(len(numbers) > 1 for numbers in of_epochs.values()) else set()
    if any((index, epoch + 1) in of_epochs for index, epoch in of_epochs):
        kinds.add("in one epoch and the next")
    return kinds


@pytest.mark.parametrize("seed", range(4))
def test_every_world_contains_every_awkward_withdrawal(seed: int) -> None:
    assert kinds_of_withdrawals(world_of(seed)) == {
        "an empty list", "foreign", "of a builder", "full", "partial", "in the first slot", "in the last slot",
        "one gwei", "several in a block", "in several blocks of an epoch", "in one epoch and the next",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_every_world_contains_every_awkward_validator(seed: int) -> None:
    world = world_of(seed)
    beacon, vaults = world.beacon, {one.address for one in world.registrations}
    own = [one for one in beacon.registry.validators if paid_address(one.credentials[-1][1]) in vaults]
    moved = [one for one in own if one.credentials[0][1][0] == 0]
    assert len(moved) == 2
    assert any(one.activation and 0 < one.activation.epoch < one.credentials[1][0] // 8 for one in moved)
    assert {one.credentials[0][1][0] for one in own} == {0, 1, 2}
    assert any(one.slashed for one in own)
    assert any(one.exit and not one.slashed for one in own)
    assert any(one.appended_slot > 0 and one.activation for one in own)
    assert any(one.activation is None for one in own)
    ends = {one.index: world.chain.last_block_at(one.drained_slot) for one in own if one.drained_slot}
    paid = [one for index, block in ends.items() for one in block.withdrawals if one.validator_index == index]
    assert any(one.amount_gwei == 1_000_000 for one in paid)  # what exceeded a consolidation
    assert any(one.amount_gwei >= 32 * 10**9 for one in paid)
    assert {one.credentials[0][1][0] for one in beacon.registry.validators} == {0, 1, 2, 0xB0}
    lookalikes = [one for one in beacon.registry.validators if one.credentials[0][1][12:] in vaults and one not in own]
    assert len(lookalikes) == 3


def test_slots_are_missed_at_a_boundary_and_for_a_whole_epoch() -> None:
    world = world_of(missed_slot_share=0.0)
    beacon = world.beacon
    slots = {block.slot for block in blocks_of(world)}
    assert {3, 19} == {epoch for epoch in range(25) if not slots & set(range(8 * epoch, 8 * epoch + 8))}
    assert beacon.first_slot(5) not in slots
    assert {beacon.first_slot(5) - 1, beacon.first_slot(5) + 1} <= slots
    for block in blocks_of(world):
        assert block.slot * world.chain.seconds_per_slot == block.timestamp_s - beacon.genesis.timestamp_s


@pytest.mark.parametrize("seed", range(1, 9))
def test_the_history_has_every_event_and_so_have_the_next_twelve_blocks(seed: int) -> None:
    world = world_of(seed)
    past = world.expected()
    for _ in range(12):
        world.step()
    live = world.expected().keys() - past.keys()

    def count(keys: Any, *event_types: str) -> int:
        return sum(event_id.startswith(event_types) for _, event_id in keys)

    assert count(past, "validator_activated_") >= 3
    assert count(past, "validator_exited_") >= 2
    assert count(past, "validator_withdrawal_completed_") >= 5
    assert count(live, "validator_activated_", "validator_exited_") >= 1
    assert count(live, "validator_withdrawal_completed_") >= 1


def test_the_seed_decides_everything() -> None:
    def told(seed: int) -> tuple[bytes, Any]:
        world = world_of(seed, blocks=60)
        return world.chain.head.hash, world.expected()

    assert told(5) == told(5)
    assert told(5)[0] != told(6)[0]


@pytest.mark.parametrize("settings", [{"validators": 10}, {"validators": 20, "withdrawals_per_block": 17}])
def test_a_world_that_cannot_be_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"validators|withdrawals"):
        World(1, **settings)  # type: ignore[arg-type]


def test_a_day_of_mainnet_with_a_thousand_watched_validators() -> None:
    world = World(1, validators=5000, slots_per_epoch=32, withdrawals_per_block=16)
    world.history(7200)
    events = world.expected()
    vaults = {one.address for one in world.registrations}
    paying_vaults = [v for v in world.beacon.registry.validators if paid_address(v.credentials[-1][1]) in vaults]
    assert len(paying_vaults) >= 1000
    assert world.chain.head.next_withdrawal > 20_000
    assert sum(event_id.startswith("validator_withdrawal_completed_") for _, event_id in events) > 5000


# Finality


def test_a_checkpoint_whose_first_slot_is_missed_has_a_block_of_an_older_epoch() -> None:
    chain = Chain(1)
    beacon = Beacon(chain)
    for _ in range(15):
        chain.mine()
    chain.mine(missed_slots=1)  # slot 17, the second of epoch 2
    chain.mine(missed_slots=14)  # slot 32, the first of epoch 4
    chain.mine(missed_slots=17)  # slot 50, the third of epoch 6
    found = [(one.epoch, one.block.slot) for one in map(beacon.finality, (None, 0, 7, 8, 15, 16, 17, 18))]
    assert found == [(0, 0), (0, 0), (0, 0), (1, 8), (1, 8), (2, 15), (4, 32), (6, 32)]
    assert beacon.epoch_start_s(2) == beacon.genesis.timestamp_s + 16 * 12


# The Beacon API


@dataclass
class Client:
    """Asks one beacon node."""

    session: aiohttp.ClientSession
    url: str
    server: BeaconServer

    async def ask(self, path: str, ids: list[str] | None = None, body: Any = None) -> tuple[int, Any]:
        """GET, or POST where there is a body."""
        method = "GET" if body is None else "POST"
        params = [("id", one) for one in ids or []]
        async with self.session.request(method, self.url + path, params=params, json=body) as response:
            return response.status, await response.json()

    async def data(self, path: str, ids: list[str] | None = None, body: Any = None) -> Any:
        status, answer = await self.ask(path, ids, body)
        assert status == 200, answer
        return answer["data"]

    async def refusal(self, path: str, ids: list[str] | None = None, body: Any = None) -> tuple[int, str]:
        status, answer = await self.ask(path, ids, body)
        assert answer["statusCode"] == status
        return status, answer["message"]


@asynccontextmanager
async def serving(world: World, **settings: Any) -> AsyncIterator[Client]:
    server = BeaconServer(world.beacon, **settings)
    url = await server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            yield Client(session, url, server)
    finally:
        await server.stop()


FINAL = "/eth/v1/beacon/states/finalized/validators"
CHECKPOINTS = "/eth/v1/beacon/states/head/finality_checkpoints"
HEADER = "/eth/v1/beacon/headers/finalized"


async def test_identity_and_time() -> None:
    world = world_of(blocks=60)
    async with serving(world, slot_fields=("SLOT_DURATION_MS",)) as node:
        assert (await node.data("/eth/v1/node/syncing"))["head_slot"] == str(world.chain.head.slot)
        assert "devnet" in (await node.data("/eth/v1/node/version"))["version"]
        genesis = await node.data("/eth/v1/beacon/genesis")
        assert genesis["genesis_time"] == str(world.beacon.genesis.timestamp_s)
        assert genesis["genesis_validators_root"] == "0x" + world.beacon.genesis_validators_root.hex()
        spec = await node.data("/eth/v1/config/spec")
        assert (spec["SLOT_DURATION_MS"], spec["SLOTS_PER_EPOCH"]) == ("12000", "8")
        assert "SECONDS_PER_SLOT" not in spec
        node.server.node.slot_fields = ("SECONDS_PER_SLOT",)
        spec = await node.data("/eth/v1/config/spec")
        assert (spec["SECONDS_PER_SLOT"], "SLOT_DURATION_MS" in spec) == ("12", False)
        assert node.server.calls == {"syncing": 1, "version": 1, "genesis": 1, "spec": 2}


async def test_headers_link_and_a_missed_slot_has_none() -> None:
    world = world_of(blocks=60)
    slots = [block.slot for block in blocks_of(world)]
    async with serving(world) as node:
        parent = "0x" + "00" * 32
        for slot in slots:
            header = await node.data(f"/eth/v1/beacon/headers/{slot}")
            message = header["header"]["message"]
            assert (message["slot"], message["parent_root"]) == (str(slot), parent)
            parent = header["root"]
        head = await node.data("/eth/v1/beacon/headers/head")
        assert (head["root"], head["canonical"]) == (parent, True)
        assert await node.data(f"/eth/v1/beacon/headers/{parent}") == head
        assert (await node.data("/eth/v1/beacon/headers/genesis"))["header"]["message"]["slot"] == "0"
        missed = next(slot for slot in range(slots[-1]) if slot not in slots)
        for absent in (str(missed), str(slots[-1] + 1000), "0x" + "11" * 32):
            refusal = await node.refusal(f"/eth/v1/beacon/headers/{absent}")
            assert refusal == (404, f"No block found for id '{absent}'")
        assert await node.refusal("/eth/v1/beacon/headers/nonsense") == (400, "Invalid block id 'nonsense'")
        assert (await node.refusal("/eth/v1/beacon/nothing"))[0] == 404


async def test_checkpoints_and_the_finalized_header_follow_the_chain() -> None:
    world = world_of(blocks=60)
    chain, beacon = world.chain, world.beacon
    async with serving(world) as node:

        async def final() -> tuple[int, str, int]:
            checkpoint = (await node.data(CHECKPOINTS))["finalized"]
            header = await node.data(HEADER)
            assert checkpoint["root"] in (header["root"], "0x" + "00" * 32)
            return int(checkpoint["epoch"]), checkpoint["root"], int(header["header"]["message"]["slot"])

        number = chain.finalized_number
        assert number is not None
        expected = beacon.finality(number)
        first = await final()
        assert first == (expected.epoch, "0x" + beacon_root(expected.block).hex(), expected.block.slot)
        chain.freeze_finality()
        for _ in range(30):
            world.step()
        assert await final() == first
        syncing = await node.data("/eth/v1/node/syncing")
        assert int(syncing["head_slot"]) == chain.head.slot
        chain.finalized = Lag(2)
        assert (await final())[0] > first[0]
        for unknown in (Absent.NULL, Absent.UNKNOWN, At(0)):
            chain.finalized = unknown
            assert await final() == (0, "0x" + "00" * 32, 0)


async def test_a_node_that_is_behind_knows_neither_the_newest_blocks_nor_their_finality() -> None:
    world = world_of(blocks=60)
    async with serving(world, behind=20) as node:
        known = world.chain.block(world.chain.head.number - 20)
        assert known is not None
        assert (await node.data("/eth/v1/node/syncing"))["head_slot"] == str(known.slot)
        assert (await node.refusal(f"/eth/v1/beacon/headers/{world.chain.head.slot}"))[0] == 404
        behind = int((await node.data(CHECKPOINTS))["finalized"]["epoch"])
        node.server.node.behind = 0
        assert int((await node.data(CHECKPOINTS))["finalized"]["epoch"]) > behind


async def test_a_state_knows_the_checkpoint_of_its_own_time() -> None:
    world = world_of(blocks=60)
    async with serving(world) as node:
        of_head = await node.data(CHECKPOINTS)
        of_final = await node.data(CHECKPOINTS.replace("head", "finalized"))
        assert int(of_final["finalized"]["epoch"]) < int(of_head["finalized"]["epoch"])


async def test_the_finalized_state_shows_the_past() -> None:
    world = world_of(blocks=120)
    registry = world.beacon.registry
    world.chain.finalized = At(60)
    slot = world.beacon.finality(60).block.slot
    async with serving(world) as node:
        shown = {int(one["index"]): one for one in await node.data(FINAL)}
        now = {int(one["index"]): one for one in await node.data(FINAL.replace("finalized", "head"))}
        assert set(shown) == set(range(registry.count(slot)))
        assert len(shown) < len(now) == len(registry.validators)
        assert node.server.calls == {"all validators": 2}
        later = 0
        for index, one in shown.items():
            validator, epochs = registry.validators[index], one["validator"]
            assert epochs["pubkey"] == "0x" + validator.pubkey.hex()
            decisions = [(validator.activation, "activation_epoch"), (validator.exit, "exit_epoch")]
            for decided, name in decisions:
                known = decided is not None and decided.slot <= slot
                assert epochs[name] == str(decided.epoch if decided is not None and known else FAR_FUTURE_EPOCH)
                later += decided is not None and not known
        assert later > 3


async def test_validators_are_asked_by_index_or_key_and_unknown_ids_are_dropped() -> None:
    world = world_of(blocks=60)
    pubkey = "0x" + world.beacon.registry.validators[5].pubkey.hex()
    wanted = ["3", "1", pubkey, "999999", "zzz"]
    async with serving(world) as node:
        by_post = await node.data(FINAL, body={"ids": wanted})
        assert [one["index"] for one in by_post] == ["5", "1", "3"]
        assert await node.data(FINAL, ids=wanted) == by_post
        assert await node.data(FINAL, ids=["0,1,3"]) == []
        assert await node.data(f"{FINAL}/3") == await node.data(f"{FINAL}/0x" + by_post[2]["validator"]["pubkey"][2:])
        assert await node.refusal(f"{FINAL}/999999") == (404, "Validator index from future state")
        assert await node.refusal(f"{FINAL}/zzz") == (400, "Invalid validator index")
        assert (await node.refusal(FINAL, ids=[str(n) for n in range(65)]))[0] == 414
        assert (await node.refusal(FINAL, body={"ids": [1]}))[0] == 400
        assert len(await node.data(FINAL, body={"ids": []})) == len(await node.data(FINAL, body={}))
        assert node.server.calls["all validators"] == 2
        ongoing = await node.data(FINAL, body={"statuses": ["active_ongoing"]})
        assert 0 < len(ongoing) < len(await node.data(FINAL, body={"statuses": ["active"]}))
        node.server.post = False
        assert await node.refusal(FINAL, body={"ids": ["1"]}) == (404, f"Route POST:{FINAL} not found")
        assert len(await node.data(FINAL, ids=["1"])) == 1


async def test_states_older_than_the_finalized_one_are_gone() -> None:
    world = world_of(blocks=60)
    async with serving(world) as node:
        final = world.beacon.finality(world.chain.finalized_number).block
        by_slot = FINAL.replace("finalized", str(final.slot))
        assert await node.data(by_slot, ids=["1"]) == await node.data(FINAL, ids=["1"])
        for gone in ("1", "9999", "0x" + "11" * 32):
            path = FINAL.replace("finalized", gone)
            assert await node.refusal(path, ids=["1"]) == (404, f"No state found for id '{gone}'")
        assert await node.refusal(FINAL.replace("finalized", "last"), ids=["1"]) == (400, "Invalid state id 'last'")


async def test_records_and_checkpoints_have_the_form_of_the_protocol() -> None:
    world = world_of(blocks=60)
    async with serving(world) as node:
        _, answer = await node.ask(f"{FINAL}/1")
        assert (answer["execution_optimistic"], answer["finalized"]) == (False, True)
        assert answer["data"].keys() == {"index", "balance", "status", "validator"}
        record = answer["data"]["validator"]
        assert record.keys() == {
            "pubkey", "withdrawal_credentials", "effective_balance", "slashed", "activation_eligibility_epoch",
            "activation_epoch", "exit_epoch", "withdrawable_epoch",
        }  # fmt: skip
        assert all(isinstance(value, bool if name == "slashed" else str) for name, value in record.items())
        assert (len(record["pubkey"]), len(record["withdrawal_credentials"])) == (98, 66)
        _, answer = await node.ask("/eth/v1/beacon/headers/head")
        assert answer["finalized"] is False
        assert (await node.data(CHECKPOINTS)).keys() == {"previous_justified", "current_justified", "finalized"}


async def test_statuses_are_those_of_the_epochs() -> None:
    world = world_of(blocks=200)
    async with serving(world) as node:
        for one in await node.data(FINAL):
            epoch = world.beacon.epoch_of(world.beacon.finality(world.chain.finalized_number).block.slot)
            activation, exits = int(one["validator"]["activation_epoch"]), int(one["validator"]["exit_epoch"])
            expected = "pending" if epoch < activation else "active" if epoch < exits else ("exited", "withdrawal")
            assert one["status"].startswith(expected)


# Its faults

Check = Callable[[Client], Awaitable[bool]]


def answers(status: int) -> Check:
    async def check(node: Client) -> bool:
        async with node.session.get(node.url + HEADER) as response:
            return response.status == status

    return check


async def is_html(node: Client) -> bool:
    async with node.session.get(node.url + HEADER) as response:
        return (response.status, response.content_type) == (200, "text/html")


async def is_silent(node: Client) -> bool:
    try:
        async with asyncio.timeout(0.2):
            await node.data(HEADER)
    except TimeoutError:
        return True
    return False


def breaks_off(path: str) -> Check:
    async def check(node: Client) -> bool:
        try:
            await node.data(path)
        except aiohttp.ClientPayloadError:
            return True
        return False

    return check


async def is_syncing(node: Client) -> bool:
    syncing = await node.data("/eth/v1/node/syncing")
    return bool(syncing["is_syncing"] and int(syncing["sync_distance"]) > 0)


async def says_optimistic(node: Client) -> bool:
    return bool((await node.data("/eth/v1/node/syncing"))["is_optimistic"])


def is_optimistic(path: str) -> Check:
    async def check(node: Client) -> bool:
        return bool((await node.ask(path))[1]["execution_optimistic"])

    return check


async def is_another_network(node: Client) -> bool:
    genesis = await node.data("/eth/v1/beacon/genesis")
    return bool(genesis["genesis_validators_root"] != "0x" + node.server.node.beacon.genesis_validators_root.hex())


async def checkpoint_goes_back(node: Client) -> bool:
    return int((await node.data(CHECKPOINTS))["finalized"]["epoch"]) < node.server.node.finality().epoch


async def header_goes_back(node: Client) -> bool:
    slot = int((await node.data(HEADER))["header"]["message"]["slot"])
    return slot < node.server.node.finality().block.slot


async def records_are_missing(node: Client) -> bool:
    state = node.server.node.finality().block
    return len(await node.data(FINAL)) < node.server.node.beacon.registry.count(state.slot)


async def is_short(node: Client) -> bool:
    return len(await node.data(FINAL, body={"ids": ["1", "2", "3"]})) == 2


async def has_another_key(node: Client) -> bool:
    validators = node.server.node.beacon.registry.validators
    records = await node.data(FINAL, body={"ids": ["1", "2", "3"]})
    keys = {int(one["index"]): one["validator"]["pubkey"] for one in records}
    wrong = [index for index, key in keys.items() if key != "0x" + validators[index].pubkey.hex()]
    assert all(len(key) == 98 for key in keys.values())
    return len(wrong) == 1


async def one_has_another_key(node: Client) -> bool:
    record = (await node.data(f"{FINAL}/1"))["validator"]
    return bool(record["pubkey"] != "0x" + node.server.node.beacon.registry.validators[1].pubkey.hex())


VISIBLE: list[tuple[Fault, Check]] = [
    (Fault.HTTP_500, answers(500)),
    (Fault.HTTP_429, answers(429)),
    (Fault.NOT_FOUND, answers(404)),
    (Fault.BAD_REQUEST, answers(400)),
    (Fault.HTML, is_html),
    (Fault.SLOW, is_silent),
    (Fault.HANG, is_silent),
    (Fault.HALF_BODY, breaks_off(HEADER)),
    (Fault.HALF_BODY, breaks_off(FINAL)),
    (Fault.SYNCING, is_syncing),
    (Fault.OPTIMISTIC, says_optimistic),
    *((Fault.OPTIMISTIC, is_optimistic(path)) for path in (HEADER, CHECKPOINTS, FINAL, f"{FINAL}/1")),
    (Fault.OTHER_NETWORK, is_another_network),
    (Fault.FINALITY_BACK, checkpoint_goes_back),
    (Fault.FINALITY_BACK, header_goes_back),
    (Fault.FINALITY_BACK, records_are_missing),
    (Fault.SHORT_ANSWER, is_short),
    (Fault.SHORT_ANSWER, records_are_missing),
    (Fault.OTHER_PUBKEY, has_another_key),
    (Fault.OTHER_PUBKEY, one_has_another_key),
]


@pytest.mark.parametrize("kind, check", VISIBLE, ids=[f"{kind}-{at}" for at, (kind, _) in enumerate(VISIBLE)])
async def test_each_fault_is_visible_when_it_fires_and_only_then(kind: Fault, check: Check) -> None:
    async with serving(world_of(blocks=100)) as node:
        assert not await check(node)
        node.server.faults.once(kind)
        assert await check(node)
        assert node.server.faults.fired == {kind: 1}
        assert not await check(node)


async def test_a_node_that_is_always_set_back_is_so_in_every_answer() -> None:
    world = world_of(blocks=100)
    async with serving(world, faults=Faults(1, {Fault.FINALITY_BACK: 1.0})) as node:
        epoch = int((await node.data(CHECKPOINTS))["finalized"]["epoch"])
        slot = int((await node.data(HEADER))["header"]["message"]["slot"])
        assert epoch == world.beacon.finality(world.chain.finalized_number).epoch - 2
        assert slot == world.beacon.last_block_at(8 * epoch).slot
        assert len(await node.data(FINAL)) == world.beacon.registry.count(slot)
        world.chain.finalized = At(0)
        assert (await node.data(CHECKPOINTS))["finalized"]["epoch"] == "0"


async def test_a_big_answer_arrives_whole() -> None:
    world = World(1, validators=2000)
    async with serving(world) as node:
        assert [int(one["index"]) for one in await node.data(FINAL)] == list(range(2000))
