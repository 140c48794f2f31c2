"""Everything that a scrape can report, as text: for the tests of metrics and alerts, and for the dashboard."""

from __future__ import annotations

from vaultevents import metrics
from vaultevents.metrics import Stored, StreamFacts

FULL = Stored(
    deliveries={"scheduled": 3},
    oldest_pending_s=2.0,
    oldest_due_s=1.0,
    flag_changes=2,
    flag_change_age_s=0.5,
    notices_waiting=1,
    reports_pending=1,
    report_pending_s=30.0,
    events_orphaned=2,
    events_orphaned_lately=0,
    quarantine_open=0,
    report_age_s=60.0,
    clock_offset_s=-0.5,
    outbox_rows=9,
    step_up_locked=0,
    webhooks={"on": 2, "parked": 1},
    streams={"logs": StreamFacts(position=90, age_s=4.0, stuck_s=0.0)},
    nodes={("execution", "closed"): 2, ("beacon", "open"): 1},
)


def full_text() -> str:
    """Return a scrape that has every metric."""
    metrics.head("logs", 100)
    metrics.finalized(40)
    metrics.request("/v1/account", 200)
    return metrics.text(FULL, {"data": 0.5}).decode()
