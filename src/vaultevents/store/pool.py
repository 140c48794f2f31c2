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

Connection: TypeAlias = asyncpg.Connection
Record: TypeAlias = asyncpg.Record

MINIMUM_MAJOR = 15
MIGRATION_LOCK = 0x7661756C74  # "vault"
COMMAND_TIMEOUT_S = 30.0
API_ROLE = "vaultevents_api"  # made by a migration
DELIVERIES_CHANNEL = "vaultevents_deliveries"

_AS_ACCOUNT = "select set_config('vaultevents.account', $1, $2)"  # $2: only for this transaction
_SCHEMA = re.compile(r"(?!pg_|information_schema$)[a-z_][a-z0-9_]{0,62}")
_LOST = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.InsufficientResourcesError,  # too many connections, no space left
    asyncpg.TransactionRollbackError,  # deadlock, serialisation
    asyncpg.ReadOnlySQLTransactionError,
)


class Database:
    """Two pools on one schema: the service's own, and one whose connections have the role of the API.

    Every use tells a loss from a surprise: `DatabaseUnavailable` when the server is gone, full or asks to try again.
    """

    def __init__(
        self, pool: asyncpg.Pool, api_pool: asyncpg.Pool, seen_by: dict[int, str], target: Mapping[str, Any]
    ) -> None:
        self._pool = pool
        self._api_pool = api_pool
        self._seen_by = seen_by  # the account that each session of the API's pool sees outside of transactions
        self._target = target
        self.lost = asyncio.Event()
        """Set when a connection was lost: whoever looks after the server may want to know."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """One read-committed transaction.

        Whether the commit took place is unknown after `DatabaseUnavailable`, so the caller starts over from its reads
        (reliability I28).
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

        The second wall (reliability §4.5): its statements name the account all the same.
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
        except _LOST as error:
            if misuse:
                raise
            self.lost.set()
            raise DatabaseUnavailable(f"lost the database: {reason(error)}") from error

    async def now(self) -> datetime:
        """The database's time, which decides schedules and leases (D15)."""
        async with self.transaction() as connection:
            found: datetime = await connection.fetchval("select db_now()")
        return found

    async def listen(self, channel: str, wake: Callable[[], None]) -> None:
        """Calls `wake` at each NOTIFY, on a connection of its own (never the pool's).

        Goes on until that connection ends, then raises `DatabaseUnavailable`.
        """
        ended = asyncio.Event()
        try:
            connection = await asyncpg.connect(**self._target)
        except _LOST as error:
            self.lost.set()
            raise DatabaseUnavailable(f"lost the database: {reason(error)}") from error
        try:
            connection.add_termination_listener(lambda _: ended.set())
            await connection.add_listener(channel, lambda *_: wake())
            await ended.wait()
        except _LOST as error:
            raise DatabaseUnavailable(f"lost the database: {reason(error)}") from error
        finally:
            connection.terminate()
        raise DatabaseUnavailable("lost the database: the listening connection ended")

    async def close(self) -> None:
        for pool in (self._pool, self._api_pool):
            try:
                await asyncio.wait_for(pool.close(), 10)
            except _LOST:
                pool.terminate()


def reason(error: BaseException) -> str:
    """What went wrong in one line; it may name the address and the user, never the password."""
    first = str(error).strip().splitlines()
    return first[0] if first else type(error).__name__


async def open_database(target: Mapping[str, Any], *, schema: str = "vaultevents", pool_size: int = 8) -> Database:
    """Connects, brings the schema up to date and returns the pool.

    `target` is what `asyncpg.connect` takes: `{"dsn": …}` or host, port, user, password, database.
    Raises `DatabaseUnusable` with what to do, `DatabaseUnavailable` when there is nobody to talk to.
    """
    if not _SCHEMA.fullmatch(schema):
        raise InputError(
            f"'{schema}' cannot be a schema name: use lower-case letters, digits and '_', not starting with 'pg_'"
        )
    full = {
        **target,
        "timeout": COMMAND_TIMEOUT_S,
        "command_timeout": COMMAND_TIMEOUT_S,
        "server_settings": {"search_path": schema, "application_name": "vaultevents", "timezone": "UTC"},
    }
    try:
        connection = await asyncpg.connect(**full)
        try:
            await migrate(connection, schema)
        finally:
            await connection.close()
        as_api = {**full, "server_settings": {**full["server_settings"], "role": API_ROLE}}
        # min_size: it would log its own retries
        pool = await asyncpg.create_pool(**full, min_size=0, max_size=pool_size, reset=_leave)
        seen_by: dict[int, str] = {}

        async def sees_nobody(connection: Connection) -> None:
            seen_by.pop(connection.get_server_pid(), None)

        api_pool = await asyncpg.create_pool(**as_api, min_size=0, max_size=pool_size, reset=_leave, init=sees_nobody)
    except (asyncpg.ClientConfigurationError, ValueError, OverflowError):
        # no reason: the parser's texts quote what they stumble over, which may be the end of a password
        raise DatabaseUnusable(
            "database_url cannot be understood: write postgresql://user:password@host:5432/name, with every '/', '#', "
            "'?', '@' and '%' of the password percent-encoded"
        ) from None
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise DatabaseUnusable(f"the database refuses the connection ({reason(error)}): mend database_url") from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise DatabaseUnusable(
            f"the database user may not do what a migration needs ({reason(error)}): "
            f"grant it CREATE on the database and CREATEROLE, or make the schema '{schema}' for this user and the role "
            "vaultevents_api, granted to this user"
        ) from error
    except _LOST as error:
        raise DatabaseUnavailable(
            f"cannot reach the database ({reason(error)}): start it, or mend database_url"
        ) from error
    return Database(pool, api_pool, seen_by, full)


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
    await connection.execute("select pg_advisory_lock($1, hashtext($2))", MIGRATION_LOCK % 2**31, schema)
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
                await connection.execute(migration.sql)
                await connection.execute(
                    "insert into migrations (number, name, sha256) values ($1, $2, $3)",
                    migration.number,
                    migration.name,
                    migration.sha256,
                )
    finally:
        await connection.execute("select pg_advisory_unlock($1, hashtext($2))", MIGRATION_LOCK % 2**31, schema)


def _missing(applied: Mapping[int, tuple[str, bytes]]) -> list[Migration]:
    known = migrations()
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
