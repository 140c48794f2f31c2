"""`status`: the verdict and its exit code, and the display that is refreshed in place."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from command_line import Place, asking, place
from database_proxy import DatabaseProxy
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


async def test_watch_in_a_pipe_goes_on_when_the_database_is_back(here: Place, server: ServerAddress) -> None:
    async with DatabaseProxy(server) as proxy:
        environment = {
            "VAULTEVENTS_DATABASE_URL": proxy.dsn(server.connect_kwargs()["database"]),
            "VAULTEVENTS_MASTER_KEY": "22" * 32,
        }
        running = await here.shell.start("status", "--watch", "--json", **environment)

        def shown() -> list[dict[str, Any]]:
            return [json.loads(line) for line in running.stdout_so_far.splitlines(keepends=True) if line[-1] == "\n"]

        await until(lambda: len(shown()) >= 1)
        assert shown()[-1]["verdict"]["healthy"]
        proxy.network = "refusing"
        proxy.cut()
        await until(lambda: "database_problem" in shown()[-1])
        away = shown()[-1]["verdict"]
        assert (away["healthy"], away["sentence"]) == (False, "Not healthy. The database does not answer.")
        proxy.network = "up"
        await until(lambda: shown()[-1]["verdict"]["healthy"])
        (await running.end(signal.SIGINT)).ok()


async def test_watch_refreshes_a_terminal_in_place(here: Place) -> None:
    async with on_terminal(here.shell, "status", "--watch", columns=70) as terminal:
        await terminal.shows("verdict", times=2)
        code = await terminal.end(signal.SIGINT)
    assert code == 0, terminal.text
    assert "\x1b[1A" in terminal.written, "the cursor goes up, over what was shown before"
    assert terminal.written.count("\x1b[?25l") == terminal.written.count("\x1b[?25h") == 1
    assert max(map(len, terminal.text.splitlines())) <= 70
