"""When a delivery is tried again (rules D3, D5 and D6).

Verdicts hold durations, never instants: the database's clock decides when they are over (rule D15).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from vaultevents.core.errors import ConfigError

_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 24 * _HOUR

SCHEDULE_S: Final = (5, 5 * _MINUTE, 30 * _MINUTE, *(hours * _HOUR for hours in (2, 5, 10, 14, 20, 24)))
"""Seconds after the 1st, 2nd … 9th failed attempt; the 10th is the last (rule D5)."""

JITTER_SHARE: Final = 0.2
MAX_HINT_S: Final = _DAY
"""How long a `Retry-After` can hold back a webhook (rule D6). One that asks for more is a mistake, and is ignored."""

LOCAL_FAULTS: Final = frozenset({"local", "resolver", "proxy_down", "sealed"})
"""Errors of attempts that this host could not begin: no descriptor, port or route, no resolver, proxy or secret."""

_MAX_STEP_S: Final = 30 * _DAY


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came back from one attempt: a status with complete headers, or the kind of failure that prevented it."""

    status: int | None
    error: str | None = None
    retry_after: str | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """A 2xx with complete headers in time (rule D3)."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after `after_s`; park the whole webhook for `park_s` (0: not at all)."""

    after_s: float
    park_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Exhausted:
    """That was the last attempt: kept and recoverable. `park_s` still holds for the webhook's other deliveries."""

    park_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Gone:
    """410: the receiver asks to stop. The webhook is disabled; all that is pending is parked (rule D3)."""


@dataclass(frozen=True, slots=True)
class NotAttempted:
    """A fault of this host: nothing was sent, so nothing counts. The delivery is due again soon."""


Verdict = Delivered | Retry | Exhausted | Gone | NotAttempted


def judge(outcome: Outcome, attempt_number: int, schedule: Sequence[float], jitter: float, now: datetime) -> Verdict:
    """What follows from an attempt; the first has `attempt_number` 1.

    `jitter` in [0, 1) adds up to 20 % to the schedule's delay. A hint (`Retry-After` on 429 and 503, up to 24 h) can
    only push the delivery later, and parks the webhook for as long as the hint says. `now` serves HTTP dates only.
    """
    if not 0 <= jitter < 1:
        raise ValueError(f"jitter must lie in [0, 1), got {jitter}")
    status = outcome.status
    if status is not None and 200 <= status < 300:
        return Delivered()
    if status == 410:
        return Gone()
    if outcome.error in LOCAL_FAULTS:
        return NotAttempted()
    hint_s = retry_after_s(outcome.retry_after, now) if status in (429, 503) else 0.0
    step = max(attempt_number, 1) - 1
    if step >= len(schedule):
        return Exhausted(park_s=hint_s)
    return Retry(after_s=max(schedule[step] * (1 + JITTER_SHARE * jitter), hint_s), park_s=hint_s)


_HTTP_DATES: Final = (
    "%a, %d %b %Y %H:%M:%S GMT",  # IMF-fixdate
    "%A, %d-%b-%y %H:%M:%S GMT",  # RFC 850
    "%a %b %d %H:%M:%S %Y",  # asctime
)


def retry_after_s(text: str | None, now: datetime) -> float:
    """Seconds a `Retry-After` header asks for; 0 for none, a malformed one, one in the past or beyond 24 h.

    RFC 9110 §10.2.3: a number of seconds, or a date in one of the three forms of §5.6.7.
    """
    text = (text or "").strip()
    if re.fullmatch(r"[0-9]+", text, re.ASCII):
        digits = text.lstrip("0")
        return _within_limit(float(digits[:9] or "0"))  # nine digits say more than that: no need for the rest
    for form in _HTTP_DATES:
        try:
            until = datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError:
            continue
        return _within_limit((until - now).total_seconds())
    return 0.0


def _within_limit(hint_s: float) -> float:
    return hint_s if 0 < hint_s <= MAX_HINT_S else 0.0


_STEP = re.compile(r"([0-9]{1,9})([smhd])", re.ASCII)
_UNIT_S: Final = {"s": 1, "m": _MINUTE, "h": _HOUR, "d": _DAY}


def parse_schedule(text: str) -> tuple[int, ...]:
    """The delays of a setting such as `5s, 5m, 30m, 2h` in seconds; raises `ConfigError`."""
    return tuple(_step_s(part.strip()) for part in text.split(","))


def _step_s(text: str) -> int:
    step = _STEP.fullmatch(text)
    seconds = int(step[1]) * _UNIT_S[step[2]] if step else 0
    if not 0 < seconds <= _MAX_STEP_S:
        raise ConfigError(f"'{text}' is not a retry delay: write 1s to 30d, as in 5s, 5m, 30m, 2h")
    return seconds
