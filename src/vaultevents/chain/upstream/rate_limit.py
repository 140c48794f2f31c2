"""How fast one node may be asked, learned from its refusals; how long its answers take, and when one is late. Pure.

Additive increase, multiplicative decrease, as TCP shares a line (RFC 5681): a refusal halves what was asked lately,
and quiet time lets it grow again by equal steps. All times are seconds of one clock that only goes forward.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Final

from vaultevents.core.nodes import Latency

LEAST_PER_S: Final = 1.0
"""A node that wants less than this says so with `Retry-After`."""
FIRST_LEAST_PER_S: Final = 8.0
"""What the first refusal leaves at least: a node may have met its limit by what others asked of it."""
MEASURED_S: Final = 1.0
"""Limits are counted by the second: what was asked within one is measured, and refusals within one are one lesson."""
DEFAULT_PAUSE_S: Final = 0.5
"""Nothing is asked for so long after a refusal without `Retry-After`."""
QUIET_S: Final = 5.0
STEPS: Final = 20
"""Of a second each: after so much more quiet time a halved rate is whole again."""
LEAST_STEP_PER_S: Final = 0.5
LONGEST_HOLD_S: Final = 300.0
"""A node that asks for a longer pause is asked again after this one, for the case that it was wrong."""


class RateLimiter:
    """When the next request may go to one node. Until it refuses one, as soon as it comes."""

    __slots__ = ("_allowed_per_s", "_cut_at", "_free_at", "_grown_at", "_held_until", "_sent", "_step")

    def __init__(self) -> None:
        self._allowed_per_s: float | None = None
        self._step = 0.0
        self._cut_at = self._grown_at = self._free_at = self._held_until = float("-inf")
        self._sent: deque[float] = deque()

    @property
    def requests_per_s(self) -> float | None:
        """What is allowed; None while the node has not refused anything."""
        return self._allowed_per_s

    def load_state(self, requests_per_s: float, now: float) -> None:
        """What was learned at an earlier time, by another object."""
        self._cut(max(LEAST_PER_S, requests_per_s), now)
        self._free_at = now

    def due(self, now: float) -> float:
        """When a request could be sent that is booked now."""
        at = max(now, self._held_until)
        return at if self._allowed_per_s is None else max(at, self._free_at)

    def book(self, now: float) -> float:
        """The time at which a request may be sent, now or later; it counts as sent then."""
        at = self.due(now)
        if self._allowed_per_s is not None:
            waits = at > max(now, self._held_until)
            self._free_at = at + 1 / self._allowed_per_s
            if waits:
                self._grow(now)
        while self._sent and self._sent[0] <= now - MEASURED_S:
            self._sent.popleft()
        self._sent.append(at)
        return at

    def refused(self, sent_at: float, now: float, retry_after_s: float = 0.0) -> None:
        """A request that was sent at `sent_at` met the node's limit. One burst of refusals is one lesson."""
        self._held_until = max(self._held_until, now + min(retry_after_s or DEFAULT_PAUSE_S, LONGEST_HOLD_S))
        if sent_at < self._cut_at + MEASURED_S:
            return
        if self._allowed_per_s is None:
            asked_per_s = sum(now - MEASURED_S < at <= now for at in self._sent) / MEASURED_S
            allowed_per_s = max(FIRST_LEAST_PER_S, asked_per_s / 2)
        else:  # not of what was asked: that is next to nothing while the node is left alone
            allowed_per_s = max(LEAST_PER_S, self._allowed_per_s / 2)
        self._cut(allowed_per_s, now)
        self._free_at = max(self._free_at, now + 1 / allowed_per_s)

    def held_s(self, now: float) -> float:
        """How long the node has asked to be left alone; 0 when it has not."""
        return max(0.0, self._held_until - now)

    def _cut(self, allowed_per_s: float, now: float) -> None:
        self._allowed_per_s = allowed_per_s
        self._step = max(LEAST_STEP_PER_S, allowed_per_s / STEPS)
        self._cut_at = self._grown_at = now

    def _grow(self, now: float) -> None:
        """Only where the limit makes somebody wait: what nobody asks for teaches nothing."""
        assert self._allowed_per_s is not None
        since = max(self._grown_at, self._cut_at + QUIET_S)
        steps = int(now - since)
        if steps > 0:
            self._allowed_per_s += steps * self._step
            self._grown_at = since + steps


class LatencyEstimate:
    """After which time an answer is late: three times what the slowest twentieth of the last answers took."""

    __slots__ = ("_took",)

    _REMEMBERED = 64
    _ENOUGH = 8
    _LEAST_S = 0.2
    _UNKNOWN_S = 1.0
    _FACTOR = 3

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=self._REMEMBERED)

    def answered(self, took_s: float) -> None:
        self._took.append(took_s)

    @property
    def late_s(self) -> float:
        if len(self._took) < self._ENOUGH:
            return self._UNKNOWN_S
        slow = sorted(self._took)[len(self._took) * 19 // 20]
        return max(self._LEAST_S, self._FACTOR * slow)


class AnswerTimes:
    """How long the last answers of one node took, for operators: from the request to the end of the body."""

    __slots__ = ("_took",)

    REMEMBERED: Final = 128

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=self.REMEMBERED)

    def answered(self, took_s: float) -> None:
        self._took.append(took_s)

    @property
    def latency(self) -> Latency | None:
        """Return percentiles by the nearest rank; None without an answer."""
        if not self._took:
            return None
        took = sorted(self._took)
        return Latency(*(took[ceil(share * len(took)) - 1] for share in (0.5, 0.95)))
