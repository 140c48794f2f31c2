"""Nearer to the head than final (rules C1 and P4): after any reorg, the chain's own record is what remains."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from itertools import product
from uuid import uuid4

import pytest
from aiohttp import web

from reorgs import Reorganiser
from simulation_fixtures import Rows, add_accounts, add_vault, drive, open_at, reading, register, rows
from store_factories import LEASE_S, assert_ledger, settlement, values, webhook
from vaultevents.chain.execution.client import ExecutionOptions
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.logs import fold
from vaultevents.core.registry import Registry
from vaultevents.core.spans import Span
from vaultevents.core.units import hex_text
from vaultevents.devnet.chain import At, Lag
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.deliveries import ClaimRequest, claim, settle
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.prefetch import Prefetcher
from vaultevents.watch.source import Reading, Reorged, Source
from vaultevents.watch.watcher import Idle, Rewound, advance

pytestmark = pytest.mark.integration

OPTIONS = ExecutionOptions(attempts=1, retry_wait_s=0.0)
ANSWERS = 16
"""More than a node gives while two blocks are read one by one."""


def simulation(blocks: int = 40, seed: int = 7, *, lag: int = 8) -> Simulation:
    made = Simulation(seed, events_per_block=2)
    made.history(blocks, 2 * blocks)
    made.chain.finalized = Lag(lag)
    return made


async def begin(database: Database, made: Simulation) -> Outbox:
    """Everything is registered, and read live from the finalized block on; the blocks before it are a backfill."""
    await register(database, made)
    assert made.chain.finalized_number is not None
    await open_at(database, made, made.chain.finalized_number)
    return Outbox(database)


async def follow(source: Source, outbox: Outbox, step: int = 3) -> list[Rewound]:
    """The live cursor up to the head, over everything that nodes cannot answer meanwhile."""
    rewinds: list[Rewound] = []
    for _ in range(400):
        cursor = await outbox.live("logs")
        assert cursor is not None
        try:
            with closing(Prefetcher(source, step)) as reader:
                outcome = await advance(reader, outbox, cursor)
        except SourceUnavailable:
            continue
        if isinstance(outcome, Rewound):
            rewinds.append(outcome)
        if isinstance(outcome, Idle):
            return rewinds
    raise AssertionError("it does not come to an end")


async def backfilled(source: Source, outbox: Outbox) -> None:
    for cursor in await outbox.backfills("logs"):
        await drive(source, outbox, cursor, 50)


async def standing(database: Database) -> Rows:
    """What is stored and not orphaned."""
    async with database.transaction() as connection:
        found = await connection.fetch("select account_id, id, body from events where orphaned_at is null")
    return {(row["account_id"], row["id"]): row["body"] for row in found}


class Disturbed(ExecutionServer):
    """A node at which something happens before one of its answers."""

    before: Callable[[], None] | None = None
    answers_until = 0

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.before is not None:
            self.answers_until -= 1
            if self.answers_until <= 0:
                happens, self.before = self.before, None
                happens()
        return await super()._exchange(request)


class ByNumber(LogsSource):
    """A broken build: it reads logs by number, and holds them against nothing that it read before."""

    async def live_head(self, cursor: Cursor, known: object) -> int | Reorged:
        return (await self._chain.head()).number

    async def read(self, span: Span, cursor: Cursor, registry: Registry, also: Collection[int] = ()) -> Reading:
        watched = registry.watched(span)
        found = await self._chain.read_logs(span, watched, None, every=False)
        return Reading(fold(found.logs, found.times_s, watched).observations, hex_text(found.last.hash))


async def attempt_some(database: Database) -> dict[tuple[str, str], bytes]:
    """One attempt succeeds, one fails, and one is under way for good; by webhook and event what was sent."""
    taken = (await claim(database, ClaimRequest(3, uuid4(), LEASE_S))).deliveries
    await settle(database, [settlement(delivery) for delivery in taken[:1]])
    await settle(database, [settlement(delivery, "scheduled", 500, after_s=0.0) for delivery in taken[1:2]])
    return {(delivery.webhook_id, delivery.event_id): delivery.body for delivery in taken}


async def test_reorganisations_of_every_depth_leave_what_the_chain_says(database: Database) -> None:
    """Depth 1 to 64, with attempts in between: an event that may be out keeps its bytes, any other has the new ones."""
    made = simulation(80, lag=70)
    turns = Reorganiser(made, random.Random(1))
    outbox = await begin(database, made)
    accounts = {(await webhook(database, account_id=account)).id: account for account in ("acme", "borealis")}
    sent: Rows = {}
    async with reading(ExecutionServer(made.chain), options=OPTIONS, head="latest-0") as source:
        await backfilled(source, outbox)
        await follow(source, outbox, 50)
        assert await rows(database) == turns.truth()
        for depth in range(1, 65):
            for (webhook_id, event_id), body in (await attempt_some(database)).items():
                sent.setdefault((accounts[webhook_id], event_id), body)
            turns.reorg(depth)
            made.step()
            (rewound,) = await follow(source, outbox, 50)
            assert rewound.rewind.since - rewound.rewind.to == depth
            truth = turns.truth()
            assert await standing(database) == {key: sent.get(key, body) for key, body in truth.items()}
        await assert_ledger(database)
        assert any(truth[key] != body for key, body in sent.items() if key in truth)
        gone = (await rows(database)).keys() - truth.keys()
        assert await values(database, "select count(*)::int from events where orphaned_at is not null") == [len(gone)]
        assert gone & sent.keys()
        assert gone - sent.keys()


async def disturb(database: Database, kind: type[LogsSource], depths: range) -> tuple[int, int]:
    """Two blocks are read one by one, with a reorg of each depth before each of the node's answers in turn.

    How many times that was, and after how many of them something else stood than the chain says.
    """
    made = simulation()
    turns = Reorganiser(made, random.Random(2))
    outbox = await begin(database, made)
    node = Disturbed(made.chain)
    disturbed = wrong = 0
    async with reading(node, options=OPTIONS, head="latest-0") as opened:
        source = kind(opened._chain)
        await backfilled(source, outbox)
        await follow(source, outbox)
        for depth, at in product(depths, range(1, ANSWERS + 1)):
            made.step()
            made.step()
            node.before, node.answers_until = partial(turns.reorg, depth), at
            await follow(source, outbox, 1)
            disturbed, node.before = disturbed + (node.before is None), None
            made.step()
            await follow(source, outbox)
            wrong += await standing(database) != turns.truth()
    return disturbed, wrong


async def test_a_reorganisation_between_any_two_answers_loses_nothing_and_adds_nothing(database: Database) -> None:
    disturbed, wrong = await disturb(database, LogsSource, range(1, 4))
    assert 24 <= disturbed < 3 * ANSWERS, "the last ones of each depth come after everything was read"
    assert wrong == 0
    await assert_ledger(database)


async def test_a_reader_that_compares_nothing_is_caught(database: Database) -> None:
    _, wrong = await disturb(database, ByNumber, range(2, 3))
    assert wrong > 0


async def test_a_chain_that_keeps_changing_is_reported_correctly_once_it_stops(database: Database) -> None:
    """Before each answer of the node a reorg of 1 to 3 blocks, eighty times."""
    made = simulation(60)
    rng = random.Random(3)
    turns = Reorganiser(made, rng)
    outbox = await begin(database, made)
    node = Disturbed(made.chain)
    left = 80

    def again() -> None:
        nonlocal left
        left -= 1
        turns.reorg(rng.randint(1, 3))
        if left:
            node.before, node.answers_until = again, 2

    async with reading(node, options=OPTIONS, head="latest-0") as source:
        await backfilled(source, outbox)
        node.before = again
        while left:
            await follow(source, outbox)
            made.step()
        await follow(source, outbox)
    assert await standing(database) == turns.truth()


async def test_a_backfill_that_is_open_gives_its_end_to_the_live_cursor(database: Database) -> None:
    made = simulation()
    turns = Reorganiser(made, random.Random(4))
    first, *later = made.registrations
    await add_accounts(database, made.registrations)
    await add_vault(database, first)
    final = made.chain.finalized_number
    assert final is not None
    await open_at(database, made, final)
    outbox = Outbox(database)
    async with reading(ExecutionServer(made.chain), options=OPTIONS, head="latest-0") as source:
        await follow(source, outbox)
        for registration in later:
            await add_vault(database, registration)
        head = made.chain.head.number
        newest = max(await outbox.backfills("logs"), key=lambda one: one.stop or 0)
        assert (newest.position, newest.stop) == (final, head)
        assert await advance(Prefetcher(source, 10), outbox, newest) == Idle(
            final
        )  # what is not final is read live only
        turns.reorg(5)
        (rewound,) = await follow(source, outbox)
        ancestor = rewound.rewind.to
        shortened = await outbox.stored(newest)
        assert shortened is not None
        assert shortened.stop == ancestor < head
        made.chain.finalized = At(ancestor)
        await backfilled(source, outbox)
    assert await outbox.backfills("logs") == []
    assert await standing(database) == turns.truth()


async def test_a_head_that_is_behind_or_shorter(database: Database) -> None:
    """A node that lags reports nothing; one whose shorter chain is another one does."""
    made = simulation()
    turns = Reorganiser(made, random.Random(5))
    outbox = await begin(database, made)
    node = ExecutionServer(made.chain)
    async with reading(node, options=OPTIONS, head="latest-0") as source:
        await backfilled(source, outbox)
        await follow(source, outbox)
        before = await outbox.live("logs")
        node.node.behind = 3
        assert await follow(source, outbox) == []
        assert await outbox.live("logs") == before
        node.node.behind = 0
        turns.reorg(4, 2)
        assert len(await follow(source, outbox)) == 1
        turns.reorg(1, 1)
        assert len(await follow(source, outbox)) == 1
    assert await standing(database) == turns.truth()


async def test_nothing_is_ever_taken_back_that_was_final(database: Database) -> None:
    made = simulation()
    turns = Reorganiser(made, random.Random(6))
    outbox = await begin(database, made)
    async with reading(ExecutionServer(made.chain), options=OPTIONS, head="latest-0") as source:
        await follow(source, outbox)
        cursor = await outbox.live("logs")
        assert cursor is not None
        made.chain.finalized = At(20)
        turns.reorg(15)
        made.chain.finalized = At(30)
        made.step()
        with pytest.raises(NodeFault, match="was final"):
            await advance(Prefetcher(source, 10), outbox, cursor)
    assert await outbox.live("logs") == cursor


async def test_with_nothing_to_watch_a_reorganisation_is_noticed_all_the_same(database: Database) -> None:
    made = simulation()
    turns = Reorganiser(made, random.Random(8))
    final = made.chain.finalized_number
    assert final is not None
    await open_at(database, made, final)
    outbox, node = Outbox(database), ExecutionServer(made.chain)
    async with reading(node, options=OPTIONS, head="latest-1") as source:
        await follow(source, outbox)
        turns.reorg(4, 6)
        (rewound,) = await follow(source, outbox)
    assert rewound.rewind.since - rewound.rewind.to == 3
    assert node.calls["eth_getLogs"] == 0


async def test_who_goes_back_to_final_blocks_gets_off_an_orphaned_one(database: Database) -> None:
    """The setting is changed while the last block that was read is not on the chain any more."""
    made = simulation()
    turns = Reorganiser(made, random.Random(9))
    outbox = await begin(database, made)
    async with reading(ExecutionServer(made.chain), options=OPTIONS, head="latest-0") as source:
        await backfilled(source, outbox)
        await follow(source, outbox)
    turns.reorg(3)
    made.step()
    async with reading(ExecutionServer(made.chain), options=OPTIONS) as source:
        assert await follow(source, outbox) == []
        made.chain.finalized = Lag(0)
        assert len(await follow(source, outbox)) == 1
    assert await standing(database) == made.expected()


async def test_a_replay_counts_what_was_first_seen_near_the_head_apart(database: Database) -> None:
    made = simulation()
    turns = Reorganiser(made, random.Random(10), vanishing=0.0)
    outbox = await begin(database, made)
    await webhook(database)
    async with reading(ExecutionServer(made.chain), options=OPTIONS, head="latest-0") as source:
        await backfilled(source, outbox)
        await follow(source, outbox)
        await claim(database, ClaimRequest(500, uuid4(), LEASE_S, per_webhook=500))
        turns.reorg(6, 8)
        await follow(source, outbox)
        assert await source.head() == made.chain.finalized_number
        made.chain.finalized = Lag(0)
        cursor = await outbox.begin_replay("logs", Span(0, await source.head()))
        done = [one.committed for one in await drive(source, outbox, cursor, 20)]
    assert sum(outcome.inserted for outcome in done) == 0
    assert [outcome.different for outcome in done if outcome.different] == []
    unlike = [key for key, body in made.expected().items() if (await rows(database))[key] != body]
    assert sum(outcome.near_head for outcome in done) == len(unlike) > 0
