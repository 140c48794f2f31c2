"""The audit behind a backfill: what a node hid is stored late, once, and delivered; nothing is removed (rule I6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from raised_conditions import forget_counts, let_counts_pass, raised_by_process
from simulation_fixtures import (
    add_accounts,
    add_vault,
    drive,
    in_background,
    open_at,
    read_to_head,
    reading,
    register,
    rows,
)
from store_factories import assert_ledger, values, webhook
from timeouts import until_true
from vaultevents import metrics
from vaultevents.chain.execution.client import ExecutionOptions
from vaultevents.chain.execution.log_range import LogQuery
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.units import Address
from vaultevents.devnet.blocks import PlacedLog
from vaultevents.devnet.chain import At, Lag
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.node import Node
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.cursors import open_audits, open_stream
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.background_audit import AuditSource
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.reports import ReportsSource
from vaultevents.watch.streams import Steps, follow, logs_stream
from vaultevents.watch.wakeup import Wakeup

pytestmark = pytest.mark.integration

QUICK = ExecutionOptions(retry_wait_s=0.01, set_aside_s=0.05)
BACKFILLED = 90
GAP = range(10, 41)
FINDINGS = ("missing", "different", "without_log")


@pytest.fixture
def made() -> Simulation:
    simulation = Simulation(7)
    simulation.history(120, 150)
    return simulation


class Forgetful(Node):
    """Gives nothing of some blocks for a range of several, as a node does whose index has a gap."""

    def logs(self, query: Any) -> list[PlacedLog]:
        found = super().logs(query)
        is_range = "blockHash" not in query and query["fromBlock"] != query["toBlock"]
        return [item for item in found if not (is_range and item.block.number in GAP)]


def forgetful(simulation: Simulation) -> ExecutionServer:
    server = ExecutionServer(simulation.chain)
    server.node = Forgetful(simulation.chain)
    return server


async def audited(source: LogsSource | ReportsSource, outbox: Outbox, step: int = 20) -> list[dict[str, Any]]:
    """Let the audit of each node pass once from where it stands; return what was logged as errors."""
    nodes = source._chain.nodes
    await open_audits(outbox.database, source.stream, nodes)
    with capture_logs() as logs:
        for node in nodes:
            cursor = await outbox.audit(source.stream, node)
            await drive(AuditSource(source, outbox, source.head), outbox, cursor, step)
    return [dict(line) for line in logs if line["log_level"] == "error"]


async def audit_of(source: LogsSource, outbox: Outbox) -> Cursor:
    """The audit cursor of the preferred node."""
    return await outbox.audit("logs", source._chain.nodes[0])


async def backfilled(database: Database, simulation: Simulation, source: LogsSource) -> Outbox:
    outbox = Outbox(database)
    await register(database, simulation)
    await webhook(database)
    await open_at(database, simulation, BACKFILLED)
    await read_to_head(source, outbox)
    return outbox


async def test_what_a_lone_node_hid_from_the_backfill_is_stored_once_and_delivered(
    any_database: Database, made: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_counts(monkeypatch)
    async with reading(forgetful(made), options=QUICK) as source:
        outbox = await backfilled(any_database, made, source)
        hidden = made.expected().keys() - (await rows(any_database)).keys()
        assert hidden == made.expected(through=GAP[-1]).keys() - made.expected(through=GAP[0] - 1).keys() != set()
        reported = await audited(source, outbox)
        assert raised_by_process() == {"VaulteventsAuditFinds", "VaulteventsNodeContradicts"}
        assert await rows(any_database) == made.expected()
        assert {line["event"] for line in reported} == {"events_were_missing"}
        assert sum(line["number"] for line in reported) == len(hidden)
        assert {item_id for line in reported for item_id in line["ids"]} <= {event_id for _, event_id in hidden}
        await assert_ledger(any_database)
        due = [event_id for account, event_id in made.expected() if account == "acme"]
        sent = await values(any_database, "select e.id from deliveries d join events e on e.seq = d.event_seq")
        assert sorted(sent) == sorted(due)
        async with any_database.transaction() as connection:
            await connection.execute("update cursors set position = first - 1, anchor = null where kind = 'audit'")
        let_counts_pass(monkeypatch)
        assert await audited(source, outbox) == []
        assert "VaulteventsAuditFinds" not in raised_by_process()


async def test_an_audit_of_a_lone_node_without_blooms_would_not_see_it(
    database: Database, made: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogQuery, "may_be_in", lambda *_: False)
    async with reading(forgetful(made), options=QUICK) as source:
        outbox = await backfilled(database, made, source)
        assert await audited(source, outbox, step=50) == []
        assert await rows(database) != made.expected()


async def test_what_one_node_hid_while_the_other_was_away_is_found_when_that_one_is_audited(
    database: Database, made: Simulation
) -> None:
    liar, honest = forgetful(made), ExecutionServer(made.chain)
    honest.faults.rates = {Fault.HTTP_500: 1.0}
    async with reading(liar, honest, options=QUICK) as source:
        outbox = await backfilled(database, made, source)
        hidden = made.expected().keys() - (await rows(database)).keys()
        assert hidden
        honest.faults.stop()
        errors = await audited(source, outbox)
        assert await rows(database) == made.expected()
        assert {line["event"] for line in errors} == {"events_were_missing"}
        assert sum(line["number"] for line in errors) == len(hidden)
        await assert_ledger(database)
        named = source._chain.node_states()[0]
        assert named.state != "open" or "hides logs" in (named.problem or "")
        async with database.transaction() as connection:
            await connection.execute("update cursors set position = first - 1, anchor = null where kind = 'audit'")
        disproved = source._chain.counters.claims_disproved
        assert await audited(source, outbox) == [], "what is stored is proven although this node hides it"
        assert source._chain.counters.claims_disproved > disproved
    assert await rows(database) == made.expected()


async def test_the_union_hides_nothing_from_a_backfill_so_audits_find_nothing(
    database: Database, made: Simulation
) -> None:
    async with reading(forgetful(made), ExecutionServer(made.chain), options=QUICK) as source:
        outbox = await backfilled(database, made, source)
        assert await rows(database) == made.expected()
        assert await audited(source, outbox) == []


async def test_each_node_has_an_audit_of_its_own_and_one_that_is_gone_has_none(
    database: Database, made: Simulation
) -> None:
    outbox = Outbox(database)
    await register(database, made)
    await open_at(database, made, BACKFILLED)

    async def audits() -> dict[str, int]:
        async with database.transaction() as connection:
            found = await connection.fetch("select node, position from cursors where kind = 'audit'")
        return {row["node"]: row["position"] for row in found}

    first = min(registration.first_block for registration in made.registrations)
    await open_audits(database, "logs", ["one", "two"])
    assert await audits() == {"one": first - 1, "two": first - 1}
    one = await outbox.audit("logs", "one")
    async with database.transaction() as connection:
        await connection.execute("update cursors set position = 50 where id = $1", one.id)
    await open_audits(database, "logs", ["one", "three"])
    assert await audits() == {"one": 50, "three": first - 1}
    assert (await outbox.audit("logs", "one")).node == "one"
    with pytest.raises(DatabaseUnavailable):
        await outbox.audit("logs", "two")


async def test_an_audit_from_before_there_was_one_for_each_node_is_continued_by_all(
    database: Database, made: Simulation
) -> None:
    await register(database, made)
    await open_at(database, made, BACKFILLED)
    async with database.transaction() as connection:
        await connection.execute("insert into cursors (stream, kind, first, position) values ('logs', 'audit', 1, 33)")
    await open_audits(database, "logs", ["one", "two"])
    async with database.transaction() as connection:
        found = await connection.fetch("select node, position from cursors where kind = 'audit' order by node")
    assert [tuple(row) for row in found] == [("one", 33), ("two", 33)]


async def test_altered_and_invented_rows_are_reported_and_counted_and_left(
    database: Database, made: Simulation
) -> None:
    async with reading(ExecutionServer(made.chain), options=QUICK) as source:
        outbox = await backfilled(database, made, source)
        altered = min(event_id for account, event_id in made.expected() if account == "acme")
        async with database.transaction() as connection:
            await connection.execute("update events set body = 'forged' where account_id = 'acme' and id = $1", altered)
            await connection.execute("update events set id = id || 'X' where seq = (select max(seq) from events)")
        before = await rows(database)
        metrics.taken()
        reported = await audited(source, outbox)
    assert sorted(line["event"] for line in reported) == ["events_differ", "events_were_missing", "events_without_log"]
    assert next(line["ids"] for line in reported if line["event"] == "events_differ") == (altered,)
    after = await rows(database)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1
    counted = metrics.text(None).decode().splitlines()
    assert {f'vaultevents_audit_findings_total{{kind="{kind}"}} 1.0' for kind in FINDINGS} <= set(counted)


async def test_published_reports_are_audited_likewise(database: Database) -> None:
    made = Simulation(5, report_every=12)
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
        reported = await audited(source, outbox)
        assert sorted(line["event"] for line in reported) == [
            *("events_differ", "events_were_missing", "events_were_missing", "events_without_log")
        ]
        assert any(f"report in block {lost}, " in item_id for line in reported for item_id in line["ids"])
        pending = await values(database, "select state from reports where block_number = $1", lost)
        assert pending == ["pending"]


async def test_it_waits_for_backfills_and_finality_and_goes_back_for_a_vault_added_later(
    database: Database, made: Simulation
) -> None:
    async with reading(ExecutionServer(made.chain), options=QUICK) as source:
        outbox = Outbox(database)
        await add_accounts(database, made.registrations)
        first, *later = made.registrations
        await add_vault(database, first)
        await open_at(database, made, 60)
        assert await audited(source, outbox) == []
        assert (await audit_of(source, outbox)).position == first.first_block - 1, "the backfill has not begun"
        await read_to_head(source, outbox)
        made.chain.finalized = At(70)
        assert await audited(source, outbox) == []
        assert (await audit_of(source, outbox)).position == 70
        for registration in later:
            await add_vault(database, registration)
        held = await audit_of(source, outbox)
        assert (held.position, held.anchor) == (min(registration.first_block for registration in later) - 1, None)
        assert await audited(source, outbox) == []
        assert await audit_of(source, outbox) == held
        made.chain.finalized = Lag(2)
        await read_to_head(source, outbox)
        assert await audited(source, outbox) == []
        assert (await audit_of(source, outbox)).position == made.chain.finalized_number


async def test_the_daemon_s_streams_are_audited_at_the_rate_that_is_set(database: Database, made: Simulation) -> None:
    async with reading(forgetful(made), options=QUICK) as source:
        outbox = Outbox(database)
        await register(database, made)
        await open_at(database, made, BACKFILLED)
        stream = logs_stream(source._chain, Steps(50, 50, 0.02))

        async def has_read_two_spans() -> bool:
            return await rows(database) == made.expected() and (await audit_of(source, outbox)).position > 50

        begun_s = asyncio.get_running_loop().time()
        async with in_background(follow(stream, outbox, lambda _: None, Wakeup(), audit_per_s=20)):
            await until_true(has_read_two_spans)
            took_s = asyncio.get_running_loop().time() - begun_s
    assert took_s > 50 / 20, "the first span was followed by its pause"
