"""The queue: claims, leases, and what a finished attempt leads to (rules D3, D6, D14, D15, I22 and I35)."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime, timedelta

import pytest

from store_factories import (
    KEY,
    LEASE_S,
    account,
    assert_ledger,
    change,
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
    vault,
    webhook,
)
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.sealing import SealBroken, Secret, open_sealed, seal
from vaultevents.store import deliveries, status
from vaultevents.store.deliveries import Delivery, next_due_s, settle
from vaultevents.store.pool import Database
from vaultevents.store.rotation import sealed_key_ids
from vaultevents.store.status import count_by_state
from vaultevents.store.webhooks import delete_webhook, list_webhooks

pytestmark = pytest.mark.integration


async def due_in_s(database: Database, webhook_id: str | None = None) -> list[int]:
    """Seconds to each scheduled delivery of a webhook (of all), rounded, oldest delivery first."""
    return await values(
        database,
        "select round(extract(epoch from due_at - db_now()))::int from queue"
        " where webhook_id = $1 or $1 is null order by delivery_id",
        webhook_id,
    )


async def test_a_claim_has_all_that_an_attempt_needs(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 1)
    claim = await take(any_database)
    (delivery,) = claim.deliveries
    (event,) = await rows(any_database, "select id, body from events")
    assert (delivery.event_id, delivery.body) == (event["id"], event["body"])
    assert (delivery.webhook_id, delivery.target.url, delivery.attempt) == (one.id, one.webhook.url, 1)
    (secret,) = delivery.target.secrets
    assert secret.key_id == KEY.id
    assert open_sealed(KEY, secret.sealed, one.id).reveal() == one.secret
    assert claim.database_time is not None
    assert abs(claim.database_time - datetime.now(UTC)) < timedelta(seconds=5)


async def test_claims_take_the_longest_due_first_and_no_more_than_asked_for(any_database: Database) -> None:
    await some_deliveries(any_database, 5)
    await change(any_database, "update queue set due_at = db_now() - make_interval(secs => delivery_id % 4)")
    await change(any_database, "update queue set due_at = db_now() + interval '1 h' where delivery_id = 2")
    claimed = [{delivery.id for delivery in (await take(any_database, limit)).deliveries} for limit in (1, 2, 9, 9)]
    assert claimed == [{3}, {1, 5}, {4}, set()]
    assert [one.deliveries for one in (await take(any_database), await take(any_database))] == [(), ()]


async def test_two_claimers_share_the_work(any_database: Database) -> None:
    await some_deliveries(any_database, 200)

    taken: list[int] = []

    async def claim_all() -> int:
        mine = 0
        while len(taken) < 200:  # one claims nothing while the other one claims from the same webhook
            found = (await take(any_database, 7)).deliveries
            taken.extend(item.id for item in found)
            mine += len(found)
        return mine

    await asyncio.gather(next_due_s(any_database), next_due_s(any_database))  # so that both find a connection
    assert all(await asyncio.gather(claim_all(), claim_all()))
    assert sorted(taken) == list(range(1, 201))


async def test_a_lease_that_is_being_settled_is_neither_waited_for_nor_ended(any_database: Database) -> None:
    await some_deliveries(any_database, 3)
    assert len((await take(any_database, 2)).deliveries) == 2
    await shift_clock(any_database, LEASE_S + 1)
    async with any_database.transaction() as settling:
        await settling.execute("select from leases for update")
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            assert [delivery.id for delivery in (await take(any_database)).deliveries] == [3]
    assert sorted(delivery.id for delivery in (await take(any_database)).deliveries) == [1, 2]


async def test_leases_that_ended_leave_nothing_behind(any_database: Database) -> None:
    """Not even for a webhook that is gone, whose process died."""
    _, one = await some_deliveries(any_database, 2)
    await take(any_database)
    await delete_webhook(any_database, "acme", one.id)
    assert await values(any_database, "select cardinality(delivery_ids) from leases") == [2]
    await shift_clock(any_database, LEASE_S + 1)
    await take(any_database)
    assert await values(any_database, "select 1 from leases") == []
    assert await values(any_database, "select 1 from queue") == []
    await assert_ledger(any_database)


async def test_a_lease_ends_delivery_by_delivery(any_database: Database) -> None:
    await some_deliveries(any_database, 3)
    one, two, three = (await take(any_database)).deliveries
    for each, left in ((one, [[two.id, three.id]]), (three, [[two.id]]), (two, [])):
        assert (await settle(any_database, [settlement(each)])).held == 1
        assert (await settle(any_database, [settlement(each)])).held == 0
        assert [sorted(ids) for ids in await values(any_database, "select delivery_ids from leases")] == left
    await assert_ledger(any_database)


async def test_of_one_batch_those_that_lost_their_lease_change_nothing(any_database: Database) -> None:
    await some_deliveries(any_database, 4)
    frozen = (await take(any_database, 2)).deliveries
    await shift_clock(any_database, LEASE_S + 1)
    others = (await take(any_database)).deliveries
    assert len(others) == 4
    held = [other for other in others if other.id not in {each.id for each in frozen}]
    batch = [*(settlement(one, "exhausted", 500) for one in frozen), *(settlement(one) for one in held)]
    assert (await settle(any_database, batch)).held == 2
    assert await states(any_database) == {"delivered": 2, "scheduled": 2}
    assert (await settle(any_database, [settlement(other) for other in others])).held == 2
    assert await states(any_database) == {"delivered": 4}
    await assert_ledger(any_database)


async def test_a_claim_reads_no_more_than_is_due(any_database: Database) -> None:
    """Rule I23: what is scheduled for later lies behind what is due in the index, and is not looked at."""
    _, one = await some_deliveries(any_database, 3)
    await change(
        any_database,
        "insert into queue (delivery_id, event_seq, webhook_id, attempts, due_at)"
        " select 1000 + n, 1, $1, n % 3, db_now() + interval '1 h' from generate_series(1, 3000) as n",
        one.id,
    )
    async with any_database.transaction() as connection:
        claiming = "select * from claim_due((10, gen_random_uuid(), 60, 10, '', 10, '{}', '{}', '{}', '{}'))"
        assert len(await connection.fetch(claiming)) == 3
        read = await connection.fetchrow(
            "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relid = 'queue'::regclass"
        )
    assert read["seq_tup_read"] == 0
    assert read["idx_tup_fetch"] < 30


async def frozen_sender(database: Database) -> None:
    """Rule I35: a sender is frozen past its lease, another delivers, and then the first one wakes up."""
    await some_deliveries(database, 1)
    (frozen,) = (await take(database)).deliveries
    await shift_clock(database, LEASE_S - 1)
    assert (await take(database)).deliveries == ()
    await shift_clock(database, LEASE_S + 1)
    (other,) = (await take(database)).deliveries
    assert (other.id, other.attempt) == (frozen.id, 1)
    assert other.lease != frozen.lease
    assert (await settle(database, [settlement(frozen, "scheduled", 500, after_s=5.0)])).held == 0
    assert (await settle(database, [settlement(other)])).held == 1
    before = await rows(database, "select * from deliveries"), await rows(database, "select * from attempts")
    assert (await settle(database, [settlement(frozen, "exhausted", 500)])).held == 0
    assert (await rows(database, "select * from deliveries"), await rows(database, "select * from attempts")) == before
    assert await states(database) == {"delivered": 1}
    await assert_ledger(database)


async def test_who_lost_the_lease_changes_nothing(any_database: Database) -> None:
    await frozen_sender(any_database)


async def test_without_the_lease_guard_it_would(database: Database) -> None:
    """Negative control of the test above."""
    (guarded,) = await values(
        database, "select pg_get_functiondef('settle_deliveries(settlement[], boolean)'::regprocedure)"
    )
    unguarded = guarded.replace("case when settled <@ delivery_ids then settled", "case when true then settled")
    unguarded = unguarded.replace(" and l.token = n.token", "")
    assert unguarded != guarded
    await change(database, unguarded)
    with pytest.raises(AssertionError):
        await frozen_sender(database)


async def test_who_lost_the_lease_parks_and_disables_nothing(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 1)
    (frozen,) = (await take(any_database)).deliveries
    await shift_clock(any_database, LEASE_S + 1)
    (other,) = (await take(any_database)).deliveries
    late = [settlement(frozen, "scheduled", 429, park_s=600.0), settlement(frozen, "parked", 410, gone=True)]
    assert [(await settle(any_database, [attempt])).held for attempt in late] == [0, 0]
    assert await values(any_database, "select paused_until from webhooks") == [None]
    assert [stored.webhook for stored in await list_webhooks(any_database, "acme")] == [one.webhook]
    assert (await settle(any_database, [settlement(other)])).held == 1
    await assert_ledger(any_database)


async def test_the_states_that_attempts_lead_to(any_database: Database) -> None:
    await some_deliveries(any_database, 4)
    one, two, three, four = sorted((await take(any_database)).deliveries, key=lambda each: each.id)
    failed = settlement(two, "scheduled", 500, after_s=300.0)
    assert (await settle(any_database, [settlement(one), failed, settlement(three, "exhausted", 404)])).held == 3
    found = await rows(
        any_database,
        "select d.id, d.state, d.attempts, l.token, d.finished_at is not null as done"
        " from deliveries d left join leases l on d.id = any (l.delivery_ids)",
    )
    assert [tuple(row.values()) for row in sorted(found, key=lambda row: row["id"])] == [
        (1, "delivered", 1, None, True),
        (2, "scheduled", 1, None, False),
        (3, "exhausted", 1, None, True),
        (4, "scheduled", 0, four.lease, False),
    ]
    assert await due_in_s(any_database) == [300, 0]
    async with any_database.statement() as connection:
        assert await count_by_state(connection) == {"delivered": 1, "scheduled": 2, "exhausted": 1}
    assert (await settle(any_database, [])).held == 0
    await assert_ledger(any_database)


async def test_attempts_are_written_once_each_and_stay(any_database: Database) -> None:
    await some_deliveries(any_database, 1)
    seen: list[dict[str, object]] = []
    for number, status_code in enumerate((500, 503, 200), 1):
        (delivery,) = (await take(any_database)).deliveries
        assert delivery.attempt == number
        done = settlement(delivery, "delivered" if status_code == 200 else "scheduled", status_code)
        assert (await settle(any_database, [done])).held == 1
        assert (await settle(any_database, [done])).held == 0  # the answer to the first COMMIT may have been lost
        now = await rows(any_database, "select * from attempts order by number")
        assert now[:-1] == seen
        assert (now[-1]["number"], now[-1]["status"]) == (number, status_code)
        seen = now
    assert (await take(any_database)).deliveries == ()
    await assert_ledger(any_database)


async def test_an_attempt_without_a_status_has_an_error(any_database: Database) -> None:
    await some_deliveries(any_database, 1)
    (delivery,) = (await take(any_database)).deliveries
    attempt = deliveries.Settlement(delivery, "scheduled", datetime.now(UTC), 15_000, None, "timeout", "", None, 5.0)
    assert (await settle(any_database, [attempt])).held == 1
    (row,) = await rows(any_database, "select status, error, duration_ms, address from attempts")
    assert row == {"status": None, "error": "timeout", "duration_ms": 15_000, "address": None}
    await assert_ledger(any_database)


async def test_a_deleted_webhook_gets_at_most_what_is_in_flight_and_its_result_is_kept(any_database: Database) -> None:
    outbox, one = await some_deliveries(any_database, 3)
    accepted, refused = (await take(any_database, 2)).deliveries
    await delete_webhook(any_database, "acme", one.id)
    assert await states(any_database) == {"cancelled": 3}
    assert (await take(any_database)).deliveries == ()
    assert await values(any_database, "select 1 from webhook_secrets") == []
    assert await list_webhooks(any_database, "acme") == []
    assert (
        await settle(any_database, [settlement(accepted), settlement(refused, "scheduled", 500, after_s=5.0)])
    ).held == 2
    assert await states(any_database) == {"cancelled": 2, "delivered": 1}
    assert sorted(await values(any_database, "select status from attempts")) == [200, 500]
    await commit(outbox, funding(9))
    assert await states(any_database) == {"cancelled": 2, "delivered": 1}
    await shift_clock(any_database, 10 * LEASE_S)
    assert (await take(any_database)).deliveries == ()
    await assert_ledger(any_database)


async def test_one_answer_410_disables_and_parks_everything(any_database: Database) -> None:
    outbox, one = await some_deliveries(any_database, 5)
    gone, flying, accepted = (await take(any_database, 3)).deliveries
    other = await webhook(any_database)
    await commit(outbox, funding(10))
    assert (await settle(any_database, [settlement(gone, "parked", 410, gone=True)])).held == 1
    assert await states(any_database) == {"parked": 6, "scheduled": 1}
    assert await values(any_database, "select distinct webhook_id from deliveries where state = 'parked'") == [one.id]
    (stored,) = [each for each in await list_webhooks(any_database, "acme") if each.webhook.id == one.id]
    assert (stored.webhook.active, stored.disabled_reason) == (False, "gone")
    assert await values(any_database, "select active from webhook_revisions order by revision") == [True, True, False]
    # what was in flight ends as it ends, but is not tried again
    done = [settlement(flying, "scheduled", 500, after_s=5.0), settlement(accepted)]
    assert (await settle(any_database, done)).held == 2
    assert await states(any_database) == {"parked": 5, "scheduled": 1, "delivered": 1}
    await commit(outbox, funding(11))
    assert [delivery.webhook_id for delivery in (await take(any_database)).deliveries] == [other.id, other.id]
    await assert_ledger(any_database)


async def test_answers_410_in_one_batch_and_from_two_senders_disable_once(any_database: Database) -> None:
    await some_deliveries(any_database, 4)
    one, two, three, four = (await take(any_database)).deliveries
    batches = [[one, two], [three, four]]
    done = await asyncio.gather(
        *(settle(any_database, [settlement(each, "parked", 410, gone=True) for each in batch]) for batch in batches)
    )
    assert [outcome.held for outcome in done] == [2, 2]
    assert await states(any_database) == {"parked": 4}
    assert await values(any_database, "select count(*)::int from webhook_revisions") == [2]
    await assert_ledger(any_database)


async def test_a_parked_last_attempt_is_exhausted(any_database: Database) -> None:
    await some_deliveries(any_database, 2)
    gone, last = (await take(any_database)).deliveries
    await settle(any_database, [settlement(gone, "parked", 410, gone=True)])
    await settle(any_database, [settlement(last, "exhausted", 500)])
    assert await states(any_database) == {"parked": 1, "exhausted": 1}
    await assert_ledger(any_database)


async def test_retry_after_parks_the_whole_webhook_and_no_other(any_database: Database) -> None:
    outbox, one = await some_deliveries(any_database, 4)
    other = await webhook(any_database)
    await commit(outbox, funding(10))
    await change(any_database, "update queue set due_at = db_now() + interval '1 h' where delivery_id = 4")
    busy, _ = (await take(any_database, 2)).deliveries
    assert busy.webhook_id == one.id
    hinted = settlement(busy, "scheduled", 429, after_s=600.0, park_s=600.0)
    assert (await settle(any_database, [hinted])).held == 1
    await commit(outbox, funding(11))
    assert [delivery.webhook_id for delivery in (await take(any_database)).deliveries] == [other.id] * 2
    await shift_clock(any_database, 599)
    assert {delivery.webhook_id for delivery in (await take(any_database)).deliveries} == {
        other.id
    }  # its leases are over
    await shift_clock(any_database, 601)
    assert [delivery.webhook_id for delivery in (await take(any_database)).deliveries] == [one.id] * 5
    await shift_clock(any_database, 3601)
    assert len((await take(any_database)).deliveries) == 6 + 2
    await assert_ledger(any_database)


async def test_of_several_hints_the_longest_holds(any_database: Database) -> None:
    await some_deliveries(any_database, 4)
    one, two, three, _ = (await take(any_database)).deliveries
    hints = [(one, 50.0), (two, 700.0)]
    await settle(any_database, [settlement(each, "scheduled", 429, after_s=s, park_s=s) for each, s in hints])
    await settle(any_database, [settlement(three, "exhausted", 503, park_s=20.0)])
    assert await values(
        any_database, "select round(extract(epoch from paused_until - db_now()))::int from webhooks"
    ) == [700]
    due_s = await next_due_s(any_database)
    assert due_s is not None
    assert 690 < due_s <= 700


async def test_what_is_in_flight_when_its_webhook_is_parked_is_not_tried_before(any_database: Database) -> None:
    """It failed with another answer, or its sender died: neither is a reason to disturb the receiver earlier."""
    await some_deliveries(any_database, 3)
    busy, failed, orphan = (await take(any_database)).deliveries
    await settle(any_database, [settlement(busy, "scheduled", 429, after_s=600.0, park_s=600.0)])
    await settle(any_database, [settlement(failed, "scheduled", 500, after_s=5.0)])
    await shift_clock(any_database, 590)
    assert (await take(any_database)).deliveries == ()
    due_s = await next_due_s(any_database)
    assert due_s is not None
    assert 5 < due_s <= 10
    await shift_clock(any_database, 601)
    assert {delivery.id for delivery in (await take(any_database)).deliveries} == {busy.id, failed.id, orphan.id}


async def test_parked_rows_do_not_stand_in_the_way_of_others(any_database: Database) -> None:
    """Rule I23: a claim that meets only such rows still makes progress."""
    outbox, one = await some_deliveries(any_database, 30)
    other = await webhook(any_database)
    await commit(outbox, funding(99))
    await change(any_database, "update webhooks set paused_until = db_now() + interval '1 h' where id = $1", one.id)
    found: list[Delivery] = []
    for _ in range(4):
        found += (await take(any_database, 10)).deliveries
    assert [item.webhook_id for item in found] == [other.id]


async def test_both_secrets_of_a_rotation_are_there_until_the_old_one_ends(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 1)
    newer = seal(KEY, Secret("whsec_bmV3"), one.id, bytes(12))
    await change(any_database, "update webhook_secrets set valid_until = db_now() + interval '1 h'")
    await change(any_database, "insert into webhook_secrets values ($1, db_now(), $2, $3)", one.id, KEY.id, newer)

    async def secrets() -> list[str]:
        (delivery,) = (await take(any_database, 1)).deliveries
        return [open_sealed(KEY, secret.sealed, delivery.webhook_id).reveal() for secret in delivery.target.secrets]

    assert await secrets() == ["whsec_bmV3", one.secret]
    await shift_clock(any_database, 3601)
    assert await secrets() == ["whsec_bmV3"]


async def dump(database: Database) -> str:
    """Every value of every table, bytes as hex."""
    names = await values(database, "select tablename from pg_tables where schemaname = current_schema")
    return "\n".join([str(row) for name in names for row in await values(database, f"select t::text from {name} t")])


def spellings(secret: str) -> list[str]:
    encoded = secret.removeprefix("whsec_")
    raw = base64.b64decode(encoded)
    return ["whsec_", encoded, secret.encode().hex(), encoded.encode().hex(), raw.hex(), b"whsec_".hex()]


async def test_no_secret_can_be_read_from_the_database(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 1)
    text = await dump(any_database)
    assert one.id in text
    assert [word for word in spellings(one.secret) if word in text] == []
    assert await sealed_key_ids(any_database) == {KEY.id}
    # a sealed secret is good for its own webhook only
    two = await webhook(any_database)
    sealed = await values(any_database, "select sealed from webhook_secrets where webhook_id = $1", one.id)
    with pytest.raises(SealBroken):
        open_sealed(KEY, sealed[0], two.id)
    await change(any_database, "update accounts set name = $1", one.secret)  # negative control
    assert len([word for word in spellings(one.secret) if word in await dump(any_database)]) == 2


async def test_when_the_next_one_is_due(any_database: Database) -> None:
    outbox = await simple_simulation(any_database)
    assert await next_due_s(any_database) is None
    one = await webhook(any_database)
    await commit(outbox, funding(1), funding(2))
    assert await next_due_s(any_database) == 0
    first, second = (await take(any_database)).deliveries
    assert await next_due_s(any_database) is None
    await settle(any_database, [settlement(first, "scheduled", 500, after_s=30.0), settlement(second)])
    due_s = await next_due_s(any_database)
    assert due_s is not None
    assert 25 < due_s <= 30
    await shift_clock(any_database, 40)
    assert await next_due_s(any_database) == 0
    overview = await status.read(any_database)
    assert overview.oldest_pending_s is not None
    assert 40 <= overview.oldest_pending_s < 50
    await delete_webhook(any_database, "acme", one.id)
    assert await next_due_s(any_database) is None
    assert (await status.read(any_database)).oldest_pending_s is None


async def test_a_step_of_the_clock_moves_schedules_only_by_itself(any_database: Database) -> None:
    """Rules D15 and P11: with the database's clock an hour back nothing is early, and nothing is stuck afterwards."""
    await some_deliveries(any_database, 2)
    first, _ = (await take(any_database)).deliveries
    await settle(any_database, [settlement(first, "scheduled", 500, after_s=5.0)])
    await shift_clock(any_database, -3600)
    assert (await take(any_database)).deliveries == ()
    await shift_clock(any_database, LEASE_S + 1)
    assert len((await take(any_database)).deliveries) == 2


async def test_claims_of_two_accounts_stay_their_own(any_database: Database) -> None:
    outbox, one = await some_deliveries(any_database, 1)
    await account(any_database, "umbra")
    await vault(any_database, "u1", account_id="umbra", at="v1", first_block=1)
    two = await webhook(any_database, account_id="umbra")
    await commit(outbox, funding(7))
    claimed = {
        (delivery.webhook_id, delivery.event_id.split("_")[2]) for delivery in (await take(any_database)).deliveries
    }
    assert claimed == {(one.id, "acme"), (two.id, "umbra")}
    await assert_ledger(any_database)
