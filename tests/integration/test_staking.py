"""Activations, exits and withdrawals of a devnet world: live, late, replayed and disturbed, against its own record."""

from __future__ import annotations

import random

import pytest

from vaultevents.core.events import EVENT_TYPES
from vaultevents.core.spans import Span
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.world import World
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from worlds import Rows, add_accounts, add_vault, drive, register, rows, staking

pytestmark = pytest.mark.integration

STAKING_TYPES = tuple(name for name in EVENT_TYPES if name.startswith("validator_"))


def world(blocks: int = 240, seed: int = 3) -> World:
    made = World(seed, validators=40)
    made.history(blocks)
    return made


def due(made: World) -> Rows:
    return dict(made.expected(event_types=STAKING_TYPES))


async def test_history_and_live_give_exactly_the_events_of_the_chain(any_database: Database) -> None:
    made = world(120)
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
    made = world(seed=seed)
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
            identical += sum(one.identical for one in done)
            assert not any(one.inserted or one.different for one in done)
        assert identical == len(before)


async def test_a_vault_added_later_gets_all_that_its_validators_did_since_its_start(database: Database) -> None:
    made = world()
    await add_accounts(database, made.registrations)
    first, *later = made.registrations
    await add_vault(database, first)
    outbox = Outbox(database)
    async with staking(database, made, ExecutionServer(made.chain), BeaconServer(made.beacon)) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        assert await rows(database) == due_of(made, [first])
        for one in later:
            await add_vault(database, one)
            made.step()
            await sources.follow(outbox)
        for _ in range(20):
            made.step()
        await sources.follow(outbox)
        await sources.follow(outbox)
        assert await rows(database) == due(made)


def due_of(made: World, registrations: list) -> Rows:  # type: ignore[type-arg]
    return dict(made.expected(registrations, event_types=STAKING_TYPES))
