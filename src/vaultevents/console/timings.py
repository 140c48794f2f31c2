"""The phases of attempts, for bars on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from vaultevents.console.charts import Phase
from vaultevents.store.history import AttemptFacts

PHASES: Final[Mapping[str, str]] = {
    "phase-dns": "DNS",
    "phase-connect": "connect",
    "phase-tls": "TLS",
    "phase-wait": "until the first byte",
    "phase-body": "until the end",
}
"""Class of the style sheet -> title, in the order in which they follow each other."""


def scale_ms(attempts: Sequence[AttemptFacts]) -> int:
    """Return the duration that fills the width: that of the longest attempt."""
    return max([1, *(attempt.duration_ms for attempt in attempts)])


def phases(attempt: AttemptFacts) -> list[Phase]:
    """Return the phases of an attempt one after the other, in ms; those that were skipped are left out."""
    timing, total_ms = attempt.timing, attempt.duration_ms
    dns_ms = timing.dns_ms or 0
    connected_ms = dns_ms + (timing.connect_ms or 0)
    secured_ms = connected_ms + (timing.tls_ms or 0)
    answered_ms = max(total_ms if timing.first_byte_ms is None else timing.first_byte_ms, secured_ms)
    found, begin_ms = [], 0
    for (kind, title), end_ms in zip(
        PHASES.items(), (dns_ms, connected_ms, secured_ms, answered_ms, total_ms), strict=True
    ):
        end_ms = min(end_ms, total_ms)
        if end_ms > begin_ms:
            found.append(Phase(f"{title}: {end_ms - begin_ms} ms", begin_ms, end_ms, kind))
            begin_ms = end_ms
    return found
