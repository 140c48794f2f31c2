"""What is counted and what the database reports, as a scrape reads it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api_fixtures import Api, running_api
from metrics_sample import FULL, full_text
from raised_conditions import forget_counts, let_counts_pass, raised, raised_by_process
from store_factories import (
    commit,
    funding,
    live,
    rows,
    settlement,
    shift_clock,
    some_deliveries,
    states,
    take,
    webhook,
)
from vaultevents import metrics
from vaultevents.api import scraping
from vaultevents.api.problems import CODES
from vaultevents.api.server import ServerOptions, bind, serve, url_of
from vaultevents.chain.execution.client import ExecutionChain, HeadPolicy
from vaultevents.chain.upstream.node import Counters, NodeClient
from vaultevents.chain.upstream.pool import NodePool
from vaultevents.core.errors import NodeFault, SourceUnavailable, WrongNetwork
from vaultevents.core.nodes import CIRCUIT_STATES, UPSTREAMS
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.metrics import Stored
from vaultevents.store import gauges
from vaultevents.store.deliveries import settle
from vaultevents.store.notices import Kind
from vaultevents.store.pool import Database
from vaultevents.store.webhooks import delete_webhook, disable_webhook

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"vaultevents_\w+")
Samples = dict[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Tried:
    """An attempt as the metrics see it."""

    status: int | None
    error: str | None
    duration_ms: int


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    metrics.taken()


def samples(stored: Stored | None = None) -> Samples:
    return parsed(metrics.text(stored).decode())


def parsed(text: str) -> Samples:
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(item.name, *item.labels.values()): item.value for item in found}


def of(name: str, reported: Samples) -> dict[str, float]:
    """The values of a metric with one label."""
    return {key[1]: value for key, value in reported.items() if key[0] == name}


def test_attempts_are_counted_by_outcome_and_duration() -> None:
    metrics.attempts([Tried(200, None, 4), Tried(204, None, 5), Tried(503, None, 30), Tried(None, "timeout", 30_000)])
    metrics.attempts([Tried(200, None, 6)])
    metrics.resends([Tried(404, None, 1)])
    reported = samples()
    assert of("vaultevents_attempts_total", reported) == {"2xx": 3, "3xx": 0, "4xx": 0, "5xx": 1, "timeout": 1}
    assert reported["vaultevents_resends_total", "4xx"] == 1
    buckets = of("vaultevents_attempt_duration_seconds_bucket", reported)
    assert (buckets["0.005"], buckets["0.01"], buckets["0.05"], buckets["20.0"], buckets["+Inf"]) == (2, 3, 4, 4, 5)
    assert reported["vaultevents_attempt_duration_seconds_sum",] == pytest.approx(30.045)


def test_what_one_process_counted_another_one_reports() -> None:
    metrics.attempts([Tried(200, None, 4), Tried(None, "tls", 7)])
    metrics.notice("webhook_failing")
    before = metrics.text(None)
    counts = metrics.taken()
    assert metrics.text(None) != before
    metrics.add(counts)
    assert metrics.text(None) == before


def test_what_is_known_from_the_start_are_the_words_of_their_owners() -> None:
    assert set(metrics.NOTICES.known) == set(get_args(Kind))
    assert set(metrics.REFUSALS.known) <= CODES.keys()


def test_the_lag_is_reported_for_streams_whose_head_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_heads", {})
    assert ("vaultevents_stream_lag", "logs") not in samples(FULL)
    metrics.head("logs", 100)
    metrics.finalized(40)
    assert samples(FULL)["vaultevents_stream_lag", "logs"] == 10
    metrics.head("logs", 80)  # another node is behind
    assert samples(FULL)["vaultevents_stream_lag", "logs"] == 0


async def test_finality_that_is_stalled_is_reported_while_the_head_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_counts(monkeypatch)
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    made = Chain(1)
    server = ExecutionServer(made)
    try:
        async with ExecutionChain([await server.start()], head=HeadPolicy.parse("latest-0")) as nodes:
            for _ in range(10):
                made.mine()
            made.freeze_finality()
            for clock.now_s in (1000.0, 3000.0):
                made.mine()
                metrics.head("logs", (await nodes.head()).number)
                await nodes.final_head()
    finally:
        await server.stop()
    reported = samples(FULL)
    assert reported["vaultevents_finalized_age_seconds",] == 2000
    assert raised_by_process() == {"VaulteventsFinalityStalled"}
    metrics.finalized(10**6)  # as when the chain finalizes again
    assert raised_by_process() == set()
    assert of("vaultevents_stream_head_age_seconds", reported) == {"logs": 0}


def test_nodes_are_reported_by_their_upstream_and_state_and_never_by_name() -> None:
    metrics.rate_limit("beacon")
    metrics.hedge("second")
    reported = samples(FULL)
    nodes = {(key[2], key[1]): value for key, value in reported.items() if key[0] == "vaultevents_nodes"}
    assert nodes == {**dict.fromkeys(product(UPSTREAMS, CIRCUIT_STATES), 0), **FULL.nodes}
    assert of("vaultevents_node_rate_limits_total", reported) == {"execution": 0, "beacon": 1, "ipfs": 0}
    assert of("vaultevents_node_hedges_total", reported) == {"first": 0, "second": 1}


async def many_states(database: Database) -> dict[str, int]:
    """Deliveries in every state, more of them here than there."""
    outbox, kept = await some_deliveries(database, 40)
    off, removed = await webhook(database), await webhook(database)
    found = (await take(database)).deliveries
    ends = ["delivered"] * 25 + ["exhausted"] * 6
    await settle(database, [settlement(one, end, 200) for one, end in zip(found, ends, strict=False)])  # type: ignore[arg-type]
    await commit(outbox, *(funding(n) for n in range(100, 112)))
    async with database.transaction() as connection:
        await disable_webhook(connection, off.id, "gone")
    await delete_webhook(database, "acme", removed.id)
    found_states = await states(database)
    assert found_states == {"delivered": 25, "exhausted": 6, "scheduled": 21, "parked": 12, "cancelled": 12}
    assert kept.webhook.active
    return {**found_states, "withdrawn": 0}


async def test_few_deliveries_are_counted(any_database: Database) -> None:
    right = await many_states(any_database)
    assert (await gauges.read(any_database)).deliveries == right


async def test_many_are_estimated(any_database: Database) -> None:
    right = await many_states(any_database)
    async with any_database.transaction() as connection:
        await connection.execute("analyze deliveries")
        await connection.execute("analyze queue")
    assert (await gauges.read(any_database, counted=8)).deliveries == pytest.approx(right, abs=1)
    assert (await gauges.read(any_database, counted=20)).deliveries == pytest.approx(right, abs=1)


async def test_what_waits_for_us_is_distinguished_from_what_waits_for_its_webhook(database: Database) -> None:
    _, kept = await some_deliveries(database, 2)
    await shift_clock(database, 700)
    found = await gauges.read(database)
    assert found.oldest_pending_s == pytest.approx(700, abs=30)
    assert found.oldest_due_s == pytest.approx(700, abs=30)
    await rows(database, "update webhooks set paused_until = db_now() + interval '1 h' where id = $1", kept.id)
    found = await gauges.read(database)
    assert found.oldest_pending_s == pytest.approx(700, abs=30)
    assert found.oldest_due_s == 0


async def test_a_stream_reports_its_age_and_what_holds_it_up(database: Database) -> None:
    outbox, _ = await some_deliveries(database, 1)
    await outbox.note_problem(await live(outbox), "no node answers")
    await shift_clock(database, 100)
    facts = (await gauges.read(database)).streams["logs"]
    assert facts.position == 1
    assert facts.age_s == pytest.approx(100, abs=30)
    assert facts.stuck_s == pytest.approx(100, abs=30)
    await outbox.note_problem(await live(outbox), None)
    assert (await gauges.read(database)).streams["logs"].stuck_s == 0


async def test_the_offset_of_the_clocks_is_reported(database: Database) -> None:
    assert (await gauges.read(database)).clock_offset_s == pytest.approx(0, abs=1)
    assert "VaulteventsClockOff" not in await raised(database)
    await shift_clock(database, -40)
    assert (await gauges.read(database)).clock_offset_s == pytest.approx(-40, abs=1)
    assert "VaulteventsClockOff" in await raised(database)
    await shift_clock(database, 0)
    assert "VaulteventsClockOff" not in await raised(database)


def test_what_a_check_asks_of_nodes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_heads", {})
    counted = (metrics.NODE_FAILURES, metrics.RATE_LIMITS, metrics.HEDGES, metrics.BLOOMS)
    values = ("node_fault", "execution", "first", "settled")

    def count() -> tuple[list[int], int | None]:
        metrics.node_failure("node_fault")
        metrics.rate_limit("execution")
        metrics.hedge("first")
        metrics.blooms(1, 1)
        metrics.finalized(40)
        return list(map(metrics.total, counted, values)), metrics.finalized_block()

    before = list(map(metrics.total, counted, values))
    with metrics.uncounted():
        assert count() == (before, None)
    assert count() == ([number + 1 for number in before], 40)


async def test_what_is_wrong_with_nodes_is_counted_by_its_kind() -> None:
    client = NodeClient(
        "https://node.example#12345678", "execution", Counters(), attempts=1, wait_s=0.0, set_aside_s=1.0
    )
    node = SimpleNamespace(name=client.name, client=client)

    async def admitted(_: object) -> None:
        return None

    endpoints = NodePool([node], admitted)
    errors = (NodeFault(node.name, "x"), SourceUnavailable(node.name, "y"), WrongNetwork("z"))
    for error in errors:

        async def asked(_: object, error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)):
            await endpoints.ask(asked)
    for kind in ("chain_disagreement", "anchor_silent", "unknown_form"):
        metrics.node_failure(kind)
    metrics.blooms(3, 2)
    counted = samples()
    assert {
        key[1]: value for key, value in counted.items() if key[0] == "vaultevents_node_failures_total"
    } == dict.fromkeys(metrics.NODE_FAILURES.known, 1)
    assert [counted["vaultevents_blooms_total", outcome] for outcome in ("settled", "unsettled")] == [3, 2]
    assert b"node.example" not in metrics.text(None)


@pytest.fixture
async def api(database: Database) -> AsyncIterator[Api]:
    async with running_api(database) as running:
        yield running


async def test_requests_are_counted_by_their_route_and_not_by_their_path(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_counts(monkeypatch)
    customer = await api.customer()
    for target in ("/v1/account/webhooks/wh-secret", "/v1/account/webhooks/wh-other", "/v1/account", "/v1/wh-secret"):
        await api.call(customer, "GET", target)
    await api.send("GET", "/v1/wh-secret", {})
    await api.send("GET", "/docs", {})
    token = api.token(customer, "/v1/account")
    for _ in range(2):
        await api.call(customer, "GET", "/v1/account", token=token)
    reported = samples()
    assert {key[1:]: value for key, value in reported.items() if key[0] == "vaultevents_api_requests_total"} == {
        ("/v1/account/webhooks/{webhook_id}", "4xx"): 2,
        ("/v1/account", "2xx"): 2,
        ("/docs", "2xx"): 1,
        ("none", "4xx"): 3,
    }
    assert reported["vaultevents_api_refusals_total", "token_replayed"] == 1
    assert reported["vaultevents_api_refusals_total", "mfa_locked"] == 0
    assert b"wh-" not in metrics.text(FULL)
    assert raised_by_process() == {"VaulteventsTokenReplayed"}
    let_counts_pass(monkeypatch)
    assert raised_by_process() == set()


@asynccontextmanager
async def scraped(database: Database) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the listener for monitoring."""
    options = ServerOptions(port=0)
    listener, stop = bind(options), asyncio.Event()
    serving = asyncio.create_task(serve(scraping.build(database), listener, options, lambda: 0.0, stop))
    try:
        async with aiohttp.ClientSession(url_of(listener, options)) as session:
            yield session
    finally:
        stop.set()
        await serving


async def test_scrapes_within_some_seconds_ask_the_database_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, _ = await some_deliveries(database, 3)
    async with scraped(database) as session:

        async def pending() -> float:
            async with session.get("/metrics") as answer:
                return parsed(await answer.text())["vaultevents_deliveries", "scheduled"]

        assert await pending() == 3
        await commit(outbox, funding(50))
        assert await pending() == 3
        monkeypatch.setattr(scraping, "FRESH_S", 0.0)
        assert await pending() == 4


async def test_without_a_database_the_process_is_not_healthy_and_reports_no_old_gauge(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "PROBED_FOR_S", 0.0)
    async with scraped(database) as session:
        async with session.get("/healthz") as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        await database.close()
        async with session.get("/healthz") as answer:
            assert (answer.status, await answer.read()) == (503, b"")
        async with session.get("/metrics") as answer:
            reported = parsed(await answer.text())
    assert reported["vaultevents_database_up",] == 0
    assert reported["vaultevents_attempts_total", "2xx"] == 0
    assert not any(key[0] == "vaultevents_deliveries" for key in reported)


async def test_a_database_that_does_not_answer_in_time_counts_as_away(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "ANSWERS_WITHIN_S", 0.1)
    async with scraped(database) as session, AsyncExitStack() as held:
        for _ in range(8):  # all connections of the pool
            await held.enter_async_context(database.transaction())
        async with session.get("/healthz") as answer:
            assert answer.status == 503
        async with session.get("/metrics") as answer:
            assert parsed(await answer.text())["vaultevents_database_up",] == 0


async def test_nothing_else_is_served(database: Database) -> None:
    async with scraped(database) as session:
        for method, path, status in (("GET", "/", 404), ("GET", "/v1/account", 404), ("POST", "/metrics", 405)):
            async with session.request(method, path) as answer:
                assert answer.status == status


def documented_metrics(page: str) -> set[str]:
    """Return the names in the first cells of the tables of a page."""
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([a-z_]+)[`{]", cell)}


def test_the_reference_lists_every_metric() -> None:
    """In docs/reference/metrics.md, without the prefix."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    exported = set(re.findall(r"^# TYPE vaultevents_(\w+)", full_text(), re.MULTILINE))
    assert documented_metrics(page) == exported
    assert documented_metrics(page.replace("`nodes{", "`peers{")) == exported - {"nodes"} | {"peers"}  # the control
