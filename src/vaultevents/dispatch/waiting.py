"""What the tasks of a dispatcher wait for: a reason for the next cycle, and something to write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Wakeup:
    """Ends the wait before the next cycle; `stopping`: cycles settle what is in flight, and claim no more."""

    def __init__(self) -> None:
        self.now_or_later = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None
        self.stopping = False
        self.now = self.now_or_later.set
        self.clear = self.now_or_later.clear

    def soon(self, within_s: float) -> None:
        if self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(within_s, self._end_timer)

    def _end_timer(self) -> None:
        self.timer = None
        self.now()

    def stop(self) -> None:
        self.stopping = True
        self.now()

    async def wait(self, within_s: float) -> bool:
        """Wait until there may be something to claim; return False when nothing was reported in time."""
        try:
            async with asyncio.timeout(max(within_s, 0.001)):
                await self.now_or_later.wait()
        except TimeoutError:
            return False
        return True


class Pending(Generic[Item]):
    """What has to be written, and whether there are `enough` for a batch."""

    def __init__(self, enough: int = 1) -> None:
        self._items: list[Item] = []
        self._enough = enough
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def append(self, item: Item) -> None:
        self._items.append(item)
        if len(self._items) >= self._enough:
            self._ready.set()

    def extend(self, items: Sequence[Item]) -> None:
        self._items += items
        if len(self._items) >= self._enough:
            self._ready.set()

    async def wait(self) -> None:
        await self._ready.wait()

    def take(self, most: int) -> list[Item]:
        taken, self._items = self._items[:most], self._items[most:]
        if len(self._items) < self._enough:
            self._ready.clear()
        return taken
