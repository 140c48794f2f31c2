"""From a block at the node to its committed row and the receiver's 200: `python3 dev.py bench head-latency --json`.

A real daemon reads `latest-0` from a node in another process: once with its announcements (`newHeads`), once by polling
every 100 ms. One block with one event at a time, at random moments. The clock starts before the node makes the block;
it stops when a listener on the database is notified of the commit, and when the TLS receiver, in this process, has the
whole request. The floor is a bare loop that, when a block is announced, fetches header and logs in one batch and
inserts the row. The last line is the result; without `--json` a table stands before it.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import uvloop
from _receiver import Receiver
from _result import percentiles, print_result

from vaultevents import config
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.units import Address
from vaultevents.core.webhooks import Webhook
from vaultevents.devnet.acts import Funding, log_of
from vaultevents.devnet.certificates import issue
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.store import accounts, webhooks
from vaultevents.store.pool import DELIVERIES_CHANNEL, Database
from vaultevents.telemetry import configure_logging
from vaultevents.wiring.database import Store, open_store

BLOCKS, WARM_UP = 120, 10
VAULT = bytes(range(20))
GOAL = {"commit_p50_ms": 30.0, "commit_polled_p50_ms": 75.0, "answer_p50_ms": 40.0}
EVENT_BYTES = b"x" * 600
LATE_S = 20.0


class Arrivals(Receiver):
    """Signal when a whole request has arrived; the 200 is on its way then."""

    heard: Hearing

    def answer(self, request: bytes) -> None:
        super().answer(request)
        Arrivals.heard.print_result()


class Hearing:
    """The moment of the next of something."""

    def __init__(self) -> None:
        self._next: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def print_result(self) -> None:
        if not self._next.done():
            self._next.set_result(time.monotonic())

    def begin(self) -> None:
        self._next = asyncio.get_running_loop().create_future()

    async def moment_s(self) -> float:
        return await asyncio.wait_for(self._next, LATE_S)


async def serve_node() -> None:
    """A devnet node that makes a block for each line on stdin and prints when it began to."""
    chain = Chain(1)
    chain.mine([chain.transaction([], [VAULT])])
    server = ExecutionServer(chain)
    print(await server.start(), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async for _ in lines:
        transactions = [chain.transaction([log_of(Funding(VAULT, 10**18))])]
        began_s = time.monotonic()
        chain.mine(transactions)
        print(began_s, flush=True)


@dataclass
class Node:
    """The node's process and its URL."""

    process: asyncio.subprocess.Process
    url: str

    async def mine(self) -> float:
        """Makes a block; the moment when it began."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"mine\n")
        return float(await self.process.stdout.readline())


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "node", stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        yield Node(process, (await process.stdout.readline()).decode().strip())
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def daemon(folder: Path, url: str, execution: str) -> AsyncIterator[None]:
    """`vaultevents run` near the head, with more lines for its `[execution]`."""
    path = folder / "vaultevents.toml"
    path.write_text(
        f'network = "devnet"\nchain_id = 1337\ndata_dir = "{folder}"\n'
        f'[execution]\nurls = ["{url}"]\nhead = "latest-0"\n{execution}\n'
        f'[delivery]\nallow = ["127.0.0.0/8:*"]\nca_file = "{folder / "ca.pem"}"\n[api]\nserve = "off"\n'
        '[console]\nserve = "off"\n'
        '[metrics]\nserve = "off"\n'
    )
    command = (sys.executable, "-m", "vaultevents", "run", "--config", str(path))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    with (folder / "daemon.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def prepare(store: Store, port: int) -> None:
    """One account with a vault and a webhook."""
    await accounts.add_account(store.database, "acme", "acme")
    await accounts.add_vault(store.database, "acme", "vault-1", Address(VAULT), None, 0)
    webhook = Webhook("wh-1", "acme", f"https://127.0.0.1:{port}/hook", None, None, active=True)
    secret, nonce = Secret(new_secret(secrets.token_bytes(SECRET_BYTES))), secrets.token_bytes(NONCE_BYTES)
    await webhooks.create_webhook(store.database, webhook, secret, store.key, nonce)


async def blocks(mined: Node, *hearings: Hearing) -> list[list[float]]:
    """One block after the other; for each hearing the latencies in ms."""
    rng = random.Random(1)
    took: list[list[float]] = [[] for _ in hearings]
    for number in range(WARM_UP + BLOCKS):
        for hearing in hearings:
            hearing.begin()
        began_s = await mined.mine()
        for hearing, latencies in zip(hearings, took, strict=True):
            moment_s = await hearing.moment_s()
            if number >= WARM_UP:
                latencies.append((moment_s - began_s) * 1000)
        await asyncio.sleep(rng.uniform(0.12, 0.3))  # more than what lies between two hints of a socket
    return took


async def floor(mined: Node, database: Database, committed: Hearing) -> list[float]:
    """An announcement, one batch, one insert, and nothing is checked."""
    async with database.statement() as connection:
        await connection.execute("create table floor_events (id bigint generated always as identity, body bytea)")

    async def loop(session: aiohttp.ClientSession) -> None:
        async with session.ws_connect(mined.url) as socket:
            await socket.send_json({"jsonrpc": "2.0", "id": 1, "method": "eth_subscribe", "params": ["newHeads"]})
            await socket.receive_json()
            subscribed.set()
            while True:
                number = (await socket.receive_json())["params"]["result"]["number"]
                logs = {"fromBlock": number, "toBlock": number}
                batch = [
                    {"jsonrpc": "2.0", "id": 1, "method": "eth_getBlockByNumber", "params": [number, False]},
                    {"jsonrpc": "2.0", "id": 2, "method": "eth_getLogs", "params": [logs]},
                ]
                async with session.post(mined.url, json=batch) as response:
                    _, found = await response.json()
                async with database.transaction() as connection:
                    rows = [(EVENT_BYTES,) for _ in found["result"]]
                    await connection.executemany("insert into floor_events (body) values ($1)", rows)
                    await connection.execute("select pg_notify($1, '')", DELIVERIES_CHANNEL)

    subscribed = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        looping = asyncio.create_task(loop(session))
        await subscribed.wait()
        (latencies,) = await blocks(mined, committed)
        looping.cancel()
        await asyncio.gather(looping, return_exceptions=True)
    return latencies


async def until_reading(mined: Node, committed: Hearing) -> bool:
    """Until the daemon follows: blocks before the first commit belong to its backfill."""
    for _ in range(100):
        committed.begin()
        await mined.mine()
        with suppress(TimeoutError):
            await asyncio.wait_for(committed.moment_s(), 1)
            return True
    return False


async def compare(folder: Path) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    _, context = issue(folder)
    receiver = await loop.create_server(Arrivals, "127.0.0.1", 0, ssl=context)
    committed, answered = Hearing(), Hearing()
    Arrivals.heard = answered
    values = {"network": "devnet", "chain_id": 1337, "data_dir": str(folder)}
    async with node() as mined, open_store(config.given(values, "head-latency")) as store:
        await prepare(store, receiver.sockets[0].getsockname()[1])
        listening = asyncio.create_task(store.database.listen(DELIVERIES_CHANNEL, committed.print_result))
        least = await floor(mined, store.database, committed)
        runs: dict[str, list[list[float]]] = {}
        ways = {
            "newheads": f'poll_interval_s = 4.0\nwebsocket_urls = ["{mined.url.replace("http", "ws")}"]',
            "polled": "poll_interval_s = 0.1",
        }
        for name, lines in ways.items():
            async with daemon(folder, mined.url, lines):
                if not await until_reading(mined, committed):
                    tail = await asyncio.to_thread((folder / "daemon.log").read_text)
                    raise SystemExit(f"the daemon reads nothing; its log ends with\n{tail[-2000:]}")
                await asyncio.sleep(5)  # a backlog is read, and caches are warm
                runs[name] = await blocks(mined, committed, answered)
        listening.cancel()
    receiver.close()
    return _result(least, **runs)


def _result(least: list[float], newheads: list[list[float]], polled: list[list[float]]) -> dict[str, Any]:
    figures = {
        **_reported("commit", newheads[0]),
        **_reported("answer", newheads[1]),
        **_reported("commit_polled", polled[0]),
        **_reported("answer_polled", polled[1]),
    }
    bare = _reported("commit", least)
    ratio = {"commit_p50_x": round(figures["commit_p50_ms"] / bare["commit_p50_ms"], 2)}
    ok = all(figures[name] <= most for name, most in GOAL.items())
    return {"bench": "head-latency", "figures": figures, "floor": bare, "ratio": ratio, "goal": GOAL, "ok": ok}


def _reported(name: str, took_ms: list[float]) -> dict[str, float]:
    return {key: round(value, 2) for key, value in percentiles(name, took_ms).items()}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["node"]:
        uvloop.run(serve_node())
        return 0
    configure_logging("warning")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = uvloop.run(compare(Path(folder)))
    return print_result(result, as_json="--json" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
