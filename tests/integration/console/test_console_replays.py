"""Replays and backfills from the console: what they convert, estimate, refuse and record, and what is then read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from console_nodes import Nodes, read_streams, running_nodes
from operator_pages import Operator, operator
from simulation_fixtures import read_to_head, rows
from store_factories import change, own_database, values
from vaultevents.console import replays
from vaultevents.core.audit_chain import AuditEntry
from vaultevents.core.errors import InputError
from vaultevents.core.spans import Span
from vaultevents.store import audit_log, cursors
from vaultevents.store.outbox import Outbox
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.wiring.replay_range import positions, whole_range
from vaultevents.wiring.sources import open_sources

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

BLOCKS, EVENTS = 120, 60


@dataclass(frozen=True, slots=True)
class Scene:
    """A console over a simulated chain that was read up to what is final."""

    operator: Operator
    nodes: Nodes

    async def open_spans(self, stream: str) -> list[Span]:
        """What the backfills of a stream are still to read."""
        return [
            Span(cursor.position + 1, cursor.stop)
            for cursor in await Outbox(self.operator.database).backfills(stream)
            if cursor.stop is not None
        ]

    async def newest_act(self) -> AuditEntry:
        async with self.operator.database.transaction() as connection:
            (entry,) = await audit_log.entries(connection, limit=1)
        return entry


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(postgres18: ServerAddress) -> AsyncIterator[Scene]:
    async with running_nodes(BLOCKS, EVENTS) as nodes, own_database(postgres18) as database:
        await read_streams(database, nodes)
        async with operator(database, nodes) as found:
            yield Scene(found, nodes)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_open(scene: Scene) -> None:
    await change(scene.operator.database, "update cursors set position = stop where kind = 'backfill'")


async def test_a_range_of_blocks_is_read_again_in_every_stream(scene: Scene) -> None:
    done = await scene.operator.follow("/replay", {"unit": "block", "first": "20", "last": "60"})
    assert "is read again" in done.words
    epochs = [Span(scene.nodes.epoch_of(20), scene.nodes.epoch_of(60))]
    assert await scene.open_spans("logs") == [Span(20, 60)]
    assert await scene.open_spans("validators") == await scene.open_spans("withdrawals") == epochs
    entry = await scene.newest_act()
    assert (entry.action, entry.subject) == ("stream.replay", "block 20-60")


async def test_a_range_of_epochs_is_read_again_in_chosen_streams(scene: Scene) -> None:
    fields = {"unit": "epoch", "first": "3", "last": "5", "stream.logs": "1", "stream.withdrawals": "1"}
    await scene.operator.submit("/replay", fields)
    chain = scene.nodes.simulation.chain
    blocks = [block.number for block in chain.blocks(0, BLOCKS) if 3 <= scene.nodes.epoch_of(block.number) <= 5]
    assert await scene.open_spans("logs") == [Span(blocks[0], blocks[-1])]
    assert await scene.open_spans("withdrawals") == [Span(3, 5)]
    assert await scene.open_spans("validators") == []
    assert (await scene.newest_act()).subject == "epoch 3-5"


async def test_the_conversion_agrees_with_the_chain_in_both_directions(scene: Scene) -> None:
    context, database = scene.nodes, scene.operator.database
    settings = scene.operator.settings
    async with open_sources(settings, database, context.clock) as sources:
        for first, last in ((0, 0), (1, 2), (9, 70)):
            epochs = await positions(sources, "epoch", whole_range("block", first, last))
            assert epochs == Span(context.epoch_of(first), context.epoch_of(last))
            blocks = await positions(sources, "block", whole_range("epoch", epochs.first, epochs.last))
            assert blocks.first <= first
            assert last <= blocks.last
            assert {context.epoch_of(block) for block in (blocks.first, blocks.last)} == {epochs.first, epochs.last}
    with pytest.raises(InputError, match="exchange them"):
        whole_range("block", 2, 1)


async def test_an_estimate_says_what_a_replay_asks_and_begins_it(scene: Scene) -> None:
    shown = await scene.operator.read("/replay/estimate?unit=block&first=20&last=60")
    assert "Replay block 20-60?" in shown.words
    assert "requests with" in shown.words
    assert await scene.open_spans("logs") == []
    cells = ["".join(cell.itertext()).strip() for cell in shown.page.iter("td")]
    assert cells[:4] == ["logs", "block 20", "60", "41"]
    assert int(cells[4]) >= 1
    form = next(form for form in shown.page.iter("form") if form.get("action") == "/replay")
    await scene.operator.follow("/replay", {field.get("name"): field.get("value") for field in form.iter("input")})
    assert await scene.open_spans("logs") == [Span(20, 60)]


async def test_an_estimate_that_takes_too_long_is_left_out(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "SAMPLED_WITHIN_S", 0.0)
    shown = await scene.operator.read("/replay/estimate?unit=block&first=20&last=60")
    assert "samples of it were not read within 0 s" in shown.words


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"unit": "block", "first": "9", "last": "8"}, "block 8 lies before block 9: exchange them"),
        ({"unit": "epoch", "first": "9", "last": "8"}, "epoch 8 lies before epoch 9: exchange them"),
        ({"unit": "block", "first": "1", "last": "9999"}, "block 9999 is not final and complete yet: replay up to "),
        ({"unit": "epoch", "first": "1", "last": "9999"}, "epoch 9999 is not final and complete yet: replay up to "),
        ({"unit": "block", "first": "1", "last": str(10**30)}, "write a whole number"),
        ({"unit": "block", "first": "-1", "last": "5"}, "write a whole number"),
        ({"unit": "block", "first": "one", "last": "5"}, "write a whole number"),
        ({"unit": "block", "first": "1", "last": "5", "stream.other": "1"}, "'other' cannot be 'stream': choose"),
    ],
)
async def test_a_range_that_cannot_be_read_is_refused(scene: Scene, fields: dict[str, str], reason: str) -> None:
    before = await scene.newest_act()
    assert reason in (await scene.operator.submit("/replay", fields, 400)).words
    query = "&".join(f"{name}={value}" for name, value in fields.items())
    assert reason in (await scene.operator.read(f"/replay/estimate?{query}", 400)).words
    assert await scene.open_spans("logs") == []
    assert await scene.newest_act() == before


async def test_what_another_replay_is_going_to_read_is_refused(scene: Scene) -> None:
    fields = {"unit": "block", "first": "20", "last": "60", "stream.logs": "1"}
    await scene.operator.submit("/replay", fields)
    before = await scene.newest_act()
    assert "by what runs already" in (await scene.operator.submit("/replay", fields, 400)).words
    assert await scene.newest_act() == before
    await scene.operator.submit("/replay", {**fields, "last": "70"})  # and of more only the rest is read
    assert await scene.open_spans("logs") == [Span(20, 60), Span(61, 70)]


async def test_a_node_that_does_not_answer_is_named_and_nothing_is_begun(scene: Scene) -> None:
    fields = {"unit": "block", "first": "20", "last": "60"}
    nodes = scene.nodes
    away = replace(nodes, settings={"execution": {"urls": ["http://127.0.0.1:1"]}})
    async with operator(scene.operator.database, away) as found:
        assert "A node does not answer" in (await found.submit("/replay", fields, 503)).words
    async with operator(scene.operator.database) as found:
        assert "execution.urls is empty" in (await found.submit("/replay", fields, 400)).words
    without_beacon = replace(nodes, settings={"execution": nodes.settings["execution"]})
    async with operator(scene.operator.database, without_beacon) as found:
        assert "name a node in beacon.urls" in (await found.submit("/replay", fields, 400)).words
        await found.submit("/replay", {**fields, "stream.logs": "1"})
    assert await scene.open_spans("logs") == [Span(20, 60)]


async def test_a_backfill_reads_all_blocks_of_a_vault(scene: Scene) -> None:
    path = "/vaults/acme/acme-1"
    assert (await scene.operator.read(path)).page.find(".//input[@name='stream.logs']") is not None
    shown = await scene.operator.read(f"{path}/backfill")
    assert "Backfill vault 'acme-1'?" in shown.words
    done = await scene.operator.follow(f"{path}/backfill", {})
    assert "The backfill was begun" in done.words
    final = scene.nodes.final
    assert await scene.open_spans("logs") == [Span(1, final)]
    assert await scene.open_spans("validators") == [Span(0, scene.nodes.epoch_of(final) - 1)]
    entry = await scene.newest_act()
    assert (entry.action, entry.subject, entry.account_id) == ("stream.backfill", "acme-1", "acme")


async def test_a_backfill_begins_at_a_chosen_block_in_chosen_streams(scene: Scene) -> None:
    path = "/vaults/acme/acme-3/backfill"  # registered from block 9 on
    await scene.operator.submit(path, {"first": "50", "stream.logs": "1"})
    assert await scene.open_spans("logs") == [Span(50, scene.nodes.final)]
    assert await scene.open_spans("validators") == []
    for fields, reason in (
        ({"first": "8"}, "is registered for blocks from 9 on: register an earlier one"),
        ({"first": "9999"}, "choose another"),
        ({"first": "x"}, "write a whole number"),
        ({"first": "60", "stream.logs": "1"}, "by what runs already"),
    ):
        assert reason in (await scene.operator.submit(path, fields, 400)).words
    for unknown in ("/vaults/acme/unknown/backfill", "/vaults/unknown/acme-1/backfill"):
        await scene.operator.submit(unknown, {}, 404)
        await scene.operator.read(unknown, 404)


async def test_a_backfill_of_a_removed_vault_ends_with_its_registration(scene: Scene) -> None:
    database = scene.operator.database
    closed = "update vault_spans set last_block = $1 where account_id = 'borealis' and vault_id = 'borealis-2'"
    await change(database, closed, 40)
    await scene.operator.submit("/vaults/borealis/borealis-2/backfill", {"stream.logs": "1"})
    assert await scene.open_spans("logs") == [Span(1, 40)]
    await change(database, closed, None)


async def test_what_was_missing_is_stored_by_a_replay_and_then_by_a_backfill(scene: Scene) -> None:
    database, final = scene.operator.database, scene.nodes.final
    expected = {
        key: body
        for key, body in scene.nodes.simulation.expected().items()
        if key[1].startswith(("funding_received_", "withdrawal_claimed_"))
    }
    async with open_sources(scene.operator.settings, database, scene.nodes.clock) as sources:
        (logs,) = [stream.source for stream in sources.streams if stream.source.stream == "logs"]
        await scene.operator.submit("/replay", {"unit": "block", "first": "1", "last": "60"})
        await read_to_head(logs, Outbox(database))
        found = await rows(database)
        assert 0 < len(found) < len(expected)
        assert max(await values(database, "select block_number from events")) <= 60
        await scene.operator.submit("/vaults/acme/acme-1/backfill", {})
        await read_to_head(logs, Outbox(database))
        assert await rows(database) == expected
        before = await values(database, "select seq from events order by seq")
        await scene.operator.submit("/replay", {"unit": "block", "first": "1", "last": str(final)})
        await read_to_head(logs, Outbox(database))
        assert await values(database, "select seq from events order by seq") == before


async def test_reports_of_the_range_are_fetched_again(scene: Scene) -> None:
    database = scene.operator.database
    await cursors.open_stream(database, "reports", scene.nodes.final, None)
    await change(database, "update cursors set position = stop where kind = 'backfill'")
    await change(database, _RESOLVED, [10, 50])
    pending = "select block_number from reports where state = 'pending' order by block_number"
    await scene.operator.submit("/replay", {"unit": "block", "first": "1", "last": "20", "stream.logs": "1"})
    assert await values(database, pending) == []
    await scene.operator.submit("/replay", {"unit": "block", "first": "1", "last": "20", "stream.reports": "1"})
    assert await values(database, pending) == [10]
    await change(database, "delete from cursors where stream = 'reports'")


async def test_the_age_of_a_report_is_by_the_clock_of_a_simulated_chain(scene: Scene) -> None:
    """Which begins at a fixed time, so that it repeats exactly."""
    database, head_s = scene.operator.database, scene.nodes.clock.now_s()
    await change(database, _RESOLVED, [1000])
    await change(database, "update reports set block_time_s = $1 where block_number = 1000", head_s)
    async with operator(database) as by_our_clock:
        assert "The newest oracle report is" in await by_our_clock.words("/")
    async with operator(database, scene.nodes) as by_its_clock:
        assert "The newest oracle report is" not in await by_its_clock.words("/")
        await change(database, "update reports set block_time_s = $1 where block_number = 1000", head_s - 93_601)
    async with operator(database, scene.nodes) as by_its_clock:
        assert "The newest oracle report is" in await by_its_clock.words("/")


_RESOLVED = """
insert into reports (block_number, block_time_s, tx_hash, log_index, oracle, report_timestamp, ref_slot, root, cid,
    state, vaults, resolved_at)
select n, 1760000000 + n, sha256('x'), 0, substr(sha256('x'), 1, 20), 1760000000 + n, n, sha256('x'), 'cid',
    'resolved', 1, db_now()
from unnest($1::bigint[]) u (n)
"""


async def test_nothing_was_read_yet(postgres18: ServerAddress) -> None:
    async with own_database(postgres18) as database, operator(database) as found:
        refused = await found.submit("/replay", {"unit": "block", "first": "0", "last": "1"}, 400)
        assert "no stream was read yet" in refused.words
