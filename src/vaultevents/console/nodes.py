"""Nodes: which are used, what is wrong with the others, and what was learned of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vaultevents.console.context import ConsoleContext
from vaultevents.console.live import LivePage
from vaultevents.store import nodes as store


def page(context: ConsoleContext) -> LivePage:
    """Return the page `/nodes`."""

    async def read() -> Mapping[str, Any]:
        async with context.database.transaction() as connection:
            return {"nodes": await store.facts(connection)}

    return LivePage("/nodes", "Nodes", "nodes.html", read)
