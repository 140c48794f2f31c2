"""The limits of every session with PostgreSQL, what follows when one is reached, and who ends a stalled session."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from database_proxy import DatabaseProxy
from simulation_fixtures import in_background
from store_factories import account, own_database, values
from timeouts import until
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.store import sessions
from vaultevents.store.frozen_sessions import STALLED_S, end_stalled
from vaultevents.store.pool import MIGRATING, Connection, Database, open_database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.sessions import KEEPALIVE_IDLE_S, SILENCE_S, Limits, Sessions, allow, connect_options

pytestmark = pytest.mark.integration


async def limits_of(connection: Connection, names: list[str]) -> dict[str, str]:
    rows = await connection.fetch("select name, setting from pg_settings where name = any($1)", names)
    return {row["name"]: row["setting"] for row in rows}


async def test_each_kind_of_connection_has_the_limits(any_postgres: ServerAddress) -> None:
    """Over TCP, since a server ignores what concerns TCP on a Unix socket."""
    wanted = {name: value for name, value in Limits().settings().items() if not name.startswith("tcp_")}
    async with DatabaseProxy(any_postgres) as proxy, own_database(any_postgres) as database:
        (name,) = await values(database, "select current_database()")
        opened = await open_database({**proxy.connect_kwargs(), "database": name})
        try:
            kinds = (opened.transaction(), opened.statement(), opened.reading("acme"), opened.dedicated())
            for kind in kinds:
                async with kind as connection:
                    assert await limits_of(connection, list(wanted)) == wanted
            async with opened.of_account("acme") as connection:
                assert await limits_of(connection, list(wanted)) == wanted
        finally:
            await opened.close()


async def test_a_migration_may_take_long_and_may_not_idle(any_postgres: ServerAddress) -> None:
    connection = await Sessions(MIGRATING).open(connect_options(any_postgres.connect_kwargs()))
    found = await limits_of(connection, ["statement_timeout", "idle_session_timeout"])
    await connection.close()
    assert found == {"statement_timeout": "3600000", "idle_session_timeout": "30000"}


async def test_this_side_notices_a_silent_network(postgres18: ServerAddress) -> None:
    async with DatabaseProxy(postgres18) as proxy:
        connection = await Sessions().open(connect_options(proxy.connect_kwargs()))
        link = connection._transport.get_extra_info("socket")
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEPALIVE_IDLE_S
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_S * 1000
        await connection.close()


async def test_a_setting_that_a_server_refuses_is_named_once_and_the_others_hold(
    any_postgres: ServerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"no_such_timeout": "1", **Limits().settings()}
    monkeypatch.setattr(Limits, "settings", lambda _: settings)
    prepared = Sessions()
    with capture_logs() as logs:
        for _ in range(2):
            connection = await prepared.open(connect_options(any_postgres.connect_kwargs()))
            assert await limits_of(connection, ["lock_timeout"]) == {"lock_timeout": "8000"}
            await connection.close()
    assert [line["setting"] for line in logs if line["event"] == "session_limit_refused"] == ["no_such_timeout"]


async def test_a_parameter_that_a_pooler_refuses_is_a_sentence(any_postgres: ServerAddress) -> None:
    options = connect_options(any_postgres.connect_kwargs(), timezone="nowhere")
    with pytest.raises(DatabaseUnusable, match=r"refuses a parameter of the connection .*let database_url lead to"):
        await sessions.connect(**options)


REACHED = {
    "55P03": ("set local lock_timeout = '50ms'", "select 1 from registry for update"),
    "57014": ("set local statement_timeout = '50ms'", "select pg_sleep(60)"),
    "25P03": ("set local idle_in_transaction_session_timeout = '50ms'", "select 1"),
    "40P01": ("select 1", "do $$ begin raise exception using errcode = '40P01'; end $$"),
    "53100": ("select 1", "do $$ begin raise exception using errcode = '53100'; end $$"),
    "58030": ("select 1", "do $$ begin raise exception using errcode = '58030'; end $$"),
    "XX000": ("select 1", "do $$ begin raise exception using errcode = 'XX000'; end $$"),
}


@pytest.mark.parametrize("sqlstate", REACHED)
async def test_a_limit_that_is_reached_asks_to_start_over(any_database: Database, sqlstate: str) -> None:
    before, statement = REACHED[sqlstate]
    async with any_database.transaction() as other:
        await other.execute("select 1 from registry for share")
        with pytest.raises(DatabaseUnavailable, match=r"could not finish this|lost the database"):
            async with any_database.transaction() as connection:
                await connection.execute("insert into accounts (id, name) values ('acme', 'Acme')")
                await connection.execute(before)
                if sqlstate == "25P03":
                    await until(connection.is_closed)
                await connection.execute(statement)
    assert any_database.lost.is_set()
    assert await values(any_database, "select id from accounts") == []


async def test_a_schema_that_is_gone_is_a_sentence(any_postgres: ServerAddress) -> None:
    async with own_database(any_postgres) as database:
        async with database.transaction() as connection:
            await connection.execute("drop schema vaultevents cascade")
        with pytest.raises(DatabaseUnusable, match="a part of the schema was dropped, or an older copy"):
            await database.now()


async def test_what_may_take_long_raises_its_own_limit(any_database: Database) -> None:
    async def sleeps(seconds: float | None) -> None:
        async with any_database.transaction() as connection:
            await connection.execute("set local statement_timeout = '50ms'")
            if seconds is not None:
                await allow(connection, seconds)
            await connection.execute("select pg_sleep(0.3)")

    await sleeps(60.0)
    with pytest.raises(DatabaseUnavailable, match="statement timeout"):
        await sleeps(None)


async def test_an_idle_connection_that_ends_is_counted(any_database: Database) -> None:
    async with any_database.transaction() as connection:
        pid = connection.get_server_pid()
    losses = any_database.losses
    async with any_database.dedicated() as other:
        await other.execute("select pg_terminate_backend($1)", pid)
    await until(lambda: any_database.losses > losses)


@asynccontextmanager
async def stuck(target: dict[str, Any], application: str, *, writes: bool) -> AsyncIterator[asyncpg.Connection]:
    """A session whose client no longer reads while a large result is sent to it."""
    connection = await asyncpg.connect(**target, server_settings={"application_name": application})
    transaction = connection.transaction()
    await transaction.start()
    if writes:
        await connection.execute("select pg_current_xact_id()")
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, connection._transport.pause_reading)
    large = "select repeat('x', 100000) from generate_series(1, 100000)"
    fetching = asyncio.create_task(connection.fetch(large))
    try:
        yield connection
    finally:
        connection.terminate()
        await asyncio.gather(fetching, return_exceptions=True)


async def test_only_sessions_of_ours_that_write_and_stall_are_ended(any_postgres: ServerAddress) -> None:
    async with own_database(any_postgres) as database:
        await account(database)
        (name,) = await values(database, "select current_database()")
        target = {**any_postgres.connect_kwargs(), "database": name}
        async with (
            stuck(target, "vaultevents", writes=True) as writer,
            stuck(target, "vaultevents", writes=False) as reader,
            stuck(target, "another", writes=True) as other,
            database.transaction() as busy,
            in_background(end_stalled(database)),
        ):
            await busy.execute("select pg_current_xact_id()")
            pids = [session.get_server_pid() for session in (writer, reader, other)]
            for _ in range(int(STALLED_S * 2)):  # at work for longer than a stalled session is left alone
                await busy.execute("select pg_sleep(1)")
            left = await values(database, "select pid from pg_stat_activity where pid = any($1)", pids)
            assert set(left) == set(pids[1:])
