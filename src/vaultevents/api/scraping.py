"""Serve an operator's monitoring on a listener of its own: `/metrics`, `/healthz` and `/readyz` (rule T20).

A process is healthy while the database can be written to, so that it turns unhealthy within 5 s of a full disk, a
database that is gone, or one that only reads. It is ready while it is healthy, has the schema that it needs, and every
part of it has started. Neither answer has content.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from vaultevents import metrics
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.metrics import Stored
from vaultevents.store import gauges
from vaultevents.store.disk_space import free_shares
from vaultevents.store.health import has_schema, write_probe
from vaultevents.store.pool import Database

FRESH_S: Final = 5.0
"""Scrapes within this time share what was read of the database."""

PROBED_FOR_S: Final = 1.0
"""Questions for the health within this time share one write."""

ANSWERS_WITHIN_S: Final = 4.0
"""A database that is slower counts as away: monitoring does not wait longer."""

NO_DISKS: Final = MappingProxyType[str, Path]({})

T = TypeVar("T")


class Readiness:
    """The parts of a process that have to start before it is ready; none is once it stops."""

    def __init__(self, *parts: str) -> None:
        self._missing = set(parts)

    def started(self, part: str) -> None:
        """Note that a part works."""
        self._missing.discard(part)

    def stopping(self) -> None:
        """Note that the process takes no more work."""
        self._missing.add("process")

    def is_complete(self) -> bool:
        """Test whether every part works."""
        return not self._missing


def build(database: Database, disks: Mapping[str, Path] = NO_DISKS, readiness: Readiness | None = None) -> ASGIApp:
    """The application of one process. `disks` are the directories whose disks may fill up."""
    board, probe, parts = _Board(database), _Probe(database), readiness or Readiness()

    async def metrics_page(_: Request) -> Response:
        text = metrics.text(await board.stored(), await free_shares(disks))
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def health(_: Request) -> Response:
        return Response(status_code=200 if await probe.writable() else 503)

    async def ready(_: Request) -> Response:
        able = parts.is_complete() and await probe.writable() and await _in_time(has_schema(database))
        return Response(status_code=200 if able else 503)

    return Starlette(routes=[Route("/metrics", metrics_page), Route("/healthz", health), Route("/readyz", ready)])


async def _in_time(asked: Awaitable[T]) -> T | None:
    """What the database answers; None when it cannot, or takes too long."""
    try:
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            return await asked
    except (DatabaseUnavailable, DatabaseUnusable, TimeoutError):
        return None


class _Board:
    """The gauges of the database, read by one scrape at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reading = asyncio.Lock()
        self._stored: Stored | None = None
        self._read_at_s = -FRESH_S

    async def stored(self) -> Stored | None:
        """None when the database cannot answer: no gauge is better than an old one."""
        async with self._reading:
            if time.monotonic() - self._read_at_s >= FRESH_S:
                self._stored = await _in_time(gauges.read(self._database))
                self._read_at_s = time.monotonic()
            return self._stored


class _Probe:
    """Whether the database can be written to, tried by one request at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._trying = asyncio.Lock()
        self._writable = False
        self._tried_at_s = -PROBED_FOR_S

    async def writable(self) -> bool:
        async with self._trying:
            if time.monotonic() - self._tried_at_s >= PROBED_FOR_S:
                self._writable = await _in_time(self._write()) is not None
                self._tried_at_s = time.monotonic()
            return self._writable

    async def _write(self) -> bool:
        await write_probe(self._database)
        return True
