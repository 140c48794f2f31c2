"""What every command shares: options, endings, output for people and for machines, progress with an ETA."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self, TextIO, TypeVar

import structlog
import typer
from rich.console import Console
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

from vaultevents import config
from vaultevents.config import Settings
from vaultevents.core.errors import ConfigError, InputError, OperatorError
from vaultevents.core.retries import parse_schedule
from vaultevents.telemetry import configure_logging
from vaultevents.watch.watcher import Advanced

log = structlog.get_logger("cli")

T = TypeVar("T")
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Configuration file (default: the one that VAULTEVENTS_CONFIG names, else vaultevents.toml).",
        metavar="FILE",
        dir_okay=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Answer with one JSON object, the last line of stdout.")]

PLAIN_EVERY_S = 5.0
DAY_S = 24 * 3600


def settings_of(path: Path | None) -> Settings:
    """The settings for a command; sets up logging as they say."""
    settings = config.load(path)
    configure_logging(settings.log.level, settings.log.format)
    return settings


def one_of(allowed: Sequence[str], value: str, option: str) -> None:
    """Anything else is wrong usage."""
    if value not in allowed:
        raise typer.BadParameter(f"'{value}' is not one of {', '.join(allowed)}", param_hint=option)


def overlap_of(text: str, *, most_days: int) -> int:
    """The seconds of an `--overlap` such as 24h, or 0. Raises `InputError` for anything else, or longer."""
    with suppress(ConfigError, ValueError):
        (seconds,) = (0,) if text == "0" else parse_schedule(text)
        if seconds <= most_days * DAY_S:
            return seconds
    raise InputError(f"--overlap '{text}' is not a time: write 0, or 1s to {most_days}d, as in 24h")


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Runs the work of a command. SIGTERM ends it as Ctrl-C does: what is open is closed; the exit code is then 143."""
    told = False

    async def until_told() -> T:
        task = asyncio.current_task()
        assert task is not None

        def end() -> None:
            nonlocal told
            told = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        return await work

    try:
        with asyncio.Runner(loop_factory=_fast_loop()) as runner:
            return runner.run(until_told())
    except asyncio.CancelledError:
        if not told:
            raise
        raise typer.Exit(128 + signal.SIGTERM) from None


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it exists: a third less CPU for each request and delivery."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


@contextmanager
def stopping(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C sets `stop`; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def first() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # Python's own for SIGINT would raise wherever the loop is
        stop.set()

    for number in numbers:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def stop_at_end_of(pipe: TextIO, stop: asyncio.Event) -> None:
    """Sets `stop` when the process at the other end of the pipe closes it or is gone."""
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(pipe)
        stop.set()

    loop.add_reader(pipe, ended)


def say(text: str) -> None:
    """A line for people, as it is."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        with Path(os.devnull).open(
            "wb"
        ) as nowhere:  # or the interpreter would try once more when it ends, and complain
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # whoever read along has left: nobody is there to be told anything
            sys.exit(1)
        raise OperatorError(
            f"the work is done, but its answer cannot be written ({error.strerror}): mend that and ask again"
        ) from None


def put_json(value: Any) -> None:
    """One object on one line of stdout."""
    say(json.dumps(value, default=str))


def put_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """Aligned columns, never cut or folded; one line when there is nothing to show."""
    cells = [["-" if cell in (None, "") else str(cell) for cell in row] for row in rows]
    if not cells:
        say(empty)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in (columns, *cells):
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@dataclass(frozen=True, slots=True)
class _Begin:
    """When a cursor was first seen, and how many of its blocks were done then."""

    at_s: float
    done: int


class RateColumn(ProgressColumn):
    """How many a second, of late."""

    def render(self, task: Task) -> Text:
        return Text("–" if task.speed is None else f"{task.speed:,.0f}")


class SpanProgress:
    """Shows how far backfills and replays are: bars with an ETA on a terminal, a log line now and then in a pipe."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._bars: dict[int, TaskID] = {}
        self._begins: dict[int, _Begin] = {}
        self._said_at_s = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            RateColumn(),
            TextColumn("blocks/s, left:"),
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
            self._move_bar(cursor.id, cursor.kind, done, total)
            return
        now_s = time.monotonic()
        begin = self._begins.setdefault(cursor.id, _Begin(now_s, done))
        if now_s - self._said_at_s >= PLAIN_EVERY_S and begin.done < done < total:
            self._said_at_s = now_s
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
        if cursor_id not in self._bars:  # what an earlier process did must not count into the speed
            self._bars[cursor_id] = self._progress.add_task(kind, total=total, completed=done)
        self._progress.update(self._bars[cursor_id], completed=done, visible=done < total)
