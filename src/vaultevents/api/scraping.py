"""What an operator's monitoring asks, on a listener of its own: `/metrics`, and `/healthz` without content (T20)."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from vaultevents import metrics
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.metrics import Stored
from vaultevents.store import gauges
from vaultevents.store.pool import Database

FRESH_S: Final = 5.0
"""Scrapes within this time share what was read of the database."""

HEALTHY_WITHIN_S: Final = 5.0


def build(database: Database) -> ASGIApp:
    """The application of one process."""
    board = _Board(database)

    async def metrics_page(_: Request) -> Response:
        return Response(metrics.text(await board.stored()), headers={"content-type": metrics.CONTENT_TYPE})

    async def health(_: Request) -> Response:
        return Response(status_code=200 if await _answers(database) else 503)

    return Starlette(routes=[Route("/metrics", metrics_page), Route("/healthz", health)])


async def _answers(database: Database) -> bool:
    try:
        async with asyncio.timeout(HEALTHY_WITHIN_S):
            await database.now()
    except (DatabaseUnavailable, TimeoutError):
        return False
    return True


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
                try:
                    self._stored = await gauges.read(self._database)
                except DatabaseUnavailable:
                    self._stored = None
                self._read_at_s = time.monotonic()
            return self._stored
