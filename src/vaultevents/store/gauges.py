"""What the metrics report of the database, at a cost that does not grow with what is stored.

Up to `COUNTED` rows of a kind are counted through an index; where there are more, PostgreSQL's own estimate is used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from vaultevents.core.verdict import LASTING_S
from vaultevents.metrics import Stored, StreamFacts
from vaultevents.store.history import APART
from vaultevents.store.pool import Database
from vaultevents.store.quarantine import count_open

COUNTED: Final = 10_000


async def read(database: Database, counted: int = COUNTED) -> Stored:
    """The present gauges. Raises `DatabaseUnavailable`."""
    async with database.transaction() as connection:
        asked_s = time.time()
        now = await connection.fetchval("select db_now()")
        offset_s = now.timestamp() - (asked_s + time.time()) / 2
        seen = await connection.fetch(_SEEN, counted, list(APART))
        found = {row["kind"]: (row["seen"], row["estimate"]) for row in seen}
        row = await connection.fetchrow(_GAUGES, LASTING_S)
        quarantine_open = await count_open(connection, COUNTED)
        cursors = await connection.fetch(_CURSORS)
        circuits = await connection.fetch(_NODES)
        webhooks = await connection.fetch(_WEBHOOKS)
    streams = {
        row["stream"]: StreamFacts(row["position"], row["age_s"], row["stuck_s"], row["unverified"]) for row in cursors
    }
    nodes = {(row["upstream"], row["state"]): row["nodes"] for row in circuits}
    return Stored(
        deliveries=_by_state(found, counted),
        quarantine_open=quarantine_open,
        clock_offset_s=offset_s,
        webhooks={row["state"]: row["number"] for row in webhooks},
        streams=streams,
        nodes=nodes,
        **row,
    )


def _by_state(found: Mapping[str, tuple[int, float]], counted: int) -> dict[str, int]:
    """Deliveries by state. Those that are delivered have no index of their own: they are the rest."""
    numbers = {kind: seen if seen < counted else max(seen, round(more)) for kind, (seen, more) in found.items()}
    others = {"scheduled": numbers["queue"], **{state: numbers[state] for state in APART}}
    return {**others, "delivered": max(0, numbers["deliveries"] - sum(others.values()))}


_SEEN = """
with sizes as (
    select c.relname::text as kind, greatest(c.reltuples, pg_stat_get_live_tuples(c.oid), 0)::float8 as rows
    from pg_class c where c.oid in ('deliveries'::regclass, 'queue'::regclass)
), seen as (
    select s.state as kind, (
        select count(*) from (
            select from webhooks w cross join lateral (
                select from deliveries d where d.webhook_id = w.id and d.apart = s.state limit $1
            ) of_webhook limit $1
        ) found
    ) as seen, (
        select sum(common.share) from pg_stats p
        cross join unnest(p.most_common_vals::text::text[], p.most_common_freqs) as common (state, share)
        where p.schemaname = current_schema() and p.tablename = 'deliveries' and p.attname = 'state'
            and common.state = s.state
    ) * (select rows from sizes where kind = 'deliveries') as estimate
    from unnest($2::text[]) as s (state)
    union all
    select kind, (select count(*) from (select from queue where delivery_id is not null
        order by webhook_id, delivery_id limit $1) found), rows * (1 - coalesce((
            select p.null_frac from pg_stats p
            where p.schemaname = current_schema() and p.tablename = 'queue' and p.attname = 'delivery_id'
        ), 0))
    from sizes where kind = 'queue'
    union all
    select kind, (select count(*) from (select from deliveries order by id limit $1) found), rows
    from sizes where kind = 'deliveries'
)
select kind, seen, coalesce(estimate, 0)::float8 as estimate from seen
"""

# The ids of deliveries grow with time, so the oldest of a webhook is the first one of its part of the index.
_GAUGES = """
select
    coalesce((
        select extract(epoch from db_now() - min(d.created_at)) from webhooks w cross join lateral (
            select q.delivery_id from queue q where q.webhook_id = w.id order by q.delivery_id limit 1
        ) oldest join deliveries d on d.id = oldest.delivery_id where w.deleted_at is null
    ), 0)::float8 as oldest_pending_s,
    (select count(distinct webhook_id) from flag_changes) as flag_changes,
    coalesce((select extract(epoch from db_now() - min(made_at)) from flag_changes), 0)::float8 as flag_change_age_s,
    greatest((
        select extract(epoch from db_now() - min(first.due_at)) from webhooks w cross join lateral (
            select q.due_at from queue q where q.webhook_id = w.id and q.turn = 0 order by q.due_at limit 1
        ) first
        where w.active and w.deleted_at is null and w.parks = 0
            and (w.paused_until is null or w.paused_until <= db_now())
    ), 0)::float8 as oldest_due_s,
    (select count(*) from notices where finished_at is null) as notices_waiting,
    (select count(*) from reports where state = 'pending') as reports_pending,
    coalesce((select extract(epoch from db_now() - min(seen_at)) from reports where state = 'pending'), 0)::float8
        as report_pending_s,
    (select count(*) from events where orphaned_at is not null) as events_orphaned,
    (select count(*) from events where orphaned_at between db_now() - make_interval(secs => $1 + 3600)
        and db_now() - make_interval(secs => $1)) as events_orphaned_lately,
    (select coalesce(sum(difference), 0)::bigint from row_totals) as outbox_rows,
    (select count(*) from mfa_factors where locked_until > db_now()) as step_up_locked,
    (select extract(epoch from db_now())::float8 - block_time_s from reports
        order by block_number desc, log_index desc limit 1) as report_age_s
"""

_CURSORS = """
select stream, position, extract(epoch from db_now() - updated_at)::float8 as age_s,
    coalesce(extract(epoch from db_now() - problem_since), 0)::float8 as stuck_s,
    unverified_from is not null as unverified
from cursors where kind = 'live' order by stream
"""

_NODES = "select upstream, state, count(*) as nodes from nodes group by upstream, state"

_WEBHOOKS = """
select state, count(*) as number from webhooks w cross join lateral (select case
    when not w.active then case when w.disabled_reason is null then 'off' else 'disabled' end
    when w.parks > 0 then 'parked' when w.paused_until > db_now() then 'paused' else 'on' end) s (state)
where w.deleted_at is null group by state
"""
