"""The numbers of `status`: exact after whatever happened to the rows, and read without reading what is delivered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from store_factories import (
    carry_out,
    change,
    commit,
    funding,
    own_database,
    rows,
    settlement,
    simple_simulation,
    states,
    take,
    values,
    webhook,
)
from vaultevents.store import status
from vaultevents.store.deliveries import settle
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.webhooks import delete_webhook, disable_webhook

pytestmark = pytest.mark.integration

STORED = """
insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
    filter_revision)
select 'acme', $1 || n, 'v1', 'funding_received', n, n, 1, '', true, 1 from generate_series(1, $2::integer) n
"""
DELIVERED = """
insert into deliveries (event_seq, webhook_id, state, finished_at)
select seq, $1, 'delivered', db_now() from events where id like $2
"""
SCANS = """
select relname::text as name, seq_scan, idx_tup_read from pg_stat_user_tables
join lateral (
    select sum(idx_tup_read) as idx_tup_read from pg_stat_user_indexes i where i.relid = pg_stat_user_tables.relid
) read on true
where schemaname = current_schema and relname in ('events', 'deliveries') order by relname
"""


async def assert_counted(database: Database) -> dict[str, int]:
    """What `status` says is what a count of all rows says; the deliveries by state."""
    await carry_out(database)
    overview = await status.read(database)
    assert overview.deliveries == await states(database)
    assert [overview.events] == await values(database, "select count(*)::int from events")
    return overview.deliveries


async def test_each_state_is_counted_as_it_comes_and_goes(any_database: Database) -> None:
    assert await assert_counted(any_database) == {}
    box = await simple_simulation(any_database)
    first, second = await webhook(any_database), await webhook(any_database)
    await commit(box, *(funding(number) for number in range(6)))
    assert await assert_counted(any_database) == {"scheduled": 12}
    taken = (await take(any_database)).deliveries
    of_first = [delivery for delivery in taken if delivery.webhook_id == first.id]
    await settle(any_database, [settlement(of_first[0]), settlement(of_first[1], "exhausted", 500)])
    assert await assert_counted(any_database) == {"scheduled": 10, "delivered": 1, "exhausted": 1}
    async with any_database.transaction() as connection:
        await disable_webhook(connection, first.id, "failing")
    assert await assert_counted(any_database) == {"scheduled": 6, "delivered": 1, "exhausted": 1, "parked": 4}
    await delete_webhook(any_database, "acme", second.id)
    assert (await assert_counted(any_database))["cancelled"] == 6
    await change(any_database, "delete from deliveries where state in ('delivered', 'cancelled')")
    assert await assert_counted(any_database) == {"exhausted": 1, "parked": 4}
    await change(any_database, "truncate attempts, deliveries, queue, events cascade")
    assert await assert_counted(any_database) == {}
    await commit(box, funding(100))
    assert (await status.read(any_database)).events == 1


async def test_many_writers_at_once_are_counted_and_leave_few_rows(any_database: Database) -> None:
    """Eight writers, of which each rolls back every fourth of its statements."""
    await simple_simulation(any_database)

    async def write(name: str) -> None:
        for number in range(60):
            async with any_database.transaction() as connection:
                inner = connection.transaction()
                await inner.start()
                await connection.execute(STORED, f"{name}.{number}.", 3)
                if number % 4 == 3:
                    await inner.rollback()
                    continue
                await connection.execute("delete from events where id = $1", f"{name}.{number}.2")
                await inner.commit()

    await asyncio.gather(*(write(f"w{number}") for number in range(8)))
    await assert_counted(any_database)
    assert (await status.read(any_database)).events == 8 * 45 * 2
    assert (await values(any_database, "select count(*)::int from row_totals"))[0] < 300  # of some 780 statements


async def test_a_writer_that_does_not_end_holds_up_no_other_and_counts_for_nothing(any_database: Database) -> None:
    await simple_simulation(any_database)
    async with any_database.transaction() as held:
        for number in range(70):  # at some point it has replaced the rows of others
            await held.execute(STORED, f"held.{number}.", 1)
        async with any_database.transaction() as other:
            await other.execute("set local lock_timeout = '2s'")
            for number in range(140):
                await other.execute(STORED, f"other.{number}.", 1)
        assert (await status.read(any_database)).events == 140
        assert await values(any_database, "select count(*)::int from events") == [140]
        await held.execute("delete from events where id like 'held.1%'")
    await assert_counted(any_database)
    assert (await status.read(any_database)).events == 140 + 70 - 11


async def test_rows_that_came_without_triggers_are_counted_again_on_demand(any_database: Database) -> None:
    await simple_simulation(any_database)
    one = await webhook(any_database)
    async with any_database.transaction() as connection:
        await connection.execute("set local session_replication_role = replica")
        await connection.execute(STORED, "copied", 20)
        await connection.execute(DELIVERED, one.id, "copied1%")
    assert (await status.read(any_database)).events == 0, "this is what the triggers are for"
    await change(any_database, "select recount_rows()")
    assert await assert_counted(any_database) == {"delivered": 11}


async def _reads(database: Database) -> dict[str, Any]:
    async with database.statement() as connection:
        await connection.execute("select pg_stat_force_next_flush()")
    return {row["name"]: (row["seq_scan"], row["idx_tup_read"]) for row in await rows(database, SCANS)}


async def test_status_does_not_read_what_is_delivered(any_postgres: ServerAddress) -> None:
    """Of 40,000 deliveries ten are pending: a reading of all of them would show in the server's statistics."""
    async with own_database(any_postgres, pool_size=1) as database:  # one connection: it can publish its statistics
        box = await simple_simulation(database)
        subscriptions = [await webhook(database) for _ in range(2)]
        await change(database, STORED, "old", 20_000)
        for subscription in subscriptions:
            await change(database, DELIVERED, subscription.id, "old%")
        await commit(box, *(funding(number) for number in range(5)))
        async with database.statement() as connection:
            await connection.execute("vacuum analyze")
        before = await _reads(database)
        overview = await status.read(database)
        after = await _reads(database)
        assert (overview.events, overview.deliveries) == (20_005, {"delivered": 40_000, "scheduled": 10})
        for table, (scans, read) in after.items():
            assert scans == before[table][0], f"{table} was read whole"
            assert read - (before[table][1] or 0) < 1_000, f"{table}: {read} entries of indexes"
