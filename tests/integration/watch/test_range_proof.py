"""`audit chain`: what was taken out of the outbox, put into it or changed in it is found, by id (rules I2 and I6)."""

from __future__ import annotations

import hashlib

import pytest

from lying_node import Lie, LyingServer
from simulation_fixtures import add_accounts, add_vault, open_at, read_to_head, register, whole
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.core.errors import InputError, NodeFault
from vaultevents.core.logs import TOPICS
from vaultevents.core.spans import Span
from vaultevents.core.units import Address
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault, Faults
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import cursors
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.watch import range_proof
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.range_proof import GapProof, prove
from vaultevents.watch.reports import ReportsSource

pytestmark = pytest.mark.integration

QUICK = ExecutionOptions(retry_wait_s=0.01)


@pytest.fixture(scope="module")
def made() -> Simulation:
    simulation = Simulation(7, report_every=12)
    simulation.history(120, 150)
    return simulation


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_proof, "SPAN_BLOCKS", 25)


async def read_all(database: Database, simulation: Simulation) -> None:
    """The daemon's work: both streams to the head."""
    server = ExecutionServer(simulation.chain)
    try:
        async with ExecutionChain([await server.start()], head=HeadPolicy(), options=QUICK) as chain:
            await open_at(database, simulation, 80)
            await cursors.open_stream(database, "reports", 80, None)
            for source in (LogsSource(chain), ReportsSource(chain, {Address(simulation.lazy_oracle)})):
                await read_to_head(source, Outbox(database))
    finally:
        await server.stop()


async def proof(
    database: Database, simulation: Simulation, span: Span | None = None, server: ExecutionServer | None = None
) -> GapProof:
    node = server or ExecutionServer(simulation.chain)
    try:
        async with ExecutionChain([await node.start()], head=HeadPolicy(), options=QUICK) as chain:
            return await prove(chain, database, span or whole(simulation), {Address(simulation.lazy_oracle)})
    finally:
        await node.stop()


def contract_events(simulation: Simulation) -> dict[tuple[str, str], bytes]:
    return simulation.expected(event_types=["funding_received", "withdrawal_claimed"])


async def test_a_range_that_was_read_is_whole_and_its_digests_are_those_of_the_chain(
    any_database: Database, made: Simulation
) -> None:
    await register(any_database, made)
    await read_all(any_database, made)
    found = await proof(any_database, made)
    truth = contract_events(made)
    assert found.is_whole
    assert (found.events.same, set(found.events.counts.values())) == (len(truth), {0})
    assert found.reports is not None and found.reports.same == len(made.report_files) - 1 > 5
    lines = (
        b"%b %b %b\n" % (account.encode(), event_id.encode(), truth[account, event_id])
        for account, event_id in sorted(truth)
    )
    assert found.events_digest == hashlib.sha256(b"".join(lines)).hexdigest()
    facts = made.chain.logs(0, whole(made).last, TOPICS)
    reported = "".join(
        f"{one.block.number} 0x{one.block.hash.hex()} 0x{one.tx_hash.hex()} {one.log_index} 0x{one.log.address.hex()} "
        f"{','.join('0x' + topic.hex() for topic in one.log.topics)} 0x{one.log.data.hex()}\n"
        for one in facts
    )
    assert (found.facts, found.facts_digest) == (len(facts), hashlib.sha256(reported.encode()).hexdigest())
    assert (found.hashes_rebuilt, found.roots_rebuilt) == (len(found.span), found.blocks_read)


async def test_one_deleted_one_forged_and_one_invented_row_are_found_by_their_ids(
    database: Database, made: Simulation
) -> None:
    await register(database, made)
    await read_all(database, made)
    deleted, moved, forged = sorted(event_id for _, event_id in contract_events(made))[:3]
    async with database.transaction() as connection:
        await connection.execute("delete from events where id = $1", deleted)
        await connection.execute("update events set body = body || ' '::bytea where id = $1", forged)
        await connection.execute("update events set vault_id = 'another' where id = $1", moved)
        await connection.execute(
            "insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body,"
            " suppressed, filter_revision) select account_id, 'funding_received_acme_0XINVENTED', vault_id, event_type,"
            " 50, created_at_ms, encoding, body, suppressed, filter_revision from events where id = $1",
            forged,
        )
        report = await connection.fetchrow("delete from reports where id = (select min(id) from reports) returning *")
        await connection.execute("update reports set cid = 'bafyother' where id = (select max(id) from reports)")
    found = await proof(database, made)
    assert {kind: sorted(ids) for kind, ids in found.events.shown.items()} == {
        "missing": [deleted],
        "extra": ["funding_received_acme_0XINVENTED"],
        "different": sorted((moved, forged)),
        "near_head": [],
    }
    assert found.reports is not None and not found.is_whole
    assert found.reports.shown["missing"] == [f"report in block {report['block_number']}, log {report['log_index']}"]
    assert found.reports.counts == {"missing": 1, "extra": 0, "different": 1, "near_head": 0}


async def test_rows_that_were_first_seen_near_the_head_are_counted_apart(database: Database, made: Simulation) -> None:
    await register(database, made)
    await read_all(database, made)
    kept, orphaned = sorted(event_id for _, event_id in contract_events(made))[:2]
    async with database.transaction() as connection:
        await connection.execute(
            "update events set near_head = true, created_at_ms = created_at_ms + 12000 where id = $1", kept
        )
        await connection.execute(
            "update events set near_head = true, orphaned_at = db_now(), id = id || 'X' where id = $1", orphaned
        )
    found = await proof(database, made)
    assert (sorted(found.events.shown["near_head"]), found.events.counts["different"]) == ([kept, f"{orphaned}X"], 0)
    assert (found.events.counts["extra"], found.events.shown["missing"]) == (0, [orphaned])


async def test_the_digest_of_the_facts_is_the_same_whoever_is_registered(
    database: Database, any_database: Database, made: Simulation
) -> None:
    await register(database, made)
    await add_accounts(any_database, made.registrations)
    await add_vault(any_database, made.registrations[1])
    for one in (database, any_database):
        await read_all(one, made)
    first, second = await proof(database, made), await proof(any_database, made)
    assert first.is_whole and second.is_whole
    assert first.facts_digest == second.facts_digest
    assert first.events_digest != second.events_digest
    part = await proof(database, made, Span(0, 60))
    assert (part.facts_digest, part.span) != (first.facts_digest, first.span)


async def test_another_chain_has_another_digest(database: Database, made: Simulation) -> None:
    await register(database, made)
    await read_all(database, made)
    other = Simulation(8, report_every=12)
    other.history(120, 150)
    here, there = await proof(database, made), await proof(database, other)
    assert here.facts_digest != there.facts_digest
    assert not there.is_whole


async def test_a_node_that_lies_in_every_eth_getlogs_changes_nothing(database: Database, made: Simulation) -> None:
    await register(database, made)
    await read_all(database, made)
    liar = ExecutionServer(made.chain, faults=Faults(1, {Fault.EMPTY_LOGS: 1.0}))
    assert (await proof(database, made, server=liar)).is_whole
    shaky = ExecutionServer(made.chain, faults=Faults(1, {Fault.ERROR: 0.01}))
    assert (await proof(database, made, server=shaky)).is_whole
    unlinked = ExecutionServer(made.chain, faults=Faults(1))
    unlinked.faults.once(Fault.UNLINKED_PARENT, 30)
    with pytest.raises(NodeFault, match="does not hash to the hash given for it"):
        await proof(database, made, server=unlinked)
    with pytest.raises(NodeFault, match="is not linked to block"):
        await proof(database, made, server=LyingServer(made, Lie.FORGED_BLOCK))


async def test_what_no_stream_has_begun_to_read_is_compared(database: Database, made: Simulation) -> None:
    await register(database, made)
    empty = await proof(database, made)
    assert (empty.is_whole, empty.events.counts["missing"]) == (False, len(contract_events(made)))


async def test_what_is_not_final_or_not_read_is_refused_with_what_to_do(database: Database, made: Simulation) -> None:
    last = whole(made).last
    with pytest.raises(InputError, match=f"block {last + 1} is not final yet: audit up to {last}"):
        await proof(database, made, Span(0, last + 1))
    await register(database, made)
    await open_at(database, made, 80)
    await cursors.open_stream(database, "reports", 80, None)
    with pytest.raises(InputError, match="read up to block 80"):
        await proof(database, made)
    with pytest.raises(InputError, match=r"a backfill of the stream 'logs' still reads the blocks 1\.\.80"):
        await proof(database, made, Span(0, 40))
