"""Secrets and master keys change while deliveries go on, and every signature stays good (D2, reliability T9, T12)."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from step_up_stories import changing, enrolled, fresh_bytes
from store_stories import (
    KEY,
    Subscription,
    account,
    assert_ledger,
    commit,
    funding,
    rows,
    shift_clock,
    simple_world,
    some_deliveries,
    take,
    values,
    webhook,
)
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable, InputError
from vaultevents.core.sealing import MasterKey, SealBroken, Secret, keyed_hash, open_sealed
from vaultevents.core.signing import new_secret
from vaultevents.core.streaks import Parking
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.receivers import Received, Receivers
from vaultevents.dispatch.dispatcher import Dispatcher, DispatchOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.egress import Guard
from vaultevents.store import apikeys, customers, mfa, rotation, webhooks
from vaultevents.store.clock import ServiceClock
from vaultevents.store.customers import Idempotency
from vaultevents.store.embedded import ServerAddress
from vaultevents.store.mutations import mutation
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.rotation import KEY_LOCK, SEALED, reseal, rotating_from, sealed_key_ids, sealing_with

pytestmark = pytest.mark.integration

HOUR_S = 3600.0
PER_WEBHOOK = 50
NEXT_ALONE = MasterKey(bytes(range(1, 33)))
NEXT = MasterKey(bytes(range(1, 33)), KEY)
AFTER_NEXT = MasterKey(bytes(range(2, 34)), NEXT)


def fresh_secret() -> Secret:
    return Secret(new_secret(fresh_bytes(32)))


async def rotate(database: Database, one: Subscription, overlap_s: float, key: MasterKey = KEY) -> tuple[str, datetime]:
    """The new secret, and until when the one before it is valid."""
    secret = fresh_secret()
    until = await webhooks.rotate_secret(database, "acme", one.id, secret, key, fresh_bytes(12), overlap_s)
    return secret.reveal(), until


async def signing(database: Database) -> list[str]:
    """The secrets with which the next delivery would be signed, newest first."""
    (delivery,) = (await take(database, 1)).deliveries
    return [open_sealed(KEY, one.sealed, delivery.webhook_id).reveal() for one in delivery.target.secrets]


async def number_of_secrets(database: Database) -> int:
    return len(await rows(database, "select from webhook_secrets"))


def verifies(secret: str, one: Received) -> bool:
    with suppress(WebhookVerificationError):
        Webhook(secret).verify(one.body, dict(one.headers))
        return True
    return False


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
        until = await customers.rotate_secret(change, one.id, mine, KEY, fresh_bytes(12), HOUR_S)
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
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with any_database.of_account("acme") as connection:
                await connection.execute(statement)
    for overlap_s in (7 * 24 * HOUR_S + 1, -1.0, float("inf"), float("nan"), None):
        with pytest.raises(asyncpg.InvalidParameterValueError):
            async with any_database.of_account("acme") as connection:
                await connection.fetchval(CALL, one.id, overlap_s)
    assert await ends(any_database) == [None]
    told = []
    for _ in range(3):  # again and again gives no secret a second week
        async with any_database.of_account("acme") as connection:
            told.append(await connection.fetchval(CALL, one.id, 7 * 24 * HOUR_S))
        assert await ends(any_database) == [None, told[-1]]
    assert told == sorted(told)
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
            await customers.rotate_secret(change, one.id, fresh_secret(), KEY, fresh_bytes(12))
    assert await signing(any_database) == [one.secret]


async def test_a_deleted_webhook_gets_no_secret_any_more(any_database: Database) -> None:
    _, one = await some_deliveries(any_database, 1)
    await webhooks.delete_webhook(any_database, "acme", one.id)
    with pytest.raises(InputError, match="has no webhook"):
        await rotate(any_database, one, HOUR_S)
    assert await number_of_secrets(any_database) == 0


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    server = Receivers(tmp_path)
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def delivering(database: Database, receivers: Receivers, *keys: MasterKey) -> AsyncIterator[None]:
    """A dispatcher that knows these keys; at the end all is delivered and the ledger adds up."""
    rules = UrlRules(allow=(parse_allow("127.0.0.0/8:*"),))
    options = DispatchOptions(
        schedule_s=(0.05, 0.05), per_webhook=PER_WEBHOOK, parking=Parking(after=10**9), poll_s=0.05
    )
    async with Sender(Guard(rules), ca_file=receivers.ca_path, total_timeout_s=5.0) as sender:
        clock, known = ServiceClock(await database.now()), {key.id: key for key in keys}
        running = Dispatcher(database, sender, known, clock, options, random.Random(1))
        stop = asyncio.Event()
        task = asyncio.create_task(running.run(stop))
        try:
            yield
            async with asyncio.timeout(20):
                while await values(database, "select distinct state from deliveries") != ["delivered"]:
                    await asyncio.sleep(0.02)
        finally:
            stop.set()
            await asyncio.wait_for(task, 30)
    await assert_ledger(database)


@asynccontextmanager
async def traffic(box: Outbox) -> AsyncIterator[None]:
    """An event every few milliseconds."""
    done = asyncio.Event()

    async def committing() -> None:
        number = 0
        while not done.is_set():
            number += 1
            await commit(box, funding(number))
            await asyncio.sleep(0.004)

    task = asyncio.create_task(committing())
    try:
        yield
    finally:
        done.set()
        await task


async def test_under_load_each_delivery_verifies_with_a_secret_that_was_valid_then(
    database: Database, receivers: Receivers
) -> None:
    """Old or new until the end of the overlap, only new after it; what was in flight at a change may be either."""
    box, hook = await simple_world(database), receivers.hook("acme")
    one = await webhook(database, url=hook.url)
    async with delivering(database, receivers, KEY), traffic(box):
        before = len(await hook.arrivals(30))
        newer, until = await rotate(database, one, 2.0)
        rotated = len(hook.ledger) + PER_WEBHOOK
        while await database.now() < until - timedelta(seconds=0.2):
            await asyncio.sleep(0.01)
        ending = len(hook.ledger)
        while await database.now() < until:
            await asyncio.sleep(0.01)
        over = len(hook.ledger) + PER_WEBHOOK
        await hook.arrivals(over + 30, timeout_s=30)
    signed = [(verifies(one.secret, each), verifies(newer, each)) for each in hook.ledger]
    assert set(signed[:before]) == {(True, False)}
    assert set(signed[rotated:ending]) == {(True, True)}
    assert set(signed[over:]) == {(False, True)}
    assert (False, False) not in signed


async def test_what_was_unsealed_before_does_not_sign_after_a_change(database: Database, receivers: Receivers) -> None:
    box, hook = await simple_world(database), receivers.hook("acme")
    one = await webhook(database, url=hook.url)
    async with delivering(database, receivers, KEY):
        await commit(box, funding(1))
        await hook.arrivals(1)
        newer, _ = await rotate(database, one, 0)
        await commit(box, funding(2))
        await hook.arrivals(2)
    signed = [(verifies(one.secret, each), verifies(newer, each)) for each in hook.ledger]
    assert signed == [(True, False), (False, True)]


async def sealed_tables(database: Database) -> set[str]:
    query = (
        "select table_name::text from information_schema.columns"
        " where table_schema = current_schema and column_name = 'sealed'"
    )
    return set(await values(database, query))


async def test_no_table_with_sealed_rows_is_forgotten(any_database: Database) -> None:
    assert await sealed_tables(any_database) == SEALED.keys()
    async with any_database.transaction() as connection:  # negative control: a migration that adds one
        await connection.execute("create table novelties (id int, key_id text, sealed bytea)")
    assert await sealed_tables(any_database) - SEALED.keys() == {"novelties"}


ROWS = 7


async def everything_sealed(database: Database) -> Subscription:
    """Something in each table: three secrets, a seed, the hash key, an answer to a create and one that is void."""
    _, one = await some_deliveries(database, 1)
    acme = await enrolled(database)
    await apikeys.hash_key(database, KEY, fresh_bytes(32), fresh_bytes(12))
    for name in ("kept", "void"):
        made = await webhook(database)
        async with changing(database, acme) as change:
            asked = Idempotency(name, hashlib.sha256(name.encode()).digest())
            await customers.keep_answer(change, asked, made.id, Secret(f"answer of {name}"), KEY, fresh_bytes(12))
    await webhooks.delete_webhook(database, "acme", made.id)
    await rotate(database, one, HOUR_S)
    return one


async def opened(database: Database, key: MasterKey) -> dict[str, list[str]]:
    """All that is sealed, as this key and those before it open it."""
    found = {}
    for table, aad in SEALED.items():
        stored = await rows(database, f"select * from {table} where sealed is not null")
        found[table] = sorted(open_sealed(key, row["sealed"], aad(row)).reveal() for row in stored)
    return found


async def dump(database: Database) -> str:
    """Every value of every table, bytes as hex."""
    names = await values(database, "select tablename from pg_tables where schemaname = current_schema")
    return "\n".join([str(row) for name in names for row in await values(database, f"select t::text from {name} t")])


async def reseal_all(database: Database, key: MasterKey) -> int:
    return await reseal(database, key, lambda: fresh_bytes(12), lambda _done, _total: None)


async def reseal_and_die(database: Database, key: MasterKey) -> None:
    """Ends after the first batch, wherever that is."""

    def die(_done: int, _total: int) -> None:
        raise ConnectionAbortedError("killed")

    with pytest.raises(ConnectionAbortedError):
        await reseal(database, key, lambda: fresh_bytes(12), die)


async def test_everything_is_sealed_anew_and_says_the_same(any_database: Database) -> None:
    await everything_sealed(any_database)
    before = await opened(any_database, KEY)
    assert {table: len(found) for table, found in before.items()} == {
        "webhook_secrets": 3,
        "mfa_factors": 1,
        "hash_key": 1,
        "idempotent_answers": 1,
    }
    assert (await dump(any_database)).count(KEY.id) == ROWS, "the void answer names its key, too"
    steps: list[tuple[int, int]] = []
    assert await reseal(any_database, NEXT, lambda: fresh_bytes(12), lambda *step: steps.append(step)) == ROWS
    assert steps[-1] == (ROWS, ROWS)
    after = await dump(any_database)
    assert (after.count(KEY.id), after.count(NEXT.id)) == (0, ROWS)
    assert await opened(any_database, NEXT_ALONE) == before
    with pytest.raises(SealBroken):
        await opened(any_database, KEY)
    assert await reseal_all(any_database, NEXT) == 0


async def test_a_rotation_that_ends_after_any_row_is_taken_up(
    any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "BATCH", 1)
    await everything_sealed(any_database)
    before = await opened(any_database, KEY)
    for number in range(1, ROWS + 1):
        await reseal_and_die(any_database, NEXT)
        assert (await dump(any_database)).count(NEXT.id) == number
        assert await opened(any_database, NEXT) == before, "both keys together open it at every moment"
    assert await opened(any_database, NEXT_ALONE) == before


async def test_another_rotation_may_follow_one_that_was_given_up(any_database: Database) -> None:
    await everything_sealed(any_database)
    before = await opened(any_database, KEY)
    await reseal_and_die(any_database, NEXT)
    assert await sealed_key_ids(any_database) == {KEY.id, NEXT.id}
    assert await reseal_all(any_database, AFTER_NEXT) == ROWS
    assert await opened(any_database, AFTER_NEXT) == before
    assert await sealed_key_ids(any_database) == {AFTER_NEXT.id}


async def test_a_row_that_no_key_opens_ends_the_rotation_and_is_named(any_database: Database) -> None:
    await everything_sealed(any_database)
    async with any_database.transaction() as connection:
        await connection.execute("update mfa_factors set sealed = sealed || '\\x00'")
    with pytest.raises(SealBroken, match="the secret of mfa acme does not open"):
        await reseal_all(any_database, NEXT)
    assert await values(any_database, "select key_id from mfa_factors") == [KEY.id], "it is left as it was"


async def test_a_row_that_somebody_holds_is_left_for_later(any_database: Database) -> None:
    one = await everything_sealed(any_database)
    async with any_database.transaction() as connection:
        await connection.execute("select 1 from mfa_factors for update")
        resealing = asyncio.create_task(reseal_all(any_database, NEXT))
        async with asyncio.timeout(10):
            while (await dump(any_database)).count(KEY.id) > 1:
                await asyncio.sleep(0.01)
        await rotate(any_database, one, HOUR_S, NEXT)  # nobody waits for the rotation meanwhile
        assert not resealing.done()
    assert await asyncio.wait_for(resealing, 10) == ROWS
    assert await sealed_key_ids(any_database) == {NEXT.id}


async def test_a_customer_changes_things_while_all_is_sealed_anew(any_database: Database) -> None:
    """A process that knows both keys opens what either has sealed, and seals with the new one."""
    one = await everything_sealed(any_database)
    await mfa.reset(any_database, "acme")
    acme = await enrolled(any_database)
    hashed = await apikeys.hash_key(any_database, KEY, fresh_bytes(32), fresh_bytes(12))
    for _ in range(2):
        async with mutation(any_database, acme.grant(), NEXT) as change:
            await change.step_up()
            await customers.rotate_secret(change, one.id, fresh_secret(), NEXT, fresh_bytes(12), HOUR_S)
            kept = Idempotency("kept", hashlib.sha256(b"kept").digest())
            assert await customers.repeated(change, kept, NEXT) == Secret("answer of kept")
        again = await apikeys.hash_key(any_database, NEXT, fresh_bytes(32), fresh_bytes(12))
        assert keyed_hash(again, "vek_x") == keyed_hash(hashed, "vek_x")
        await reseal_all(any_database, NEXT)


async def test_deliveries_go_on_while_all_is_sealed_anew(database: Database, receivers: Receivers) -> None:
    box, hook = await simple_world(database), receivers.hook("acme")
    hook.secret = (await webhook(database, url=hook.url)).secret
    async with delivering(database, receivers, *NEXT.known), traffic(box):
        await hook.arrivals(20)
        assert await reseal_all(database, NEXT) == 1
        await hook.arrivals(len(hook.ledger) + 80, timeout_s=30)
    assert hook.bad_signatures == 0


async def schema_of(database: Database) -> str:
    (name,) = await values(database, "select current_schema::text")
    return str(name)


async def holders(database: Database) -> list[int]:
    """The sessions that tell which key they seal with, of this schema."""
    query = "select pid from pg_locks where locktype = 'advisory' and classid = $1 and objid::bigint = any($2)"
    (hashed,) = await values(database, "select hashtext(current_schema || ' ' || $1)", KEY.id)
    return await values(database, query, KEY_LOCK, [hashed % 2**32])


async def lose(database: Database, session: int) -> None:
    assert await values(database, "select pg_terminate_backend($1, 5000)", session) == [True]


async def test_nobody_rotates_away_from_a_key_in_use(any_postgres: ServerAddress, any_database: Database) -> None:
    target, schema = any_postgres.connect_kwargs(), await schema_of(any_database)
    async with sealing_with(target, schema, KEY.id), sealing_with(target, schema, KEY.id):
        with pytest.raises(DatabaseUnusable, match=f"seals with the master key {KEY.id}: stop it, or restart it"):
            async with rotating_from(target, schema, [KEY.id]):
                pass
        async with rotating_from(target, f"{schema}x", [KEY.id]), rotating_from(target, schema, [NEXT.id]):
            pass  # another schema and another key are other matters


async def test_while_it_is_rotated_nobody_begins_to_seal_with_the_former_key(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    target, schema = any_postgres.connect_kwargs(), await schema_of(any_database)
    async with rotating_from(target, schema, [KEY.id]):
        with pytest.raises(DatabaseUnusable, match=f"the master key {KEY.id} is being rotated: give the new one"):
            async with sealing_with(target, schema, KEY.id):
                pass
        with pytest.raises(DatabaseUnusable):
            async with rotating_from(target, schema, [KEY.id]):
                pass
        async with sealing_with(target, schema, NEXT.id):
            pass
    async with sealing_with(target, schema, KEY.id):
        pass
    assert await holders(any_database) == []


async def test_a_process_that_lost_its_connection_says_again_what_it_seals_with(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    target, schema = any_postgres.connect_kwargs(), await schema_of(any_database)
    async with sealing_with(target, schema, KEY.id):
        (first,) = await holders(any_database)
        await lose(any_database, first)
        async with asyncio.timeout(10):
            while await holders(any_database) in ([], [first]):
                await asyncio.sleep(0.02)
        with pytest.raises(DatabaseUnusable):
            async with rotating_from(target, schema, [KEY.id]):
                pass


async def test_a_rotation_that_may_not_have_been_alone_does_not_pass_for_done(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    with pytest.raises(DatabaseUnavailable, match="lost the database"):
        async with rotating_from(any_postgres.connect_kwargs(), await schema_of(any_database), [KEY.id]):
            (session,) = await holders(any_database)
            await lose(any_database, session)
