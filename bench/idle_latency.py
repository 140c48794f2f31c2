"""From the commit of an event to its receiver's 200 on an idle system: `python3 dev.py bench idle-latency --json`.

One event at a time, 20 to 60 ms apart, over TLS on kept connections. The clock starts when COMMIT is sent and stops
when the receiver, in this process, has the whole request. The floor is a commit and a POST by hand. The last line is
the result; without `--json` a table stands before it.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from _delivery import BODY, BenchSetup, add_webhooks, bench_setup, dispatching
from _receiver import Receiver
from _result import percentiles, print_result

from vaultevents.devnet.certificates import issue
from vaultevents.store.pool import Connection, Database

EVENTS = 500
GOAL = {"latency_p50_ms": 4.0, "latency_p99_ms": 25.0}


class Watched(Receiver):
    """Signal when a whole request has arrived."""

    arrival: asyncio.Future[float]

    def answer(self, request: bytes) -> None:
        super().answer(request)
        if not Watched.arrival.done():
            Watched.arrival.set_result(time.perf_counter())


async def _measure(made: BenchSetup) -> tuple[list[float], list[float]]:
    loop = asyncio.get_running_loop()
    _, context = issue(made.folder)
    server = await loop.create_server(Watched, "127.0.0.1", 0, ssl=context)
    made.port = server.sockets[0].getsockname()[1]
    rng = random.Random(1)
    async with made.database() as database:
        (webhook_id,) = await add_webhooks(database, [made.url("/hook")])
        floor = await _floor(made, database)
        ours = []
        with dispatching(made):
            for number in range(EVENTS + 20):
                Watched.arrival = loop.create_future()
                begin = await _commit(database, webhook_id)
                latency = await asyncio.wait_for(Watched.arrival, 10) - begin
                if number >= 20:  # the first ones open the connection and fill the caches
                    ours.append(latency * 1000)
                await asyncio.sleep(rng.uniform(0.02, 0.06))
    server.close()
    return ours, floor


async def _commit(database: Database, webhook_id: str) -> float:
    """One event with its delivery, as fan-out leaves them; the moment when COMMIT was sent."""
    async with database.transaction() as connection:
        await _insert(connection, webhook_id)
        await connection.execute("select pg_notify('vaultevents_deliveries', '')")
        return time.perf_counter()


async def _insert(connection: Connection, webhook_id: str) -> None:
    await connection.execute(
        "with happened as ("
        " insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body,"
        "  suppressed, filter_revision)"
        " values ('acme', 'e' || gen_random_uuid(), 'v1', 'funding_received', 1, 1, 1, $2, false, 1)"
        " returning seq), made as ("
        " insert into deliveries (event_seq, webhook_id, state) select seq, $1, 'scheduled' from happened"
        " returning id, event_seq, webhook_id)"
        " insert into queue (delivery_id, event_seq, webhook_id, due_at)"
        " select id, event_seq, webhook_id, db_now() from made",
        webhook_id,
        BODY,
    )


async def _floor(made: BenchSetup, database: Database) -> list[float]:
    """A commit of one row, then a POST over a kept TLS connection."""
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context(cafile=made.folder / "ca.pem")
    _, writer = await asyncio.open_connection("127.0.0.1", made.port, ssl=context)
    took = []
    for _ in range(EVENTS):
        Watched.arrival = loop.create_future()
        async with database.transaction() as connection:
            await connection.execute("insert into accounts (id, name) values (gen_random_uuid()::text, '')")
            begin = time.perf_counter()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY))
        took.append((await Watched.arrival - begin) * 1000)
        await asyncio.sleep(0.005)
    writer.close()
    return took


def compare() -> dict[str, Any]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, bench_setup(Path(folder), "https") as made:
        ours, floor = uvloop.run(_measure(made))
    figures, least = percentiles("latency", ours), percentiles("latency", floor)
    rounded = [{key: round(value, 2) for key, value in part.items()} for part in (figures, least)]
    ratio = {"latency_p50_x": round(figures["latency_p50_ms"] / least["latency_p50_ms"], 2)}
    ok = all(figures[name] <= most for name, most in GOAL.items())
    return {"bench": "idle-latency", "figures": rounded[0], "floor": rounded[1], "ratio": ratio, "goal": GOAL, "ok": ok}


def main(arguments: list[str]) -> int:
    result = compare()
    return print_result(result, as_json="--json" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
