"""What a stream of chain data offers: a head, and what there is in a span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vaultevents.core.events import Observation
from vaultevents.core.registry import Registry
from vaultevents.core.reports import ReportLog
from vaultevents.core.spans import Span
from vaultevents.store.outbox import Cursor


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source saw in a span, what the next span must link to, and reports whose files are still to be had.

    `parent` is what this span itself links to, where that is known; `seen` counts the records that were read for it.
    """

    observations: Sequence[Observation]
    anchor: str | None
    reports: Sequence[ReportLog] = ()
    parent: str | None = None
    seen: int = 0


class Source(Protocol):
    """One stream of chain data. It keeps no state of its own: all of it is in the cursor.

    `ahead` spans may be read, without an anchor, before the one in front of them is committed; they tell their parent.
    """

    stream: str
    ahead: int

    async def head(self) -> int:
        """The last position that may be read now."""
        ...

    async def begin(self) -> tuple[int, str | None]:
        """Where the first live cursor starts: the head, and what the next span must link to."""
        ...

    async def read(self, span: Span, cursor: Cursor, registry: Registry) -> Reading:
        """Everything in `span`, proven and linked to the cursor's anchor; no writes.

        Raises `SourceUnavailable` or `StreamStopped`.
        """
        ...
