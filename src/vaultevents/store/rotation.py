"""Another master key for all that is sealed (rules D2 and T9), beside processes that go on working.

Every process shows the database by a lock which key it seals with, so that no rotation begins under one that could not
open what the rotation leaves, and none ends while somebody may still seal with the former key. Rows name their key: a
rotation that was killed is taken up where it was, and both keys open the database meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog

from vaultevents.core.actor import acting
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.core.sealing import MasterKey, open_sealed, seal
from vaultevents.store.apikeys import HASH_KEY_AAD
from vaultevents.store.audit_log import record
from vaultevents.store.mfa import seed_aad
from vaultevents.store.pool import Connection, Database, Record
from vaultevents.store.sessions import COMMAND_TIMEOUT_S, Sessions, connect_options
from vaultevents.store.sqlstates import translated

log = structlog.get_logger("store")

BATCH: Final = 100
KEY_LOCK: Final = 0x6B6579  # "key"
PING_S: Final = 10.0
RECONNECT_S: Final = 0.5
BUSY_S: Final = 0.05


def answer_aad(webhook_id: str) -> str:
    """What binds the sealed answer to a create to its row."""
    return f"answer {webhook_id}"


SEALED: Final[Mapping[str, Callable[[Record], str]]] = {
    "webhook_secrets": lambda row: str(row["webhook_id"]),
    "mfa_factors": lambda row: seed_aad(row["account_id"]),
    "hash_key": lambda _: HASH_KEY_AAD,
    "idempotent_answers": lambda row: answer_aad(row["webhook_id"]),
}
"""Every table with a sealed column, and the associated data of its rows."""


async def sealed_key_ids(database: Database) -> set[str]:
    """The ids of the master keys that anything stored is sealed with (rule D2)."""
    async with database.transaction() as connection:
        rows = await connection.fetch(" union ".join(_KEY_IDS.replace("TABLE", table) for table in SEALED))
    return {row["key_id"] for row in rows}


_KEY_IDS = "select key_id from TABLE where sealed is not null"


async def reseal(
    database: Database, key: MasterKey, nonce: Callable[[], bytes], advanced: Callable[[int, int], None]
) -> int:
    """Seals everything with `key` that one of its previous keys has sealed; how many rows that were.

    A few rows a transaction: it may be ended at any point, and started again. Rows that others hold are left for later,
    so nobody ever waits in a circle. `advanced` learns how many rows are done out of how many. Raises `SealBroken` for
    a row that no key opens.
    """
    done, left = 0, await _left(database, key)
    total = left
    while left:
        for table in SEALED:
            while number := await _reseal_some(database, table, key, nonce, recorded=done > 0):
                done += number
                advanced(done, max(done, total))
        left = await _left(database, key)
        if left:
            await asyncio.sleep(BUSY_S)
    return done


async def _left(database: Database, key: MasterKey) -> int:
    async with database.transaction() as connection:
        return sum([await connection.fetchval(_LEFT.replace("TABLE", table), key.id) for table in SEALED])


async def _reseal_some(
    database: Database, table: str, key: MasterKey, nonce: Callable[[], bytes], *, recorded: bool
) -> int:
    async with database.transaction() as connection:
        rows = await connection.fetch(_SOME.replace("TABLE", table), key.id, BATCH)
        await connection.executemany(
            _RESEAL.replace("TABLE", table),
            [(row["ctid"], key.id, _resealed(row, SEALED[table](row), key, nonce)) for row in rows],
        )
        if rows and not recorded:  # once, with the first rows
            before = {"key_ids": {row["key_id"] for row in rows}}
            after = {"key_ids": {key.id}}
            await record(connection, acting(), "master_key.rotate", "master key", before=before, after=after)
    return len(rows)


_LEFT = "select count(*) from TABLE where key_id <> $1"
_SOME = "select ctid, * from TABLE where key_id <> $1 limit $2 for update skip locked"
_RESEAL = "update TABLE set key_id = $2, sealed = $3 where ctid = $1"


def _resealed(row: Record, aad: str, key: MasterKey, nonce: Callable[[], bytes]) -> bytes | None:
    """An answer whose webhook is gone holds nothing any longer."""
    return None if row["sealed"] is None else seal(key, open_sealed(key, row["sealed"], aad), aad, nonce())


@asynccontextmanager
async def sealing_with(target: Mapping[str, Any], schema: str, key_id: str) -> AsyncIterator[None]:
    """While it is open, this process may seal with the key, and nobody begins to rotate away from it.

    `target` is what `asyncpg.connect` takes. Raises `DatabaseUnusable` while such a rotation is under way.
    """
    holding = _Holding(target, schema, key_id, await _lock(target, schema, [key_id], "shared"))
    keeping = asyncio.create_task(holding.keep())
    try:
        yield
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        await _end(holding.connection)


@dataclass(slots=True)
class _Holding:
    """The lock of a key that this process seals with, and the connection that holds it."""

    target: Mapping[str, Any]
    schema: str
    key_id: str
    connection: Connection

    async def keep(self) -> None:
        """Takes the lock again whenever its connection was lost."""
        while True:
            await _until_lost(self.connection)
            self.connection.terminate()
            await asyncio.sleep(RECONNECT_S)
            with suppress(DatabaseUnavailable):
                try:
                    self.connection = await _lock(self.target, self.schema, [self.key_id], "shared")
                except DatabaseUnusable as problem:
                    log.error("master_key_rotated", problem=str(problem))
                    await asyncio.sleep(PING_S)


async def _until_lost(connection: Connection) -> None:
    ended = asyncio.Event()
    connection.add_termination_listener(lambda _: ended.set())
    with suppress(DatabaseUnavailable), _translating():
        while not connection.is_closed():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), PING_S)
            await connection.fetchval("select 1")  # or a silent network would keep the loss to itself


@asynccontextmanager
async def rotating_from(target: Mapping[str, Any], schema: str, key_ids: Iterable[str]) -> AsyncIterator[None]:
    """While it is open, nobody else seals with these keys.

    Raises `DatabaseUnusable` when somebody does, and at its end `DatabaseUnavailable` when that is not certain for the
    whole time: then start again.
    """
    connection = await _lock(target, schema, key_ids, "exclusive")
    try:
        yield
        with _translating():
            await connection.fetchval("select 1")
    finally:
        await _end(connection)


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problem = translated(error)
        if problem is None:
            raise
        raise problem from error


async def _lock(
    target: Mapping[str, Any], schema: str, key_ids: Iterable[str], mode: Literal["shared", "exclusive"]
) -> Connection:
    """A connection of its own that holds the locks of these keys until it ends."""
    with _translating():
        connection = await Sessions().open(connect_options(target))
        try:
            for key_id in sorted(key_ids):
                if not await connection.fetchval(_LOCKS[mode], KEY_LOCK, f"{schema} {key_id}"):
                    raise DatabaseUnusable(_REFUSALS[mode].format(key_id))
        except BaseException:
            await _end(connection)
            raise
    return connection


async def _end(connection: Connection) -> None:
    try:
        with _translating():
            await connection.close(timeout=COMMAND_TIMEOUT_S)
    except (DatabaseUnavailable, DatabaseUnusable):
        connection.terminate()


_LOCKS: Final = {
    "shared": "select pg_try_advisory_lock_shared($1, hashtext($2))",
    "exclusive": "select pg_try_advisory_lock($1, hashtext($2))",
}


_REFUSALS: Final = {
    "shared": "the master key {} is being rotated: give the new one, and this one as master_key_previous_file",
    "exclusive": "a process works on this database that seals with the master key {}: stop it, or restart it with the "
    "new one as its master key and this one as master_key_previous_file",
}
