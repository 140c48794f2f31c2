"""Logs that cannot be decoded: the stream goes on, nothing else is lost, a later version delivers them (rule C8)."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

import newer_form
from newer_form import odd_claim, odd_funding, odd_publication
from raised_conditions import raised
from reorgs import Reorganiser
from simulation_fixtures import add_vault, connected, drive, open_at, read_to_head, register
from simulation_fixtures import rows as stored
from store_factories import assert_ledger, deliveries_of, rows, shift_clock, values, webhook
from vaultevents import metrics
from vaultevents.chain.execution.client import ExecutionOptions
from vaultevents.chain.ipfs import IpfsClient, IpfsLimits
from vaultevents.core import logs as core_logs
from vaultevents.core.errors import InputError
from vaultevents.core.spans import Span
from vaultevents.core.units import Address
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.acts import Act, Claim, Funding, log_of
from vaultevents.devnet.blocks import Block, Log
from vaultevents.devnet.chain import Lag
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.gateway import Gateway
from vaultevents.devnet.simulation import Simulation
from vaultevents.egress import Guard
from vaultevents.store import accounts, gauges, outbox, quarantine, status
from vaultevents.store.cursors import open_audits, open_stream
from vaultevents.store.notices import claim_notices
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.quarantine import Changes, QuarantinedLog
from vaultevents.watch.background_audit import AuditSource
from vaultevents.watch.prefetch import Prefetcher
from vaultevents.watch.quarantine import read_again
from vaultevents.watch.range_proof import prove
from vaultevents.watch.reports import Resolver
from vaultevents.watch.streams import Steps, Stream, logs_stream, reports_stream
from vaultevents.watch.watcher import Advanced, Idle, advance

pytestmark = pytest.mark.integration

OPTIONS = ExecutionOptions(attempts=1, retry_wait_s=0.0)
STEPS = Steps(50, 50, 0.05)
PERSON, OTHER = b"\x51" * 20, b"\x52" * 20
WEI = 10**15
LIVE_FROM = 20


def simulation(blocks: int = 30, *, report_every: int | None = None) -> Simulation:
    made = Simulation(11, events_per_block=2, report_every=report_every)
    made.history(blocks, 2 * blocks)
    return made


def queue_of(made: Simulation, account: str) -> bytes:
    queue = next(vault.queue for vault in made.registrations if vault.account_id == account and vault.queue)
    assert queue is not None
    return queue


def claim(queue: bytes, request_id: int) -> Claim:
    return Claim(queue, 10**9 + request_id, PERSON, OTHER, WEI + request_id)


def mine(made: Simulation, logs: Sequence[Log], acts: Sequence[Act] = ()) -> Block:
    """Mine a block with one transaction that leaves these logs and, by the record of the chain, did `acts`."""
    transaction = made.chain.transaction(logs)
    made.acts[transaction.hash] = tuple(acts)
    return made.chain.mine([transaction])


def upgrade(made: Simulation, block: Block, acts: Sequence[Act], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the odd forms are known, and the record of the chain has what they say."""
    newer_form.install(monkeypatch.setattr)
    made.acts[block.transactions[0].hash] = tuple(acts)


def finalize(made: Simulation) -> None:
    for _ in range(4):
        made.step()


async def kept(database: Database, state: quarantine.State | None = None) -> list[QuarantinedLog]:
    return (await quarantine.page(database, 100_000, state=state))[::-1]


def problems(made: Simulation, places: Collection[tuple[int, int]], found: Sequence[QuarantinedLog]) -> list[str]:
    """How open rows differ from the logs of the chain at these places (block, log index)."""
    said = []
    by_place = {(row.block_number, row.log_index): row for row in found}
    for number, index in places:
        (placed,) = [log for log in made.chain.logs(number, number) if log.log_index == index]
        row = by_place.pop((number, index), None)
        if row is None:
            said.append(f"log {index} of block {number} has no row")
            continue
        if (row.block_hash, row.tx_hash, row.address) != (placed.block.hash, placed.tx_hash, placed.log.address):
            said.append(f"row {row.id} is of another log")
        if (row.topics, row.data, row.data_bytes) != (placed.log.topics, placed.log.data, len(placed.log.data)):
            said.append(f"row {row.id} has other bytes")
        if row.state != "open":
            said.append(f"row {row.id} is {row.state}")
    return said + [f"row {row.id} is of a log that was not expected" for row in by_place.values()]


@asynccontextmanager
async def followed(database: Database, made: Simulation) -> AsyncIterator[tuple[Outbox, Stream]]:
    """The simulation registered, with a webhook for each account; live from a block on, the rest is a backfill."""
    await register(database, made)
    for account in sorted({vault.account_id for vault in made.registrations}):
        await webhook(database, account_id=account)
    await open_at(database, made, LIVE_FROM)
    async with connected(ExecutionServer(made.chain), options=OPTIONS) as chain:
        yield Outbox(database), logs_stream(chain, STEPS)


async def replayed(stream: Stream, writer: Outbox, first: int, last: int, step: int = 7) -> list[Advanced]:
    cursor = await writer.begin_replay(stream.source.stream, Span(first, last))
    try:
        return await drive(stream.source, writer, cursor, step)
    finally:
        await writer.end_replay(cursor)


async def audited(stream: Stream, writer: Outbox) -> list[Advanced]:
    """The audit over the whole chain, from its beginning."""
    name = stream.source.stream
    assert stream.audit is not None
    (node,) = stream.audit.nodes
    await open_audits(writer.database, name, [node])
    async with writer.database.transaction() as connection:
        await connection.execute("update cursors set position = first - 1, anchor = null where kind = 'audit'")
    source = AuditSource(stream.audit.source, writer, stream.audit.final)
    return await drive(source, writer, await writer.audit(name, node), 9)


def findings(steps: Sequence[Advanced]) -> int:
    compared = [step.committed.compared for step in steps]
    return sum(len(found.missing) + len(found.extra) + len(found.different) for found in compared if found)


async def test_the_stream_goes_on_and_an_upgraded_version_delivers_exactly_the_event(
    any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, made = any_database, simulation()
    withheld = claim(queue_of(made, "acme"), 1)
    block = mine(made, [odd_claim(withheld)])
    finalize(made)
    async with followed(database, made) as (writer, stream):
        with capture_logs() as lines:
            await read_to_head(stream.source, writer)
        live = await writer.live("logs")
        assert live is not None and live.position == made.chain.finalized_number
        assert live.position > block.number
        before = made.expected()
        assert await stored(database) == before, "everybody has all other events"
        (row,) = await kept(database)
        assert problems(made, [(block.number, 0)], [row]) == []
        assert row.reason == "it has 1 topics and 128 bytes of data, not 4 and 32"
        (line,) = [line for line in lines if line["event"] == "log_quarantined"]
        assert (line["block"], line["number"], line["stream"]) == (block.number, 1, "logs")

        early = await read_again(stream, writer, block.number, None)
        assert (early.inserted, early.identical, early.resolved, early.is_done) == (0, 0, (), False)
        assert [left.id for left in early.left] == [row.id]

        upgrade(made, block, [withheld], monkeypatch)
        owners = [vault.account_id for vault in made.registrations if vault.queue == withheld.queue]
        late = await read_again(stream, writer, block.number, None)
        assert (late.inserted, late.identical, late.left, late.is_done) == (len(owners), 0, (), True)
        assert [resolved.id for resolved in late.resolved] == [row.id]
        assert len(made.expected()) == len(before) + len(owners)
        assert await stored(database) == made.expected()
        for (webhook_id,) in [tuple(found.values()) for found in await rows(database, "select id from webhooks")]:
            (account,) = await values(database, "select account_id from webhooks where id = $1", webhook_id)
            due = sorted(event_id for owner, event_id in made.expected() if owner == account)
            assert await deliveries_of(database, webhook_id) == due
        await assert_ledger(database)
        again = await read_again(stream, writer, block.number, None)
        assert (again.inserted, again.identical, again.resolved, again.is_done) == (0, len(owners), (), True)
    (resolved,) = await kept(database, "resolved")
    assert resolved.id == row.id


async def test_on_the_vault_s_removal_nothing_changes_for_what_was_withheld(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = simulation()
    queue = queue_of(made, "acme")
    block = mine(made, [odd_claim(claim(queue, 1))])
    finalize(made)
    async with followed(database, made) as (writer, stream):
        await read_to_head(stream.source, writer)
        for vault in made.registrations:
            if vault.queue == queue:
                await accounts.remove_vault(database, vault.account_id, vault.vault_id, made.chain.head.number)
        mine(made, [odd_claim(claim(queue, 2))])
        finalize(made)
        await read_to_head(stream.source, writer)
        assert problems(made, [(block.number, 0)], await kept(database)) == [], "of a removed vault nothing is added"
        upgrade(made, block, [claim(queue, 1)], monkeypatch)
        assert (await read_again(stream, writer, block.number, None)).inserted > 0


async def test_replays_audits_and_backfills_leave_the_same_rows(
    any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, made = any_database, simulation(12)
    queues = [queue_of(made, "acme"), queue_of(made, "borealis")]
    blocks = [mine(made, [odd_claim(claim(queue, 10 * n + at)) for at in range(3)]) for n, queue in enumerate(queues)]
    made.history(16, 20)
    blocks += [
        mine(made, [odd_claim(claim(queue, 100)), log_of(claim(queue, 101))], [claim(queue, 101)]) for queue in queues
    ]
    finalize(made)
    places = [(block.number, at) for block in blocks[:2] for at in range(3)] + [
        (block.number, 0) for block in blocks[2:]
    ]
    async with followed(database, made) as (writer, stream):
        await read_to_head(stream.source, writer)
        assert blocks[0].number < LIVE_FROM < blocks[2].number
        before = await kept(database)
        assert problems(made, places, before) == []
        head = await stream.source.head()
        metrics.taken()
        steps = [*await replayed(stream, writer, 1, head), *await replayed(stream, writer, 5, head, step=1)]
        audit = await audited(stream, writer)
        assert sum(step.committed.inserted for step in [*steps, *audit]) == findings(audit) == 0
        assert not any(step.committed.quarantine != Changes() for step in [*steps, *audit])
        assert await kept(database) == before
        assert [key for key, _ in metrics.taken() if key[0] == metrics.QUARANTINED.name] == []
        async with connected(ExecutionServer(made.chain), options=OPTIONS) as chain:
            proof = await prove(chain, database, Span(1, head), ())
        assert (proof.is_whole, proof.undecodable) == (True, len(places))

        newer_form.install(monkeypatch.setattr)
        audit = await audited(stream, writer)
        assert findings(audit) == 0, "what was withheld was not missed"
        assert sum(step.committed.inserted for step in audit) > 0
        assert sum(step.committed.quarantine.resolved for step in audit) == len(places)
        assert [row.state for row in await kept(database)] == ["resolved"] * len(places)
        monkeypatch.undo()
        await replayed(stream, writer, 1, head)
        assert {row.state for row in await kept(database)} == {"open"}, "of a version that does not know them"


async def test_an_event_that_was_never_withheld_is_a_finding_of_the_audit(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of what an audit does not report: without the row it is reported."""
    made = simulation()
    mine(made, [odd_claim(claim(queue_of(made, "acme"), 1))])
    finalize(made)
    async with followed(database, made) as (writer, stream):
        await read_to_head(stream.source, writer)
        async with database.transaction() as connection:
            await connection.execute("delete from quarantined_logs")
        newer_form.install(monkeypatch.setattr)
        assert findings(await audited(stream, writer)) > 0


async def test_a_thousand_undecodable_logs_a_block_cost_a_hundred_rows_and_nobody_else_anything(
    database: Database,
) -> None:
    made = simulation(10)
    queue = queue_of(made, "acme")
    blocks = []
    for number in range(50):
        odd = [odd_claim(claim(queue, 1000 * number + at)) for at in range(1000)]
        vaults = [vault.address for vault in made.registrations if vault.account_id == "borealis"]
        funding = Funding(vaults[number % len(vaults)], WEI + number)
        blocks.append(mine(made, [*odd[:500], log_of(funding), *odd[500:]], [funding]))
    finalize(made)
    async with followed(database, made) as (writer, stream):
        with capture_logs() as lines:
            await read_to_head(stream.source, writer)
        assert await stored(database) == made.expected()
        found = await kept(database)
        assert len(found) == 50 * 100
        places = [(block.number, at) for block in blocks for at in range(100)]
        assert problems(made, places, found) == []
        assert [row.more for row in found] == ([0] * 99 + [900]) * 50
        assert (await status.read(database)).quarantine_open == 50_000
        assert (await gauges.read(database)).quarantine_open == 50_000
        spans_read = len([line for line in lines if line["event"] == "log_quarantined"])
        assert spans_read <= 50
        assert len(await rows(database, "select id from notices where kind = 'logs_quarantined'")) == 1
        await replayed(stream, writer, blocks[-3].number, await stream.source.head())
        assert await kept(database) == found
    lost = len(made.expected().keys() - (await stored(database)).keys())
    print(f"\n50,000 undecodable logs: {len(found)} rows, {spans_read} log lines, 1 notice, {lost} events lost")


async def test_what_has_no_row_of_its_own_is_delivered_with_its_block(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = simulation(25)
    claims = [claim(queue_of(made, "acme"), at) for at in range(150)]
    block = mine(made, [odd_claim(one) for one in claims])
    finalize(made)
    async with followed(database, made) as (writer, stream):
        await read_to_head(stream.source, writer)
        assert [row.more for row in await kept(database)] == [0] * 99 + [50]
        assert "VaulteventsLogsQuarantined" in await raised(database)
        upgrade(made, block, claims, monkeypatch)
        assert (await read_again(stream, writer, block.number, None)).is_done
        assert await stored(database) == made.expected()
        assert (await status.read(database)).quarantine_open == 0
        assert "VaulteventsLogsQuarantined" not in await raised(database)


async def test_of_a_vault_in_a_transaction_nothing_is_sent_until_all_of_it_can_be_decoded(
    any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, made = any_database, simulation(25)
    acme, borealis = (
        next(vault.address for vault in made.registrations if vault.account_id == account)
        for account in ("acme", "borealis")
    )
    fundings = [Funding(acme, 3 * WEI), Funding(borealis, 5 * WEI), Funding(acme, 4 * WEI)]
    logs = [log_of(fundings[0]), log_of(fundings[1]), odd_funding(fundings[2])]
    block = mine(made, logs)
    finalize(made)
    async with followed(database, made) as (writer, stream):
        await read_to_head(stream.source, writer)
        found = await kept(database)
        assert [(row.log_index, row.reason) for row in found] == [
            (0, "log 2 of the same vault in the same transaction cannot be decoded"),
            (2, "it has 2 topics and 0 bytes of data, not 1 and 32"),
        ]
        before = await stored(database)
        upgrade(made, block, fundings, monkeypatch)
        due = made.expected()
        late = {key for key in due.keys() - before.keys() if key[1].startswith("funding_received_acme_")}
        owners = [vault.account_id for vault in made.registrations if vault.address == acme]
        assert len(due.keys() - before.keys()) == len(owners), "the other vault's position is what it was"
        assert before.items() <= due.items()
        assert len(late) == 1
        assert b'"amount_wei":"7000000000000000"' in due[late.pop()]
        done = await read_again(stream, writer, block.number, None)
        assert (done.inserted, done.different, done.is_done) == (len(owners), (), True)
        assert await stored(database) == due


async def test_a_partial_sum_would_be_another_event_after_the_upgrade(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test before: a build that sends what it can decode is found out by it."""
    made = simulation(25)
    vault = made.registrations[0].address
    block = mine(made, [log_of(Funding(vault, 3 * WEI)), odd_funding(Funding(vault, 4 * WEI))])
    finalize(made)
    whole = core_logs._withheld
    async with followed(database, made) as (writer, stream):
        with monkeypatch.context() as broken:
            broken.setattr(core_logs, "_withheld", lambda parts: whole(parts) if len(parts) == 1 else [])
            broken.setattr(core_logs, "_amount_wei", lambda log: int.from_bytes(log.data))
            await read_to_head(stream.source, writer)
        newer_form.install(monkeypatch.setattr)
        done = await read_again(stream, writer, block.number, None)
    assert done.different
    assert not done.is_done


async def test_a_vault_that_is_registered_later_has_its_rows_from_its_first_block_on(database: Database) -> None:
    made = simulation(12)
    first, *_ = made.registrations
    queue = queue_of(made, "acme")
    blocks = [mine(made, [odd_claim(claim(queue, at))]) for at in range(12)]
    finalize(made)
    start = blocks[6].number
    async with connected(ExecutionServer(made.chain), options=OPTIONS) as chain:
        stream, writer = logs_stream(chain, STEPS), Outbox(database)
        for account in ("acme", "borealis"):
            await accounts.add_account(database, account, account)
        await add_vault(database, next(vault for vault in made.registrations if vault.account_id == "borealis"))
        await open_at(database, made, LIVE_FROM)
        await read_to_head(stream.source, writer)
        assert await kept(database) == []
        await add_vault(database, first._replace(queue=queue, first_block=start))
        await read_to_head(stream.source, writer)
        expected = [(block.number, 0) for block in blocks if block.number >= start]
        assert problems(made, expected, await kept(database)) == []
        await replayed(stream, writer, 1, await stream.source.head(), step=3)
        assert problems(made, expected, await kept(database)) == [], "whatever the spans are"


async def test_a_reorganisation_takes_the_rows_of_its_blocks_with_it(database: Database) -> None:
    made = simulation(40)
    made.chain.finalized = Lag(12)
    await register(database, made)
    await open_at(database, made, made.chain.head.number - 12)
    queue = queue_of(made, "acme")
    turns, writer = Reorganiser(made, random.Random(3), vanishing=0.3), Outbox(database)
    seen: set[tuple[int, int]] = set()
    async with connected(ExecutionServer(made.chain), options=OPTIONS, head="latest-0") as chain:
        stream = logs_stream(chain, STEPS)
        for turn in range(25):
            mine(made, [odd_claim(claim(queue, 2 * turn)), odd_claim(claim(queue, 2 * turn + 1))])
            made.step()
            for _ in range(3):
                await follow(stream, writer)
            turns.reorg(1 + turn % 8)
            made.step()
            await follow(stream, writer)
            odd = {
                (placed.block.number, placed.log_index)
                for placed in made.chain.logs(LIVE_FROM, made.chain.head.number)
                if placed.log.address == queue and len(placed.log.topics) == 1
            }
            assert problems(made, sorted(odd), await kept(database)) == []
            seen |= odd
            last = max((number for number, _ in odd), default=0)
            if last > await stream.source.head():
                with pytest.raises(InputError, match=f"block {last} is not final yet"):
                    await read_again(stream, writer, last, None)
    assert len(seen) > 50, "rows came and went"


async def follow(stream: Stream, writer: Outbox) -> None:
    """The live cursor to the head, over rewinds."""
    for _ in range(200):
        cursor = await writer.live(stream.source.stream)
        assert cursor is not None
        with closing(Prefetcher(stream.source, 3)) as reader:
            if isinstance(await advance(reader, writer, cursor), Idle):
                return
    raise AssertionError("it does not come to an end")


async def test_a_report_that_cannot_be_decoded_holds_up_no_other(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = simulation(40, report_every=8)
    publication = made._oracle._publish(made._oracle._known())
    block = mine(made, [odd_publication(publication)])
    made.history(20)
    finalize(made)
    await register(database, made)
    await open_stream(database, "reports", 10, None)
    writer, gateway = Outbox(database), Gateway(made.report_files)
    guard = Guard(UrlRules(allow=(parse_allow("127.0.0.0/8:*"),)))
    limits = IpfsLimits(attempt_s=1.0, gateway_s=2.0, retry_wait_s=0.01, set_aside_s=0.05)
    url = await gateway.start()
    try:
        async with (
            connected(ExecutionServer(made.chain), options=OPTIONS) as chain,
            IpfsClient([url], guard=guard, cache_dir=tmp_path, limits=limits) as files,
        ):
            stream = reports_stream(chain, [Address(made.lazy_oracle)], STEPS)
            resolver = Resolver(writer, files, 0.05)
            await read_to_head(stream.source, writer)
            (row,) = await kept(database)
            assert (row.stream, row.block_number, row.address) == ("reports", block.number, made.lazy_oracle)
            published = await values(database, "select count(*)::int from reports")
            assert findings(await audited(stream, writer)) == 0
            upgrade(made, block, [publication], monkeypatch)
            done = await read_again(stream, writer, block.number, resolver)
            due = [
                key
                for key in made.expected(event_types=["report_update_available"])
                if publication_of(key, publication)
            ]
            assert (done.inserted, done.is_done, len(done.resolved)) == (len(due), True, 1)
            assert sorted(await stored(database)) == sorted(due)
            assert await values(database, "select count(*)::int from reports") == [published[0] + 1]
    finally:
        await gateway.stop()


def publication_of(key: tuple[str, str], publication: object) -> bool:
    return key[1].endswith(f"_{publication.timestamp_s}")  # type: ignore[attr-defined]


async def test_an_operator_is_notified_once_a_day_for_each_address(database: Database) -> None:
    made = simulation(25)
    queues = [queue_of(made, "acme"), queue_of(made, "borealis")]
    async with followed(database, made) as (writer, stream):
        counted: list[list[tuple[bytes, int]]] = []
        for day_s in (0, 0, 3600, 86_401, 86_402):
            await shift_clock(database, day_s)
            mine(made, [odd_claim(claim(queue, len(counted) * 3 + at)) for queue in queues for at in range(3)])
            finalize(made)
            await read_to_head(stream.source, writer)
            claimed = await claim_notices(database, 100, uuid4(), 10**6)
            assert all(
                (notice.kind, notice.webhook_id, notice.account_id) == ("logs_quarantined", None, None)
                for notice in claimed
            )
            assert all(notice.block_number is not None and notice.address is not None for notice in claimed)
            counted.append(sorted((notice.address or b"", notice.count) for notice in claimed))
    first, *_ = counted
    assert first == sorted((queue, 3) for queue in queues)
    assert counted == [first, [], [], sorted((queue, 9) for queue in queues), []]


async def test_what_is_dismissed_is_kept_and_resolved_all_the_same_when_it_can_be_decoded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = simulation(25)
    queue = queue_of(made, "acme")
    block = mine(made, [odd_claim(claim(queue, at)) for at in range(3)])
    finalize(made)
    async with followed(database, made) as (writer, stream):
        await read_to_head(stream.source, writer)
        ids = [row.id for row in await kept(database)]
        assert await quarantine.dismiss(database, ids[:2], "a test contract") == ids[:2]
        assert await quarantine.dismiss(database, ids, "again") == ids[2:], "only what is open"
        await replayed(stream, writer, 1, await stream.source.head())
        assert [(row.state, row.dismissed_because) for row in await kept(database)] == [
            *[("dismissed", "a test contract")] * 2,
            ("dismissed", "again"),
        ]
        assert (await status.read(database)).quarantine_open == 0
        upgrade(made, block, [claim(queue, at) for at in range(3)], monkeypatch)
        done = await read_again(stream, writer, block.number, None)
        assert [row.id for row in done.resolved] == ids
        with pytest.raises(InputError, match=f"no quarantined log has the id {max(ids) + 1}"):
            await quarantine.find(database, [max(ids) + 1])


async def test_long_data_is_cut_and_pages_are_bounded(database: Database) -> None:
    made = simulation(25)
    queue = queue_of(made, "acme")
    topic = odd_claim(claim(queue, 1)).topics
    block = mine(made, [Log(queue, topic, bytes([at]) * 5000) for at in range(7)])
    finalize(made)
    async with followed(database, made) as (writer, stream):
        await read_to_head(stream.source, writer)
    found = await kept(database)
    assert [(row.data, row.data_bytes) for row in found] == [(bytes([at]) * 4096, 5000) for at in range(7)]
    pages, before = [], None
    while page := await quarantine.page(database, 3, address=Address(queue), before=before):
        pages.append([row.log_index for row in page])
        before = page[-1].id
    assert pages == [[6, 5, 4], [3, 2, 1], [0]]
    assert await quarantine.page(database, 3, address=Address(OTHER)) == []
    assert await quarantine.open_blocks(database, 10) == [("logs", block.number)]
    assert await quarantine.open_blocks(database, 10, from_block=block.number + 1) == []


async def test_a_build_that_forgets_what_it_cannot_decode_is_found_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of `problems`: rows that are not there, are resolved without a reading, or have other bytes."""
    made = simulation(25)
    block = mine(made, [odd_claim(claim(queue_of(made, "acme"), at)) for at in range(2)])
    finalize(made)
    places = [(block.number, 0), (block.number, 1)]

    async def forgets(*_: object, **__: object) -> Changes:
        return Changes()

    async with followed(database, made) as (writer, stream):
        with monkeypatch.context() as broken:
            broken.setattr(outbox, "synchronize", forgets)
            await read_to_head(stream.source, writer)
        assert len(problems(made, places, await kept(database))) == 2
        assert (await status.read(database)).quarantine_open == (await gauges.read(database)).quarantine_open == 0
        await replayed(stream, writer, 1, await stream.source.head())
        assert problems(made, places, await kept(database)) == []
        assert (await status.read(database)).quarantine_open == (await gauges.read(database)).quarantine_open == 2
        assert asdict(await gauges.read(database))["quarantine_open"] == 2
        async with database.transaction() as connection:
            await connection.execute("update quarantined_logs set state = 'resolved' where log_index = 0")
            await connection.execute("update quarantined_logs set data = '' where log_index = 1")
            await connection.execute("update quarantined_logs set block_hash = decode(repeat('07', 32), 'hex')")
        assert len(problems(made, places, await kept(database))) == 4, "these two, and of another block"
        await replayed(stream, writer, 1, await stream.source.head())
        assert problems(made, places, await kept(database)) == []
        async with database.transaction() as connection:
            await connection.execute("update quarantined_logs set state = 'resolved' where log_index = 0")
            await connection.execute("update quarantined_logs set data = '' where log_index = 1")
        found = await kept(database)
        assert problems(made, places, found) == [f"row {found[0].id} is resolved", f"row {found[1].id} has other bytes"]
        assert problems(made, places[:1], found)[-1] == f"row {found[1].id} is of a log that was not expected"
