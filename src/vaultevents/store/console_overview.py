"""What the console shows at a glance, at a cost that does not grow with what is stored."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from vaultevents.store.pool import Connection

NEWEST_EVENTS: Final = 20


@dataclass(frozen=True, slots=True)
class EventFacts:
    """An event without its body."""

    seq: int
    id: str
    event_type: str
    account_id: str
    vault_id: str
    block_number: int | None
    stored_at: datetime
    orphaned_at: datetime | None


async def newest_events(connection: Connection, limit: int = NEWEST_EVENTS) -> list[EventFacts]:
    """Return the events that were stored last, newest first."""
    rows = await connection.fetch(
        "select seq, id, event_type, account_id, vault_id, block_number, stored_at, orphaned_at"
        " from events order by seq desc limit $1",
        limit,
    )
    return [EventFacts(**row) for row in rows]
