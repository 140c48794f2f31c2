"""The check that the console runs: the one of the command, one run at a time, bounded, and apart from the metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from check_fixtures import MASTER_KEY, free_port
from console_fixtures import running_console
from operator_pages import XSS, injected, spaced
from store_factories import values
from timeouts import WAIT_TIMEOUT_S, until
from vaultevents import config, metrics
from vaultevents.chain.upstream.redaction import node_name
from vaultevents.cli.service_check import check_beside_service
from vaultevents.config import Settings
from vaultevents.console.checks import CheckRunner
from vaultevents.core.errors import ConfigError
from vaultevents.core.findings import Finding, failed, passed, warned
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.integration

PATH = "/configuration"
BUTTON = ".//form[@action='/configuration/check']/button"
SETTINGS = config.given({"network": "devnet", "chain_id": 1337}, "test")


class Held:
    """A check that ends when it is let go."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.go = asyncio.Event()

    async def __call__(self, settings: Settings, advanced: Callable[[int, int], None]) -> Sequence[Finding]:
        self.begun += 1
        advanced(3, 7)
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        return [passed("node", XSS), failed("database", "it is away", "Start it"), warned("disk", "it is small")]


@pytest.fixture
async def node() -> AsyncIterator[str]:
    chain = Chain(1)
    for _ in range(10):
        chain.mine()
    server = ExecutionServer(chain)
    yield await server.start()
    await server.stop()


async def test_the_page_runs_the_check_of_the_command(
    database: Database, postgres18: ServerAddress, node: str, tmp_path: Path
) -> None:
    name, schema = await values(database, "select unnest(array[current_database()::text, current_schema()::text])")
    nobody = f"http://127.0.0.1:{free_port()}"
    settings: dict[str, Any] = {
        "data_dir": str(tmp_path),
        "database_url": replace(postgres18, database=name).dsn,
        "database_schema": schema,
        "master_key": MASTER_KEY,
        "execution": {"urls": [node, nobody]},
        "api": {"serve": "off"},
        "metrics": {"serve": "off"},
    }
    before = metrics.recent(metrics.NODE_FAILURES), metrics.finalized_block()
    async with running_console(database, check=check_beside_service, **settings) as console:
        check = console.context.check
        assert check is not None
        async with console.browser() as browser:
            assert "has not been run" in (await browser.get(PATH)).words
            answer = await browser.submit(f"{PATH}/check", {})
            assert (answer.status, answer.headers["location"]) == (303, PATH)
            await until(lambda: check.result is not None)
            page = (await browser.get(PATH)).page
    assert check.result is not None
    results = {finding.subject: finding.result for finding in check.result.findings}
    assert results["database"] == results["database writes"] == "ok", check.result.findings
    assert (results[f"node {node_name(node)}"], results[f"node {node_name(nobody)}"]) == ("ok", "failed")
    shown = [cell.text for cell in page.findall(".//table")[0].iterfind("tbody/tr/th")]
    assert shown == [finding.subject for finding in check.result.findings]
    assert "cannot be reached" in spaced(page)
    after = metrics.recent(metrics.NODE_FAILURES), metrics.finalized_block()
    assert after == before, "its requests are not those of the watcher"


async def test_one_run_at_a_time_whose_result_stays(database: Database) -> None:
    held = Held()
    async with running_console(database, check=held) as console, console.browser() as browser:
        for _ in range(2):
            assert (await browser.submit(f"{PATH}/check", {})).status == 303
        await until(lambda: held.begun == 1)
        running = await browser.get(PATH)
        assert "The check is running: 3 of 7 probes are done." in running.words
        assert running.page.find(BUTTON).get("disabled") is not None
        held.go.set()
        await until(lambda: held.ended == 1)
        for _ in range(2):
            answer = await browser.get(PATH)
            assert injected(answer.page) == []
            for words in ("1 of 3 checks failed: database. 1 warning.", XSS, "it is away", "Start it"):
                assert words in answer.words
            assert answer.page.find(BUTTON).get("disabled") is None
        held.go.clear()
        await browser.submit(f"{PATH}/check", {})
        await until(lambda: held.begun == 2)
        assert "it is away" in (await browser.get(PATH)).words, "until there is another one"
    assert held.ended == 2, "a run ends with the console"


async def test_a_page_is_loaded_again_when_the_check_advances(database: Database) -> None:
    held = Held()
    async with running_console(database, check=held) as console, console.browser() as browser:
        await browser.submit(f"{PATH}/check", {})
        path = f"{console.url}/live?page=configuration"
        async with asyncio.timeout(WAIT_TIMEOUT_S), browser.session.get(path) as live:
            assert await live.content.readline() == b"retry: 2000\n"
            held.go.set()
            while not (await live.content.readline()).startswith(b"event: changed"):
                pass


async def test_a_console_without_a_check_names_the_command(database: Database) -> None:
    async with running_console(database) as console, console.browser() as browser:
        answer = await browser.get(PATH)
        assert answer.page.find(BUTTON) is None
        assert "Run vaultevents check to test" in answer.words
        assert (await browser.post(f"{PATH}/check", {"csrf": answer.field("csrf")})).status == 404


async def refuse(settings: Settings, advanced: Callable[[int, int], None]) -> Sequence[Finding]:
    raise ConfigError("execution.head is wrong: write finalized")


async def stumble(settings: Settings, advanced: Callable[[int, int], None]) -> Sequence[Finding]:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    ("check", "finding"),
    [
        (Held(), failed("check", "it did not end within 0.05 s", "Run 'vaultevents check' in a terminal")),
        (refuse, failed("check", "execution.head is wrong: write finalized")),
        (stumble, failed("check", "it broke off because of a bug", "See the log of this process")),
    ],
)
async def test_a_check_that_does_not_end_well_says_so(check: Any, finding: Finding) -> None:
    runner = CheckRunner(check, SETTINGS, time.time, within_s=0.05)
    runner.start()
    await until(lambda: runner.result is not None)
    assert runner.result is not None
    assert runner.result.findings == [finding]
    assert runner.progress is None
    await runner.close()
