"""Progress of backfills and replays: an ETA that counts only what this process has done itself."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from vaultevents.cli import progress
from vaultevents.cli.progress import SpanProgress
from vaultevents.core.spans import Span
from vaultevents.store.outbox import Committed, Cursor
from vaultevents.telemetry import configure_logging
from vaultevents.watch.watcher import Advanced

pytestmark = pytest.mark.integration


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def step(position: int, stop: int | None = 1099, first: int = 100) -> Advanced:
    cursor = Cursor(7, "logs", "live" if stop is None else "backfill", first, position, None, stop)
    return Advanced(cursor, Span(position, position), Committed())


def lines(stream: Stream) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_in_a_pipe_it_is_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("info", "json")
    with SpanProgress() as progress:
        progress.advanced(step(599))  # an earlier process has done these 500 of 1000 blocks
        for second in range(1, 13):
            clock.now_s += 1
            progress.advanced(step(599 + 10 * second))
    (first, second_line) = lines(stream)
    assert first["event"] == "progress"
    assert (first["kind"], first["first"], first["last"]) == ("backfill", 100, 1099)
    assert (first["done_blocks"], first["of_blocks"], first["percent"]) == (550, 1000, 55)
    assert (first["blocks_per_s"], first["left_s"]) == (10.0, 45)
    assert second_line["left_s"] == 40


def test_neither_the_end_nor_a_live_cursor_is_reported(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("info", "json")
    with SpanProgress() as progress:
        for position in (200, 1099):
            clock.now_s += 10
            progress.advanced(step(position))
            progress.advanced(step(position, stop=None))
    assert lines(stream) == []


def test_on_a_terminal_it_is_a_bar_with_an_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with SpanProgress() as progress:
        for position in (599, 699, 799):
            progress.advanced(step(position))
        progress.bars.refresh()
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
        progress.advanced(step(1099))
    assert "backfill" in shown
    assert "700/1000" in shown
    assert re.search(r"700/1000 [\d,]+ +blocks/s, left: 0:00:0", shown)
    assert "\x1b[?25h" in stream.getvalue(), "the terminal's cursor is back"
