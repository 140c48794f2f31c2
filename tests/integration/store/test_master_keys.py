"""Master keys change while everything goes on, and all that is sealed stays what it was (rules D2 and T9)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rotation_factories import HOUR_S, delivering, fresh_secret, rotate, traffic
from step_up_factories import changing, enrolled, fresh_bytes
from store_factories import (
    KEY,
    Subscription,
    rows,
    simple_simulation,
    some_deliveries,
    target_of,
    values,
    webhook,
)
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.core.sealing import MasterKey, SealBroken, Secret, keyed_hash, open_sealed
from vaultevents.devnet.receivers import Receivers
from vaultevents.store import apikeys, mfa, rotation, webhook_management, webhooks
from vaultevents.store.authorized_transaction import mutation
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.rotation import KEY_LOCK, SEALED, reseal, rotating_from, sealed_key_ids, sealing_with
from vaultevents.store.webhook_management import Idempotency

pytestmark = pytest.mark.integration

NEXT_ALONE = MasterKey(bytes(range(1, 33)))
NEXT = MasterKey(bytes(range(1, 33)), KEY)
AFTER_NEXT = MasterKey(bytes(range(2, 34)), NEXT)


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    server = Receivers(tmp_path)
    await server.start()
    yield server
    await server.stop()


async def sealed_tables(database: Database) -> set[str]:
    query = (
        "select table_name::text from information_schema.columns"
        " where table_schema = current_schema and (column_name like '%seal%' or column_name = 'key_id')"
    )
    return set(await values(database, query))


async def test_no_table_with_sealed_rows_is_forgotten(any_database: Database) -> None:
    assert await sealed_tables(any_database) == SEALED.keys()
    async with any_database.transaction() as connection:  # negative control: migrations that add some
        await connection.execute("create table novelties (id int, key_id text, content bytea)")
        await connection.execute("alter table accounts add column sealed_note bytea")
    assert await sealed_tables(any_database) - SEALED.keys() == {"novelties", "accounts"}


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
            await webhook_management.keep_answer(
                change, asked, made.id, Secret(f"answer of {name}"), KEY, fresh_bytes(12)
            )
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
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while (await dump(any_database)).count(KEY.id) > 1:
                await asyncio.sleep(0.01)
        await rotate(any_database, one, HOUR_S, NEXT)  # nobody waits for the rotation meanwhile
        assert not resealing.done()
    assert await asyncio.wait_for(resealing, WAIT_TIMEOUT_S) == ROWS
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
            await webhook_management.rotate_secret(change, one.id, fresh_secret(), NEXT, fresh_bytes(12), HOUR_S)
            kept = Idempotency("kept", hashlib.sha256(b"kept").digest())
            assert await webhook_management.repeated(change, kept, NEXT) == Secret("answer of kept")
        again = await apikeys.hash_key(any_database, NEXT, fresh_bytes(32), fresh_bytes(12))
        assert keyed_hash(again, "vek_x") == keyed_hash(hashed, "vek_x")
        await reseal_all(any_database, NEXT)


async def test_deliveries_go_on_while_all_is_sealed_anew(database: Database, receivers: Receivers) -> None:
    box, hook = await simple_simulation(database), receivers.hook("acme")
    hook.secret = (await webhook(database, url=hook.url)).secret
    async with delivering(database, receivers, *NEXT.known), traffic(box):
        await hook.arrivals(20)
        assert await reseal_all(database, NEXT) == 1
        await hook.arrivals(len(hook.ledger) + 80)
    assert hook.bad_signatures == 0


async def schema_of(database: Database) -> str:
    (name,) = await values(database, "select current_schema::text")
    return str(name)


async def holders(database: Database) -> list[int]:
    """Return the sessions of this database that hold the lock of the key they seal with."""
    query = """
        select pid from pg_locks where locktype = 'advisory' and classid = $1 and objid::bigint = any($2)
            and database = (select oid from pg_database where datname = current_database())
    """
    (hashed,) = await values(database, "select hashtext(current_schema || ' ' || $1)", KEY.id)
    return await values(database, query, KEY_LOCK, [hashed % 2**32])


async def lose(database: Database, session: int) -> None:
    assert await values(database, "select pg_terminate_backend($1, 5000)", session) == [True]


async def test_nobody_rotates_away_from_a_key_in_use(any_postgres: ServerAddress, any_database: Database) -> None:
    target, schema = await target_of(any_postgres, any_database), await schema_of(any_database)
    async with sealing_with(target, schema, KEY.id), sealing_with(target, schema, KEY.id):
        with pytest.raises(DatabaseUnusable, match=f"seals with the master key {KEY.id}: stop it, or restart it"):
            async with rotating_from(target, schema, [KEY.id]):
                pass
        async with rotating_from(target, f"{schema}x", [KEY.id]), rotating_from(target, schema, [NEXT.id]):
            pass  # another schema and another key are other matters


async def test_while_it_is_rotated_nobody_begins_to_seal_with_the_former_key(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    target, schema = await target_of(any_postgres, any_database), await schema_of(any_database)
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
    target, schema = await target_of(any_postgres, any_database), await schema_of(any_database)
    async with sealing_with(target, schema, KEY.id):
        (first,) = await holders(any_database)
        await lose(any_database, first)
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while await holders(any_database) in ([], [first]):
                await asyncio.sleep(0.02)
        with pytest.raises(DatabaseUnusable):
            async with rotating_from(target, schema, [KEY.id]):
                pass


async def test_a_rotation_that_may_not_have_been_alone_does_not_pass_for_done(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    with pytest.raises(DatabaseUnavailable, match="lost the database"):
        async with rotating_from(await target_of(any_postgres, any_database), await schema_of(any_database), [KEY.id]):
            (session,) = await holders(any_database)
            await lose(any_database, session)
