"""Failures in a row: when a webhook is parked, for how long, and when it is switched off (rules D7 and D8)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from vaultevents.core.webhook_health import Parking, Streak, failed, should_disable, should_warn

pytestmark = pytest.mark.unit

START = datetime(2026, 1, 1, tzinfo=UTC)
S, H = timedelta(seconds=1), timedelta(hours=1)


def lasting(since: timedelta, failures: int, span: timedelta) -> Streak:
    """A streak whose first failure was `since` ago, its last one `span` later."""
    return Streak(failures, START - since, START - since + span)


@pytest.mark.parametrize(
    ("streak", "disabled"),
    [
        (lasting(120 * H, 10, 12 * H), True),
        (lasting(120 * H - S, 10, 12 * H), False),
        (lasting(120 * H, 9, 12 * H), False),
        (lasting(120 * H, 10, 12 * H - S), False),
        (lasting(9000 * H, 1_000_000, 8000 * H), True),
        (Streak(), False),
    ],
)
def test_the_edges_of_switching_off(streak: Streak, disabled: bool) -> None:
    assert should_disable(streak, START) is disabled


def test_a_warning_comes_at_half_time() -> None:
    assert not should_warn(lasting(60 * H - S, 10, 12 * H), START)
    assert should_warn(lasting(60 * H, 10, 12 * H), START)
    assert not should_disable(lasting(60 * H, 10, 12 * H), START)


def test_the_fifth_failure_parks_and_each_probe_that_fails_doubles_the_pause() -> None:
    streak, now, pauses = Streak(), START, []
    for _ in range(12):
        streak = failed(streak, started_at=now, now=now + S)
        if streak.parked_until is not None and streak.parked_until > now:
            pauses.append((streak.parked_until - now - S).total_seconds())
            now = streak.parked_until
        now += S
    assert pauses == [30, 60, 120, 240, 480, 600, 600, 600]
    assert (streak.failures, streak.parks) == (12, 8)
    assert streak.first_failure_at == START + S


def test_what_was_under_way_when_the_webhook_was_parked_parks_no_more() -> None:
    streak = Streak()
    for number in range(14):  # ten in flight at once, all failing
        streak = failed(streak, started_at=START, now=START + number * S)
    assert (streak.failures, streak.parks) == (14, 1)
    assert streak.parked_until == START + 4 * S + 30 * S


def test_the_pause_never_overflows() -> None:
    streak = Streak(failures=10**9, parks=10**9, first_failure_at=START, last_failure_at=START)
    assert failed(streak, START, START).parked_until == START + timedelta(minutes=10)


def test_the_settings_of_parking() -> None:
    parking = Parking(after=1, first=2 * S, longest=3 * S)
    one = failed(Streak(), START, START, parking)
    assert one.parked_until == START + 2 * S
    two = failed(one, START + 2 * S, START + 2 * S, parking)
    assert two.parked_until == START + 5 * S
