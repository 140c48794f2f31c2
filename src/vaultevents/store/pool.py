"""The connection pool, and the numbered migrations that run when it opens."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from typing import Any, TypeAlias

import asyncpg

from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable, InputError
from vaultevents.store.sessions import Connection as Connection
from vaultevents.store.sessions import Limits, Sessions, connect, connect_options
from vaultevents.store.sqlstates import reason, translated

Record: TypeAlias = asyncpg.Record

MINIMUM_MAJOR = 15
MIGRATION_LOCK = 0x7661756C74  # "vault"
MIGRATION_S = 3600.0
"""How long one migration may work; other processes wait for it for a minute before they give up their start."""
MIGRATING = Limits(lock_wait_s=60.0, statement_s=MIGRATION_S, idle_s=30.0)
API_ROLE = "vaultevents_api"  # made by a migration
DELIVERIES_CHANNEL = "vaultevents_deliveries"

_AS_ACCOUNT = "select set_config('vaultevents.account', $1, $2)"  # $2: only for this transaction
_SCHEMA = re.compile(r"(?!pg_|information_schema$)[a-z_][a-z0-9_]{0,62}")


class Database:
    """Two pools on one schema: the service's own, and one whose connections have the role of the API.

    Every use separates outages from bugs: `DatabaseUnavailable` when the server is gone, full or asks to try again,
    `DatabaseUnusable` with what to do when a person must act; any other error of the driver is a bug and passes.
    """

    def __init__(self, options: Mapping[str, Any], pool_size: int) -> None:
        """`options` are what `asyncpg.connect` takes; `open_pools` makes the pools."""
        self._options = options
        self._pool_size = pool_size
        self._sessions = Sessions()
        self._seen_by: dict[int, str] = {}  # the account that each session of the API's pool sees outside transactions
        self.lost = asyncio.Event()
        """Set when a connection was lost, for the task that restarts the embedded server."""
        self.losses = 0
        """How many connections have ended: what was read before the last of them may be of another copy."""

    async def open_pools(self) -> None:
        options, size = self._options, self._pool_size
        as_api = {**options, "server_settings": {**options["server_settings"], "role": API_ROLE}}
        # min_size: it would log its own retries
        common = {"min_size": 0, "max_size": size, "reset": _leave, "connect": connect}
        self._pool = await asyncpg.create_pool(**options, **common, init=self._begin_session)
        self._api_pool = await asyncpg.create_pool(**as_api, **common, init=self._begin_api_session)

    async def _begin_session(self, connection: Connection) -> None:
        connection.add_termination_listener(self._count_loss)
        await self._sessions.prepare(connection)

    async def _begin_api_session(self, connection: Connection) -> None:
        self._seen_by.pop(connection.get_server_pid(), None)
        await self._begin_session(connection)

    def _count_loss(self, _: Connection) -> None:
        self.losses += 1

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """One read-committed transaction.

        Whether the commit took place is unknown after `DatabaseUnavailable`, so the caller starts over from its reads
        (rule I28).
        """
        async with self._connection(self._pool) as connection, connection.transaction():
            yield connection

    @asynccontextmanager
    async def statement(self) -> AsyncIterator[Connection]:
        """For a single statement, which is a transaction of its own: one round trip instead of three."""
        async with self._connection(self._pool) as connection:
            yield connection

    @asynccontextmanager
    async def of_account(self, account_id: str) -> AsyncIterator[Connection]:
        """A transaction in the role of the API, which sees and changes the rows of one account only.

        The second check (rules T8 and T21): its statements name the account all the same.
        """
        async with self._connection(self._api_pool) as connection, connection.transaction():
            await connection.execute(_AS_ACCOUNT, account_id, True)
            yield connection

    @asynccontextmanager
    async def reading(self, account_id: str) -> AsyncIterator[Connection]:
        """`of_account` for a request that changes nothing: each of its statements is a transaction of its own."""
        async with self._connection(self._api_pool) as connection:
            session = connection.get_server_pid()
            if self._seen_by.get(session) != account_id:
                self._seen_by.pop(session, None)  # whatever becomes of the next statement
                await connection.execute(_AS_ACCOUNT, account_id, False)
                self._seen_by[session] = account_id
            yield connection

    @asynccontextmanager
    async def _connection(self, pool: asyncpg.Pool) -> AsyncIterator[Connection]:
        misuse = False
        try:
            async with pool.acquire() as connection:  # others give theirs back within COMMAND_TIMEOUT_S
                try:
                    yield connection
                except asyncpg.InterfaceError:
                    misuse = not connection.is_closed()  # cannot be asked once the connection is back in the pool
                    raise
        except Exception as error:
            problem = None if misuse else translated(error)
            if problem is None:
                raise
            self._note_loss(problem)
            raise problem from error

    def _note_loss(self, problem: Exception) -> None:
        if isinstance(problem, DatabaseUnavailable):
            self.losses += 1
            self.lost.set()

    @asynccontextmanager
    async def dedicated(self) -> AsyncIterator[Connection]:
        """A connection of its own, never the pool's."""
        try:
            connection = await self._sessions.open(self._options)
            try:
                yield connection
            finally:
                connection.terminate()
        except Exception as error:
            problem = translated(error)
            if problem is None:
                raise
            self._note_loss(problem)
            raise problem from error

    async def now(self) -> datetime:
        """The database's time, which decides schedules and leases (rule D15)."""
        async with self.transaction() as connection:
            found: datetime = await connection.fetchval("select db_now()")
        return found

    async def listen(self, channel: str, wake: Callable[[], None]) -> None:
        """Calls `wake` at each NOTIFY, on a connection of its own (never the pool's).

        Goes on until that connection ends, then raises `DatabaseUnavailable`.
        """
        ended = asyncio.Event()
        async with self.dedicated() as connection:
            connection.add_termination_listener(lambda _: ended.set())
            await connection.add_listener(channel, lambda *_: wake())
            await ended.wait()
        raise DatabaseUnavailable("lost the database: the listening connection ended")

    async def close(self) -> None:
        for pool in (self._pool, self._api_pool):
            try:
                await asyncio.wait_for(pool.close(), 10)
            except Exception as error:
                if translated(error) is None:
                    raise
                pool.terminate()


async def open_database(target: Mapping[str, Any], *, schema: str = "vaultevents", pool_size: int = 8) -> Database:
    """Connects, brings the schema up to date and returns the pool.

    `target` is what `asyncpg.connect` takes: `{"dsn": …}` or host, port, user, password, database.
    Raises `DatabaseUnusable` with what to do, `DatabaseUnavailable` when there is nobody to talk to.
    """
    if not _SCHEMA.fullmatch(schema):
        raise InputError(
            f"'{schema}' cannot be a schema name: use lower-case letters, digits and '_', not starting with 'pg_'"
        )
    options = connect_options(target, search_path=schema, timezone="UTC")
    try:
        connection = await Sessions(MIGRATING).open(options)
        try:
            await migrate(connection, schema)
        finally:
            await connection.close()
        database = Database(options, pool_size)
        await database.open_pools()
    except (asyncpg.ClientConfigurationError, ValueError, OverflowError):
        # no reason: the parser's texts quote what they stumble over, which may be the end of a password
        raise DatabaseUnusable(
            "database_url cannot be understood: write postgresql://user:password@host:5432/name, with every '/', '#', "
            "'?', '@' and '%' of the password percent-encoded"
        ) from None
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise DatabaseUnusable(f"the database refuses the connection ({reason(error)}): fix database_url") from error
    except (asyncpg.InsufficientPrivilegeError, asyncpg.InvalidSchemaNameError) as error:
        raise DatabaseUnusable(
            f"the database user may not do what a migration needs ({reason(error)}): "
            f"grant it CREATE on the database and CREATEROLE, or make the schema '{schema}' for this user and the role "
            "vaultevents_api, granted to this user"
        ) from error
    except asyncpg.LockNotAvailableError as error:
        raise DatabaseUnavailable(
            "another process migrates this database, or holds a lock that a migration needs: wait and start again"
        ) from error
    except Exception as error:
        problem = translated(error)
        if not isinstance(problem, DatabaseUnavailable):
            raise
        raise DatabaseUnavailable(
            f"cannot reach the database ({reason(error)}): start it, or fix database_url"
        ) from error
    return database


async def _leave(_: Connection) -> None:
    """Nothing to reset, and no round trip for it: every use of a connection is a transaction or sets what it needs."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered `.sql` file."""

    number: int
    name: str
    sql: str

    @property
    def sha256(self) -> bytes:
        return hashlib.sha256(self.sql.encode()).digest()


def migrations() -> list[Migration]:
    """The files of this version, by number; they are numbered 1, 2, 3 … without a gap."""
    files = sorted(
        (entry for entry in resources.files("vaultevents.store").joinpath("migrations").iterdir()),
        key=lambda entry: entry.name,
    )
    known = [
        Migration(int(entry.name.split("_")[0]), entry.name, entry.read_text(encoding="utf-8"))
        for entry in files
        if entry.name.endswith(".sql")
    ]
    if [migration.number for migration in known] != list(range(1, len(known) + 1)):
        raise RuntimeError("migrations must be numbered 1, 2, 3 … without a gap")
    return known


async def migrate(connection: asyncpg.Connection, schema: str) -> None:
    """Applies what is missing, each file in a transaction of its own, one process at a time (advisory lock)."""
    major = connection.get_server_version().major
    if major < MINIMUM_MAJOR:
        raise DatabaseUnusable(f"PostgreSQL {major} is too old: vaultevents needs {MINIMUM_MAJOR} or newer")
    lock = (MIGRATION_LOCK % 2**31, schema)
    await connection.execute("select pg_advisory_lock($1, hashtext($2))", *lock, timeout=2 * MIGRATING.lock_wait_s)
    try:
        if not await connection.fetchval("select 1 from pg_namespace where nspname = $1", schema):
            await connection.execute(f'create schema "{schema}"')
        await connection.execute(
            "create table if not exists migrations (number integer primary key, name text not null,"
            " sha256 bytea not null, applied_at timestamptz not null default clock_timestamp())"
        )
        rows = await connection.fetch("select number, name, sha256 from migrations order by number")
        for migration in _missing({row["number"]: (row["name"], row["sha256"]) for row in rows}):
            async with connection.transaction():
                await connection.execute(migration.sql, timeout=MIGRATION_S)
                await connection.execute(
                    "insert into migrations (number, name, sha256) values ($1, $2, $3)",
                    migration.number,
                    migration.name,
                    migration.sha256,
                )
    finally:
        if not connection.is_closed():  # else the server has given it back, and the first error is the one to know
            await connection.execute("select pg_advisory_unlock($1, hashtext($2))", *lock)


def _missing(applied: Mapping[int, tuple[str, bytes]]) -> list[Migration]:
    """Return the migrations that the database lacks. Raises `DatabaseUnusable` when its history is another one."""
    known = migrations()
    for migration in known:
        name, _ = applied.get(migration.number, (migration.name, b""))
        if name != migration.name:
            raise DatabaseUnusable(
                f"this database was made by an earlier vaultevents, whose tables this version cannot use (it has the "
                f"migration {name}): make a new database or set another database_schema, register the accounts, vaults "
                "and webhooks again, and restore the events with 'vaultevents replay'; nothing was changed"
            )
    if newer := [name for number, (name, _) in applied.items() if number > len(known)]:
        raise DatabaseUnusable(
            f"this database was made by a newer vaultevents (it has the migration {newer[-1]}, this version knows "
            f"{len(known)}): install that version or a newer one; nothing was changed"
        )
    if sorted(applied) != list(range(1, len(applied) + 1)):
        raise DatabaseUnusable(f"the database lacks a migration in the middle (it has {sorted(applied)}): restore it")
    for migration in known[: len(applied)]:
        if applied[migration.number][1] != migration.sha256:
            raise DatabaseUnusable(
                f"the migration {migration.name} was applied with another content than this version has: "
                "install the version that made this database, or restore the file"
            )
    return known[len(applied) :]
