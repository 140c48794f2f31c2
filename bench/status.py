"""What `status` costs with 6 million deliveries: `python3 dev.py bench status --json`.

6 million deliveries of 60,000 events to 100 webhooks: 5 million delivered, the rest scheduled, parked, exhausted and
cancelled, made by the server. Measured is what `status` asks of the database, on a fresh connection and again, the
worst counting, and what `/metrics` asks. The floor is a plain count of all rows, with which the numbers are compared.
`--scale 0.02` lays down less, for a quick try. The last line is the result; without `--json` a table stands before it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from _delivery import PREPARATION_S, add_webhooks, without_limit
from _scale import run_at_scale

from vaultevents.store import gauges, status
from vaultevents.store.pool import Connection, Database, open_database

DELIVERIES, WEBHOOKS = 6_000_000, 100
AT_ONCE = 10  # webhooks of one statement
ROUNDS = 5
GOAL_S = 1.0

# Rows are laid down without their references, which are right: checking them takes longer than all the rest.
_BARE = """
alter table deliveries drop constraint deliveries_event_seq_fkey, drop constraint deliveries_webhook_id_fkey
"""

_EVENTS = """
insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
    filter_revision)
select 'acme', 'e' || n, 'v1', 'funding_received', n, n, 1, convert_to(repeat('x', 700), 'UTF8'), false, 1
from generate_series(1, $1::integer) n
"""

# The newest are pending, of every webhook some are parked or were given up, and a few were cancelled.
_DELIVERIES = """
insert into deliveries (event_seq, webhook_id, state, attempts, finished_at)
select e.seq, w.id, s.state, least(h, 1), case when s.state in ('scheduled', 'parked') then null else db_now() end
from events e cross join unnest($1::text[]) w (id)
cross join lateral (select abs(hashtext(e.id || w.id)) % 100 as h) hashed
cross join lateral (select case when e.seq > $2 then 'scheduled' when h < 7 then 'parked' when h < 9 then 'exhausted'
    when h < 10 then 'cancelled' else 'delivered' end as state) s
"""

_QUEUE = """
insert into queue (webhook_id, delivery_id, event_seq, due_at)
select webhook_id, id, event_seq, created_at from deliveries where state = 'scheduled'
"""


async def _lay_down(database: Database, scale: float) -> None:
    ids = await add_webhooks(database, [f"https://receiver.example/{number}" for number in range(WEBHOOKS)])
    events = int(DELIVERIES * scale) // WEBHOOKS
    async with without_limit(database) as connection:
        await connection.execute(_BARE)
        await connection.execute(_EVENTS, events, timeout=PREPARATION_S)
        for at in range(0, WEBHOOKS, AT_ONCE):
            await connection.execute(_DELIVERIES, ids[at : at + AT_ONCE], events * 93 // 100, timeout=PREPARATION_S)
        await connection.execute(_QUEUE, timeout=PREPARATION_S)
        await connection.execute("vacuum analyze", timeout=PREPARATION_S)


async def _counted(connection: Connection) -> dict[str, Any]:
    """The same numbers by reading all rows."""
    found = await connection.fetch("select state, count(*) as n from deliveries group by state", timeout=PREPARATION_S)
    waited_s = await connection.fetchval(
        "select extract(epoch from db_now() - min(created_at))::float8 from deliveries where state = 'scheduled'",
        timeout=PREPARATION_S,
    )
    return {
        "deliveries": {row["state"]: row["n"] for row in found},
        "events": await connection.fetchval("select count(*) from events", timeout=PREPARATION_S),
        "oldest_at": time.time() - waited_s,
    }


async def _status_s(target: dict[str, Any], schema: str) -> tuple[float, status.Overview, float]:
    """The seconds of `status`, what it said, and the wall time of it, from a fresh connection."""
    database = await open_database(target, schema=schema, pool_size=1)
    try:
        begin = time.perf_counter()
        overview = await status.read(database)
        return time.perf_counter() - begin, overview, time.time()
    finally:
        await database.close()


async def _measure(target: dict[str, Any], scale: float) -> dict[str, Any]:
    schema = "b_status"
    database = await open_database(target, schema=schema, pool_size=1)
    begin = time.perf_counter()
    await _lay_down(database, scale)
    laid_down_s = time.perf_counter() - begin
    took_s: list[float] = []
    metrics_s: list[float] = []
    for _ in range(ROUNDS):
        seconds, overview, at = await _status_s(target, schema)
        took_s.append(seconds)
        begin = time.perf_counter()
        await gauges.read(database)
        metrics_s.append(time.perf_counter() - begin)
    async with database.statement() as connection:
        begin = time.perf_counter()
        counted = await _counted(connection)
        counted_s = time.perf_counter() - begin
    await database.close()
    if (overview.deliveries, overview.events) != (counted["deliveries"], counted["events"]):
        raise SystemExit(f"status counts {overview.deliveries} and {overview.events} events, there are {counted}")
    if overview.oldest_pending_s is None or abs(at - overview.oldest_pending_s - counted["oldest_at"]) > 1:
        raise SystemExit(f"the oldest has waited {overview.oldest_pending_s} s, not since {counted['oldest_at']}")
    return {
        "bench": "status",
        "figures": {
            "status_s": round(max(took_s), 3),
            "status_best_s": round(min(took_s), 3),
            "metrics_s": round(max(metrics_s), 3),
            "events": overview.events,
            **overview.deliveries,
            "laid_down_s": round(laid_down_s, 1),
        },
        "floor": {"counted_s": round(counted_s, 3)},
        "ratio": {"counted_x": round(max(took_s) / counted_s, 3)},
        "goal": {"status_s": GOAL_S},
        "ok": max(took_s) <= GOAL_S,
    }


if __name__ == "__main__":
    description = "Reads the status of a database with millions of deliveries."
    sys.exit(run_at_scale(_measure, description, "deliveries", sys.argv[1:]))
