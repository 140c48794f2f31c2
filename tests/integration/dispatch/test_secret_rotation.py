"""The secret of a webhook changes while deliveries go on, and every signature stays good (rules D2 and T12)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path

import asyncpg
import pytest

from rotation_factories import HOUR_S, PER_WEBHOOK, delivering, fresh_secret, rotate, traffic, verifies
from step_up_factories import changing, enrolled, fresh_bytes
from store_factories import (
    KEY,
    account,
    commit,
    funding,
    rows,
    shift_clock,
    simple_simulation,
    some_deliveries,
    take,
    values,
    webhook,
)
from vaultevents.core.errors import DatabaseUnusable, InputError
from vaultevents.core.sealing import open_sealed
from vaultevents.devnet.receivers import Receivers
from vaultevents.store import webhook_management, webhooks
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    server = Receivers(tmp_path)
    await server.start()
    yield server
    await server.stop()


async def signing(database: Database) -> list[str]:
    """The secrets with which the next delivery would be signed, newest first."""
    (delivery,) = (await take(database, 1)).deliveries
    return [open_sealed(KEY, secret.sealed, delivery.webhook_id).reveal() for secret in delivery.target.secrets]


async def number_of_secrets(database: Database) -> int:
    return len(await rows(database, "select from webhook_secrets"))


async def test_the_new_secret_signs_at_once_and_the_old_one_until_the_overlap_ends(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 3)
    before = await any_database.now()
    newer, until = await rotate(any_database, one, 24 * HOUR_S)
    assert timedelta(0) <= until - before - timedelta(days=1) < timedelta(seconds=5)
    assert await signing(any_database) == [newer, one.secret]
    await shift_clock(any_database, 24 * HOUR_S - 60)
    assert await signing(any_database) == [newer, one.secret]
    await shift_clock(any_database, 24 * HOUR_S + 60)
    assert await signing(any_database) == [newer]


async def test_never_are_more_than_two_secrets_valid_and_expired_ones_are_erased(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 3)
    second, _ = await rotate(any_database, one, 24 * HOUR_S)
    third, _ = await rotate(any_database, one, 48 * HOUR_S)
    assert await signing(any_database) == [third, second]
    assert await number_of_secrets(any_database) == 2
    await shift_clock(any_database, 72 * HOUR_S)
    fourth, _ = await rotate(any_database, one, HOUR_S)
    assert await signing(any_database) == [fourth, third]
    assert await number_of_secrets(any_database) == 2


async def test_without_overlap_nothing_of_the_old_secrets_is_left(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 2)
    await rotate(any_database, one, HOUR_S)
    last, until = await rotate(any_database, one, 0)
    assert await signing(any_database) == [last]
    assert await number_of_secrets(any_database) == 1
    assert until <= await any_database.now()


@pytest.mark.parametrize("overlap_s", [-1.0, 7 * 24 * HOUR_S + 1, float("nan")])
async def test_an_overlap_beyond_a_week_is_refused_and_changes_nothing(database: Database, overlap_s: float) -> None:
    _, one = await some_deliveries(database, 1)
    with pytest.raises(InputError, match="0 s to 7 days"):
        await rotate(database, one, overlap_s)
    assert await signing(database) == [one.secret]


async def test_rotations_at_once_leave_one_secret_that_does_not_end(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 1)
    secrets = [secret for secret, _ in await asyncio.gather(*(rotate(any_database, one, HOUR_S) for _ in range(5)))]
    found = await signing(any_database)
    assert len(found) == 2
    assert set(found) <= set(secrets)
    assert len(await rows(any_database, "select from webhook_secrets where valid_until is null")) == 1


async def test_a_customer_rotates_without_seeing_what_is_sealed(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 2)
    acme, mine = await enrolled(any_database), fresh_secret()
    async with changing(any_database, acme) as change:
        until = await webhook_management.rotate_secret(change, one.id, mine, KEY, fresh_bytes(12), HOUR_S)
    assert await signing(any_database) == [mine.reveal(), one.secret]
    assert await ends(any_database) == [None, until]


CALL = "select replace_secret($1, 'some key', 'sealed', $2)"


async def ends(database: Database) -> list[datetime | None]:
    """Until when each secret is valid, the newest first."""
    return await values(database, "select valid_until from webhook_secrets order by created_at desc")


async def test_the_role_of_the_api_cannot_keep_a_former_secret_alive(any_database: Database) -> None:
    """All it has is the function, which ends a secret once and then erases it."""
    _, one = await some_deliveries(any_database, 1)
    for statement in (
        "update webhook_secrets set valid_until = null",
        "update webhook_secrets set valid_until = db_now()",
        "update webhook_secrets set sealed = ''",
        "update webhook_secrets set created_at = db_now()",
        "select sealed from webhook_secrets",
    ):
        with pytest.raises(DatabaseUnusable, match="permission denied"):
            async with any_database.of_account("acme") as connection:
                await connection.execute(statement)
    for overlap_s in (7 * 24 * HOUR_S + 1, -1.0, float("inf"), float("nan"), None):
        with pytest.raises(asyncpg.InvalidParameterValueError):
            async with any_database.of_account("acme") as connection:
                await connection.fetchval(CALL, one.id, overlap_s)
    assert await ends(any_database) == [None]
    reported = []
    for _ in range(3):  # again and again gives no secret a second week
        async with any_database.of_account("acme") as connection:
            reported.append(await connection.fetchval(CALL, one.id, 7 * 24 * HOUR_S))
        assert await ends(any_database) == [None, reported[-1]]
    assert reported == sorted(reported)
    assert await values(any_database, "select distinct key_id from webhook_secrets") == ["some key"], (
        "the first is gone"
    )


async def test_the_function_of_the_role_works_on_the_real_tables_of_the_own_account(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 1)
    await account(any_database, "umbra")
    for stranger in ("umbra", "nobody", "", "%"):
        async with any_database.of_account(stranger) as connection:
            assert await connection.fetchval(CALL, one.id, HOUR_S) is None
    async with any_database.transaction() as connection:  # the service names an account, too
        assert await connection.fetchval(CALL, one.id, HOUR_S) is None
    assert await ends(any_database) == [None]
    async with any_database.of_account("acme") as connection:
        await connection.execute("create temp table webhooks (id text, account_id text, deleted_at timestamptz)")
        await connection.execute("create temp table webhook_secrets (webhook_id text, valid_until timestamptz)")
        assert await connection.fetchval(CALL, one.id, HOUR_S) is not None
        assert await connection.fetchval("select count(*) from pg_temp.webhook_secrets") == 0
        await connection.execute("drop table pg_temp.webhooks, pg_temp.webhook_secrets")
    assert len(await ends(any_database)) == 2


async def test_nobody_else_may_call_the_function(any_database: Database) -> None:
    granted = "select has_function_privilege($1, 'replace_secret(text, text, bytea, float8)', 'execute')"
    assert await values(any_database, granted, "vaultevents_api") == [True]
    assert await values(any_database, granted, "pg_monitor") == [False], "not even by way of public"


async def test_the_new_secret_signs_first_also_after_the_clock_was_set_back(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 1)
    await shift_clock(any_database, -HOUR_S)
    newer, _ = await rotate(any_database, one, 2 * HOUR_S)
    async with any_database.transaction() as connection:
        await connection.execute("update queue set due_at = db_now()")
    assert await signing(any_database) == [newer, one.secret]


async def test_nobody_rotates_the_secret_of_another_account(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 1)
    await account(any_database, "umbra")
    umbra = await enrolled(any_database, "umbra")
    with pytest.raises(InputError, match=f"account 'umbra' has no webhook '{one.id}'"):
        await webhooks.rotate_secret(any_database, "umbra", one.id, fresh_secret(), KEY, fresh_bytes(12))
    with pytest.raises(webhooks.WebhookUnknown):
        async with changing(any_database, umbra) as change:
            await webhook_management.rotate_secret(change, one.id, fresh_secret(), KEY, fresh_bytes(12))
    assert await signing(any_database) == [one.secret]


async def test_a_deleted_webhook_gets_no_secret_any_more(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 1)
    await webhooks.delete_webhook(any_database, "acme", one.id)
    with pytest.raises(InputError, match="has no webhook"):
        await rotate(any_database, one, HOUR_S)
    assert await number_of_secrets(any_database) == 0


async def test_under_load_each_delivery_verifies_with_a_secret_that_was_valid_then(
    database: Database, receivers: Receivers
) -> None:
    """Old or new until the end of the overlap, only new after it; what was in flight at a change may be either."""
    box, hook = await simple_simulation(database), receivers.hook("acme")
    one = await webhook(database, url=hook.url)
    async with delivering(database, receivers, KEY), traffic(box):
        before = len(await hook.arrivals(30))
        newer, until = await rotate(database, one, 6.0)
        rotated = len(hook.ledger) + PER_WEBHOOK
        while await database.now() < until - timedelta(seconds=0.2):
            await asyncio.sleep(0.01)
        ending = len(hook.ledger)
        while await database.now() < until:
            await asyncio.sleep(0.01)
        over = len(hook.ledger) + PER_WEBHOOK
        await hook.arrivals(over + 30)
    signed = [(verifies(one.secret, request), verifies(newer, request)) for request in hook.ledger]
    assert set(signed[:before]) == {(True, False)}
    assert set(signed[rotated:ending]) == {(True, True)}
    assert set(signed[over:]) == {(False, True)}
    assert (False, False) not in signed


async def test_what_was_unsealed_before_does_not_sign_after_a_change(database: Database, receivers: Receivers) -> None:
    box, hook = await simple_simulation(database), receivers.hook("acme")
    one = await webhook(database, url=hook.url)
    async with delivering(database, receivers, KEY):
        await commit(box, funding(1))
        await hook.arrivals(1)
        newer, _ = await rotate(database, one, 0)
        await commit(box, funding(2))
        await hook.arrivals(2)
    signed = [(verifies(one.secret, request), verifies(newer, request)) for request in hook.ledger]
    assert signed == [(True, False), (False, True)]
