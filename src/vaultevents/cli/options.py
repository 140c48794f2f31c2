"""Options and arguments that several commands take, and the values that are read from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from vaultevents.core.errors import ConfigError, InputError
from vaultevents.core.retries import parse_schedule

T = TypeVar("T")
Choice = TypeVar("Choice", bound=str)
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
AccountArgument = Annotated[str, typer.Argument(help="The account's id: letters, digits, hyphens.", metavar="ACCOUNT")]

LimitOption = Annotated[int, typer.Option(min=1, max=500, help="How many at most.", metavar="N")]
BeforeOption = Annotated[
    int | None, typer.Option(min=1, help="Go on after the page that named this number.", metavar="NUMBER")
]

DAY_S: Final = 24 * 3600
MAX_KEY_FILE_BYTES: Final = 64 * 1024


def one_of(allowed: Sequence[Choice], value: str, option: str) -> Choice:
    """Return the allowed value that it is; refuse any other one as wrong usage."""
    for choice in allowed:
        if choice == value:
            return choice
    raise typer.BadParameter(f"'{value}' is not one of {', '.join(allowed)}", param_hint=option)


def overlap_of(text: str, *, most_days: int) -> int:
    """Return the seconds of an `--overlap` such as 24h, or 0. Raises `InputError` for anything else, or longer."""
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


def time_of(text: str, option: str, now: datetime) -> datetime:
    """Return a time in RFC 3339, or so long ago as 30m or 24h says. Raises `InputError` for anything else."""
    ago_s = _seconds(text)
    try:
        at = datetime.fromisoformat(text) if ago_s is None else now - timedelta(seconds=ago_s)
    except (ValueError, OverflowError):
        raise InputError(f"{option} '{text}' is not a time: write 2026-01-31T12:00:00Z, or 24h for a day ago") from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


def _seconds(text: str) -> int | None:
    with suppress(ConfigError, ValueError):
        (seconds,) = parse_schedule(text)
        return seconds
    return None


def read_key(path: Path, option: str, parse: Callable[[bytes], T]) -> T:
    """Read the key in the PEM file that an option names; raises `InputError`, which shows nothing of it."""
    try:
        with path.open("rb") as file:
            pem = file.read(MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): name a key in PEM with {option}") from None
    try:
        return parse(pem)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
