"""The footer of `run` on a terminal, which no log line disturbs, and its absence in a pipe."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from command_line import Place, place
from terminals import on_terminal
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.e2e


@pytest.fixture
async def here(tmp_path: Path, data_dir: Path, server: ServerAddress) -> AsyncIterator[Place]:
    simulation = Simulation(3)
    simulation.history(30, 10)
    async with place(tmp_path, data_dir, simulation) as found:
        await found.subscribed()
        yield found


async def test_a_terminal_has_a_footer_below_the_log(here: Place) -> None:
    async with on_terminal(here.shell, "run", columns=100) as terminal:
        await terminal.shows(" behind  moved ")
        await terminal.shows("events/s · ")
        await terminal.shows("api http://127.0.0.1:")
        code = await terminal.end(signal.SIGINT)
    assert code == 0, terminal.text
    assert "verdict" not in terminal.text
    assert " pending · failing webhooks: none" in terminal.text
    assert "\nlogs  " in terminal.text
    lines = terminal.text.splitlines()
    assert sum("[info     ] started" in line for line in lines) == 1, "the log is above the footer, line by line"
    assert sum("[info     ] stopping" in line for line in lines) == 1
    assert any("source_off" in line and len(line) > 100 for line in lines), "a long line is left to the terminal"
    assert terminal.written.count("\x1b[?25l") == terminal.written.count("\x1b[?25h") == 1
    assert "Traceback" not in terminal.text


async def test_a_pipe_has_log_lines_alone(here: Place) -> None:
    running = await here.shell.start("run")
    await running.said('"started"')
    done = (await running.end(signal.SIGINT)).ok()
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if not line.startswith("{")] == []
