"""A backfill from a node's answers to committed deliveries: `python3 dev.py bench backfill --json`.

100,000 blocks with 20,000 logs of 500 vaults, served as precomputed bytes by another process, at 0 and at 50 ms: logs
checked, times, events, deliveries for 2 webhooks, cursor. The floor is a bare loop that fetches the same logs and the
headers of their blocks in batches over as many connections, decodes, and copies the same bodies and delivery rows into
tables with the same indexes; it checks nothing and could not go on after a crash. Fresh processes take turns at both;
wall times are the best of the rounds. The rows of both must be the same. Peak memory is that of the reading process, at
100,000 blocks and at ten times as many. The last line is the result; without `--json` a table stands before it.
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
from _machine import peak_mb
from _mocknode import RANGE_LIMIT, block_hash, mock_node, queue, vault
from _result import tell

from vaultevents.chain.execution import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.core.events import ENCODING
from vaultevents.core.logs import ETHER_FUNDED, TOPICS
from vaultevents.core.units import Wei, checksum, eth_text, hex_text
from vaultevents.daemon import collect_less
from vaultevents.store import accounts
from vaultevents.store.cursors import open_stream
from vaultevents.store.embedded import EmbeddedPostgres
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database, open_database
from vaultevents.watch.streams import Steps, logs_stream
from vaultevents.watch.watcher import run

BLOCKS, LOGS, VAULTS, WEBHOOKS = 100_000, 20_000, 500, 2
LATENCIES_MS = (0, 50)
ROUNDS = 5
LONGER = 10
CONNECTIONS = 8  # as many requests as a backfill has under way
HEADERS_AT_ONCE = 100
GOAL = {"wall_at_0_ms_x": 2.0, "wall_at_50_ms_x": 1.5, "requests_x": 1.05, "peak_mb": 256.0}


async def ours(database: Database, url: str, blocks: int) -> float:
    """Seconds that the backfill takes."""
    async with ExecutionChain([url], head=HeadPolicy(), options=ExecutionOptions()) as chain:
        await open_stream(database, "logs", blocks, block_hash(blocks))
        outbox = Outbox(database)
        (cursor,) = await outbox.backfills("logs")
        stream = logs_stream(chain, Steps(1000, RANGE_LIMIT, 1.0))
        begin = time.perf_counter()
        await run(stream.source, outbox, cursor, step=stream.backfill_step, poll_s=stream.poll_s)
        return time.perf_counter() - begin


class _Log(msgspec.Struct, rename="camel"):
    address: str
    topics: list[str]
    data: str
    block_number: str
    transaction_hash: str
    log_index: str


class _Header(msgspec.Struct):
    number: str
    hash: str
    timestamp: str


class _Answer(msgspec.Struct):
    id: int
    result: msgspec.Raw


_ANSWERS = msgspec.json.Decoder(list[_Answer])
_LOGS = msgspec.json.Decoder(list[_Log])
_HEADER = msgspec.json.Decoder(_Header)


async def floor(database: Database, url: str, blocks: int) -> float:
    """Seconds of the bare loop."""
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    owners = {checksum(vault(number)): f"v{number}" for number in range(VAULTS)}
    owners |= {checksum(queue(number)): f"v{number}" for number in range(VAULTS)}
    seq = 0
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(calls: list[tuple[str, list[Any]]]) -> list[msgspec.Raw]:
            sent = [{"jsonrpc": "2.0", "id": at, "method": m, "params": p} for at, (m, p) in enumerate(calls)]
            async with session.post(url, data=msgspec.json.encode(sent)) as response:
                return [one.result for one in _ANSWERS.decode(await response.read())]

        begin = time.perf_counter()
        for first in range(1, blocks + 1, RANGE_LIMIT):
            span = {"fromBlock": hex(first), "toBlock": hex(min(first + RANGE_LIMIT - 1, blocks))}
            (found,) = await ask([("eth_getLogs", [span | {"topics": [[hex_text(topic) for topic in TOPICS]]}])])
            logs = _LOGS.decode(found)
            numbers = list(dict.fromkeys(log.block_number for log in logs))
            chunks = [numbers[at : at + HEADERS_AT_ONCE] for at in range(0, len(numbers), HEADERS_AT_ONCE)]
            headers = await asyncio.gather(
                *(ask([("eth_getBlockByNumber", [number, False]) for number in chunk]) for chunk in chunks)
            )
            times = {
                header.number: int(header.timestamp, 16) for chunk in headers for header in map(_HEADER.decode, chunk)
            }
            events = [_row(seq + at + 1, log, times[log.block_number], owners) for at, log in enumerate(logs)]
            await _copy(database, events, seq)
            seq += len(events)
        return time.perf_counter() - begin


def _row(seq: int, log: _Log, time_s: int, owners: dict[str, str]) -> tuple[Any, ...]:
    address = checksum(bytes.fromhex(log.address[2:]))
    owner, amount, tx_hash = owners[address], Wei(int(log.data, 16)), log.transaction_hash
    payload: dict[str, Any]
    if log.topics[0] == hex_text(ETHER_FUNDED):
        kind, suffix, title = "funding_received", tx_hash.upper(), "Funding received"
        payload = {"tx_hash": tx_hash, "amount_wei": str(amount), "staking_vault_address": address}
        message = f"Vault {owner} received {eth_text(amount)} ETH."
    else:
        request = str(int(log.topics[1], 16))
        kind, suffix, title = "withdrawal_claimed", f"{address}_{request}", "Withdrawal claimed"
        payload = {
            "tx_hash": tx_hash,
            "request_id": request,
            "recipient": checksum(bytes.fromhex(log.topics[3][26:])),
            "owner": checksum(bytes.fromhex(log.topics[2][26:])),
            "amount_eth": eth_text(amount),
            "withdrawal_queue_address": address,
        }
        message = f"Withdrawal request {request} of vault {owner} paid {eth_text(amount)} ETH."
    event_id = f"{kind}_acme_{suffix}"
    body = msgspec.json.encode(
        {
            "id": event_id,
            "account_ref_id": "acme",
            "staking_vault_id": owner,
            "event_type": kind,
            "severity": "info",
            "title": title,
            "message": message,
            "payload": payload,
            "created_at": time_s * 1000,
        }
    )
    return (seq, "acme", event_id, owner, kind, int(log.block_number, 16), time_s * 1000, ENCODING, body, False, 1)


async def _copy(database: Database, events: list[tuple[Any, ...]], seq: int) -> None:
    columns = ["seq", "account_id", "id", "vault_id", "event_type", "block_number", "created_at_ms", "encoding", "body"]
    deliveries = [
        (WEBHOOKS * (seq + at) + number + 1, seq + at + 1, f"wh_{number:08d}", "scheduled")
        for at in range(len(events))
        for number in range(WEBHOOKS)
    ]
    async with database.transaction() as connection:
        now = await connection.fetchval("select db_now()")
        queued = [(one[2], one[0], one[1], 0, now) for one in deliveries]
        await connection.copy_records_to_table("events", records=events, columns=[*columns, "quiet", "filter_revision"])
        await connection.copy_records_to_table(
            "deliveries", records=deliveries, columns=["id", "event_seq", "webhook_id", "state"]
        )
        await connection.copy_records_to_table(
            "queue", records=queued, columns=["webhook_id", "delivery_id", "event_seq", "attempts", "due_at"]
        )


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
    assert len((await accounts.registry(database)).vaults) == VAULTS


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


async def _counted(url: str) -> list[int]:
    """The requests and calls since the last time."""
    async with aiohttp.ClientSession() as session:
        body = {"jsonrpc": "2.0", "id": 1, "method": "mock_counted", "params": []}
        async with session.post(url, data=msgspec.json.encode(body)) as response:
            counted: list[int] = msgspec.json.decode(await response.read())["result"]
            return counted


async def one(who: str, target: dict[str, Any], url: str, blocks: int, compare: bool) -> dict[str, Any]:
    """One round in this process."""
    database = await open_database(target, schema=f"b_{os.getpid()}")
    await _prepare(database)
    await _counted(url)
    collect_less()  # as the daemon and a replay do
    seconds = await (ours if who == "ours" else floor)(database, url, blocks)
    requests, calls = await _counted(url)
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


def measure(rounds: int, longer: int) -> dict[str, Any]:
    figures: dict[str, float] = {}
    least: dict[str, float] = {}
    ratio: dict[str, float] = {}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        embedded = EmbeddedPostgres(Path(folder) / "postgres")
        target = dict(embedded.join().connect_kwargs())
        try:
            for latency_ms in LATENCIES_MS:
                with mock_node(BLOCKS, LOGS, VAULTS, latency_ms) as url:
                    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "floor": []}
                    for number in range(rounds):
                        for who, results in runs.items():
                            results.append(_in_a_process(who, target, url, BLOCKS, compare=number == 0))
                mine, bare = runs["ours"], runs["floor"]
                if mine[0]["digest"] != bare[0]["digest"] or mine[0]["events"] != LOGS:
                    raise SystemExit(f"the rows differ: {mine[0]['events']} events, the floor has {bare[0]['events']}")
                wall, wall_floor = (min(run["seconds"] for run in part) for part in (mine, bare))
                asked, least_asked = (max(run["requests"] for run in part) for part in (mine, bare))
                figures |= {f"wall_at_{latency_ms}_ms_s": round(wall, 3), f"requests_at_{latency_ms}_ms": asked}
                least[f"wall_at_{latency_ms}_ms_s"] = round(wall_floor, 3)
                least[f"requests_at_{latency_ms}_ms"] = least_asked
                ratio[f"wall_at_{latency_ms}_ms_x"] = round(wall / wall_floor, 3)
                ratio["requests_x"] = max(ratio.get("requests_x", 0.0), round(asked / least_asked, 3))
                peak = max(run["peak_mb"] for run in mine)
                figures["peak_mb"] = max(figures.get("peak_mb", 0.0), round(peak, 1))
            if longer > 1:
                with mock_node(longer * BLOCKS, longer * LOGS, VAULTS, 0) as url:
                    far = _in_a_process("ours", target, url, longer * BLOCKS, compare=False)
                figures |= {"peak_longer_mb": round(far["peak_mb"], 1), "wall_longer_s": round(far["seconds"], 2)}
        finally:
            embedded.leave()
    measured = {**ratio, "peak_mb": max(figures["peak_mb"], figures.get("peak_longer_mb", 0.0))}
    return {
        "bench": "backfill",
        "figures": figures | {"blocks": BLOCKS, "logs": LOGS, "vaults": VAULTS, "blocks_longer": longer * BLOCKS},
        "floor": least,
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
    return tell(measure(options.rounds, options.longer), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
