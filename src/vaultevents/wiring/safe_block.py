"""The safe block, for operators: read from a node at most once a minute, and only while a page that shows it is open.

The Beacon API's checkpoints, which are polled anyway, name the root of the justified block and no execution block, so
that nothing that is read already has its number (decision 0062).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.core.errors import SourceUnavailable, WrongNetwork

READ_EVERY_S: Final = 60.0
"""On public networks it moves once an epoch, which lasts 384 s."""
READ_EVERY_DEVNET_S: Final = 2.0
KNOWN_S: Final = 120.0
"""An older number is not shown."""


class SafeBlock:
    """What the console shows and the watcher reads; nothing where this process does not watch."""

    def __init__(self, every_s: float = READ_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._wanted = asyncio.Event()
        self._known: tuple[int, float] | None = None

    def number(self) -> int | None:
        """Return the number as it was read lately, and have it read again; None where it is not known."""
        self._wanted.set()
        if self._known is None or self._clock() - self._known[1] > KNOWN_S:
            return None
        return self._known[0]

    async def follow(self, chain: ExecutionChain) -> None:
        """Read the number whenever it is wanted, until this is cancelled."""
        while True:
            await self._wanted.wait()
            try:
                number = await chain.safe_block()
            except (SourceUnavailable, WrongNetwork):
                number = None
            self._known = None if number is None else (number, self._clock())
            await asyncio.sleep(self._every_s)
            self._wanted.clear()
