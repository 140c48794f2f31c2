"""Resends, recoveries and tests, sent to real TLS receivers: one attempt each, and nothing else follows (rule D11)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from store_factories import (
    KEY,
    LEASE_S,
    Subscription,
    assert_ledger,
    carry_out,
    commit,
    deliveries_of,
    funding,
    ledger_problems,
    rows,
    settlement,
    shift_clock,
    simple_simulation,
    states,
    take,
    values,
    webhook,
)
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.webhook_health import Parking
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.receivers import (
    GONE,
    Behaviour,
    Hang,
    Hook,
    Receivers,
    Reply,
    always,
    in_turn,
    per_event,
    retry_after,
)
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import DeliveryLane, DispatchOptions, ResendLane, ResendOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.egress import Guard
from vaultevents.store import resends, webhooks
from vaultevents.store.clock import ServiceClock
from vaultevents.store.deliveries import ClaimRequest, Settlement, settle
from vaultevents.store.delivery_reconciliation import audit
from vaultevents.store.pool import Database
from vaultevents.store.registry import lock_registry

pytestmark = pytest.mark.integration

LOOPBACK = UrlRules(allow=(parse_allow("127.0.0.0/8:*"),))
UNFINISHED = "select count(*)::int from resends where finished_at is null"
ATE = (
    "select id, url, active, disabled_reason, failures, first_failure_at, parks, parked_until, warned_at from webhooks"
)


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    server = Receivers(tmp_path)
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def resending(database: Database, ca_path: Path, **options: Any) -> AsyncIterator[None]:
    """A running resender; at the end it is stopped, has drained, and the ledger adds up."""
    async with Sender(Guard(LOOPBACK), ca_file=ca_path, total_timeout_s=3) as sender:
        clock = ServiceClock(await database.now())
        running = Dispatcher(ResendLane(database, Signer({KEY.id: KEY}), ResendOptions(**options)), sender, clock)
        stop = asyncio.Event()
        task = asyncio.create_task(running.run(stop))
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(task, WAIT_TIMEOUT_S)
    await assert_ledger(database)


async def subscribe(
    database: Database, receivers: Receivers, behaviour: Behaviour | None = None, **filters: Any
) -> tuple[Hook, Subscription]:
    hook = receivers.hook(uuid4().hex, behaviour)
    made = await webhook(database, url=hook.url, **filters)
    hook.secret = made.secret
    return hook, made


async def resend(database: Database, made: Subscription, event_id: str) -> None:
    async with database.of_account("acme") as connection:
        assert await resends.request_resend(connection, "acme", made.id, event_id) is not None


async def recover(
    database: Database, made: Subscription, since_ms: int = 0, until_ms: int | None = None, looked_at: int = 1000
) -> resends.Recovery:
    async with database.of_account("acme") as connection:
        return await resends.request_recovery(connection, "acme", made.id, since_ms, until_ms, looked_at)


async def until_done(database: Database) -> None:
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while await values(database, UNFINISHED) != [0]:
            await asyncio.sleep(0.01)


async def settled(database: Database, state: Any, status: int) -> str:
    """One delivery attempted, with this outcome; the id of its event."""
    (delivery,) = (await take(database)).deliveries
    await settle(database, [settlement(delivery, state, status)])
    return delivery.event_id


async def test_a_resend_is_the_stored_row_signed_anew(any_database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(any_database)
    hook, made = await subscribe(any_database, receivers)
    await commit(box, funding(1))
    event_id = await settled(any_database, "delivered", 200)
    async with resending(any_database, receivers.ca_path):
        await resend(any_database, made, event_id)
        await until_done(any_database)
    (arrived,) = hook.ledger
    assert (arrived.webhook_id, arrived.verified) == (event_id, True)
    assert [arrived.body] == await values(any_database, "select body from events")
    assert arrived.headers["x-vaultevents-attempt"] == "2"
    (row,) = await rows(any_database, "select status, error, address, lease, first_byte_ms from resends")
    assert (row["status"], row["error"], row["address"], row["lease"]) == (200, None, "127.0.0.1", None)
    assert await states(any_database) == {"delivered": 1}


@pytest.mark.parametrize("before", ["exhausted", "scheduled", "parked", "delivered"])
@pytest.mark.parametrize("answered", [204, 500])
async def test_only_a_2xx_changes_a_delivery_and_nothing_hears_of_a_failure(
    database: Database, receivers: Receivers, before: str, answered: int
) -> None:
    box = await simple_simulation(database)
    _, made = await subscribe(database, receivers, always(Reply(answered)))
    await commit(box, funding(1))
    event_id = await settled(database, before, 200 if before == "delivered" else 503)
    if before == "parked":
        async with database.transaction() as connection:
            await lock_registry(connection)
            await webhooks.disable_webhook(connection, made.id, "failing")
    health = await rows(database, ATE)
    async with resending(database, receivers.ca_path):
        await resend(database, made, event_id)
        await until_done(database)
    after = "delivered" if answered == 204 else before
    assert await states(database) == {after: 1}
    assert await values(database, "select count(*)::int from queue") == [int(after == "scheduled")]
    assert await rows(database, ATE) == health
    assert await values(database, "select recovered from deliveries") == [False]


async def test_an_attempt_in_flight_keeps_its_result_beside_a_resend(database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(database)
    _, made = await subscribe(database, receivers)
    await commit(box, funding(1))
    (delivery,) = (await take(database)).deliveries
    async with resending(database, receivers.ca_path):
        await resend(database, made, delivery.event_id)
        await until_done(database)
    assert await states(database) == {"delivered": 1}
    assert (await settle(database, [settlement(delivery, "scheduled", 500, after_s=5.0)])).held == 1
    assert await states(database) == {"delivered": 1}
    assert await values(database, "select count(*)::int from queue") == [0]
    await assert_ledger(database)


async def test_a_failed_resend_is_never_retried_and_one_410_disables_nothing(
    database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(database)
    hook, made = await subscribe(database, receivers, always(GONE))
    await commit(box, funding(1))
    event_id = await settled(database, "exhausted", 500)
    async with resending(database, receivers.ca_path, poll_s=0.05):
        await resend(database, made, event_id)
        await until_done(database)
        await asyncio.sleep(0.3)
    assert len(hook.ledger) == 1
    assert await values(database, "select active from webhooks") == [True]


async def test_recover_sends_what_matches_now_and_is_neither_delivered_nor_pending(
    any_database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(any_database)
    hook, made = await subscribe(any_database, receivers, in_turn(Reply(500), Reply()), active=False)
    await commit(box, funding(1), funding(2))  # while it was off: no delivery
    async with any_database.transaction() as connection:
        await lock_registry(connection)
        await connection.execute("update webhooks set active = true")
        await webhooks.record_revision(connection, made.id)
    await commit(box, funding(3))
    await settled(any_database, "exhausted", 500)
    await commit(box, funding(4))
    await settled(any_database, "delivered", 200)
    await commit(box, funding(5))  # scheduled
    assert await recover(any_database, made) == resends.Recovery(3, None)
    assert await recover(any_database, made) == resends.Recovery(0, None), "they wait already"
    async with resending(any_database, receivers.ca_path, per_webhook=1):
        await until_done(any_database)
    assert len(hook.ledger) == 3
    states_of = await rows(any_database, "select recovered, state, count(*)::int as n from deliveries group by 1, 2")
    assert {(row["recovered"], row["state"]): row["n"] for row in states_of} == {
        (True, "exhausted"): 1,
        (True, "delivered"): 1,
        (False, "delivered"): 2,
        (False, "scheduled"): 1,
    }
    assert await recover(any_database, made) == resends.Recovery(1, None), "what failed can be recovered again"
    async with resending(any_database, receivers.ca_path):
        await until_done(any_database)
    assert await states(any_database) == {"delivered": 4, "scheduled": 1}


async def test_recover_keeps_to_its_range_and_to_the_present_filter(database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(database)
    _, claims = await subscribe(database, receivers, active=False, event_types=["withdrawal_claimed"])
    _, fundings = await subscribe(database, receivers, active=False, event_types=["funding_received"])
    _, elsewhere = await subscribe(database, receivers, active=False)
    await commit(box, *(funding(number, block=number) for number in range(1, 6)))
    times = await values(database, "select created_at_ms from events order by 1")
    async with database.transaction() as connection:
        await connection.execute("update webhooks set vault_ids = '{v2}' where id = $1", elsewhere.id)
    assert await recover(database, claims) == resends.Recovery(0, None)
    assert await recover(database, elsewhere) == resends.Recovery(0, None)
    assert await recover(database, fundings, times[1], times[3]) == resends.Recovery(2, None)
    named = await values(
        database, "select e.created_at_ms from resends r join events e on e.seq = r.event_seq order by 1"
    )
    assert named == times[1:3]


async def test_recover_goes_on_where_it_ended(database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(database)
    _, made = await subscribe(database, receivers, active=False)
    await commit(box, *(funding(number, block=1 + number // 2) for number in range(7)))  # two at a time
    since: int | None = 0
    counts = []
    while since is not None:
        found = await recover(database, made, since, looked_at=3)
        counts.append(found.count)
        since = found.next_since_ms
    assert counts == [4, 3, 0][: len(counts)]
    assert sum(counts) == 7
    assert await values(database, "select count(distinct event_seq)::int from resends") == [7]


async def test_a_pause_of_the_receiver_is_waited_for_and_a_park_is_not(
    database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(database)
    hook, made = await subscribe(database, receivers, in_turn(retry_after("3600"), Reply()))
    await commit(box, funding(1))
    event_id = await settled(database, "exhausted", 500)
    async with database.transaction() as connection:
        await connection.execute("update webhooks set parked_until = db_now() + interval '1 h', parks = 3")
    async with resending(database, receivers.ca_path, poll_s=0.05):
        await resend(database, made, event_id)
        await until_done(database)
        await resend(database, made, event_id)
        await asyncio.sleep(0.3)
        assert len(hook.ledger) == 1, "the receiver asked for an hour"
        await shift_clock(database, 3601)
        await until_done(database)
    assert len(hook.ledger) == 2


async def test_no_more_in_flight_than_a_webhook_may_have(database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(database)
    busy, made = await subscribe(database, receivers, always(Hang()), active=False)
    other_hook, other = await subscribe(database, receivers, active=False)
    await commit(box, *(funding(number) for number in range(12)))
    assert (await recover(database, made)).count == 12
    async with resending(database, receivers.ca_path, per_webhook=3, poll_s=0.05):
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while len(busy.ledger) < 3:
                await asyncio.sleep(0.01)
        assert (await recover(database, other)).count == 12
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while len(other_hook.ledger) < 12:
                await asyncio.sleep(0.01)
        assert len(busy.ledger) == 3
        busy.behaviour = always(Reply())
        await until_done(database)


async def test_a_lease_that_ended_is_attempted_again_and_the_late_result_counts_for_nothing(
    database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(database)
    hook, made = await subscribe(database, receivers)
    await commit(box, funding(1))
    event_id = await settled(database, "exhausted", 500)
    await resend(database, made, event_id)
    (lost,) = (await resends.claim_resends(database, ClaimRequest(10, uuid4(), LEASE_S))).deliveries
    assert (await resends.claim_resends(database, ClaimRequest(10, uuid4(), LEASE_S))).deliveries == ()
    await shift_clock(database, LEASE_S + 1)
    async with resending(database, receivers.ca_path):
        await until_done(database)
    assert len(hook.ledger) == 1
    late = Settlement(lost, "exhausted", await database.now(), 5, 500, None, "", None)
    assert await resends.settle_resends(database, [late]) == 0
    assert await values(database, "select status from resends") == [200]


async def test_a_secret_that_does_not_open_sends_nothing_and_disturbs_nobody(
    database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(database)
    broken_hook, broken = await subscribe(database, receivers, active=False)
    hook, made = await subscribe(database, receivers, active=False)
    await commit(box, funding(1))
    async with database.transaction() as connection:
        await connection.execute("update webhook_secrets set sealed = sha256('') where webhook_id = $1", broken.id)
    for one in (broken, made):
        assert (await recover(database, one)).count == 1
    async with resending(database, receivers.ca_path):
        await until_done(database)
    assert (broken_hook.ledger, len(hook.ledger)) == ([], 1)
    errors = await rows(database, "select webhook_id, error, status from resends")
    assert {row["webhook_id"]: (row["error"], row["status"]) for row in errors} == {
        broken.id: ("sealed", None),
        made.id: (None, 200),
    }


async def test_a_recovery_ends_the_pause_that_a_receiver_asked_for(
    any_database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(any_database)
    hook, made = await subscribe(any_database, receivers)
    _, other = await subscribe(any_database, receivers)
    await commit(box, funding(1), funding(2))
    claimed = (await take(any_database, per_webhook=1)).deliveries
    (refused,) = [delivery for delivery in claimed if delivery.webhook_id == made.id]
    await settle(any_database, [settlement(refused, "scheduled", 503, after_s=3600.0, park_s=3600.0)])
    assert (await recover(any_database, other)).count == 0, "the control: nothing holds back what is pending"
    assert (await recover(any_database, made)).count == 2, "one waits for its next attempt, one for the pause"
    assert (await recover(any_database, made)).count == 0, "a repeat asks for nothing"
    assert await values(any_database, "select paused_until from webhooks") == [None, None]
    async with resending(any_database, receivers.ca_path):
        await until_done(any_database)
    assert [request.webhook_id for request in hook.ledger] == [refused.event_id]
    assert [one.webhook_id for one in (await take(any_database)).deliveries if one.webhook_id == made.id] == [made.id]


async def test_with_its_webhook_goes_what_still_waits(database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(database)
    hook, made = await subscribe(database, receivers)
    await commit(box, funding(1))
    event_id = await settled(database, "exhausted", 500)
    await resend(database, made, event_id)
    await webhooks.delete_webhook(database, "acme", made.id)
    await carry_out(database)
    assert await values(database, "select count(*)::int from resends") == [0]
    assert await values(database, "select count(*)::int from queue") == [0]
    async with resending(database, receivers.ca_path):
        await asyncio.sleep(0.1)
    assert hook.ledger == []
    assert await deliveries_of(database, made.id) == [event_id]


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        ("update deliveries set recovered = false where recovered", "was never due"),
        ("update deliveries set recovered = true where not recovered", "was due, and only recovered"),
        ("update resends set status = 500", "delivered without a 2xx, or a 2xx without delivered"),
        ("update resends set error = 'reset'", "an attempt has neither or both of status and error"),
        ("delete from deliveries where recovered", "resent without a delivery"),
        ("update deliveries set state = 'parked', finished_at = null where recovered", "recovered, but not finished"),
        ("update deliveries set state = 'exhausted' where recovered", "delivered without a 2xx"),
    ],
)
async def test_the_ledger_catches_a_recovery_that_does_not_add_up(
    database: Database, receivers: Receivers, damage: str, reported: str
) -> None:
    box = await simple_simulation(database)
    _, made = await subscribe(database, receivers, active=False)
    await subscribe(database, receivers)
    await commit(box, funding(1))
    await settled(database, "delivered", 200)
    assert (await recover(database, made)).count == 1
    async with resending(database, receivers.ca_path):
        await until_done(database)
    async with database.transaction() as connection:
        await connection.execute(damage)
        assert any(reported in problem for problem in await ledger_problems(connection))


async def test_resends_beside_the_dispatcher_lose_and_double_nothing(database: Database, receivers: Receivers) -> None:
    """Every delivery fails, is retried and resent, at the same time: each ends once, and the queue is empty."""
    box = await simple_simulation(database)
    hook, made = await subscribe(database, receivers, per_event(Reply(500), Reply(500), Reply()))
    await commit(box, *(funding(number) for number in range(60)))
    event_ids = await deliveries_of(database, made.id)
    options = DispatchOptions(schedule_s=(0.01,) * 9, per_webhook=20, parking=Parking(after=10**9))
    async with Sender(Guard(LOOPBACK), ca_file=receivers.ca_path, total_timeout_s=5) as sender:
        clock, stop = ServiceClock(await database.now()), asyncio.Event()
        lane = DeliveryLane(database, Signer({KEY.id: KEY}), options, random.Random(1))
        dispatching = Dispatcher(lane, sender, clock)
        task = asyncio.create_task(dispatching.run(stop))
        async with resending(database, receivers.ca_path, per_webhook=20):
            for event_id in event_ids:
                await resend(database, made, event_id)
            await until_done(database)
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while await states(database) != {"delivered": 60}:
                    await asyncio.sleep(0.01)
        stop.set()
        await asyncio.wait_for(task, WAIT_TIMEOUT_S)
    assert {request.webhook_id for request in hook.accepted} == set(event_ids)
    assert await values(database, "select count(*)::int from queue") == [0]
    await assert_ledger(database)


async def test_without_its_queue_row_taken_out_a_resent_delivery_is_a_breach(
    database: Database, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build that forgets the queue is caught."""

    async def forget(*_: object) -> None:
        pass

    monkeypatch.setattr(resends, "_leave_queue", forget)
    box = await simple_simulation(database)
    _, made = await subscribe(database, receivers)
    await commit(box, funding(1))
    (event_id,) = await deliveries_of(database, made.id)
    with pytest.raises(AssertionError, match="in the queue, but not scheduled"):
        async with resending(database, receivers.ca_path):
            await resend(database, made, event_id)
            await until_done(database)


@pytest.mark.parametrize("leased", [False, True])
async def test_an_unfinished_request_without_its_queue_row_is_a_breach(
    database: Database, receivers: Receivers, leased: bool
) -> None:
    """Of a resend, of a recovery that has no delivery yet and of a test, also while an attempt is under way."""
    box = await simple_simulation(database)
    _, made = await subscribe(database, receivers, active=False)
    _, other = await subscribe(database, receivers)
    await commit(box, funding(1))
    await resend(database, other, await settled(database, "delivered", 200))
    assert (await recover(database, made)).count == 1
    async with database.of_account("acme") as connection:
        await resends.request_test(connection, "acme", made.id, "test-1", b"{}")
    if leased:
        claimed = await resends.claim_resends(database, ClaimRequest(10, uuid4(), LEASE_S))
        assert len(claimed.deliveries) == 3
    async with database.transaction() as connection:
        assert await ledger_problems(connection) == []
        await connection.execute("delete from queue")
        for account_id in (None, "acme"):
            found = await audit(connection, account_id)
            assert {(breach.webhook_id, breach.event_id is None) for breach in found.breaches} == {
                (made.id, False),
                (made.id, True),
                (other.id, False),
            }
            assert {breach.problem for breach in found.breaches} == {"a resend is unfinished, but not in the queue"}
