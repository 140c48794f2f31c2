"""What the tasks of a dispatcher wait for: a reason for the next cycle, and something to write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ClaimSignal(asyncio.Event):
    """Ends the wait before the next cycle; `stopping`: cycles settle what is in flight, and claim no more."""

    stopping = False
    _timer: asyncio.TimerHandle | None = None

    def soon(self, within_s: float) -> None:
        """Set the event after so many seconds, unless it is about to be set."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(within_s, self._end_timer)

    def _end_timer(self) -> None:
        self._timer = None
        self.set()

    def stop(self) -> None:
        """Begin to stop."""
        self.stopping = True
        self.set()

    async def within(self, seconds: float) -> bool:
        """Wait until the event is set; return False when it was not set in time."""
        try:
            async with asyncio.timeout(max(seconds, 0.001)):
                return await self.wait()
        except TimeoutError:
            return False


class Pending(Generic[Item]):
    """What has to be written, and whether there is `enough` for a batch."""

    def __init__(self, enough: int = 1) -> None:
        self._items: list[Item] = []
        self._enough = enough
        self._ready = asyncio.Event()
        self.wait = self._ready.wait

    def __len__(self) -> int:
        return len(self._items)

    def add(self, *items: Item) -> None:
        """Add what has to be written."""
        self._items += items
        if len(self._items) >= self._enough:
            self._ready.set()

    def take(self, most: int) -> Sequence[Item]:
        """Remove and return the first `most` at most."""
        taken, self._items = self._items[:most], self._items[most:]
        if len(self._items) < self._enough:
            self._ready.clear()
        return taken
