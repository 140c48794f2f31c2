"""The pages of docs/reference list what the code has: settings, log events, commands, exit codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

import settings_reference
from vaultevents import cli
from vaultevents.store.notices import Kind

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "vaultevents"
REFERENCE = ROOT / "docs" / "reference"

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
DERIVED = {
    *("audit_started", "audit_chain_started", "check_started", "discovery_started"),
    *("prune_started", "rotation_started"),
}
"""Log events whose name is made from the kind of a progress display."""


def rows(page: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables of a page."""
    for line in page.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def names(page: str) -> set[str]:
    """Return the names in the first column of the tables of a page."""
    return {name for cells in rows(page) for name in re.findall(r"`([^`]+)`", cells[0])}


def logged(sources: Mapping[str, str]) -> set[str]:
    """Return the literal first arguments of calls such as `log.info`."""
    return {
        call.args[0].value
        for source in sources.values()
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in LEVELS
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }


def read_sources() -> dict[str, str]:
    return {
        str(path): path.read_text(encoding="utf-8")
        for path in SOURCES.rglob("*.py")
        if "devnet" not in path.relative_to(SOURCES).parts
    }


def test_the_settings_page_is_up_to_date() -> None:
    page = settings_reference.PAGE.read_text(encoding="utf-8")
    assert page == settings_reference.render(), f"write it anew: {settings_reference.COMMAND}"
    assert "None |\n" not in page  # each setting has a description


def undocumented(page: str, sources: Mapping[str, str]) -> set[str]:
    """Return the log events that the code has and the page lacks."""
    return (logged(sources) | set(get_args(Kind)) | DERIVED) - names(page)


def outdated(page: str, sources: Mapping[str, str]) -> set[str]:
    """Return the log events of the page that no text of the code names."""
    constants = {
        node.value
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return names(page) - constants - DERIVED


def test_the_log_events_are_those_of_the_code() -> None:
    sources = read_sources()
    page = (REFERENCE / "log-events.md").read_text(encoding="utf-8")
    assert undocumented(page, sources) == set()
    assert outdated(page, sources) == set()
    assert undocumented(page.replace("| `started` |", "| `begun` |"), sources) == {"started"}  # the controls
    assert outdated(page.replace("| `started` |", "| `begun` |"), sources) == {"begun"}


def test_a_log_event_that_is_missing_is_reported() -> None:
    sources = {"new.py": 'log.warning("disk_full", path=1)\nlogger.info(name)\n'}
    assert logged(sources) == {"disk_full"}
    assert names("| `started`, `stopping` | x |\n| plain | `y` |\n") == {"started", "stopping"}


def commands(command: Any, path: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each command that can be typed, with its visible options."""
    children = getattr(command, "commands", None)
    if children is not None:
        for name, child in children.items():
            yield from commands(child, f"{path} {name}")
        return
    options = [option for option in command.params if option.param_type_name == "option" and not option.hidden]
    texts = {text for option in options for text in (*option.opts, *option.secondary_opts)}
    yield path, {text for text in texts if text.startswith("--")} - {"--config", "--json", "--help"}


def command_line() -> dict[str, set[str]]:
    """Return every command that can be typed, with its visible options."""
    return {path: options for name in cli.COMMANDS for path, options in commands(cli.load(name), name)}


def test_the_commands_and_options_are_those_of_the_command_line() -> None:
    page = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    listed = {}
    for first, *others in rows(page):
        words = first.strip("`").split(" ")
        path = " ".join(word for word in words if not re.match(r"[A-Z[]", word))
        listed[path] = set(re.findall(r"--[a-z-]+", " ".join(others)))
    assert listed == command_line()
    assert listed["prune"] == {"--older-than", "--dry-run"}


def test_the_exit_codes_are_those_of_the_command_line() -> None:
    page = (REFERENCE / "exit-codes.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    assert documented == re.findall(r"\b\d+\b", str(cli.main.__doc__).partition("Exit codes")[2])
    assert names(page.partition("Commands that end with 1")[2]) <= command_line().keys()
