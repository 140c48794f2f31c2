"""Every failure of an attempt is explained, and its phases are drawn to scale."""

from __future__ import annotations

from typing import get_args

import pytest

from store_factories import EARLIER
from vaultevents.console.timings import WIDTH, bars, scale_ms
from vaultevents.core.failure_advice import ERRORS, explain
from vaultevents.core.timing import Timing
from vaultevents.dispatch.sender import ErrorKind
from vaultevents.store.history import AttemptFacts

pytestmark = pytest.mark.unit


def test_each_error_of_an_attempt_has_an_explanation() -> None:
    assert set(ERRORS) == set(get_args(ErrorKind))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (302, "redirects are not followed"),
        (401, "signature"),
        (410, "switched off at once"),
        (418, "refused the request"),
        (500, "failed while it handled"),
        (599, "failed while it handled"),
        (101, "no final answer"),
    ],
)
def test_each_status_has_an_explanation(status: int, words: str) -> None:
    assert words in explain(status, None).meaning


def test_what_is_not_known_is_explained_as_such() -> None:
    assert explain(None, None) == explain(None, "other") == explain(700, None)


def attempt(duration_ms: int, timing: Timing) -> AttemptFacts:
    return AttemptFacts(1, EARLIER, duration_ms, 200, None, "", None, timing)


def test_phases_follow_each_other_and_fill_the_duration() -> None:
    first = attempt(100, Timing(dns_ms=10, connect_ms=20, tls_ms=30, first_byte_ms=90))
    assert [(bar.phase, bar.x, bar.width) for bar in bars(first, 200)] == [
        ("dns", 0, 15),
        ("connect", 15, 30),
        ("tls", 45, 45),
        ("wait", 90, 45),
        ("body", 135, 15),
    ]


@pytest.mark.parametrize(
    "timing",
    [Timing(), Timing(first_byte_ms=50), Timing(dns_ms=500), Timing(dns_ms=1, connect_ms=9_999), Timing(tls_ms=99)],
)
def test_phases_never_leave_the_scale(timing: Timing) -> None:
    drawn = bars(attempt(100, timing), scale_ms([attempt(100, timing)]))
    assert sum(bar.width for bar in drawn) == pytest.approx(WIDTH)
    assert all(bar.width > 0 for bar in drawn)


def test_attempts_without_a_duration_have_a_scale() -> None:
    assert bars(attempt(0, Timing()), scale_ms([])) == []
