"""Configuration: every setting with its value and its source, secrets masked; whether all that it names works."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from vaultevents.config import Section, Settings
from vaultevents.console.checks import CheckRunner
from vaultevents.console.context import ConsoleContext
from vaultevents.console.live import LivePage
from vaultevents.console.rendering import render
from vaultevents.core.environment import ENV_PREFIX

PATH: Final = "/configuration"
TOPIC: Final = "configuration"
Source = Literal["default", "file", "environment"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting as it is in effect."""

    name: str
    value: str
    source: Source
    description: str


def routes(context: ConsoleContext) -> list[Route]:
    """Return the routes of the page `/configuration` and of the check that it runs."""
    check = context.check
    tables = effective(context.settings, os.environ if context.settings.reads_environment else {})

    async def show(request: Request) -> Response:
        if check is None:
            return render(request, "configuration.html", tables=tables, offers_check=False)
        return render(request, "configuration.html", live=TOPIC, tables=tables, offers_check=True, **_state_of(check))

    async def run_check(request: Request) -> Response:
        if check is None:
            raise HTTPException(404)
        check.start()
        return RedirectResponse(PATH, 303)

    return [Route(PATH, show), Route(f"{PATH}/check", run_check, methods=["POST"])]


def check_changes(context: ConsoleContext) -> list[LivePage]:
    """Return what a stream follows so that the page is loaded again when the check has advanced."""
    check = context.check
    if check is None:
        return []

    async def read() -> Mapping[str, Any]:
        return _state_of(check)

    return [LivePage(PATH, "Configuration", "check.html", read)]


def _state_of(check: CheckRunner) -> dict[str, Any]:
    return {"progress": check.progress, "result": check.result}


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
