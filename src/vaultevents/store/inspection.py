"""What the database is and what its user may do there, beyond that it could be opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vaultevents.core.sealing import MasterKey, open_sealed
from vaultevents.store.cursors import readiness
from vaultevents.store.pool import API_ROLE, Database
from vaultevents.store.registry import first_block
from vaultevents.store.rotation import SEALED

SAMPLE_ROWS: Final = 100


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """`missing` are privileges that the service needs and its user lacks, such as `insert on events`."""

    version: str
    encoding: str
    user: str
    migration: str
    is_standby: bool
    missing: tuple[str, ...]


async def inspect(database: Database) -> DatabaseFacts:
    """Read what the database is and what its user lacks."""
    async with database.transaction() as connection:
        row = await connection.fetchrow(_FACTS, API_ROLE)
    return DatabaseFacts(**{**row, "missing": tuple(row["missing"])})


async def count_events(database: Database) -> int:
    """Return how many events are stored, from their running total."""
    async with database.transaction() as connection:
        found: int = await connection.fetchval(
            "select coalesce(sum(difference), 0)::bigint from row_totals where counted = 'events'"
        )
    return found


async def try_api_role(database: Database) -> None:
    """Read as the API does: in its role, of an account that does not exist. Raises what the database refuses."""
    async with database.of_account("") as connection:
        await connection.fetchval("select count(*) from webhooks")


async def webhooks_by_name(database: Database) -> bool:
    """Return whether an active webhook has a URL with a name that has to be looked up."""
    async with database.transaction() as connection:
        found: bool = await connection.fetchval(
            "select exists (select from webhooks where active and deleted_at is null and url !~ $1)",
            r"^https?://([0-9.]+|\[.*\]|localhost)(:[0-9]+)?(/|$)",
        )
    return found


async def first_unread_block(database: Database) -> int | None:
    """Return the earliest block that backfills of contract logs are still to read; None where there is none.

    Before the first start of the watcher these are all blocks from the earliest registered one on.
    """
    async with database.transaction() as connection:
        ready = await readiness(connection, "logs")
        if ready is None:
            return await first_block(connection)
        return min((span.first for span in ready.backfills), default=None)


async def open_secrets(database: Database, key: MasterKey) -> int:
    """Open the newest sealed secrets of each table; return how many. Raises `SealBroken` for one that does not open."""
    opened = 0
    async with database.transaction() as connection:
        for table, aad in SEALED.items():
            rows = await connection.fetch(_SEALED.replace("TABLE", table), SAMPLE_ROWS)
            for row in rows:
                open_sealed(key, row["sealed"], aad(row))
            opened += len(rows)
    return opened


_SEALED = "select * from TABLE where sealed is not null order by ctid desc limit $1"

_FACTS = """
select current_setting('server_version') as version, current_setting('server_encoding') as encoding,
    current_user::text as user, pg_is_in_recovery() as is_standby,
    (select name from migrations order by number desc limit 1) as migration,
    array(
        select needed || ' on ' || c.relname
        from pg_class c cross join unnest(array['select', 'insert', 'update', 'delete']) as needed
        where c.relnamespace = current_schema()::regnamespace and c.relkind in ('r', 'p') and c.relname <> 'migrations'
            and not has_table_privilege(c.oid, needed)
        union all
        select 'temporary on the database' where not has_database_privilege(current_database(), 'temporary')
        union all
        select 'membership in the role ' || $1::text where not pg_has_role(current_user, $1::name, 'member')
    ) as missing
"""
