"""How long a test waits for what must happen, and how it waits.

A wait that ends in time proves nothing more than a longer one, and on a busy machine a short one fails for no fault of
the product. Speeds are measured by the benchmarks; a test says `in time` only of what the product promises in seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

WAIT_TIMEOUT_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    """For tests without a loop, and for what would have to go on while theirs stands still."""
    give_up_at = time.monotonic() + WAIT_TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {WAIT_TIMEOUT_S:.0f} s"
        time.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    """Likewise, for what has to be asked for."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not await condition():
            await asyncio.sleep(0.02)
