"""A hint that there may be something new: it ends a wait early, carries nothing, and may be wrong (rule I10)."""

from __future__ import annotations

import asyncio
import contextlib


class Wakeup:
    """Signalled by the source of a new head, to all streams at once."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def give(self) -> None:
        """Ends every wait for the next hint."""
        given, self._next = self._next, asyncio.Event()
        given.set()

    def next(self) -> asyncio.Event:
        """What the next hint from now on sets; take it before you look, so that none in between is missed."""
        return self._next


async def until(event: asyncio.Event, within_s: float) -> None:
    """Returns when `event` is set, and after `within_s` at the latest."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()
