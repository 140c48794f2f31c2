"""What dead receivers cost the healthy ones (rules D8 and P8): `python3 dev.py bench isolation --json`.

1,000 webhooks; in the second run half of them never answer, until the deadline of 15 s ends each attempt. In both runs
the healthy ones have a backlog, which gives their rate; then events arrive at a steady pace, and their lag is from the
commit of an event to the answer of its receiver. The dead ones are another server, as in life: one that accepts
thousands of connections answers nobody meanwhile. The last line is the result; without `--json` a table precedes it.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _delivery import BenchSetup, add_deliveries, add_webhooks, bench_setup, dispatching, receiving
from _result import percentiles, print_result

from vaultevents.store.pool import Database

WEBHOOKS = 1000
BACKLOG = 1000  # for each healthy webhook: it lasts beyond the deadline of those that hang, and their first park
HANGING = 100  # for each of the others
PACED_S = 25.0
PACE_S = 0.02
EACH = 4  # events a step
GOAL = {"healthy_lag_p99_ms": 1000.0, "rate_x": 0.8}


async def _run(made: BenchSetup, dead: BenchSetup | None) -> dict[str, float]:
    urls = [dead.url(f"/hang/{n}") if dead and n % 2 else made.url(f"/hook/{n}") for n in range(WEBHOOKS)]
    async with made.database() as database:
        ids = await add_webhooks(database, urls)
        healthy, others = ids[::2], ids[1::2]
        await add_deliveries(database, BACKLOG * len(healthy), healthy)
        if dead:
            await add_deliveries(database, HANGING * len(others), others)
        with dispatching(made):
            begin = time.perf_counter()
            await _until_delivered(database, healthy)
            rate = BACKLOG * len(healthy) / (time.perf_counter() - begin)
            async with database.statement() as connection:
                since = await connection.fetchval("select db_now()")
            until = time.perf_counter() + PACED_S
            number = 0
            while time.perf_counter() < until:
                targets = [ids[(number + n) % WEBHOOKS] for n in range(EACH)]
                number += EACH
                await _commit(database, targets if dead else [target for target in targets if target in set(healthy)])
                await asyncio.sleep(PACE_S)
            await _until_delivered(database, healthy)
            lags = await _lags(database, healthy, since)
        async with database.statement() as connection:
            await connection.execute("truncate attempts, queue, events, webhooks, accounts cascade")
    return {"rate_s": rate, **percentiles("lag", lags)}


async def _until_delivered(database: Database, webhook_ids: list[str]) -> None:
    pending = "select exists (select from queue where webhook_id = any($1))"
    for _ in range(6000):
        async with database.statement() as connection:
            if not await connection.fetchval(pending, webhook_ids):
                return
        await asyncio.sleep(0.02)
    raise SystemExit("the healthy webhooks did not get what was due")


async def _commit(database: Database, webhook_ids: list[str]) -> None:
    async with database.transaction() as connection:
        await connection.execute(_ARRIVE, webhook_ids)
        await connection.execute("select pg_notify('vaultevents_deliveries', '')")


_ARRIVE = """
with happened as (
    insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
        filter_revision)
    select 'acme', 'e' || gen_random_uuid(), 'v1', 'funding_received', 1, 1, 1, '{}', false, 1
    from unnest($1::text[]) returning seq
), made as (
    insert into deliveries (event_seq, webhook_id, state)
    select h.seq, w.id, 'scheduled' from (select seq, row_number() over (order by seq) as place from happened) h
    join unnest($1::text[]) with ordinality as w (id, place) using (place) returning id, event_seq, webhook_id
)
insert into queue (delivery_id, event_seq, webhook_id, due_at) select id, event_seq, webhook_id, db_now() from made
"""


async def _lags(database: Database, webhook_ids: list[str], since: Any) -> list[float]:
    """From the commit to the answer, in ms, sorted; attempts keep whole ms."""
    async with database.statement() as connection:
        rows = await connection.fetch(
            "select extract(epoch from a.started_at - d.created_at) * 1000 + a.duration_ms as lag_ms"
            " from deliveries d join attempts a on a.delivery_id = d.id"
            " where d.webhook_id = any($1) and d.created_at > $2 order by 1",
            webhook_ids,
            since,
        )
    return [float(row["lag_ms"]) for row in rows]


def compare() -> dict[str, Any]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the receiver has thousands of connections, too
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, bench_setup(Path(folder), "http") as made:
        floor = asyncio.run(_run(made, None))
        with receiving("http", Path(folder)) as port:
            ours = asyncio.run(_run(made, replace(made, port=port)))
    ratio = {"rate_x": round(ours["rate_s"] / floor["rate_s"], 3)}
    ok = ratio["rate_x"] >= GOAL["rate_x"] and ours["lag_p99_ms"] <= GOAL["healthy_lag_p99_ms"]
    rounded = [{key: round(value, 1) for key, value in part.items()} for part in (ours, floor)]
    return {"bench": "isolation", "figures": rounded[0], "floor": rounded[1], "ratio": ratio, "goal": GOAL, "ok": ok}


def main(arguments: list[str]) -> int:
    result = compare()
    return print_result(result, as_json="--json" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
