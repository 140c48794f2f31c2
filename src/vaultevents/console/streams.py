"""Streams: how far each stream is read, by live cursors, backfills, replays and audits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vaultevents import metrics
from vaultevents.console.context import ConsoleContext
from vaultevents.console.live import LivePage
from vaultevents.console.overview import backfill
from vaultevents.console.progress import Progress
from vaultevents.store import status


def page(context: ConsoleContext) -> LivePage:
    """Return the page `/streams`."""
    progress = Progress()

    async def read() -> Mapping[str, Any]:
        async with context.database.transaction() as connection:
            cursors = await status.read_cursors(connection)
        progress.note(cursors, context.now_s())
        live = [(cursor, metrics.lag(cursor.stream, cursor.position)) for cursor in cursors if cursor.kind == "live"]
        others = [
            backfill(cursor, progress.left_s(cursor)) for cursor in cursors if cursor.kind in ("backfill", "replay")
        ]
        return {"live": live, "others": others, "problems": [cursor for cursor in cursors if cursor.problem]}

    return LivePage("/streams", "Streams", "streams.html", read)
