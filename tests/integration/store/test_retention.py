"""Pruning: old finished deliveries go; the ledger, `recover` and replays remember them (rules D9, D11 and D13)."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest

from store_factories import (
    Subscription,
    assert_ledger,
    carry_out,
    change,
    commit,
    events_of,
    funding,
    ledger_problems,
    rows,
    settlement,
    shift_clock,
    simple_simulation,
    some_deliveries,
    states,
    take,
    values,
    webhook,
)
from vaultevents.core.errors import InputError
from vaultevents.core.spans import Span
from vaultevents.store import history, resends, retention
from vaultevents.store.deliveries import ClaimRequest, Settlement, settle
from vaultevents.store.delivery_reconciliation import Audit, audit
from vaultevents.store.outbox import Lost, Outbox
from vaultevents.store.pool import Database
from vaultevents.store.resends import claim_resends, settle_resends
from vaultevents.store.retention import Pruned
from vaultevents.store.webhooks import delete_webhook

pytestmark = pytest.mark.integration

DAY_S = 24 * 3600.0
MONTH = timedelta(days=30)
LATER_S = 31 * DAY_S


async def prune(database: Database, looked_at: int = 3, *, dry_run: bool = False) -> Pruned:
    return await retention.prune(database, MONTH, pause_s=0, dry_run=dry_run, looked_at=looked_at)


async def proof(database: Database) -> Audit:
    async with database.transaction() as connection:
        return await audit(connection)


async def delivered(database: Database, number: int) -> tuple[Outbox, Subscription]:
    """This many deliveries, accepted a good month ago."""
    simulation = await some_deliveries(database, number)
    await accept(database)
    await shift_clock(database, LATER_S)
    return simulation


async def next_event_is(database: Database, seq: int) -> None:
    async with database.transaction() as connection:
        await connection.execute(f"alter table events alter seq restart with {seq}")


async def accept(database: Database) -> None:
    await settle(database, [settlement(delivery) for delivery in (await take(database)).deliveries])


async def pruned_seqs(database: Database) -> list[int]:
    return await values(
        database, "select generate_series(lower(s), upper(s) - 1) from pruned, unnest(events) s order by 1"
    )


async def test_what_was_delivered_long_ago_goes_and_the_proof_stays_the_same(any_database: Database) -> None:
    outbox, _ = await delivered(any_database, 10)
    await commit(outbox, funding(100), funding(101))
    (fresh, _) = (await take(any_database)).deliveries
    await settle(any_database, [settlement(fresh)])
    before = await proof(any_database)
    assert await prune(any_database, dry_run=True) == Pruned(10, 10, 0)
    assert await proof(any_database) == before
    assert await prune(any_database) == Pruned(10, 10, 0)
    after = await proof(any_database)
    assert (after.broken, after.states, after.accounts) == (0, before.states, before.accounts)
    assert (before.pruned, after.pruned) == (0, 10)
    assert await states(any_database) == {"delivered": 1, "scheduled": 1}
    assert await values(any_database, "select count(*)::int from attempts") == [1]
    assert await values(any_database, "select count(*)::int from events") == [12]
    assert await prune(any_database) == Pruned()


async def test_only_what_is_finished_for_long_enough_goes(any_database: Database) -> None:
    await some_deliveries(any_database, 6)
    delivered_one, exhausted, parked, retried, *_ = (await take(any_database)).deliveries
    await settle(
        any_database,
        [
            settlement(delivered_one),
            settlement(exhausted, "exhausted", 500),
            settlement(parked, "parked", 500),
            settlement(retried, "scheduled", 500, after_s=1e6),
        ],
    )
    await shift_clock(any_database, 29 * DAY_S)
    assert await prune(any_database) == Pruned()
    await shift_clock(any_database, LATER_S)
    assert await prune(any_database) == Pruned(1, 1, 0)
    assert await states(any_database) == {"exhausted": 1, "parked": 1, "scheduled": 4 - 1}
    with pytest.raises(InputError, match="less than 1 day ago"):
        await retention.prune(any_database, timedelta(hours=23), pause_s=0)


async def test_what_a_deleted_webhook_left_goes_unless_it_is_in_flight(any_database: Database) -> None:
    _, gone = await some_deliveries(any_database, 4)
    (flying,) = (await take(any_database, 1)).deliveries
    await delete_webhook(any_database, "acme", gone.id)
    await carry_out(any_database)
    await shift_clock(any_database, LATER_S)
    before = await proof(any_database)
    assert await prune(any_database) == Pruned(3, 0, 0)
    await settle(any_database, [settlement(flying, "scheduled", 500, after_s=1.0)])
    after = await proof(any_database)
    assert (after.broken, after.accounts) == (0, before.accounts)
    assert await prune(any_database) == Pruned(1, 1, 0)
    await assert_ledger(any_database)


async def test_a_row_that_was_deleted_by_hand_is_still_missing(database: Database) -> None:
    """The negative control: the horizon hides nothing but what was pruned."""
    await delivered(database, 9)
    lost = "select event_seq from deliveries order by id offset 4 limit 1"
    (seq,) = await values(database, lost)
    (event_id,) = await values(database, "select id from events where seq = $1", seq)
    async with database.transaction() as connection:
        await connection.execute(
            "delete from attempts where delivery_id = (select id from deliveries where event_seq = $1)", seq
        )
        await connection.execute("delete from deliveries where event_seq = $1", seq)
    assert await prune(database) == Pruned(8, 8, 0)
    found = await proof(database)
    assert [(breach.event_id, breach.problem) for breach in found.breaches] == [(event_id, "is missing")]


FORGERIES = {
    "is missing": "update pruned set events = events - int8multirange(int8range(1, 2))",
    "was never due": "update events set suppressed = true where seq = 1",
    "its event is not there": "update pruned set events = events + int8multirange(int8range(900, 901))",
    "its webhook is not there": "update pruned set webhook_id = 'nobody'",
    "cancelled for a webhook that is there": "update pruned set state = 'cancelled'",
    "was due, and only recovered": "update pruned set recovered = true",
    "has more than one delivery": "insert into pruned select webhook_id, chunk, 'cancelled', false, events from pruned",
    "was pruned, and is there again": (
        "insert into deliveries (event_seq, webhook_id, state, finished_at)"
        " select 1, webhook_id, 'delivered', db_now() from pruned"
    ),
}


@pytest.mark.parametrize("problem", FORGERIES)
async def test_each_false_memory_is_seen(database: Database, problem: str) -> None:
    await delivered(database, 3)
    await prune(database)
    assert await pruned_seqs(database) == [1, 2, 3]
    async with database.transaction() as connection:
        await connection.execute(FORGERIES[problem])
        found = await ledger_problems(connection)
    assert any(item.endswith(problem) for item in found), found


async def test_killed_in_the_middle_it_goes_on_where_it_was(database: Database) -> None:
    await delivered(database, 10)
    before = await proof(database)

    def stop(looked_at: int, _: int) -> None:
        if looked_at >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await retention.prune(database, MONTH, pause_s=0, looked_at=3, progress=stop)
    assert await states(database) == {"delivered": 4}
    assert (await proof(database)).accounts == before.accounts
    assert await prune(database) == Pruned(4, 4, 0)
    assert (await proof(database)).accounts == before.accounts


async def test_several_at_once_share_the_work(database: Database) -> None:
    outbox = await simple_simulation(database)
    for _ in range(3):
        await webhook(database)
    await commit(outbox, *(funding(number) for number in range(100)))
    await accept(database)
    await shift_clock(database, LATER_S)
    before = await proof(database)
    shares = await asyncio.gather(*(prune(database, 20) for _ in range(4)))
    assert sum(shares, Pruned()) == Pruned(300, 300, 0)
    after = await proof(database)
    assert (after.broken, after.pruned, after.accounts) == (0, 300, before.accounts)


async def test_what_finishes_meanwhile_stays(database: Database) -> None:
    await some_deliveries(database, 5)
    claim = await take(database)
    await shift_clock(database, LATER_S)

    async def finish() -> None:
        for delivery in claim.deliveries:
            await settle(database, [settlement(delivery)])

    pruned, _ = await asyncio.gather(prune(database, 1), finish())
    assert pruned == Pruned()
    assert await states(database) == {"delivered": 5}
    await assert_ledger(database)


async def test_pages_of_history_go_over_what_was_pruned(database: Database) -> None:
    outbox, made = await delivered(database, 6)
    await commit(outbox, *(funding(number) for number in range(100, 104)))
    async with database.of_account("acme") as connection:
        first = await history.deliveries(connection, "acme", made.id, None, 3, None)
    await prune(database)
    async with database.of_account("acme") as connection:
        rest = await history.deliveries(connection, "acme", made.id, None, 3, first[-1].id)
    assert [len(first), len(rest)] == [3, 1]


async def test_a_replay_sends_nothing_that_was_pruned_again(database: Database) -> None:
    outbox, _ = await delivered(database, 4)
    await prune(database)
    cursor = await outbox.begin_replay("logs", Span(1, 1))
    found, version = await events_of(outbox, [funding(number) for number in range(4)])
    outcome = await outbox.commit(cursor, cursor.moved(1, None), found, version)
    assert not isinstance(outcome, Lost)
    assert (outcome.inserted, outcome.identical) == (0, 4)
    assert await states(database) == {}
    await assert_ledger(database)


async def recover(database: Database, made: Subscription) -> int:
    async with database.of_account("acme") as connection:
        return (await resends.request_recovery(connection, "acme", made.id, 0, None)).count


async def resend_all(database: Database, made: Subscription) -> None:
    async with database.of_account("acme") as connection:
        for event_id in await values(database, "select id from events order by seq"):
            await resends.request_resend(connection, "acme", made.id, event_id)


async def send(database: Database, status: int) -> int:
    """One attempt for every request that waits; how many were settled."""
    taken = (await claim_resends(database, ClaimRequest(100, uuid4(), 60.0, 100))).deliveries
    now = await database.now()
    settlements = [Settlement(resend, "exhausted", now, 5, status, None, "", None) for resend in taken]
    return await settle_resends(database, settlements)


async def test_recover_sends_nothing_that_was_pruned_and_still_all_that_was_missed(any_database: Database) -> None:
    outbox = await simple_simulation(any_database)
    await commit(outbox, funding(1))
    made = await webhook(any_database)  # it has missed the first
    await commit(outbox, funding(2), funding(3), funding(4))
    *accepted, refused = (await take(any_database)).deliveries
    await settle(any_database, [*map(settlement, accepted), settlement(refused, "exhausted", 500)])
    await shift_clock(any_database, LATER_S)
    assert await prune(any_database) == Pruned(2, 2, 0)
    assert await recover(any_database, made) == 2
    assert await send(any_database, 200) == 2
    await shift_clock(any_database, 2 * LATER_S)
    before = await proof(any_database)
    assert await prune(any_database) == Pruned(2, 1, 2)
    after = await proof(any_database)
    assert (after.broken, after.pruned, after.accounts) == (0, 4, before.accounts)
    assert await recover(any_database, made) == 0


async def test_the_memory_lies_in_short_rows_and_recover_finds_each(database: Database) -> None:
    """Each batch writes the rows to which it adds again, whole."""
    await next_event_is(database, 1022)
    _, made = await delivered(database, 4)
    assert await prune(database) == Pruned(4, 4, 0)
    assert await rows(database, "select chunk, events::text from pruned order by chunk") == [
        {"chunk": 0, "events": "{[1022,1024)}"},
        {"chunk": 1, "events": "{[1024,1026)}"},
    ]
    assert await recover(database, made) == 0
    await assert_ledger(database)


@pytest.mark.parametrize("status", [200, 500])
async def test_what_is_pruned_while_it_is_resent_is_not_made_again(database: Database, status: int) -> None:
    """The request was not there yet when the pruning looked. The two events lie in two rows of the memory."""
    await next_event_is(database, 1023)
    _, made = await delivered(database, 2)
    await resend_all(database, made)
    assert await prune(database) == Pruned()  # it is waited for
    async with database.transaction() as connection:
        await connection.execute("create table asked as select * from resends")
        await connection.execute("delete from resends")
    assert await prune(database) == Pruned(2, 2, 0)
    async with database.transaction() as connection:
        await connection.execute("insert into resends overriding system value select * from asked")
    assert await send(database, status) == 2
    assert await states(database) == {}
    await assert_ledger(database)


async def test_what_was_resent_of_late_is_kept_and_goes_with_its_resends(database: Database) -> None:
    _, made = await delivered(database, 2)
    await resend_all(database, made)
    async with database.of_account("acme") as connection:
        await resends.request_test(connection, "acme", made.id, "test_1", b"{}")
    await send(database, 200)
    assert await prune(database) == Pruned()
    await shift_clock(database, 2 * LATER_S)
    assert await prune(database, dry_run=True) == Pruned(2, 2, 3)
    assert await prune(database) == Pruned(2, 2, 3)
    assert await values(database, "select count(*)::int from resends") == [0]
    assert await rows(database, "select lower(events) as first, upper(events) as next from pruned") == [
        {"first": 1, "next": 3}
    ]
    await assert_ledger(database)


async def test_a_dry_run_over_many_is_estimated_from_samples(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first third is delivered long ago, the rest is exhausted: the estimate is right within a twentieth."""
    monkeypatch.setattr(retention, "SAMPLES", 50)
    monkeypatch.setattr(retention, "SAMPLED_AT_ONCE", 10)
    _, made = await some_deliveries(database, 1)
    await change(database, MANY, made.id, 9_000)
    await change(
        database,
        "insert into attempts (delivery_id, number, started_at, duration_ms, excerpt, status)"
        " select id, 1, db_now(), 5, '', 200 from deliveries where state = 'delivered'",
    )
    await shift_clock(database, LATER_S)
    steps: list[tuple[int, int]] = []
    found = await retention.prune(
        database, MONTH, pause_s=0, dry_run=True, progress=lambda looked_at, of: steps.append((looked_at, of))
    )
    assert found.estimated
    assert found.deliveries == pytest.approx(3_000, rel=0.05)
    assert found.attempts == found.deliveries
    assert steps[-1] == (50, 50)
    exact = await prune(database, looked_at=1_000)
    assert (exact.deliveries, exact.estimated) == (3_000, False)


MANY = """
with made as (
    insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
        filter_revision)
    select 'acme', 'many' || n, 'v1', 'funding_received', n, n, 1, '', true, 1 from generate_series(1, $2::integer) n
    returning seq
)
insert into deliveries (event_seq, webhook_id, state, finished_at)
select seq, $1, case when row_number() over (order by seq) <= $2 / 3 then 'delivered' else 'exhausted' end, db_now()
from made order by seq
"""
