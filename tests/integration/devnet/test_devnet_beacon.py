"""The devnet's beacon chain: validators that keep the protocol's rules, and withdrawals without gaps."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
import rlp
from eth_hash.auto import keccak

from beacon_fixtures import blocks_of, simulation_of
from vaultevents.devnet.beacon import Beacon
from vaultevents.devnet.blocks import Payout, Withdrawal, withdrawals_root
from vaultevents.devnet.chain import Chain, Lag
from vaultevents.devnet.rpc import block_json
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.trie import EMPTY_TRIE_ROOT, ordered_root
from vaultevents.devnet.validators import FAR_FUTURE_EPOCH, ValidatorRegistry, paid_address, paying

pytestmark = pytest.mark.integration

VAULT, OTHER = b"\x11" * 20, b"\xee" * 20


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
    simulation = simulation_of()
    blocks = blocks_of(simulation)
    for parent, block in pairwise(blocks):
        header = block.header
        assert header.withdrawals_root == withdrawals_root(block.withdrawals)
        assert (header.hash(), header.parent_hash) == (block.hash, parent.hash)
    indices = [withdrawal.index for block in blocks for withdrawal in block.withdrawals]
    assert indices == list(range(len(indices)))
    assert len(indices) > 150
    assert simulation.chain.head.next_withdrawal == len(indices)


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
    assert [withdrawal.index for withdrawal in chain.mine(payouts=[Payout(9, VAULT, 1)]).withdrawals] == [1]


def test_a_simulation_without_validators_has_the_same_chain_as_before_and_no_withdrawals() -> None:
    simulation = Simulation(21)
    simulation.history(40, events=80)
    assert simulation.chain.head.hash.hex() == "3855fb26d9a739130c1e592fdaf6657b554081ab9795e29ee030f69de22fb95b"
    assert all(block.withdrawals == () for block in blocks_of(simulation))
    assert simulation.beacon.registry.validators == []
    assert {key[1].split("_")[0] for key in simulation.expected()} == {"funding", "withdrawal"}


def test_validators_change_nothing_for_contracts() -> None:
    contracts = ("funding_received", "withdrawal_claimed")

    def payloads(validators: int) -> list[str]:
        simulation = Simulation(4, validators=validators)
        simulation.history(60, events=60)
        return [event_id for _, event_id in simulation.expected(event_types=contracts)]

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
    assert [item and item.credentials[0] for item in seen] == [0, 1, 1, 2]


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


def test_up_to_four_epochs_after_any_final_block_every_decision_of_the_simulation_is_in_its_state() -> None:
    simulation = simulation_of(3)
    beacon = simulation.beacon
    hidden = 0
    for block in blocks_of(simulation):
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


# The simulation


def kinds_of_withdrawals(simulation: Simulation) -> set[str]:
    own = {registration.address for registration in simulation.registrations}
    of_blocks: Counter[tuple[int, int]] = Counter()
    of_epochs: dict[tuple[int, int], set[int]] = defaultdict(set)
    kinds: set[str] = set()
    for block in blocks_of(simulation):
        epoch, place = divmod(block.slot, simulation.beacon.slots_per_epoch)
        kinds |= set() if block.withdrawals else {"an empty list"}
        for withdrawal in block.withdrawals:
            if withdrawal.address not in own:
                kinds.add("foreign")
            elif withdrawal.validator_index >= 2**40:
                kinds.add("of a builder")
            else:
                of_blocks[withdrawal.validator_index, block.number] += 1
                of_epochs[withdrawal.validator_index, epoch].add(block.number)
                kinds.add("full" if withdrawal.amount_gwei >= 31 * 10**9 else "partial")
                kinds |= {0: {"in the first slot"}, 7: {"in the last slot"}}.get(place, set())
                kinds |= {"one gwei"} if withdrawal.amount_gwei == 1 else set()
    kinds |= {"several in a block"} if max(of_blocks.values()) > 1 else set()
    kinds |= {"in several blocks of an epoch"} if any(len(numbers) > 1 for numbers in of_epochs.values()) else set()
    if any((index, epoch + 1) in of_epochs for index, epoch in of_epochs):
        kinds.add("in one epoch and the next")
    return kinds


@pytest.mark.parametrize("seed", range(4))
def test_every_simulation_contains_every_awkward_withdrawal(seed: int) -> None:
    assert kinds_of_withdrawals(simulation_of(seed)) == {
        "an empty list", "foreign", "of a builder", "full", "partial", "in the first slot", "in the last slot",
        "one gwei", "several in a block", "in several blocks of an epoch", "in one epoch and the next",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_every_simulation_contains_every_awkward_validator(seed: int) -> None:
    simulation = simulation_of(seed)
    beacon, vaults = simulation.beacon, {registration.address for registration in simulation.registrations}
    own = [
        validator for validator in beacon.registry.validators if paid_address(validator.credentials[-1][1]) in vaults
    ]
    moved = [one for one in own if one.credentials[0][1][0] == 0]
    assert len(moved) == 2
    assert any(one.activation and 0 < one.activation.epoch < one.credentials[1][0] // 8 for one in moved)
    assert {one.credentials[0][1][0] for one in own} == {0, 1, 2}
    assert any(one.slashed for one in own)
    assert any(one.exit and not one.slashed for one in own)
    assert any(one.appended_slot > 0 and one.activation for one in own)
    assert any(one.activation is None for one in own)
    ends = {
        validator.index: simulation.chain.last_block_at(validator.drained_slot)
        for validator in own
        if validator.drained_slot
    }
    paid = [
        withdrawal
        for index, block in ends.items()
        for withdrawal in block.withdrawals
        if withdrawal.validator_index == index
    ]
    assert any(one.amount_gwei == 1_000_000 for one in paid)  # what exceeded a consolidation
    assert any(one.amount_gwei >= 32 * 10**9 for one in paid)
    assert {validator.credentials[0][1][0] for validator in beacon.registry.validators} == {0, 1, 2, 0xB0}
    lookalikes = [
        validator
        for validator in beacon.registry.validators
        if validator.credentials[0][1][12:] in vaults and validator not in own
    ]
    assert len(lookalikes) == 3


def test_slots_are_missed_at_a_boundary_and_for_a_whole_epoch() -> None:
    simulation = simulation_of(missed_slot_share=0.0)
    beacon = simulation.beacon
    slots = {block.slot for block in blocks_of(simulation)}
    assert {3, 19} == {epoch for epoch in range(25) if not slots & set(range(8 * epoch, 8 * epoch + 8))}
    assert beacon.first_slot(5) not in slots
    assert {beacon.first_slot(5) - 1, beacon.first_slot(5) + 1} <= slots
    for block in blocks_of(simulation):
        assert block.slot * simulation.chain.seconds_per_slot == block.timestamp_s - beacon.genesis.timestamp_s


@pytest.mark.parametrize("seed", range(1, 9))
def test_the_history_has_every_event_and_so_have_the_next_twelve_blocks(seed: int) -> None:
    simulation = simulation_of(seed)
    past = simulation.expected()
    for _ in range(12):
        simulation.step()
    live = simulation.expected().keys() - past.keys()

    def count(keys: Any, *event_types: str) -> int:
        return sum(event_id.startswith(event_types) for _, event_id in keys)

    assert count(past, "validator_activated_") >= 3
    assert count(past, "validator_exited_") >= 2
    assert count(past, "validator_withdrawal_completed_") >= 5
    assert count(live, "validator_activated_", "validator_exited_") >= 1
    assert count(live, "validator_withdrawal_completed_") >= 1


def test_the_seed_decides_everything() -> None:
    def reported(seed: int) -> tuple[bytes, Any]:
        simulation = simulation_of(seed, blocks=60)
        return simulation.chain.head.hash, simulation.expected()

    assert reported(5) == reported(5)
    assert reported(5)[0] != reported(6)[0]


@pytest.mark.parametrize("settings", [{"validators": 10}, {"validators": 20, "withdrawals_per_block": 17}])
def test_a_simulation_that_cannot_be_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"validators|withdrawals"):
        Simulation(1, **settings)  # type: ignore[arg-type]


def test_a_day_of_mainnet_with_a_thousand_watched_validators() -> None:
    simulation = Simulation(1, validators=5000, slots_per_epoch=32, withdrawals_per_block=16)
    simulation.history(7200)
    events = simulation.expected()
    vaults = {registration.address for registration in simulation.registrations}
    paying_vaults = [v for v in simulation.beacon.registry.validators if paid_address(v.credentials[-1][1]) in vaults]
    assert len(paying_vaults) >= 1000
    assert simulation.chain.head.next_withdrawal > 20_000
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
