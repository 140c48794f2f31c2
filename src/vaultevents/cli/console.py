"""What every command shares: options, output for people and for machines, progress with an ETA."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from vaultevents import config
from vaultevents.config import Settings
from vaultevents.telemetry import configure_logging
from vaultevents.watch.watcher import Advanced

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file (default: vaultevents.toml).", dir_okay=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on the last line of stdout.")]

PLAIN_EVERY_S = 5.0
PIPE_WIDTH = 1000


def settings_of(path: Path | None) -> Settings:
    """The settings for a command; sets up logging as they say."""
    settings = config.load(path)
    configure_logging(settings.log.level, settings.log.format)
    return settings


def say(text: str) -> None:
    """A line for people."""
    Console(highlight=False, soft_wrap=True).print(text, markup=False)


def put_json(value: Any) -> None:
    """One object on one line of stdout."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()


def put_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """A table on stdout, or one line when there is nothing to show."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")  # an id that is cut cannot be copied
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    if table.row_count:
        Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
    else:
        say(empty)


class SpanProgress:
    """Shows how far backfills and replays are: bars with an ETA on a terminal, a line every few seconds in a pipe."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._bars: dict[int, TaskID] = {}
        self._began_at_s: dict[int, float] = {}
        self._said_at_s = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("blocks, left:"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            self._progress.stop()

    def advanced(self, step: Advanced) -> None:
        """Takes note of one committed span; a live cursor has no end and is not shown."""
        cursor = step.cursor
        if cursor.stop is None:
            return
        total, done = cursor.stop - cursor.first + 1, cursor.position - cursor.first + 1
        if self._terminal:
            if cursor.id not in self._bars:
                self._bars[cursor.id] = self._progress.add_task(cursor.kind, total=total)
            self._progress.update(self._bars[cursor.id], completed=done, visible=done < total)
            return
        now_s = time.monotonic()
        began_at_s = self._began_at_s.setdefault(cursor.id, now_s)
        if now_s - self._said_at_s >= PLAIN_EVERY_S and now_s > began_at_s and done < total:
            self._said_at_s = now_s
            rate = done / (now_s - began_at_s)
            sys.stderr.write(
                f"{cursor.kind} {cursor.first}..{cursor.stop}: {done} of {total} blocks ({100 * done // total} %), "
                f"{rate:.0f} blocks/s, {(total - done) / rate:.0f} s left\n"
            )
            sys.stderr.flush()
