"""The number of blocks that one node returns logs for at once, learned from what it refuses and serves."""

from __future__ import annotations

import time
from collections.abc import Callable

from vaultevents.core.nodes import LogLimit


class LearnedRange:
    """How many blocks one eth_getLogs may span at one node: learned from its refusals, tried larger after successes.

    A number of blocks that was refused as such is not tried again for an hour, only sizes between it and what works.
    What was refused for the logs in it says nothing of other blocks.
    """

    __slots__ = ("_clock", "_largest", "_refused", "_refused_at", "_served", "_successes", "blocks")

    _SUCCESSES_TO_GROW = 5
    FORGOTTEN_S = 3600.0
    _CLOSE = 8
    """Within an eighth of what was refused the search ends."""

    def __init__(self, start: int, largest: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.blocks = min(start, largest)
        self._largest = largest
        self._clock = clock
        self._successes = 0
        self._served = 0
        self._refused: int | None = None
        self._refused_at = 0.0

    @property
    def limit(self) -> LogLimit:
        """What is known now, for the next start."""
        return LogLimit(self.blocks, self._refused)

    def load_state(self, limit: LogLimit) -> None:
        """What was known before."""
        self.blocks = max(1, min(limit.blocks, self._largest))
        self._refused, self._refused_at = limit.refused, self._clock()

    def refused(self, asked: int, allowed: int | None = None, *, by_blocks: bool = False) -> None:
        """`asked` blocks were too many: take what the node allows, where it says so, else what has worked, else half.

        `by_blocks`: they are too many wherever they are (`limits_blocks`).
        """
        hinted = allowed if allowed is not None and 0 < allowed < asked else None
        if asked <= self._served:
            self._served = 0
        smaller = hinted or (self._served if by_blocks else 0) or asked // 2
        self.blocks = max(1, min(self.blocks, smaller))
        self._successes = 0
        if by_blocks:
            refused = asked if hinted is None else hinted + 1
            self._refused = min(refused, self._refused or refused)
            self._refused_at = self._clock()

    def served(self, asked: int) -> None:
        """`asked` blocks were read; more are tried after five full ranges in a row."""
        self._served = max(self._served, asked)
        if asked < self.blocks:
            return
        self._successes += 1
        if self._successes >= self._SUCCESSES_TO_GROW:
            self.blocks = self._larger()
            self._successes = 0

    def _larger(self) -> int:
        if self._clock() - self._refused_at > self.FORGOTTEN_S:
            self._refused = None
        larger = min(self._largest, self.blocks + (self.blocks + 1) // 2)
        if self._refused is None:
            return larger
        untried = self._refused - self.blocks
        if untried <= max(1, self.blocks // self._CLOSE):
            return self.blocks
        return min(larger, self.blocks + untried // 2)
