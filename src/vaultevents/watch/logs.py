"""Source `logs`: the two contract events (interface §6.2 and §6.6)."""

from __future__ import annotations

from vaultevents.chain.execution import ExecutionChain
from vaultevents.core.logs import fold
from vaultevents.core.registry import Registry
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32, hex_text
from vaultevents.store.outbox import Cursor
from vaultevents.watch.source import Reading

AHEAD = 2
"""Spans of a backfill that are read while the one in front of them is committed."""


class LogsSource:
    """Proven logs up to the configured head; the anchor is the hash of the last block that was read."""

    stream = "logs"
    ahead = AHEAD

    def __init__(self, chain: ExecutionChain) -> None:
        self._chain = chain

    async def head(self) -> int:
        return (await self._chain.head()).number

    async def begin(self) -> tuple[int, str | None]:
        head = await self._chain.head()
        return head.number, hex_text(head.hash)

    async def read(self, span: Span, cursor: Cursor, registry: Registry) -> Reading:
        watched = registry.watched(span)
        found = await self._chain.read_logs(span, watched, anchor_of(cursor), every=cursor.every_header)
        observations = fold(found.logs, found.times_s, watched)
        return Reading(observations, hex_text(found.last.hash), parent=found.parent, seen=len(found.logs))


def anchor_of(cursor: Cursor) -> Hash32 | None:
    """The hash of the block that a cursor of blocks stands on, where it is known."""
    return Hash32(bytes.fromhex(cursor.anchor[2:])) if cursor.anchor else None
