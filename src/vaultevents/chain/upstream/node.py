"""How one node is asked: at its pace, again after a passing fault, and not while it asks to be left alone.

All policy of trying again lives here; which node is asked is up to endpoints.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from vaultevents import metrics
from vaultevents.chain.upstream.circuit_breaker import CircuitBreaker
from vaultevents.chain.upstream.learned_range import LearnedRange
from vaultevents.chain.upstream.rate_limit import AnswerTimes, LatencyEstimate, RateLimiter
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.nodes import NodeState, Upstream

T = TypeVar("T")
MAX_RETRY_AFTER_S = 5.0
"""A node that asks for a longer pause is not waited for, not even when it is alone."""
LONGEST_QUEUE_S = 1.0
"""Who would wait longer for the pace of a node asks another one, where there is one."""
_RECONNECT_S = (0.5, 1.0, 2.0, 5.0, 15.0, 60.0)


@dataclass(slots=True)
class Counters:
    """What happened at the nodes since the start; each number only grows."""

    requests: int = 0  # HTTP exchanges
    calls: int = 0  # what was asked in them
    retries: int = 0  # asked again after a passing fault
    unavailable: int = 0
    ranges_refused: int = 0  # eth_getLogs over too many blocks
    node_faults: int = 0
    wrong_network: int = 0
    blocks_proven: int = 0  # blocks whose logs were read from receipts that make up the root
    blooms_settled: int = 0  # of these, those that only their bloom made worth reading
    blooms_unsettled: int = 0  # positive blooms that the daily budget left unread
    claims_disproved: int = 0  # blocks of which a node claimed something else than was proven
    rate_limited: int = 0  # refused because there were too many
    hedges: int = 0  # questions put to a second node because the first was late


class TransientError(SourceUnavailable):
    """May be over in a moment, so the same node is asked again; `NodeClient.ask` turns what stays into its parent."""


class GarbledAnswer(TransientError):
    """An answer that is not JSON-RPC. When it stays so, the node is faulty."""


class RateLimited(TransientError):
    """The node wants fewer requests; all of them wait for `retry_after_s`, where it says so."""

    def __init__(self, node: str, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(node, f"limits the rate of requests ({problem})")
        self.retry_after_s = retry_after_s


class Throttled(SourceUnavailable):
    """The node has asked to be left alone for `pause_s`, and is."""

    def __init__(self, node: str, pause_s: float) -> None:
        super().__init__(node, f"limits the rate of requests for {ceil(pause_s)} s")
        self.pause_s = pause_s


class UpstreamTimeout(SourceUnavailable):
    """No whole answer within the deadline: what was asked may be too much for the node, or the node is gone."""


class DataUnavailable(SourceUnavailable):
    """The node does not have what was asked for, and is in use for everything else."""


class BlockNotFound(SourceUnavailable):
    """The node does not have a block: it lags, or has pruned it; or one of the machines behind its URL does."""


MACHINES = 3
"""How often a URL is asked for a block that it does not have: a balancer may send each question to another machine."""


async def on_any_replica(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again where one replica behind a URL lags; raises `BlockNotFound` when all that were asked lag.

    A balancer that takes turns would otherwise lead heads to one machine and ranges to another, for ever.
    """
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(BlockNotFound), stop=stop_after_attempt(MACHINES), reraise=True
    )
    return await retrying(ask)


class NodeClient:
    """How one node is asked: its pace, its circuit, and how often it is asked again after a passing fault.

    `log_range`: how much is asked at once, of a node that has logs. `is_alone` says whether no other node can be asked
    instead; `NodePool` answers it.
    """

    def __init__(
        self,
        name: str,
        upstream: Upstream,
        counters: Counters,
        *,
        attempts: int,
        wait_s: float,
        set_aside_s: float,
        log_range: LearnedRange | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.log_range = log_range
        self.upstream = upstream
        self.counters = counters
        self.clock = clock
        self.pace = RateLimiter()
        self.circuit = CircuitBreaker(set_aside_s, clock())
        self.lateness = LatencyEstimate()
        self.answer_times = AnswerTimes()
        self.late_in_a_row = 0
        self.at_fault = False
        self.is_alone: Callable[[], bool] = lambda: True
        self._attempts = attempts
        self._wait_s = wait_s

    async def ask(self, exchange: Callable[[], Awaitable[T]], attempts: int | None = None) -> T:
        """Exchange when it is time for it, and again while the fault is a passing one.

        Raises `SourceUnavailable` with the last fault, or when the node wants a longer pause than it is waited for.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(TransientError),
            stop=stop_after_attempt(attempts or self._attempts),
            wait=wait_random_exponential(multiplier=self._wait_s, max=MAX_RETRY_AFTER_S),
            before_sleep=self._count_retry,
            reraise=True,
        )
        try:
            return await retrying(partial(self._exchange, exchange))
        except TransientError as error:
            kind = NodeFault if isinstance(error, GarbledAnswer) else SourceUnavailable
            lasting = kind(error.node, error.problem)
        raise lasting

    async def _exchange(self, exchange: Callable[[], Awaitable[T]]) -> T:
        await self._turn()
        sent_at = self.clock()
        try:
            answer = await exchange()
        except RateLimited as error:
            self.pace.refused(sent_at, self.clock(), error.retry_after_s)
            self.counters.rate_limited += 1
            metrics.rate_limit(self.upstream)
            self._check_held()
            raise
        self.answer_times.answered(self.clock() - sent_at)
        return answer

    async def _turn(self) -> None:
        """Waits until the node may be asked; what it says to one question holds for all that wait."""
        while True:
            self._check_held()
            wait_s = self.pace.book(self.clock()) - self.clock()
            if wait_s <= 0:
                return
            await asyncio.sleep(wait_s)
            if not self.pace.held_s(self.clock()):
                return

    def _check_held(self) -> None:
        now = self.clock()
        held_s = self.pace.held_s(now)
        if self.is_alone():
            leaves = held_s > MAX_RETRY_AFTER_S
        else:
            leaves = held_s > 0 or self.pace.due(now) - now > LONGEST_QUEUE_S
        if leaves:
            raise Throttled(self.name, self.pace.due(now) - now)

    def _count_retry(self, _: RetryCallState) -> None:
        self.counters.retries += 1

    def memory(self) -> NodeState:
        """What is known of the node now."""
        now = self.clock()
        state, rate = self.circuit.state(now), self.pace.requests_per_s
        logs = None if self.log_range is None else self.log_range.limit
        latency = self.answer_times.latency
        return NodeState(self.name, state, self.circuit.problem, now - self.circuit.since, rate, logs, latency=latency)

    def load_state(self, memory: NodeState) -> None:
        """What was learned before the last start. Whether the node answers has to be seen anew."""
        if memory.requests_per_s is not None:
            self.pace.load_state(memory.requests_per_s, self.clock())
        if memory.logs is not None and self.log_range is not None:
            self.log_range.load_state(memory.logs)


def reconnect_pauses() -> Iterator[float]:
    """How long to wait before a connection that ended is made anew, after the first end, the second and so on."""
    yield from _RECONNECT_S
    while True:
        yield _RECONNECT_S[-1]
