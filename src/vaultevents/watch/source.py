"""What a stream of chain data offers: a head, and what there is in a span."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vaultevents.core.events import Observation
from vaultevents.core.logs import UndecodableLog
from vaultevents.core.registry import Registry
from vaultevents.core.reports import ReportLog
from vaultevents.core.spans import Span
from vaultevents.store.outbox import Cursor
from vaultevents.store.reorgs import BlockHash, NearBlocks


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source saw in a span, what the next span must link to, and reports whose files are still to be had.

    `parent` is what this span itself links to, where that is known; `seen` counts the records that were read for it;
    `near` is what of the span may still be reorganised; `quarantined` are the logs that cannot be decoded, and
    `unverified` is the first block of a form that this version does not know.
    """

    observations: Sequence[Observation]
    anchor: str | None
    reports: Sequence[ReportLog] = ()
    parent: str | None = None
    seen: int = 0
    near: NearBlocks | None = None
    unverified: int | None = None
    quarantined: Sequence[UndecodableLog] = ()


class Source(Protocol):
    """One stream of chain data. It keeps no state of its own: all of it is in the cursor.

    `ahead` spans may be read, without an anchor, before the one in front of them is committed; they tell their parent.
    """

    stream: str
    ahead: int

    async def head(self) -> int:
        """The last position that is final and may be read now."""
        ...

    async def begin(self) -> tuple[int, str | None]:
        """Where the first live cursor starts: the head, and what the next span must link to."""
        ...

    async def read(self, span: Span, cursor: Cursor, registry: Registry) -> Reading:
        """Everything in `span`, proven and linked to the cursor's anchor; no writes.

        Raises `SourceUnavailable` or `StreamStopped`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Reorged:
    """The chain has left the blocks that a cursor has read; those up to `ancestor` are still on it."""

    ancestor: int
    anchor: BlockHash


class LogSource(Source, Protocol):
    """A stream of logs: also blocks of which no node claims a log can be read."""

    def resume(self, cursor: Cursor) -> None:
        """Take note of where the live cursor stands before anything is read."""
        ...

    async def read(self, span: Span, cursor: Cursor, registry: Registry, also: Collection[int] = ()) -> Reading:
        """As `Source.read`; the blocks in `also` are read whatever nodes claim."""
        ...


Known = Mapping[int, BlockHash]
"""The hashes of the blocks near the head that were read."""


@runtime_checkable
class NearHead(Protocol):
    """A source whose live cursor may read blocks that can still be reorganised (rule C1)."""

    async def live_head(self, cursor: Cursor, known: Callable[[], Awaitable[Known]]) -> int | Reorged:
        """The last position that a live cursor may read now, or where the chain left what it has read."""
        ...

    async def fork(self, cursor: Cursor, known: Known) -> Reorged | None:
        """Where the chain left what a live cursor has read; None when it did not, or where that is not known.

        Raises `NodeFault` when it left a final block.
        """
        ...
