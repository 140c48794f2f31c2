"""The service goes on with an older copy of its database, behind the same address: nothing is lost, nothing is extra.

The copy lacks the last registration, and another one was made on it meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from database_proxy import DatabaseProxy
from embedded_user import is_gone
from simulation_fixtures import Rows, add_accounts, add_vault, open_at, read_to_head, reading, rows
from store_factories import assert_ledger, webhook
from timeouts import WAIT_TIMEOUT_S, until, until_true, wait_until
from vaultevents import config
from vaultevents.config import Settings
from vaultevents.core.rsakeys import fingerprint
from vaultevents.daemon import serve
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.truth import Registration
from vaultevents.store import apikeys, versions
from vaultevents.store.apikeys import KeyRing
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database, open_database
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress

pytestmark = pytest.mark.fault


@contextmanager
def server_in(directory: Path) -> Iterator[ServerAddress]:
    with EmbeddedPostgres(directory, durable=False) as address:
        yield address
    wait_until(lambda: is_gone(directory))


def copy_of(directory: Path, name: str) -> Path:
    """A copy of the files of a server that does not run."""
    target = directory.with_name(name)
    shutil.copytree(directory, target, ignore=shutil.ignore_patterns("run", "*.lock", "server.log*"))
    return target


@asynccontextmanager
async def opened(server: ServerAddress) -> AsyncIterator[Database]:
    database = await open_database(server.connect_kwargs())
    try:
        yield database
    finally:
        await database.close()


@asynccontextmanager
async def service(directory: Path, simulation: Simulation, proxy: DatabaseProxy) -> AsyncIterator[asyncio.Task[None]]:
    """A daemon that watches and dispatches; its database is behind `proxy`."""
    node = ExecutionServer(simulation.chain)
    stop = asyncio.Event()
    settings = settings_of(directory, simulation, await node.start(), proxy)
    task = asyncio.create_task(serve(settings, stop, only=("watch", "dispatch")))
    try:
        yield task
        assert not task.done(), task
        stop.set()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await node.stop()


def settings_of(directory: Path, simulation: Simulation, url: str, proxy: DatabaseProxy) -> Settings:
    key, path = directory / "master.key", directory / "vaultevents.toml"
    key.write_text(base64.b64encode(bytes(range(32))).decode())
    key.chmod(0o600)
    path.write_text(
        f'network = "devnet"\nchain_id = {simulation.chain.chain_id}\ndata_dir = "{directory}"\n'
        f'database_url = "{proxy.dsn(proxy.server.database)}"\nmaster_key_file = "{key}"\n'
        f'[execution]\nurls = ["{url}"]\npoll_interval_s = 0.05\nspan_blocks = 10\nmax_range_blocks = 10\n'
        "audit_blocks_per_s = 0\n"  # it would restore what is lost
        '[delivery]\npoll_interval_s = 0.2\n[metrics]\nserve = "off"\n'
    )
    return config.load(path)


async def is_read(database: Database, simulation: Simulation) -> bool:
    """Whether everything final is read."""
    outbox = Outbox(database)
    live = await outbox.live("logs")
    final = simulation.chain.finalized_number or 0
    return live is not None and live.position >= final and not await outbox.backfills("logs")


@dataclass(frozen=True, slots=True)
class Ending:
    """What the copy holds in the end, beside what its registrations say."""

    lost: int
    extra: int
    right: int


async def failed_over(directory: Path, seed: int) -> Ending:
    """The service reads with a registration that the copy lacks, then goes on with the copy, which has another one."""
    made = Simulation(seed, events_per_block=4)
    made.history(30, 100)
    steady, gone, late = made.registrations[0], made.registrations[1], made.registrations[-2]
    first = directory / "first"
    with server_in(first) as address:
        async with opened(address) as database, reading(ExecutionServer(made.chain)) as source:
            await add_accounts(database, made.registrations)
            await add_vault(database, steady)
            await webhook(database, account_id=steady.account_id)
            await open_at(database, made, 10)
            await read_to_head(source, Outbox(database))
    second = copy_of(first, "second")
    with server_in(first) as before, server_in(second) as after:
        async with opened(before) as primary, opened(after) as copy, DatabaseProxy(before) as proxy:
            await add_vault(primary, gone)
            async with service(directory, made, proxy):
                made.history(10, 30)
                await until_true(lambda: _is(primary, made, [steady, gone]))
                await add_vault(copy, late)
                proxy.server = after
                proxy.cut()
                for _ in range(20):
                    made.step()
                    await asyncio.sleep(0.02)
                await until_true(lambda: is_read(copy, made))
            await assert_ledger(copy)
            stored, truth = await rows(copy), made.expected([steady, late])
    return Ending(
        len(truth.keys() - stored.keys()),
        len(stored.keys() - truth.keys()),
        sum(stored.get(key) == body for key, body in truth.items()),
    )


async def _is(database: Database, simulation: Simulation, registrations: list[Registration]) -> bool:
    found: Rows = await rows(database)
    return found == simulation.expected(registrations)


@pytest.mark.parametrize("seed", [41, 42, 43])
async def test_a_copy_without_the_last_registration_loses_and_adds_nothing(tmp_path: Path, seed: int) -> None:
    with capture_logs() as logs:
        ending = await failed_over(tmp_path, seed)
    print(ending)
    assert (ending.lost, ending.extra) == (0, 0)
    assert ending.right > 40
    (went_back, *_) = [line for line in logs if line["event"] == "cursor_went_back"]
    assert went_back["stored"] < went_back["known"]


async def test_random_versions_alone_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a pooler or an address that moves hides that the connection was lost."""
    monkeypatch.setattr(Database, "losses", property(lambda _: 0, lambda *_: None), raising=False)
    ending = await failed_over(tmp_path, 41)
    assert (ending.lost, ending.extra) == (0, 0)


async def test_with_a_counter_as_version_the_same_loses_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the rule of before, with a cache that outlives lost connections."""
    monkeypatch.setattr(versions, "NEW_VERSION", "version + 1")
    monkeypatch.setattr(Database, "losses", property(lambda _: 0, lambda *_: None), raising=False)
    ending = await failed_over(tmp_path, 41)
    print(ending)
    assert ending.lost > 0
    assert ending.extra > 0


async def test_a_copy_that_lacks_the_cursors_is_read_from_its_registrations_on(tmp_path: Path) -> None:
    made = Simulation(44, events_per_block=2)
    made.history(30, 100)
    steady = made.registrations[0]
    first = tmp_path / "first"
    with server_in(first) as address:
        async with opened(address) as database:
            await add_accounts(database, made.registrations)
            await add_vault(database, steady)
    second = copy_of(first, "second")
    with server_in(first) as before, server_in(second) as after:
        async with opened(before) as primary, opened(after) as copy, DatabaseProxy(before) as proxy:
            with capture_logs() as logs:
                async with service(tmp_path, made, proxy):
                    await until_true(lambda: is_read(primary, made))
                    proxy.server = after
                    proxy.cut()
                    made.step()
                    await until_true(lambda: is_read(copy, made))
            assert await rows(copy) == made.expected([steady])
    assert ("cursor_gone", "live") in {(line["event"], line.get("kind")) for line in logs}


async def test_a_long_outage_of_every_kind_does_not_end_the_daemon(tmp_path: Path) -> None:
    made = Simulation(45, events_per_block=2)
    made.history(30, 60)
    with server_in(tmp_path / "server") as address:
        async with opened(address) as database, DatabaseProxy(address) as proxy:
            await add_accounts(database, made.registrations)
            for registration in made.registrations:
                await add_vault(database, registration)
            async with service(tmp_path, made, proxy) as daemon:
                await until_true(lambda: _is(database, made, made.registrations))
                for network in ("refusing", "silent"):
                    proxy.network = network
                    proxy.cut()
                    made.history(3, 8)
                    for _ in range(60):
                        await asyncio.sleep(0.1)
                        assert not daemon.done(), daemon
                    proxy.network = "up"
                    proxy.cut()
                    async with asyncio.timeout(WAIT_TIMEOUT_S):
                        await until_true(lambda: _is(database, made, made.registrations))


async def test_keys_of_another_copy_are_not_taken_for_those_of_this_one(tmp_path: Path) -> None:
    first = tmp_path / "first"
    with server_in(first) as address:
        async with opened(address) as database:
            await add_accounts(database, Simulation(46).registrations)
    second = copy_of(first, "second")
    with server_in(first) as before, server_in(second) as after:
        async with opened(before) as primary, opened(after) as copy, DatabaseProxy(before) as proxy:
            for database, name in ((primary, "gone"), (copy, "late")):
                await apikeys.add_key(
                    database, name, "acme", name, "read", hashed(name), None, b"der", fingerprint(b"der")
                )
            served = await open_database(proxy.connect_kwargs())
            try:
                ring = KeyRing(served, max_age_s=0.0)
                await ring.fresh()
                assert (ring.find(hashed("gone")) is None, ring.find(hashed("late")) is None) == (False, True)
                losses = served.losses
                proxy.server = after
                proxy.cut()
                await until(lambda: served.losses > losses)  # also of a connection that nobody used
                await ring.fresh()
                assert (ring.find(hashed("gone")) is None, ring.find(hashed("late")) is None) == (True, False)
            finally:
                await served.close()


def hashed(name: str) -> bytes:
    return name.encode().ljust(32, b"\0")
