"""Source `logs`: fundings of vaults and claims from their withdrawal queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

from vaultevents.chain.execution.client import ExecutionChain, LogRange
from vaultevents.core.errors import NodeFault
from vaultevents.core.logs import Header, fold, owned
from vaultevents.core.registry import Registry, Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32, hex_text
from vaultevents.store.outbox import Cursor
from vaultevents.store.reorgs import NearBlocks
from vaultevents.watch.source import Known, Reading, Reorged

AHEAD = 2
"""Spans of a backfill that are read while the one in front of them is committed."""

_AT_ONCE = 64
"""How many blocks are compared at a time when the common ancestor is looked for."""


class LogsSource:
    """Proven logs; the anchor is the hash of the last block that was read.

    A live cursor reads up to the configured head, all others what is final (rule C1).
    """

    stream = "logs"
    ahead = AHEAD

    def __init__(self, chain: ExecutionChain) -> None:
        self._chain = chain

    async def head(self) -> int:
        return (await self._chain.final_head()).number

    async def live_head(self, cursor: Cursor, known: Callable[[], Awaitable[Known]]) -> int | Reorged:
        head = await self._chain.head()
        if self._chain.reads_near_head and not await self._stands(cursor, head, known):
            return await self.fork(cursor, await known()) or head.number
        return head.number

    async def _stands(self, cursor: Cursor, head: Header, known: Callable[[], Awaitable[Known]]) -> bool:
        """Whether the chain up to `head` and what the cursor has read are the same, as far as they overlap."""
        if head.number < cursor.position:
            ours = (await known()).get(head.number)
            return ours is None or ours == hex_text(head.hash)
        at = head if head.number == cursor.position else await self._chain.header(cursor.position)
        return hex_text(at.hash) == cursor.anchor

    async def fork(self, cursor: Cursor, known: Known) -> Reorged | None:
        if cursor.anchor is None or known.get(cursor.position) != cursor.anchor:
            return None
        numbers = sorted(known, reverse=True)
        headers: Mapping[int, Header] = {}
        left = False
        for at in range(0, len(numbers), _AT_ONCE):
            headers = await self._chain.headers(numbers[at : at + _AT_ONCE])
            for number in sorted(headers, reverse=True):
                if hex_text(headers[number].hash) == known[number]:
                    return Reorged(number, known[number]) if left else None  # that node stands, or is behind
                left = True
        if numbers[-1] not in headers:  # it is behind all of them, which proves nothing
            return None
        raise NodeFault(
            "the execution nodes in use",
            f"give block {numbers[-1]} as {hex_text(headers[numbers[-1]].hash)}, while {known[numbers[-1]]} was final: "
            "find out which nodes follow the chain, and name only these",
        )

    async def begin(self) -> tuple[int, str | None]:
        head = await self._chain.final_head()
        return head.number, hex_text(head.hash)

    def resume(self, cursor: Cursor) -> None:
        if not self._chain.reads_near_head:
            remember(self._chain, cursor)

    async def read(self, span: Span, cursor: Cursor, registry: Registry, also: Collection[int] = ()) -> Reading:
        watched = registry.watched(span)
        # before the logs: a block that is final then has the logs that are read now
        near = cursor.kind == "live" and self._chain.reads_near_head
        final = await self._chain.final_head() if near else None
        anchor = anchor_of(cursor)
        found = await read_watched(self._chain, span, watched, cursor, also, final=not near)
        if final is not None and not watched and span.last > final.number:
            found = await self._links(span, anchor, final)
        folded = fold(found.logs, found.times_s, watched)
        return Reading(
            folded.observations,
            hex_text(found.last.hash),
            parent=found.parent,
            seen=found.seen,
            near=None if final is None else _near(found.headers, final),
            unverified=found.unverified,
            quarantined=owned(folded.undecodable, registry),
        )

    async def _links(self, span: Span, anchor: Hash32 | None, final: Header) -> LogRange:
        """A span without anything to watch: no logs, but what may be reorganised is linked all the same."""
        first = max(span.first, final.number)
        headers = await self._chain.linked_headers(Span(first, span.last), anchor if first == span.first else None)
        parent = hex_text(headers[first].parent_hash) if first == span.first else None
        return LogRange([], {}, headers[span.last], parent, headers)


def remember(chain: ExecutionChain, cursor: Cursor) -> None:
    """Hold nodes to the final block on which a live cursor stands, also where what is before it is read."""
    anchor = anchor_of(cursor)
    if anchor is not None:
        chain.remember(cursor.position, anchor)


async def read_watched(
    chain: ExecutionChain, span: Span, watched: Watched, cursor: Cursor, also: Collection[int], *, final: bool = True
) -> LogRange:
    """Read the proven logs of a span as the kind of its cursor asks for.

    A live cursor reads and links every header, and so does the audit of a single node: there only blooms speak against
    what the node leaves out. With several nodes their union does, and the audit asks each of them alone.
    """
    live = cursor.kind == "live"
    anchor = anchor_of(cursor)
    every = live or (cursor.kind == "audit" and len(chain.nodes) == 1)
    return await chain.read_logs(
        span, watched, anchor, every=every, final=final, live=live, only=cursor.node, also=also
    )


def _near(headers: Mapping[int, Header], final: Header) -> NearBlocks:
    """Raises `NodeFault` when the finalized block is another one than was read at its height."""
    at = headers.get(final.number)
    if at is not None and at.hash != final.hash:
        raise NodeFault(
            "the execution nodes in use",
            f"give two blocks {final.number}: {hex_text(final.hash)} as the finalized one and {hex_text(at.hash)} by "
            "its number; wait until they agree, or see which one is wrong",
        )
    hashes = {number: hex_text(header.hash) for number, header in headers.items() if number >= final.number}
    return NearBlocks(final.number, hex_text(final.hash), hashes)


def anchor_of(cursor: Cursor) -> Hash32 | None:
    """The hash of the block that a cursor of blocks stands on, where it is known."""
    return Hash32(bytes.fromhex(cursor.anchor[2:])) if cursor.anchor else None
