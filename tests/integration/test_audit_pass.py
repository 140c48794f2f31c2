"""The audit behind a backfill: what a lying node hid is stored late, once, and delivered; nothing is removed (I6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from patience import until_true
from store_stories import assert_ledger, values, webhook
from vaultevents import metrics
from vaultevents.chain.execution import ExecutionOptions
from vaultevents.core.units import Address
from vaultevents.devnet.blocks import PlacedLog
from vaultevents.devnet.chain import At, Lag
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.node import Node
from vaultevents.devnet.world import World
from vaultevents.store.cursors import open_audit, open_stream
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.audit import AuditSource
from vaultevents.watch.hint import Hint
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.reports import ReportsSource
from vaultevents.watch.streams import Steps, follow, logs_stream
from worlds import add_accounts, add_vault, drive, in_background, open_at, read_to_head, reading, register, rows

pytestmark = pytest.mark.integration

QUICK = ExecutionOptions(retry_wait_s=0.01, set_aside_s=0.05)
BACKFILLED = 90
GAP = range(10, 41)
FINDINGS = ("missing", "different", "without_log")


@pytest.fixture
def made() -> World:
    world = World(7)
    world.history(120, 150)
    return world


class Forgetful(Node):
    """Gives nothing of some blocks for a range of several, as a node does whose index has a gap."""

    def logs(self, query: Any) -> list[PlacedLog]:
        found = super().logs(query)
        is_range = "blockHash" not in query and query["fromBlock"] != query["toBlock"]
        return [one for one in found if not (is_range and one.block.number in GAP)]


def forgetful(world: World) -> ExecutionServer:
    server = ExecutionServer(world.chain)
    server.node = Forgetful(world.chain)
    return server


async def audited(source: LogsSource | ReportsSource, outbox: Outbox, step: int = 20) -> list[dict[str, Any]]:
    """One pass of the audit from where it stands; gives what it logged as errors."""
    await open_audit(outbox.database, source.stream)
    with capture_logs() as logs:
        await drive(AuditSource(source, outbox, source.head), outbox, await outbox.audit(source.stream), step)
    return [dict(line) for line in logs if line["log_level"] == "error"]


async def backfilled(database: Database, world: World, source: LogsSource) -> Outbox:
    outbox = Outbox(database)
    await register(database, world)
    await webhook(database)
    await open_at(database, world, BACKFILLED)
    await read_to_head(source, outbox)
    return outbox


async def test_what_a_lone_node_hid_from_the_backfill_is_stored_once_and_delivered(
    any_database: Database, made: World
) -> None:
    async with reading(forgetful(made), options=QUICK) as source:
        outbox = await backfilled(any_database, made, source)
        hidden = made.expected().keys() - (await rows(any_database)).keys()
        assert hidden == made.expected(through=GAP[-1]).keys() - made.expected(through=GAP[0] - 1).keys() != set()
        told = await audited(source, outbox)
        assert await rows(any_database) == made.expected()
        assert {line["event"] for line in told} == {"events_were_missing"}
        assert sum(line["number"] for line in told) == len(hidden)
        assert {one for line in told for one in line["ids"]} <= {event_id for _, event_id in hidden}
        await assert_ledger(any_database)
        due = [event_id for account, event_id in made.expected() if account == "acme"]
        sent = await values(any_database, "select e.id from deliveries d join events e on e.seq = d.event_seq")
        assert sorted(sent) == sorted(due)
        async with any_database.transaction() as connection:
            await connection.execute("update cursors set position = first - 1, anchor = null where kind = 'audit'")
        assert await audited(source, outbox) == []


async def test_an_audit_that_believes_ranges_would_not_see_it(
    database: Database, made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cursor, "every_header", property(lambda cursor: cursor.kind == "live"))
    async with reading(forgetful(made), options=QUICK) as source:
        outbox = await backfilled(database, made, source)
        assert await audited(source, outbox, step=50) == []
        assert await rows(database) != made.expected()


async def test_another_node_than_the_one_that_hid_it_is_asked_first(database: Database, made: World) -> None:
    liar, honest = forgetful(made), ExecutionServer(made.chain)
    async with reading(liar, honest, options=QUICK) as source:
        outbox = await backfilled(database, made, source)
        assert (await rows(database)).keys() < made.expected().keys()
        before = liar.calls["eth_getBlockByNumber"]
        await audited(source, outbox)
    assert await rows(database) == made.expected()
    assert liar.calls["eth_getBlockByNumber"] - before < 20, "it was asked for heads alone"
    assert source._chain.counters.node_faults == 0


async def test_altered_and_invented_rows_are_told_and_counted_and_left(database: Database, made: World) -> None:
    async with reading(ExecutionServer(made.chain), options=QUICK) as source:
        outbox = await backfilled(database, made, source)
        altered = min(event_id for account, event_id in made.expected() if account == "acme")
        async with database.transaction() as connection:
            await connection.execute("update events set body = 'forged' where account_id = 'acme' and id = $1", altered)
            await connection.execute("update events set id = id || 'X' where seq = (select max(seq) from events)")
        before = await rows(database)
        metrics.taken()
        told = await audited(source, outbox)
    assert sorted(line["event"] for line in told) == ["events_differ", "events_were_missing", "events_without_log"]
    assert next(line["ids"] for line in told if line["event"] == "events_differ") == (altered,)
    after = await rows(database)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1
    counted = metrics.text(None).decode().splitlines()
    assert {f'vaultevents_audit_findings_total{{kind="{kind}"}} 1.0' for kind in FINDINGS} <= set(counted)


async def test_published_reports_are_audited_likewise(database: Database) -> None:
    made = World(5, report_every=12)
    made.history(120)
    await register(database, made)
    async with reading(ExecutionServer(made.chain), options=QUICK) as logs:
        outbox, source = Outbox(database), ReportsSource(logs._chain, {Address(made.lazy_oracle)})
        await open_stream(database, "reports", BACKFILLED, None)
        await read_to_head(source, outbox)
        async with database.transaction() as connection:
            lost = await connection.fetchval(
                "delete from reports where id = (select min(id) from reports) returning block_number"
            )
            await connection.execute("update reports set cid = 'other' where id = (select max(id) from reports)")
            await connection.execute("update reports set log_index = 900 where id = (select min(id) from reports)")
        told = await audited(source, outbox)
        assert sorted(line["event"] for line in told) == [
            *("events_differ", "events_were_missing", "events_were_missing", "events_without_log")
        ]
        assert any(f"report in block {lost}, " in one for line in told for one in line["ids"])
        pending = await values(database, "select state from reports where block_number = $1", lost)
        assert pending == ["pending"]


async def test_it_waits_for_backfills_and_finality_and_goes_back_for_a_vault_added_later(
    database: Database, made: World
) -> None:
    async with reading(ExecutionServer(made.chain), options=QUICK) as source:
        outbox = Outbox(database)
        await add_accounts(database, made.registrations)
        first, *later = made.registrations
        await add_vault(database, first)
        await open_at(database, made, 60)
        assert await audited(source, outbox) == []
        assert (await outbox.audit("logs")).position == first.first_block - 1, "the backfill has not begun"
        await read_to_head(source, outbox)
        made.chain.finalized = At(70)
        assert await audited(source, outbox) == []
        assert (await outbox.audit("logs")).position == 70
        for one in later:
            await add_vault(database, one)
        held = await outbox.audit("logs")
        assert (held.position, held.anchor) == (min(one.first_block for one in later) - 1, None)
        assert await audited(source, outbox) == []
        assert await outbox.audit("logs") == held
        made.chain.finalized = Lag(2)
        await read_to_head(source, outbox)
        assert await audited(source, outbox) == []
        assert (await outbox.audit("logs")).position == made.chain.finalized_number


async def test_the_daemon_s_streams_are_audited_at_the_rate_that_is_set(database: Database, made: World) -> None:
    async with reading(forgetful(made), options=QUICK) as source:
        outbox = Outbox(database)
        await register(database, made)
        await open_at(database, made, BACKFILLED)
        stream = logs_stream(source._chain, Steps(50, 50, 0.02))

        async def has_read_two_spans() -> bool:
            return await rows(database) == made.expected() and (await outbox.audit("logs")).position > 50

        begun_s = asyncio.get_running_loop().time()
        async with in_background(follow(stream, outbox, lambda _: None, Hint(), audit_per_s=20)):
            await until_true(has_read_two_spans)
            took_s = asyncio.get_running_loop().time() - begun_s
    assert took_s > 50 / 20, "the first span was followed by its pause"
