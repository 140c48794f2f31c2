"""Read the fields of filters and forms; whatever a browser sends becomes a value or an `InputError`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from vaultevents.core.errors import InputError

Choice = TypeVar("Choice", bound=str)

MAX_CHARS: Final = 500
MAX_NUMBER: Final = 2**63 - 1


def text(fields: Mapping[str, str], name: str) -> str | None:
    """Return a text without the white space around it; None for an empty one."""
    value = fields.get(name, "").strip()
    if len(value) > MAX_CHARS or "\0" in value:
        raise InputError(f"'{name}' is too long or holds characters that cannot be stored: shorten it")
    return value or None


def shown(fields: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the fields as a form shows them again, whatever they hold."""
    return {name: "".join(filter(str.isprintable, fields.get(name, "")))[:MAX_CHARS].strip() for name in names}


def choice(fields: Mapping[str, str], name: str, choices: Collection[Choice]) -> Choice | None:
    """Return one of the choices; None for none."""
    value = text(fields, name)
    found = next((known for known in choices if known == value), None)
    if value is not None and found is None:
        raise InputError(f"'{value}' cannot be '{name}': choose one of {', '.join(choices)}")
    return found


def chosen(fields: Mapping[str, str], name: str, choices: Collection[str]) -> list[str]:
    """Return the choices whose boxes, named `name.choice`, are checked; all of them where none is."""
    given = {field.removeprefix(f"{name}.") for field in fields if field.startswith(f"{name}.")}
    if unknown := given - set(choices):
        raise InputError(f"'{min(unknown)}' cannot be '{name}': choose some of {', '.join(choices)}")
    return [value for value in choices if not given or value in given]


def number(fields: Mapping[str, str], name: str) -> int | None:
    """Return a number from 0 on; None for none."""
    value = text(fields, name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or int(value) > MAX_NUMBER:
        raise InputError(f"'{value}' cannot be '{name}': write a whole number")
    return int(value)


def required_number(fields: Mapping[str, str], name: str) -> int:
    """Return a number that has to be there."""
    value = number(fields, name)
    if value is None:
        raise InputError(f"'{name}' is missing: write a whole number")
    return value


def moment(fields: Mapping[str, str], name: str) -> datetime | None:
    """Return a time as `<input type="datetime-local">` writes it, or as RFC 3339; without an offset it is UTC."""
    value = text(fields, name)
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(value)
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InputError(f"'{value}' cannot be '{name}': write a time such as 2026-01-31T12:00") from None
    return found


def moment_field(at: datetime | None) -> str:
    """Return the value of `<input type="datetime-local">` for a time."""
    return "" if at is None else at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds")


_SPANS: Final = {"1h": timedelta(hours=1), "1d": timedelta(days=1), "7d": timedelta(days=7), "30d": timedelta(days=30)}


def duration(fields: Mapping[str, str], name: str) -> timedelta | None:
    """Return one of the durations that a form offers; None for none."""
    value = choice(fields, name, _SPANS)
    return None if value is None else _SPANS[value]


def path_text(request: Request, name: str) -> str:
    """Return a part of the path. Raises the error of a page that is not there for what no id can hold."""
    value: str = request.path_params[name]
    if "\0" in value or len(value) > MAX_CHARS:
        raise HTTPException(404)
    return value
