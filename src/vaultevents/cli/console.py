"""What every command shares: options, endings, output for people and for machines."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar

import structlog
import typer

from vaultevents import config
from vaultevents.config import Settings
from vaultevents.core.errors import ConfigError, InputError, OperatorError
from vaultevents.core.retries import parse_schedule
from vaultevents.telemetry import configure_logging

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
    seconds = 0 if text == "0" else _seconds(text)
    if seconds is None or seconds > most_days * DAY_S:
        raise InputError(f"--overlap '{text}' is not a time: write 0, or 1s to {most_days}d, as in 24h")
    return seconds


def duration_of(text: str, option: str, *, most_days: int) -> int:
    """Return the seconds of a time such as 30m or 24h. Raises `InputError` for anything else, or longer."""
    seconds = _seconds(text)
    if seconds is None or seconds > most_days * DAY_S:
        raise InputError(f"{option} '{text}' is not a time: write 1s to {most_days}d, as in 2h")
    return seconds


def _seconds(text: str) -> int | None:
    with suppress(ConfigError, ValueError):
        (seconds,) = parse_schedule(text)
        return seconds
    return None


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
