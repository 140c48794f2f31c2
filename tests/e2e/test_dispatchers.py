"""`run --dispatchers N`: more processes share the deliveries, and end with the one that started them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from command_line import Place, Running, delivered, place, wanted
from timeouts import until
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import EmbeddedPostgres

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("data")
    with EmbeddedPostgres(folder / "postgres"):
        yield folder


@pytest.fixture
async def here(tmp_path: Path, data_dir: Path) -> AsyncIterator[Place]:
    simulation = Simulation(3)
    simulation.history(20, 30)
    async with place(tmp_path, data_dir, simulation) as found:
        yield found


def children(running: Running) -> list[psutil.Process]:
    """The dispatcher processes beside it."""
    return [child for child in psutil.Process(running.pid).children() if "--while-stdin" in child.cmdline()]


async def test_three_dispatchers_deliver_each_event_once_and_drain_together(here: Place) -> None:
    hook = (await here.subscribed())["acme"]
    running = await here.shell.start("run", "--dispatchers", "3")
    await running.said('"started"', times=3)
    others = children(running)
    assert len(others) == 2
    for _ in range(10):
        here.simulation.step()
    await until(lambda: delivered(hook).keys() >= wanted(here.simulation, "acme"))
    ended = (await running.end(signal.SIGTERM)).ok()
    assert not any(other.is_running() for other in others)
    assert [line["event"] for line in ended.logs].count("dispatch_drained") == 3
    assert set(delivered(hook).values()) == {1}


async def test_a_dispatcher_that_ends_by_itself_ends_all_loudly(here: Place) -> None:
    await here.subscribed()
    running = await here.shell.start("run", "--dispatchers", "2")
    await running.said('"started"', times=2)
    (other,) = children(running)
    other.kill()
    ended = await running.end(None)
    assert ended.error == f"a dispatcher process ended by itself with code {-signal.SIGKILL}: see its last lines above"


async def test_dispatchers_end_when_the_process_that_started_them_is_killed(here: Place) -> None:
    await here.subscribed()
    running = await here.shell.start("run", "--dispatchers", "2")
    await running.said('"started"', times=2)
    (other,) = children(running)
    os.kill(running.pid, signal.SIGKILL)
    await until(lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE)


async def test_dispatchers_need_the_role(here: Place) -> None:
    refused = await here.run("run", "--only", "watch", "--dispatchers", "2")
    assert refused.code == 2
    assert "nothing to deliver without the role dispatch" in refused.stderr
