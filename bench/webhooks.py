"""What a delivery costs with few and with many webhooks, and what a lone webhook gets: `python3 dev.py bench webhooks`.

First 100 deliveries/s, each to a webhook drawn at random of 100, 1,000 and 10,000; each has a retry that is due in an
hour, too. The clock runs from the statement that commits an event to the whole request at the receiver, in this
process; PostgreSQL's CPU is that of the commit, the claim and the settle, less what it takes idle. Its floor is that of
two commits of a row without an index, at the same pace: a delivery takes no fewer. Then one webhook
whose receiver takes 50 ms, beside a bare loop of as many connections as the webhook may have, and one whose receiver
refuses what exceeds 20 at once. `ok` goes by ratios, CPU and shares, which hold on a busy machine. The last line is the
result; without `--json` a table precedes it.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import uvloop
from _delivery import (
    BODY,
    KEY,
    BenchSetup,
    add_deliveries,
    add_webhooks,
    bench_setup,
    dispatching,
    floor,
    receiving,
    until_done,
)
from _receiver import Receiver
from _result import percentiles, print_result

from vaultevents.core.sealing import Secret, seal
from vaultevents.core.signing import new_secret
from vaultevents.store.pool import Database

COUNTS = (100, 1_000, 10_000)
ACCOUNTS = 20
RATE_S = 100.0
MEASURED_S = 12.0
LONE = 100_000
WEAK = 4_000
MOST_AT_ONCE = 256
GOAL = {
    "latency_p50_ms": 3.0,
    "latency_p50_x": 1.3,
    "postgres_cpu_ms": 1.0,
    "postgres_cpu_x": 1.3,
    "lone_s": 3000.0,
    "lone_x": 0.5,
    "weak_refused_share": 0.05,
}
JUDGED_BELOW = ("latency_p50_x", "postgres_cpu_ms", "postgres_cpu_x", "weak_refused_share")


class Arrivals(Receiver):
    """Notes when each event arrived."""

    at_s: ClassVar[dict[str, float]] = {}

    def answer(self, request: bytes) -> None:
        super().answer(request)
        name = request.partition(b"webhook-id: ")[2].partition(b"\r\n")[0].decode()
        Arrivals.at_s.setdefault(name, time.perf_counter())


async def _add_many(database: Database, url: str, count: int) -> list[str]:
    """Webhooks of `ACCOUNTS` accounts, each with a delivery that is due again in an hour; their ids."""
    ids = [f"wh_{number:08d}" for number in range(count)]
    secrets = [seal(KEY, Secret(new_secret(bytes(32))), one, number.to_bytes(12)) for number, one in enumerate(ids)]
    async with database.transaction() as connection:
        await connection.execute(
            "insert into accounts (id, name) select 'a' || n, 'a' || n from generate_series(0, $1 - 1) n", ACCOUNTS
        )
        await connection.execute(_WEBHOOKS, ids, url, ACCOUNTS)
        await connection.execute(
            "insert into webhook_secrets (webhook_id, key_id, sealed) select o.id, $2, o.sealed"
            " from unnest($1::text[], $3::bytea[]) as o (id, sealed)",
            ids,
            KEY.id,
            secrets,
        )
        await connection.execute(_RETRIES, BODY)
    async with database.statement() as connection:
        await connection.execute("vacuum analyze", timeout=300)
    return ids


_WEBHOOKS = """
insert into webhooks (id, account_id, url, active)
select o.id, 'a' || o.place % $3::integer, $2, true from unnest($1::text[]) with ordinality as o (id, place)
"""

_RETRIES = """
with happened as (
    insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
        filter_revision)
    select account_id, 'later_' || id, 'v1', 'funding_received', 1, 1, 1, $1, false, 1 from webhooks
    returning seq, id
), made as (
    insert into deliveries (event_seq, webhook_id, state, attempts) select seq, substr(id, 7), 'scheduled', 1
    from happened returning id, event_seq, webhook_id
)
insert into queue (delivery_id, event_seq, webhook_id, attempts, due_at)
select id, event_seq, webhook_id, 1, db_now() + interval '1 h' from made
"""

_COMMIT = """
with happened as (
    insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
        filter_revision)
    select account_id, $2, 'v1', 'funding_received', 1, 1, 1, $3, false, 1 from webhooks where id = $1 returning seq
), made as (
    insert into deliveries (event_seq, webhook_id, state) select seq, $1, 'scheduled' from happened
    returning id, event_seq, webhook_id
), queued as (
    insert into queue (delivery_id, event_seq, webhook_id, due_at) select id, event_seq, webhook_id, db_now() from made
)
select pg_notify('vaultevents_deliveries', '')
"""


async def _paced(made: BenchSetup, count: int) -> dict[str, float]:
    """100 deliveries/s to `count` webhooks: latencies in ms and PostgreSQL's CPU a delivery, in ms."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Arrivals, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    rng = random.Random(count)
    async with made.database() as database:
        ids = await _add_many(database, made.url("/hook"), count)
        with dispatching(made):
            await _commit_at_pace(database, ids, rng, "warm", 2.0)
            await asyncio.sleep(1.0)
            idle_s, begin_s = made.postgres_cpu_s(), time.perf_counter()
            await asyncio.sleep(3.0)
            idle_share = (made.postgres_cpu_s() - idle_s) / (time.perf_counter() - begin_s)
            cpu_s, begin_s = made.postgres_cpu_s(), time.perf_counter()
            sent = await _commit_at_pace(database, ids, rng, "event", MEASURED_S)
            await asyncio.sleep(0.5)
            cpu_s = made.postgres_cpu_s() - cpu_s - idle_share * (time.perf_counter() - begin_s)
        latencies = [(Arrivals.at_s[name] - at_s) * 1000 for name, at_s in sent.items()]
        await _empty(database)
    server.close()
    return {**percentiles("latency", latencies), "postgres_cpu_ms": cpu_s * 1000 / len(sent)}


async def _commit_at_pace(
    database: Database, ids: list[str], rng: random.Random, prefix: str, for_s: float
) -> dict[str, float]:
    """Commits an event every 10 ms, whatever each takes; when the commit of each began."""
    begin_s, sent, number = time.perf_counter(), {}, 0
    while (due_s := begin_s + number / RATE_S) < begin_s + for_s:
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        name = f"{prefix}_{number}"
        sent[name] = time.perf_counter()
        async with database.statement() as connection:  # a transaction of its own
            await connection.execute(_COMMIT, rng.choice(ids), name, BODY)
        number += 1
    return sent


async def _bare_commits(setup: BenchSetup) -> float:
    """PostgreSQL's CPU of two commits of one row each, at the pace of the deliveries, in ms."""
    async with setup.database() as database:
        async with database.statement() as connection:
            await connection.execute("create table floor_rows (number integer)")
        cpu_s, begin_s, number = setup.postgres_cpu_s(), time.perf_counter(), 0
        while (due_s := begin_s + number / (2 * RATE_S)) < begin_s + MEASURED_S / 2:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            async with database.statement() as connection:
                await connection.execute("insert into floor_rows values ($1)", number)
            number += 1
        spent_s: float = setup.postgres_cpu_s() - cpu_s
        return spent_s * 2000 / number


async def _empty(database: Database) -> None:
    async with database.statement() as connection:
        await connection.execute("truncate attempts, queue, leases, events, webhooks, accounts cascade", timeout=300)
        await connection.execute("vacuum analyze", timeout=300)
    Arrivals.at_s.clear()


async def _lone(made: BenchSetup, path: str, count: int, **options: Any) -> tuple[float, float]:
    """One webhook with a backlog: deliveries/s from the first claim to the last settle, and the share of refusals."""
    async with made.database() as database:
        ids = await add_webhooks(database, [made.url(path)])
        await add_deliveries(database, count, ids)
        with dispatching(made, **options):
            begin = await database.now()
            seconds = await until_done(database, begin, 300.0)
        async with database.statement() as connection:
            refused = await connection.fetchval("select avg((status <> 200)::integer)::float8 from attempts")
        await _empty(database)
    return count / seconds, refused


def compare() -> dict[str, Any]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, bench_setup(Path(folder), "http") as made:
        paced = {count: uvloop.run(_paced(made, count)) for count in COUNTS}
        commits = uvloop.run(_bare_commits(made))
        with receiving("http", Path(folder)) as made.port:
            bare = floor(made, 20_000, "/slow", MOST_AT_ONCE)
            lone_s, _ = uvloop.run(_lone(made, "/slow", LONE))
            _, refused = uvloop.run(_lone(made, "/weak", WEAK, schedule_s=[1.0] * 9))
    few, most = paced[COUNTS[0]], paced[COUNTS[-1]]
    figures = {f"{name}_{count}": value for count, part in paced.items() for name, value in part.items()}
    figures |= {"lone_s": lone_s, "weak_refused_share": refused}
    ratio = {
        "latency_p50_x": most["latency_p50_ms"] / few["latency_p50_ms"],
        "postgres_cpu_x": most["postgres_cpu_ms"] / few["postgres_cpu_ms"],
        "lone_x": lone_s / bare["posts_s"],
    }
    judged = ratio | {"postgres_cpu_ms": most["postgres_cpu_ms"], "weak_refused_share": refused}
    ok = all(judged[name] <= GOAL[name] for name in JUDGED_BELOW) and ratio["lone_x"] >= GOAL["lone_x"]
    bare = {**bare, "commits_cpu_ms": commits}
    parts = [{name: round(value, 3) for name, value in part.items()} for part in (figures, bare, ratio)]
    return {"bench": "webhooks", "figures": parts[0], "floor": parts[1], "ratio": parts[2], "goal": GOAL, "ok": ok}


def main(arguments: list[str]) -> int:
    return print_result(compare(), as_json="--json" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
