"""The daemon and PostgreSQL are killed with -9 in the middle of a run: nothing lost, nothing doubled or changed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pkgutil
import random
import secrets
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

import fork_server
from command_line import CommandLine
from embedded_user import is_gone, kill, postmaster, supervisor
from fork_server import ForkedProcess
from reorgs import Reorganiser
from simulation_fixtures import Rows, open_at, read_to_head, reading, register, rows
from store_factories import assert_ledger, values
from timeouts import WAIT_TIMEOUT_S, wait_until
from vaultevents import config
from vaultevents.config import Settings
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.webhooks import Webhook
from vaultevents.daemon import serve
from vaultevents.devnet.chain import Lag
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.receivers import Hook, Receivers
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import webhooks
from vaultevents.store.cursors import read_through
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.wiring.database import open_store

pytestmark = pytest.mark.fault

Victim = Literal["daemon", "postgres"]
DAEMON = ("-m", "vaultevents")
LIVES = 3
LONG_LIVES = 12
BROKEN_DAEMON = (str(Path(__file__).with_name("cursor_first_daemon.py")),)


@dataclass(frozen=True, slots=True)
class Ending:
    """What was left when everything had settled, or when waiting for it had no more use."""

    stored: Rows
    read_through: int
    received: dict[str, Counter[str]]
    unverified: int

    def lost(self, simulation: Simulation) -> int:
        """Of the blocks alone that the cursors claim to have read: a daemon that is only slow loses nothing."""
        return len(simulation.expected(through=self.read_through).keys() - self.stored.keys())


async def disturbed_run(
    directory: Path,
    simulation: Simulation,
    events: int,
    kills: Sequence[Victim],
    command: Sequence[str],
    seed: int,
    *,
    once_up: bool = False,
    patience_s: float = WAIT_TIMEOUT_S,
) -> Ending:
    """Runs the daemon over a growing chain, killing it as the arguments say, at random moments, then lets it finish.

    With `once_up` no life ends before its daemon has begun to work.
    """
    rng = random.Random(seed)
    async with playground(directory, simulation) as (settings, path, hooks):
        mining = asyncio.create_task(grow(simulation, events))
        began_at, daemon = 0, await start(command, path)
        for victim in kills:
            if once_up:
                await is_up(path.parent / "daemon.log", began_at)
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            if victim == "postgres":
                await kill_postgres(settings.directory / "postgres")
                continue
            assert daemon.returncode is None, "the daemon ended by itself"
            daemon.kill()
            assert await daemon.wait() == -9
            began_at = (path.parent / "daemon.log").stat().st_size
            daemon = await start(command, path)
        await mining
        await is_up(path.parent / "daemon.log", began_at)
        await quiet(simulation, hooks, patience_s)
        daemon.terminate()
        assert await daemon.wait() == 0
        async with open_store(settings) as store:
            stored = await rows(store.database)
            async with store.database.transaction() as connection:
                through = await read_through(connection, "logs")
    received = {hook.url: delivered(hook) for hook in hooks}
    return Ending(stored, through, received, sum(hook.bad_signatures for hook in hooks))


@asynccontextmanager
async def playground(
    directory: Path, simulation: Simulation, head: str = "finalized"
) -> AsyncIterator[tuple[Settings, Path, list[Hook]]]:
    """A node, receivers and a configuration; the simulation's vaults and a webhook for each account are registered."""
    receivers, node = Receivers(directory), ExecutionServer(simulation.chain)
    await receivers.start()
    path = directory / "vaultevents.toml"
    path.write_text(
        f'network = "devnet"\nchain_id = {simulation.chain.chain_id}\ndata_dir = "{directory}"\n'
        f'[execution]\nurls = ["{await node.start()}"]\npoll_interval_s = 0.05\nspan_blocks = 10\nhead = "{head}"\n'
        "max_range_blocks = 10\naudit_blocks_per_s = 0\n"  # it would restore what a wrong order loses
        f'[delivery]\nallow = ["127.0.0.0/8:*"]\nca_file = "{receivers.ca_path}"\nschedule = "1s, 1s, 1s, 2s, 2s, 5s"\n'
        "timeout_s = 2.0\nlease_s = 3.0\npoll_interval_s = 0.2\n[api]\nport = 0\n[console]\nport = 0\n"
        '[metrics]\nserve = "off"\n'
    )
    settings = config.load(path)
    hooks = []
    try:
        async with open_store(settings) as store:
            await register(store.database, simulation)
            for account_id in sorted({registration.account_id for registration in simulation.registrations}):
                hook, secret = receivers.hook(account_id), Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))
                hook.secret = secret.reveal()
                webhook = Webhook(f"wh-{account_id}", account_id, hook.url, None, None, active=True)
                nonce = secrets.token_bytes(NONCE_BYTES)
                await webhooks.create_webhook(store.database, webhook, secret, store.key, nonce)
                hooks.append(hook)
        yield settings, path, hooks
    finally:
        await node.stop()
        await receivers.stop()


async def quiet(simulation: Simulation, hooks: Sequence[Hook], patience_s: float = WAIT_TIMEOUT_S) -> None:
    """Until everything has arrived, or nothing more has for `patience_s`.

    Where everything arrives this returns at once, so a long patience costs no time: only a scenario in which something
    is to be missing waits for the silence, and names a shorter one.
    """
    loop = asyncio.get_running_loop()
    seen, changed_at_s = 0, loop.time()
    while not all(delivered(hook).keys() >= wanted(simulation, hook) for hook in hooks):
        await asyncio.sleep(0.1)
        if (now := sum(len(hook.ledger) for hook in hooks)) != seen:
            seen, changed_at_s = now, loop.time()
        if loop.time() - changed_at_s > patience_s:
            return


async def is_up(log: Path, began_at: int) -> None:
    """Until the daemon that writes its log from there on minds signals."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while b'"started"' not in log.read_bytes()[began_at:]:
            await asyncio.sleep(0.05)


async def said(log: Path, word: bytes, began_at: int, patience_s: float) -> None:
    """Until the log says it once more, or not for a while."""
    before = log.read_bytes()[began_at:].count(word)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while log.read_bytes()[began_at:].count(word) == before:
                await asyncio.sleep(0.02)


async def grow(simulation: Simulation, events: int) -> None:
    while len(simulation.expected()) < events:
        for _ in range(4):
            simulation.step()
        await asyncio.sleep(0.08)


async def start(command: Sequence[str], path: Path) -> ForkedProcess:
    environment = {"PATH": os.environ["PATH"], "HOME": str(path.parent)}
    with (path.parent / "daemon.log").open("ab") as log:
        arguments = ("run", "--config", str(path))
        return await fork_server.start(command, arguments, environment, path.parent, log.fileno())


async def kill_postgres(directory: Path) -> None:
    """The postmaster of a directory; waits for one where it is just being started."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not (
            found := [process for process in psutil.process_iter(["cmdline"]) if _is_postmaster(process, directory)]
        ):
            await asyncio.sleep(0.05)
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _is_postmaster(process: psutil.Process, directory: Path) -> bool:
    line = process.info["cmdline"] or [""]
    return bool(line[0].endswith("postgres")) and any(str(directory) in part for part in line)


def delivered(hook: Hook) -> Counter[str]:
    return Counter(request.webhook_id for request in hook.accepted if request.verified)


def wanted(simulation: Simulation, hook: Hook) -> set[str]:
    return {event_id for account_id, event_id in simulation.expected() if hook.url.endswith(f"/{account_id}")}


def kill_all_before(step: str, directory: Path, patch: pytest.MonkeyPatch) -> asyncio.Event:
    """The next time that `step` is taken, no process of the server is left, and nobody to start it again: set then."""
    real, killed = pkgutil.resolve_name(step), asyncio.Event()

    async def killed_before(*arguments: Any, **named: Any) -> Any:
        if not killed.is_set():
            server, keeper = postmaster(directory), supervisor(directory)
            kill(keeper, server, *server.children())
            wait_until(lambda: is_gone(directory))
            killed.set()
        return await real(*arguments, **named)

    patch.setattr(step.replace(":", "."), killed_before)
    return killed


async def replayed(path: Path, last: int) -> dict[str, int]:
    whole = ("--from-block", "0", "--to-block", str(last))
    done = await CommandLine.of(path.parent).run("replay", *whole, "--json", "--config", str(path))
    found: dict[str, int] = done.ok().json
    return found


async def undisturbed_run(database: Database, simulation: Simulation) -> Rows:
    await register(database, simulation)
    async with reading(ExecutionServer(simulation.chain)) as source:
        await open_at(database, simulation, 0)
        await read_to_head(source, Outbox(database), step=500)
    return await rows(database)


async def test_kills_lose_nothing_double_nothing_and_change_no_byte(tmp_path: Path, database: Database) -> None:
    simulation = Simulation(21, events_per_block=2)
    simulation.history(100, 200)
    daemons: list[Victim] = ["daemon"] * 20
    servers: list[Victim] = ["postgres"] * 5
    kills = daemons + servers
    random.Random(5).shuffle(kills)
    ending = await disturbed_run(tmp_path, simulation, 2000, kills, DAEMON, seed=5)
    assert len(ending.stored) >= 2000
    assert ending.stored == simulation.expected() == await undisturbed_run(database, simulation)
    assert ending.unverified == 0
    for url, received in ending.received.items():
        account = url.rsplit("/", 1)[1]
        assert received.keys() == {event_id for account_id, event_id in ending.stored if account_id == account}


async def test_kills_in_the_middle_of_a_backfill_leave_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    simulation = Simulation(33, events_per_block=2)
    simulation.history(1000, 2000)
    rng, log = random.Random(9), tmp_path / "daemon.log"
    async with playground(tmp_path, simulation) as (settings, path, hooks):
        for _ in range(LONG_LIVES):
            began_at = log.stat().st_size if log.exists() else 0
            daemon = await start(DAEMON, path)
            await said(log, b'"backfill_started"', began_at, WAIT_TIMEOUT_S)
            await asyncio.sleep(rng.uniform(0.02, 0.6))
            daemon.kill()
            assert await daemon.wait() == -9
            if b'"backfill_done"' in log.read_bytes() or len(set(went_on_at(log))) > 3:
                break
        began_at = log.stat().st_size
        daemon = await start(DAEMON, path)
        await is_up(log, began_at)
        await quiet(simulation, hooks)
        daemon.terminate()
        assert await daemon.wait() == 0
        again = await replayed(path, simulation.chain.finalized_number or 0)
        async with open_store(settings) as store:
            await assert_ledger(store.database)
            assert await rows(store.database) == simulation.expected()
    assert len(set(went_on_at(log))) > 2, "no life ended in the middle"
    assert (again["inserted"], again["different"]) == (0, 0)
    assert again["derived"] == len(simulation.expected())
    for hook in hooks:
        assert delivered(hook).keys() == wanted(simulation, hook)


def went_on_at(log: Path) -> list[int]:
    """Where the backfill of the logs began, and went on."""
    return [
        json.loads(line)["first"]
        for line in log.read_bytes().splitlines()
        if b'"backfill_started"' in line and b'"logs"' in line
    ]


async def test_kills_and_reorganisations_leave_what_the_chain_says_and_one_body_for_each_id(tmp_path: Path) -> None:
    simulation = Simulation(31, events_per_block=2)
    simulation.history(40, 80)
    simulation.chain.finalized = Lag(12)
    rng = random.Random(7)
    turns, log = Reorganiser(simulation, rng), tmp_path / "daemon.log"
    async with playground(tmp_path, simulation, head="latest-0") as (settings, path, hooks):
        for life in range(LIVES):
            began_at = log.stat().st_size if log.exists() else 0
            daemon = await start(DAEMON, path)
            turns.reorg(rng.randint(1, 8))
            await is_up(log, began_at)
            for turn in range(12):
                await asyncio.sleep(rng.uniform(0.05, 0.2))
                if turn % 3:
                    simulation.step()
                else:
                    turns.reorg(rng.randint(1, 8))
                    await said(log, b'"stream_rewound"', began_at, patience_s=1.0)
            if life < LIVES - 1:
                daemon.kill()
                await daemon.wait()
        simulation.chain.finalized = Lag(0)
        await quiet(simulation, hooks)
        daemon.terminate()
        assert await daemon.wait() == 0
        truth = simulation.expected()
        again = await replayed(path, simulation.chain.head.number)
        async with open_store(settings) as store:
            await assert_ledger(store.database)
            gone = (await rows(store.database)).keys() - truth.keys()
            orphaned = set(await values(store.database, "select id from events where orphaned_at is not null"))
            (rewinds,) = await values(store.database, "select sum(rewinds)::int from cursors where stream = 'logs'")
    assert rewinds > 0
    assert (again["derived"], again["inserted"], again["different"]) == (len(truth), 0, 0)
    assert again["near_head"] > 0
    assert {event_id for _, event_id in gone} == orphaned
    for hook in hooks:
        assert delivered(hook).keys() - orphaned == wanted(simulation, hook)
        bodies = defaultdict(set)
        for request in hook.ledger:
            bodies[request.webhook_id].add(request.body)
        assert [event_id for event_id, reported in bodies.items() if len(reported) > 1] == []


async def test_a_daemon_that_commits_its_cursor_first_is_caught(tmp_path: Path) -> None:
    simulation = Simulation(22, events_per_block=2)
    simulation.history(20, 40)
    kills: list[Victim] = ["daemon"] * 4
    ending = await disturbed_run(tmp_path, simulation, 250, kills, BROKEN_DAEMON, seed=6, once_up=True, patience_s=3.0)
    assert ending.lost(simulation) > 0


@pytest.mark.parametrize(
    "step",
    [
        "vaultevents.wiring.database:open_database",
        "vaultevents.wiring.database:sealed_key_ids",
        "vaultevents.store.pool:Database.now",
        "vaultevents.wiring.sources:pinned",
        "vaultevents.wiring.sources:pin",
        "vaultevents.watch.streams:open_stream",
    ],
)
async def test_a_server_that_dies_at_any_step_of_a_start_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    simulation = Simulation(23, events_per_block=2)
    simulation.history(20, 40)
    stop = asyncio.Event()
    async with playground(tmp_path, simulation) as (settings, _, _), asyncio.timeout(WAIT_TIMEOUT_S):
        killed = kill_all_before(step, settings.directory / "postgres", monkeypatch)
        await serve(settings, stop, on_advance=lambda _: stop.set())
    assert killed.is_set(), "the step was never taken"
