"""Every failure of an attempt is explained, and its phases are drawn to scale."""

from __future__ import annotations

from typing import get_args

import pytest

from store_factories import EARLIER
from vaultevents.console.timings import phases, scale_ms
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
    assert [(phase.kind, phase.begins, phase.ends) for phase in phases(first)] == [
        ("phase-dns", 0, 10),
        ("phase-connect", 10, 30),
        ("phase-tls", 30, 60),
        ("phase-wait", 60, 90),
        ("phase-body", 90, 100),
    ]


@pytest.mark.parametrize(
    "timing",
    [Timing(), Timing(first_byte_ms=50), Timing(dns_ms=500), Timing(dns_ms=1, connect_ms=9_999), Timing(tls_ms=99)],
)
def test_phases_never_leave_the_duration(timing: Timing) -> None:
    found = phases(attempt(100, timing))
    assert [phase.begins for phase in found] == [0, *(phase.ends for phase in found[:-1])]
    assert found[-1].ends == 100


def test_the_longest_attempt_fills_the_scale() -> None:
    assert scale_ms([attempt(5, Timing()), attempt(9, Timing())]) == 9
    assert scale_ms([]) == 1
    assert phases(attempt(0, Timing())) == []
