"""From a published report to its events: pending, fetched, verified, stored; against the devnet's record (rule C6)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from raised_conditions import raised
from simulation_fixtures import Rows, add_accounts, add_vault, drive, read_to_head, register, rows
from store_factories import shift_clock
from vaultevents.chain.execution.client import ExecutionChain, HeadPolicy
from vaultevents.chain.ipfs import IpfsClient, IpfsLimits
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, hex_text
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.gateway import Gateway, Trouble
from vaultevents.devnet.simulation import Simulation
from vaultevents.egress import Guard
from vaultevents.store import cursors
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.reports import due_reports, find_reports, give_up_report, reports_in
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.reports import ReportsSource, Resolver

pytestmark = pytest.mark.integration

LIMITS = IpfsLimits(attempt_s=1.0, gateway_s=2.0, retry_wait_s=0.01, set_aside_s=0.05)


def simulation(blocks: int = 120) -> Simulation:
    made = Simulation(5, report_every=12)
    made.history(blocks)
    return made


def due(made: Simulation) -> Rows:
    return dict(made.expected(event_types=["report_update_available"]))


@dataclass(frozen=True, slots=True)
class Oracle:
    source: ReportsSource
    resolver: Resolver
    outbox: Outbox
    gateway: Gateway

    async def follow(self) -> None:
        """The stream to its head, then one attempt for each report that is due."""
        await read_to_head(self.source, self.outbox, 25)
        for report in await due_reports(self.outbox.database, 1000):
            await self.resolver._attempt(report)


@asynccontextmanager
async def oracle(database: Database, made: Simulation, cache: Path | None = None) -> AsyncIterator[Oracle]:
    node, gateway = ExecutionServer(made.chain), Gateway(made.report_files)
    urls = [await node.start()], [await gateway.start()]
    guard = Guard(UrlRules(allow=(parse_allow("127.0.0.0/8:*"),)))
    try:
        async with (
            ExecutionChain(urls[0], head=HeadPolicy()) as chain,
            IpfsClient(urls[1], guard=guard, cache_dir=cache, limits=LIMITS) as files,
        ):
            outbox = Outbox(database)
            source = ReportsSource(chain, [Address(made.lazy_oracle)])
            yield Oracle(source, Resolver(outbox, files, 0.05), outbox, gateway)
    finally:
        await node.stop()
        await gateway.stop()


async def open_at(database: Database, made: Simulation, block: int) -> None:
    found = made.chain.block(block)
    assert found is not None
    await cursors.open_stream(database, "reports", block, hex_text(found.hash))


async def test_every_published_report_gives_the_events_of_the_chain(any_database: Database) -> None:
    made = simulation()
    await register(any_database, made)
    async with oracle(any_database, made) as reading:
        await open_at(any_database, made, 60)
        await reading.follow()
        assert len(due(made)) > 10
        assert await rows(any_database) == due(made)
        for _ in range(40):
            made.step()
        await reading.follow()
        assert await rows(any_database) == due(made)
        states = {report.state for report in await find_reports(any_database)}
        assert states == {"resolved", "empty"}


async def test_a_replay_is_identical_and_restores_what_is_missing(database: Database, tmp_path: Path) -> None:
    made = simulation()
    await register(database, made)
    async with oracle(database, made, tmp_path) as reading:
        await open_at(database, made, 60)
        await reading.follow()
        before = await rows(database)
        async with database.transaction() as connection:
            await connection.execute("delete from events where seq % 2 = 0")
        missing = len(before) - len(await rows(database))
        calls = reading.gateway.calls.total()
        span = Span(0, await reading.source.head())
        cursor = await reading.outbox.begin_replay("reports", span)
        await drive(reading.source, reading.outbox, cursor, 30)
        await reading.outbox.end_replay(cursor)
        done = [
            await reading.resolver.resolve(report)
            for report in await reports_in(database, span)
            if report.state == "resolved"
        ]
        assert sum(outcome.inserted for outcome in done) == missing
        assert sum(outcome.identical for outcome in done) == len(before) - missing
        assert reading.gateway.calls.total() == calls, "verified files come from the cache"
    assert await rows(database) == before == due(made)


async def test_a_vault_added_later_gets_the_reports_that_were_resolved_before(database: Database) -> None:
    made = simulation()
    await add_accounts(database, made.registrations)
    first, *later = made.registrations
    await add_vault(database, first)
    async with oracle(database, made) as reading:
        await open_at(database, made, 100)
        await reading.follow()
        assert await rows(database) == dict(made.expected([first], event_types=["report_update_available"]))
        for registration in later:
            await add_vault(database, registration)
        await reading.follow()
        assert await rows(database) == due(made)


async def test_a_dead_cid_delays_its_own_report_only(database: Database) -> None:
    made = simulation()
    await register(database, made)
    async with oracle(database, made) as reading:
        await open_at(database, made, 10)
        await read_to_head(reading.source, reading.outbox, 25)
        dead = next(report.log.cid for report in await find_reports(database) if report.state == "pending")
        reading.gateway.troubles[dead] = Trouble.MISSING
        await reading.follow()
        pending = [report for report in await find_reports(database) if report.state == "pending"]
        assert {report.log.cid for report in pending} == {dead}
        assert pending[0].problem is not None and "404" in pending[0].problem
        await shift_clock(database, 3601)
        assert {"VaulteventsReportPending", "VaulteventsReportOld"} <= await raised(database)
        assert 0 < len(await rows(database)) < len(due(made))
        await give_up_report(database, dead)
        assert not await due_reports(database, 10)
        await shift_clock(database, made.chain.head.timestamp_s - time.time())  # the head is new
        assert not {"VaulteventsReportPending", "VaulteventsReportOld"} & await raised(database)
        (report,) = await find_reports(database, dead)
        reading.gateway.troubles.clear()
        await reading.resolver.resolve(report)
        assert await rows(database) == due(made)


@pytest.mark.parametrize(
    "trouble", [Trouble.HTTP_500, Trouble.HTML, Trouble.WRONG_FILE, Trouble.TRUNCATED, Trouble.GZIP_BOMB]
)
async def test_dead_gateways_lose_nothing_also_of_superseded_reports(database: Database, trouble: Trouble) -> None:
    made = simulation()
    await register(database, made)
    async with oracle(database, made) as reading:
        await open_at(database, made, 10)
        reading.gateway.trouble = trouble
        await reading.follow()
        assert await rows(database) == {}
        logs = LogsSource(reading.source._chain)
        await cursors.open_stream(database, "logs", 0, None)
        await read_to_head(logs, reading.outbox, 25)
        funded = await rows(database)
        assert len(funded) > 10, "other streams do not wait"
        live = await reading.outbox.live("reports")
        assert live is not None and live.position == made.chain.finalized_number, "the stream itself goes on"
        for _ in range(10):
            made.step()
        await reading.follow()
        assert await rows(database) == funded
        reading.gateway.trouble = None
        await shift_clock(database, 3600)  # an hour later all are due again
        await reading.follow()
        assert await rows(database) == {**funded, **due(made)}
