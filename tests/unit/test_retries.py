"""Verdicts on attempts: what ends a delivery, what delays it, what parks its webhook."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from vaultevents.core.errors import ConfigError
from vaultevents.core.retries import (
    LOCAL_FAULTS,
    SCHEDULE_S,
    Delivered,
    Exhausted,
    Gone,
    NotAttempted,
    Outcome,
    Retry,
    Verdict,
    judge,
    parse_schedule,
    retry_after_s,
)

pytestmark = pytest.mark.unit

NOW = datetime(2026, 11, 6, 8, 49, 37, tzinfo=UTC)


def verdict(outcome: Outcome, attempt_number: int = 1, jitter: float = 0.0) -> Verdict:
    return judge(outcome, attempt_number, SCHEDULE_S, jitter, NOW)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_2xx_delivers_on_any_attempt(status: int) -> None:
    assert verdict(Outcome(status)) == Delivered()
    assert verdict(Outcome(status, retry_after="60"), 10) == Delivered()


@pytest.mark.parametrize(
    "status", [101, 199, 300, 301, 302, 307, 308, 400, 401, 404, 408, 409, 422, 425, 500, 502, 504]
)
def test_everything_else_is_tried_again(status: int) -> None:
    assert verdict(Outcome(status)) == Retry(5)
    assert verdict(Outcome(status, retry_after="60")) == Retry(5), "a hint counts on 429 and 503 only"


@pytest.mark.parametrize("error", ["timeout", "dns", "tls", "reset", "refused_address"])
def test_no_answer_is_tried_again(error: str) -> None:
    assert verdict(Outcome(None, error)) == Retry(5)


@pytest.mark.parametrize("attempt_number", [1, 10, 11])
def test_gone_is_gone_even_on_the_last_attempt(attempt_number: int) -> None:
    assert verdict(Outcome(410, retry_after="60"), attempt_number) == Gone()


def test_ten_attempts_in_75_h_35_m_5_s() -> None:
    delays = []
    for attempt_number in range(1, 10):
        followed = verdict(Outcome(500), attempt_number)
        assert isinstance(followed, Retry)
        delays.append(followed.after_s)
    assert delays == [5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400]
    assert timedelta(seconds=sum(delays)) == timedelta(hours=75, minutes=35, seconds=5)
    assert verdict(Outcome(500), 10) == Exhausted()
    assert verdict(Outcome(500), 11) == Exhausted()


def test_jitter_adds_up_to_a_fifth() -> None:
    assert verdict(Outcome(500), 2, jitter=0.0) == Retry(300)
    middle = verdict(Outcome(500), 2, jitter=0.5)
    assert isinstance(middle, Retry)
    assert middle.after_s == pytest.approx(330)
    last = verdict(Outcome(500), 2, jitter=0.999999)
    assert isinstance(last, Retry)
    assert 359.9 < last.after_s < 360


@pytest.mark.parametrize("jitter", [-0.01, 1.0, float("nan")])
def test_jitter_out_of_range_is_a_bug(jitter: float) -> None:
    with pytest.raises(ValueError, match="jitter"):
        verdict(Outcome(500), jitter=jitter)


@pytest.mark.parametrize("status", [429, 503])
def test_a_hint_pushes_later_and_parks_the_webhook(status: int) -> None:
    assert verdict(Outcome(status, retry_after="60")) == Retry(60, park_s=60)
    assert verdict(Outcome(status)) == Retry(5)


def test_a_short_hint_never_pulls_a_delivery_forward() -> None:
    assert verdict(Outcome(429, retry_after="1"), 9) == Retry(86400, park_s=1)
    assert verdict(Outcome(429, retry_after="0"), 3) == Retry(1800)


def test_a_hint_counts_up_to_24_h() -> None:
    assert verdict(Outcome(503, retry_after="86400")) == Retry(86400, park_s=86400)
    for hint in ("86401", "9" * 5000):
        assert verdict(Outcome(503, retry_after=hint)) == Retry(5), "a mistake of the receiver"


@pytest.mark.parametrize("error", sorted(LOCAL_FAULTS))
def test_what_this_host_prevented_is_no_attempt(error: str) -> None:
    for attempt in (1, 10):
        assert verdict(Outcome(None, error), attempt) == NotAttempted()
    assert verdict(Outcome(None, "connect")) == Retry(5), "the control"


def test_the_park_of_the_last_attempt_still_holds() -> None:
    assert verdict(Outcome(503, retry_after="60"), 10) == Exhausted(park_s=60)


def test_dates_in_the_three_forms_of_rfc_9110() -> None:
    for text in ("Fri, 06 Nov 2026 08:50:37 GMT", "Friday, 06-Nov-26 08:50:37 GMT", "Fri Nov  6 08:50:37 2026"):
        assert retry_after_s(text, NOW) == 60, text
    assert retry_after_s(format_datetime(NOW + timedelta(days=9), usegmt=True), NOW) == 0
    assert retry_after_s(format_datetime(NOW - timedelta(seconds=1), usegmt=True), NOW) == 0


@pytest.mark.parametrize(
    "text",
    [
        *(
            None,
            "",
            " ",
            "-5",
            "+5",
            "5.5",
            "1e3",
            "5 s",
            "60, 60",
            "soon",
            "\uff16\uff10",
            "0x10",
            "NaN",
            "inf",
            "\x00",
        ),
        *("2026-11-06", "Fri, 06 Nov 2026 08:50:37", "Fri, 06 Nov 2026 08:50:37 CET", "Fri, 31 Feb 2026 08:50:37 GMT"),
    ],
)
def test_a_malformed_hint_is_ignored(text: str | None) -> None:
    assert retry_after_s(text, NOW) == 0
    assert verdict(Outcome(429, retry_after=text)) == Retry(5)


def test_zeros_in_front_and_white_space_do_not_matter() -> None:
    assert retry_after_s(" 0060 ", NOW) == 60
    assert retry_after_s("0" * 5000 + "7", NOW) == 7


def test_a_schedule_as_an_operator_writes_it() -> None:
    assert parse_schedule("5s, 5m, 30m, 2h, 5h, 10h, 14h, 20h, 24h") == SCHEDULE_S
    assert parse_schedule("1d") == (86400,)
    assert parse_schedule("1s,1s") == (1, 1)


@pytest.mark.parametrize(
    "text", ["", "5", "5s,", "5 s", "-5s", "0s", "5w", "31d", "5s 5m", "1.5h", "٥s", "9999999999s"]
)
def test_a_schedule_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a retry delay"):
        parse_schedule(text)
