"""The background audit of the block streams: each node is asked alone, slowly, for all that was read (rules C2 and I6).

Live and backfills take the union of the nodes that answer in time; here each node is asked in its turn, however late.
It takes the one path with a cursor for each node, so what was missed is stored and delivered, once. When it has caught
up it follows the finalized block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from vaultevents.core.registry import Registry
from vaultevents.core.spans import Span
from vaultevents.store.cursors import open_audits, read_through
from vaultevents.store.event_comparison import stored_blocks
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.watch.source import LogSource, Reading
from vaultevents.watch.watcher import begun, run

SPAN_S = 26
"""A span is what may be read in this time, so that the pauses between spans are short."""
PUBLIC_BLOCKS = 512
"""So many final blocks of a public network, 1.7 hours, are asked for at once: fewer would be as many calls each."""
IDLE_POLLS = 15
"""How many polls of the live cursor one of the audit lasts, when there is nothing to read: it is in no hurry."""


class AuditSource:
    """Another source up to where its stream is read and final, with the blocks of all that is stored.

    Its head moves by `at_once` blocks.
    """

    ahead = 0

    def __init__(
        self, source: LogSource, outbox: Outbox, final: Callable[[], Awaitable[int]], at_once: int = 1
    ) -> None:
        self.stream = source.stream
        self._source, self._outbox, self._final, self._at_once = source, outbox, final, at_once

    async def head(self) -> int:
        async with self._outbox.database.transaction() as connection:
            through = await read_through(connection, self.stream)
        newest = min(through, await self._final())
        return newest - newest % self._at_once

    async def begin(self) -> tuple[int, str | None]:
        return await self._source.begin()

    async def read(self, span: Span, cursor: Cursor, registry: Registry) -> Reading:
        async with self._outbox.database.transaction() as connection:
            stored = await stored_blocks(connection, self.stream, span)
        return await self._source.read(span, cursor, registry, stored)


async def follow_audit(
    source: AuditSource, outbox: Outbox, nodes: Sequence[str], *, step: int, poll_s: float, blocks_per_s: float
) -> None:
    """Audit a stream, whose live cursor is there, at each of its nodes; never ends."""
    step = max(1, min(step, round(blocks_per_s * SPAN_S)))
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(_follow_node(source, outbox, nodes, node, step, IDLE_POLLS * poll_s, 1 / blocks_per_s))


async def _follow_node(
    source: AuditSource, outbox: Outbox, nodes: Sequence[str], node: str, step: int, poll_s: float, pause_s: float
) -> None:
    while True:  # `run` returns when an older copy of the database has no such cursor
        cursor = await begun(source.stream, partial(_begin, source.stream, outbox, nodes, node))
        await run(source, outbox, cursor, step=step, poll_s=poll_s, pause_s=pause_s)


async def _begin(stream: str, outbox: Outbox, nodes: Sequence[str], node: str) -> Cursor:
    await open_audits(outbox.database, stream, nodes)
    return await outbox.audit(stream, node)
