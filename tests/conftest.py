"""The rule that holds for every test, and the servers that many of them share."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import asyncpg
import psutil
import pytest
from hypothesis import settings

from store_factories import own_database
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress

settings.register_profile("shared machine", deadline=None)  # other load on the machine must not fail a test
settings.load_profile("shared machine")

KINDS = {"unit", "property", "integration", "fault", "e2e"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unmarked = [item.nodeid for item in items if not KINDS & {mark.name for mark in item.iter_markers()}]
    if unmarked:
        raise pytest.UsageError(f"mark these tests with one of {sorted(KINDS)}: {unmarked[:5]}")


_RECURSION_LIMIT = sys.getrecursionlimit()


def pytest_runtest_setup() -> None:
    """Restore the limit, which libraries of the consensus spec raise so far that deep JSON would end the process."""
    sys.setrecursionlimit(_RECURSION_LIMIT)


_IN_MEMORY = "TEST_SERVERS_IN_MEMORY"  # the variable that names the directory of the servers to the workers
_MEMORY = Path("/dev/shm")  # creating databases is ten times faster there than on a busy disk
_MEMORY_NEEDED = 4 * 2**30


def pytest_configure(config: pytest.Config) -> None:
    """Make the directory of the shared servers in memory where there is space; the workers inherit its name."""
    if sys.platform == "linux":
        os.environ.setdefault("ETH_HASH_BACKEND", "pysha3")  # simulated chains hash with it in a third of the time
    # A shell that starts tests in the background makes them ignore Ctrl-C, and with them the commands that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        return
    os.environ.pop(_IN_MEMORY, None)
    if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _MEMORY_NEEDED:
        for left in _MEMORY.glob("vaultevents-tests-*"):
            if not psutil.pid_exists(int(left.name.split("-")[2])):  # of a session that was killed
                shutil.rmtree(left, ignore_errors=True)
        os.environ[_IN_MEMORY] = tempfile.mkdtemp(prefix=f"vaultevents-tests-{os.getpid()}-", dir=_MEMORY)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and (made := os.environ.pop(_IN_MEMORY, None)) is not None:
        for _ in range(50):  # a server that was left a moment ago may still write
            shutil.rmtree(made, ignore_errors=True)
            if not Path(made).exists():
                return
            time.sleep(0.1)


def _server(factory: pytest.TempPathFactory, worker: str, major: Literal["18", "16"]) -> Iterator[ServerAddress]:
    on_disk = factory.getbasetemp() if worker == "master" else factory.getbasetemp().parent  # one for all workers
    shared = Path(os.environ.get(_IN_MEMORY, on_disk))
    with EmbeddedPostgres(shared / f"postgres-{major}", major=major, durable=False) as address:
        asyncio.run(_log_in_fast(address))
        yield address


async def _log_in_fast(address: ServerAddress) -> None:
    """Store the password with one round of hashing instead of 4,096: each test opens several connections."""
    connection = await asyncpg.connect(**address.connect_kwargs())
    try:
        async with connection.transaction():
            await connection.execute("select pg_advisory_xact_lock(hashtext('log in fast'))")  # one worker at a time
            await connection.execute("set local scram_iterations = 1")
            await connection.execute(f"alter role {address.user} password '{address.password}'")
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def postgres18(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[ServerAddress]:
    """A throw-away PostgreSQL 18."""
    yield from _server(tmp_path_factory, worker_id, "18")


@pytest.fixture(scope="session")
def postgres16(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[ServerAddress]:
    """A throw-away PostgreSQL 16."""
    yield from _server(tmp_path_factory, worker_id, "16")


@pytest.fixture(params=["18", "16"])
def any_postgres(request: pytest.FixtureRequest) -> ServerAddress:
    """Each supported server in turn."""
    address: ServerAddress = request.getfixturevalue(f"postgres{request.param}")
    return address


@pytest.fixture
async def database(postgres18: ServerAddress) -> AsyncIterator[Database]:
    """A database of its own on PostgreSQL 18."""
    async with own_database(postgres18) as opened:
        yield opened


@pytest.fixture
async def any_database(any_postgres: ServerAddress) -> AsyncIterator[Database]:
    """A database of its own on each supported server in turn."""
    async with own_database(any_postgres) as opened:
        yield opened
