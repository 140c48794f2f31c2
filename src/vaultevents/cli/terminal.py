"""Run the work of a command, end it by signals, and write its output for people and for machines.

On a terminal tables are coloured and fit its width. In a pipe they are plain and never cut. `NO_COLOR` leaves out
colours, and `FORCE_COLOR` keeps them in a pipe. Control characters are escaped: many cells hold text of others.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pwd
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

import typer

from vaultevents.core.actor import acting_as
from vaultevents.core.errors import OperatorError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

T = TypeVar("T")

LABEL_WIDTH: Final = 12
GAP: Final = 2
FOLDED_WIDTH: Final = 16
"""Columns that a folded cell has at least; where a terminal has less room, each cell gets a line of its own."""
_UNLIMITED: Final = 100_000
"""The width of a pipe."""

STYLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("on", "closed", "delivered", "accepted", "verified", "resolved"), "green"),
    **dict.fromkeys(("paused", "parked", "failing", "scheduled", "pending", "half_open"), "yellow"),
    **dict.fromkeys(("off", "open", "exhausted", "failed", "revoked", "orphaned"), "red"),
    **dict.fromkeys(("cancelled", "withdrawn", "dismissed", "-"), "dim"),
}
"""The colour of a cell by its first word."""
SEVERITY_STYLES: Final[Mapping[str | None, str]] = {
    None: "green",
    "info": "green",
    "warning": "yellow",
    "critical": "bold red",
}
"""The colour of a condition, and of a verdict, which is None without any."""


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run the work of a command. SIGTERM ends it as Ctrl-C does: what is open is closed; the exit code is then 143."""
    terminated = False

    async def until_terminated() -> T:
        task = asyncio.current_task()
        assert task is not None

        def end() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        return await work

    try:
        with acting_as(operator()), asyncio.Runner(loop_factory=_fast_loop()) as runner:
            return runner.run(until_terminated())
    except asyncio.CancelledError:
        if not terminated:
            raise
        raise typer.Exit(128 + signal.SIGTERM) from None


def operator() -> str:
    """Return whom the audit log names for what a command changes: the user of the operating system."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:  # a container may run as a number without a name
        return f"cli:{os.getuid()}"


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop of uvloop, where it exists: a third less CPU for each request and delivery."""
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
    with _written():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def put_bytes(data: bytes) -> None:
    """Write bytes as they are, without a line break."""
    with _written():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@contextmanager
def _written() -> Iterator[None]:
    """End the command where its output cannot be written: without a word when its reader has left."""
    try:
        yield
    except OSError as error:
        with Path(os.devnull).open(
            "wb"
        ) as nowhere:  # or the interpreter would try once more when it ends, and complain
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader has left: nobody sees a message
            sys.exit(1)
        raise OperatorError(
            f"the work is done, but its answer cannot be written ({error.strerror}): correct that and ask again"
        ) from None


def put_json(value: Any) -> None:
    """Write one object on one line of stdout; times are in RFC 3339."""
    say(json.dumps(value, default=_json_value))


def _json_value(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of output: a label and a text, in a style of rich such as `red`."""

    label: str
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Rows:
    """A table, or the line `empty` where it has no rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str

    @staticmethod
    def of(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> Rows:
        """Make the text of each cell: `-` for nothing, and no control characters."""
        cells = [["-" if cell in (None, "") else printable(str(cell)) for cell in row] for row in rows]
        return Rows(columns, cells, empty)

    def widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]


def printable(text: str) -> str:
    """Return the text with line breaks and control characters as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def put_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """Write aligned columns, or one line when there is nothing to show."""
    put([Rows.of(columns, rows, empty)])


def put_page(columns: Sequence[str], rows: Iterable[Sequence[Any]], following: int | None, empty: str) -> None:
    """Write a page of a list, and where the next one begins; without any row `empty`."""
    put_table(columns, rows, empty)
    if following is not None:
        say(f"more: --before {following}")


def put(parts: Iterable[Fact | Rows]) -> None:
    """Write facts and tables: in columns that fit a terminal, or as plain lines."""
    if not is_styled():
        for part in parts:
            for line in plain_lines(part):
                say(line)
        return
    shown = console()
    with shown.capture() as written:
        for part in parts:
            shown.print(styled(part, shown.width))
    if text := written.get().removesuffix("\n"):
        say(text)


def is_styled() -> bool:
    """Tell output for people at a terminal, or with `FORCE_COLOR`, from plain output."""
    return sys.stdout.isatty() or _forces_colour()


def _forces_colour() -> bool:
    return bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")


def console(file: TextIO | None = None, *, live: bool = False) -> Console:
    """Return rich's view of stdout, or of another file; without colours where `NO_COLOR` is set.

    Above a `live` display lines of a log are left as they are: the terminal wraps them, as it does without one.
    """
    from rich.console import Console

    chosen = sys.stdout if file is None else file
    return Console(
        file=chosen,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        force_terminal=None if _forces_colour() else chosen.isatty(),
        width=None if chosen.isatty() else _UNLIMITED,
        highlight=False,
        markup=False,
        soft_wrap=live,
    )


def plain_lines(part: Fact | Rows) -> Iterator[str]:
    """Yield lines with aligned columns, never cut or folded."""
    if isinstance(part, Fact):
        yield f"{part.label:<{LABEL_WIDTH}}{printable(part.text)}"
    elif part.rows:
        widths = part.widths()
        for row in (part.columns, *part.rows):
            yield (" " * GAP).join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    else:
        yield part.empty


def styled(part: Fact | Rows, width: int) -> RenderableType:
    """Return what rich prints in `width` columns: nothing is cut, long cells are folded."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    if isinstance(part, Fact):
        table.padding = (0, 0, 0, 0)
        table.add_column(width=LABEL_WIDTH, style="bold")
        table.add_column(overflow="fold")
        table.add_row(Text(part.label), Text(printable(part.text), style=part.style))
        return table
    if not part.rows:
        return Text(part.empty)
    widths = part.widths()
    if sum(min(natural, FOLDED_WIDTH) + GAP for natural in widths) - GAP > width:
        return _records(part)
    table.show_header = True
    for column in part.columns:
        table.add_column(Text(column), overflow="fold")
    for row in part.rows:
        table.add_row(*(Text(cell, style=_style(cell)) for cell in row))
    return table


def _records(table: Rows) -> RenderableType:
    """Show each cell on a line of its own, for a terminal without room for the columns."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for number, row in enumerate(table.rows):
        if number:
            shown.add_row("", "")
        for column, cell in zip(table.columns, row, strict=True):
            shown.add_row(Text(column), Text(cell, style=_style(cell)))
    return shown


def _style(cell: str) -> str:
    return STYLES.get(cell.partition(" ")[0].rstrip(":,"), "")
