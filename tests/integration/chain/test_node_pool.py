"""Several servers of the devnet that fail, limit and dawdle: who is asked, how fast, and what a restart knows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web

from node_pools import Clock, Moody, chain_of, known, started
from simulation_fixtures import watched
from timeouts import WAIT_TIMEOUT_S, until
from vaultevents.chain.beacon.client import BeaconChain, BeaconOptions
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions
from vaultevents.chain.upstream.pool import LATE_IN_A_ROW
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.logs import TOPICS
from vaultevents.core.spans import Span
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import nodes
from vaultevents.store.pool import Database
from vaultevents.wiring.node_state import keeping_learned_limits

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def made() -> Simulation:
    simulation = Simulation(7)
    simulation.history(60)
    return simulation


class Limited(Moody):
    """Takes `per_s` requests in any second and refuses the others, which count for nothing."""

    def __init__(self, simulation: Simulation, per_s: int) -> None:
        super().__init__(simulation.chain)
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


def is_known_to_be_quick(chain: ExecutionChain) -> None:
    """The preferred node: an answer of it is late after the shortest time that there is for that."""
    for _ in range(8):
        chain._open.nodes[0].client.lateness.answered(0.01)


async def test_the_primary_is_returned_to_as_soon_as_it_answers_again(made: Simulation) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        clock = Clock(chain)
        first.faults.rates = {Fault.HTTP_500: 1.0}
        assert (await chain.header(3)).number == 3
        assert [memory.state for memory in chain.node_states()] == ["open", "closed"]
        tried = first.exchanges
        await chain.header(4)
        assert first.exchanges == tried, "it is left alone during its pause"
        first.faults.stop()
        clock.now_s += 0.12
        assert [memory.state for memory in chain.node_states()] == ["trial", "closed"]
        await asyncio.gather(*(chain.header(number) for number in range(1, 6)))
        assert first.exchanges == tried + 1, "one question finds out; the others do not wait for it"
        assert [memory.state for memory in chain.node_states()] == ["closed", "closed"]
        asked = second.exchanges
        await chain.header(7)
        assert second.exchanges == asked


async def test_a_lone_node_that_limits_its_rate_is_asked_more_slowly_and_nothing_fails(
    made: Simulation, database: Database
) -> None:
    server = Limited(made, 20)
    async with started(server) as urls:
        async with chain_of(urls) as chain:
            for number in range(1, 31):
                assert (await chain.header(number)).number == number
            assert 0 < server.refusals <= 3
            assert chain.counters.unavailable == 0
            (memory,) = chain.node_states()
            assert memory.requests_per_s is not None
            assert 5 <= memory.requests_per_s <= 20
            await nodes.save_node_state(database, "execution", chain.node_states())
        refusals = server.refusals
        async with chain_of(urls) as chain:
            chain.load_state(await nodes.load_node_states(database, "execution"))
            await asyncio.gather(*(chain.header(number) for number in range(1, 16)))
        assert server.refusals == refusals, "the second start knows the rate from its first request on"


async def test_who_would_wait_long_for_the_pace_of_one_node_asks_another(made: Simulation) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        chain.load_state([known(chain.nodes[0], requests_per_s=1.0)])
        begun = time.monotonic()
        found = await asyncio.gather(*(chain.header(number) for number in range(1, 21)))
        assert [header.number for header in found] == list(range(1, 21))
        took_s, late = time.monotonic() - begun, chain.counters.hedges  # on a busy machine an answer may be late
        assert took_s < 15, "of the 20 s that one alone would take"
        assert 1 <= first.exchanges <= 3 + took_s + late
        assert second.exchanges >= 17 - took_s


@pytest.mark.parametrize("reported", ["seconds", "date", "body", "nothing"])
async def test_a_refused_rate_holds_the_whole_node_and_others_are_asked_meanwhile(
    made: Simulation, reported: str
) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    over_at = datetime.now(UTC) + timedelta(seconds=4)
    hint = {"seconds": "1", "date": format_datetime(over_at, usegmt=True)}.get(reported)
    rate = {"allowed_rps": 5} | ({"backoff_seconds": 2} if reported == "body" else {})
    refusal = {"code": -32005, "message": "project ID request rate exceeded", "data": {"rate": rate}}
    body = {"jsonrpc": "2.0", "id": 1, "error": refusal}  # as Infura says it
    headers = {} if hint is None else {"retry-after": hint}
    first.mood = lambda: web.json_response(body, status=429, headers=headers)
    async with started(first, second) as urls, chain_of(urls) as chain:
        clock = Clock(chain)
        found = await asyncio.gather(*(chain.header(number) for number in range(1, 9)))
        assert [header.number for header in found] == list(range(1, 9))
        refused, late = first.exchanges, chain.counters.hedges
        assert refused - late <= chain.counters.rate_limited <= refused <= 8
        first.mood = lambda: None
        await chain.header(9)
        assert first.exchanges == refused, "nobody asks it before its time is over"
        assert chain.counters.unavailable == 0
        (held, _) = chain.node_states()
        assert held.state == "open"
        assert held.problem is not None and held.problem.startswith("limits the rate of requests for")
        assert reported != "body" or held.problem.endswith("for 2 s")
        clock.now_s += {"seconds": 1.0, "date": 4.0, "body": 2.0, "nothing": 0.5}[reported]
        await chain.header(10)
        assert first.exchanges == refused + 1
        assert [memory.state for memory in chain.node_states()] == ["closed", "closed"]


async def test_a_date_is_waited_for_where_there_is_no_other_node(made: Simulation) -> None:
    server = Moody(made.chain)
    over_at = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=2)
    server.mood = lambda: web.Response(status=429, headers={"retry-after": format_datetime(over_at, usegmt=True)})
    async with started(server) as urls, chain_of(urls) as chain:
        asking = asyncio.create_task(chain.header(3))
        await until(lambda: server.exchanges == 1)
        server.mood = lambda: None
        assert (await asking).number == 3
        assert datetime.now(UTC) >= over_at
        assert server.exchanges == 2


async def test_a_longer_pause_than_is_waited_for_makes_a_lone_node_unavailable_and_it_is_left_alone(
    made: Simulation,
) -> None:
    server = Moody(made.chain)
    server.mood = lambda: web.Response(status=429, headers={"retry-after": "3600"})
    async with started(server) as urls, chain_of(urls) as chain:
        for _ in range(3):
            with pytest.raises(SourceUnavailable, match="limits the rate of requests for 300 s"):
                await chain.header(3)
        assert server.exchanges == 1


async def test_a_late_answer_is_asked_of_the_next_node_and_the_late_request_given_up(made: Simulation) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        for number in range(1, 9):
            await chain.header(number)
        assert second.exchanges == 0
        first.hangs = True
        span = Span(1, 8)
        for _ in range(LATE_IN_A_ROW):
            found = await chain.read_logs(span, watched(made), None, live=True)
            assert len(found.logs) == len(list(made.chain.logs(span.first, span.last, TOPICS)))
        (late, _) = chain.node_states()
        assert (late.state, late.problem) == ("open", f"was late {LATE_IN_A_ROW} times in a row")
        assert chain.counters.unavailable == 1, "one that is given up is no failure"
        await until(lambda: first.given_up >= LATE_IN_A_ROW)
        asked = first.exchanges
        await chain.head()
        assert first.exchanges == asked, "it no longer costs anybody anything"


async def test_the_first_answer_wins_wherever_it_comes_from(made: Simulation) -> None:
    first, second = Moody(made.chain), Moody(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        is_known_to_be_quick(chain)
        first.faults.rates, first.faults.slow_s = {Fault.SLOW: 1.0}, 0.4
        second.hangs = True
        assert (await chain.header(9)).number == 9
        await until(lambda: second.given_up == 1)
        assert chain.counters.hedges == 1
        assert [memory.state for memory in chain.node_states()] == ["closed", "closed"]


async def test_a_preferred_node_that_has_become_slower_is_waited_for_again(made: Simulation) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        is_known_to_be_quick(chain)
        first.faults.rates, first.faults.slow_s = {Fault.SLOW: 1.0}, 0.3
        for number in range(9, 13):
            await chain.header(number)
        assert chain.counters.hedges == 1, "its time is learned from what was given up, too"
        assert second.calls["eth_getBlockByNumber"] == 1


async def test_a_backfill_waits_for_a_late_node_up_to_its_deadline(made: Simulation) -> None:
    first, second = Moody(made.chain), ExecutionServer(made.chain)
    options = ExecutionOptions(retry_wait_s=0.01, total_timeout_s=4.0)
    async with started(first, second) as urls, chain_of(urls, options) as chain:
        first.hangs = True
        found = await chain.read_logs(Span(1, 58), watched(made), None, every=False)
        assert (found.last.number, found.witnesses) == (58, 1)
        assert (chain.counters.hedges, chain.counters.unavailable) == (0, 1)


async def test_a_late_beacon_node_does_not_hold_up_finality(made: Simulation) -> None:
    first, second = BeaconServer(made.beacon), BeaconServer(made.beacon)
    urls = [await first.start(), await second.start()]
    first.faults.rates = {Fault.HANG: 1.0}
    try:
        async with BeaconChain(urls, BeaconOptions(), clock=lambda: made.chain.head.timestamp_s) as beacon:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                assert (await beacon.finality()).epoch > 0
            assert beacon.counters.hedges == 1
    finally:
        await first.stop()
        await second.stop()


@pytest.mark.parametrize("style", ["infura", "ankr", "reth"])
async def test_a_second_run_makes_no_refused_call(made: Simulation, database: Database, style: str) -> None:
    server = ExecutionServer(made.chain, max_range=9, limit_style=style)
    span = Span(1, 58)
    async with started(server) as urls:
        async with chain_of(urls) as chain:
            async with keeping_learned_limits(database, {"execution": chain}):
                await chain.read_logs(span, watched(made), None, every=False)
            assert chain.counters.ranges_refused > 0
        async with chain_of(urls) as chain:
            chain.load_state(await nodes.load_node_states(database, "execution"))
            for _ in range(5):
                await chain.read_logs(span, watched(made), None, every=False)
            assert chain.counters.ranges_refused == 0
