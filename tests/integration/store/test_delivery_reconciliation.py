"""The ledger: what it proves, each way to break it, and a digest that two operators can compare (rules P9 and D14)."""

from __future__ import annotations

import hashlib

import pytest

from store_factories import (
    account,
    commit,
    funding,
    rows,
    settlement,
    simple_simulation,
    some_deliveries,
    take,
    webhook,
)
from vaultevents.core.errors import InputError
from vaultevents.store.deliveries import settle
from vaultevents.store.delivery_reconciliation import SHOWN_BREACHES, audit
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

ONE = "where id = (select min(id) from deliveries)"
FINISHED = "finished_at = db_now()"
POST = "insert into attempts select min(id), {number}, db_now(), 1, {status}, {error}, '' from deliveries"
OK = POST.format(number=1, status=200, error="null")
NO = POST.format(number=1, status=500, error="null")
UNBOUND = (
    "alter table deliveries drop constraint deliveries_event_seq_webhook_id_key,"
    " drop constraint deliveries_event_seq_fkey, drop constraint deliveries_webhook_id_fkey,"
    " drop constraint deliveries_state_check"
)

BROKEN = {
    "is missing": [f"delete from deliveries {ONE}"],
    "was never due": ["update events set suppressed = true"],
    "has more than one delivery": [
        "insert into deliveries (event_seq, webhook_id, state, finished_at)"
        f" select event_seq, webhook_id, 'delivered', db_now() from deliveries {ONE}"
    ],
    "its event is not there": [f"update deliveries set event_seq = -1 {ONE}"],
    "its webhook is not there": [f"update deliveries set webhook_id = 'nobody' {ONE}"],
    "is in a state that there is not": [f"update deliveries set state = 'lost' {ONE}"],
    "its number of attempts is not that of its attempt rows": [f"update deliveries set attempts = 1 {ONE}"],
    "its attempt rows are not numbered 1, 2, 3 …": [POST.format(number=2, status=500, error="null")],
    "an attempt has neither or both of status and error": [POST.format(number=1, status="null", error="null")],
    "delivered without a 2xx, or a 2xx without delivered": [
        f"update deliveries set state = 'delivered', attempts = 1, {FINISHED} {ONE}",
        NO,
    ],
    "attempted again after a 2xx": [OK, POST.format(number=2, status=200, error="null")],
    "exhausted without an attempt": [f"update deliveries set state = 'exhausted', {FINISHED} {ONE}"],
    "a resend is unfinished, but not in the queue": [
        f"insert into resends (webhook_id, event_seq, event_id) select webhook_id, event_seq, '' from deliveries {ONE}"
    ],
    "scheduled, but not in the queue": ["delete from queue where delivery_id = (select min(id) from deliveries)"],
    "in the queue, but not scheduled": [f"update deliveries set state = 'parked' {ONE}"],
    "finished without saying when, or the other way round": [f"update deliveries set finished_at = db_now() {ONE}"],
    "pending for a deleted webhook": ["update webhooks set deleted_at = db_now()"],
    "cancelled for a webhook that is there": [f"update deliveries set state = 'cancelled', {FINISHED} {ONE}"],
    "pending for an orphaned event": ["update events set orphaned_at = db_now()"],
    "withdrawn, but its event is not orphaned": [f"update deliveries set state = 'withdrawn', {FINISHED} {ONE}"],
    "due for a webhook that is off": ["update webhooks set active = false"],
    "parked for a webhook that is on": [f"update deliveries set state = 'parked' {ONE}"],
}


@pytest.mark.parametrize("problem", BROKEN)
async def test_each_broken_rule_is_seen(database: Database, problem: str) -> None:
    await some_deliveries(database, 2)
    async with database.transaction() as connection:
        assert (await audit(connection)).broken == 0
        await connection.execute(UNBOUND)
        for forgery in BROKEN[problem]:
            await connection.execute(forgery)
        found = await audit(connection)
    assert problem in {breach.problem for breach in found.breaches}


async def test_a_delivery_to_a_filter_that_did_not_match_was_never_due(any_database: Database) -> None:
    box = await simple_simulation(any_database)
    await webhook(any_database)
    other = await webhook(any_database, event_types=["withdrawal_claimed"])
    await commit(box, funding(1))
    async with any_database.transaction() as connection:
        await connection.execute("update deliveries set webhook_id = $1", other.id)
        found = await audit(connection)
    assert {(breach.webhook_id == other.id, breach.problem) for breach in found.breaches} == {
        (True, "was never due"),
        (False, "is missing"),
    }


async def test_all_breaches_are_counted_and_the_first_are_reported(database: Database) -> None:
    await some_deliveries(database, SHOWN_BREACHES + 5)
    async with database.transaction() as connection:
        await connection.execute("delete from deliveries")
        found = await audit(connection)
    assert (found.broken, len(found.breaches), found.states) == (SHOWN_BREACHES + 5, SHOWN_BREACHES, {})


async def test_a_digest_is_over_the_sorted_lines_of_an_account(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 5)
    await account(any_database, "zeta")
    first, *_ = (await take(any_database, 1)).deliveries
    await settle(any_database, [settlement(first)])
    stored = await rows(any_database, "select e.id, d.state from deliveries d join events e on e.seq = d.event_seq")
    lines = sorted(f"{row['id']} {one.id} {row['state']}\n".encode() for row in stored)
    async with any_database.transaction() as connection:
        acme, zeta = (await audit(connection)).accounts
        assert (await audit(connection, "acme")).accounts == (acme,)
    assert acme.digest == hashlib.sha256(b"".join(lines)).hexdigest()
    assert acme.states == {"delivered": 1, "scheduled": 4}
    assert (zeta.digest, zeta.states) == (hashlib.sha256().hexdigest(), {})


async def test_an_unknown_account_is_reported(database: Database) -> None:
    with pytest.raises(InputError, match="there is no account 'nobody'"):
        async with database.transaction() as connection:
            await audit(connection, "nobody")
