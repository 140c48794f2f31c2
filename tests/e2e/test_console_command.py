"""The console as an operator opens it: `run` serves it, `console` prints the link."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest

from command_line import Place, place
from console_fixtures import Browser
from timeouts import until_true
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.e2e


@pytest.fixture
async def here(tmp_path: Path, data_dir: Path, server: ServerAddress) -> AsyncIterator[Place]:
    simulation = Simulation(3)
    simulation.history(10, 10)
    async with place(tmp_path, data_dir, simulation) as found:
        yield found


async def test_a_link_opens_the_console_of_the_service(here: Place) -> None:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
        chosen.listen()
        taken = await here.run("run", VAULTEVENTS_CONSOLE__PORT=str(port))
        assert taken.error.startswith(f"the console cannot listen on 127.0.0.1 port {port} (")
        assert "name another address in console.host and console.port" in taken.error
    running = await here.shell.start("run", VAULTEVENTS_CONSOLE__PORT=str(port))
    await running.said('"console_listens"')
    logged = [json.loads(line) for line in running.stderr_so_far.splitlines()]
    (url,) = [line["url"] for line in logged if line["event"] == "console_listens"]
    assert url == f"http://127.0.0.1:{port}"
    printed = (await here.run("console", "--json", VAULTEVENTS_CONSOLE__PORT=str(port))).ok().json
    assert 500 < (datetime.fromisoformat(printed["validUntil"]) - datetime.now(UTC)).total_seconds() <= 601
    link, _, code = printed["link"].partition("#")
    assert link == f"{url}/login"
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        browser = Browser(url, session)
        assert (await browser.post("/login", {"code": code})).status == 303
        overview = await browser.get("/")
        assert "Overview of devnet" in overview.words
        assert "head (finalized)" in overview.words  # this process watches
        refused = await browser.submit("/replay", {"unit": "block", "first": "1", "last": "9999"})
        final = here.simulation.chain.finalized_number
        assert f"is not final and complete yet: replay up to {final}" in refused.words  # as the node says
        acts = (await here.run("audit", "log", "--action", "console", "--json")).ok()
        assert [entry["action"] for entry in acts.json["entries"]] == ["console.login", "console.link"], "newest first"
        assert all(entry["actor"].startswith("cli:") for entry in acts.json["entries"]), "who made the link"
        assert code not in acts.stdout
        assert (await browser.submit("/configuration/check", {})).status == 303
        await until_true(lambda: shows(browser, "/configuration", "Checked at"))
        words = (await browser.get("/configuration")).words
        assert f"127.0.0.1 port {port} is served by a vaultevents that runs" in words
        await until_true(lambda: shows(browser, "/", "safe"))  # read since the overview was opened
        assert (await browser.submit("/configuration/check", {})).status == 303
    ended = await running.end()  # which ends the second check
    assert ended.code == 0
    assert code not in ended.stderr


async def shows(browser: Browser, path: str, text: str) -> bool:
    return text in (await browser.get(path)).words


async def test_what_has_no_console_prints_no_link(here: Place) -> None:
    assert "set a port" in (await here.run("console")).error
    off = await here.run("console", VAULTEVENTS_CONSOLE__SERVE="off")
    assert 'console.serve is "off"' in off.error
    text = (await here.run("console", VAULTEVENTS_CONSOLE__PUBLIC_ORIGIN="https://ops.example.org")).ok().stdout
    assert text.splitlines()[1].startswith("https://ops.example.org/login#")
