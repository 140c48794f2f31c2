"""Negative control for test_kills: a daemon that commits the cursor in a transaction before that of the events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from vaultevents.cli import main
from vaultevents.core.events import Event
from vaultevents.store import outbox
from vaultevents.store.outbox import Committed, Cursor, Lost, Outbox
from vaultevents.store.quarantine import Changes

commit = Outbox.commit


async def commit_cursor_first(
    self: Outbox, old: Cursor, new: Cursor, events: Iterable[Event], registry_version: int, **options: Any
) -> Committed | Lost:
    outcome = await commit(self, old, new, (), registry_version)
    if isinstance(outcome, Lost):
        return outcome
    await asyncio.sleep(0.3)
    return await commit(self, new, new, events, registry_version, **options)


async def quarantine_nothing(*_: object) -> Changes:
    """The second commit spans no block."""
    return Changes()


if __name__ == "__main__":
    outbox._quarantine = quarantine_nothing  # type: ignore[assignment]
    Outbox.commit = commit_cursor_first  # type: ignore[method-assign]
    main()
