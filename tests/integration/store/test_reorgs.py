"""What becomes of events and deliveries when their block is orphaned, and when it comes back (rules C1, P4 and I7)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from raised_conditions import raised
from store_factories import (
    LEASE_S,
    Subscription,
    account,
    assert_ledger,
    commit,
    deliveries_of,
    events_of,
    funding,
    live,
    settlement,
    shift_clock,
    simple_simulation,
    states,
    take,
    until_waiting,
    values,
    vault,
    webhook,
)
from timeouts import until_true
from vaultevents.core.events import Observation, encode
from vaultevents.store import cursors, deliveries, feed, gauges, leases, reorgs, resends, status, webhooks
from vaultevents.store.deliveries import ClaimRequest, Delivery, settle
from vaultevents.store.leases import end_leases
from vaultevents.store.outbox import Committed, Lost, Outbox
from vaultevents.store.pool import Connection, Database
from vaultevents.store.reorgs import NearBlocks, Rewind

pytestmark = pytest.mark.integration


def block_hash(number: int, branch: str = "a") -> str:
    return f"0x{branch}{number:063x}"


async def seen(outbox: Outbox, block: int, *observations: Observation, branch: str = "a") -> Committed:
    """Commits a block of a branch, of which only block 0 is final."""
    cursor = await live(outbox)
    found, version = await events_of(outbox, observations)
    near = NearBlocks(0, block_hash(0), {block: block_hash(block, branch)})
    new = cursor.moved(block, block_hash(block, branch))
    outcome = await outbox.commit(cursor, new, found, version, near=near)
    assert not isinstance(outcome, Lost)
    return outcome


async def back_to(outbox: Outbox, block: int) -> Rewind:
    done = await outbox.rewind(await live(outbox), block, block_hash(block))
    assert isinstance(done, Rewind)
    return done


async def near_simulation(database: Database, number: int = 1) -> tuple[Outbox, Subscription]:
    """Block 1 has nothing; block 2 has `number` fundings, for one webhook."""
    await account(database)
    await vault(database, first_block=1)
    await cursors.open_stream(database, "logs", 0, block_hash(0))
    outbox, made = Outbox(database), await webhook(database)
    await seen(outbox, 1)
    await seen(outbox, 2, *(funding(n, block=2) for n in range(number)))
    return outbox, made


async def only_body(database: Database) -> bytes:
    (body,) = await values(database, "select body from events where orphaned_at is null")
    assert isinstance(body, bytes)
    return body


async def body_of(outbox: Outbox, observation: Observation) -> bytes:
    ((event,), _) = await events_of(outbox, [observation])
    return encode(event)


async def due(database: Database) -> Delivery:
    (delivery,) = (await take(database)).deliveries
    return delivery


async def test_what_was_not_sent_is_withdrawn_and_comes_back_with_the_new_block(any_database: Database) -> None:
    outbox, made = await near_simulation(any_database, 3)
    off = await webhook(any_database, vault_ids=["v1"])
    done = await back_to(outbox, 1)
    assert (done.since, done.to, len(done.orphaned), done.withdrawn) == (2, 1, 3, 3)
    assert await states(any_database) == {"withdrawn": 3}
    assert (await take(any_database)).deliveries == ()
    await assert_ledger(any_database)
    committed = await seen(outbox, 5, funding(0, block=5), funding(1, block=5), branch="b")
    assert committed == Committed(0, 2)
    assert await states(any_database) == {"scheduled": 2, "withdrawn": 1}
    assert {delivery.body for delivery in (await take(any_database)).deliveries} == {
        await body_of(outbox, funding(number, block=5)) for number in (0, 1)
    }
    assert await values(any_database, "select count(*)::int from events where orphaned_at is not null") == [1]
    assert await deliveries_of(any_database, off.id) == []  # whom an event concerns was decided when it first committed
    assert len(await deliveries_of(any_database, made.id)) == 3
    reported, overview = await gauges.read(any_database), await status.read(any_database)
    assert (reported.events_orphaned, reported.deliveries["withdrawn"]) == (1, 1)
    assert (overview.rewinds, overview.orphaned_events, len(overview.orphaned)) == (1, 1, 1)
    await assert_ledger(any_database)


async def test_an_event_that_stays_away_is_a_condition_until_it_is_back(database: Database) -> None:
    outbox, _ = await near_simulation(database)
    await back_to(outbox, 1)
    assert "VaulteventsEventsOrphaned" not in await raised(database)
    await shift_clock(database, 901)
    assert "VaulteventsEventsOrphaned" in await raised(database)
    await seen(outbox, 5, funding(0, block=5), branch="b")
    assert "VaulteventsEventsOrphaned" not in await raised(database)


async def test_a_final_reading_marks_and_costs_nothing(any_database: Database) -> None:
    outbox = await simple_simulation(any_database)
    await commit(outbox, funding(1, block=1))
    assert await values(any_database, "select near_head from events") == [False]
    assert await outbox.near_blocks("logs") == {}


async def test_hashes_are_kept_down_to_the_finalized_block(any_database: Database) -> None:
    outbox, _ = await near_simulation(any_database)
    assert (await outbox.near_blocks("logs")).keys() == {0, 1, 2}
    cursor, version = await live(outbox), (await outbox.registry()).version
    for number, final, final_hash, kept in (
        (3, 2, block_hash(2), {2, 3}),
        (4, 3, block_hash(3), {3, 4}),
        (5, 4, block_hash(4, "b"), {3, 4, 5}),  # another block 4 is final: ours proves nothing
    ):
        new = cursor.moved(number, block_hash(number))
        near = NearBlocks(final, final_hash, {number: block_hash(number)})
        assert isinstance(await outbox.commit(cursor, new, [], version, near=near), Committed)
        cursor = new
        assert (await outbox.near_blocks("logs")).keys() == kept


async def test_who_comes_too_late_rewinds_nothing(any_database: Database) -> None:
    outbox, _ = await near_simulation(any_database)
    stale = await live(outbox)
    await seen(outbox, 3)
    assert isinstance(await outbox.rewind(stale, 1, block_hash(1)), Lost)
    assert await states(any_database) == {"scheduled": 1}


@pytest.mark.parametrize(("change", "state"), [("off", "parked"), ("deleted", "cancelled")])
async def test_a_webhook_that_changed_meanwhile_is_minded(any_database: Database, change: str, state: str) -> None:
    outbox, made = await near_simulation(any_database)
    await back_to(outbox, 1)
    if change == "deleted":
        await webhooks.delete_webhook(any_database, "acme", made.id)
    else:
        async with any_database.transaction() as connection:
            await connection.execute("select from registry for update")
            await webhooks.disable_webhook(connection, made.id, "gone")
    await seen(outbox, 2, funding(0, block=2), branch="b")
    assert await states(any_database) == {state: 1}
    await assert_ledger(any_database)


@pytest.mark.parametrize(
    ("state", "status", "orphaned", "again"),
    [
        ("delivered", 200, "delivered", "delivered"),
        ("scheduled", 500, "withdrawn", "scheduled"),
        ("exhausted", 500, "exhausted", "exhausted"),
    ],
)
async def test_an_attempt_that_was_under_way_is_kept_and_the_bytes_with_it(
    any_database: Database, state: Any, status: int, orphaned: str, again: str
) -> None:
    outbox, _ = await near_simulation(any_database)
    under_way = await due(any_database)
    await back_to(outbox, 1)
    assert await states(any_database) == {"withdrawn": 1}
    assert (await settle(any_database, [settlement(under_way, state, status)])).held == 1
    assert await states(any_database) == {orphaned: 1}
    await assert_ledger(any_database)
    assert (await seen(outbox, 4, funding(0, block=4), branch="b")).near_head == 1
    assert await only_body(any_database) == under_way.body
    assert await states(any_database) == {again: 1}
    await assert_ledger(any_database)
    assert len((await back_to(outbox, 2)).orphaned) == 1, "it stands in block 4 now"
    await seen(outbox, 3, funding(0, block=3), branch="c")
    if again == "scheduled":
        assert (await due(any_database)).attempt == 2


async def test_an_attempt_that_nobody_settled_may_be_out(any_database: Database) -> None:
    outbox, _ = await near_simulation(any_database)
    lost = await due(any_database)
    await shift_clock(any_database, LEASE_S + 1)
    assert await leases.end_leases(any_database) == 1
    await back_to(outbox, 1)
    await seen(outbox, 3, funding(0, block=3), branch="b")
    assert (await due(any_database)).body == lost.body


async def test_a_claim_under_way_is_waited_for(database: Database) -> None:
    """It has the old bytes in hand, and shows in no lease before it commits."""
    outbox, _ = await near_simulation(database)
    async with database.transaction() as connection:
        (claimed, *_) = await connection.fetch(
            "select * from claim_due((10, $1, 60.0, 10, '', 10, '{}', '{}', '{}', '{}'))", uuid4()
        )
        await back_to(outbox, 1)
        coming = asyncio.create_task(seen(outbox, 3, funding(0, block=3), branch="b"))
        await until_waiting(database, 1)
    await coming
    assert await only_body(database) == claimed["body"]


Settling = Callable[[Connection], Awaitable[Any]]


def settling(delivery: Delivery, state: Any, status: int) -> Settling:
    settled = deliveries.as_rows([settlement(delivery, state, status, after_s=60.0)])
    return lambda connection: connection.fetchval("select settle_deliveries($1, false)", settled)


@pytest.mark.parametrize(("state", "status"), [("delivered", 200), ("scheduled", 500)])
async def test_a_return_that_meets_a_settle_under_way_sees_it(database: Database, state: Any, status: int) -> None:
    outbox, _ = await near_simulation(database)
    settle_it = settling(await due(database), state, status)
    await back_to(outbox, 1)
    async with database.transaction() as connection:
        await settle_it(connection)
        coming = asyncio.create_task(seen(outbox, 3, funding(0, block=3), branch="b"))
        await until_waiting(database, 1)
    await coming
    assert await states(database) == {state: 1}
    await assert_ledger(database)


@pytest.mark.parametrize(("state", "status"), [("delivered", 200), ("scheduled", 500)])
async def test_a_settle_that_meets_a_return_under_way_sees_it(database: Database, state: Any, status: int) -> None:
    """Nothing delivered stays in the queue, and no number of an attempt is used twice."""
    outbox, _ = await near_simulation(database)
    settle_it = settling(await due(database), state, status)
    await back_to(outbox, 1)
    found, _ = await events_of(outbox, [funding(0, block=3)])
    async with database.transaction() as connection:
        await reorgs.revive(connection, found)
        settled = asyncio.create_task(in_a_transaction(database, settle_it))
        await until_waiting(database, 1)
    await settled
    assert await states(database) == {state: 1}
    await assert_ledger(database)
    if state == "scheduled":
        assert await values(database, "select attempts from queue") == [1]


async def in_a_transaction(database: Database, what: Settling) -> None:
    async with database.transaction() as connection:
        await what(connection)


async def test_nobody_is_sent_or_shown_an_orphaned_event_again(any_database: Database) -> None:
    """Neither by `resend` nor by `recover`, nor is it in the feed until it is back."""
    outbox, made = await near_simulation(any_database)
    late = await webhook(any_database)
    (event_id,) = await deliveries_of(any_database, made.id)

    async def ask() -> tuple[object, int]:
        async with any_database.transaction() as connection:
            asked = await resends.request_resend(connection, "acme", made.id, event_id)
            return asked, (await resends.request_recovery(connection, "acme", late.id, 0, None)).count

    async def page(after: feed.FeedPosition | None = None) -> list[feed.FeedEvent]:
        async with any_database.transaction() as connection:
            return list(await feed.page(connection, "acme", 10, after=after))

    async def is_shown() -> bool:
        """The feed waits for every transaction of the server, so also for those of other tests."""
        return len(await page()) == 1

    async with any_database.transaction() as connection:
        await resends.request_resend(connection, "acme", made.id, event_id)
    await until_true(is_shown)
    (before,) = await page()
    await back_to(outbox, 1)
    assert (await ask(), await page()) == ((resends.Orphaned(), 0), [])
    assert await values(any_database, "select count(*)::int from resends") == [0]
    await seen(outbox, 3, funding(0, block=3), branch="b")
    asked, count = await ask()
    assert not isinstance(asked, resends.Orphaned | None)
    assert count == 1
    await until_true(is_shown)
    (again,) = await page(before.position)
    assert again.id == before.id, "who has read past it is shown it again"


async def test_a_resend_under_way_keeps_the_bytes(any_database: Database) -> None:
    outbox, made = await near_simulation(any_database)
    (event_id,) = await deliveries_of(any_database, made.id)
    async with any_database.transaction() as connection:
        await resends.request_resend(connection, "acme", made.id, event_id)
    (resend,) = (await resends.claim_resends(any_database, ClaimRequest(10, uuid4(), LEASE_S))).deliveries
    await back_to(outbox, 1)
    await shift_clock(any_database, LEASE_S + 1)
    assert await end_leases(any_database) == 1
    assert (await resends.claim_resends(any_database, ClaimRequest(10, uuid4(), LEASE_S))).deliveries == ()
    await seen(outbox, 3, funding(0, block=3), branch="b")
    assert await only_body(any_database) == resend.body
    (again,) = (await resends.claim_resends(any_database, ClaimRequest(10, uuid4(), LEASE_S))).deliveries
    assert again.body == resend.body
