"""Overview: what is going on, at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup

from vaultevents import metrics
from vaultevents.console.charts import Column, distance_mark, stacked_bars, swatch
from vaultevents.console.context import ConsoleContext
from vaultevents.console.live import LivePage, Shared
from vaultevents.console.progress import Progress
from vaultevents.core.verdict import Condition, Facts, Verdict, conditions, verdict
from vaultevents.store import console_overview, status, verdict_facts
from vaultevents.store.console_overview import Day, Minute
from vaultevents.store.status import CursorFacts
from vaultevents.wiring.database import disks

FIGURES_S: Final = 10.0
"""So old figures and the verdict may be; events and cursors are read more often."""

OUTCOMES: Final = {
    "first": "accepted at the first attempt",
    "later": "accepted later",
    "waiting": "waiting",
    "failed": "exhausted, cancelled or withdrawn",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What the tiles, the plot and the verdict show."""

    facts: Facts
    conditions: Sequence[Condition]
    verdict: Verdict
    day: Day
    minutes: Sequence[Minute]

    @property
    def plot(self) -> Markup:
        columns = [Column(f"{minute.begins:%H:%M}", minute.deliveries) for minute in self.minutes]
        return stacked_bars(columns, tuple(OUTCOMES), "Deliveries by minute")

    @property
    def highest(self) -> float:
        return max((sum(minute.deliveries.values()) for minute in self.minutes), default=0.0)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the axis of the chain."""

    name: str
    block: int
    behind: int
    drawing: Markup


@dataclass(frozen=True, slots=True)
class Backfill:
    """A range that is read, and how long it takes still."""

    cursor: CursorFacts
    share: float
    left_s: float | None


def page(context: ConsoleContext) -> LivePage:
    """Return the page `/`."""
    progress = Progress()

    async def read_figures() -> Figures:
        facts = await verdict_facts.read(
            context.database, disks=disks(context.settings), chain_behind_s=context.chain_behind_s()
        )
        async with context.database.transaction() as connection:
            day = await console_overview.day(connection)
            minutes = await console_overview.minutes(connection)
        found = conditions(facts)
        return Figures(facts, found, verdict(found), day, minutes)

    figures = Shared(read_figures, FIGURES_S)

    async def read() -> Mapping[str, Any]:
        async with context.database.transaction() as connection:
            cursors = await status.read_cursors(connection)
            events = await console_overview.newest_events(connection)
        progress.note(cursors, context.now_s())
        head = context.settings.execution.head
        safe = None if head == "safe" else context.safe_block()
        return {
            "network": context.settings.network,
            "figures": await figures.value(),
            "marks": marks(cursors, metrics.heads(), metrics.finalized_block(), head, safe),
            "backfills": [
                backfill(cursor, progress.left_s(cursor)) for cursor in cursors if cursor.kind in ("backfill", "replay")
            ],
            "events": events,
            "outcomes": [(text, swatch(kind)) for kind, text in OUTCOMES.items()],
        }

    return LivePage("/", "Overview", "overview.html", read)


def marks(
    cursors: Sequence[CursorFacts], heads: Mapping[str, int], finalized: int | None, head: str, safe: int | None = None
) -> list[Mark]:
    """Place the head, the safe and the finalized block and the cursors of blocks on one axis, the farthest ahead first.

    Heads are known where this process watches; elsewhere the axis begins at the cursor that is farthest ahead.
    """
    places = {f"head ({head})": heads["logs"]} if "logs" in heads else {}
    if safe is not None:
        places["safe"] = safe if finalized is None else max(safe, finalized)  # which is safe, and read more often
    if finalized is not None:
        places["finalized"] = finalized
    for cursor in cursors:
        if cursor.stream not in ("logs", "reports"):  # those of epochs have no place among blocks
            continue
        if cursor.kind == "live":
            places[f"{cursor.stream} read"] = cursor.position
        elif cursor.kind == "audit":
            places[f"{cursor.stream} audited at {cursor.node}"] = cursor.position
    newest = max(places.values(), default=0)
    farthest = max((newest - block for block in places.values()), default=0)
    return [
        Mark(name, block, newest - block, distance_mark(newest - block, farthest, f"{newest - block} blocks behind"))
        for name, block in sorted(places.items(), key=lambda place: -place[1])
    ]


def backfill(cursor: CursorFacts, left_s: float | None) -> Backfill:
    assert cursor.stop is not None  # the schema: what is no live cursor and no audit has an end
    whole = cursor.stop - cursor.first + 1
    return Backfill(cursor, (cursor.position - cursor.first + 1) / whole if whole > 0 else 1.0, left_s)
