"""The devnet's truth, the service's pure core, and what the devnet serves agree on every id and every byte."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from vaultevents.core import logs as core_logs
from vaultevents.core import validators, withdrawals
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.events import encode, project
from vaultevents.core.registry import Registry, Vault, VaultSpan
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, BlockNumber, Hash32, Pubkey, ValidatorIndex
from vaultevents.devnet.beacon import Beacon
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.beacontruth import expected_of_validators
from vaultevents.devnet.blocks import Payout
from vaultevents.devnet.chain import Absent, At, Chain, Lag
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.truth import Events, Registration
from vaultevents.devnet.validators import paying

pytestmark = pytest.mark.integration


def registry_of(registrations: list[Registration]) -> Registry:
    spans: dict[tuple[str, str, bytes, bytes | None], list[VaultSpan]] = defaultdict(list)
    for account_id, vault_id, address, queue, first, last in registrations:
        spans[account_id, vault_id, address, queue].append(VaultSpan(first, last))
    return Registry(
        1,
        [
            Vault(account_id, vault_id, Address(address), None if queue is None else Address(queue), tuple(own))
            for (account_id, vault_id, address, queue), own in spans.items()
        ],
    )


def events_by_core(simulation: Simulation, registrations: list[Registration], last: int) -> Events:
    registry = registry_of(registrations)
    placed = simulation.chain.logs(0, last, core_logs.TOPICS)
    logs = [
        core_logs.Log(
            Address(one.log.address),
            tuple(map(Hash32, one.log.topics)),
            one.log.data,
            one.block.number,
            Hash32(one.block.hash),
            Hash32(one.tx_hash),
            one.log_index,
        )
        for one in placed
    ]
    times_s = {one.block.number: one.block.timestamp_s for one in placed}
    watched = registry.watched(Span(BlockNumber(0), BlockNumber(last)))
    found = [e for seen in core_logs.fold(logs, times_s, watched).observations for e in project(seen, registry)]
    return {(event.owner.account_id, event.id): encode(event) for event in found}


@pytest.mark.parametrize("seed", range(6))
def test_core_and_truth_agree(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.history(60, events=250)
    last = simulation.chain.finalized_number
    assert last is not None
    first, *others = simulation.registrations
    in_two_spans = [first._replace(last_block=20), first._replace(first_block=40), *others]
    for registrations in (simulation.registrations, simulation.registrations[1:4], in_two_spans):
        truth = simulation.expected(registrations)
        assert truth
        assert events_by_core(simulation, registrations, last) == truth


OF_VALIDATORS = ("validator_activated", "validator_exited", "validator_withdrawal_completed")


def with_times(simulation: Simulation, vault: Vault) -> Vault:
    def time_s(number: int | None) -> int | None:
        block = None if number is None else simulation.chain.block(number)
        return None if block is None else block.timestamp_s

    spans = [replace(span, first_time_s=time_s(span.first), last_time_s=time_s(span.last)) for span in vault.spans]
    return replace(vault, spans=tuple(spans))


def validator_events_by_core(simulation: Simulation, registrations: list[Registration]) -> Events:
    """What the core makes of the finalized state and the finalized blocks."""
    beacon, last = simulation.beacon, simulation.chain.finalized_number
    final = None if last is None else simulation.chain.block(last)
    assert final is not None
    chain_time = ChainTime(beacon.genesis.timestamp_s, simulation.chain.seconds_per_slot * 1000, beacon.slots_per_epoch)
    registry = Registry(1, [with_times(simulation, vault) for vault in registry_of(registrations).vaults])
    state = beacon.finality(final.number).block
    shown = [beacon.registry.record(index, state.slot) for index in range(beacon.registry.count(state.slot))]
    records = [
        validators.ValidatorRecord(
            ValidatorIndex(one.index),
            Pubkey(one.pubkey),
            Hash32(one.credentials),
            one.activation_epoch,
            one.exit_epoch,
        )
        for one in shown
        if one is not None
    ]
    head = validators.validators_head(
        chain_time.epoch_at(simulation.chain.head.timestamp_s), chain_time.epoch_at(state.timestamp_s)
    )
    blocks = [
        withdrawals.WithdrawalBlock(
            block.number,
            Hash32(block.hash),
            Hash32(block.header.parent_hash),
            block.timestamp_s,
            tuple(
                withdrawals.Withdrawal(
                    withdrawal.index,
                    ValidatorIndex(withdrawal.validator_index),
                    Address(withdrawal.address),
                    withdrawal.amount_gwei,
                )
                for withdrawal in block.withdrawals
            ),
        )
        for block in simulation.chain.blocks(0, final.number)
        if chain_time.epoch_at(block.timestamp_s) < chain_time.epoch_at(final.timestamp_s)
    ]
    withdrawals.last_index_after(blocks, None)
    vaults = frozenset(vault.address for vault in registry.vaults)
    pubkeys: dict[int, Pubkey] = {record.index: record.pubkey for record in records}
    observations = [
        *validators.observe(records, Span(0, head), chain_time),
        *withdrawals.fold(blocks, vaults, pubkeys, chain_time),
    ]
    found = [event for seen in observations for event in project(seen, registry)]
    return {(event.owner.account_id, event.id): encode(event) for event in found}


@pytest.mark.parametrize("seed", range(6))
def test_core_and_truth_agree_on_validators(seed: int) -> None:
    simulation = Simulation(seed, validators=40)
    simulation.history(200)
    first, second, *others = simulation.registrations
    in_two_spans = [
        first._replace(last_block=60),
        first._replace(first_block=101),
        second._replace(first_block=77, last_block=150),
        *others,
    ]
    for registrations in (simulation.registrations, simulation.registrations[1:4], in_two_spans):
        truth = simulation.expected(registrations, event_types=OF_VALIDATORS)
        assert {event_id.rsplit("_", 1)[0].split("_acme")[0].split("_borealis")[0] for _, event_id in truth} == set(
            OF_VALIDATORS
        )
        assert validator_events_by_core(simulation, registrations) == truth


@pytest.mark.parametrize("frozen_at", [0, 1, 39, 40, 41, 60])
def test_core_and_truth_agree_while_finality_stands_still(frozen_at: int) -> None:
    simulation = Simulation(7, validators=40)
    simulation.chain.finalized = At(frozen_at)
    simulation.history(120)
    assert validator_events_by_core(simulation, simulation.registrations) == simulation.expected(
        event_types=OF_VALIDATORS
    )


# A reader of what is served, written from the rules and with nothing of the service or of the truth.


async def served_events(
    simulation: Simulation, registrations: list[Registration]
) -> list[tuple[str, str, int, dict[str, Any]]]:
    """(account, id, created_at, payload) of every validator event, from the answers of both nodes."""
    nodes = ExecutionServer(simulation.chain), BeaconServer(simulation.beacon)
    execution, consensus = [await node.start() for node in nodes]
    try:
        async with aiohttp.ClientSession() as session:

            async def get(path: str) -> Any:
                async with session.get(f"{consensus}/eth/v1/{path}") as response:
                    return (await response.json())["data"]

            async def block(position: str) -> Any:
                call = {"id": 1, "method": "eth_getBlockByNumber", "params": [position, False]}
                async with session.post(execution, json=call) as response:
                    return (await response.json())["result"]

            spec, genesis = await get("config/spec"), await get("beacon/genesis")
            records = await get("beacon/states/finalized/validators")
            header = await get("beacon/headers/finalized")
            final, latest = int((await block("finalized"))["number"], 16), await block("latest")
            blocks = [await block(hex(number)) for number in range(int(latest["number"], 16) + 1)]
    finally:
        for node in nodes:
            await node.stop()
    start_s, slot_s, slots = int(genesis["genesis_time"]), int(spec["SECONDS_PER_SLOT"]), int(spec["SLOTS_PER_EPOCH"])
    times_s = [int(one["timestamp"], 16) for one in blocks]

    def epoch_at(number: int) -> int:
        return (times_s[number] - start_s) // slot_s // slots

    found: list[tuple[str, str, int, dict[str, Any]]] = []
    head = min(epoch_at(len(blocks) - 1), int(header["header"]["message"]["slot"]) // slots + 4)
    for account_id, _, address, _, first, last in registrations:
        until_s = 2**63 if last is None else times_s[last]
        for record in records:
            index, validator = int(record["index"]), record["validator"]
            head_of_payload = {"validator_index": index, "validator_pubkey": validator["pubkey"]}
            tail = "00" * 11 + address.hex()
            if validator["withdrawal_credentials"] not in ("0x01" + tail, "0x02" + tail):
                continue
            for name, field in (("activated", "activation_epoch"), ("exited", "exit_epoch")):
                epoch = int(validator[field])
                at_s = start_s + epoch * slots * slot_s
                if epoch <= head and times_s[first] <= at_s <= until_s:
                    event_id = f"validator_{name}_{account_id}_{index}"
                    found.append((account_id, event_id, at_s * 1000, {**head_of_payload, "epoch": epoch}))
        of_epochs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for number in range(final + 1):
            for withdrawal in blocks[number]["withdrawals"]:
                if withdrawal["address"] == "0x" + address.hex() and int(withdrawal["validatorIndex"], 16) < 2**40:
                    key = (int(withdrawal["validatorIndex"], 16), epoch_at(number))
                    of_epochs[key].append((number, int(withdrawal["amount"], 16)))
        for (index, epoch), entries in of_epochs.items():
            number = entries[-1][0]
            if epoch < epoch_at(final) and first <= number and (last is None or number <= last):
                gwei = str(sum(amount for _, amount in entries)).rjust(10, "0")
                payload = {
                    "validator_index": index,
                    "validator_pubkey": next(r["validator"]["pubkey"] for r in records if int(r["index"]) == index),
                    "epoch": epoch,
                    "amount_eth": f"{gwei[:-9]}.{gwei[-9:]}".rstrip("0").rstrip("."),
                }
                event_id = f"validator_withdrawal_completed_{account_id}_{index}_{epoch}"
                found.append((account_id, event_id, times_s[number] * 1000, payload))
    return sorted(found, key=lambda one: one[:2])


@pytest.mark.parametrize("seed", range(3))
async def test_what_is_served_gives_the_truth(seed: int) -> None:
    simulation = Simulation(seed, validators=40)
    simulation.history(150)
    simulation.chain.freeze_finality()
    simulation.history(9 * seed)
    shared, *others = simulation.registrations
    for registrations in (simulation.registrations, [shared._replace(first_block=33, last_block=99), *others]):
        reported = [
            (account_id, event_id, body["created_at"], body["payload"])
            for (account_id, event_id), raw in simulation.expected(registrations, event_types=OF_VALIDATORS).items()
            if (body := json.loads(raw))
        ]
        assert sorted(reported, key=lambda one: one[:2]) == await served_events(simulation, registrations)
        assert len(reported) > 50


# Single cases, with the exact bytes that receivers get

VAULT = bytes.fromhex("aa" * 20)
OTHER_VAULT = bytes.fromhex("bb" * 20)
GENESIS_S = 1000
NORTH = Registration("acme", "north", VAULT, None, 0)


def small_beacon() -> Beacon:
    """Slots of 12 s from 1,000 s on, epochs of 4; validator 0 pays the vault and is active; all blocks are final."""
    chain = Chain(1, genesis_time_s=GENESIS_S)
    chain.finalized = Lag(0)
    beacon = Beacon(chain, slots_per_epoch=4)
    beacon.registry.append(0, b"\xab" * 48, paying(1, VAULT), active=True)
    return beacon


def mine(beacon: Beacon, blocks: int) -> None:
    for _ in range(blocks):
        beacon.chain.mine()


def truth(beacon: Beacon, *registrations: Registration, through: int | None = None) -> dict[str, dict[str, Any]]:
    found = expected_of_validators(beacon, registrations or [NORTH], through)
    return {event_id: json.loads(body) for (_, event_id), body in found.items()}


def test_an_exit_has_the_time_of_its_epoch_and_the_bytes_of_the_interface() -> None:
    beacon = small_beacon()
    beacon.registry.exit(0, 0, 5)
    mine(beacon, 20)
    found = expected_of_validators(beacon, [NORTH._replace(first_block=1)])
    pubkey = "0x" + "ab" * 48
    assert found == {
        ("acme", "validator_exited_acme_0"): (
            '{"id":"validator_exited_acme_0","account_ref_id":"acme","staking_vault_id":"north",'
            '"event_type":"validator_exited","severity":"info","title":"Validator exited",'
            '"message":"Validator 0 of vault north exited in epoch 5.",'
            f'"payload":{{"validator_index":0,"validator_pubkey":"{pubkey}","epoch":5}},"created_at":1240000}}'
        ).encode()
    }
    from_genesis = expected_of_validators(beacon, [NORTH])
    assert json.loads(from_genesis["acme", "validator_activated_acme_0"])["created_at"] == 1000000


def test_withdrawals_of_an_epoch_are_summed_once_the_epoch_is_over() -> None:
    beacon = small_beacon()
    chain = beacon.chain
    chain.mine(payouts=[Payout(0, VAULT, 1)])
    chain.mine(payouts=[Payout(0, VAULT, 10**9), Payout(2**40, VAULT, 5), Payout(0, OTHER_VAULT, 7)])
    chain.mine(payouts=[Payout(0, VAULT, 10**9)])  # slot 3, the last of epoch 0
    watch = NORTH._replace(first_block=1)
    assert truth(beacon, watch) == {}
    chain.mine(payouts=[Payout(0, VAULT, 32 * 10**9)], missed_slots=1)  # slot 5
    found = expected_of_validators(beacon, [watch])
    stem = "validator_withdrawal_completed_acme_0"
    pubkey = "0x" + "ab" * 48
    assert found == {
        ("acme", f"{stem}_0"): (
            f'{{"id":"{stem}_0","account_ref_id":"acme","staking_vault_id":"north",'
            '"event_type":"validator_withdrawal_completed","severity":"info","title":"Validator withdrawal completed",'
            '"message":"2.000000001 ETH moved from validator 0 to vault north in epoch 0.",'
            f'"payload":{{"validator_index":0,"validator_pubkey":"{pubkey}","epoch":0,"amount_eth":"2.000000001"}},'
            '"created_at":1036000}'
        ).encode()
    }
    mine(beacon, 3)  # slot 8
    assert truth(beacon, watch)[f"{stem}_1"]["payload"]["amount_eth"] == "32"
    assert truth(beacon, watch, through=6).keys() == {f"{stem}_0"}
    # The sum is that of the whole epoch, and the last contributing block alone decides whose event it is.
    begins_inside = truth(beacon, NORTH._replace(first_block=3))
    assert begins_inside[f"{stem}_0"]["payload"]["amount_eth"] == "2.000000001"
    assert f"{stem}_0" not in truth(beacon, NORTH._replace(first_block=1, last_block=2))
    assert f"{stem}_0" not in truth(beacon, NORTH._replace(first_block=4))


@pytest.mark.parametrize(
    "first, last, seen",
    [
        (20, None, True),  # the first block of the epoch begins with it
        (21, None, False),
        (0, 20, True),
        (0, 19, False),
        (0, 99, True),  # an end to come is after every moment
        (99, None, False),
    ],
)
def test_a_turn_belongs_to_a_span_by_the_time_of_its_ends(first: int, last: int | None, seen: bool) -> None:
    beacon = small_beacon()
    beacon.registry.exit(0, 0, 5)
    mine(beacon, 30)
    events = truth(beacon, NORTH._replace(first_block=first, last_block=last))
    assert ("validator_exited_acme_0" in events) is seen


def test_turns_wait_for_their_epoch_and_for_finality_but_no_longer_than_four_epochs_of_it() -> None:
    beacon = small_beacon()
    for index, epoch in enumerate((5, 6), start=1):
        beacon.registry.append(0, bytes([index]) * 48, paying(2, VAULT))
        beacon.registry.activate(index, 0, epoch)
    watch = NORTH._replace(first_block=1)
    mine(beacon, 19)
    assert truth(beacon, watch).keys() == set()
    mine(beacon, 1)  # slot 20, the first of epoch 5
    assert truth(beacon, watch).keys() == {"validator_activated_acme_1"}
    mine(beacon, 20)
    beacon.chain.finalized = At(7)  # of epoch 1: the state knows everything up to epoch 5
    assert truth(beacon, watch).keys() == {"validator_activated_acme_1"}
    beacon.chain.finalized = At(8)
    assert truth(beacon, watch).keys() == {"validator_activated_acme_1", "validator_activated_acme_2"}
    beacon.chain.finalized = Absent.NULL
    assert truth(beacon, watch) == {}


def test_a_clock_decides_when_an_epoch_has_begun() -> None:
    beacon = small_beacon()
    beacon.registry.exit(0, 0, 5)
    mine(beacon, 10)
    watch = NORTH._replace(first_block=1)
    assert expected_of_validators(beacon, [watch]) == {}
    starts_s = GENESIS_S + 20 * 12
    assert expected_of_validators(beacon, [watch], now_s=starts_s - 0.5) == {}
    assert len(expected_of_validators(beacon, [watch], now_s=starts_s)) == 1
    assert expected_of_validators(beacon, [watch], through=3, now_s=starts_s) == {}  # finality allows epoch 4


def test_a_change_of_credentials_counts_when_it_is_final_and_then_for_all_the_past() -> None:
    beacon = small_beacon()
    beacon.registry.append(0, bytes(48), b"\0" + b"\x07" * 31)
    beacon.registry.activate(1, 0, 5)
    beacon.registry.change_credentials(1, 26, paying(1, VAULT))
    watch = NORTH._replace(first_block=1)
    mine(beacon, 27)
    assert truth(beacon, watch) == {}
    mine(beacon, 1)  # slot 28: the checkpoint of epoch 7
    assert truth(beacon, watch)["validator_activated_acme_1"]["payload"]["epoch"] == 5
    assert truth(beacon, NORTH._replace(first_block=1, address=OTHER_VAULT)) == {}


def test_every_vault_of_an_address_gets_its_own_event() -> None:
    beacon = small_beacon()
    beacon.registry.exit(0, 0, 5)
    mine(beacon, 20)
    south = Registration("borealis", "south", VAULT, None, 1)
    found = truth(beacon, NORTH._replace(first_block=1), south)
    assert {item["staking_vault_id"] for item in found.values()} == {"north", "south"}
    assert found.keys() == {"validator_exited_acme_0", "validator_exited_borealis_0"}
