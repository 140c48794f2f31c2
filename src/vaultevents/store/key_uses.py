"""When API keys were last used: kept in memory by each API process, and written in one statement once a minute."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Final

from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.store.pool import Database

SAVE_S: Final = 60.0
SAVED_WITHIN_S: Final = 5.0
"""A statement that takes longer is cancelled, and tried again the next time."""


class KeyUses:
    """The uses of API keys that are not saved yet. To note one costs an entry of a dictionary and no request waits."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._unsaved: dict[str, float] = {}

    def note(self, key_id: str, now_s: float) -> None:
        """Note that a request with the key was accepted at this time."""
        self._unsaved[key_id] = now_s

    async def save(self) -> None:
        """Write what is noted; it stays noted where the database is away."""
        noted = dict(self._unsaved)
        if not noted:
            return
        times = [datetime.fromtimestamp(at_s, UTC) for at_s in noted.values()]
        try:
            async with asyncio.timeout(SAVED_WITHIN_S), self._database.statement() as connection:
                await connection.execute(_SAVE, list(noted), times)
        except (DatabaseUnavailable, DatabaseUnusable, TimeoutError):
            return
        for key_id, at_s in noted.items():
            if self._unsaved[key_id] == at_s:  # not used again meanwhile
                del self._unsaved[key_id]

    async def keep(self) -> None:
        """Save once a minute until this is cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save()


async def last_uses(database: Database, account_id: str | None) -> dict[str, datetime]:
    """Return when the keys of an account, or all keys, were last used; without those that never were."""
    async with database.statement() as connection:
        rows = await connection.fetch(
            "select u.api_key_id, u.used_at from api_key_uses u join api_keys k on k.id = u.api_key_id"
            " where k.account_id = $1 or $1 is null",
            account_id,
        )
    return {row["api_key_id"]: row["used_at"] for row in rows}


# In one order everywhere, so that processes wait for each other and never in a circle. A key may be missing in an older
# copy of the database that took over.
_SAVE: Final = """
insert into api_key_uses (api_key_id, used_at)
select n.id, n.at from unnest($1::text[], $2::timestamptz[]) n (id, at) join api_keys k on k.id = n.id order by n.id
on conflict (api_key_id) do update set used_at = greatest(api_key_uses.used_at, excluded.used_at)
"""
