"""However a chain is cut into spans, batches and lists of ids, its validators have the same events."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation_fixtures import drive, register, rows
from staking_fixtures import due, staking_of, staking_simulation
from store_factories import own_database
from vaultevents.core.spans import Span
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.store.outbox import Outbox
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.property

BLOCKS = 150


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32),
    live_step=st.integers(1, 30),
    replay_step=st.integers(1, 30),
    batch_size=st.sampled_from([1, 2, 7, 33, 100]),
    per_post=st.sampled_from([1, 3, 50, 1000]),
    tail=st.sampled_from([1, 2, 5, 64]),
    post=st.booleans(),
)
async def test_any_cut_gives_the_same_events(
    postgres18: ServerAddress,
    seed: int,
    live_step: int,
    replay_step: int,
    batch_size: int,
    per_post: int,
    tail: int,
    post: bool,
) -> None:
    rng, made = Random(seed), staking_simulation(BLOCKS // 2, seed=9)
    async with own_database(postgres18) as database:
        await register(database, made)
        outbox = Outbox(database)
        lists: dict[str, Any] = {
            "batch_size": batch_size,
            "per_post": per_post,
            "per_get": per_post % 63 + 1,
            "tail": tail,
            "find_by": rng.choice(["list", "deposits"]),
            "deposit_step": rng.randint(1, BLOCKS),
        }
        async with staking_of(database, made, (), [BeaconServer(made.beacon, post=post)], **lists) as sources:
            await sources.open(database)
            while (left := BLOCKS - made.chain.head.number) > 0:
                made.history(min(left, rng.randint(1, 40)))
                await sources.follow(outbox, live_step)
            live = await rows(database)
            assert live == due(made)
            for source in (sources.validators, sources.withdrawals):
                first = rng.randint(0, await source.head())
                cursor = await outbox.begin_replay(source.stream, Span(first, await source.head()))
                for one in await drive(source, outbox, cursor, replay_step):
                    assert not one.committed.inserted and not one.committed.different
                await outbox.end_replay(cursor)
            assert await rows(database) == live
