"""The one path: live, backfill and replay give the rows that the chain's own record says, however it is cut."""

from __future__ import annotations

import random

import pytest

from simulation_fixtures import (
    add_accounts,
    add_vault,
    drive,
    open_at,
    read_to_head,
    reading,
    register,
    rows,
    spans,
    whole,
)
from vaultevents.chain.execution.client import ExecutionOptions
from vaultevents.core.errors import SourceUnavailable
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS
from vaultevents.devnet.chain import Absent, At, Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault, Faults
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.prefetch import Prefetcher
from vaultevents.watch.watcher import Idle, advance

pytestmark = pytest.mark.integration


def simulation(blocks: int = 120, events: int = 150, seed: int = 7, chain: Chain | None = None) -> Simulation:
    made = Simulation(seed, chain=chain)
    made.history(blocks, events)
    return made


async def test_backfill_and_live_give_exactly_the_events_of_the_chain(any_database: Database) -> None:
    made = simulation()
    outbox = Outbox(any_database)
    await register(any_database, made)
    async with reading(ExecutionServer(made.chain)) as source:
        await open_at(any_database, made, 80)
        await read_to_head(source, outbox)
        assert await rows(any_database) == made.expected()
        for _ in range(30):
            made.step()
            await read_to_head(source, outbox, step=1)
        assert await rows(any_database) == made.expected()


@pytest.mark.parametrize("seed", range(4))
async def test_a_replay_is_identical_however_the_range_is_cut(database: Database, seed: int) -> None:
    made = simulation(seed=seed)
    rng = random.Random(seed)
    outbox = Outbox(database)
    await register(database, made)
    async with reading(ExecutionServer(made.chain, max_range=rng.randint(3, 40))) as source:
        await open_at(database, made, rng.randint(0, 100))
        await read_to_head(source, outbox, step=rng.randint(1, 60))
        before = await rows(database)
        for step in (1, rng.randint(2, 30), 1000):
            cursor = await outbox.begin_replay("logs", whole(made))
            done = [one.committed for one in await drive(source, outbox, cursor, step)]
            await outbox.end_replay(cursor)
            assert sum(outcome.identical for outcome in done) == len(before)
            assert not any(outcome.inserted or outcome.different for outcome in done)
    assert await rows(database) == before == made.expected()


async def test_deleted_rows_come_back_byte_for_byte_and_an_altered_one_is_reported_and_left(database: Database) -> None:
    made = simulation()
    outbox = Outbox(database)
    await register(database, made)
    async with reading(ExecutionServer(made.chain)) as source:
        await open_at(database, made, 100)
        await read_to_head(source, outbox)
        altered = ("acme", min(event_id for account, event_id in made.expected() if account == "acme"))
        async with database.transaction() as connection:
            await connection.execute("delete from events where seq % 3 = 0 and id <> $1", altered[1])
            await connection.execute("update events set body = 'forged' where account_id = $1 and id = $2", *altered)
        missing = len(made.expected()) - len(await rows(database))
        assert missing > 10
        cursor = await outbox.begin_replay("logs", whole(made))
        done = [one.committed for one in await drive(source, outbox, cursor, 25)]
    assert sum(outcome.inserted for outcome in done) == missing
    assert [event_id for outcome in done for event_id in outcome.different] == [altered[1]]
    assert await rows(database) == {**made.expected(), altered: b"forged"}


async def test_a_vault_added_later_is_backfilled_with_the_same_ids_and_bodies(database: Database) -> None:
    made = simulation()
    outbox = Outbox(database)
    await add_accounts(database, made.registrations)
    first, *later = made.registrations
    await add_vault(database, first)
    async with reading(ExecutionServer(made.chain)) as source:
        await open_at(database, made, 60)
        await read_to_head(source, outbox)
        assert await rows(database) == made.expected([first])
        brought = [(await add_vault(database, registration)).backfills for registration in later]
        assert len(brought[0]) == 1
        assert brought[1] == ()  # the open backfill reads these blocks anyway
        made.step()
        await read_to_head(source, outbox)
        assert await rows(database) == made.expected()
        assert await outbox.backfills("logs") == []


async def test_without_a_vault_no_logs_are_asked_for(database: Database) -> None:
    made = simulation()
    node = ExecutionServer(made.chain)
    async with reading(node) as source:
        await open_at(database, made, 10)
        await read_to_head(source, Outbox(database))
    assert node.calls["eth_getLogs"] == 0
    live = await Outbox(database).live("logs")
    assert live is not None and live.position == made.chain.finalized_number


async def test_full_blocks_never_stall_the_stream(database: Database) -> None:
    chain = Chain(3)
    chain.filler_logs = FULL_BLOCK_LOGS
    made = simulation(60, 40, chain=chain)
    bits = [int.from_bytes(block.header.logs_bloom).bit_count() for block in map(chain.block, range(1, 50)) if block]
    assert min(bits) > 0.9 * 2048
    await register(database, made)
    node = ExecutionServer(chain)
    async with reading(node) as source:
        await open_at(database, made, 0)
        await read_to_head(source, Outbox(database), step=20)
        assert source._chain.counters.blooms_settled > 10
        assert source._chain.counters.blooms_unsettled == source._chain.counters.node_faults == 0
    assert await rows(database) == made.expected()


@pytest.mark.parametrize("lies", [{Fault.EMPTY_LOGS: 0.01}, {Fault.EMPTY_LOGS: 0.05, Fault.TRUNCATED_LOGS: 0.02}])
async def test_a_lonely_node_that_hides_logs_loses_nothing(database: Database, lies: dict[Fault, float]) -> None:
    made = simulation(600, 500, seed=11)
    await register(database, made)
    faults = Faults(6, lies)
    options = ExecutionOptions(headers="every", retry_wait_s=0.01)
    async with reading(ExecutionServer(made.chain, faults=faults), options=options) as source:
        await open_at(database, made, 0)
        outbox = Outbox(database)
        for _ in range(200):  # the cursor may have to try a span again, as the daemon does
            try:
                await read_to_head(source, outbox, step=3)
            except SourceUnavailable:
                continue
            break
    assert sum(faults.fired.values()) > 0
    assert await rows(database) == made.expected()


async def test_finality_that_is_missing_or_goes_back_moves_nothing(database: Database) -> None:
    made = simulation()
    await register(database, made)
    outbox = Outbox(database)
    async with reading(ExecutionServer(made.chain)) as source:
        await open_at(database, made, 90)
        made.chain.finalized = Absent.NULL
        live = await outbox.live("logs")
        assert live is not None
        with pytest.raises(SourceUnavailable, match="finalized"):
            await advance(Prefetcher(source, 10), outbox, live)
        made.chain.finalized = At(50)
        assert await advance(Prefetcher(source, 10), outbox, live) == Idle(50)
        assert await outbox.live("logs") == live


async def test_spans_of_the_database_are_those_of_the_simulation(database: Database) -> None:
    made = simulation()
    await register(database, made)
    assert sorted(await spans(database)) == sorted(made.registrations)
