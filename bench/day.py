"""What one day of mainnet asks of the nodes: `python3 dev.py bench day --json`.

7,200 blocks with full blooms (440 foreign logs each), final 32 at a time; 1,000 vaults with queues; 200 logs of these,
and 2,000 foreign logs of the same topics, in random blocks. A real daemon (`run --only watch`) reads logs and reports,
with the audits behind both, from one node and then from two. No time passes: the next 32 blocks become final as soon as
everything is read. So a look at a head that has not moved is no request here; `polls` says how many of these a day has
at the default intervals. Answers of such nodes are smaller than mainnet's: compare `mb` only between versions.
`--blocks 320` is a quick try. The last line is the result; without `--json` a table stands before it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from _mockchain import queue, vault
from _result import print_result
from aiohttp import web

from vaultevents import config
from vaultevents.core.units import Address
from vaultevents.devnet.acts import Claim, Funding, log_of
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS, Log
from vaultevents.devnet.chain import At, Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.store import accounts
from vaultevents.store.pool import Database
from vaultevents.telemetry import configure_logging
from vaultevents.wiring.database import open_store

BLOCKS, EPOCH, VAULTS, EVENTS, FOREIGN = 7200, 32, 1000, 200, 2000
DAY_S = 86_400
LOOK_S = 0.02
QUIET_S = 2.0
LATE_S = 120.0
ORACLE = b"\x0a" * 20
TAGS = ("finalized", "safe", "latest")


class CountingServer(ExecutionServer):
    """Counts what is asked of a node, apart from looks at a head that it has reported before."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self._reported: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        self.requests, self.looks, self.answer_bytes = 0, 0, 0
        self.methods: Counter[str] = Counter()
        self.moved_at = time.monotonic()

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await super()._exchange(request)
        sent = msgspec.json.decode(await request.read())
        calls = sent if isinstance(sent, list) else [sent]
        if self._is_repeated(calls):
            self.looks += 1
            return response
        self.moved_at = time.monotonic()
        self.requests += 1
        self.methods.update(map(_method, calls))
        body = response.body if isinstance(response, web.Response) else None
        self.answer_bytes += len(body) if isinstance(body, bytes) else 0
        return response

    def _is_repeated(self, calls: list[dict[str, Any]]) -> bool:
        """Whether this asks for nothing but a head, and that has not moved since it was asked for."""
        tags = [call["params"][0] for call in calls if call["method"] == "eth_getBlockByNumber"]
        if len(tags) < len(calls) or not set(tags) <= set(TAGS):
            return False
        heads = {tag: block.number for tag in tags if (block := self.node.block_at(tag)) is not None}
        repeated = all(self._reported.get(tag) == number for tag, number in heads.items())
        self._reported |= heads
        return repeated


def _method(call: dict[str, Any]) -> str:
    """The method; logs of one block are distinguished from those of a range."""
    method: str = call["method"]
    return f"{method}_of_block" if method == "eth_getLogs" and "blockHash" in call["params"][0] else method


class Day:
    """A chain, and what happens on it."""

    def __init__(self, blocks: int) -> None:
        self.chain = Chain(1)
        self.chain.finalized = At(0)
        self.chain.filler_logs = FULL_BLOCK_LOGS
        self._rng = random.Random(blocks)
        share = blocks / BLOCKS
        self.own = self._places(blocks, round(EVENTS * share))
        self.foreign = self._places(blocks, round(FOREIGN * share))
        self._serial = 0

    def _places(self, blocks: int, logs: int) -> Counter[int]:
        return Counter(self._rng.randrange(blocks) for _ in range(logs))

    def mine(self, first: int, blocks: int) -> None:
        """The blocks of the day from `first` on, all of them final."""
        for at in range(first, first + blocks):
            logs = [self._log(own=True) for _ in range(self.own[at])]
            logs += [self._log(own=False) for _ in range(self.foreign[at])]
            self.chain.mine([self.chain.transaction([log]) for log in logs])
        self.chain.finalized = At(self.chain.head.number)

    def _log(self, *, own: bool) -> Log:
        self._serial += 1
        number = self._rng.randrange(VAULTS) if own else VAULTS + self._rng.randrange(VAULTS)
        if self._rng.random() < 0.85:
            return log_of(Funding(vault(number), self._rng.randrange(10**15, 10**20)))
        return log_of(Claim(queue(number), self._serial, vault(0), vault(1), self._rng.randrange(10**15, 10**20)))


@asynccontextmanager
async def _daemon(folder: Path, urls: list[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    fields = config.ExecutionSettings.model_fields
    at_once = "audit_blocks_per_s = 100000.0\n" if "audit_blocks_per_s" in fields else ""
    path = folder / "vaultevents.toml"
    path.write_text(
        f'network = "devnet"\nchain_id = 1337\ndata_dir = "{folder}"\n'
        f"[execution]\nurls = {msgspec.json.encode(urls).decode()}\npoll_interval_s = 0.02\n{at_once}"
        f'[contracts]\nlazy_oracles = ["0x{ORACLE.hex()}"]\n'
        '[reports]\ngateways = ["http://127.0.0.1:9"]\npoll_interval_s = 0.02\n'
        '[api]\nserve = "off"\n'
    )
    command = (sys.executable, "-m", "vaultevents", "run", "--only", "watch", "--config", str(path))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    with (folder / "daemon.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _is_read(database: Database, number: int) -> bool:
    """Whether both streams and the audits behind them have read up to block `number`, and no backfill is left."""
    async with database.statement() as connection:
        rows = await connection.fetch(
            "select stream, kind, position, stop from cursors where stop is null or position < stop"
        )
    live = {row["stream"] for row in rows if row["kind"] == "live"}
    audits = {row["stream"] for row in rows if row["kind"] == "audit"}
    audited = live == audits or "audit_blocks_per_s" not in config.ExecutionSettings.model_fields
    return (
        live == {"logs", "reports"}
        and audited
        and all(row["stop"] is None and row["position"] >= number for row in rows)
    )


async def _until_read(day: Day, database: Database, daemon: asyncio.subprocess.Process) -> None:
    number = day.chain.head.number
    async with asyncio.timeout(LATE_S):
        while not await _is_read(database, number):
            if daemon.returncode is not None:
                raise SystemExit(f"the daemon ended with exit code {daemon.returncode}")
            await asyncio.sleep(LOOK_S)


async def _quiet(servers: list[CountingServer]) -> None:
    """Until nothing was asked for some time but for heads that had not moved."""
    async with asyncio.timeout(LATE_S):
        while True:
            rest_s = max(server.moved_at for server in servers) + QUIET_S - time.monotonic()
            if rest_s <= 0:
                return
            await asyncio.sleep(rest_s)


async def _run(folder: Path, blocks: int, nodes: int) -> dict[str, Any]:
    """What a day asked of so many nodes; the calls by method under their names."""
    day = Day(blocks)
    day.chain.mine([day.chain.transaction([], [ORACLE])])
    day.mine(blocks, EPOCH)  # an epoch before the day, without events
    servers = [CountingServer(day.chain) for _ in range(nodes)]
    urls = [await server.start() for server in servers]
    values = {"network": "devnet", "chain_id": 1337, "data_dir": str(folder)}
    async with open_store(config.given(values, "day")) as store:
        await accounts.add_account(store.database, "acme", "acme")
        for number in range(VAULTS):
            await accounts.add_vault(
                store.database, "acme", f"v{number}", Address(vault(number)), Address(queue(number)), 1
            )
        begin = time.perf_counter()
        async with _daemon(folder, urls) as daemon:
            try:
                await _until_read(day, store.database, daemon)
                await _quiet(servers)
                for server in servers:
                    server.reset()
                for first in range(0, blocks, EPOCH):
                    day.mine(first, min(EPOCH, blocks - first))
                    await _until_read(day, store.database, daemon)
                await _quiet(servers)
            except TimeoutError:
                tail = await asyncio.to_thread((folder / "daemon.log").read_text)
                raise SystemExit(f"the daemon has not read all; its log ends with\n{tail[-2000:]}") from None
        seconds = time.perf_counter() - begin
        async with store.database.statement() as connection:
            stored = await connection.fetchval("select count(*) from events")
    for server in servers:
        await server.stop()
    methods = sum((server.methods for server in servers), Counter[str]())
    return {
        "requests": sum(server.requests for server in servers),
        "requests_by_node": [server.requests for server in servers],
        "calls": methods.total(),
        "mb": round(sum(server.answer_bytes for server in servers) / 1e6, 1),
        "stored": stored,
        "own": day.own.total(),
        "foreign": day.foreign.total(),
        "seconds": round(seconds, 1),
        **dict(sorted(methods.items())),
    }


def measure(blocks: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"blocks": blocks, "vaults": VAULTS}
    intervals_s = (config.ExecutionSettings().poll_interval_s, config.ReportSettings().poll_interval_s)
    figures["polls"] = round(sum(DAY_S / interval_s for interval_s in intervals_s) * blocks / BLOCKS)
    complete = True
    for nodes in (1, 2):
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = asyncio.run(_run(Path(folder), blocks, nodes))
        complete = complete and found["stored"] == found["own"]
        figures |= {f"{nodes}_{'node' if nodes == 1 else 'nodes'}_{name}": value for name, value in found.items()}
    return {"bench": "day", "figures": figures, "floor": {}, "ratio": {}, "goal": {}, "ok": complete}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Counts what a day of mainnet asks of the nodes.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="how much of a day: 7200 is a whole one")
    options = parser.parse_args(arguments)
    configure_logging("warning")
    return print_result(measure(options.blocks), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
