"""Output on terminals and in pipes: tables that fit, colours by NO_COLOR and FORCE_COLOR, times of `--json`."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from vaultevents.cli.terminal import Fact, put, put_json, put_table

pytestmark = pytest.mark.integration

COLUMNS = ("id", "url", "state")
ROWS = [
    ("wh-1", "https://receiver.example/a/long/path/of/a/customer/that/goes/on/and/on", "on"),
    ("wh-2", "https://receiver.example/b", "off (failures)"),
]
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> Iterator[list[str]]:
    """Make stdout a terminal; the list has what was written to it after the block."""
    ours, theirs = pty.openpty()
    written: list[str] = []
    monkeypatch.setenv("COLUMNS", str(width))
    with os.fdopen(theirs, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        yield written
        file.flush()
        written.append(os.read(ours, 65536).decode().replace("\r\n", "\n"))
    os.close(ours)


def shown(written: list[str]) -> list[str]:
    """The lines without their colours."""
    return [line.rstrip() for line in ESCAPE.sub("", written[0]).splitlines()]


def test_a_pipe_gets_plain_columns_that_are_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    put_table(COLUMNS, ROWS, "none")
    out = capsys.readouterr().out
    url = len(ROWS[0][1])
    assert out.splitlines() == [
        f"id    {'url':<{url}}  state",
        f"wh-1  {ROWS[0][1]}  on",
        f"wh-2  {ROWS[1][1]:<{url}}  off (failures)",
    ]


def test_a_table_fits_the_terminal_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, 60) as written:
        put_table(COLUMNS, ROWS, "none")
    lines = shown(written)
    assert max(map(len, lines)) <= 60
    assert lines[0].split() == list(COLUMNS)
    folded = "".join(line[6:].split("  ")[0] for line in lines[1:4])
    assert folded.startswith(ROWS[0][1])
    assert "\x1b[32mon" in written[0]  # green
    assert "\x1b[31moff (failures)" in written[0]


def test_a_narrow_terminal_gets_a_line_for_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, 30) as written:
        put_table(COLUMNS, ROWS, "none")
    lines = shown(written)
    assert max(map(len, lines)) <= 30
    assert lines[0] == "id     wh-1"
    assert lines[-1] == "state  off (failures)"
    assert "".join(line[7:] for line in lines[1 : lines.index("state  on")]) == ROWS[0][1]


def test_no_color_leaves_out_every_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with terminal(monkeypatch, 60) as written:
        put_table(COLUMNS, ROWS, "none")
    assert "\x1b" not in written[0]
    assert shown(written)[0].split() == list(COLUMNS)


def test_force_color_colours_a_pipe_which_has_no_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    put_table(COLUMNS, ROWS, "none")
    out = capsys.readouterr().out
    assert "\x1b[32mon" in out
    assert len(out.splitlines()) == 3


@pytest.mark.parametrize("width", [None, 60])
def test_control_characters_and_markup_are_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int | None
) -> None:
    hostile = "a\x1b]0;title\x07b\nc[bold]d[/bold]"
    if width is None:
        put_table(("name",), [(hostile,)], "none")
        put([Fact("name", hostile)])
        out = capsys.readouterr().out
    else:
        with terminal(monkeypatch, width) as written:
            put_table(("name",), [(hostile,)], "none")
            put([Fact("name", hostile)])
        out = ESCAPE.sub("", written[0])
    assert out.count(r"a\x1b]0;title\x07b\nc[bold]d[/bold]") == 2
    assert "\x1b" not in out and "\x07" not in out


def test_nothing_to_show_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put_table(COLUMNS, [], "no webhooks yet")
    assert capsys.readouterr().out == "no webhooks yet\n"
    with terminal(monkeypatch, 60) as written:
        put_table(COLUMNS, [], "no webhooks yet")
    assert shown(written) == ["no webhooks yet"]


def test_times_are_in_the_form_of_rfc_3339(capsys: pytest.CaptureFixture[str]) -> None:
    put_json({"at": datetime(2026, 1, 1, 12, 30, tzinfo=UTC), "exact": datetime(2026, 1, 1, 0, 0, 0, 1500, UTC)})
    found = json.loads(capsys.readouterr().out)
    assert found == {"at": "2026-01-01T12:30:00+00:00", "exact": "2026-01-01T00:00:00.001500+00:00"}
