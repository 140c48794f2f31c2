"""The rule that holds for every test, and the servers that many of them share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Literal

import pytest
from hypothesis import settings

from store_stories import fresh_schema
from vaultevents.store.embedded import EmbeddedPostgres, ServerAddress
from vaultevents.store.pool import Database

settings.register_profile("shared machine", deadline=None)  # a neighbour's work is no failure of ours
settings.load_profile("shared machine")

KINDS = {"unit", "property", "integration", "fault", "e2e"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unmarked = [item.nodeid for item in items if not KINDS & {mark.name for mark in item.iter_markers()}]
    if unmarked:
        raise pytest.UsageError(f"mark these tests with one of {sorted(KINDS)}: {unmarked[:5]}")


def _server(factory: pytest.TempPathFactory, worker: str, major: Literal["18", "16"]) -> Iterator[ServerAddress]:
    shared = factory.getbasetemp() if worker == "master" else factory.getbasetemp().parent  # one for all workers
    with EmbeddedPostgres(shared / f"postgres-{major}", major=major, durable=False) as address:
        yield address


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
    """A schema of its own on PostgreSQL 18."""
    async with fresh_schema(postgres18) as opened:
        yield opened


@pytest.fixture
async def any_database(any_postgres: ServerAddress) -> AsyncIterator[Database]:
    """A schema of its own on each supported server in turn."""
    async with fresh_schema(any_postgres) as opened:
        yield opened
