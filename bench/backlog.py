"""What a full database costs the deliveries (rule D14): `python3 dev.py bench backlog --json`.

Claims and settles batches of 500 over 100 webhooks, in a database with only this work and in one that holds 5 million
delivered and 1 million parked deliveries besides. Rounds alternate, and medians count. CPU is that of the PostgreSQL
backend at work, wall what the caller waits. `--scale 0.02` lays down less, for a quick try. The last line is the
result; without `--json` a table stands before it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from _delivery import BODY, PREPARATION_S, BenchSetup, add_deliveries, add_webhooks, bench_setup, without_limit
from _machine import cpu_s
from _result import print_result

from vaultevents.store.deliveries import ClaimRequest, Delivery, Settlement, claim, settle
from vaultevents.store.pool import Database, open_database

WEBHOOKS = 100
BATCH = 500
BATCHES = 40  # a round
ROUNDS = 5
DELIVERED = 5_000_000
PARKED = 1_000_000
GOAL = 1.3
STEPS = ("claim_cpu_us", "settle_cpu_us", "claim_wall_us", "settle_wall_us")


def _settlement(delivery: Delivery) -> Settlement:
    return Settlement(delivery, "delivered", datetime.now(UTC), 5, 200, None, "ok", "127.0.0.1")


async def _lay_down(database: Database, webhook_ids: list[str], delivered: int, parked: int) -> None:
    """Old work beside the new, as dispatchers leave it: parked deliveries were tried once and have left the queue."""
    async with without_limit(database) as connection:
        async with connection.transaction():
            await connection.execute("set local session_replication_role = replica")  # all foreign keys hold
            await connection.execute(_OLD, delivered, parked, webhook_ids, BODY, timeout=PREPARATION_S)
        await connection.execute("vacuum analyze", timeout=PREPARATION_S)


# Each event goes to every webhook, so that deliveries weigh more than events.
_OLD = """
with happened as (
    insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
        filter_revision)
    select 'acme', 'old_' || n, 'v1', 'funding_received', n, n, 1, $4, false, 1
    from generate_series(1, 1 + ($1::integer + $2::integer) / cardinality($3::text[])) n returning seq
), made as (
    insert into deliveries (event_seq, webhook_id, state, attempts, finished_at)
    select h.seq, w.id, case when n <= $1 then 'delivered' else 'parked' end, 1, case when n <= $1 then db_now() end
    from (select seq, row_number() over (order by seq) - 1 as place from happened) h
        cross join unnest($3::text[]) with ordinality w (id, number)
        cross join lateral (select h.place * cardinality($3::text[]) + w.number as n) numbered
    where n <= $1 + $2
    returning id, state
)
insert into attempts (delivery_id, number, started_at, duration_ms, status, excerpt, address)
select id, 1, db_now(), 5, case state when 'delivered' then 200 else 500 end, '', '127.0.0.1' from made
"""


async def _round(database: Database, webhook_ids: list[str]) -> dict[str, float]:
    """Lays down work and does it, batch by batch; each figure is for one delivery."""
    count = BATCH * BATCHES
    await add_deliveries(database, count, webhook_ids)
    async with database.statement() as connection:  # the pool has one connection: its backend does everything
        backend = connection.get_server_pid()
    spent, left = dict.fromkeys(STEPS, 0.0), count
    while left:  # a claim takes fewer than a batch where a webhook has less than its share left
        cpu, begin = cpu_s(backend), time.perf_counter()
        claimed = await claim(database, ClaimRequest(BATCH, uuid4(), 60.0, BATCH))
        between, middle = cpu_s(backend), time.perf_counter()
        settled = await settle(database, [_settlement(delivery) for delivery in claimed.deliveries])
        end = time.perf_counter()
        if not settled.held == len(claimed.deliveries) > 0:
            raise SystemExit(f"{settled.held} of {len(claimed.deliveries)} claimed deliveries were settled")
        left -= settled.held
        for step, value in zip(
            STEPS, (between - cpu, cpu_s(backend) - between, middle - begin, end - middle), strict=True
        ):
            spent[step] += value * 1e6 / count
    return spent


async def _clear(database: Database) -> None:
    async with database.statement() as connection:
        await connection.execute("truncate attempts, deliveries, queue, events cascade")


async def _compare(made: BenchSetup, scale: float) -> tuple[list[dict[str, float]], list[dict[str, float]], float]:
    """The rounds with the old work, those without, and how long it took to lay down."""
    async with AsyncExitStack() as stack:
        databases = []
        for name in ("full", "empty"):
            database = await open_database(made.facts["database"], schema=f"{made.facts['schema']}_{name}", pool_size=1)
            stack.push_async_callback(database.close)
            ids = await add_webhooks(database, [made.url(f"/hook/{number}") for number in range(WEBHOOKS)])
            databases.append((database, ids))
        full, empty = databases
        begin = time.perf_counter()
        await _lay_down(*full, int(DELIVERED * scale), int(PARKED * scale))
        laid_down_s = time.perf_counter() - begin
        for each in databases:
            await _round(*each)  # warms up
        await _clear(empty[0])
        with_old, without = [], []
        for _ in range(ROUNDS):
            with_old.append(await _round(*full))
            without.append(await _round(*empty))
            await _clear(empty[0])
    return with_old, without, laid_down_s


def measure(scale: float) -> dict[str, Any]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, bench_setup(Path(folder), "http") as made:
        with_old, without, laid_down_s = asyncio.run(_compare(made, scale))
    figures, floor = (
        {step: statistics.median(one[step] for one in part) for step in STEPS} for part in (with_old, without)
    )
    ratio = {step.replace("_us", "_x"): round(figures[step] / max(floor[step], 1e-9), 3) for step in STEPS}
    return {
        "bench": "backlog",
        "figures": {step: round(value, 1) for step, value in figures.items()}
        | {"delivered": int(DELIVERED * scale), "parked": int(PARKED * scale), "laid_down_s": round(laid_down_s, 1)},
        "floor": {step: round(value, 1) for step, value in floor.items()},
        "ratio": ratio,
        "goal": dict.fromkeys(ratio, GOAL),
        "ok": all(value <= GOAL for value in ratio.values()),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Claims and settles beside millions of old deliveries.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="this share of the old deliveries")
    options = parser.parse_args(arguments)
    result = measure(options.scale)
    return print_result(result, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
