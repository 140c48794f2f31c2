"""Opening a database: fresh, again, at the same time, by another version, with wrong settings."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

import store_factories
from schema_picture import PICTURE, picture
from store_factories import rows, target_of, values
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable, InputError, WrongNetwork
from vaultevents.core.units import Hash32
from vaultevents.store import network, pool, status
from vaultevents.store.pool import Database, Migration, migrations, open_database
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress
from vaultevents.store.sessions import Limits

pytestmark = pytest.mark.integration

RELEASED = Path(__file__).parents[2] / "data" / "migrations.sha256"


async def tables(database: Database) -> set[str]:
    return set(await values(database, "select tablename from pg_tables where schemaname = current_schema"))


async def reopen(server: ServerAddress, database: Database) -> None:
    """Open `database` once more."""
    again = await open_database(await target_of(server, database))
    await again.close()


async def applied(database: Database) -> list[dict[str, Any]]:
    return await rows(database, "select * from migrations order by number")


async def test_a_fresh_schema_gets_every_migration(any_database: Database) -> None:
    assert {"events", "deliveries", "webhooks", "cursors", "migrations"} <= await tables(any_database)
    assert [row["name"] for row in await applied(any_database)] == [migration.name for migration in migrations()]
    overview = await status.read(any_database)
    assert (overview.accounts, overview.events, overview.cursors, overview.oldest_pending_s) == (0, 0, (), None)


async def test_opening_again_does_nothing(any_postgres: ServerAddress, any_database: Database) -> None:
    before = await applied(any_database), await tables(any_database)
    await reopen(any_postgres, any_database)
    assert (await applied(any_database), await tables(any_database)) == before


async def test_several_may_open_a_fresh_schema_at_once(any_postgres: ServerAddress, any_database: Database) -> None:
    target = await target_of(any_postgres, any_database)
    opened = await asyncio.gather(*(open_database(target, schema="second", pool_size=1) for _ in range(6)))
    assert len(await applied(opened[0])) == len(migrations())
    await asyncio.gather(*(one.close() for one in opened))


async def test_a_database_of_a_newer_version_is_refused_and_left_alone(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    async with any_database.transaction() as connection:
        await connection.execute("insert into migrations values (999, '0999_from_the_future.sql', '')")
    before = await applied(any_database), await tables(any_database)
    with pytest.raises(DatabaseUnusable, match=r"newer vaultevents .*0999_from_the_future.*install that version"):
        await reopen(any_postgres, any_database)
    assert (await applied(any_database), await tables(any_database)) == before


async def test_a_migration_that_was_altered_afterwards_is_refused(
    postgres18: ServerAddress, database: Database
) -> None:
    async with database.transaction() as connection:
        await connection.execute("update migrations set sha256 = '\\x00' where number = 1")
    with pytest.raises(DatabaseUnusable, match=r"0001_registry\.sql was applied with another content"):
        await reopen(postgres18, database)


def test_what_databases_were_made_with_is_never_altered() -> None:
    """A database that has one of these refuses other content of it: a change is a new migration."""
    released = RELEASED.read_text().splitlines()
    assert [f"{one.sha256.hex()}  {one.name}" for one in migrations()] == released


async def test_a_database_from_before_the_first_release_is_refused_and_left_alone(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    target = await target_of(any_postgres, any_database)
    async with any_database.transaction() as connection:
        await connection.execute("create schema former; set local search_path = former")
        await connection.execute(HISTORY_BEFORE_THE_FIRST_RELEASE)
    before = await rows(any_database, "select * from former.migrations")
    with pytest.raises(DatabaseUnusable, match=r"0001_outbox\.sql.*make a new database.*replay.*nothing was changed"):
        await open_database(target, schema="former")
    assert await rows(any_database, "select * from former.migrations") == before
    assert await values(any_database, "select tablename from pg_tables where schemaname = 'former'") == ["migrations"]


async def test_every_table_column_and_function_is_described(database: Database) -> None:
    assert await values(database, UNDESCRIBED) == []
    async with database.transaction() as connection:  # negative control
        await connection.execute("create table plain (seen_at timestamptz)")
        await connection.execute("create function plain() returns integer language sql as 'select 1'")
    assert await values(database, UNDESCRIBED) == ["plain", "plain()", "plain.seen_at"]


UNDESCRIBED = """
select name from (
    select relname::text as name from pg_class
    where relnamespace = current_schema()::regnamespace and relkind = 'r' and obj_description(oid, 'pg_class') is null
    union all
    select c.relname || '.' || a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid
    where c.relnamespace = current_schema()::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped
        and col_description(c.oid, a.attnum) is null
    union all
    select oid::regprocedure::text from pg_proc
    where pronamespace = current_schema()::regnamespace and obj_description(oid, 'pg_proc') is null
) undescribed order by name
"""


async def test_the_picture_of_the_schema_is_the_present_one(postgres18: ServerAddress) -> None:
    shown = PICTURE.read_text()
    assert await picture(postgres18) == shown, "run: python3 dev.py schema"


async def test_a_change_of_the_schema_changes_its_picture(
    postgres18: ServerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrations()
    more = Migration(len(known) + 1, "more.sql", "alter table accounts add plan text")
    monkeypatch.setattr(pool, "migrations", lambda: [*known, more])
    monkeypatch.setattr(store_factories, "migrations", lambda: [*known, more])
    added = set((await picture(postgres18)).splitlines()) - set(PICTURE.read_text().splitlines())
    assert "    plan text," in added or "    plan text" in added, added


HISTORY_BEFORE_THE_FIRST_RELEASE = """
create table migrations (number integer primary key, name text not null, sha256 bytea not null,
    applied_at timestamptz not null default clock_timestamp());
insert into migrations (number, name, sha256)
select number, to_char(number, 'fm0000') || case number when 1 then '_outbox.sql' else '_more.sql' end, ''
from generate_series(1, 22) number
"""


async def test_a_database_with_a_hole_in_its_history_is_refused(
    postgres18: ServerAddress, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = migrations()
    more = [Migration(len(ours) + n, f"{len(ours) + n:04}_more.sql", "") for n in (1, 2)]
    monkeypatch.setattr(pool, "migrations", lambda: [*ours, *more])
    async with database.transaction() as connection:
        await connection.execute("insert into migrations values ($1, $2, '')", more[1].number, more[1].name)
    with pytest.raises(DatabaseUnusable, match="lacks a migration in the middle"):
        await reopen(postgres18, database)


@pytest.mark.parametrize(
    "fails",
    ["select 1 / 0", "insert into migrations select max(number) + 1, 'then ours cannot be', '' from migrations"],
)
async def test_a_migration_that_fails_leaves_nothing_and_can_be_tried_again(
    any_postgres: ServerAddress, any_database: Database, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    known = migrations()
    good = Migration(len(known) + 1, "good.sql", "create table second (id int)")
    bad = Migration(len(known) + 2, "bad.sql", f"create table third (id int); {fails}")
    monkeypatch.setattr(pool, "migrations", lambda: [*known, good, bad])
    with pytest.raises((asyncpg.DivisionByZeroError, asyncpg.UniqueViolationError)):
        await reopen(any_postgres, any_database)
    assert "second" in await tables(any_database)
    assert "third" not in await tables(any_database)
    fixed = dataclasses.replace(bad, sql="create table third (id int)")
    monkeypatch.setattr(pool, "migrations", lambda: [*known, good, fixed])
    await reopen(any_postgres, any_database)
    assert [row["number"] for row in await applied(any_database)] == [*range(1, len(known) + 3)]


@pytest.mark.parametrize("name", ["", "With Capitals", "x; drop schema y", "ü", "1st", "x" * 64, "pg_mine"])
async def test_schema_names(postgres18: ServerAddress, name: str) -> None:
    with pytest.raises(InputError, match="cannot be a schema name"):
        await open_database(postgres18.connect_kwargs(), schema=name)


async def refusal(target: Mapping[str, Any]) -> str:
    with pytest.raises(DatabaseUnusable) as refused:
        await open_database(target)
    return str(refused.value)


async def test_a_wrong_login_is_reported_without_the_password(any_postgres: ServerAddress) -> None:
    right = any_postgres.connect_kwargs()
    for wrong in ({"password": "s3cr3t"}, {"user": "nobody"}, {"database": "nowhere"}):
        text = await refusal({**right, **wrong})
        assert "refuses the connection" in text
        assert "fix database_url" in text
        assert "s3cr3t" not in text
        assert right["password"] not in text


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://vault:s3cr3t/x@db.example/name",  # everything after the first of / ? # is no longer the login
        "postgresql://vault:s3cr3t#x@db.example/name",
        "postgresql://vault:pass?s3cr3t@db.example/name",
        "postgresql://vault:s3cr3t@127.0.0.1:99999/name",
        "postgresql://vault:s3cr3t@127.0.0.1/name?sslmode=sometimes",
        "postgresql://vault:s3cr3t@[127.0.0.1/name",
        "mysql://vault:s3cr3t@127.0.0.1/name",
        "s3cr3t",
    ],
)
async def test_a_url_that_cannot_be_understood_is_reported_without_any_part_of_it(dsn: str) -> None:
    text = await refusal({"dsn": dsn})
    assert "database_url cannot be understood" in text
    assert "percent-encoded" in text
    assert "s3cr3t" not in text


async def test_nobody_there() -> None:
    for dsn in ("postgresql://vault:s3cr3t@127.0.0.1:1/name", "postgresql://vault:s3cr3t@nowhere.invalid/name"):
        with pytest.raises(DatabaseUnavailable, match="cannot reach the database") as unreachable:
            await open_database({"dsn": dsn})
        assert "s3cr3t" not in str(unreachable.value)


async def test_a_user_who_may_not_make_a_schema_learns_what_to_grant(any_postgres: ServerAddress) -> None:
    role = f"r_{uuid4().hex}"
    admin = await asyncpg.connect(**any_postgres.connect_kwargs())
    await admin.execute(f"create role {role} login password 's3cr3t'")
    text = await refusal({**any_postgres.connect_kwargs(), "user": role, "password": "s3cr3t"})
    assert "grant it CREATE on the database" in text
    await admin.execute(f"drop role {role}")
    await admin.close()


@pytest.fixture(params=["18", "16"])
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerAddress]:
    """A server where nobody has made the role of the API yet: roles are shared by all databases of a server."""
    with EmbeddedPostgres(tmp_path / "postgres", major=request.param, durable=False) as address:
        yield address


async def test_a_user_who_may_not_make_roles_learns_what_to_grant_and_each_way_works(
    own_server: ServerAddress,
) -> None:
    admin = await asyncpg.connect(**own_server.connect_kwargs())
    await admin.execute("create role modest login password 's3cr3t'")
    await admin.execute("create schema vaultevents authorization modest")
    modest = {**own_server.connect_kwargs(), "user": "modest", "password": "s3cr3t"}
    text = await refusal(modest)
    assert "grant it CREATE on the database and CREATEROLE, or make the schema 'vaultevents' for this user" in text
    assert "and the role vaultevents_api, granted to this user" in text

    await admin.execute("alter role modest createrole")
    await distinguished(modest, "vaultevents")

    await admin.execute("create role modester login password 's3cr3t'")  # finds the role made by another user
    await admin.execute("create schema second authorization modester")
    modester = {**modest, "user": "modester"}
    with pytest.raises(DatabaseUnusable, match="the role vaultevents_api, granted to this user"):
        await open_database(modester, schema="second")
    await admin.execute("grant vaultevents_api to modester")
    await distinguished(modester, "second")
    await admin.close()


async def distinguished(target: Mapping[str, Any], schema: str) -> None:
    """Opens a schema, twice, and looks through the wall between two accounts."""
    for _ in range(2):
        opened = await open_database(target, schema=schema)
        async with opened.transaction() as connection:
            await connection.execute(
                "insert into accounts (id, name) values ('acme', 'A'), ('umbra', 'U') on conflict do nothing"
            )
        async with opened.of_account("umbra") as connection:
            assert [row["id"] for row in await connection.fetch("select id from accounts")] == ["umbra"]
        await opened.close()


async def test_a_migration_that_waits_for_another_for_too_long_is_a_sentence(
    any_postgres: ServerAddress, any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MIGRATING", Limits(lock_wait_s=0.2))
    (schema,) = await values(any_database, "select current_schema")
    async with any_database.transaction() as connection:
        await connection.execute("select pg_advisory_lock($1, hashtext($2))", pool.MIGRATION_LOCK % 2**31, schema)
        with pytest.raises(DatabaseUnavailable, match="another process migrates this database"):
            await reopen(any_postgres, any_database)
        await connection.execute("select pg_advisory_unlock_all()")


async def kill_my_backend(database: Database, connection: pool.Connection) -> None:
    """Ends the connection from outside and waits until this side knows."""
    pid = connection.get_server_pid()
    async with database.transaction() as other:
        await other.execute("select pg_terminate_backend($1)", pid)
    while not connection.is_closed():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("then", ["queries", "ends"])
async def test_a_lost_connection_is_reported_as_such_and_the_next_transaction_has_another(
    any_database: Database, then: str
) -> None:
    with pytest.raises(DatabaseUnavailable, match="lost the database"):
        async with any_database.transaction() as connection:
            await connection.execute("insert into accounts (id, name) values ('acme', 'Acme')")
            await kill_my_backend(any_database, connection)
            if then == "queries":
                await connection.execute("select 1")
    assert any_database.lost.is_set()
    assert await values(any_database, "select id from accounts") == []


async def test_a_connection_that_is_lost_during_a_query_is_reported_as_such(any_database: Database) -> None:
    async def sleep() -> None:
        async with any_database.transaction() as connection:
            started.set_result(connection.get_server_pid())
            await connection.execute("select pg_sleep(30)")

    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    sleeping = asyncio.create_task(sleep())
    pid = await started
    await asyncio.sleep(0.05)
    async with any_database.transaction() as other:
        await other.execute("select pg_terminate_backend($1)", pid)
    with pytest.raises(DatabaseUnavailable):
        await sleeping


async def test_a_deadlock_asks_to_try_again_and_a_mistake_of_ours_stays_what_it_is(any_database: Database) -> None:
    with pytest.raises(DatabaseUnavailable):
        async with any_database.transaction() as connection:
            await connection.execute("do $$ begin raise exception using errcode = 'deadlock_detected'; end $$")
    any_database.lost.clear()
    with pytest.raises(asyncpg.InterfaceError, match="another operation is in progress"):
        async with any_database.transaction() as connection:
            await asyncio.gather(connection.execute("select pg_sleep(0.1)"), connection.execute("select 2"))
    with pytest.raises(asyncpg.PostgresSyntaxError):
        async with any_database.transaction() as connection:
            await connection.execute("selekt 1")
    assert not any_database.lost.is_set()


async def test_after_closing_nothing_can_be_had(postgres18: ServerAddress, database: Database) -> None:
    opened = await open_database(await target_of(postgres18, database))
    await opened.close()
    with pytest.raises(DatabaseUnavailable):
        await values(opened, "select 1")


async def test_a_database_belongs_to_the_first_network_it_saw(any_database: Database) -> None:
    assert await network.pinned(any_database) is None
    await asyncio.gather(*(network.pin(any_database, 560_000, Hash32(bytes(32))) for _ in range(5)))
    assert await network.pinned(any_database) == (560_000, bytes(32))
    for chain_id, genesis in ((1, bytes(32)), (560_000, bytes(31) + b"\x01")):
        with pytest.raises(WrongNetwork, match="belongs to chain 560000 "):
            await network.pin(any_database, chain_id, Hash32(genesis))
    assert await network.pinned(any_database) == (560_000, bytes(32))
