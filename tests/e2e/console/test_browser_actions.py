"""Actions of the console in a real browser, with a dispatcher and a receiver: each does what its button says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page

from browser_fixtures import WIDTHS, inaccessible, overflowing, running_browser, watched_page
from console_browser import log_in
from console_fixtures import running_console
from console_nodes import read_streams, running_nodes
from dispatch_factories import LOOPBACK, NEVER, QUICK_S, subscribe, until
from simulation_fixtures import read_to_head, rows
from store_factories import KEY, commit, funding, own_database, simple_simulation, values
from timeouts import until_true
from vaultevents.console.rendering import share_text
from vaultevents.devnet.receivers import Hook, Receivers, Reply, always, in_turn
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import DeliveryLane, DispatchOptions, ResendLane, ResendOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.egress import Guard
from vaultevents.store.clock import ServiceClock
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.watch.prefetch import Prefetcher
from vaultevents.watch.source import Source
from vaultevents.watch.watcher import Advanced, advance

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

BROKEN = Reply(503, body=b"the queue behind this receiver is full")
GONE = Reply(410, body=b"this endpoint was moved")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as browser:
        yield browser


@dataclass(frozen=True, slots=True)
class Service:
    """A database whose dispatchers run, a receiver that is subscribed, and its webhook."""

    database: Database
    outbox: Outbox
    hook: Hook
    webhook_id: str


@asynccontextmanager
async def running_service(server: ServerAddress, directory: Path) -> AsyncIterator[Service]:
    receivers = Receivers(directory)
    await receivers.start()
    try:
        async with own_database(server) as database:
            outbox = await simple_simulation(database)
            hook = await subscribe(database, receivers, "acme")
            (webhook_id,) = await values(database, "select id from webhooks")
            async with dispatching(database, receivers):
                yield Service(database, outbox, hook, webhook_id)
    finally:
        await receivers.stop()


@asynccontextmanager
async def dispatching(database: Database, receivers: Receivers) -> AsyncIterator[None]:
    """Dispatchers of deliveries and of resends."""
    stop = asyncio.Event()
    async with Sender(Guard(LOOPBACK), ca_file=receivers.ca_path) as sender, asyncio.TaskGroup() as group:
        clock, signer = ServiceClock(await database.now()), Signer({KEY.id: KEY})
        options = DispatchOptions(schedule_s=QUICK_S, parking=NEVER)
        lanes = (
            DeliveryLane(database, signer, options, random.Random(1)),
            ResendLane(database, signer, ResendOptions()),
        )
        for lane in lanes:
            group.create_task(Dispatcher(lane, sender, clock).run(stop))
        try:
            yield
        finally:
            stop.set()


class Clicks:
    """Count the clicks of a person."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.count = 0

    async def on(self, place: Locator) -> None:
        self.count += 1
        await place.click()
        await self.page.wait_for_load_state()


@pytest.mark.parametrize("javascript", [True, False])
async def test_from_the_overview_to_a_webhook_that_works_again_in_six_clicks(
    browser: Browser, postgres18: ServerAddress, tmp_path: Path, javascript: bool
) -> None:
    async with running_service(postgres18, tmp_path) as service:
        database, hook = service.database, service.hook
        hook.behaviour = in_turn(*[BROKEN] * (len(QUICK_S) + 1), GONE)
        await commit(service.outbox, funding(1))
        await until(database, {"exhausted": 1})
        await commit(service.outbox, funding(2))
        await until(database, {"exhausted": 1, "parked": 1})
        async with running_console(database) as server:
            logged_in = await log_in(browser, server)
            async with watched_page(browser, server.url, state=logged_in.state, javascript=javascript) as watched:
                await watched.page.goto(server.url)
                clicks = Clicks(watched.page)
                tile = watched.page.get_by_text("Webhooks disabled").locator("..")
                assert "1" in await tile.inner_text()
                await clicks.on(tile.get_by_role("link"))
                await clicks.on(watched.page.get_by_role("link", name=service.webhook_id))
                advice = await watched.page.get_by_role("main").inner_text()
                assert "this endpoint was moved" in advice
                assert "To do:" in advice
                hook.behaviour = always(Reply())  # what the text says that its owner has to do
                await clicks.on(watched.page.get_by_role("button", name="Switch on"))
                await until(database, {"exhausted": 1, "delivered": 1})
                exhausted = watched.page.get_by_role("row").filter(has_text="exhausted")
                await clicks.on(exhausted.get_by_role("button", name="Resend"))
                await until(database, {"delivered": 2})
                assert clicks.count <= 6
                assert watched.problems == []
        assert len(hook.accepted) == 2
        assert await acts(database) == ["webhook.enable", "webhook.resend"]


async def acts(database: Database) -> list[str]:
    """The actions of consoles in the audit log, without logins."""
    return await values(
        database, "select action from audit_log where actor like 'console:%' and action like 'webhook.%' order by seq"
    )


async def test_buttons_of_a_webhook_do_what_they_say(
    browser: Browser, postgres18: ServerAddress, tmp_path: Path
) -> None:
    async with running_service(postgres18, tmp_path) as service, running_console(service.database) as server:
        database, hook = service.database, service.hook
        await commit(service.outbox, funding(1))
        await until(database, {"delivered": 1})
        logged_in = await log_in(browser, server)
        async with watched_page(browser, server.url, state=logged_in.state) as watched:
            page = watched.page
            await page.goto(f"{server.url}/webhooks/{service.webhook_id}")

            await page.get_by_role("button", name="Send a test").click()
            await until_true(lambda: _arrived(hook, 2))
            assert hook.ledger[-1].verified

            await page.get_by_role("button", name="Pause").click()
            await page.get_by_text("Paused until").wait_for()
            assert await values(database, "select paused_until > db_now() from webhooks") == [True]
            await page.get_by_role("button", name="Forget failures and go on").click()
            await page.get_by_role("heading", name="on").first.wait_for()
            assert await values(database, "select paused_until from webhooks") == [None]

            await page.get_by_label("Recover what was missed since").fill("2025-01-01T00:00:00")
            await page.get_by_role("button", name="Recover").click()
            assert "0 attempts were asked for" in await page.get_by_role("status").inner_text()

            hook.behaviour = always(BROKEN)
            await commit(service.outbox, funding(3), funding(4))
            await until(database, {"delivered": 1, "exhausted": 2})
            hook.behaviour = always(Reply())
            missed = await values(database, "select id from events where id <> all($1)", ids(hook))
            await page.get_by_label("Recover what was missed since").fill("2025-01-01T00:00:00")
            await page.get_by_role("button", name="Recover").click()
            assert "2 attempts were asked for" in await page.get_by_role("status").inner_text()
            await until_true(lambda: _accepted(hook, missed))

            await page.get_by_role("button", name="Rotate the secret").click()
            secret = await page.get_by_text("whsec_").inner_text()
            assert secret.startswith("whsec_")
            hook.secret = secret
            await page.goto(f"{server.url}/webhooks/{service.webhook_id}")
            assert "whsec_" not in await page.content()
            before = len(hook.ledger)
            await commit(service.outbox, funding(2))
            await until_true(lambda: _arrived(hook, before + 1))
            assert hook.ledger[-1].verified
            assert watched.problems == []
        assert await acts(database) == [
            "webhook.test",
            "webhook.pause",
            "webhook.enable",
            "webhook.recover",
            "webhook.rotate_secret",
        ]


async def test_a_replay_and_a_backfill_are_asked_for_and_seen_to_the_end(
    browser: Browser, postgres18: ServerAddress
) -> None:
    async with running_nodes(120, 60) as nodes, own_database(postgres18) as database:
        await read_streams(database, nodes)
        async with (
            running_console(database, chain_clock=nodes.clock, **nodes.settings) as server,
            server.context.sources() as sources,
        ):
            logs = next(stream.source for stream in sources.streams if stream.source.stream == "logs")
            logged_in = await log_in(browser, server)
            async with watched_page(browser, server.url, state=logged_in.state, width=WIDTHS[0]) as watched:
                page = watched.page
                await page.goto(f"{server.url}/replay")
                await page.get_by_label("First").fill("21")
                await page.get_by_label("Last").fill("60")
                await page.get_by_label("logs (blocks)").check()
                await page.get_by_role("button", name="Estimate").click()
                await page.get_by_role("heading", name="Replay block 21-60?").wait_for()
                assert await overflowing(page) == await inaccessible(page) == []
                await page.get_by_role("button", name="Replay").click()
                await page.get_by_text("The range is read again").wait_for()

                await page.goto(f"{server.url}/vaults/acme/acme-1")
                await page.get_by_label("First block").fill("61")
                await page.get_by_label("logs (blocks)").check()
                await page.get_by_role("button", name="Estimate").click()
                await page.get_by_role("heading", name="Backfill vault 'acme-1'?").wait_for()
                await page.get_by_role("button", name="Backfill").click()
                await page.get_by_text("The backfill was begun").wait_for()

                assert await rows(database) == {}
                await seen_to_the_end(page, server.url, database, logs)
                blocks = await values(database, "select block_number from events order by block_number")
                assert 21 <= blocks[0] <= 60 < blocks[-1] <= nodes.final
                assert watched.problems == []
        assert await values(database, "select action from audit_log where action like 'stream.%' order by seq") == [
            "stream.replay",
            "stream.backfill",
        ]


async def seen_to_the_end(page: Page, url: str, database: Database, source: Source) -> None:
    """Read a span of each backfill, see that they moved, and on the live page that they are over after the rest."""
    outbox, shares = Outbox(database), list[str]()
    for cursor in await outbox.backfills(source.stream):
        with closing(Prefetcher(source, 20)) as reader:
            moved = await advance(reader, outbox, cursor)
        assert isinstance(moved, Advanced)
        assert cursor.stop is not None
        shares.append(share_text((moved.cursor.position - cursor.position) / (cursor.stop - cursor.position)))
    await page.goto(f"{url}/streams")
    table = page.get_by_role("region", name="Backfills and replays")
    assert shares[0] == "50 %"
    assert len(shares) == 2
    for share in shares:
        await table.get_by_role("cell", name=share, exact=True).wait_for()
    await read_to_head(source, outbox)
    await page.get_by_text("Nothing is left to read.").wait_for()


def ids(hook: Hook) -> list[str]:
    """The ids of what a receiver accepted."""
    return [request.webhook_id for request in hook.accepted if request.verified]


async def _accepted(hook: Hook, event_ids: list[str]) -> bool:
    return {*event_ids} <= {*ids(hook)}


async def _arrived(hook: Hook, number: int) -> bool:
    return len(hook.ledger) >= number
