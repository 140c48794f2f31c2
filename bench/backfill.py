"""A backfill from a node's answers to committed deliveries: `python3 dev.py bench backfill --json`.

100,000 blocks with 20,000 logs of 500 vaults and as many foreign logs of the same topics, in blocks of their own,
served by another process, at 0 and at 50 ms: from there to events, deliveries for 2 webhooks and cursor. Hashes and
roots of the chain are true. Two bare loops copy the same rows (`_floors.py`): `proving` fetches the receipts of the
blocks with logs of registered contracts and computes their roots and the headers' hashes; `plain` proves nothing.
Fresh processes take turns at all three; wall times are the best of the rounds. The rows of all must be the same. Peak
memory is that of the reading process, at 100,000 blocks and at ten times as many. The last line is the result; without
`--json` a table stands before it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
from _delivery import add_webhooks
from _floors import Task, plain, proving
from _machine import peak_mb
from _mockchain import queue, vault
from _mocknode import RANGE_LIMIT, mock_node
from _result import print_result

from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.store.cursors import open_stream
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database, open_database
from vaultevents.store.postgres.embedded import EmbeddedPostgres
from vaultevents.store.registry import current_registry
from vaultevents.watch.streams import Steps, logs_stream
from vaultevents.watch.watcher import run
from vaultevents.wiring.process_memory import tune_memory

BLOCKS, LOGS, VAULTS, WEBHOOKS = 100_000, 20_000, 500, 2
LATENCIES_MS = (0, 50)
ROUNDS = 5
LONGER = 10
GOAL = {
    "wall_at_0_ms_x": 2.0,
    "wall_at_0_ms_plain_x": 4.0,
    "wall_at_50_ms_x": 1.5,
    "requests_x": 1.05,
    "peak_mb": 256.0,
}


async def ours(database: Database, url: str, blocks: int, anchor: str) -> float:
    """Seconds that the backfill takes; `anchor` is the hash of the last block."""
    async with ExecutionChain([url], head=HeadPolicy(), options=ExecutionOptions()) as chain:
        await open_stream(database, "logs", blocks, anchor)
        outbox = Outbox(database)
        (cursor,) = await outbox.backfills("logs")
        stream = logs_stream(chain, Steps(1000, RANGE_LIMIT, 1.0))
        begin = time.perf_counter()
        await run(stream.source, outbox, cursor, step=stream.backfill_step, poll_s=stream.poll_s)
        return time.perf_counter() - begin


async def _prepare(database: Database) -> None:
    """One account with all vaults, each with its queue, and its webhooks."""
    await add_webhooks(database, [f"https://receiver.example/{number}" for number in range(WEBHOOKS)])
    async with database.transaction() as connection:
        await connection.execute(
            "with made as (insert into vaults (account_id, id, address, queue)"
            "  select 'acme', * from unnest($1::text[], $2::bytea[], $3::bytea[]) returning id)"
            " insert into vault_spans (account_id, vault_id, ordinal, first_block) select 'acme', id, 1, 1 from made",
            [f"v{number}" for number in range(VAULTS)],
            [vault(number) for number in range(VAULTS)],
            [queue(number) for number in range(VAULTS)],
        )
        await connection.execute("update registry set version = version + 1")
    assert len((await current_registry(database)).vaults) == VAULTS


async def _rows(database: Database) -> str:
    """A digest of all events, and of what is to be delivered to whom."""
    state = hashlib.sha256()
    async with database.transaction() as connection:
        async for row in connection.cursor(
            "select e.id, e.body, (select string_agg(d.webhook_id, ' ' order by d.webhook_id) from deliveries d"
            "  join queue q on q.webhook_id = d.webhook_id and q.delivery_id = d.id where d.event_seq = e.seq) as due"
            ' from events e order by e.id collate "C"',
            prefetch=1000,
        ):
            state.update(repr(tuple(row)).encode())
    return state.hexdigest()


async def _call(url: str, method: str, *params: Any) -> Any:
    """The result of one call, and of those that only the mock node knows: these count for nothing."""
    async with aiohttp.ClientSession() as session:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with session.post(url, data=msgspec.json.encode(body)) as response:
            return msgspec.json.decode(await response.read())["result"]


async def one(who: str, target: dict[str, Any], url: str, blocks: int, compare: bool) -> dict[str, Any]:
    """One round in this process."""
    database = await open_database(target, schema=f"b_{os.getpid()}")
    await _prepare(database)
    anchor = (await _call(url, "eth_getBlockByNumber", hex(blocks), False))["hash"]
    task = Task.of(database, url, blocks, VAULTS, WEBHOOKS)
    await _call(url, "mock_counted")
    tune_memory()  # as the daemon and a replay do
    match who:
        case "ours":
            seconds = await ours(database, url, blocks, anchor)
        case "proving":
            seconds = await proving(task)
        case _:
            seconds = await plain(task)
    requests, calls = await _call(url, "mock_counted")
    peak = peak_mb()
    digest = await _rows(database) if compare else ""
    async with database.transaction() as connection:
        events = await connection.fetchval("select count(*) from events")
        await connection.execute(f"drop schema b_{os.getpid()} cascade")
    await database.close()
    facts = {"seconds": seconds, "requests": requests, "calls": calls, "peak_mb": peak}
    return {**facts, "digest": digest, "events": events}


def _in_a_process(who: str, target: dict[str, Any], url: str, blocks: int, *, compare: bool) -> dict[str, Any]:
    given = json.dumps([who, target, url, blocks, compare])
    done = subprocess.run([sys.executable, __file__, "--one", given], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


Rounds = dict[str, list[dict[str, Any]]]


def _rounds(target: dict[str, Any], url: str, rounds: int) -> Rounds:
    """What ours and the floors did in turn. Ends the benchmark when their rows differ."""
    runs: Rounds = {"ours": [], "proving": [], "plain": []}
    for number in range(rounds):
        for who, results in runs.items():
            results.append(_in_a_process(who, target, url, BLOCKS, compare=number == 0))
    digests = {who: (results[0]["digest"], results[0]["events"]) for who, results in runs.items()}
    if len(set(digests.values())) != 1 or digests["ours"][1] != LOGS:
        raise SystemExit(f"the rows differ: {digests}")
    return runs


def measure(rounds: int, longer: int) -> dict[str, Any]:
    figures: dict[str, float] = {}
    floors: dict[str, float] = {}
    ratio: dict[str, float] = {}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        embedded = EmbeddedPostgres(Path(folder) / "postgres")
        target = dict(embedded.join().connect_kwargs())
        try:
            with mock_node(BLOCKS, LOGS, VAULTS) as url:
                for latency_ms in LATENCIES_MS:
                    asyncio.run(_call(url, "mock_latency", latency_ms))
                    runs = _rounds(target, url, rounds)
                    wall = {who: min(run["seconds"] for run in results) for who, results in runs.items()}
                    asked = {who: max(run["requests"] for run in results) for who, results in runs.items()}
                    calls = {who: max(run["calls"] for run in results) for who, results in runs.items()}
                    at = f"at_{latency_ms}_ms"
                    figures |= {f"wall_{at}_s": round(wall["ours"], 3), f"requests_{at}": asked["ours"]}
                    figures |= {
                        f"calls_{at}": calls["ours"],
                        f"proofs_of_floor_{at}_s": round(wall["proving"] - wall["plain"], 3),
                        f"above_plain_{at}_s": round(wall["ours"] - wall["plain"], 3),
                    }
                    for who in ("proving", "plain"):
                        floors |= {f"{who}_{at}_s": round(wall[who], 3), f"{who}_requests_{at}": asked[who]}
                        floors |= {f"{who}_calls_{at}": calls[who]}
                    ratio[f"wall_{at}_x"] = round(wall["ours"] / wall["proving"], 3)
                    ratio[f"wall_{at}_plain_x"] = round(wall["ours"] / wall["plain"], 3)
                    requests_x = round(asked["ours"] / asked["proving"], 3)
                    ratio["requests_x"] = max(ratio.get("requests_x", 0.0), requests_x)
                    peak = max(run["peak_mb"] for run in runs["ours"])
                    figures["peak_mb"] = max(figures.get("peak_mb", 0.0), round(peak, 1))
            if longer > 1:
                with mock_node(longer * BLOCKS, longer * LOGS, VAULTS) as url:
                    far = _in_a_process("ours", target, url, longer * BLOCKS, compare=False)
                figures |= {"peak_longer_mb": round(far["peak_mb"], 1), "wall_longer_s": round(far["seconds"], 2)}
        finally:
            embedded.leave()
    measured = {**ratio, "peak_mb": max(figures["peak_mb"], figures.get("peak_longer_mb", 0.0))}
    sizes = {"blocks": BLOCKS, "logs": LOGS, "foreign_logs": LOGS, "vaults": VAULTS, "blocks_longer": longer * BLOCKS}
    return {
        "bench": "backfill",
        "figures": figures | sizes,
        "floor": floors,
        "ratio": ratio,
        "goal": GOAL,
        "ok": all(measured[key] <= most for key, most in GOAL.items()),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Reads a long range from a mock node into deliveries.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--longer", type=int, default=LONGER, help="how many times as many blocks for the memory")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(asyncio.run(one(*json.loads(options.one)))))
        return 0
    return print_result(measure(options.rounds, options.longer), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
