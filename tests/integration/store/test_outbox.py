"""The outbox: what a commit writes, all of it or nothing, and to whom its events go (rules P1, C9, D9, D13 and E16)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import asyncpg
import pytest

from store_factories import (
    account,
    assert_ledger,
    claimed,
    commit,
    deliveries_of,
    events_of,
    funding,
    ledger_problems,
    live,
    live_at,
    rows,
    simple_simulation,
    some_deliveries,
    states,
    until_waiting,
    values,
    vault,
    webhook,
)
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core import events
from vaultevents.core.errors import DatabaseUnavailable, InputError
from vaultevents.core.events import Event, Observation, encode
from vaultevents.core.spans import Span
from vaultevents.store import accounts, outbox, status
from vaultevents.store.outbox import Committed, Cursor, Lost, Outbox
from vaultevents.store.pool import Database
from vaultevents.store.webhooks import delete_webhook, list_webhooks

pytestmark = pytest.mark.integration


async def everything(database: Database) -> list[object]:
    tables = ("events", "deliveries", "cursors", "registry")
    return [await rows(database, f"select * from {table} order by 1") for table in tables]


async def ids(database: Database) -> list[str]:
    return await values(database, "select id from events order by seq")


async def replay(box: Outbox, first: int, last: int, *seen: Observation, deliver: bool = True) -> Committed | Lost:
    """One span of a replay, read anew."""
    cursor = await box.begin_replay("logs", Span(first, last))
    found, version = await events_of(box, seen)
    try:
        return await box.commit(cursor, cursor.moved(last, "0xlast"), found, version, deliver=deliver)
    finally:
        await box.end_replay(cursor)


async def test_events_deliveries_and_the_cursor_move_together(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    one = await webhook(any_database)
    before = await live(box)
    seen = [funding(1), claimed(5), funding(2, block=11)]
    found, version = await events_of(box, seen)
    assert await box.commit(before, before.moved(11, "0x11"), found, version) == Committed(inserted=3)
    assert await live(box) == before.moved(11, "0x11")
    stored = await rows(any_database, "select * from events order by id")
    assert [row["body"] for row in stored] == [encode(event) for event in sorted(found, key=lambda event: event.id)]
    assert {(row["account_id"], row["vault_id"], row["encoding"], row["suppressed"]) for row in stored} == {
        ("acme", "v1", 1, False)
    }
    assert [row["block_number"] for row in stored] == [10, 11, 10] or {row["block_number"] for row in stored} == {
        10,
        11,
    }
    assert await deliveries_of(any_database, one.id) == [row["id"] for row in stored]
    assert await states(any_database) == {"scheduled": 3}
    await assert_ledger(any_database)
    overview = await status.read(any_database)
    assert (overview.events, overview.webhooks, overview.deliveries) == (3, 1, {"scheduled": 3})
    assert [(cursor.stream, cursor.kind, cursor.position) for cursor in overview.cursors] == [("logs", "live", 11)]


BREAKS = {
    "an error": ("create trigger t after insert on deliveries", "raise exception 'no'", asyncpg.RaiseError),
    "a kill": (
        "create trigger t after insert on deliveries",
        "perform pg_terminate_backend(pg_backend_pid())",
        DatabaseUnavailable,
    ),
    "a kill at commit": (
        "create constraint trigger t after insert on events deferrable initially deferred",
        "perform pg_terminate_backend(pg_backend_pid())",
        DatabaseUnavailable,
    ),
}


@pytest.mark.parametrize("what", BREAKS)
async def test_what_breaks_in_the_middle_leaves_nothing_behind(any_database: Database, what: str) -> None:
    box = await simple_simulation(any_database)
    await webhook(any_database)
    before = await everything(any_database)
    trigger, does, error = BREAKS[what]
    async with any_database.transaction() as connection:
        await connection.execute(
            f"create function boom() returns trigger language plpgsql as $$ begin {does}; return null; end $$;"
            f" {trigger} for each row execute function boom()"
        )
    with pytest.raises(error):
        await commit(box, funding(1), funding(2))
    assert await everything(any_database) == before
    async with any_database.transaction() as connection:
        await connection.execute("drop function boom cascade")
    assert (await commit(box, funding(1), funding(2))).inserted == 2
    await assert_ledger(any_database)


async def test_of_two_writers_with_one_cursor_one_commits_each_span(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    await webhook(any_database)
    for number in range(50):
        cursor = await live(box)
        found, version = await events_of(box, [funding(number)])
        new = cursor.moved(cursor.position + 1, f"0x{number}")
        outcomes = await asyncio.gather(*(Outbox(any_database).commit(cursor, new, found, version) for _ in range(2)))
        assert sorted(outcomes, key=str) == [Committed(inserted=1), Lost()]
    assert (await live(box)).position == 50
    assert await states(any_database) == {"scheduled": 50}
    await assert_ledger(any_database)


async def test_another_anchor_is_another_cursor(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    cursor = await live(box)
    found, version = await events_of(box, [funding(1)])
    before = await everything(any_database)
    for stale in (cursor.moved(cursor.position, "0xfork"), cursor.moved(cursor.position, None), cursor.moved(7, "0x7")):
        assert await box.commit(stale, stale.moved(9, "0x9"), found, version) == Lost()
    assert await everything(any_database) == before


async def test_events_of_another_registry_are_not_taken(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    cursor = await live(box)
    found, version = await events_of(box, [funding(1)])
    await accounts.remove_vault(any_database, "acme", "v1", 5)
    before = await everything(any_database)
    assert await box.commit(cursor, cursor.moved(9, "0x9"), found, version) == Lost()
    assert await everything(any_database) == before
    assert (await box.registry()).version != version  # the copy in memory is renewed


async def test_what_is_stored_is_never_stored_or_delivered_again(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    await webhook(any_database)
    assert await commit(box, funding(1), claimed(5)) == Committed(inserted=2)
    before = await rows(any_database, "select * from events order by seq")
    await webhook(any_database)  # has missed them, and a replay is no way to it
    assert await replay(box, 1, 1, funding(1), claimed(5)) == Committed(identical=2)
    assert await replay(box, 1, 1, funding(1), funding(2)) == Committed(inserted=1, identical=1)
    assert (await rows(any_database, "select * from events order by seq"))[:2] == before
    assert await states(any_database) == {"scheduled": 4}
    await assert_ledger(any_database)


async def test_a_row_that_differs_is_named_and_left_alone(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    await webhook(any_database)
    await commit(box, funding(1), funding(2), funding(3))
    first, *_ = await ids(any_database)
    async with any_database.transaction() as connection:
        await connection.execute("update events set body = 'forged' where id = $1", first)
    outcome = await replay(box, 1, 1, funding(1), funding(2), funding(3), funding(4))
    assert outcome == Committed(inserted=1, identical=2, different=(first,))
    assert await values(any_database, "select body from events where id = $1", first) == [b"forged"]


async def test_of_two_events_with_one_id_the_first_in_the_chain_wins(any_database: Database) -> None:
    """A queue that is not the audited one may emit a claim of one request twice."""
    box = await simple_simulation(any_database)
    one = await webhook(any_database)
    seen = [claimed(5, amount_wei=30), claimed(4), claimed(5, amount_wei=10), claimed(5, amount_wei=30)]
    found, _ = await events_of(box, seen)
    twice = found[0].id
    assert await commit(box, *seen) == Committed(inserted=2, identical=1, different=(twice,))
    assert await values(any_database, "select body from events where id = $1", twice) == [encode(found[0])]
    assert len(await deliveries_of(any_database, one.id)) == 2
    assert await replay(box, 1, 1, *seen) == Committed(identical=3, different=(twice,))


async def test_each_webhook_receives_what_its_filters_let_through(any_database: Database) -> None:
    for account_id in ("acme", "umbra"):
        await account(any_database, account_id)
    await vault(any_database, "v1", queue="q1")
    await vault(any_database, "v2", queue="q2")
    await vault(any_database, "u1", account_id="umbra", at="v1")
    box = await live_at(any_database, 0)
    wanted = {
        (await webhook(any_database)).id: {"f1", "f2", "c1", "c2", "f3"},
        (await webhook(any_database, event_types=["funding_received"])).id: {"f1", "f2", "f3"},
        (await webhook(any_database, event_types=["withdrawal_claimed", "validator_exited"])).id: {"c1", "c2"},
        (await webhook(any_database, vault_ids=["v2"])).id: {"f2", "c2"},
        (await webhook(any_database, event_types=["withdrawal_claimed"], vault_ids=["v1"])).id: {"c1"},
        (await webhook(any_database, event_types=["validator_exited"])).id: set(),
        (await webhook(any_database, active=False)).id: set(),
        (await webhook(any_database, account_id="umbra")).id: {"u1"},
        (await webhook(any_database, account_id="umbra", vault_ids=["u1"])).id: {"u1"},
    }
    deleted = await webhook(any_database)
    await delete_webhook(any_database, "acme", deleted.id)
    await commit(box, funding(1, vault="v1"), funding(2, vault="v2"), claimed(1, queue="q1"), claimed(2, queue="q2"))
    await vault(any_database, "v3")  # no filter means all vaults, those to come included
    await commit(box, funding(3, vault="v3"))
    names = {
        event.id: name
        for name, event in {
            "f1": (await events_of(box, [funding(1, vault="v1")]))[0][0],
            "f2": (await events_of(box, [funding(2, vault="v2")]))[0][0],
            "f3": (await events_of(box, [funding(3, vault="v3")]))[0][0],
            "u1": (await events_of(box, [funding(1, vault="v1")]))[0][1],
            "c1": (await events_of(box, [claimed(1, queue="q1")]))[0][0],
            "c2": (await events_of(box, [claimed(2, queue="q2")]))[0][0],
        }.items()
    }
    assert len(names) == 6
    for webhook_id, expected in {**wanted, deleted.id: set[str]()}.items():
        assert {names[delivery] for delivery in await deliveries_of(any_database, webhook_id)} == expected, webhook_id
    await assert_ledger(any_database)


async def test_every_change_of_a_webhook_is_kept_and_an_event_names_its_moment(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    await commit(box, funding(1))
    one = await webhook(any_database, event_types=["funding_received"])
    await commit(box, funding(2))
    two = await webhook(any_database, vault_ids=["v1"], active=False)
    await delete_webhook(any_database, "acme", one.id)
    await commit(box, funding(3))
    assert await values(any_database, "select filter_revision from events order by seq") == [0, 1, 3]
    history = await rows(
        any_database, "select revision, webhook_id, event_types, vault_ids, active from webhook_revisions order by 1"
    )
    assert [tuple(row.values()) for row in history] == [
        (1, one.id, ["funding_received"], None, True),
        (2, two.id, None, ["v1"], False),
        (3, one.id, ["funding_received"], None, False),
    ]
    assert len(await deliveries_of(any_database, one.id)) == 1  # nothing from before it was there, nor from after
    await assert_ledger(any_database)


async def test_webhooks_name_only_what_their_account_has(any_database: Database) -> None:
    for account_id in ("acme", "umbra"):
        await account(any_database, account_id)
    await vault(any_database, "v1")
    await vault(any_database, "v2")
    await accounts.remove_vault(any_database, "acme", "v2", 10)
    for foreign in (["u1"], ["v1", "v2"]):
        with pytest.raises(InputError, match="has no vault"):
            await webhook(any_database, vault_ids=foreign)
    with pytest.raises(InputError, match="has no vault 'v1'"):
        await webhook(any_database, account_id="umbra", vault_ids=["v1"])
    with pytest.raises(InputError, match="there is no account 'nobody'"):
        await webhook(any_database, account_id="nobody")
    one = await webhook(any_database, vault_ids=["v1"])
    with pytest.raises(InputError, match=f"account 'umbra' has no webhook '{one.id}'"):
        await delete_webhook(any_database, "umbra", one.id)
    assert [stored.webhook for stored in await list_webhooks(any_database, "acme")] == [one.webhook]
    assert await list_webhooks(any_database, "umbra") == []
    assert await values(any_database, "select revision from webhook_revisions") == [1]


async def test_a_webhook_that_comes_during_a_commit_waits_and_receives_nothing_of_it(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    async with any_database.transaction() as held:
        await held.execute("select 1 from cursors for update")
        committing = asyncio.create_task(commit(box, funding(1)))
        await until_waiting(any_database, 1)
        creating = asyncio.create_task(webhook(any_database))
        await until_waiting(any_database, 2)
    late = await creating
    assert (await committing).inserted == 1
    assert await deliveries_of(any_database, late.id) == []
    assert await values(any_database, "select filter_revision from events") == [0]
    await assert_ledger(any_database)


async def test_a_commit_during_a_change_of_webhooks_waits_and_sees_the_change(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    leaving = await webhook(any_database)
    async with any_database.transaction() as held:
        await held.execute("select 1 from accounts for update")  # a new webhook's foreign key waits for this
        creating = asyncio.create_task(webhook(any_database))
        await until_waiting(any_database, 1)
        committing = asyncio.create_task(commit(box, funding(1)))
        await until_waiting(any_database, 2)
    coming = await creating
    assert (await committing).inserted == 1
    async with any_database.transaction() as held:
        await held.execute("select 1 from webhooks where id = $1 for update", leaving.id)
        deleting = asyncio.create_task(delete_webhook(any_database, "acme", leaving.id))
        await until_waiting(any_database, 1)
        committing = asyncio.create_task(commit(box, funding(2)))
        await until_waiting(any_database, 2)
    await deleting
    assert (await committing).inserted == 1
    assert len(await deliveries_of(any_database, coming.id)) == 2
    assert len(await deliveries_of(any_database, leaving.id)) == 1
    await assert_ledger(any_database)


async def test_commits_do_not_wait_for_each_other(any_database: Database) -> None:
    """They share the registry's lock: a live span goes on while a backfill commits."""
    box = await simple_simulation(any_database)
    async with any_database.transaction() as held:
        await held.execute("select 1 from registry for share")
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            assert (await commit(box, funding(1))).inserted == 1


async def test_quiet_events_are_stored_and_sent_to_nobody(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    one = await webhook(any_database)
    async with any_database.transaction() as connection:
        await connection.execute("update cursors set position = 100")
    await vault(any_database, "v2", first_block=50, deliver=False)
    assert (await commit(box, funding(1, block=60, vault="v2"), funding(2, block=101, vault="v2"))).inserted == 2
    assert await replay(box, 1, 100, funding(3, block=10), deliver=False) == Committed(inserted=1)
    assert await values(any_database, "select suppressed from events order by block_number") == [True, True, False]
    assert len(await deliveries_of(any_database, one.id)) == 1
    await assert_ledger(any_database)
    assert await replay(box, 1, 100, funding(3, block=10)) == Committed(identical=1)
    assert len(await deliveries_of(any_database, one.id)) == 1


async def test_nothing_that_is_still_to_be_read_live_can_be_silenced(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    await commit(box)
    before = await everything(any_database)
    with pytest.raises(InputError, match="blocks beyond 1 are still to be read live"):
        await replay(box, 1, 2, funding(1, block=1), deliver=False)
    assert await everything(any_database) == before
    other = Cursor((await box.begin_replay("other", Span(0, 5))).id, "other", "replay", 0, -1, None, 5)
    found, version = await events_of(box, [funding(1)])
    with pytest.raises(InputError, match="still to be read live"):
        await box.commit(other, other.moved(5, None), found, version, deliver=False)


async def test_a_stored_row_is_compared_in_its_own_encoding(
    any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule E16: after an upgrade of the templates old rows stay as they are and are not "different"."""

    def newer(event: Event, encoding: int = 2) -> bytes:
        return encode(event) if encoding == 1 else encode(event).replace(b"Funding received", b"Vault funded")

    box = await simple_simulation(any_database)
    await commit(box, funding(1))
    monkeypatch.setattr(events, "encode", newer)
    for module in (events, outbox):
        monkeypatch.setattr(module, "ENCODING", 2)
    assert await replay(box, 1, 1, funding(1), funding(2)) == Committed(inserted=1, identical=1)
    stored = await rows(any_database, "select encoding, body from events order by seq")
    assert [(row["encoding"], b"Vault funded" in row["body"]) for row in stored] == [(1, False), (2, True)]
    assert await replay(box, 1, 1, funding(1), funding(2)) == Committed(identical=2)


async def test_thousands_of_events_commit_at_once(any_database: Database) -> None:
    box, _ = await some_deliveries(any_database, 5_000)
    assert await states(any_database) == {"scheduled": 5_000}
    again = await replay(box, 1, 1, *(funding(number) for number in range(5_000)))
    assert again == Committed(identical=5_000)
    in_row_order = await ids(any_database)
    assert in_row_order == sorted(in_row_order)
    assert len(set(await values(any_database, "select committed_xid::text from events"))) == 1
    await assert_ledger(any_database)


async def two_writers(database: Database, box: Outbox, seen: Sequence[Observation]) -> list[Committed | Lost]:
    return list(await asyncio.gather(replay(box, 1, 1, *seen), replay(Outbox(database), 1, 1, *reversed(seen))))


async def test_writers_of_the_same_events_in_another_order_never_deadlock(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    await webhook(any_database)
    for number in range(20):
        seen = [funding(200 * number + index) for index in range(200)]
        done = await two_writers(any_database, box, seen)
        assert {outcome.inserted for outcome in done if isinstance(outcome, Committed)} == {0, 200}
        assert {outcome.identical for outcome in done if isinstance(outcome, Committed)} == {0, 200}
    await assert_ledger(any_database)


async def two_writers_that_meet(database: Database, box: Outbox) -> list[Committed | Lost]:
    """Both are held up at the event in the middle, and then go on."""
    seen = sorted((funding(number) for number in range(21)), key=lambda one: tx_hash_text(one))
    (middle,), _ = await events_of(box, [seen[10]])
    async with database.transaction() as held:
        await held.execute(
            "insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body,"
            " suppressed, filter_revision) values ('acme', $1, 'v1', 'x', 1, 1, 1, '', false, 0)",
            middle.id,
        )
        writing = asyncio.create_task(two_writers(database, box, seen))
        await until_waiting(database, 2)
        await held.execute("delete from events")
    return await writing


def tx_hash_text(observation: Observation) -> str:
    return observation.payload.id_suffix("")


async def test_writers_that_meet_in_the_middle_go_on(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    done = await two_writers_that_meet(any_database, box)
    assert {outcome.inserted for outcome in done if isinstance(outcome, Committed)} == {0, 21}


async def test_the_deadlock_would_be_seen(any_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the two tests above: rows in the order in which they were found."""
    box = await simple_simulation(any_database)
    monkeypatch.setattr(outbox, "sorted", lambda events, key: list(events), raising=False)
    with pytest.raises(DatabaseUnavailable, match="deadlock"):
        await two_writers_that_meet(any_database, box)


async def test_a_ledger_that_does_not_add_up_is_seen(any_database: Database) -> None:
    """Negative control: each of these would be an event that is lost, doubled, or sent to the wrong one."""
    box = await simple_simulation(any_database)
    await webhook(any_database)
    other = await webhook(any_database, event_types=["withdrawal_claimed"])
    await commit(box, funding(1), funding(2))
    await assert_ledger(any_database)
    for forgery in (
        "delete from deliveries where id = (select min(id) from deliveries)",
        f"update deliveries set webhook_id = '{other.id}' where id = (select min(id) from deliveries)",
        "update events set suppressed = true",
        "update deliveries set state = 'delivered', finished_at = db_now()",
        "update deliveries set attempts = 1",
        "update deliveries set state = 'cancelled', finished_at = db_now()",
        "update webhooks set active = false",
        "insert into attempts select id, 1, db_now(), 1, 200, null, '' from deliveries",
    ):
        with contextlib.suppress(Undone):
            async with any_database.transaction() as connection:
                await connection.execute(forgery)
                assert await ledger_problems(connection), forgery
                raise Undone
    await assert_ledger(any_database)


class Undone(Exception):
    """Rolls a forgery back."""
