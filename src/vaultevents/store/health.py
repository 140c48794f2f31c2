"""Find out whether the database can be written to: one that only answers questions is not healthy (rule T20)."""

from __future__ import annotations

from typing import Final

from vaultevents.store.pool import Database, migrations

ROWS: Final = 2_000
"""Some 70 kB: more than what a disk that is called full may have left."""


async def write_probe(database: Database) -> None:
    """Commit a row, and claim new space on the database's disk; the space is given back at once.

    An update alone proves little: on a full disk it still finds room in its page and in the present file of the log.
    Raises `DatabaseUnavailable` or `DatabaseUnusable` where the database cannot do this.
    """
    async with database.transaction() as connection:
        await connection.execute(_SPACE)
        await connection.execute("insert into pg_temp.health_space select generate_series(1, $1::integer)", ROWS)
        await connection.execute("update health_probe set written_at = db_now()")


async def has_schema(database: Database) -> bool:
    """Test whether every migration of this version is applied; a newer version may have applied more."""
    async with database.statement() as connection:
        applied: int = await connection.fetchval("select count(*) from migrations")
    return applied >= NEEDED


NEEDED: Final = len(migrations())

_SPACE = "create temporary table if not exists health_space (number integer) on commit delete rows"
