"""The feed of events: a reader that pages through it misses nothing, whatever commits meanwhile (rules A19 and I20)."""

from __future__ import annotations

import asyncio
import random

import pytest

from store_factories import account, commit, events_of, funding, own_database, rows, simple_simulation, values
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.events import encode
from vaultevents.core.pagination import CursorUnknown
from vaultevents.core.spans import Span
from vaultevents.store import feed
from vaultevents.store.feed import FeedEvent, FeedPosition, adopt_restored_events
from vaultevents.store.outbox import Committed
from vaultevents.store.pool import Connection, Database
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.integration

WRITERS = 8
COMMITS = 2080
FAR = 2**40
"""A transaction id that no server of these tests comes to."""


async def page(
    database: Database,
    after: FeedPosition | None = None,
    *,
    limit: int = 250,
    since_ms: int | None = None,
    until_ms: int | None = None,
    account_id: str = "acme",
) -> list[FeedEvent]:
    async with database.of_account(account_id) as connection:
        return await feed.page(connection, account_id, limit, after, since_ms, until_ms)


async def ids(
    database: Database, after: FeedPosition | None = None, *, since_ms: int | None = None, until_ms: int | None = None
) -> list[str]:
    return [event.id for event in await page(database, after, since_ms=since_ms, until_ms=until_ms)]


async def calm(database: Database) -> None:
    """Returns once all that is being written on this server is done: other tests share it, and the feed waits."""
    (begun,) = await values(database, "select pg_snapshot_xmax(pg_current_snapshot())::text")
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while await values(database, "select pg_snapshot_xmin(pg_current_snapshot()) < $1::text::xid8", begun) == [
            True
        ]:
            await asyncio.sleep(0.01)


async def write(connection: Connection, number: int, account_id: str = "acme") -> None:
    """An event `e<number>`, of the time `number`."""
    await connection.execute(
        "insert into events (account_id, id, vault_id, event_type, created_at_ms, encoding, body, suppressed,"
        " filter_revision) values ($1, 'e' || $2::bigint, 'v1', 'funding_received', $2, 1, '{}', false, 0)",
        account_id,
        number,
    )


async def written(database: Database, *numbers: int, account_id: str = "acme") -> None:
    """One commit for each event, all of them over."""
    for number in numbers:
        async with database.transaction() as connection:
            await write(connection, number, account_id)
    await calm(database)


async def move_far(database: Database, event_id: str, xid: int = FAR) -> None:
    """As if a dump had brought the event from a server that was further on."""
    async with database.transaction() as connection:
        await connection.execute("update events set committed_xid = $2::text::xid8 where id = $1", event_id, str(xid))


async def epoch(database: Database) -> int:
    (found,) = await values(database, "select epoch from feed")
    return int(found)


async def test_the_feed_has_the_bytes_that_webhooks_receive(any_database: Database) -> None:
    outbox = await simple_simulation(any_database)
    observations = [funding(number) for number in range(5)]
    expected, _ = await events_of(outbox, observations)
    await commit(outbox, *observations)
    await calm(any_database)
    found = await page(any_database)
    assert sorted((event.id, event.body) for event in found) == sorted((event.id, encode(event)) for event in expected)
    async with any_database.of_account("acme") as connection:
        assert await feed.find(connection, "acme", expected[0].id) == encode(expected[0])
        assert await feed.find(connection, "acme", "invented") is None


async def test_events_that_are_sent_to_nobody_are_in_the_feed(any_database: Database) -> None:
    outbox = await simple_simulation(any_database)
    await commit(outbox)  # the live cursor has passed block 1
    (event,), version = await events_of(outbox, [funding(1, block=1)])
    replay = await outbox.begin_replay("logs", Span(1, 1))
    outcome = await outbox.commit(replay, replay.moved(1, None), [event], version, deliver=False)
    assert outcome == Committed(inserted=1)
    await calm(any_database)
    assert await ids(any_database) == [event.id]
    assert await values(any_database, "select suppressed from events") == [True]


async def test_pages_follow_each_other_without_gap_or_repeat(any_database: Database) -> None:
    await account(any_database)
    async with any_database.transaction() as connection:
        for number in range(4):  # one transaction: only their numbers tell them apart
            await write(connection, number)
    await written(any_database, 4, 5, 6)
    for limit in (1, 2, 3, 7, 250):
        seen: list[str] = []
        after = None
        while found := await page(any_database, after, limit=limit):
            assert len(found) <= limit
            seen += [event.id for event in found]
            after = FeedPosition.parse(str(found[-1].position))
        assert seen == [f"e{number}" for number in range(7)]
    await written(any_database, 7)
    assert await ids(any_database, after) == ["e7"]  # the end of the feed is a place to go on from


async def test_since_is_inclusive_and_until_exclusive(any_database: Database) -> None:
    await account(any_database)
    await written(any_database, 30, 10, 20, 40)
    assert await ids(any_database, since_ms=20) == ["e30", "e20", "e40"]
    assert await ids(any_database, until_ms=30) == ["e10", "e20"]
    assert await ids(any_database, since_ms=10, until_ms=30) == ["e10", "e20"]
    assert await ids(any_database, since_ms=20, until_ms=20) == []
    (first,) = await page(any_database, limit=1)
    assert await ids(any_database, first.position, since_ms=20) == ["e20", "e40"]


async def test_an_account_sees_its_own_events_only(any_database: Database) -> None:
    await account(any_database)
    await account(any_database, "globex")
    await written(any_database, 1)
    await written(any_database, 1, 2, account_id="globex")
    assert [event.id for event in await page(any_database, account_id="globex")] == ["e1", "e2"]
    assert await ids(any_database) == ["e1"]
    async with any_database.of_account("acme") as connection:
        assert await feed.find(connection, "acme", "e2") is None
        assert await feed.page(connection, "globex", 250) == []  # the second wall


async def test_a_reader_by_number_loses_what_commits_late_and_the_feed_does_not(any_database: Database) -> None:
    await account(any_database)

    async def by_number(after: int) -> list[int]:
        return await values(any_database, "select seq from events where seq > $1 order by seq", after)

    async with any_database.transaction() as slow:
        await write(slow, 1)
        async with any_database.transaction() as quick:
            await write(quick, 2)
        (loser,) = await by_number(0)
        assert await page(any_database) == []  # e2 waits for the one that began before it
    assert await by_number(loser) == []  # the control: e1 is never seen
    await calm(any_database)
    assert await ids(any_database) == ["e1", "e2"]


async def test_what_begins_late_with_a_low_number_still_comes_after(any_database: Database) -> None:
    await account(any_database)
    async with any_database.transaction() as first:
        await first.execute("select pg_current_xact_id()")  # its place in the feed, before it has an event
        async with any_database.transaction() as second:
            await write(second, 1)
        await write(first, 2)
    await calm(any_database)
    assert await ids(any_database) == ["e2", "e1"]  # the order of transactions, not of numbers
    (begin, _) = await page(any_database)
    assert await ids(any_database, begin.position) == ["e1"]


async def test_eight_writers_in_any_order_hide_nothing_from_a_reader(any_postgres: ServerAddress) -> None:
    async with own_database(any_postgres, pool_size=WRITERS + 2) as database:
        await account(database)
        numbers = iter(range(COMMITS))
        rng = random.Random(20)

        async def pause() -> None:
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.005, 0.02)))

        async def writer() -> None:
            for number in numbers:
                async with database.transaction() as connection:
                    await connection.execute("select pg_current_xact_id()")
                    await pause()
                    await write(connection, number)
                    await pause()

        async def reader() -> list[FeedEvent]:
            seen: list[FeedEvent] = []
            while not writers.done() or len(seen) < COMMITS:
                seen += await page(database, seen[-1].position if seen else None, limit=50)
            return seen

        async def reader_by_number() -> list[int]:
            seen = [0]
            while not writers.done():
                seen += await values(database, "select seq from events where seq > $1 order by seq limit 50", seen[-1])
            return seen[1:]

        writers = asyncio.gather(*(writer() for _ in range(WRITERS)))
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            seen, by_number, _ = await asyncio.gather(reader(), reader_by_number(), writers)
        assert sorted(event.id for event in seen) == sorted(f"e{number}" for number in range(COMMITS))
        places = [event.position.seq for event in seen]
        assert places != sorted(places)  # transactions took their numbers in another order than their ids
        assert len(by_number) < COMMITS  # and committed in yet another one


async def test_a_start_on_the_same_server_changes_nothing(any_database: Database) -> None:
    await account(any_database)
    await written(any_database, 1, 2)
    before = await rows(any_database, "select * from events order by seq")
    async with any_database.transaction() as connection:
        await write(connection, 3)  # an open transaction is no foreign one
        await adopt_restored_events(any_database)
    await adopt_restored_events(any_database)
    await calm(any_database)
    assert await epoch(any_database) == 1
    assert (await rows(any_database, "select * from events order by seq"))[:2] == before
    assert await ids(any_database) == ["e1", "e2", "e3"]


async def test_events_of_another_server_are_shown_once_they_are_adopted(any_database: Database) -> None:
    await account(any_database)
    await account(any_database, "globex")
    await written(any_database, 1, 2, 3)
    (first, *_) = await page(any_database)
    await move_far(any_database, "e2", FAR + 1)
    await move_far(any_database, "e3", FAR)
    await calm(any_database)
    assert await ids(any_database) == ["e1"]

    await asyncio.gather(*(adopt_restored_events(any_database) for _ in range(3)))  # several daemons start at once
    await calm(any_database)
    assert await epoch(any_database) == 2
    assert await ids(any_database) == ["e1", "e2", "e3"]
    with pytest.raises(CursorUnknown):
        await page(any_database, first.position)
    await written(any_database, 4)
    assert await ids(any_database) == ["e1", "e2", "e3", "e4"]
    (again, *_) = await page(any_database)
    assert await ids(any_database, again.position) == ["e2", "e3", "e4"]


async def test_a_place_that_a_restored_server_has_not_come_to_is_unknown(any_database: Database) -> None:
    await account(any_database)
    await written(any_database, 1)
    (event,) = await page(any_database)
    assert await page(any_database, event.position) == []
    with pytest.raises(CursorUnknown):
        await page(any_database, FeedPosition(event.position.epoch, FAR, 1))


async def test_a_place_whose_event_an_older_copy_lacks_is_unknown(any_database: Database) -> None:
    """The numbers go on from the copy, so a later event may have the place of one that was lost."""
    await account(any_database)
    await written(any_database, 1, 2)
    first, second = await page(any_database)
    assert await page(any_database, second.position) == []
    async with any_database.transaction() as connection:
        await connection.execute("delete from events where id = 'e2'")
    with pytest.raises(CursorUnknown):
        await page(any_database, second.position)
    await written(any_database, 3)
    assert await ids(any_database, first.position) == ["e3"]


async def test_the_place_of_an_event_that_came_back_after_a_reorganisation_is_known(any_database: Database) -> None:
    await account(any_database)
    await written(any_database, 1)
    (event,) = await page(any_database)
    async with any_database.transaction() as connection:
        await connection.execute("update events set near_head = true, committed_xid = pg_current_xact_id()")
    await calm(any_database)
    assert await ids(any_database, event.position) == ["e1"]


async def test_a_page_since_near_the_end_does_not_read_what_lies_before(database: Database) -> None:
    """By the server's counts of rows, for a table that has never been analysed and for one that has."""
    await account(database)
    async with database.transaction() as connection:
        await connection.execute(
            "insert into events (account_id, id, vault_id, event_type, created_at_ms, encoding, body, suppressed,"
            " filter_revision) select 'acme', 'e' || n, 'v1', 'funding_received', n, 1, '{}', false, 0"
            " from generate_series(1, 30000) n"
        )
    await calm(database)
    for _ in range(2):
        for first, until_ms in ((29_900, None), (10, 111)):
            async with database.of_account("acme") as connection:
                before = await connection.fetchval(READ)
                found = await feed.page(connection, "acme", 50, None, first, until_ms)
                after = await connection.fetchval(READ)
            assert [event.id for event in found] == [f"e{number}" for number in range(first, first + 50)]
            assert after - before < 2_000
        async with database.statement() as connection:
            await connection.execute("vacuum analyze events")


async def test_a_page_since_long_ago_has_the_order_of_commits(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "RECENT", 3)
    await account(database)
    await written(database, 5, 9, 2, 7, 1, 8)
    for recent in (3, 100):
        monkeypatch.setattr(feed, "RECENT", recent)
        assert await ids(database, since_ms=2) == ["e5", "e9", "e2", "e7", "e8"]
        assert await ids(database, since_ms=2, until_ms=9) == ["e5", "e2", "e7", "e8"]
        assert await ids(database, since_ms=9) == ["e9"]
        after = (await page(database))[1].position
        assert await ids(database, after, since_ms=2) == ["e2", "e7", "e8"]


READ = """
select sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::int from pg_stat_xact_user_tables
where schemaname = current_schema() and relname = 'events'
"""
