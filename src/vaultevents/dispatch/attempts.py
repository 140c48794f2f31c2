"""Attempt what is due: claim, sign, POST and settle, the same way for deliveries, resends and operator notices.

    claim ─▶ burst ─▶ sign ─▶ POST ─▶ judge ─┬▶ accepted  ─▶ settled with the next claim, in one statement
      ▲                                      ├▶ failed    ─▶ settled in a batch of its own, with the webhook's health
      └────── a slot is free again ──────────┴▶ prevented ─▶ put back: a fault of this host, nothing was sent

A `Lane` holds what differs between them; each lane has a `Dispatcher` and slots of its own, so none delays another
(rule D11). No transaction is open during a POST. A slot is free only when its attempt is settled, so what is in memory
is bounded. A process that dies loses only leases; these end, and their deliveries are claimed again (rules P5 and P10).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import uuid4

from vaultevents import metrics
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.retries import Delivered, Exhausted, Gone, NotAttempted, Retry
from vaultevents.core.sealing import SealBroken
from vaultevents.dispatch.lanes import Lane
from vaultevents.dispatch.policy import Bursts, SlotPolicy
from vaultevents.dispatch.sender import Reply, Sender
from vaultevents.dispatch.waiting import ClaimSignal, Item, Pending
from vaultevents.store.clock import ServiceClock
from vaultevents.store.deliveries import LEAST_SHARE, AttemptState, Delivery, Settled, Settlement

BATCH: Final = 300
SETTLE_WINDOW_S: Final = 0.005
JOIN_S: Final = 0.02
"""While little is in flight, an accepted attempt waits this long for a claim to be settled with, in one commit."""

FLUSH_AT = 150
"""So many accepted attempts are settled at once, beside the cycle that is under way."""

BURST: Final = 24
BURST_S: Final = 0.004
"""Of what was claimed this many are posted at once, and as many more after this time, however slow the first are."""

FULL_S: Final = 0.25
"""Where there is no room for another claim, or limits left something, claims are tried again after this long."""

IDLE_S: Final = 0.02
"""After this long without a reason to claim, the queue is asked when the next delivery is due."""

LEASES_S: Final = 1.0
"""How often leases whose time is over are ended."""

MAINTAIN_S: Final = 600.0
RECONNECT_S: Final = 0.5
PUT_BACK_S = 5.0
"""After a fault of this host a delivery is due again."""


class _Attempt(NamedTuple):
    """An attempt that is under way; `began_at_s` is the loop's clock."""

    delivery: Delivery
    burst: int
    started_at: datetime
    began_at_s: float


class _Cycle(NamedTuple):
    """What a cycle claimed, of how many it had room for; `limited`: limits may have left something that is due."""

    found: int
    room: int
    limited: bool = False


class _Drained(Exception):
    """Ends the tasks of a dispatcher that has stopped."""


class Dispatcher:
    """Attempts what is due in a lane until it is stopped; any number of them may run, in any number of processes."""

    def __init__(self, lane: Lane, sender: Sender, clock: ServiceClock) -> None:
        options = lane.options
        self._lane = lane
        self._sender = sender
        self._clock = clock
        self._slots = SlotPolicy(options.concurrency, options.per_webhook, options.per_webhook_max)
        self._bursts = Bursts(BURST)
        self._wakeup = ClaimSignal()
        self._accepted = Pending[Settlement](FLUSH_AT)
        self._failed = Pending[Settlement]()
        self._prevented = Pending[tuple[Delivery, Reply]]()
        self._tasks = asyncio.TaskGroup()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then claim nothing more and wait for what is in flight, at most `drain_s`.

        What is cancelled then is attempted again by any dispatcher that finds its lease ended.
        """
        try:
            async with self._tasks as tasks:
                cycles = tasks.create_task(self._cycles())
                tasks.create_task(self._cycles_beside())
                tasks.create_task(self._write(self._failed, self._settle_failed, "settle_waits"))
                tasks.create_task(self._write(self._prevented, self._put_back, "put_back_waits"))
                tasks.create_task(self._end_leases())
                tasks.create_task(self._listen())
                await stop.wait()
                self._wakeup.stop()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._lane.options.drain_s):
                        await cycles
                self._lane.report_drained(self._slots.in_flight)
                self._bursts.clear()
                raise _Drained
        except* _Drained:
            pass  # the tasks that were left are cancelled

    async def _cycles(self) -> None:
        """Run one cycle after the other until the dispatcher is stopped and nothing is in flight."""
        while self._slots.in_flight or not self._wakeup.stopping:
            self._wakeup.clear()
            try:
                cycle = await self._cycle()
                if cycle.room and cycle.found >= min(cycle.room, LEAST_SHARE):
                    continue
                if await self._wakeup.within(IDLE_S):
                    if len(self._accepted) < BURST and self._bursts.posting:
                        await asyncio.sleep(SETTLE_WINDOW_S)
                    continue
                due_s = await self._lane.next_due_s() if cycle.room else FULL_S
                if cycle.limited and due_s is not None:
                    due_s = max(due_s, FULL_S)  # the settle that makes room claims again
            except DatabaseUnavailable as error:
                due_s = self._report_unavailable(error)
            poll_s = self._lane.options.poll_s
            await self._wakeup.within(poll_s if due_s is None else min(due_s, poll_s))

    async def _cycles_beside(self) -> None:
        """Run a second cycle beside the one that is under way, when enough was accepted meanwhile."""
        while True:
            await self._accepted.wait()
            try:
                await self._cycle()
            except DatabaseUnavailable as error:
                await asyncio.sleep(self._report_unavailable(error))

    def _report_unavailable(self, error: DatabaseUnavailable) -> float:
        self._lane.log.warning(self._lane.waits, problem=str(error), retry_in_s=RECONNECT_S)
        return RECONNECT_S

    async def _cycle(self) -> _Cycle:
        """Settle what was accepted and claim what there is room for."""
        accepted, slots, now_s = self._accepted.take(BATCH), self._slots, asyncio.get_running_loop().time()
        most = 0 if self._wakeup.stopping or self._bursts.waiting > BATCH // 2 else BATCH
        request = slots.request(len(accepted), most, now_s, uuid4(), self._lane.options.lease_s)
        slots.being_claimed += request.limit
        try:
            if accepted:
                settled, claimed = await self._lane.settle_and_claim(accepted, request)
            elif request.limit:
                settled, claimed = None, await self._lane.claim(request)
            else:
                return _Cycle(0, 0)
        except DatabaseUnavailable:
            self._accepted.add(*accepted)
            raise
        finally:
            slots.being_claimed -= request.limit
        if settled is not None:
            self._settled(accepted, settled)
        else:
            self._failed.add(*accepted)  # one of these webhooks has failures to forget
        slots.last_webhook = claimed.last or slots.last_webhook
        if claimed.database_time is not None:
            self._clock.check(claimed.database_time)
        found = len(claimed.deliveries)
        if accepted and found >= min(request.limit, LEAST_SHARE):  # more may be due, or there was no room before
            self._wakeup.set()
        if found:
            for delivery in claimed.deliveries:
                slots.begin(delivery.target)
            self._bursts.extend(claimed.deliveries)
            self._begin()
        return _Cycle(found, request.limit, request.scarce is not None)

    def _begin(self) -> None:
        """Begin the attempts of this burst: few connections and warm caches where answers are quick."""
        bursts, time = self._bursts, asyncio.get_running_loop().time
        while (delivery := bursts.next()) is not None:
            self._attempt(_Attempt(delivery, bursts.number, self._clock.now(), time()))
            if bursts.waiting == BATCH // 2:
                self._wakeup.set()
        if bursts.should_pause():
            asyncio.get_running_loop().call_later(BURST_S, self._begin_next_burst)

    def _begin_next_burst(self) -> None:
        """Wait no longer for the attempts of this burst that are slow."""
        self._bursts.advance()
        self._begin()

    def _attempt(self, attempt: _Attempt) -> None:
        delivery, target = attempt.delivery, attempt.delivery.target

        def answered(reply: Reply) -> None:
            try:
                self._answered(attempt, reply)
            except Exception as bug:  # the event loop would only log it
                self._tasks.create_task(_raise(bug))

        try:
            headers = self._lane.sign(delivery, attempt.started_at)
        except SealBroken as problem:
            self._lane.log.error("secret_unreadable", webhook_id=target.webhook_id, problem=str(problem))
            asyncio.get_running_loop().call_soon(answered, Reply(None, "sealed", None, "", 0, None))
            return
        if not self._sender.try_post(target.url, delivery.body, headers, answered, target.account_id):
            self._tasks.create_task(self._connect_and_post(delivery, headers, answered))

    async def _connect_and_post(
        self, delivery: Delivery, headers: Mapping[str, str], answered: Callable[[Reply], None]
    ) -> None:
        answered(await self._sender.send(delivery.target.url, delivery.body, headers, delivery.target.account_id))

    def _answered(self, attempt: _Attempt, reply: Reply) -> None:
        delivery, now_s = attempt.delivery, asyncio.get_running_loop().time()
        webhook_id = delivery.target.webhook_id
        if reply.status is not None and 200 <= reply.status < 300:
            self._accepted.add(_settlement(delivery, "delivered", attempt.started_at, reply))
            self._slots.accepted(webhook_id, attempt.began_at_s, now_s)
            if self._wakeup.stopping or self._slots.pressed(webhook_id):
                self._wakeup.set()
            else:
                self._wakeup.soon(JOIN_S)
        elif (failed := self._judged(attempt, reply)) is not None:
            self._slots.failed(webhook_id, attempt.began_at_s, now_s)
            self._failed.add(failed)
        else:
            self._prevented.add((delivery, reply))
        if self._bursts.end(attempt.burst):
            self._begin()

    def _judged(self, attempt: _Attempt, reply: Reply) -> Settlement | None:
        """Return what follows from an attempt that was not accepted; None where this host prevented it."""
        delivery, started_at = attempt.delivery, attempt.started_at
        match self._lane.judge(delivery, reply, self._clock.now()):
            case NotAttempted():
                return None
            case Retry(after_s, park_s):
                return _settlement(delivery, "scheduled", started_at, reply, after_s=after_s, park_s=park_s)
            case Exhausted(park_s):
                return _settlement(delivery, "exhausted", started_at, reply, park_s=park_s)
            case Gone():
                return _settlement(delivery, "parked", started_at, reply, gone=True)
            case Delivered():
                return _settlement(delivery, "delivered", started_at, reply)

    async def _write(
        self, pending: Pending[Item], write: Callable[[Sequence[Item]], Awaitable[None]], waits: str
    ) -> None:
        """Write what gathers in a few milliseconds, batch by batch, so that nothing waits for a slow receiver."""
        while True:
            await pending.wait()
            if len(pending) < BATCH and self._bursts.posting:
                await asyncio.sleep(SETTLE_WINDOW_S)
            batch = pending.take(BATCH)
            while True:
                try:
                    await write(batch)
                    break
                except DatabaseUnavailable as error:
                    self._lane.log.warning(waits, problem=str(error), attempts=len(batch), retry_in_s=RECONNECT_S)
                    await asyncio.sleep(RECONNECT_S)
            self._wakeup.set()

    async def _settle_failed(self, batch: Sequence[Settlement]) -> None:
        self._settled(batch, await self._lane.settle(batch))

    async def _put_back(self, prevented: Sequence[tuple[Delivery, Reply]]) -> None:
        """Make due again what a fault of this host prevented: it counts for no schedule and no webhook's health."""
        await self._lane.put_back(prevented, PUT_BACK_S)
        for delivery, _ in prevented:
            self._slots.end(delivery.target)

    def _settled(self, batch: Sequence[Settlement], settled: Settled) -> None:
        self._lane.report_settled(batch, settled)
        if settled.held < len(batch):
            metrics.leases("lost", len(batch) - settled.held)
            self._lane.log.warning("leases_lost", attempts=len(batch) - settled.held)
        for settlement in batch:
            self._slots.end(settlement.delivery.target)
        if self._wakeup.stopping:
            self._wakeup.set()

    async def _end_leases(self) -> None:
        """Take over what a process that died or froze has left."""
        maintain_at_s = 0.0
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                if asyncio.get_running_loop().time() >= maintain_at_s:
                    await self._lane.maintain()
                    maintain_at_s = asyncio.get_running_loop().time() + MAINTAIN_S
                    self._wakeup.set()
                if ended := await self._lane.end_leases():
                    metrics.leases("ended", ended)
                    self._lane.log.warning("leases_ended", leases=ended)
                    self._wakeup.set()
            await asyncio.sleep(LEASES_S)

    async def _listen(self) -> None:
        """Wake up at each NOTIFY; `poll_s` covers whatever is lost here."""
        while self._lane.channel is not None:
            with contextlib.suppress(DatabaseUnavailable):
                await self._lane.database.listen(self._lane.channel, self._wakeup.set)
            await asyncio.sleep(RECONNECT_S)


async def _raise(bug: Exception) -> None:
    raise bug


def _settlement(
    delivery: Delivery, state: AttemptState, started_at: datetime, reply: Reply, **verdict: Any
) -> Settlement:
    return Settlement(
        delivery,
        state,
        started_at,
        reply.duration_ms,
        reply.status,
        reply.error,
        reply.excerpt,
        reply.address,
        timing=reply.timing,
        **verdict,
    )
