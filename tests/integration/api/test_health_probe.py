"""`/healthz` is red within seconds of a database that cannot be written to, and green again after it (rule T20)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from raised_conditions import raised
from store_factories import change, values
from timeouts import WAIT_TIMEOUT_S
from vaultevents.api import scraping
from vaultevents.api.server import ServerOptions, bind, serve, url_of
from vaultevents.store.health import write_probe
from vaultevents.store.pool import Database, open_database
from vaultevents.store.postgres.embedded import EmbeddedPostgres

pytestmark = pytest.mark.integration

RED_WITHIN_S = 5.0


@asynccontextmanager
async def monitored(
    database: Database, readiness: scraping.Readiness | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    options = ServerOptions(port=0)
    listener, stop = bind(options), asyncio.Event()
    serving = asyncio.create_task(
        serve(scraping.build(database, readiness=readiness), listener, options, lambda: 0.0, stop)
    )
    try:
        async with aiohttp.ClientSession(url_of(listener, options)) as session:
            yield session
    finally:
        stop.set()
        await serving


async def health(session: aiohttp.ClientSession, path: str = "/healthz") -> int:
    async with session.get(path) as answer:
        assert await answer.read() == b""
        return answer.status


async def until_health(session: aiohttp.ClientSession, status: int) -> float:
    """Seconds until `/healthz` has this status."""
    begun_s = time.monotonic()
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while await health(session) != status:
            await asyncio.sleep(0.1)
    return time.monotonic() - begun_s


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """90 MB: enough for a new database, and soon full."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=90m", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    path = disk / "filling"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(4096))
    except OSError:
        return path
    finally:
        os.close(descriptor)


async def test_a_full_disk_is_red_within_seconds(small_disk: Path) -> None:
    with EmbeddedPostgres(small_disk / "postgres", durable=False) as address:
        database = await open_database(address.connect_kwargs())
        try:
            async with monitored(database) as session:
                assert await health(session) == 200
                filling = fill(small_disk)
                assert await until_health(session, 503) < RED_WITHIN_S
                await database.now()  # it still answers questions
                await change(database, "update health_probe set written_at = db_now()")  # and writes to free pages
                assert "VaulteventsDiskFull" in await raised(database, {"data": small_disk})
                filling.unlink()
                await until_health(session, 200)
                assert "VaulteventsDiskFull" not in await raised(database, {"data": small_disk})
        finally:
            await database.close()


async def test_a_database_that_only_reads_is_red(database: Database) -> None:
    """As after a fail-over to a standby that is not promoted yet; the pool has one connection until now."""
    async with monitored(database) as session:
        assert await health(session) == 200
        async with database.statement() as connection:
            await connection.execute("set default_transaction_read_only = on")
        assert await until_health(session, 503) < RED_WITHIN_S
        async with database.statement() as connection:
            await connection.execute("set default_transaction_read_only = off")
        await until_health(session, 200)


async def test_a_process_is_ready_when_every_part_has_started_and_until_it_stops(database: Database) -> None:
    readiness = scraping.Readiness("watch", "api")
    async with monitored(database, readiness) as session:
        readiness.started("api")
        assert (await health(session), await health(session, "/readyz")) == (200, 503)
        readiness.started("watch")
        assert await health(session, "/readyz") == 200
        readiness.stopping()
        assert (await health(session), await health(session, "/readyz")) == (200, 503)


async def test_an_older_schema_is_not_ready_and_a_newer_one_is(database: Database) -> None:
    """As after a fail-over to a copy from before the upgrade."""
    async with monitored(database) as session:
        await change(database, "insert into migrations (number, name, sha256) values (9999, 'later', '')")
        assert await health(session, "/readyz") == 200
        await change(database, "delete from migrations where number in (9999, 1)")
        assert (await health(session), await health(session, "/readyz")) == (200, 503)


async def test_questions_within_a_second_share_one_write(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "PROBED_FOR_S", 3600.0)
    written = "select written_at from health_probe"
    async with monitored(database) as session:
        assert await health(session) == 200
        first = await values(database, written)
        assert {await health(session) for _ in range(20)} == {200}
        assert await values(database, written) == first


async def test_the_probe_leaves_no_space_taken(database: Database) -> None:
    for _ in range(3):
        await write_probe(database)
    async with database.transaction() as connection:
        sizes = await connection.fetch(
            "select pg_relation_size(oid) as bytes from pg_class where relname = 'health_space'"
        )
        assert await connection.fetchval("select pg_relation_size('health_probe')") == 8192
    assert {row["bytes"] for row in sizes} <= {0}
