"""The rate of signed deliveries over plain HTTP: `python3 dev.py bench dispatch --json`.

Deliveries with attempt rows, `synchronous_commit = on`, 100 webhooks; PostgreSQL, the receiver and the one dispatcher
process share the machine. The floor is the bare loop of `_delivery.py` against the same receiver; `client` is the same
loop by the product's own client, without queue and database. Rounds alternate, and the best of each counts. The last
line is the result; without `--json` a table stands before it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _delivery import BenchSetup, add_webhooks, bench_setup, client, deliver, floor
from _result import print_result

ROUNDS = 3
WEBHOOKS = 100


def measure(name: str, scheme: str, count: int, goal: float) -> dict[str, Any]:
    """Alternates floor and dispatcher; the figures of the best rounds and the ratio of the rates."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, bench_setup(Path(folder), scheme) as made:
        ids = asyncio.run(_prepare(made))
        asyncio.run(deliver(made, count // 10, ids))  # warms up
        floors, clients, ours = [], [], []
        for _ in range(ROUNDS):
            floors.append(floor(made, count))
            clients.append(client(made, count))
            ours.append(asyncio.run(deliver(made, count, ids)))
    best, least = max(ours, key=lambda one: one["deliveries_s"]), max(floors, key=lambda one: one["posts_s"])
    ratio = best["deliveries_s"] / least["posts_s"]
    least |= max(clients, key=lambda one: one["client_posts_s"])
    rounded = (
        {key: round(value, 1) for key, value in best.items()},
        {key: round(value, 1) for key, value in least.items()},
    )
    return {
        "bench": name,
        "figures": rounded[0],
        "floor": rounded[1],
        "ratio": {"rate_x": round(ratio, 3), "client_x": round(best["deliveries_s"] / least["client_posts_s"], 3)},
        "goal": {"rate_x": goal},
        "ok": ratio >= goal,
    }


async def _prepare(made: BenchSetup) -> list[str]:
    async with made.database() as database:
        return await add_webhooks(database, [made.url(f"/hook/{number}") for number in range(WEBHOOKS)])


if __name__ == "__main__":
    sys.exit(print_result(measure("dispatch", "http", 60_000, 0.25), as_json="--json" in sys.argv))
