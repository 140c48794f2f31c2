"""What an account reads of itself, its vaults, and the deliveries of its webhooks (rules A8, A19 and D14)."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from store_factories import (
    EARLIER,
    KEY,
    LEASE_S,
    account,
    address,
    assert_ledger,
    change,
    commit,
    funding,
    settlement,
    shift_clock,
    simple_simulation,
    some_deliveries,
    take,
    vault,
    webhook,
)
from vaultevents.core.errors import InputError
from vaultevents.core.sealing import Secret
from vaultevents.store import accounts, history, mfa
from vaultevents.store.deliveries import Delivery, Settlement, settle
from vaultevents.store.history import AttemptFacts, DeliveryFacts, DeliveryState, Failure, Health
from vaultevents.store.pool import Database
from vaultevents.store.webhooks import delete_webhook

pytestmark = pytest.mark.integration

NOTHING = Health(
    {"scheduled": 0, "parked": 0, "delivered": 0, "exhausted": 0, "cancelled": 0, "withdrawn": 0},
    oldest_pending_at=None,
    last_success_at=None,
    last_failure=None,
    failures_in_a_row=0,
)


def minute(number: int) -> datetime:
    return EARLIER + timedelta(minutes=number)


def accepted(delivery: Delivery, at: int) -> Settlement:
    return replace(settlement(delivery), started_at=minute(at))


def failed(
    delivery: Delivery,
    at: int,
    state: Literal["scheduled", "exhausted"] = "scheduled",
    status: int | None = 503,
    after_s: float = 0.0,
) -> Settlement:
    """An attempt with this answer, or without any; `after_s` seconds later comes the next."""
    error = "timeout" if status is None else None
    return replace(settlement(delivery, state, after_s=after_s), started_at=minute(at), status=status, error=error)


async def health(database: Database, webhook_id: str, account_id: str = "acme") -> Health:
    async with database.of_account(account_id) as connection:
        return await history.health(connection, account_id, webhook_id)


async def page(
    database: Database,
    webhook_id: str,
    *,
    state: DeliveryState | None = None,
    limit: int = 250,
    before_id: int | None = None,
) -> list[DeliveryFacts]:
    async with database.of_account("acme") as connection:
        return await history.deliveries(connection, "acme", webhook_id, state, limit, before_id)


async def one(
    database: Database, webhook_id: str, event_id: str, account_id: str = "acme"
) -> tuple[DeliveryFacts, list[AttemptFacts]] | None:
    async with database.of_account(account_id) as connection:
        return await history.delivery(connection, account_id, webhook_id, event_id)


async def test_a_webhook_without_deliveries_has_an_empty_history(any_database: Database) -> None:
    await simple_simulation(any_database)
    subscription = await webhook(any_database)
    assert await health(any_database, subscription.id) == NOTHING
    assert await page(any_database, subscription.id) == []


async def test_health_counts_what_was_delivered_and_what_fails(any_database: Database) -> None:
    _, subscription = await some_deliveries(any_database, 6)
    taken = sorted((await take(any_database)).deliveries, key=lambda delivery: delivery.id)
    good, bad, worse, worst, lost, slow = taken
    await settle(any_database, [accepted(good, 10), failed(bad, 5), failed(worse, 11), failed(lost, 12, "exhausted")])
    await settle(any_database, [failed(worst, 13, status=None)])
    pending = await page(any_database, subscription.id, state="scheduled")
    assert await health(any_database, subscription.id) == Health(
        {"scheduled": 4, "parked": 0, "delivered": 1, "exhausted": 1, "cancelled": 0, "withdrawn": 0},
        oldest_pending_at=min(facts.created_at for facts in pending),
        last_success_at=minute(10),
        last_failure=Failure(minute(13), None, "timeout"),
        failures_in_a_row=3,  # the one of minute 5 came before the success
    )

    again = (await take(any_database)).deliveries
    await settle(any_database, [accepted(delivery, 20) for delivery in (slow, *again)])
    found = await health(any_database, subscription.id)
    assert (found.last_success_at, found.failures_in_a_row) == (minute(20), 0)
    assert found.last_failure == Failure(minute(13), None, "timeout")
    assert found.oldest_pending_at is None
    await assert_ledger(any_database)


async def test_what_was_never_delivered_has_failed_from_the_beginning(any_database: Database) -> None:
    _, subscription = await some_deliveries(any_database, 1)
    for number in range(1, 4):
        (delivery,) = (await take(any_database)).deliveries
        await settle(any_database, [failed(delivery, number, status=500 + number)])
    found = await health(any_database, subscription.id)
    assert (found.last_success_at, found.failures_in_a_row) == (None, 3)
    assert found.last_failure == Failure(minute(3), 503, None)


async def test_a_long_queue_does_not_hide_what_happened_before_it(
    any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "LOOKED_AT", 2)
    monkeypatch.setattr(history, "COUNTED", 4)
    outbox, subscription = await some_deliveries(any_database, 3)
    good, bad, worse = sorted((await take(any_database)).deliveries, key=lambda delivery: delivery.id)
    await settle(any_database, [accepted(good, 1), failed(bad, 2), failed(worse, 3)])
    for number in range(10, 15):
        await commit(outbox, funding(number))
    found = await health(any_database, subscription.id)
    assert (found.last_success_at, found.failures_in_a_row) == (minute(1), 2)
    assert found.last_failure == Failure(minute(3), 503, None)
    assert found.deliveries["scheduled"] == 4  # of seven: what costs more to count is not counted


async def test_deliveries_page_from_the_newest_to_the_oldest(any_database: Database) -> None:
    outbox, subscription = await some_deliveries(any_database, 5)
    await webhook(any_database)
    await commit(outbox, *(funding(number) for number in (10, 11)))  # for both webhooks
    whole = await page(any_database, subscription.id)
    assert len(whole) == 7
    assert [facts.id for facts in whole] == sorted((facts.id for facts in whole), reverse=True)
    for limit in (1, 2, 7, 8):
        seen: list[DeliveryFacts] = []
        while found := await page(any_database, subscription.id, limit=limit, before_id=seen[-1].id if seen else None):
            assert len(found) <= limit
            seen += found
        assert seen == whole


async def test_deliveries_are_chosen_by_their_state(any_database: Database) -> None:
    _, subscription = await some_deliveries(any_database, 4)
    first, second, third, _ = sorted((await take(any_database)).deliveries, key=lambda delivery: delivery.id)
    await settle(any_database, [accepted(first, 1), accepted(third, 1), failed(second, 1, "exhausted")])
    assert [facts.id for facts in await page(any_database, subscription.id, state="delivered")] == [third.id, first.id]
    assert [facts.id for facts in await page(any_database, subscription.id, state="delivered", before_id=third.id)] == [
        first.id
    ]
    assert [facts.state for facts in await page(any_database, subscription.id, state="exhausted")] == ["exhausted"]
    assert await page(any_database, subscription.id, state="parked") == []


async def test_a_delivery_is_in_flight_while_its_lease_lasts(any_database: Database) -> None:
    _, subscription = await some_deliveries(any_database, 1)
    (waiting,) = await page(any_database, subscription.id)
    assert not waiting.in_flight
    assert waiting.next_attempt_at is not None
    assert abs(waiting.next_attempt_at - waiting.created_at) < timedelta(seconds=1)

    (delivery,) = (await take(any_database)).deliveries
    (leased,) = await page(any_database, subscription.id)
    assert leased == dataclasses.replace(waiting, in_flight=True, next_attempt_at=None)

    await shift_clock(any_database, LEASE_S + 1)  # its process died
    (left,) = await page(any_database, subscription.id)
    assert not left.in_flight
    assert left.next_attempt_at is not None

    await settle(any_database, [failed(delivery, 1, after_s=300)])
    (retried,) = await page(any_database, subscription.id)
    assert (retried.in_flight, retried.attempts, retried.finished_at) == (False, 1, None)
    assert retried.next_attempt_at is not None
    assert retried.next_attempt_at - await any_database.now() > timedelta(seconds=290)


async def test_one_delivery_reports_every_attempt(any_database: Database) -> None:
    _, subscription = await some_deliveries(any_database, 2)
    (event_id, other_id) = (facts.event_id for facts in await page(any_database, subscription.id))
    for number in range(1, 3):
        for delivery in (await take(any_database)).deliveries:
            if delivery.event_id == event_id:
                await settle(
                    any_database,
                    [failed(delivery, 1, status=None) if number == 1 else replace(accepted(delivery, 2), excerpt="ok")],
                )
    found = await one(any_database, subscription.id, event_id)
    assert found is not None
    facts, attempts = found
    assert (facts.event_id, facts.event_type) == (event_id, "funding_received")
    assert (facts.state, facts.attempts, facts.in_flight) == ("delivered", 2, False)
    assert facts.finished_at is not None
    assert attempts == [
        AttemptFacts(1, minute(1), 5, None, "timeout", "", "127.0.0.1"),
        AttemptFacts(2, minute(2), 5, 200, None, "ok", "127.0.0.1"),
    ]
    unattempted = await one(any_database, subscription.id, other_id)
    assert unattempted is not None
    assert unattempted[1] == []
    assert await one(any_database, subscription.id, "invented") is None


Reader = Callable[[Any, str, str, str], Awaitable[object]]

READERS: dict[str, tuple[Reader, object]] = {
    "health": (
        lambda connection, account_id, webhook_id, _: history.health(connection, account_id, webhook_id),
        NOTHING,
    ),
    "deliveries": (
        lambda connection, account_id, webhook_id, _: history.deliveries(
            connection, account_id, webhook_id, None, 250, None
        ),
        [],
    ),
    "delivery": (history.delivery, None),
}


@pytest.mark.parametrize("reader", READERS)
async def test_a_foreign_a_deleted_and_an_invented_webhook_are_reported_alike(
    any_database: Database, reader: str
) -> None:
    read, nothing = READERS[reader]
    _, subscription = await some_deliveries(any_database, 1)
    await account(any_database, "globex")
    (facts,) = await page(any_database, subscription.id)
    (delivery,) = (await take(any_database)).deliveries
    await settle(any_database, [accepted(delivery, 1)])
    async with any_database.of_account("acme") as connection:
        assert await read(connection, "acme", subscription.id, facts.event_id) != nothing
        assert await read(connection, "acme", "wh-invented", facts.event_id) == nothing
    async with any_database.of_account("globex") as connection:
        assert await read(connection, "acme", subscription.id, facts.event_id) == nothing  # the second wall alone
    async with any_database.transaction() as connection:
        assert await read(connection, "globex", subscription.id, facts.event_id) == nothing  # the first wall alone
    await delete_webhook(any_database, "acme", subscription.id)
    async with any_database.of_account("acme") as connection:
        assert await read(connection, "acme", subscription.id, facts.event_id) == nothing


async def test_an_account_reads_its_name_and_whether_it_can_step_up(any_database: Database) -> None:
    await account(any_database)
    await account(any_database, "globex")
    (stored, _) = await accounts.accounts(any_database)
    async with any_database.of_account("acme") as connection:
        assert await accounts.account_facts(connection, "acme") == (stored, False)
        with pytest.raises(InputError, match="there is no account 'globex'"):
            await accounts.account_facts(connection, "globex")
    await mfa.enroll(any_database, "acme", Secret("JBSWY3DPEHPK3PXP"), KEY, bytes(12))
    async with any_database.of_account("acme") as connection:
        assert await accounts.account_facts(connection, "acme") == (stored, True)


async def test_an_account_reads_the_vaults_that_it_has_now(any_database: Database) -> None:
    await account(any_database)
    await account(any_database, "globex")
    await vault(any_database, "v-b", queue="q", first_block=7)
    await vault(any_database, "V-C", first_block=3)
    await vault(any_database, "v-a", first_block=1)
    await vault(any_database, "gone", first_block=2)
    await vault(any_database, "foreign", account_id="globex")
    await accounts.remove_vault(any_database, "acme", "gone", 20)
    await accounts.remove_vault(any_database, "acme", "v-a", 20)
    await vault(any_database, "v-a", first_block=30)
    async with any_database.of_account("acme") as connection:
        found = await accounts.vaults_of(connection, "acme")
        assert await accounts.vaults_of(connection, "globex") == []
    assert [(item.id, item.address, item.queue, item.spans[-1].first) for item in found] == [
        ("V-C", address("V-C"), None, 3),  # capitals first, as Python compares, wherever the database was made
        ("v-a", address("v-a"), None, 30),
        ("v-b", address("v-b"), address("q"), 7),
    ]


DEEP = """
with made as (
    insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
        filter_revision)
    select 'acme', 'deep' || n, 'v1', 'funding_received', n, n, 1, '', false, 1 from generate_series(1, $2::integer) n
    returning seq
), due as (
    insert into deliveries (event_seq, webhook_id, state) select seq, $1, 'scheduled' from made order by seq
    returning id, event_seq, webhook_id
)
insert into queue (delivery_id, event_seq, webhook_id, due_at) select id, event_seq, webhook_id, db_now() from due
"""
READ = """
select sum(seq_scan) filter (where relname <> 'attempts')::int as scans,
    sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::int as rows
from pg_stat_xact_user_tables where schemaname = current_schema()
    and relname in ('events', 'deliveries', 'queue', 'attempts')
"""


async def test_health_costs_the_same_before_a_deep_queue(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind 10,000 pending deliveries it still finds the last success; no number above the limit is exact."""
    monkeypatch.setattr(history, "COUNTED", 500)
    monkeypatch.setattr(history, "LOOKED_AT", 100)
    _, made = await some_deliveries(database, 3)
    for delivery in (await take(database)).deliveries:
        await settle(database, [settlement(delivery)])
    await change(database, DEEP, made.id, 10_000)
    async with database.statement() as connection:
        await connection.execute("vacuum analyze deliveries, queue, events")
    for active in (True, False):
        await change(database, "update webhooks set active = $1", active)
        async with database.transaction() as connection:
            before = await connection.fetchrow(READ)
            found = await history.health(connection, "acme", made.id)
            after = await connection.fetchrow(READ)
        pending = {"scheduled": 500, "parked": 0} if active else {"scheduled": 0, "parked": 500}
        assert found.deliveries == {"delivered": 3, "exhausted": 0, "cancelled": 0, "withdrawn": 0, **pending}
        assert found.last_success_at is not None
        assert after["rows"] - before["rows"] < 4_000
        assert after["scans"] == before["scans"], "no table is read as a whole"
