"""A watcher is frozen or cut off inside a commit: another takes over within 10 s, and the first writes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

import fork_server
from database_proxy import DatabaseProxy
from fork_server import ForkedProcess
from simulation_fixtures import in_background, open_at, reading, register, rows
from store_factories import assert_ledger, own_database, values, webhook
from store_factories import rows as table
from timeouts import WAIT_TIMEOUT_S
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.frozen_sessions import end_stalled
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.watch.watcher import Advanced, run

pytestmark = pytest.mark.fault

PROGRAM = Path(__file__).with_name("freezing_watcher.py")
TAKES_OVER_WITHIN_S = 10.0

Where = Literal["idle", "copy", "result"]
Fault = Literal["freeze", "black hole", "cut"]


@dataclass(frozen=True, slots=True)
class TakeOver:
    """How long after the fault the other replica had committed, and a webhook was registered."""

    fault: Fault
    where: Where
    committed_s: float
    registered_s: float


class Victim:
    """The process whose watcher stops inside a commit; its lines are in `lines`."""

    def __init__(self, process: ForkedProcess) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reading = asyncio.gather(self._read(process.stdout), self._read(process.stderr))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self.lines.append(line.decode(errors="replace").strip())

    async def says(self, text: str) -> None:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while not any(text in line for line in self.lines):
                assert self.process.returncode is None, self.lines
                await asyncio.sleep(0.01)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reading


@asynccontextmanager
async def victim(dsn: str, url: str, where: Where, fault: Fault, *, limited: bool = True) -> AsyncIterator[Victim]:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    arguments = (dsn, url, where, "freeze" if fault == "freeze" else "pause", *(() if limited else ("unlimited",)))
    found = Victim(await fork_server.start((str(PROGRAM),), arguments, environment, PROGRAM.parent))
    try:
        yield found
    finally:
        await found.end()


@asynccontextmanager
async def serving(simulation: Simulation) -> AsyncIterator[str]:
    """The URL of a node for the victim."""
    node = ExecutionServer(simulation.chain)
    try:
        yield await node.start()
    finally:
        await node.stop()


async def stored(database: Database) -> list[object]:
    """Everything that a watcher writes."""
    tables = ("events", "deliveries", "near_blocks", "reports")
    cursors = await table(database, "select id, stream, kind, first, position, anchor, stop from cursors order by id")
    return [cursors, *[await table(database, f"select * from {name} order by 1") for name in tables]]


async def take_over(server: ServerAddress, seed: int, fault: Fault, where: Where) -> TakeOver:
    """One round: a watcher fails inside its commit of blocks that another one has yet to read."""
    made = Simulation(seed, events_per_block=2)
    made.history(20, 40)
    async with own_database(server) as database, DatabaseProxy(server) as proxy:
        await register(database, made)
        (name,) = await values(database, "select current_database()")
        async with reading(ExecutionServer(made.chain)) as source, serving(made) as url:
            await open_at(database, made, 0)
            outbox = Outbox(database)
            live = await outbox.live("logs")
            assert live is not None
            committed = asyncio.Event()

            def advanced(_: Advanced) -> None:
                committed.set()

            async with victim(proxy.dsn(name), url, where, fault) as frozen:
                await frozen.says("inside")
                began_s = time.monotonic()
                if fault == "black hole":
                    proxy.silence()
                if fault == "cut":
                    proxy.cut()
                healthy = run(source, outbox, live, step=50, poll_s=0.05, on_advance=advanced)
                async with in_background(end_stalled(database)), in_background(healthy):

                    async def register_webhook() -> float:
                        await webhook(database)
                        return time.monotonic() - began_s

                    registering = asyncio.create_task(register_webhook())
                    async with asyncio.timeout(WAIT_TIMEOUT_S):
                        await committed.wait()
                        committed_s = time.monotonic() - began_s
                        registered_s = await registering
                        while await rows(database) != made.expected():
                            await asyncio.sleep(0.02)
                before = await stored(database)
                if fault == "freeze":
                    frozen.signal(signal.SIGCONT)
                    await frozen.says("stream_waits")  # it starts over from its reads
                    await asyncio.sleep(1)
                    assert not any("advanced" in line for line in frozen.lines)
                    assert await stored(database) == before
                    made.step()
                    await frozen.says("advanced")  # and goes on with what is new
                    assert await rows(database) == made.expected()
                await assert_ledger(database)
    return TakeOver(fault, where, committed_s, registered_s)


TIMES: dict[tuple[Fault, Where], int] = {
    ("freeze", "idle"): 6,
    ("freeze", "copy"): 3,
    ("freeze", "result"): 3,
    ("black hole", "idle"): 4,
    ("black hole", "copy"): 2,
    ("cut", "idle"): 2,
}
ROUNDS = [kind for kind, times in TIMES.items() for _ in range(times)]
AT_ONCE = 10


async def test_another_replica_takes_over_within_ten_seconds(postgres18: ServerAddress) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one_round(seed: int, fault: Fault, where: Where) -> TakeOver:
        async with slots:
            return await take_over(postgres18, seed, fault, where)

    done = await asyncio.gather(*(one_round(100 + n, *ROUNDS[n]) for n in range(len(ROUNDS))))
    for kind in TIMES:
        times = [(take.committed_s, take.registered_s) for take in done if (take.fault, take.where) == kind]
        longest = [f"{max(column):.1f} s" for column in zip(*times, strict=True)]
        print(f"{kind[0]} in {kind[1]}: {len(times)} rounds, commit ≤ {longest[0]}, webhook ≤ {longest[1]}")
    in_time = [take for take in done if max(take.committed_s, take.registered_s) <= TAKES_OVER_WITHIN_S]
    assert len(in_time) == len(ROUNDS) == 20, done


async def test_without_limits_a_frozen_watcher_keeps_all_others_out(postgres18: ServerAddress) -> None:
    """Negative control: sessions as they were before."""
    made = Simulation(99, events_per_block=2)
    made.history(20, 40)
    async with own_database(postgres18) as database, DatabaseProxy(postgres18) as proxy:
        await register(database, made)
        (name,) = await values(database, "select current_database()")
        async with reading(ExecutionServer(made.chain)) as source, serving(made) as url:
            await open_at(database, made, 0)
            outbox = Outbox(database)
            live = await outbox.live("logs")
            assert live is not None
            async with victim(proxy.dsn(name), url, "idle", "freeze", limited=False) as frozen:
                await frozen.says("inside")
                async with in_background(run(source, outbox, live, step=50, poll_s=0.05)):
                    await asyncio.sleep(TAKES_OVER_WITHIN_S)
                    assert await rows(database) == {}
