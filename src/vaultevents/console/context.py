"""What every page of the console works with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from vaultevents.config import Settings
from vaultevents.console.checks import CheckRunner
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.sealing import MasterKey
from vaultevents.store.pool import Database

if TYPE_CHECKING:  # a command that makes a link needs no nodes
    from vaultevents.wiring.sources import Sources

ANSWERS_WITHIN_S: Final = 4.0
"""A database that is slower counts as away: a browser shows that instead of waiting."""

T = TypeVar("T")


def _not_known() -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class ConsoleContext:
    """The console of one process.

    `sources` opens the nodes that the settings name, for a replay or a backfill. `stop` ends the streams of live pages,
    so that a shutdown waits for none. `chain_behind_s` is how far the clock of a simulated chain is behind.

    `check` runs `vaultevents check`; None where that is not offered. `safe_block` returns the number of the safe block
    where this process knows it.
    """

    database: Database
    settings: Settings
    key: MasterKey
    now_s: Callable[[], float]
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    check: CheckRunner | None = None
    safe_block: Callable[[], int | None] = _not_known
    sources: Callable[[], AbstractAsyncContextManager[Sources]] = field(kw_only=True)
    chain_behind_s: Callable[[], float] = field(default=float, kw_only=True)


async def in_time(reading: Awaitable[T]) -> T:
    """Return what the database answers; raise `DatabaseUnavailable` when it takes too long."""
    try:
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            return await reading
    except TimeoutError:
        raise DatabaseUnavailable(f"the database did not answer within {ANSWERS_WITHIN_S:g} s") from None
