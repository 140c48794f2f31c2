"""Several real nodes that fail, limit and dawdle: who is asked, how fast, and what of it outlives a restart."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from patience import PATIENCE_S, until
from vaultevents.chain.beacon import BeaconChain, BeaconOptions
from vaultevents.chain.endpoints import LATE_IN_A_ROW
from vaultevents.chain.execution import CHEAP_BLOCKS, ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.chain.heads import BEHIND_S
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.logs import TOPICS
from vaultevents.core.nodes import CircuitState, LogLimit, NodeMemory
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.node import Node
from vaultevents.devnet.world import World
from vaultevents.opening.memory import keep_nodes, keeping_limits
from vaultevents.store import gauges, nodes, status
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

QUICK = ExecutionOptions(retry_wait_s=0.01, set_aside_s=0.1)


@pytest.fixture(scope="module")
def made() -> World:
    world = World(7)
    world.history(60)
    return world


def watched(world: World) -> Watched:
    return Watched(frozenset(Address(one.address) for one in world.registrations), frozenset())


class Moody(ExecutionServer):
    """Answers what `mood` says instead of itself, where it says anything; `given_up` counts clients that left."""

    mood: Callable[[], web.StreamResponse | None] = staticmethod(lambda: None)
    hangs = False
    given_up = 0

    def was_given_up(self, times: int) -> bool:
        return self.given_up == times

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        answer = self.mood()
        if answer is not None:
            self.exchanges += 1
            return answer
        return await super()._exchange(request)


class Limited(Moody):
    """Takes `per_s` requests in any second and refuses the others, which count for nothing."""

    def __init__(self, world: World, per_s: int) -> None:
        super().__init__(world.chain)
        self.refusals = 0
        self._per_s = per_s
        self._taken: deque[float] = deque()
        self.mood = self._limit

    def _limit(self) -> web.StreamResponse | None:
        now = time.monotonic()
        while self._taken and self._taken[0] <= now - 1:
            self._taken.popleft()
        if len(self._taken) >= self._per_s:
            self.refusals += 1
            return web.Response(status=429)
        self._taken.append(now)
        return None


@asynccontextmanager
async def started(*servers: ExecutionServer) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        urls = []
        for server in servers:
            urls.append(await server.start())
            stack.push_async_callback(server.stop)
        yield urls


def chain_of(urls: list[str], options: ExecutionOptions = QUICK) -> ExecutionChain:
    return ExecutionChain(urls, head=HeadPolicy(), options=options)


async def test_the_primary_is_returned_to_as_soon_as_it_answers_again(made: World) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        first.faults.rates = {Fault.HTTP_500: 1.0}
        assert (await chain.header(3)).number == 3
        assert [memory.state for memory in chain.memories()] == ["open", "closed"]
        tried = first.exchanges
        await chain.header(4)
        assert first.exchanges == tried, "it is left alone during its pause"
        first.faults.stop()
        await asyncio.sleep(0.12)
        assert [memory.state for memory in chain.memories()] == ["trial", "closed"]
        asked = second.exchanges
        await asyncio.gather(*(chain.header(number) for number in range(1, 6)))
        assert first.exchanges == tried + 1, "one question finds out; the others do not wait for it"
        assert [memory.state for memory in chain.memories()] == ["closed", "closed"]
        asked = second.exchanges
        await chain.header(7)
        assert second.exchanges == asked


async def test_a_lone_node_that_limits_its_rate_is_asked_more_slowly_and_nothing_fails(
    made: World, database: Database
) -> None:
    server = Limited(made, 20)
    async with started(server) as urls:
        async with chain_of(urls) as chain:
            for number in range(1, 31):
                assert (await chain.header(number)).number == number
            assert 0 < server.refusals <= 3
            assert chain.counters.unavailable == 0
            (memory,) = chain.memories()
            assert memory.requests_per_s is not None
            assert 5 <= memory.requests_per_s <= 20
            await nodes.remember(database, "execution", chain.memories())
        refusals = server.refusals
        async with chain_of(urls) as chain:
            chain.recall(await nodes.recalled(database, "execution"))
            await asyncio.gather(*(chain.header(number) for number in range(1, 16)))
        assert server.refusals == refusals, "the second start knows the rate from its first request on"


async def test_who_would_wait_long_for_the_pace_of_one_node_asks_another(made: World) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        chain.recall([known(chain.nodes[0], requests_per_s=1.0)])
        begun = time.monotonic()
        found = await asyncio.gather(*(chain.header(number) for number in range(1, 21)))
        assert [header.number for header in found] == list(range(1, 21))
        assert time.monotonic() - begun < 10, "of the 20 s that one alone would take"
        assert 1 <= first.exchanges <= 3
        assert second.exchanges >= 17


@pytest.mark.parametrize("told", ["seconds", "date", "body", "nothing"])
async def test_a_refused_rate_holds_the_whole_node_and_others_are_asked_meanwhile(made: World, told: str) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    until = datetime.now(UTC) + timedelta(seconds=2)
    hint = {"seconds": "1", "date": format_datetime(until, usegmt=True)}.get(told)
    rate = {"allowed_rps": 5} | ({"backoff_seconds": 2} if told == "body" else {})
    refusal = {"code": -32005, "message": "project ID request rate exceeded", "data": {"rate": rate}}
    body = {"jsonrpc": "2.0", "id": 1, "error": refusal}  # as Infura says it
    headers = {} if hint is None else {"retry-after": hint}
    first.mood = lambda: web.json_response(body, status=429, headers=headers)
    async with started(first, second) as urls, chain_of(urls) as chain:
        found = await asyncio.gather(*(chain.header(number) for number in range(1, 9)))
        assert [header.number for header in found] == list(range(1, 9))
        refused = first.exchanges
        assert refused == chain.counters.rate_limited <= 8
        first.mood = lambda: None
        await chain.header(9)
        assert first.exchanges == refused, "nobody asks it before its time is over"
        assert chain.counters.unavailable == 0
        (held, _) = chain.memories()
        assert (held.state, held.problem) == ("open", held.problem)
        assert held.problem is not None and held.problem.startswith("limits the rate of requests for")
        assert told != "body" or held.problem.endswith("for 2 s")
        await asyncio.sleep({"seconds": 1.0, "date": 2.0, "body": 2.0, "nothing": 0.5}[told])
        await chain.header(10)
        assert first.exchanges == refused + 1
        assert [memory.state for memory in chain.memories()] == ["closed", "closed"]


async def test_a_date_is_waited_for_where_there_is_no_other_node(made: World) -> None:
    server = Moody(made.chain)
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=2)
    server.mood = lambda: web.Response(status=429, headers={"retry-after": format_datetime(until, usegmt=True)})
    async with started(server) as urls, chain_of(urls) as chain:
        asking = asyncio.create_task(chain.header(3))
        await asyncio.sleep(0.1)
        server.mood = lambda: None
        assert (await asking).number == 3
        assert datetime.now(UTC) >= until
        assert server.exchanges == 2


async def test_a_longer_pause_than_is_waited_for_makes_a_lone_node_unavailable_and_it_is_left_alone(
    made: World,
) -> None:
    server = Moody(made.chain)
    server.mood = lambda: web.Response(status=429, headers={"retry-after": "3600"})
    async with started(server) as urls, chain_of(urls) as chain:
        for _ in range(3):
            with pytest.raises(SourceUnavailable, match="limits the rate of requests for 300 s"):
                await chain.header(3)
        assert server.exchanges == 1


async def test_a_late_answer_is_asked_of_the_next_node_and_the_late_request_given_up(made: World) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        for number in range(1, 9):
            await chain.header(number)
        assert second.exchanges == 0
        first.hangs = True
        span = Span(1, CHEAP_BLOCKS)
        for nth in range(1, LATE_IN_A_ROW + 1):
            found = await chain.read_logs(span, watched(made), None)
            assert len(found.logs) == len(list(made.chain.logs(span.first, span.last, TOPICS)))
            assert second.calls["eth_getBlockByNumber"] == nth * len(span), "every answer is of one node alone"
            await until(partial(first.was_given_up, nth))
            assert chain.counters.unavailable == (nth == LATE_IN_A_ROW), "one that is given up is no failure"
        (late, _) = chain.memories()
        assert (late.state, late.problem) == ("open", f"was late {LATE_IN_A_ROW} times in a row")
        assert chain.counters.hedges == LATE_IN_A_ROW
        asked = first.exchanges
        await chain.head()
        assert (first.exchanges, chain.counters.hedges) == (asked, LATE_IN_A_ROW), "it no longer costs anybody anything"


async def test_the_first_answer_wins_wherever_it_comes_from(made: World) -> None:
    first, second = Moody(made.chain), Moody(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        for number in range(1, 9):
            await chain.header(number)
        first.faults.rates, first.faults.slow_s = {Fault.SLOW: 1.0}, 0.4
        second.hangs = True
        assert (await chain.header(9)).number == 9
        await until(lambda: second.given_up == 1)
        assert chain.counters.hedges == 1
        assert [memory.state for memory in chain.memories()] == ["closed", "closed"]


async def test_a_preferred_node_that_has_become_slower_is_waited_for_again(made: World) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        for number in range(1, 9):
            await chain.header(number)
        first.faults.rates, first.faults.slow_s = {Fault.SLOW: 1.0}, 0.3
        for number in range(9, 13):
            await chain.header(number)
        assert chain.counters.hedges == 1, "its time is learned from what was given up, too"
        assert second.calls["eth_getBlockByNumber"] == 1


async def test_a_backfill_is_asked_of_one_node(made: World) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    options = ExecutionOptions(retry_wait_s=0.01, total_timeout_s=1.3)
    async with started(first, second) as urls, chain_of(urls, options) as chain:
        first.hangs = True
        span = Span(1, 58)
        assert (await chain.read_logs(span, watched(made), None, every=False)).last.number == 58
        assert (chain.counters.hedges, chain.counters.unavailable) == (0, 1)


async def test_a_late_beacon_node_does_not_hold_up_finality(made: World) -> None:
    first, second = BeaconServer(made.beacon), BeaconServer(made.beacon)
    urls = [await first.start(), await second.start()]
    first.faults.rates = {Fault.HANG: 1.0}
    try:
        async with BeaconChain(urls, BeaconOptions(), clock=lambda: made.chain.head.timestamp_s) as beacon:
            async with asyncio.timeout(PATIENCE_S):
                assert (await beacon.finality()).epoch > 0
            assert beacon.counters.hedges == 1
    finally:
        await first.stop()
        await second.stop()


@pytest.mark.parametrize("style", ["infura", "ankr", "reth"])
async def test_a_second_run_makes_no_refused_call(made: World, database: Database, style: str) -> None:
    server = ExecutionServer(made.chain, max_range=9, limit_style=style)
    span = Span(1, 58)
    async with started(server) as urls:
        async with chain_of(urls) as chain:
            async with keeping_limits(database, {"execution": chain}):
                await chain.read_logs(span, watched(made), None, every=False)
            assert chain.counters.ranges_refused > 0
        async with chain_of(urls) as chain:
            chain.recall(await nodes.recalled(database, "execution"))
            for _ in range(5):
                await chain.read_logs(span, watched(made), None, every=False)
            assert chain.counters.ranges_refused == 0


def known(
    name: str, state: CircuitState = "closed", logs: LogLimit | None = None, requests_per_s: float | None = None
) -> NodeMemory:
    return NodeMemory(name, state, None if state == "closed" else "cannot be reached", 5.0, requests_per_s, logs)


async def test_what_is_known_is_shown_and_forgotten_with_its_url(database: Database) -> None:
    one, two, beacon = "http://one#1", "http://two#2", "http://three#3"
    await nodes.remember(database, "beacon", [known(beacon, "trial")])
    await nodes.remember(database, "execution", [known(one, "open", logs=LogLimit(800, 801)), known(two)])
    shown = {one.name: one for one in (await status.read(database)).nodes}
    assert {name: facts.state for name, facts in shown.items()} == {one: "open", two: "closed", beacon: "trial"}
    assert (shown[one].problem, shown[one].log_range) == ("cannot be reached", 800)
    assert (await gauges.read(database)).nodes == {
        ("execution", "open"): 1,
        ("execution", "closed"): 1,
        ("beacon", "trial"): 1,
    }
    await nodes.remember_limits(database, "execution", [known(one, logs=LogLimit(400))])
    (kept,) = [memory for memory in await nodes.recalled(database, "execution") if memory.name == one]
    assert (kept.state, kept.logs) == ("open", LogLimit(400)), "whoever does not watch tells only what it has learned"
    assert kept.since_s == pytest.approx(5, abs=5)
    await nodes.remember(database, "execution", [known(two)])
    assert {facts.name for facts in (await status.read(database)).nodes} == {two, beacon}


async def test_what_changes_is_written_at_once_and_at_the_end(made: World, database: Database) -> None:
    server = Moody(made.chain)
    async with started(server) as urls, chain_of(urls) as chain:
        await nodes.remember(database, "ipfs", [known("http://gone#1")])
        keeping = asyncio.create_task(keep_nodes(database, {"execution": chain}))
        async with asyncio.timeout(PATIENCE_S):
            while [facts.upstream for facts in (await status.read(database)).nodes] != ["execution"]:
                await asyncio.sleep(0.01)
        server.faults.rates = {Fault.HTTP_500: 1.0}
        with pytest.raises(SourceUnavailable):
            await chain.header(1)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    (shown,) = (await status.read(database)).nodes
    assert (shown.state, shown.problem, shown.name) == ("open", "HTTP status 500", chain.nodes[0])


async def test_a_node_that_answers_but_falls_behind_is_left_and_returned_to(made: World) -> None:
    first, second = ExecutionServer(made.chain, behind=20), ExecutionServer(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        clock = Clock(chain)
        assert (await chain.head()).number == first_head(made) - 20, "at first nobody knows better"
        for _ in range(2):
            clock.now_s += BEHIND_S
            await chain.head()
        clock.now_s += BEHIND_S
        assert (await chain.head()).number == first_head(made)
        assert [one.state for one in chain.memories()] == ["open", "closed"]
        assert "is behind" in (chain.memories()[0].problem or "")
        first.node.behind = 0
        clock.now_s += 1
        asked = first.exchanges
        assert (await chain.head()).number == first_head(made)
        assert first.exchanges > asked


async def test_a_head_that_nobody_has_makes_no_node_leave(made: World) -> None:
    class Boasting(Node):
        def call(self, method: str, params: list[Any]) -> Any:
            answer = super().call(method, params)
            return {**answer, "number": hex(10**9)} if params[:1] == ["finalized"] else answer

    honest, boasting = ExecutionServer(made.chain), ExecutionServer(made.chain)
    boasting.node = Boasting(made.chain)
    async with started(honest, boasting) as urls, chain_of(urls) as chain:
        clock = Clock(chain)
        for _ in range(3):
            await chain.head()
            clock.now_s += BEHIND_S
        await boasting.stop()
        assert (await chain.head()).number == first_head(made)
        assert (await chain.head()).number == first_head(made)


class Clock:
    """A clock that the lines of all nodes of a chain go by."""

    def __init__(self, chain: ExecutionChain) -> None:
        self.now_s = 0.0
        for node in chain._open.nodes:
            node.line.clock = self

    def __call__(self) -> float:
        return self.now_s


def first_head(world: World) -> int:
    number = world.chain.finalized_number
    assert number is not None
    return number
