"""When a node is asked: its pace, its circuit and the size of its ranges, over generated histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaultevents.chain.upstream.circuit_breaker import LONGEST_PAUSE_S, CircuitBreaker
from vaultevents.chain.upstream.learned_range import LearnedRange
from vaultevents.chain.upstream.node_lag import HeadLags
from vaultevents.chain.upstream.rate_limit import (
    FIRST_LEAST_PER_S,
    LEAST_PER_S,
    LONGEST_HOLD_S,
    QUIET_S,
    AnswerTimes,
    LatencyEstimate,
    RateLimiter,
)
from vaultevents.core.nodes import HeadLag, Latency, LogLimit

pytestmark = pytest.mark.property

gaps_s = st.lists(st.floats(0, 3), min_size=1, max_size=60)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def limited(per_s: float, now: float = 0.0) -> RateLimiter:
    """The pace of a node that has just refused twice `per_s` requests in a second."""
    pace = RateLimiter()
    for nth in range(round(2 * per_s)):
        pace.book(now - 0.5 + nth / (5 * per_s))
    pace.refused(now, now)
    return pace


def test_nothing_waits_for_a_node_that_never_refused() -> None:
    pace = RateLimiter()
    assert [pace.book(1.0) for _ in range(1000)] == [1.0] * 1000
    assert pace.requests_per_s is None


@given(st.integers(8, 50), gaps_s)
def test_what_is_allowed_is_never_exceeded_in_any_second(per_s: int, gaps: list[float]) -> None:
    pace, now = limited(per_s), 0.0
    assert pace.requests_per_s == per_s
    sent = []
    for gap in gaps:
        now += gap
        sent += [pace.book(now) for _ in range(3)]
    assert sent == sorted(sent)
    allowed = pace.requests_per_s
    assert allowed is not None
    for at in sent:
        assert sum(at <= other < at + 1 for other in sent) <= allowed + 1


@given(st.integers(8, 50))
def test_quiet_time_gives_back_what_was_taken_and_more_only_where_somebody_waits(per_s: int) -> None:
    pace, now = limited(per_s), 0.0
    while now < QUIET_S + 60:
        now = pace.book(now)
    assert pace.requests_per_s is not None
    assert pace.requests_per_s >= 2 * per_s
    unused = limited(per_s)
    for minute in range(60):
        unused.book(60.0 * minute)
    assert unused.requests_per_s == per_s


@given(st.integers(8, 50), st.integers(2, 30))
def test_one_burst_of_refusals_is_one_lesson_and_the_least_is_never_undercut(per_s: int, refusals: int) -> None:
    pace = limited(per_s)
    for _ in range(refusals):
        pace.refused(-0.1, 0.1)
    assert pace.requests_per_s == per_s
    for later in range(1, refusals):
        pace.refused(pace.book(float(later)), later + 0.9)
    assert pace.requests_per_s is not None
    assert LEAST_PER_S <= pace.requests_per_s <= per_s


def test_a_refusal_after_a_pause_halves_what_was_allowed_and_one_at_the_very_start_leaves_some() -> None:
    pace = limited(40)
    pace.refused(pace.book(1.5), 1.6, 1.0)
    assert pace.requests_per_s == 20
    pace.refused(pace.book(3.0), 3.1, 1.0)
    assert pace.requests_per_s == 10
    fresh = RateLimiter()
    fresh.refused(fresh.book(0.0), 0.1)
    assert fresh.requests_per_s == FIRST_LEAST_PER_S


@given(st.floats(0.1, 10**6), st.lists(st.floats(0, 400), max_size=20))
def test_nobody_is_let_through_while_a_node_is_held(asked_s: float, moments: list[float]) -> None:
    pace = RateLimiter()
    pace.refused(0.0, 0.0, asked_s)
    held_s = min(asked_s, LONGEST_HOLD_S)
    assert pace.held_s(0.0) == pytest.approx(held_s)
    for now in sorted(moments):
        assert pace.book(now) >= min(held_s, LONGEST_HOLD_S)


def test_a_recalled_pace_is_kept_from_the_first_request_on() -> None:
    pace = RateLimiter()
    pace.load_state(4.0, 100.0)
    assert [pace.book(100.0) for _ in range(3)] == [100.0, 100.25, 100.5]


def test_what_is_late_is_learned_from_the_slowest_answers() -> None:
    lateness = LatencyEstimate()
    assert lateness.late_s == 1.0
    for _ in range(64):
        lateness.answered(0.01)
    assert lateness.late_s == 0.2
    for nth in range(64):
        lateness.answered(0.5 if nth % 10 == 0 else 0.01)
    assert lateness.late_s == 1.5


@given(st.lists(st.tuples(st.sampled_from(["ask", "fail", "answer", "hold"]), st.floats(0, 200)), max_size=60))
def test_a_circuit_comes_back_within_its_longest_pause_and_then_takes_one_question_at_a_time(
    scenario: list[tuple[str, float]],
) -> None:
    circuit, now = CircuitBreaker(30.0, 0.0), 0.0
    for what, gap in scenario:
        now += gap
        on_trial = circuit.begin(now)
        match what:
            case "fail":
                circuit.failed("is down", now, on_trial=on_trial)
            case "answer":
                circuit.answered(now, now)
                assert circuit.state(now) == "closed"
            case "hold":
                circuit.hold("asks for a pause", 10.0, now)
        circuit.end()
        assert (circuit.problem is None) == (circuit.state(now) == "closed")
        assert circuit.until <= now + LONGEST_PAUSE_S
    now = max(now, circuit.until)
    assert circuit.is_usable(now)
    if circuit.begin(now):
        assert not circuit.is_usable(now)


def test_the_pause_doubles_only_while_the_first_question_back_fails() -> None:
    circuit, pauses = CircuitBreaker(30.0, 0.0), []
    circuit.failed("is down", 0.0, on_trial=False)
    for _ in range(5):
        circuit.failed("is still down", circuit.until - 1, on_trial=False)  # asked for want of others
        pauses.append(circuit.until)
        now = circuit.until
        circuit.failed("is still down", now, on_trial=circuit.begin(now))
        circuit.end()
        pauses[-1] = circuit.until - now
    assert pauses == [60.0, 120.0, 240.0, 240.0, 240.0]
    circuit.answered(0.0, 1000.0)
    assert circuit.state(1000.0) != "closed", "what was begun before the failure proves nothing"
    circuit.answered(1000.0, 1000.0)
    circuit.failed("is down again", 1001.0, on_trial=False)
    assert circuit.until == 1031.0


@given(st.integers(1, 5000), st.booleans())
def test_a_limit_on_blocks_is_found_and_not_run_into_again_and_again(limit: int, reported: bool) -> None:
    clock = Clock()
    size, refusals = LearnedRange(10_000, 10_000, clock), 0
    for _ in range(500):
        clock.now_s += 1
        if (asked := size.blocks) > limit:
            refusals += 1
            size.refused(asked, limit if reported else None, by_blocks=True)
        else:
            size.served(asked)
    assert limit * 3 / 4 - 1 <= size.blocks <= limit
    assert refusals <= (1 if reported else 20)
    again = LearnedRange(10_000, 10_000, clock)
    again.load_state(size.limit)
    for _ in range(500):
        assert again.blocks <= limit, "the second start makes no refused call"
        again.served(again.blocks)
    clock.now_s += 3601
    for _ in range(200):
        again.served(again.blocks)
    assert again.blocks == 10_000, "a limit may have been lifted"


def test_what_was_refused_for_its_logs_is_tried_again_soon() -> None:
    size = LearnedRange(1000, 1000)
    size.refused(1000, 10)
    for _ in range(100):
        size.served(size.blocks)
    assert size.limit == LogLimit(1000, None)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_half_of_the_last_answers_took_no_longer_than_the_median(took: list[float]) -> None:
    times = AnswerTimes()
    assert times.latency is None
    for seconds in took:
        times.answered(seconds)
    last, latency = sorted(took[-AnswerTimes.REMEMBERED :]), times.latency
    assert latency is not None
    for share, limit in ((0.5, latency.median_s), (0.95, latency.p95_s)):
        assert sum(seconds <= limit for seconds in last) >= share * len(last)
        assert sum(seconds < limit for seconds in last) < share * len(last)


def test_percentiles_are_of_answers() -> None:
    times = AnswerTimes()
    for milliseconds in range(1, 101):
        times.answered(milliseconds / 1000)
    assert times.latency == Latency(0.05, 0.095)


def test_a_node_is_behind_the_newest_head_of_its_kind() -> None:
    lags = HeadLags()
    assert lags.of("a", 0.0) is None
    lags.shown("finalized", "a", 100, 1.0)
    lags.shown("finalized", "b", 96, 2.0)
    lags.shown("latest-4", "c", 160, 3.0)
    assert [lags.of(name, 5.0) for name in "abc"] == [HeadLag(0, 4.0), HeadLag(4, 3.0), HeadLag(0, 2.0)]
    lags.shown("finalized", "a", 132, 6.0)
    assert lags.of("b", 6.0) == HeadLag(4, 4.0), "what it showed then was that much behind"
    lags.lacking("finalized", "b", 132, 7.0)
    assert lags.of("b", 7.0) == HeadLag(36, 0.0)
    lags.lacking("finalized", "d", 132, 7.0)
    assert lags.of("d", 7.0) is None, "it has not shown a head"
    lags.shown("head", "e", 10, 8.0, ahead=7)
    assert lags.of("e", 8.0) == HeadLag(7, 0.0), "it says so itself"


def test_a_false_head_counts_while_its_node_claims_it() -> None:
    lags = HeadLags()
    lags.shown("finalized", "false", 10**9, 0.0)
    lags.shown("finalized", "a", 100, 0.0)
    assert lags.of("a", 0.0) == HeadLag(10**9 - 100, 0.0)
    lags.shown("finalized", "false", 101, 1.0)
    lags.shown("finalized", "a", 101, 1.0)
    assert lags.of("a", 1.0) == HeadLag(0, 0.0)
