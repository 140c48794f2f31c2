"""Open the configured database, migrate it, and find the master key that fits what is sealed in it (rule D2)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from vaultevents.config import Settings
from vaultevents.core.environment import NEW_KEY_VARIABLE
from vaultevents.core.errors import ConfigError, DatabaseUnavailable, DatabaseUnusable
from vaultevents.core.sealing import KEY_BYTES, NONCE_BYTES, HashKey, MasterKey
from vaultevents.store.apikeys import hash_key
from vaultevents.store.clock import ServiceClock
from vaultevents.store.pool import Database, open_database
from vaultevents.store.postgres.embedded import EmbeddedPostgres
from vaultevents.store.rotation import rotating_from, sealed_key_ids, sealing_with
from vaultevents.wiring import key_files

log = structlog.get_logger("daemon")

T = TypeVar("T")
PAUSE_S = 0.5
START_TRIES = 20


@dataclass(frozen=True, slots=True)
class Store:
    """The open database, the key of its secrets, and the embedded server where there is one."""

    database: Database
    key: MasterKey
    embedded: EmbeddedPostgres | None


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """Open the configured or the embedded database, bring its schema up to date, find its master key (rule D2)."""
    async with opened_database(settings) as opened, AsyncExitStack() as stack:
        key = key_files.given_key(settings, make=not await while_lost(opened.key_ids))

        async def hold() -> None:
            await opened.join()
            await stack.enter_async_context(sealing_with(opened.target, settings.database_schema, key.id))

        await while_lost(hold)
        check_key(key, await while_lost(opened.key_ids))  # again: from now on nobody rotates it away
        yield Store(opened.database, key, opened.embedded)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The open database, and the key with which everything is to be sealed; its previous ones open what is there.

    `former` is the file with the former key, where this service made it: to be put away when all is done.
    """

    database: Database
    key: MasterKey
    former: Path | None


@asynccontextmanager
async def open_rotation(
    settings: Settings, new_key: Callable[[MasterKey], MasterKey] | None
) -> AsyncIterator[Rotation]:
    """Opens the database for another master key, with which nobody else seals any longer by a former one (rule D2).

    `new_key` makes it of the one of the settings, which is then its previous one. Without it the settings have the new
    one and its previous one already, or the key file of the embedded database is replaced; the former is kept as
    `.old` beside it. Raises `ConfigError` without either, `DatabaseUnusable` while a process seals with a former key.
    """
    async with opened_database(settings) as opened:
        in_use = await while_lost(opened.key_ids)
        given = key_files.given_key(settings, make=not in_use)
        key = given if new_key is None else new_key(given)
        check_key(key, in_use)
        made = new_key is None and len(given.known) == 1
        if made and not key_files.is_own_file(settings):
            raise ConfigError(
                "there is no new master key: name its file with --new-key-file ('openssl rand -base64 32' makes one), "
                f"or set {NEW_KEY_VARIABLE}"
            )
        former = {known.id for known in key.known} - (set() if made else {key.id})
        async with rotating_from(opened.target, settings.database_schema, former):
            if made:
                if key_files.given_key(settings, make=False).id != given.id:
                    raise DatabaseUnusable("the master key was just rotated by somebody else: start again for another")
                key_files.renew_key(key_files.own_file(settings))
                key = key_files.given_key(settings, make=False)
            file = key_files.former_file(settings)
            yield Rotation(opened.database, key, file if new_key is None and key_files.is_replaced(settings) else None)


@dataclass(frozen=True, slots=True)
class OpenedDatabase:
    """A database before its key is known; `target` is what `asyncpg.connect` takes."""

    database: Database
    target: Mapping[str, Any]
    embedded: EmbeddedPostgres | None

    async def join(self) -> None:
        """Nobody else brings the embedded server back while a start waits for it."""
        if self.embedded is not None:
            await asyncio.to_thread(self.embedded.join)

    async def key_ids(self) -> set[str]:
        """The ids of the keys that the stored secrets are sealed with."""
        await self.join()
        return await sealed_key_ids(self.database)


@asynccontextmanager
async def opened_database(settings: Settings) -> AsyncIterator[OpenedDatabase]:
    """Open the configured or the embedded database and bring its schema up to date, whatever its key is."""
    async with AsyncExitStack() as stack:
        if settings.database_url is not None:
            target = {"dsn": settings.database_url.get_secret_value()}
            opened = OpenedDatabase(await open_database(target, schema=settings.database_schema), target, None)
        else:
            embedded = EmbeddedPostgres(disks(settings)["database"])
            stack.push_async_callback(asyncio.to_thread, embedded.leave)
            opened = await while_lost(partial(_open_embedded, embedded, settings.database_schema))
        stack.push_async_callback(opened.database.close)
        yield opened


async def _open_embedded(embedded: EmbeddedPostgres, schema: str) -> OpenedDatabase:
    target = (await asyncio.to_thread(embedded.join)).connect_kwargs()
    return OpenedDatabase(await open_database(target, schema=schema), dict(target), embedded)


def check_key(key: MasterKey, in_use: Collection[str]) -> None:
    """Raise `DatabaseUnusable` unless the key opens what the keys with the ids `in_use` have sealed (rule D2)."""
    if other := sorted(set(in_use) - {known.id for known in key.known}):
        raise DatabaseUnusable(
            f"secrets in this database are sealed with the master key {', '.join(other)}, and the one given is "
            f"{key.id}: give the right one"
        )


async def open_hash_key(store: Store) -> HashKey:
    """The key under which API keys are hashed; made at first use (rule A14)."""
    return await hash_key(store.database, store.key, secrets.token_bytes(KEY_BYTES), secrets.token_bytes(NONCE_BYTES))


async def service_clock(database: Database) -> ServiceClock:
    """The clock of this process, set by the database's (rule D15)."""
    return ServiceClock(await while_lost(database.now))


async def while_lost(work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, started over for a while when the database goes away in the middle of a start."""
    for _ in range(START_TRIES):
        try:
            return await work()
        except DatabaseUnavailable as error:
            log.warning("start_waits", problem=str(error), retry_in_s=PAUSE_S)
            await asyncio.sleep(PAUSE_S)
    return await work()


def disks(settings: Settings) -> dict[str, Path]:
    """Return the directories whose disks can fill up: `data`, and `database` where it is the embedded one."""
    embedded = {} if settings.database_url is not None else {"database": settings.directory / "postgres"}
    return {"data": settings.directory, **embedded}
