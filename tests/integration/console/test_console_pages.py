"""The pages: valid and escaped, empty and full, live, and there again after the database was away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientResponse

from console_fixtures import Browser, running_console
from database_proxy import DatabaseProxy
from operator_pages import spaced
from search_fixtures import PlanCheckingConnection, many_events
from store_factories import EARLIER, change, commit, funding, own_database, simple_simulation, some_deliveries, values
from timeouts import WAIT_TIMEOUT_S, until_true
from vaultevents import config
from vaultevents.console import overview
from vaultevents.console.charts import Column, Phase, distance_mark, stacked_bars, swatch, timing_bar
from vaultevents.console.configuration import effective
from vaultevents.console.live import LivePage
from vaultevents.console.navigation import PAGES, Page
from vaultevents.console.progress import Progress
from vaultevents.console.rendering import age_text, number_text, share_text
from vaultevents.core.environment import ENV_PREFIX
from vaultevents.store import audit_log, console_overview, status
from vaultevents.store import nodes as node_store
from vaultevents.store.pool import Database, open_database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.status import CursorFacts

pytestmark = pytest.mark.integration

MARKUP = "<script>alert(1)</script>\"'&{{ 7*7 }}"
"""In every text that is shown."""

WITHOUT_TEXTS = ("/replay", "/configuration")
"""Pages on which nothing from outside stands."""

FULL = """
update events set vault_id = vault_id || $1, id = id || $1;
update events set orphaned_at = db_now() where seq % 2 = 0;
update webhooks set url = url || $1;
update accounts set name = $1;
update cursors set problem = $1, problem_since = db_now(), unverified_from = 5;
insert into cursors (stream, kind, first, position, stop) values ('logs', 'backfill', 1, 0, 100);
insert into cursors (stream, kind, first, position, node, problem) values ('logs', 'audit', 1, 0, $1, $1);
insert into nodes (upstream, name, state, problem, since, log_range, requests_per_s, behind, behind_at, latency_p50_s,
    latency_p95_s) values ('execution', $1, 'open', $1, db_now(), 100, 2.5, 32, db_now(), 0.04, 1.5),
    ('beacon', 'b', 'closed', null, db_now(), null, null, 0, db_now(), null, null),
    ('ipfs', 'c', 'closed', null, db_now(), null, null, null, null, 0.5, 0.5);
insert into reports (block_number, block_time_s, tx_hash, log_index, oracle, report_timestamp, ref_slot, root, cid,
    state, next_attempt_at, problem, failure)
    select 1, 1, bytes32, 0, substr(bytes32, 1, 20), 1, 1, bytes32, $1, 'pending', db_now(), $1, 'unavailable'
    from (select decode(repeat('00', 32), 'hex') as bytes32) zeros;
insert into quarantined_logs (stream, block_number, block_hash, log_index, tx_hash, address, topics, data, data_bytes,
    reason, more, state)
    select 'logs', 1, bytes32, 0, bytes32, substr(bytes32, 1, 20), '', '', 0, $1, 3, 'open'
    from (select decode(repeat('00', 32), 'hex') as bytes32) zeros;
"""


async def fill(database: Database) -> None:
    """Put a row with markup into everything that is shown."""
    outbox, _ = await some_deliveries(database, 5)
    await commit(outbox, *(funding(n) for n in range(10, 15)))
    for statement in filter(None, map(str.strip, FULL.split(";"))):
        await change(database, statement, *((MARKUP,) if "$1" in statement else ()))
    async with database.transaction() as connection:
        await audit_log.record(connection, MARKUP, "vault.add", MARKUP, account_id=MARKUP)


async def test_every_page_is_valid_with_and_without_data(database: Database) -> None:
    settings: dict[str, Any] = {
        "execution": {"urls": ["https://user:hidden1@node.example/hidden2"]},
        "delivery": {"allow": ["10.0.0.0/8:*"]},
    }
    for is_full in (False, True):
        if is_full:
            await fill(database)
        async with running_console(database, **settings) as console, console.browser() as browser:
            for page in PAGES:
                answer = await browser.get(page.path)
                assert answer.status == 200, page
                assert page.title in (answer.page.find("head/title").text or "")
                current = [link.text for link in answer.page.iterfind(".//nav//a[@aria-current='page']")]
                assert current == [page.title]
                assert "<script>alert" not in answer.text
                assert "hidden1" not in answer.text
                assert "hidden2" not in answer.text
                assert (MARKUP in answer.words) == (is_full and page.path not in WITHOUT_TEXTS), page
                if answer.page.find(".//main").get("data-live"):
                    fragment = await browser.get(page.path, **{"X-Fragment": "main"})
                    assert fragment.text.strip().startswith("<h1>")
                    assert fragment.text.strip() in answer.text
    assert "node.example" in answer.words


def test_a_page_of_the_navigation_holds_those_below_it() -> None:
    page = Page("/events", "Events")
    assert [page.holds(path) for path in ("/events", "/events/1", "/eventsx", "/")] == [True, True, False, False]
    assert not Page("/", "Overview").holds("/events")


async def test_a_page_is_read_once_for_all_browsers(database: Database) -> None:
    async with running_console(database) as console:
        readings = 0

        async def read() -> dict[str, object]:
            nonlocal readings
            readings += 1
            async with console.context.database.transaction() as connection:
                return {"nodes": await node_store.facts(connection)}

        page = LivePage("/nodes", "Nodes", "nodes.html", read, fresh_s=3600.0)
        fragments = await asyncio.gather(*(page.fragment() for _ in range(10)))
        assert readings == 1
        assert len({id(fragment) for fragment in fragments}) == 1


async def test_nodes_are_shown_with_their_lag_and_latency(database: Database) -> None:
    await fill(database)
    async with running_console(database) as console, console.browser() as browser:
        page = (await browser.get("/nodes")).page
    shown = []
    for row in page.iterfind(".//tbody/tr"):
        behind, answers = (row.find(f"td[@data-name='{name}']") for name in ("Behind at", "Answers, p50, p95"))
        shown.append((spaced_text(behind).split(" 20")[0], spaced_text(answers)))
    assert shown == [("–", "500 ms, 500 ms"), ("32 blocks", "40 ms, 1.5 s"), ("0 slots", "–")]


def spaced_text(cell: Any) -> str:
    return " ".join(" ".join(cell.itertext()).split())


@pytest.mark.parametrize(("head", "is_shown"), [("finalized", True), ("latest-32", True), ("safe", False)])
async def test_the_overview_shows_the_safe_block(database: Database, head: str, is_shown: bool) -> None:
    """Not where it is the head already."""
    await some_deliveries(database, 1)
    settings: dict[str, Any] = {"execution": {"head": head}}
    async with running_console(database, safe_block=12345, **settings) as console, console.browser() as browser:
        words = spaced((await browser.get("/")).page)
    assert ("safe 12 345" in words) == is_shown


async def test_a_change_is_announced(database: Database) -> None:
    outbox = await simple_simulation(database)
    async with running_console(database) as console, console.browser() as browser:
        assert (await browser.get("/live?page=nothing")).status == 404
        async with asyncio.timeout(WAIT_TIMEOUT_S), browser.session.get(f"{console.url}/live?page=overview") as stream:
            assert stream.content_type == "text/event-stream"
            announced = lines(stream)
            assert await anext(announced) == "retry: 2000"
            before = await browser.get("/")
            assert "No event is stored yet" in before.words
            await commit(outbox, funding(1))
            while not (await anext(announced)).startswith("event: changed"):
                pass
            assert "funding_received" in (await browser.get("/", **{"X-Fragment": "main"})).text
            console.context.stop.set()  # a shutdown waits for no stream
            while not stream.content.at_eof():
                await stream.content.readline()


async def lines(stream: ClientResponse) -> AsyncIterator[str]:
    async for line in stream.content:
        if line.strip():
            yield line.decode().strip()


async def test_a_database_that_is_away_is_shown_and_comes_back(postgres18: ServerAddress) -> None:
    async with own_database(postgres18) as direct, DatabaseProxy(postgres18) as proxy:
        (name,) = await values(direct, "select current_database()::text")
        behind = await open_database({**proxy.connect_kwargs(), "database": name})
        try:
            async with running_console(behind) as console, console.browser() as browser:
                assert (await browser.get("/nodes")).status == 200
                proxy.network = "refusing"
                proxy.cut()
                await until_true(lambda: is_away(browser))
                answer = await browser.get("/nodes")
                assert "The database does not answer" in answer.words
                assert answer.page.find(".//meta[@http-equiv='refresh']").get("content") == "5"
                assert answer.headers["retry-after"] == "5"
                proxy.network = "up"
                await until_true(lambda: is_there(browser))
        finally:
            await behind.close()


async def is_away(browser: Browser) -> bool:
    return (await browser.get("/nodes")).status == 503


async def is_there(browser: Browser) -> bool:
    return (await browser.get("/nodes")).status == 200


async def test_no_reading_scans_a_large_table(postgres18: ServerAddress) -> None:
    async with many_events(postgres18) as database:
        await change(database, "update deliveries set created_at = created_at - make_interval(secs => 40100 - id)")
        async with database.transaction() as connection:
            checked = PlanCheckingConnection(connection)
            events = await console_overview.newest_events(checked)
            day = await console_overview.day(checked)
            estimated = await console_overview.day(checked, counted=100, sample=10_000)
            minutes = await console_overview.minutes(checked)
            whole = await console_overview.minutes(checked, sample=100_000)
            await status.read_cursors(checked)
            await status.read_orphaned(checked)
            assert checked.statements > 10
            assert checked.sequential == []
            exact = await connection.fetchval(
                "select count(*) from deliveries where created_at > db_now() - interval '1 d'"
            )
        assert len(events) == console_overview.NEWEST_EVENTS
        assert day.events == estimated.events == 20_400
        assert (day.exact, estimated.exact) == (False, False)
        assert abs(day.deliveries - exact) <= 5  # the clock goes on
        assert day.first_share is not None and 0.97 < day.first_share < 1
        assert estimated.first_share is not None and abs(day.first_share - estimated.first_share) < 0.02
        # the newest 10,000 wait; each minute has 60
        for sampled, counted in zip(minutes[1:50], whole[1:50], strict=True):
            assert sampled.begins == counted.begins
            assert sum(sampled.deliveries.values()) == pytest.approx(sum(counted.deliveries.values()), abs=2)
            assert set(counted.deliveries) == {"waiting"}


async def test_figures_of_few_deliveries_are_exact(database: Database) -> None:
    await some_deliveries(database, 10)
    await change(database, "update deliveries set created_at = created_at - interval '2 days' where id <= 3")
    await change(
        database,
        "update deliveries set state = 'delivered', attempts = 1 + (id = 10)::integer,"
        " finished_at = created_at + make_interval(secs => id) where id > 5",
    )
    await change(database, "update deliveries set state = 'exhausted', attempts = 10 where id = 4")
    async with database.transaction() as connection:
        day = await console_overview.day(connection)
        minutes = await console_overview.minutes(connection)
    assert (day.events, day.deliveries, day.exact, day.sampled) == (10, 7, True, 7)
    assert day.first_share == pytest.approx(4 / 6)
    assert (day.median_s, day.p99_s) == (8.0, 10.0)
    assert len(minutes) == 60
    total: dict[str, float] = {}
    for minute in minutes:
        for kind, number in minute.deliveries.items():
            total[kind] = total.get(kind, 0) + number
    assert total == {"failed": 1, "waiting": 1, "first": 4, "later": 1}


async def test_an_empty_database_has_no_figures(database: Database) -> None:
    async with database.transaction() as connection:
        day = await console_overview.day(connection)
        minutes = await console_overview.minutes(connection)
    assert (day.events, day.deliveries, day.exact, day.first_share, day.median_s) == (0, 0, True, None, None)
    assert [minute.deliveries for minute in minutes] == [{}] * 60


def test_settings_are_shown_with_their_source_and_without_secrets() -> None:
    settings = config.given(
        {
            "network": "devnet",
            "chain_id": 5,
            "database_url": "postgresql://me:hidden@db.example/x",
            "execution": {"urls": ["https://node.example:8545/hidden", "http://u:hidden@[::1]/"]},
            "contracts": {"lazy_oracles": ["0x" + "ab" * 20]},
            "delivery": {
                "proxy_url": "http://me:hidden@proxy.example:4750",
                "allow": ["10.1.0.0/16:8443", "[fd00::/8]:*", "10.0.0.0/8"],
            },
        },
        "test",
    )
    tables = effective(settings, {f"{ENV_PREFIX}CHAIN_ID": "5", f"{ENV_PREFIX}delivery__proxy_url": "x"})
    shown = {(table, setting.name): (setting.value, setting.source) for table in tables for setting in tables[table]}
    assert "hidden@" not in str(shown)
    assert shown["", "network"] == ("devnet", "file")
    assert shown["", "chain_id"] == ("5", "environment")
    assert shown["", "database_url"] == ("set (hidden)", "file")
    assert shown["", "master_key"] == ("–", "default")
    assert shown["execution", "urls"][0] == (
        "https://node.example:8545 (the rest is hidden), http://[::1] (the rest is hidden)"
    )
    assert shown["contracts", "lazy_oracles"] == ("0x" + "ab" * 20, "file")
    assert shown["delivery", "proxy_url"] == ("http://proxy.example:4750 (the rest is hidden)", "environment")
    assert shown["delivery", "allow"] == ("10.1.0.0/16:8443, [fd00::/8]:*, 10.0.0.0/8", "file")
    assert shown["delivery", "ports"] == ("443, 8443", "default")


def cursor(position: int, stream: str = "logs", kind: str = "live", node: str | None = None) -> CursorFacts:
    stop = 1000 if kind == "backfill" else None
    return CursorFacts(stream, kind, 1, position, stop, EARLIER, None, None, node, None)


def test_the_chain_has_one_axis() -> None:
    cursors = [cursor(90), cursor(7, "validators"), cursor(10, kind="audit", node="n"), cursor(80, "reports")]
    found = overview.marks(cursors, {"logs": 100}, 95, "latest-5")
    assert [(mark.name, mark.block, mark.behind) for mark in found] == [
        ("head (latest-5)", 100, 0),
        ("finalized", 95, 5),
        ("logs read", 90, 10),
        ("reports read", 80, 20),
        ("logs audited at n", 10, 90),
    ]
    first, second, third, *_ = overview.marks(cursors, {"logs": 100}, 95, "latest-5", 97)
    assert (first.name, second.name, third.name) == ("head (latest-5)", "safe", "finalized")
    assert second.behind == 3
    found = overview.marks(cursors, {"logs": 100}, 95, "latest-5", 90)
    assert {mark.name: mark.block for mark in found}["safe"] == 95, "it was read before the finalized block moved"
    assert overview.marks([], {}, None, "finalized") == []
    assert [mark.behind for mark in overview.marks(cursors, {}, None, "finalized")] == [0, 10, 80]


def test_the_time_that_a_backfill_takes() -> None:
    progress = Progress()
    assert progress.left_s(cursor(10, kind="backfill")) is None
    progress.note([cursor(10, kind="backfill")], 100.0)
    progress.note([cursor(110, kind="backfill")], 110.0)
    assert progress.left_s(cursor(110, kind="backfill")) == pytest.approx(89.0)
    assert progress.left_s(cursor(110)) is None
    progress.note([cursor(110, kind="backfill")], 1000.0)
    assert progress.left_s(cursor(110, kind="backfill")) is None  # it stands
    share = overview.backfill(cursor(500, kind="backfill"), None).share
    assert share == 0.5


def test_plots_escape_their_labels() -> None:
    plots = (
        stacked_bars([Column(MARKUP, {"first": 1.0, "failed": 3.0}), Column("0", {})], ("first", "failed"), MARKUP),
        timing_bar([Phase(MARKUP, 0, 1), Phase("b", 1, 3)], 3, MARKUP),
        distance_mark(5, 0, MARKUP),
    )
    for plot in plots:
        assert "<script>" not in plot
        assert "&lt;script&gt;" in plot
        assert "style=" not in plot  # which the policy refuses
    assert 'height="90.00"' in plots[0]
    assert 'width="400.00"' in plots[1]
    assert "first" in swatch("first")
    assert stacked_bars([], (), "none").count("<g>") == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0404, "40 ms"),
        (3.21, "3.2 s"),
        (59.4, "59 s"),
        (300, "5 min"),
        (7260, "2 h 1 min"),
        (270000, "3 d 3 h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert age_text(seconds) == text


def test_numbers_and_shares() -> None:
    assert number_text(1234567) == "1\u202f234\u202f567"
    assert [share_text(share) for share in (None, 0.5, 0.99999, 1.0)] == ["–", "50 %", ">99.9 %", "100 %"]
