"""`status`: the verdict and its exit code, and the display that is refreshed in place."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from command_line import Place, asking, place
from terminals import on_terminal
from timeouts import until
from vaultevents.core.verdict import WELL
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.e2e

STALLED = """
insert into cursors (stream, kind, first, position, updated_at)
values ('logs', 'live', 1, 5, db_now() - interval '1 hour')
"""


@pytest.fixture
async def here(tmp_path: Path, data_dir: Path, server: ServerAddress) -> AsyncIterator[Place]:
    simulation = Simulation(3)
    simulation.history(3, 3)
    async with place(tmp_path, data_dir, simulation) as found:
        yield found


async def test_the_verdict_is_first_and_is_the_exit_code(here: Place, server: ServerAddress) -> None:
    done = (await here.run("status", "--exit-code", "--json")).ok()
    assert done.json["verdict"] == {"healthy": True, "severity": None, "sentence": WELL, "conditions": []}
    assert (await here.run("status", "--exit-code")).ok().stdout.splitlines()[0] == f"verdict     {WELL}"

    async with asking(server, here.schema) as connection:
        await connection.execute(STALLED)
    done = await here.run("status", "--exit-code", "--json")
    assert (done.code, done.words) == (3, [])
    verdict = done.json["verdict"]
    assert (verdict["healthy"], verdict["severity"]) == (False, "critical")
    assert verdict["conditions"][0]["name"] == "VaulteventsStandsStill"
    assert done.json["cursors"][0]["updated_at"][10] == "T"

    text = (await here.run("status")).ok().stdout.splitlines()  # without the option the exit code is 0
    assert text[0].startswith("verdict     Not healthy. Streams have not moved: logs (60 min).")


async def test_watch_writes_one_object_a_line_in_a_pipe_until_ctrl_c(here: Place) -> None:
    running = await here.shell.start("status", "--watch", "--json")
    await until(lambda: running.stdout_so_far.count("\n") >= 2)
    done = (await running.end(signal.SIGINT)).ok()
    assert all(json.loads(line)["verdict"]["healthy"] for line in done.stdout.splitlines())


async def test_watch_refreshes_a_terminal_in_place(here: Place) -> None:
    async with on_terminal(here.shell, "status", "--watch", columns=70) as terminal:
        await terminal.shows("verdict", times=2)
        code = await terminal.end(signal.SIGINT)
    assert code == 0, terminal.text
    assert "\x1b[1A" in terminal.written, "the cursor goes up, over what was shown before"
    assert terminal.written.count("\x1b[?25l") == terminal.written.count("\x1b[?25h") == 1
    assert max(map(len, terminal.text.splitlines())) <= 70
