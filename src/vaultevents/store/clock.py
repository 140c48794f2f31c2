"""The service clock: Postgres's time at the last check plus the time that has passed since (rule D15)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta


class ServiceClock:
    """Signs timestamps and judges freshness; a step of the host's clock changes nothing."""

    def __init__(self, database_time: datetime, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self.check(database_time)

    def check(self, database_time: datetime) -> None:
        """Takes over the database's time of this moment."""
        self._checked, self._checked_at_s = database_time, self._monotonic_s()

    def now(self) -> datetime:
        return self._checked + timedelta(seconds=self._monotonic_s() - self._checked_at_s)

    def now_s(self) -> int:
        """The present in whole seconds."""
        return int(self.now().timestamp())


class SimulatedClock(ServiceClock):
    """The time of a simulated chain, which passes with its blocks: nothing that it decides depends on the real one."""

    def __init__(self, time_s: Callable[[], float]) -> None:
        self._time_s = time_s

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._time_s(), UTC)
