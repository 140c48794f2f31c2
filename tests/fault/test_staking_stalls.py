"""Finality stalls at random, for up to a thousand blocks: what is sent live is what a replay gives, and the truth."""

from __future__ import annotations

import random

import pytest

from simulation_fixtures import drive, register, rows
from staking_fixtures import due, staking_of, staking_simulation
from vaultevents.core.spans import Span
from vaultevents.devnet.chain import Lag
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database

pytestmark = pytest.mark.fault

STALLS = {1: [1000, 0, 60], 2: [7, 200, 0, 33, 90], 3: [90, 1, 300, 16]}


@pytest.mark.parametrize("seed", STALLS)
async def test_live_through_stalls_equals_replay_equals_the_truth(database: Database, seed: int) -> None:
    rng, made = random.Random(seed), staking_simulation(64, seed)
    await register(database, made)
    outbox = Outbox(database)
    async with staking_of(database, made) as sources:
        await sources.open(database)
        for stall in STALLS[seed]:
            before = due(made).keys()
            made.chain.freeze_finality()
            left = stall
            while left:
                some = min(left, rng.randint(5, 120))
                made.history(some)
                left -= some
                await sources.follow(outbox, step=rng.randint(1, 9))
                assert await rows(database) == due(made)  # what is due without finality comes without it, and no more
            late = {key for key in due(made).keys() - before if "_withdrawal_" in key[1]}
            assert not late
            made.chain.finalized = Lag(rng.randint(0, 40))
            for _ in range(rng.randint(1, 4)):
                made.history(rng.randint(1, 12))
                await sources.follow(outbox, step=rng.randint(1, 9))
            assert await rows(database) == due(made)
        live = await rows(database)
        assert len(live) > 100
        async with database.transaction() as connection:
            await connection.execute("delete from events")
        for source in (sources.validators, sources.withdrawals):
            cursor = await outbox.begin_replay(source.stream, Span(0, await source.head()))
            await drive(source, outbox, cursor, rng.randint(1, 40))
            await outbox.end_replay(cursor)
        assert await rows(database) == live


async def test_activations_and_exits_of_a_stall_stop_where_the_finalized_state_ends(database: Database) -> None:
    """Four epochs after the finalized block's: beyond that one could be missing, so nothing is said (rule C4)."""
    made = staking_simulation(200)
    await register(database, made)
    outbox = Outbox(database)
    async with staking_of(database, made) as sources:
        await sources.open(database)
        made.chain.freeze_finality()
        final = made.beacon.finality(made.chain.finalized_number).block
        made.history(400)
        await sources.follow(outbox)
        live = await outbox.live("validators")
        assert live is not None
        assert live.position == made.beacon.epoch_of(final.slot) + 4
        assert await rows(database) == due(made)
        made.chain.finalized = Lag(2)
        await sources.follow(outbox)
        assert await rows(database) == due(made)
