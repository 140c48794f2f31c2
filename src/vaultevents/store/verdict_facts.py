"""Read what the verdict is derived from: the gauges of the metrics, and what this process has counted lately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from vaultevents import metrics
from vaultevents.core.verdict import RECENT_S, Facts, StreamState
from vaultevents.metrics import StreamFacts
from vaultevents.store import gauges
from vaultevents.store.disk_space import free_shares
from vaultevents.store.pool import Database

NOTHING: Final = MappingProxyType[str, Path]({})
NO_HEADS: Final = MappingProxyType[str, int]({})


async def read(
    database: Database,
    *,
    disks: Mapping[str, Path] = NOTHING,
    heads: Mapping[str, int] = NO_HEADS,
    chain_behind_s: float = 0.0,
) -> Facts:
    """Read the facts; bounded statements, as those of a scrape. Raises `DatabaseUnavailable`.

    `heads` has the heads of streams that the caller has asked for, where this process does not watch. `disks` are
    those of `wiring.database.disks`. `chain_behind_s` is how far the clock of a simulated chain is behind. What only
    the process knows that watches or serves the API is 0 elsewhere.
    """
    stored = await gauges.read(database)
    async with database.statement() as connection:
        notices = await connection.fetch(_NOTICES, RECENT_S)
    return replace(
        counted(),
        streams={stream: _state(stream, facts, heads) for stream, facts in stored.streams.items()},
        oldest_due_s=stored.oldest_due_s,
        pending=stored.deliveries["scheduled"],
        outbox_rows=stored.outbox_rows,
        flag_change_age_s=stored.flag_change_age_s,
        orphaned=stored.events_orphaned_lately,
        quarantine_open=stored.quarantine_open,
        report_age_s=max(0.0, (stored.report_age_s or 0.0) - chain_behind_s),
        report_pending_s=stored.report_pending_s,
        clock_offset_s=stored.clock_offset_s,
        webhooks=stored.webhooks,
        step_up_locked=stored.step_up_locked,
        disk_free=await free_shares(disks),
        recent_notices={row["kind"]: row["number"] for row in notices},
    )


def counted() -> Facts:
    """Return what this process knows without the database."""
    return Facts(
        finalized_age_s=metrics.finalized_age_s() or 0.0,
        recent_node_failures=metrics.recent(metrics.NODE_FAILURES),
        recent_audit_findings=metrics.recent(metrics.AUDIT_FINDINGS),
        recent_replayed_tokens=metrics.recent(metrics.REFUSALS)["token_replayed"],
        recent_unsettled_blooms=metrics.recent(metrics.BLOOMS)["unsettled"],
        recent_ended_leases=metrics.recent(metrics.LEASES)["ended"],
    )


def _state(stream: str, facts: StreamFacts, heads: Mapping[str, int]) -> StreamState:
    head = heads.get(stream)
    lag = metrics.lag(stream, facts.position) if head is None else max(0, head - facts.position)
    return StreamState(lag, facts.age_s, facts.stuck_s, facts.unverified, facts.position)


# Of those that are finished there is an index by time; the others are few, or the operator's webhook is away.
_NOTICES = """
select kind, count(*) as number from (
    select kind from notices where finished_at > db_now() - make_interval(secs => $1)
    union all
    select kind from (select kind, created_at from notices where finished_at is null order by due_at desc limit 1000) w
    where created_at > db_now() - make_interval(secs => $1)
) recent group by kind
"""
