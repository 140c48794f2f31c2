"""Configuration: every setting with its value and its source; secrets are masked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vaultevents.config import Section, Settings
from vaultevents.console.context import ConsoleContext
from vaultevents.console.rendering import render
from vaultevents.core.environment import ENV_PREFIX

Source = Literal["default", "file", "environment"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting as it is in effect."""

    name: str
    value: str
    source: Source
    description: str


def routes(context: ConsoleContext) -> list[Route]:
    """Return the route of the page `/configuration`."""
    tables = effective(context.settings, os.environ if context.settings.reads_environment else {})

    async def show(request: Request) -> Response:
        return render(request, "configuration.html", tables=tables)

    return [Route("/configuration", show)]


def effective(settings: Settings, environment: Mapping[str, str]) -> dict[str, list[Setting]]:
    """Return the settings by their tables; those above the first table have the name ''."""
    names = {name.upper() for name, value in environment.items() if value}
    tables = {"": list(_settings("", settings, names))}
    for name in type(settings).model_fields:
        if isinstance(table := getattr(settings, name), Section):
            tables[name] = list(_settings(name, table, names))
    return tables


def _settings(table: str, values: BaseModel, environment: set[str]) -> Iterator[Setting]:
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        if isinstance(value, Section):
            continue
        variable = f"{ENV_PREFIX}{f'{table}__' if table else ''}{name}".upper()
        source: Source = "file" if name in values.model_fields_set else "default"
        if variable in environment:
            source = "environment"
        yield Setting(name, _text(value), source, field.description or "")


def _text(value: object) -> str:
    """Show a value; of a secret that is a URL only where it leads, of any other that there is one."""
    if value is None:
        return "–"
    if isinstance(value, SecretStr):
        return _masked(value.get_secret_value())
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if isinstance(value, tuple | frozenset):
        return ", ".join(map(_text, value if isinstance(value, tuple) else sorted(value))) or "none"
    return str(value)


def _masked(secret: str) -> str:
    try:
        parts = urlsplit(secret)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname:
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]} (the rest is hidden)"
    except ValueError:
        pass
    return "set (hidden)"
