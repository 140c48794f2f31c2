"""What operators do to a webhook by its id: the rules are those of its owner (rule A5), and a pause loses nothing."""

from __future__ import annotations

from datetime import timedelta

import pytest

from store_factories import (
    assert_delivered,
    change,
    commit,
    funding,
    settlement,
    shift_clock,
    some_deliveries,
    states,
    take,
    values,
)
from vaultevents.core.errors import InputError
from vaultevents.store import resends, webhooks
from vaultevents.store.deliveries import settle
from vaultevents.store.pool import Database
from vaultevents.store.webhooks import UNTIL_ENABLED

pytestmark = pytest.mark.integration


async def test_a_pause_keeps_everything_and_ends_by_itself(any_database: Database) -> None:
    outbox, made = await some_deliveries(any_database, 2)
    paused = await webhooks.pause(any_database, made.id, 7200.0)
    assert paused.webhook.active
    assert paused.parked_until is not None
    assert paused.parked_until - await any_database.now() > timedelta(hours=1)
    await commit(outbox, funding(9))
    assert (await take(any_database)).deliveries == ()
    await shift_clock(any_database, 7201)
    found = (await take(any_database)).deliveries
    await settle(any_database, [settlement(delivery) for delivery in found])
    await assert_delivered(any_database, 3)


async def test_a_pause_without_an_end_lasts_until_it_is_enabled(any_database: Database) -> None:
    outbox, made = await some_deliveries(any_database, 1)
    assert (await webhooks.pause(any_database, made.id, None)).parked_until == UNTIL_ENABLED
    assert (await webhooks.pause(any_database, made.id, 60.0)).parked_until == UNTIL_ENABLED, "the longer one is kept"
    await commit(outbox, funding(9))
    await shift_clock(any_database, 10 * 365 * 24 * 3600)
    assert (await take(any_database)).deliveries == ()
    assert (await webhooks.switch_on(any_database, made.id)).parked_until is None
    assert len((await take(any_database)).deliveries) == 2


async def test_what_was_switched_off_is_switched_on_as_by_its_owner(any_database: Database) -> None:
    _, made = await some_deliveries(any_database, 3)
    first, *_ = (await take(any_database)).deliveries
    await settle(any_database, [settlement(first, "parked", 410, gone=True)])
    with pytest.raises(InputError, match=f"is off, so that nothing is sent: 'vaultevents webhook enable {made.id}'"):
        await webhooks.pause(any_database, made.id, None)
    on = await webhooks.switch_on(any_database, made.id)
    assert (on.webhook.active, on.disabled_reason) == (True, None)
    assert await states(any_database) == {"scheduled": 3}
    kinds = await values(any_database, "select kind from notices order by created_at")
    assert kinds == ["webhook_disabled", "webhook_enabled"]
    assert await values(any_database, "select failures from webhooks") == [0]


async def test_a_webhook_that_is_not_there_is_named(database: Database) -> None:
    _, made = await some_deliveries(database, 1)
    await webhooks.delete_webhook(database, "acme", made.id)
    for name in (made.id, "wh-nobody"):
        with pytest.raises(InputError, match=f"there is no webhook '{name}': 'vaultevents webhook list ACCOUNT'"):
            await webhooks.switch_on(database, name)
        with pytest.raises(InputError, match=f"there is no webhook '{name}'"):
            await webhooks.pause(database, name, None)


async def test_a_test_has_no_result_before_it_is_finished(database: Database) -> None:
    _, made = await some_deliveries(database, 1)
    async with database.transaction() as connection:
        test_id = await resends.request_new_test(connection, made.webhook, "0f", 1_760_000_000_000)
        assert await resends.test_result(connection, made.id, test_id) is None
    await change(
        database,
        "update resends set started_at = db_now(), finished_at = db_now(), duration_ms = 7, status = 503,"
        " excerpt = 'no'",
    )
    async with database.transaction() as connection:
        found = await resends.test_result(connection, made.id, test_id)
        assert await resends.test_result(connection, "wh-other", test_id) is None
    assert found == resends.TestResult(503, None, 7, "no")
    assert not found.accepted
