"""The daemon as monitoring asks it: what happened is reported and nothing secret is, by default on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from command_line import Place, Running, delivered, place, wanted
from timeouts import WAIT_TIMEOUT_S, until
from vaultevents.devnet.receivers import Hook, Reply, in_turn
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress

pytestmark = pytest.mark.e2e

ON = 'serve = "on"\nport = 0'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServerAddress]]:
    folder = tmp_path_factory.mktemp("data")
    with EmbeddedPostgres(folder / "postgres") as address:
        yield folder, address


@pytest.fixture
async def here(tmp_path: Path, server: tuple[Path, ServerAddress]) -> AsyncIterator[Place]:
    simulation = Simulation(9)
    simulation.history(20, 30)
    async with place(tmp_path, server[0], simulation) as found:
        yield found


def address_of(running: Running) -> str:
    lines = [json.loads(line) for line in running.stderr_so_far.splitlines() if line.startswith("{")]
    (url,) = [line["url"] for line in lines if line["event"] == "metrics_listen"]
    return str(url)


async def scrape(url: str) -> tuple[str, dict[tuple[str, ...], float]]:
    """The text, and each sample by its name and the values of its labels."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        assert answer.status == 200
        assert answer.content_type == "text/plain"
        text = await answer.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return text, {(one.name, *one.labels.values()): one.value for one in samples}


async def reported(url: str, values: Mapping[tuple[str, ...], float]) -> tuple[str, dict[tuple[str, ...], float]]:
    """The first scrape with these values."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not values.items() <= (found := await scrape(url))[1].items():
            await asyncio.sleep(0.3)
    return found


async def health(url: str, path: str = "/healthz") -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(url + path) as answer:
        return answer.status, await answer.read()


async def all_delivered(here: Place, hooks: Mapping[str, Hook]) -> set[str]:
    """Runs the chain on for a while; returns the ids of all events when each has arrived at its account's hook."""
    for _ in range(10):
        here.simulation.step()
    await until(lambda: all(delivered(hook).keys() >= wanted(here.simulation, one) for one, hook in hooks.items()))
    return {event_id for hook in hooks for event_id in wanted(here.simulation, hook)}


def leaks(text: str, canaries: Iterable[str]) -> set[str]:
    return {canary for canary in canaries if canary in text}


async def test_a_scrape_reports_what_happened_and_nothing_secret(here: Place) -> None:
    rpc_key = secrets.token_hex(16)
    here.url = f"{here.url}/?apikey={rpc_key}"
    here.configure(metrics=ON)
    hooks = await here.subscribed()
    hook = hooks["acme"]
    hook.behaviour = in_turn(Reply(503), Reply(503), Reply(200))
    running = await here.shell.start("run")
    await running.said('"metrics_listen"')
    url = address_of(running)
    ids = await all_delivered(here, hooks)
    text, samples = await reported(
        url,
        {
            ("vaultevents_deliveries", "delivered"): len(ids),
            ("vaultevents_attempts_total", "2xx"): len(ids),
            ("vaultevents_attempts_total", "5xx"): 2,
            ("vaultevents_attempt_duration_seconds_count",): len(ids) + 2,
        },
    )
    assert samples["vaultevents_deliveries", "scheduled"] == samples["vaultevents_oldest_pending_seconds",] == 0
    assert samples["vaultevents_stream_lag", "logs"] == 0
    assert await health(url) == await health(url, "/readyz") == (200, b"")
    assert hook.secret is not None
    canaries = [rpc_key, hook.secret, hook.url, "acme", "127.0.0.1", "://", str(here.data_dir), *ids]
    assert leaks(text, canaries) == set()
    assert hook.url in leaks(f"{text} {hook.url}", canaries)  # the control: the search can find
    (await running.end()).ok()


async def test_what_dispatcher_processes_do_is_reported_by_the_first(here: Place) -> None:
    here.configure(metrics=ON)
    hooks = await here.subscribed()
    running = await here.shell.start("run", "--dispatchers", "3")
    await running.said('"started"', times=3)
    number = len(await all_delivered(here, hooks))
    _, samples = await reported(address_of(running), {("vaultevents_attempts_total", "2xx"): number})
    assert samples["vaultevents_attempt_duration_seconds_count",] == number
    ended = (await running.end()).ok()
    assert [line["event"] for line in ended.logs].count("metrics_listen") == 1


async def test_by_default_loopback_is_served(here: Place) -> None:
    here.configure(metrics="port = 0")
    running = await here.shell.start("run")
    await running.said('"metrics_listen"')
    await running.said('"started"')
    open_ports = [
        connection for connection in psutil.Process(running.pid).net_connections("tcp") if connection.status == "LISTEN"
    ]
    assert {connection.laddr.ip for connection in open_ports} == {"127.0.0.1"}
    assert address_of(running) in {f"http://127.0.0.1:{connection.laddr.port}" for connection in open_ports}
    (await running.end()).ok()


async def test_the_default_port_in_use_ends_nothing(here: Place) -> None:
    """As where several processes of the service run on one machine."""
    here.configure(metrics="")
    with contextlib.ExitStack() as taken:
        with contextlib.suppress(OSError):  # in use already
            taken.enter_context(socket.create_server(("127.0.0.1", 9464)))
        running = await here.shell.start("run")
        await running.said('"metrics_not_served"')
        await running.said('"started"')
        (await running.end()).ok()


async def test_a_port_in_use_is_one_sentence(here: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        here.configure(metrics=f'serve = "on"\nport = {port}')
        ended = await here.run("run")
    assert ended.error == (
        f"the metrics listener cannot listen on 127.0.0.1 port {port} (Address already in use): "
        "name another address in metrics.host and metrics.port, or end what uses it"
    )
