"""What failures in a row do to a webhook: it is parked for a while, and at last switched off (rules D7 and D8).

A streak begins with the first failure after the last success, creation or re-enabling, and any success ends it. The
store keeps it, and the database's clock is `now`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

PARK_AFTER: Final = 5
FIRST_PARK: Final = timedelta(seconds=30)
LONGEST_PARK: Final = timedelta(minutes=10)

DISABLE_AFTER: Final = timedelta(hours=120)
DISABLE_FAILURES: Final = 10
DISABLE_SPAN: Final = timedelta(hours=12)
"""Between the first and the last failure: it spares quiet webhooks one bad night."""


@dataclass(frozen=True, slots=True)
class Parking:
    """Settings of rule D8: after how many failures in a row, for how long at first, for how long at most."""

    after: int = PARK_AFTER
    first: timedelta = FIRST_PARK
    longest: timedelta = LONGEST_PARK


DEFAULT_PARKING: Final = Parking()


@dataclass(frozen=True, slots=True)
class Streak:
    """Failures since the last success; they parked the webhook `parks` times, the last time `parked_until`."""

    failures: int = 0
    first_failure_at: datetime | None = None
    last_failure_at: datetime | None = None
    parks: int = 0
    parked_until: datetime | None = None


def failed(streak: Streak, started_at: datetime, now: datetime, parking: Parking = DEFAULT_PARKING) -> Streak:
    """The streak after one more failed attempt, which began at `started_at`.

    An attempt that was under way when the webhook was parked says nothing about the time after it, so it parks no more.
    """
    longer = replace(
        streak,
        failures=streak.failures + 1,
        first_failure_at=streak.first_failure_at or now,
        last_failure_at=now,
    )
    known_already = streak.parked_until is not None and started_at < streak.parked_until
    if longer.failures < parking.after or known_already:
        return longer
    pause = min(parking.longest, parking.first * 2 ** min(streak.parks, 30))
    return replace(longer, parks=streak.parks + 1, parked_until=now + pause)


def should_disable(streak: Streak, now: datetime) -> bool:
    """Test for auto-disable: 120 h without a success, ten failures, 12 h from first to last (rule D7)."""
    return _is_lasting(streak, now, DISABLE_AFTER)


def should_warn(streak: Streak, now: datetime) -> bool:
    """Test for the warning at half time, before the webhook is switched off."""
    return _is_lasting(streak, now, DISABLE_AFTER / 2)


def _is_lasting(streak: Streak, now: datetime, since: timedelta) -> bool:
    if streak.first_failure_at is None or streak.last_failure_at is None:
        return False
    return (
        now - streak.first_failure_at >= since
        and streak.failures >= DISABLE_FAILURES
        and streak.last_failure_at - streak.first_failure_at >= DISABLE_SPAN
    )
