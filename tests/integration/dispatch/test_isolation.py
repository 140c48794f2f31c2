"""A dead receiver delays nobody and is switched off in the end; nothing is lost or sent twice (rules D7 and D8)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from step_up_factories import changing, enrolled
from store_factories import (
    assert_ledger,
    commit,
    funding,
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
from vaultevents.store import webhook_management
from vaultevents.store.deliveries import Delivery, Scarce, Settled, next_due_s, settle
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

HOUR_S = 3600.0


async def fail(database: Database, deliveries: Iterable[Delivery], after_s: float = 5.0) -> Settled:
    """Settles attempts that began now and were answered with 500."""
    now = await database.now()
    attempts = [settlement(delivery, "scheduled", 500, after_s=after_s) for delivery in deliveries]
    return await settle(database, [replace(attempt, started_at=now) for attempt in attempts])


async def succeed(database: Database, deliveries: Iterable[Delivery]) -> Settled:
    return await settle(database, [settlement(delivery) for delivery in deliveries])


async def reported(database: Database) -> list[tuple[str, str | None, int]]:
    """The notices for the operator so far: kind, reason and count, oldest first."""
    found = await rows(database, "select kind, reason, count from notices order by created_at, kind")
    return [(row["kind"], row["reason"], row["count"]) for row in found]


async def claimed(database: Database, limit: int = 500, per_webhook: int = 10) -> tuple[Delivery, ...]:
    return (await take(database, limit, per_webhook)).deliveries


async def in_turn(database: Database, limit: int, times: int) -> list[dict[str, int]]:
    """How many each webhook got in claims that go on where the one before has stopped."""
    shares, after = [], ""
    for _ in range(times):
        claim = await take(database, limit, 3, after)
        shares.append(dict(Counter(delivery.webhook_id for delivery in claim.deliveries)))
        after = claim.last
    return shares


async def test_no_webhook_has_more_in_flight_than_it_may(any_database: Database) -> None:
    await some_deliveries(any_database, 25)
    first = await claimed(any_database)
    assert len(first) == 10
    assert await claimed(any_database) == ()
    assert await next_due_s(any_database) is None  # the settlement queries again
    await succeed(any_database, first[:3])
    assert await next_due_s(any_database) == 0
    assert len(await claimed(any_database)) == 3
    await shift_clock(any_database, 61)  # the leases are over: what is left of a dead process comes again
    assert len(await claimed(any_database)) == 10


async def test_two_processes_together_give_a_webhook_no_more_than_it_may_have(any_database: Database) -> None:
    await some_deliveries(any_database, 100)
    shares = await asyncio.gather(*(claimed(any_database, 20) for _ in range(8)))
    assert sum(map(len, shares)) == 10


async def test_webhooks_take_turns(any_database: Database) -> None:
    outbox = await simple_simulation(any_database)
    one, two, three, four = sorted([(await webhook(any_database)).id for _ in range(4)])
    await commit(outbox, *(funding(number) for number in range(20)))
    assert await in_turn(any_database, 5, 4) == [{one: 3, two: 2}, {three: 3, four: 2}, {two: 1, four: 1}, {}]


async def test_where_slots_are_scarce_those_that_accepted_of_late_keep_theirs(any_database: Database) -> None:
    outbox = await simple_simulation(any_database)
    good, silent = sorted([(await webhook(any_database)).id for _ in range(2)])
    await commit(outbox, *(funding(number) for number in range(20)))
    claim = await take(any_database, 500, 10, scarce=Scarce(3, (good,)))
    assert Counter(delivery.webhook_id for delivery in claim.deliveries) == {good: 10, silent: 3}
    assert (await take(any_database, 500, 10, scarce=Scarce(2, ()))).deliveries == ()
    assert len((await take(any_database, 500, 10)).deliveries) == 7


async def test_first_attempts_never_wait_behind_retries(any_database: Database) -> None:
    outbox, _ = await some_deliveries(any_database, 4)
    await fail(any_database, await claimed(any_database), after_s=1.0)
    await shift_clock(any_database, 100)
    await commit(outbox, funding(50), funding(51))
    attempts = [delivery.attempt for delivery in await claimed(any_database, 3)]
    assert sorted(attempts) == [1, 1, 2]


async def test_after_five_failures_in_a_row_one_is_tried_after_each_pause(any_database: Database) -> None:
    outbox, dead = await some_deliveries(any_database, 8)
    healthy = await webhook(any_database)
    assert (await fail(any_database, await claimed(any_database, 4))).parked == ()
    last = await fail(any_database, await claimed(any_database, 1))
    assert [one.webhook_id for one in last.parked] == [dead.id]
    assert await claimed(any_database) == ()
    await commit(outbox, funding(60))
    assert [delivery.webhook_id for delivery in await claimed(any_database)] == [healthy.id]
    at_s = 0.0
    for pause_s in (30, 60, 120, 240, 480, 600, 600):
        due_s = await next_due_s(any_database)
        assert due_s is not None
        await shift_clock(any_database, at_s + pause_s - 2)
        assert [delivery for delivery in await claimed(any_database) if delivery.webhook_id == dead.id] == []
        at_s += pause_s + 1
        await shift_clock(any_database, at_s)
        probe = [delivery for delivery in await claimed(any_database) if delivery.webhook_id == dead.id]
        assert len(probe) == 1
        assert len((await fail(any_database, probe, after_s=1.0)).parked) == 1
    await assert_ledger(any_database)


async def test_a_success_ends_the_streak_and_releases_all(any_database: Database) -> None:
    await some_deliveries(any_database, 12)
    await fail(any_database, await claimed(any_database, 5))
    await shift_clock(any_database, 31)
    (probe,) = await claimed(any_database)
    await succeed(any_database, [probe])
    assert len(await claimed(any_database)) == 10
    assert await rows(any_database, "select failures, parks, parked_until, first_failure_at from webhooks") == [
        {"failures": 0, "parks": 0, "parked_until": None, "first_failure_at": None}
    ]


async def test_the_probe_is_the_oldest_delivery_that_is_due_retries_included(any_database: Database) -> None:
    """A receiver that refuses each first attempt would never be found well again by first attempts."""
    outbox, _ = await some_deliveries(any_database, 8)
    await fail(any_database, tried := await claimed(any_database, 5))
    await commit(outbox, funding(60))
    await shift_clock(any_database, 31)
    (probe,) = await claimed(any_database)
    assert (probe.id, probe.attempt) == (min(one.id for one in tried), 2)
    await succeed(any_database, [probe])
    assert sorted(delivery.attempt for delivery in await claimed(any_database)) == [1] * 4 + [2] * 4


async def test_ten_failures_at_once_park_once(any_database: Database) -> None:
    await some_deliveries(any_database, 12)
    assert len((await fail(any_database, await claimed(any_database))).parked) == 1
    assert await values(any_database, "select parks from webhooks") == [1]


async def test_a_receiver_that_is_down_for_five_days_is_switched_off_and_loses_nothing(any_database: Database) -> None:
    outbox, one = await some_deliveries(any_database, 30)
    heard_at: dict[int, list[tuple[str, str | None, int]]] = {}
    for hour in range(8 * 24):
        await shift_clock(any_database, hour * HOUR_S)
        if found := await claimed(any_database):
            before = await reported(any_database)
            await fail(any_database, found)
            if new := (await reported(any_database))[len(before) :]:
                heard_at[hour] = new
    assert heard_at == {60: [("webhook_failing", None, 1)], 120: [("webhook_disabled", "failing", 1)]}
    (stored,) = await rows(any_database, "select active, disabled_reason from webhooks")
    assert stored == {"active": False, "disabled_reason": "failing"}
    assert await states(any_database) == {"parked": 30}
    await commit(outbox, funding(70))  # while it is off: stored, and sent only if somebody asks for it
    assert await states(any_database) == {"parked": 30}
    acme = await enrolled(any_database)
    async with changing(any_database, acme) as change:
        await webhook_management.amend(change, one.id, {"active": True})
    while found := await claimed(any_database):
        await succeed(any_database, found)
    assert await states(any_database) == {"delivered": 30}
    assert await values(any_database, "select distinct failures from webhooks") == [0]
    assert (await reported(any_database))[2:] == [("webhook_enabled", None, 1)]
    await assert_ledger(any_database)


async def test_an_operator_hears_of_exhausted_deliveries_once_a_batch(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 7)
    first = await claimed(any_database, 4)
    await settle(any_database, [settlement(each, "exhausted", 500) for each in first])
    assert await reported(any_database) == [("delivery_exhausted", None, 4)]
    assert await values(any_database, "select webhook_id from notices") == [one.id]
    (other,) = await claimed(any_database, 1)
    await shift_clock(any_database, 120)
    (again,) = [delivery for delivery in await claimed(any_database) if delivery.id == other.id]
    assert (await settle(any_database, [settlement(other, "exhausted", 500)])).held == 0
    assert len(await reported(any_database)) == 1, "who lost the lease invents nothing"
    await settle(any_database, [settlement(again, "exhausted", 500)])
    assert (await reported(any_database))[1:] == [("delivery_exhausted", None, 1)]


async def test_sporadic_failures_never_switch_off(any_database: Database) -> None:
    """Half of all attempts fail for eight days."""
    outbox, _ = await some_deliveries(any_database, 1)
    failures = 0
    for hour in range(8 * 24):
        await shift_clock(any_database, hour * HOUR_S)
        await commit(outbox, funding(1000 + hour))
        first, *others = await claimed(any_database)
        assert (await fail(any_database, [first])).parked == ()
        failures += 1
        await succeed(any_database, others)
    assert failures == 8 * 24
    assert await values(any_database, "select active from webhooks") == [True]
    assert await values(any_database, "select failures from webhooks") <= [1]


async def test_a_pause_that_the_receiver_asked_for_outlives_a_success(any_database: Database) -> None:
    await some_deliveries(any_database, 5)
    busy, fine, *_ = await claimed(any_database, 2)
    await settle(any_database, [settlement(busy, "scheduled", 429, after_s=600.0, park_s=600.0)])
    await succeed(any_database, [fine])
    assert await claimed(any_database) == ()
    await shift_clock(any_database, 601)
    assert len(await claimed(any_database)) == 4
