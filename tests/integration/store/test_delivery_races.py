"""Settlements, deletions and parkings of the same deliveries that meet: none waits for ever, each sees the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from store_factories import (
    assert_ledger,
    carry_out,
    change,
    settlement,
    some_deliveries,
    states,
    take,
    until_waiting,
)
from vaultevents.store.deliveries import settle
from vaultevents.store.pool import Database
from vaultevents.store.webhooks import delete_webhook

pytestmark = pytest.mark.integration


@asynccontextmanager
async def holding(database: Database, query: str, *arguments: object) -> AsyncIterator[None]:
    """Locks what others will need, so that they meet in the order of the scenario."""
    async with database.transaction() as held:
        await held.execute(query, *arguments)
        yield


async def test_a_parking_settle_and_a_delete_do_not_wait_for_each_other_for_ever(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 2)
    busy, _ = (await take(any_database)).deliveries
    async with holding(any_database, "select 1 from webhook_secrets for update"):
        deleting = asyncio.create_task(delete_webhook(any_database, "acme", one.id))
        await until_waiting(any_database, 1)
        attempt = settlement(busy, "scheduled", 429, after_s=600.0, park_s=600.0)
        settling = asyncio.create_task(settle(any_database, [attempt]))
        await until_waiting(any_database, 2)
    await deleting
    assert (await settling).held == 1
    assert await states(any_database) == {"cancelled": 2}
    await assert_ledger(any_database)


async def test_a_settle_and_a_cancelling_batch_take_rows_in_the_same_order(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 2)
    claimed = (await take(any_database)).deliveries
    # now row 1 lies behind row 2, in the table and in its indexes
    await change(any_database, "update queue set due_at = due_at + interval '1 s' where delivery_id = 1")
    await delete_webhook(any_database, "acme", one.id)
    async with holding(any_database, "select 1 from deliveries where id = 1 for update"):
        settling = asyncio.create_task(settle(any_database, [settlement(delivery) for delivery in claimed]))
        await until_waiting(any_database, 1)
        cancelling = asyncio.create_task(carry_out(any_database))
        await until_waiting(any_database, 2)
    assert (await settling).held == 2
    await cancelling
    assert await states(any_database) == {"delivered": 2}
    await assert_ledger(any_database)


async def test_a_parking_and_a_disabling_settle_do_not_wait_for_each_other_for_ever(any_database: Database) -> None:
    await some_deliveries(any_database, 4)
    first, second, *_ = (await take(any_database, 2)).deliveries
    async with holding(any_database, "select 1 from webhooks for no key update"):
        disabling = asyncio.create_task(settle(any_database, [settlement(first, "parked", 410, gone=True)]))
        await until_waiting(any_database, 1)
        hinted = settlement(second, "scheduled", 429, after_s=600.0, park_s=600.0)
        parking = asyncio.create_task(settle(any_database, [hinted]))
        await until_waiting(any_database, 2)
    assert ((await disabling).held, (await parking).held) == (1, 1)
    assert await states(any_database) == {"parked": 4}
    await assert_ledger(any_database)


@pytest.mark.parametrize("accepted", [True, False])
async def test_a_settle_that_meets_a_cancelling_batch_under_way_sees_it(any_database: Database, accepted: bool) -> None:
    _, one = await some_deliveries(any_database, 1)
    (delivery,) = (await take(any_database)).deliveries
    attempt = settlement(delivery) if accepted else settlement(delivery, "scheduled", 500, after_s=5.0)
    await delete_webhook(any_database, "acme", one.id)
    async with holding(any_database, "lock table flag_changes in share mode"):
        cancelling = asyncio.create_task(carry_out(any_database))
        await until_waiting(any_database, 1)
        settling = asyncio.create_task(settle(any_database, [attempt]))
        await until_waiting(any_database, 2)
    await cancelling
    assert (await settling).held == 1
    assert await states(any_database) == {"delivered" if accepted else "cancelled": 1}
    await assert_ledger(any_database)


@pytest.mark.parametrize("accepted", [True, False])
async def test_a_cancelling_batch_that_meets_a_settle_under_way_sees_it(any_database: Database, accepted: bool) -> None:
    _, one = await some_deliveries(any_database, 1)
    (delivery,) = (await take(any_database)).deliveries
    await change(
        any_database,
        "create function hold() returns trigger language plpgsql as"
        " $$ begin perform 1 from accounts for update; return new; end $$;"
        " create trigger t before insert on attempts for each row execute function hold()",
    )
    attempt = settlement(delivery) if accepted else settlement(delivery, "scheduled", 500, after_s=5.0)
    await delete_webhook(any_database, "acme", one.id)
    async with holding(any_database, "select 1 from accounts for update"):
        settling = asyncio.create_task(settle(any_database, [attempt]))
        await until_waiting(any_database, 1)
        cancelling = asyncio.create_task(carry_out(any_database))
        await until_waiting(any_database, 2)
    assert (await settling).held == 1
    await cancelling
    assert await states(any_database) == {"delivered" if accepted else "cancelled": 1}
    await assert_ledger(any_database)
