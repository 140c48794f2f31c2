"""Notices for the operator: stored with the change that they report, folded, leased."""

from __future__ import annotations

from uuid import uuid4

import pytest

from store_factories import rows, shift_clock, simple_simulation, webhook
from vaultevents.store.notices import Notice, claim_notices, finish, forget, postpone, record
from vaultevents.store.pool import Database
from vaultevents.store.registry import lock_registry
from vaultevents.store.webhooks import disable_webhook

pytestmark = pytest.mark.integration


async def test_switching_off_leaves_one_notice_with_its_reason(database: Database) -> None:
    await simple_simulation(database)
    subscription = await webhook(database)
    async with database.transaction() as connection:
        await lock_registry(connection)
        await disable_webhook(connection, subscription.id, "gone")
        await disable_webhook(connection, subscription.id, "failing")  # somebody else was quicker
    (notice,) = await claim_notices(database, 10, uuid4(), 60)
    found = (notice.kind, notice.reason, notice.webhook_id, notice.account_id, notice.attempt)
    assert found == ("webhook_disabled", "gone", subscription.id, "acme", 1)


async def test_a_change_that_is_undone_leaves_no_notice(database: Database) -> None:
    await simple_simulation(database)
    subscription = await webhook(database)
    with pytest.raises(RuntimeError):
        async with database.transaction() as connection:
            await lock_registry(connection)
            await disable_webhook(connection, subscription.id, "gone")
            raise RuntimeError
    assert await claim_notices(database, 10, uuid4(), 60) == []


async def test_exhausted_deliveries_of_one_batch_are_one_notice_for_each_webhook(database: Database) -> None:
    await simple_simulation(database)
    first, second = await webhook(database), await webhook(database)
    async with database.transaction() as connection:
        await record(connection, [Notice("delivery_exhausted", one.id) for one in (first, second, first, first)])
        await record(connection, [])
    found = await claim_notices(database, 10, uuid4(), 60)
    assert {notice.webhook_id: notice.count for notice in found} == {first.id: 3, second.id: 1}


async def test_a_notice_is_claimed_by_one_and_comes_back_when_its_lease_ends(database: Database) -> None:
    await simple_simulation(database)
    subscription = await webhook(database)
    async with database.transaction() as connection:
        await record(connection, [Notice("webhook_failing", subscription.id)])
    (dead,) = await claim_notices(database, 10, uuid4(), 60)
    assert await claim_notices(database, 10, uuid4(), 60) == []
    await shift_clock(database, 61)
    (again,) = await claim_notices(database, 10, uuid4(), 60)
    assert (again.id, again.attempt) == (dead.id, 2)
    assert not await finish(database, dead.id, dead.lease, sent=True)  # too late: the lease is another's
    assert await postpone(database, again.id, again.lease, 0)
    (third,) = await claim_notices(database, 10, uuid4(), 60)
    assert third.attempt == 3


async def test_what_is_finished_is_kept_for_thirty_days(database: Database) -> None:
    await simple_simulation(database)
    subscription = await webhook(database)
    async with database.transaction() as connection:
        await record(connection, [Notice("webhook_failing", subscription.id)])
    (notice,) = await claim_notices(database, 10, uuid4(), 60)
    assert await finish(database, notice.id, notice.lease, sent=True)
    await shift_clock(database, 29 * 86_400)
    await forget(database)
    assert len(await rows(database, "select id from notices")) == 1
    await shift_clock(database, 31 * 86_400)
    await forget(database)
    assert await rows(database, "select id from notices") == []
