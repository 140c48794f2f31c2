"""What half an hour of receivers that come and go leaves in a dispatcher: `python3 dev.py bench soak --json`.

50 events a second, each to one of 70 webhooks of 7 accounts whose receivers close, reset, flap, refuse each first
attempt, take two seconds or answer with a page (`_flapping.py`). Every 10 s the memory and the descriptors of the
dispatcher and the connections of PostgreSQL are read. Growth is the slope of a line through what was read after the
first third, for 10,000 attempts. Every event must have been delivered or wait for its next attempt. `--minutes 3` is a
quick try. The last line is the result; without `--json` a line stands before it for each minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from _delivery import BODY, BenchSetup, add_webhooks, bench_setup, dispatching, receiving
from _flapping import PATHS
from _machine import open_files, resident_mb
from _result import print_result

from vaultevents.store.pool import Database

MINUTES = 30.0
EVENTS_S = 50
EACH = 10  # webhooks for each kind of receiver
LOOK_S = 10.0
GOAL = {"growth_mb_per_10k": 1.0, "descriptors_growth": 16.0, "connections_growth": 1.0, "lost": 0.0}

_ARRIVE = """
with happened as (
    insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
        filter_revision)
    select w.account_id, 'funding_received_' || gen_random_uuid(), 'v1', 'funding_received', 1, 1, 1, $2, false, 1
    from unnest($1::text[]) with ordinality as o (id, place) join webhooks w using (id) order by o.place returning seq
), made as (
    insert into deliveries (event_seq, webhook_id, state)
    select h.seq, o.id, 'scheduled' from (select seq, row_number() over (order by seq) as place from happened) h
    join unnest($1::text[]) with ordinality as o (id, place) using (place) returning id, event_seq, webhook_id
)
insert into queue (delivery_id, event_seq, webhook_id, due_at) select id, event_seq, webhook_id, db_now() from made
"""
_STATE = """
select (select count(*) from attempts) as attempts,
    (select count(*) from deliveries where state = 'delivered') as delivered,
    (select count(*) from deliveries d where state = 'scheduled'
        and exists (select from queue q where q.delivery_id = d.id)) as waiting,
    (select count(*) from pg_stat_activity where backend_type = 'client backend') as connections
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """What was read at one moment."""

    at_s: float
    attempts: int
    delivered: int
    waiting: int
    memory_mb: float
    descriptors: int
    connections: int


async def _sample(database: Database, pid: int, begin_s: float) -> Sample:
    async with database.statement() as connection:
        row = await connection.fetchrow(_STATE)
    assert row is not None
    at_s = time.perf_counter() - begin_s
    memory_mb, descriptors = resident_mb(pid), open_files(pid)
    return Sample(at_s, row["attempts"], row["delivered"], row["waiting"], memory_mb, descriptors, row["connections"])


async def _run(made: BenchSetup, minutes: float, *, silent: bool) -> tuple[list[Sample], int]:
    async with made.database() as database:
        webhook_ids: list[str] = []
        for path in PATHS:
            account_id = path.strip("/")
            webhook_ids += await add_webhooks(database, [made.url(path)] * EACH, account_id, first=len(webhook_ids))
        with dispatching(made) as (pid,):
            begin_s, sent, samples = time.perf_counter(), 0, [await _sample(database, pid, time.perf_counter())]
            while (now_s := time.perf_counter() - begin_s) < minutes * 60:
                due = int(now_s * EVENTS_S) - sent
                targets = [webhook_ids[number % len(webhook_ids)] for number in range(sent, sent + due)]
                sent += due
                async with database.transaction() as connection:
                    await connection.execute(_ARRIVE, targets, BODY)
                    await connection.execute("select pg_notify('vaultevents_deliveries', '')")
                if now_s >= LOOK_S * len(samples):
                    samples.append(await _sample(database, pid, begin_s))
                    if not silent and len(samples) % 6 == 0:
                        print(samples[-1], file=sys.stderr, flush=True)
                await asyncio.sleep(0.1)
            samples.append(await _sample(database, pid, begin_s))
    return samples, sent


def _slope(points: list[tuple[float, float]]) -> float:
    """The slope of the line of least squares."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def judge(samples: list[Sample], sent: int) -> dict[str, float]:
    """Return the growth after the first third, and what is neither delivered nor waiting."""
    later = samples[len(samples) // 3 :]
    last = later[-1]
    halves = later[: len(later) // 2], later[len(later) // 2 :]
    descriptors, connections = (
        [max(getattr(sample, name) for sample in half) for half in halves] for name in ("descriptors", "connections")
    )
    return {
        "growth_mb_per_10k": round(_slope([(s.attempts, s.memory_mb) for s in later]) * 10_000, 3),
        "descriptors_growth": float(descriptors[1] - descriptors[0]),
        "connections_growth": float(connections[1] - connections[0]),
        "lost": float(sent - last.delivered - last.waiting),
    }


def measure(minutes: float, *, silent: bool) -> dict[str, Any]:
    """Run the soak and judge it."""
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        bench_setup(Path(folder), "https") as made,
        receiving("https", Path(folder), "_flapping.py") as made.port,
    ):
        samples, sent = uvloop.run(_run(made, minutes, silent=silent))
    first, last = samples[len(samples) // 3], samples[-1]
    ratio = judge(samples, sent)
    figures = {
        "minutes": minutes,
        "events": sent,
        "attempts": last.attempts,
        "delivered": last.delivered,
        "waiting": last.waiting,
        "memory_mb": round(last.memory_mb, 1),
        "descriptors": last.descriptors,
        "connections": last.connections,
    }
    floor = {"memory_mb": round(first.memory_mb, 1), "descriptors": first.descriptors, "connections": first.connections}
    ok = all(ratio[name] <= most for name, most in GOAL.items())
    return {"bench": "soak", "figures": figures, "floor": floor, "ratio": ratio, "goal": GOAL, "ok": ok}


def main(arguments: list[str]) -> int:
    """Read the arguments and print the result."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result alone")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    given = parser.parse_args(arguments)
    return print_result(measure(given.minutes, silent=given.json), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
