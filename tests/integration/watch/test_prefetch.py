"""Reading ahead: in order, whatever the answers, and nothing of it is kept once its ground has changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing

import pytest

from simulation_fixtures import add_vault, open_at, reading, register, rows
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.registry import Registry
from vaultevents.core.spans import Span
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.prefetch import MOST_SEEN, Prefetcher
from vaultevents.watch.source import Known, Reading, Reorged
from vaultevents.watch.watcher import run

pytestmark = pytest.mark.integration

REGISTRIES = [Registry(version, ()) for version in range(3)]


class Written:
    """A source whose answers come when the test says so; `asked` are the spans that were begun, in order."""

    stream = "logs"
    ahead = 2

    def __init__(self, head: int = 99) -> None:
        self.asked: list[tuple[Span, str | None]] = []
        self.heads = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.parents: dict[int, str] = {}
        self.seen = 0
        self.failing: set[int] = set()
        self._head = head

    async def head(self) -> int:
        self.heads += 1
        return self._head

    async def begin(self) -> tuple[int, str | None]:
        return self._head, None

    async def read(self, span: Span, cursor: Cursor, registry: Registry) -> Reading:
        self.asked.append((span, cursor.anchor))
        if span.first in self.failing:
            raise SourceUnavailable("node", f"not {span}")
        await self.gate.wait()
        return Reading((), f"h{span.last}", parent=self.parents.get(span.first, f"h{span.first - 1}"), seen=self.seen)

    @property
    def times(self) -> Counter[int]:
        return Counter(span.first for span, _ in self.asked)


def cursor(position: int = 9, stop: int | None = 59, anchor: str | None = "h9") -> Cursor:
    return Cursor(1, "logs", "live" if stop is None else "backfill", 0, position, anchor, stop)


async def nothing_known() -> Known:
    return {}


async def next_span(reader: Prefetcher, at: Cursor) -> Span | None:
    found = await reader.next_span(at, nothing_known)
    assert not isinstance(found, Reorged)
    return found[0]


async def turn(reader: Prefetcher, at: Cursor, registry: Registry = REGISTRIES[0]) -> tuple[Span, Cursor]:
    """The next span, read; and the cursor behind it."""
    span = await next_span(reader, at)
    assert span is not None
    return span, at.moved(span.last, (await reader.read(span, at, registry)).reading.anchor)


async def drained(source: Written, at: Cursor, step: int = 10) -> list[Span]:
    """All spans up to the end, each once."""
    spans = []
    with closing(Prefetcher(source, step)) as reader:
        while await next_span(reader, at) is not None:
            span, at = await turn(reader, at)
            spans.append(span)
    return spans


async def test_a_backfill_is_read_ahead_in_order_and_each_span_once() -> None:
    source = Written()
    assert await drained(source, cursor()) == [Span(first, first + 9) for first in range(10, 60, 10)]
    assert set(source.times.values()) == {1}
    assert source.asked[:3] == [(Span(10, 19), "h9"), (Span(20, 29), None), (Span(30, 39), None)]
    assert source.heads == 1


async def test_a_live_cursor_reads_nothing_ahead_and_asks_for_the_head_each_time() -> None:
    source = Written(head=29)
    assert await drained(source, cursor(stop=None)) == [Span(10, 19), Span(20, 29)]
    assert [anchor for _, anchor in source.asked] == ["h9", "h19"]
    assert source.heads == 5  # twice for each span here, and once for the end


async def test_what_does_not_link_is_read_again_with_the_anchor() -> None:
    source = Written()
    source.parents[20] = "another"
    with closing(Prefetcher(source, 10)) as reader:
        _, at = await turn(reader, cursor())
        await asyncio.sleep(0)
        source.parents.clear()
        await turn(reader, at)
    assert [anchor for span, anchor in source.asked if span.first == 20] == [None, "h19"]


async def test_what_was_read_for_another_registry_is_read_again() -> None:
    source = Written()
    with closing(Prefetcher(source, 10)) as reader:
        _, at = await turn(reader, cursor(), REGISTRIES[1])
        await asyncio.sleep(0)
        await turn(reader, at, REGISTRIES[2])
    assert source.times[20] == 2


async def test_a_failure_gives_up_what_was_begun_behind_it() -> None:
    source, at, before = Written(), cursor(), asyncio.all_tasks()
    source.gate.clear()
    source.failing.add(10)
    with closing(Prefetcher(source, 10)) as reader:
        with pytest.raises(SourceUnavailable):
            await turn(reader, at)
        assert [span.first for span, _ in source.asked] == [10, 20, 30]
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        source.failing.clear()
        source.gate.set()
        await turn(reader, at)
    source.gate.clear()
    with closing(Prefetcher(source, 10)) as reader:
        waiting = asyncio.create_task(turn(reader, at))
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks() - before) == 4
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before


async def test_spans_that_are_too_full_become_shorter_and_longer_again() -> None:
    source = Written(head=10_000)
    source.ahead = 0
    source.seen = 4 * MOST_SEEN
    at, lengths = cursor(stop=10_000), []
    with closing(Prefetcher(source, 400)) as reader:
        for _ in range(8):
            span, at = await turn(reader, at)
            lengths.append(len(span))
            source.seen = 0 if len(lengths) > 2 else source.seen
    assert lengths == [400, 100, 25, 6, 12, 24, 48, 96]


@pytest.mark.parametrize("stop", [None, 10_000])
async def test_spans_become_shorter_with_every_fault_down_to_one_block_and_grow_again(stop: int | None) -> None:
    source = Written(head=10_000)
    at, lengths = cursor(stop=stop), []
    with closing(Prefetcher(source, 12)) as reader:
        source.failing.add(10)
        for _ in range(5):
            span = await next_span(reader, at)
            assert span is not None
            lengths.append(len(span))
            with pytest.raises(SourceUnavailable):
                await reader.read(span, at, REGISTRIES[0])
        source.failing.clear()
        while len(lengths) < 12:
            span, at = await turn(reader, at)
            lengths.append(len(span))
    assert lengths[:6] == [12, 6, 3, 1, 1, 1]
    assert lengths[-1] == 12 and lengths[5:] == sorted(lengths[5:])


async def test_vaults_that_are_added_during_a_backfill_lose_nothing(database: Database) -> None:
    """Through the real source: each registration changes the ground of what was read ahead."""
    made = Simulation(12, events_per_block=2)
    made.history(120, 200)
    await register(database, made)
    later = [made.add_vault("acme", f"acme-later-{number}") for number in range(4)]
    made.history(100, 150)
    outbox = Outbox(database)
    async with reading(ExecutionServer(made.chain)) as source:
        assert source.ahead > 0
        head = await source.head()
        await open_at(database, made, head)
        (backfill,) = await outbox.backfills("logs")
        adding = iter(later)

        async def add() -> None:
            for registration in adding:
                await add_vault(database, registration)
                await asyncio.sleep(0.02)

        async def read() -> None:
            await run(source, outbox, backfill, step=7, poll_s=0.01)
            while more := await outbox.backfills("logs"):
                await run(source, outbox, more[0], step=7, poll_s=0.01)

        await asyncio.gather(add(), read())
        await read()
    assert await rows(database) == made.expected(through=head)
