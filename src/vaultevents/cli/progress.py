"""How far a long work is: a bar with an ETA on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import structlog
from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from vaultevents.cli.terminal import console

if TYPE_CHECKING:
    from vaultevents.watch.watcher import Advanced

log = structlog.get_logger("cli")

PLAIN_EVERY_S = 5.0
FOOTER_PER_S: Final = 2.0
"""How often a footer is drawn."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """When a cursor was first seen, and how many of its blocks were done then."""

    at_s: float
    done: int


class RateColumn(ProgressColumn):
    """How many a second, of late."""

    def render(self, task: Task) -> Text:
        return Text("–" if task.speed is None else f"{task.speed:,.0f}")


class _Footed(Progress):
    """Bars with something below them."""

    footer: Callable[[], RenderableType] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.footer is not None:
            yield self.footer()


class Bars:
    """Bars on a terminal while it is entered, of what is counted in `unit`, above a footer; in a pipe nothing.

    What is written to stdout or stderr meanwhile appears above them.
    """

    def __init__(self, unit: str, footer: Callable[[], RenderableType] | None = None) -> None:
        screen = console(sys.stderr, live=True)
        self.shown = sys.stderr.isatty()
        self.said_at_s = time.monotonic()
        self.bars = _Footed(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            RateColumn(),
            TextColumn(f"{unit}/s, left:"),
            TimeRemainingColumn(),
            console=screen,
            transient=True,
            refresh_per_second=10 if footer is None else FOOTER_PER_S,
        )
        self.bars.footer = footer

    def __enter__(self) -> Self:
        if self.shown:
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            self.bars.stop()


class SpanProgress(Bars):
    """Shows how far backfills and replays are: bars with an ETA on a terminal, a log line now and then in a pipe."""

    def __init__(self, footer: Callable[[], RenderableType] | None = None) -> None:
        super().__init__("blocks", footer)
        self._tasks: dict[int, TaskID] = {}
        self._begins: dict[int, _Begin] = {}

    def advanced(self, step: Advanced) -> None:
        """Note one committed span; a live cursor has no end and is not shown."""
        cursor = step.cursor
        if cursor.stop is None:
            return
        total, done = cursor.stop - cursor.first + 1, cursor.position - cursor.first + 1
        if self.shown:
            self._move_bar(cursor.id, cursor.kind, done, total)
            return
        now_s = time.monotonic()
        begin = self._begins.setdefault(cursor.id, _Begin(now_s, done))
        if now_s - self.said_at_s >= PLAIN_EVERY_S and begin.done < done < total:
            self.said_at_s = now_s
            blocks_per_s = (done - begin.done) / (now_s - begin.at_s)
            log.info(
                "progress",
                kind=cursor.kind,
                first=cursor.first,
                last=cursor.stop,
                done_blocks=done,
                of_blocks=total,
                percent=100 * done // total,
                blocks_per_s=round(blocks_per_s, 1),
                left_s=round((total - done) / blocks_per_s),
            )

    def _move_bar(self, cursor_id: int, kind: str, done: int, total: int) -> None:
        if cursor_id not in self._tasks:  # what an earlier process did must not count into the speed
            self._tasks[cursor_id] = self.bars.add_task(kind, total=total, completed=done)
        self.bars.update(self._tasks[cursor_id], completed=done, visible=done < total)


class RowProgress(Bars):
    """Shows how far a long work of `kind` is: a bar with an ETA on a terminal, a log line now and then in a pipe.

    `what` is worked off, and counted in `unit`.
    """

    def __init__(self, kind: str = "audit", what: str = "deliveries", unit: str = "rows") -> None:
        super().__init__(unit)
        self._kind, self._what, self._unit = kind, what, unit
        self._begin_s = self.said_at_s
        self._task = self.bars.add_task(what, total=None)

    def advanced(self, done: int, expected: int) -> None:
        """Note `done` out of about `expected`; the time that is left is reported from a first 0 on."""
        now_s = time.monotonic()
        if self.shown:
            self.bars.update(self._task, total=expected if done else None, completed=done)
        elif done == 0:
            self._begin_s = self.said_at_s = now_s
            log.info(f"{self._kind}_started", **{self._what: expected})
        elif now_s - self.said_at_s >= PLAIN_EVERY_S:
            self.said_at_s = now_s
            left_s = round((expected - done) * (now_s - self._begin_s) / done)
            counts = {f"done_{self._unit}": done, f"of_{self._unit}": expected}
            log.info("progress", kind=self._kind, **counts, left_s=left_s)
