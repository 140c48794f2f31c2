"""A wake-up for streams: it ends a wait early, carries no data, and may be superfluous (rule I10)."""

from __future__ import annotations

import asyncio
import contextlib


class Wakeup:
    """Signalled by the source of a new head, to all streams at once."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def give(self) -> None:
        """End every wait for the next wake-up."""
        given, self._next = self._next, asyncio.Event()
        given.set()

    def next(self) -> asyncio.Event:
        """Return the event that the next wake-up sets. Take it before you look, so that none is missed in between."""
        return self._next


async def until(event: asyncio.Event, within_s: float) -> None:
    """Return when `event` is set, and after `within_s` at the latest."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()
