"""Overview: what is going on, at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vaultevents.console.context import ConsoleContext
from vaultevents.console.live import LivePage
from vaultevents.store import console_overview


def page(context: ConsoleContext) -> LivePage:
    """Return the page `/`."""

    async def read() -> Mapping[str, Any]:
        async with context.database.transaction() as connection:
            events = await console_overview.newest_events(connection)
        return {"network": context.settings.network, "events": events}

    return LivePage("/", "Overview", "overview.html", read)
