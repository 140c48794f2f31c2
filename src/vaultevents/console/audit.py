"""Audit: what is read again, what is set apart, and who changed what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vaultevents.console.context import ConsoleContext
from vaultevents.console.live import LivePage
from vaultevents.store import audit_log, quarantine, status

LISTED: Final = 50
COUNTED: Final = 10_000


def page(context: ConsoleContext) -> LivePage:
    """Return the page `/audit`."""

    async def read() -> Mapping[str, Any]:
        async with context.database.transaction() as connection:
            cursors = await status.read_cursors(connection)
            orphaned = await status.read_orphaned(connection)
            open_logs = await quarantine.count_open(connection, COUNTED)
            acts = await audit_log.entries(connection, limit=LISTED)
        live = {cursor.stream: cursor.position for cursor in cursors if cursor.kind == "live"}
        audits = [
            (cursor, max(0, live.get(cursor.stream, cursor.position) - cursor.position))
            for cursor in cursors
            if cursor.kind == "audit"
        ]
        return {
            "audits": audits,
            "blocks_per_s": context.settings.execution.audit_blocks_per_s,
            "orphaned": orphaned,
            "open_logs": open_logs,
            "most": COUNTED,
            "logs": await quarantine.page(context.database, LISTED),
            "acts": acts,
        }

    return LivePage("/audit", "Audit", "audit.html", read)
