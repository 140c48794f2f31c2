"""The audit behind the streams of blocks: what was read is read again, slowly, with every header (C2, I6).

It takes the one path with a cursor of its own, so what a backfill has missed is stored and delivered, once. When it
has caught up it follows the finalized block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from vaultevents.core.registry import Registry
from vaultevents.core.spans import Span
from vaultevents.store.cursors import open_audit, read_through
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.watch.source import Reading, Source
from vaultevents.watch.watcher import begun, run

SPAN_S = 5
"""A span is what may be read in this time, so that the pauses between spans are short."""
IDLE_POLLS = 15
"""How many polls of the live cursor one of the audit lasts, when there is nothing to read: it is in no hurry."""


class AuditSource:
    """Another source up to where its stream is read and final."""

    ahead = 0

    def __init__(self, source: Source, outbox: Outbox, final: Callable[[], Awaitable[int]]) -> None:
        self.stream = source.stream
        self._source, self._outbox, self._final = source, outbox, final

    async def head(self) -> int:
        async with self._outbox.database.transaction() as connection:
            through = await read_through(connection, self.stream)
        return min(through, await self._final())

    async def begin(self) -> tuple[int, str | None]:
        return await self._source.begin()

    async def read(self, span: Span, cursor: Cursor, registry: Registry) -> Reading:
        return await self._source.read(span, cursor, registry)


async def follow_audit(source: AuditSource, outbox: Outbox, *, step: int, poll_s: float, blocks_per_s: float) -> None:
    """Audits a stream whose live cursor is there; never ends."""
    step = max(1, min(step, round(blocks_per_s * SPAN_S)))
    while True:  # `run` returns when an older copy of the database has no such cursor
        cursor = await begun(source.stream, partial(_begin, source.stream, outbox))
        await run(source, outbox, cursor, step=step, poll_s=IDLE_POLLS * poll_s, pause_s=1 / blocks_per_s)


async def _begin(stream: str, outbox: Outbox) -> Cursor:
    await open_audit(outbox.database, stream)
    return await outbox.audit(stream)
