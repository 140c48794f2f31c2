"""Activations, exits and withdrawals of a simulation: live, late, replayed and disturbed, against its record."""

from __future__ import annotations

import random

import pytest

from simulation_fixtures import add_accounts, add_vault, drive, open_at, read_to_head, register, rows, spans, staking
from staking_fixtures import STAKING_TYPES, due, staking_of, staking_simulation
from vaultevents.core.spans import Span
from vaultevents.core.units import Address
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.chain import Lag
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.validators import paying
from vaultevents.store import accounts
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.validators import known, read_discovery

pytestmark = pytest.mark.integration


async def test_history_and_live_give_exactly_the_events_of_the_chain(any_database: Database) -> None:
    made = staking_simulation(120)
    await register(any_database, made)
    outbox = Outbox(any_database)
    async with staking(any_database, made, ExecutionServer(made.chain), BeaconServer(made.beacon)) as sources:
        await sources.open(any_database)
        await sources.follow(outbox)
        assert await rows(any_database) == due(made)
        for _ in range(60):
            for _ in range(2):
                made.step()
            await sources.follow(outbox)
        assert await rows(any_database) == due(made)
    kinds = {event_id.split("_acme")[0].split("_borealis")[0] for _, event_id in due(made)}
    assert kinds == set(STAKING_TYPES)


@pytest.mark.parametrize("seed", range(3))
async def test_a_replay_of_epochs_is_identical_however_it_is_cut(database: Database, seed: int) -> None:
    made = staking_simulation(seed=seed)
    rng = random.Random(seed)
    await register(database, made)
    outbox = Outbox(database)
    async with staking(database, made, ExecutionServer(made.chain), BeaconServer(made.beacon)) as sources:
        await sources.open(database)
        await sources.follow(outbox, step=rng.randint(1, 12))
        before = await rows(database)
        assert before == due(made)
        identical = 0
        for source in (sources.validators, sources.withdrawals):
            cursor = await outbox.begin_replay(source.stream, Span(0, await source.head()))
            done = [one.committed for one in await drive(source, outbox, cursor, rng.randint(1, 9))]
            await outbox.end_replay(cursor)
            identical += sum(outcome.identical for outcome in done)
            assert not any(outcome.inserted or outcome.different for outcome in done)
        assert identical == len(before)


async def test_a_vault_added_later_gets_all_that_its_validators_did_since_its_start(database: Database) -> None:
    made = staking_simulation()
    await add_accounts(database, made.registrations)
    first, *later = made.registrations
    await add_vault(database, first)
    outbox = Outbox(database)
    async with staking(database, made, ExecutionServer(made.chain), BeaconServer(made.beacon)) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        assert await rows(database) == due(made, [first])
        for registration in later:
            await add_vault(database, registration)
            made.step()
            await sources.follow(outbox)
        for _ in range(20):
            made.step()
        await sources.follow(outbox)
        await sources.follow(outbox)
        assert await rows(database) == due(made)


async def test_a_validator_whose_credentials_changed_late_is_found_by_the_next_scan(database: Database) -> None:
    made = staking_simulation(40, withdrawals_per_block=0)
    registry, vault = made.beacon.registry, made.registrations[0]
    late = registry.append(made.chain.head.slot, b"\x07" * 48, bytes(32))
    made.history(16)
    registry.activate(late.index, made.chain.head.slot, made.beacon.epoch_of(made.chain.head.slot) + 5)
    made.history(64)
    await register(database, made)
    outbox = Outbox(database)
    async with staking_of(database, made) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        registry.change_credentials(late.index, made.chain.head.slot, paying(1, vault.address))
        made.history(40)
        await sources.follow(outbox)
        missing = due(made).keys() - (await rows(database)).keys()
        assert {key for key in missing if key[1].endswith(f"_{late.index}")}
        async with database.transaction() as connection:
            await connection.execute("update discovery set scanned_at = scanned_at - interval '1 day'")
        await sources.follow(outbox)
        assert await rows(database) == due(made)
        assert late.index in {record.index for record in await known(database)}


async def test_discovery_that_was_switched_off_misses_nothing_when_it_is_back(database: Database) -> None:
    made = staking_simulation(80)
    await register(database, made)
    outbox = Outbox(database)
    async with staking_of(database, made) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        for _ in range(10):
            made.history(10)
            for source in (sources.validators, sources.withdrawals):
                await read_to_head(source, outbox, 3)
            assert (await rows(database)).items() <= due(made).items()
        assert len(await rows(database)) < len(due(made))
        await sources.follow(outbox)
        assert await rows(database) == due(made)


async def test_a_validator_that_was_lost_from_the_table_comes_back_with_the_same_events(database: Database) -> None:
    made = staking_simulation(240)
    await register(database, made)
    outbox = Outbox(database)
    async with staking_of(database, made) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        before = await rows(database)
        records = await known(database)
        async with database.transaction() as connection:
            await connection.execute("delete from validators")
            await connection.execute("delete from events where event_type <> 'validator_withdrawal_completed'")
            await connection.execute("update discovery set scanned_at = null, scanned_vaults = '{}', registry_size = 0")
        assert len(await rows(database)) < len(before)
        await sources.follow(outbox)
        assert await rows(database) == before == due(made)
        assert await known(database) == records


async def test_a_validator_that_is_newer_than_the_last_look_is_recorded_once(database: Database) -> None:
    """One met in a withdrawal may be known before its index is reached; then it is among the newest, too."""
    made = staking_simulation(80)
    await register(database, made)
    outbox = Outbox(database)
    async with staking_of(database, made, tail=2, per_post=7) as sources:
        await sources.open(database)
        records = await known(database)
        async with database.transaction() as connection:
            await connection.execute("update discovery set registry_size = 1")
        made.history(40)
        await sources.follow(outbox)
        assert await rows(database) == due(made)
        size = made.beacon.registry.count(made.beacon.finality(made.chain.finalized_number).block.slot)
        assert (await read_discovery(database)).size == size
        assert {record.index for record in records} <= {record.index for record in await known(database)}


async def test_validators_that_were_active_before_their_vault_began_give_no_activation(database: Database) -> None:
    made = staking_simulation(160)
    later = [registration._replace(first_block=100) for registration in made.registrations]
    begin = made.chain.block(100)
    assert begin is not None
    await add_accounts(database, later)
    for registration in later:
        await add_vault(database, registration)
    outbox = Outbox(database)
    async with staking_of(database, made) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        assert await rows(database) == due(made, later) != due(made)
        begin_epoch = made.beacon.epoch_of(begin.slot)
        early = {record.index for record in await known(database) if record.activation_epoch <= begin_epoch}
        reported = {
            int(key.rsplit("_", 1)[1]) for _, key in await rows(database) if key.startswith("validator_activated")
        }
        assert early and reported and not early & reported
        for registration in made.registrations:
            await add_vault(database, registration)  # from its first block after all
        await sources.follow(outbox)
        assert await rows(database) == due(made)


async def test_a_vault_that_is_removed_and_added_again_has_the_events_of_both_its_times(database: Database) -> None:
    made = staking_simulation(100)
    await register(database, made)
    outbox = Outbox(database)
    shared = made.registrations[0]
    async with staking_of(database, made) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        while made.chain.head.slot % made.beacon.slots_per_epoch != 5:  # no epoch has begun after the finalized block
            made.step()
        await sources.follow(outbox)
        last_block = made.chain.finalized_number
        assert last_block is not None
        await accounts.remove_vault(database, shared.account_id, shared.vault_id, last_block)
        made.history(100)
        await sources.follow(outbox)
        assert await rows(database) == due(made, await spans(database))
        again = shared._replace(first_block=last_block + 60)
        await add_vault(database, again)
        await sources.follow(outbox)
        for _ in range(4):
            made.history(15)
            await sources.follow(outbox)
        registered = await spans(database)
        assert len(registered) == len(made.registrations) + 1
        assert await rows(database) == due(made, registered)
        assert len(due(made, registered)) < len(due(made))


async def test_what_was_before_a_quiet_registration_is_kept_and_sent_to_nobody(database: Database) -> None:
    made = staking_simulation(160)
    await add_accounts(database, made.registrations)
    outbox = Outbox(database)
    async with staking_of(database, made) as sources:
        await sources.open(database)
        last_quiet = made.chain.finalized_number
        assert last_quiet is not None
        await open_at(database, made, last_quiet)
        for registration in made.registrations:
            await accounts.add_vault(
                database,
                registration.account_id,
                registration.vault_id,
                Address(registration.address),
                None,
                registration.first_block,
                deliver=False,
            )
        await sources.follow(outbox)
        made.history(100)
        await sources.follow(outbox)
        assert await rows(database) == due(made)
        block = made.chain.block(last_quiet)
        assert block is not None
        async with database.transaction() as connection:
            found = await connection.fetch("select event_type, created_at_ms, suppressed from events")
        assert {(row["event_type"], row["suppressed"]) for row in found} == {
            (kind, suppressed) for kind in STAKING_TYPES for suppressed in (True, False)
        }
        assert all(row["suppressed"] == (row["created_at_ms"] <= block.timestamp_s * 1000) for row in found)


async def test_a_day_of_mainnet_costs_few_calls_of_the_beacon_node(database: Database) -> None:
    """225 epochs of 32 slots and 1,000 watched validators: at most 8 calls an epoch beside one for each look."""
    made = Simulation(3, validators=5_000, slots_per_epoch=32, withdrawals_per_block=16)
    made.chain.finalized = Lag(64)
    made.history(160)
    await register(database, made)
    outbox, node, beacon_node = Outbox(database), ExecutionServer(made.chain), BeaconServer(made.beacon)
    costs: list[tuple[int, int, int]] = []
    async with staking_of(database, made, [node], [beacon_node]) as sources:
        await sources.open(database)
        epoch, looks = made.beacon.finality(made.chain.finalized_number).epoch, 0
        for _ in range(225):
            before, posts = beacon_node.calls.total() - looks, beacon_node.calls["POST validators"]
            for _ in range(2):
                made.history(16)
                await sources.discovery.step()
                looks += 1
            for source in (sources.validators, sources.withdrawals):
                await read_to_head(source, outbox, 8)
            now = made.beacon.finality(made.chain.finalized_number).epoch
            posts = beacon_node.calls["POST validators"] - posts
            costs.append((beacon_node.calls.total() - looks - before, max(now - epoch, 1), posts))
            epoch = now
        assert await rows(database) == due(made)
        watched = len(await known(database))
    calls, epochs, _ = (sum(column) for column in zip(*costs, strict=True))
    # a validator that only its withdrawal shows costs a look-up of its own, once
    most = max(calls / epochs for calls, epochs, posts in costs if posts <= 2 * epochs)
    with_look_up = max(calls / epochs for calls, epochs, _ in costs)
    print(f"beacon calls an epoch: {calls / epochs:.2f}, at most {most:g}, {with_look_up:g} with a look-up; {watched=}")
    assert watched >= 1_000
    assert calls / epochs <= 8 and most <= 8
    assert with_look_up <= 11
