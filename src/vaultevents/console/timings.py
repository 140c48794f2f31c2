"""How long the phases of attempts took, as bars on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vaultevents.store.history import AttemptFacts

WIDTH: Final = 300.0
PHASES: Final = ("dns", "connect", "tls", "wait", "body")
"""Name resolution, TCP, TLS, until the first byte of the answer, and until its end."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase of an attempt, in units of a drawing that is `WIDTH` wide."""

    phase: str
    x: float
    width: float


def scale_ms(attempts: Sequence[AttemptFacts]) -> int:
    """Return the duration that fills the width: that of the longest attempt."""
    return max([1, *(attempt.duration_ms for attempt in attempts)])


def bars(attempt: AttemptFacts, full_ms: int) -> list[Bar]:
    """Return the phases of an attempt one after the other; those that were skipped are left out."""
    timing, total_ms = attempt.timing, attempt.duration_ms
    ends: list[tuple[str, int]] = []
    done_ms = 0
    for phase, length_ms in (("dns", timing.dns_ms), ("connect", timing.connect_ms), ("tls", timing.tls_ms)):
        done_ms += length_ms or 0
        ends.append((phase, done_ms))
    answered_ms = total_ms if timing.first_byte_ms is None else timing.first_byte_ms
    ends += [("wait", max(answered_ms, done_ms)), ("body", total_ms)]
    found, begin_ms = [], 0
    for phase, end_ms in ends:
        end_ms = min(end_ms, total_ms)
        if end_ms > begin_ms:
            found.append(Bar(phase, begin_ms * WIDTH / full_ms, (end_ms - begin_ms) * WIDTH / full_ms))
            begin_ms = end_ms
    return found
