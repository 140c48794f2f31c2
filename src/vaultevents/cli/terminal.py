"""Run the work of a command, end it by signals, and write its output for people and for machines."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pwd
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

import typer

from vaultevents.core.actor import acting_as
from vaultevents.core.errors import OperatorError

T = TypeVar("T")


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
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
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
