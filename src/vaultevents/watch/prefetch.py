"""Read the spans of a cursor in order; prefetch spans of a bounded cursor while earlier ones commit.

Reading ahead changes the order of questions, never that of commits: a span that was read before the one in front of it
was committed is held against that one's anchor when its turn comes, and read again where it does not link to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from vaultevents import metrics
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.events import Event, project
from vaultevents.core.registry import Registry
from vaultevents.core.spans import Span, next_span, next_step
from vaultevents.store.outbox import Cursor
from vaultevents.watch.source import Known, NearHead, Reading, Reorged, Source

MOST_SEEN = 10_000
"""Records of one span that are kept in memory; where there are more, the next spans are shorter."""


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """What was read of a span, and its events for the registry that it was read with, ready to be committed."""

    reading: Reading
    events: list[Event]


class Prefetcher:
    """Reads the spans of a cursor in order, each at most `step` long. Not to be shared between cursors."""

    def __init__(self, source: Source, step: int) -> None:
        self._source = source
        self._longest = self._step = step
        self._head = -1
        self._version = -1
        self._ahead: deque[tuple[Span, asyncio.Task[ReadSpan]]] = deque()

    async def next_span(
        self, cursor: Cursor, known: Callable[[], Awaitable[Known]]
    ) -> tuple[Span | None, int] | Reorged:
        """The next span, None when there is none, and the head; or where the chain left what a live cursor has read.

        The head is asked for each time; for a cursor that ends only while its next span lies beyond the last answer.
        `known` gives the hashes of the blocks that were read near the head.
        """
        if self._ahead and self._ahead[0][0].first == cursor.position + 1:
            return self._ahead[0][0], self._head
        if cursor.stop is None or self._head < min(cursor.position + self._step, cursor.stop):
            near = self._near(cursor)
            head = await self._source.head() if near is None else await near.live_head(cursor, known)
            if isinstance(head, Reorged):
                return head
            self._head = head
            if cursor.kind == "live":
                metrics.head(self._source.stream, head)
        return next_span(cursor.position, self._head, self._step, cursor.stop), self._head

    async def fork(self, cursor: Cursor, known: Callable[[], Awaitable[Known]]) -> Reorged | None:
        """Where the chain left what a live cursor has read, if it did."""
        near = self._near(cursor)
        return None if near is None else await near.fork(cursor, await known())

    def _near(self, cursor: Cursor) -> NearHead | None:
        return self._source if cursor.kind == "live" and isinstance(self._source, NearHead) else None

    async def read(self, span: Span, cursor: Cursor, registry: Registry) -> ReadSpan:
        """What the source has of the cursor's next span; raises what the source raises."""
        ahead = self._source.ahead if cursor.stop is not None else 0
        if registry.version != self._version or not self._ahead or self._ahead[0][0] != span:
            self.close()
            self._version = registry.version
            reading = self._begin(span, cursor, registry)
        else:
            reading = self._ahead.popleft()[1]
        last = self._ahead[-1][0].last if self._ahead else span.last
        while len(self._ahead) < ahead and (further := next_span(last, self._head, self._step, cursor.stop)):
            unlinked = replace(cursor, position=last, anchor=None)
            self._ahead.append((further, self._begin(further, unlinked, registry)))
            last = further.last
        try:
            found = await reading
        except BaseException as error:
            reading.cancel()
            self.close()
            if isinstance(error, SourceUnavailable):  # fewer questions at once have a better chance
                self._step = max(1, self._step // 2)
            raise
        if cursor.anchor is not None and found.reading.parent not in (None, cursor.anchor):
            self.close()
            found = await self._prepare(span, cursor, registry)  # which finds out who is wrong
        self._step = next_step(self._step, self._longest, found.reading.seen, MOST_SEEN)
        return found

    async def _prepare(self, span: Span, cursor: Cursor, registry: Registry) -> ReadSpan:
        reading = await self._source.read(span, cursor, registry)
        return ReadSpan(
            reading, [event for observation in reading.observations for event in project(observation, registry)]
        )

    def close(self) -> None:
        """Cancel the reads ahead."""
        for _, reading in self._ahead:
            reading.cancel()
        self._ahead.clear()

    def _begin(self, span: Span, cursor: Cursor, registry: Registry) -> asyncio.Task[ReadSpan]:
        task = asyncio.ensure_future(self._prepare(span, cursor, registry))
        task.add_done_callback(_looked_at)
        return task


def _looked_at(task: asyncio.Task[ReadSpan]) -> None:
    """Ignore the error of a span that was read ahead and not used: the next reading of that span meets it again."""
    if not task.cancelled():
        task.exception()
