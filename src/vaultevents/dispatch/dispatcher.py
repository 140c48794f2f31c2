"""Claim due deliveries, post them with bounded concurrency, settle the attempts in batches.

    queue ─▶ a turn: settle what was accepted, claim up to 500 ─▶ an attempt each ─▶ accepted ─▶ the next turn
                                                                        └─▶ failed ─▶ settled apart, with its streaks

A turn is one statement. While it is under way attempts go on, and what is accepted meanwhile is the next one's: the
busier, the larger. No transaction is open during a POST. A slot is free again only when its attempt is settled, so
what is in memory is bounded; a process that dies loses only leases, which expire and are claimed again (rule P10).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

import structlog

from vaultevents import metrics
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.retries import SCHEDULE_S, Delivered, Exhausted, Gone, NotAttempted, Outcome, Retry, judge
from vaultevents.core.sealing import SealBroken
from vaultevents.core.streaks import DEFAULT_PARKING, Parking
from vaultevents.dispatch.policy import SlotPolicy
from vaultevents.dispatch.sender import Reply, Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.store.clock import ServiceClock
from vaultevents.store.deliveries import (
    AttemptState,
    Delivery,
    Parked,
    Settled,
    Settlement,
    claim,
    end_leases,
    mark_queued,
    next_due_s,
    put_back,
    settle,
    settle_and_claim,
)
from vaultevents.store.pool import DELIVERIES_CHANNEL, Database

log = structlog.get_logger("dispatch")

BATCH = 500
SETTLE_WINDOW_S = 0.005
JOIN_S = 0.02
"""While little is in flight, what was accepted waits this long for a claim to be settled with, in one commit."""

PLENTY = 250
"""So many accepted attempts are worth another turn beside the one that is under way."""

WAVE = 64
WAVE_S = 0.01
"""Of what was claimed this many are posted at once, and as many more after this time, however slow the first are."""

FULL_S = 0.25
"""Where there is no room for another claim, or limits left something, claims are tried again after this long."""

QUIET_S = 0.02
"""After this long without a reason to claim, the queue is asked when the next is due."""

LEASES_S = 1.0
"""How often it is looked for leases whose time is over."""

MARK_S = 600.0
"""How often all that is queued is marked as due, beside the marks that every change leaves."""

RECONNECT_S = 0.5

PUT_BACK_S = 5.0
"""After a fault of this host a delivery is due again."""


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """`concurrency`: attempts in flight.

    For one webhook `per_webhook` at first, up to `per_webhook_max` while it accepts promptly, fewer as slots run short.

    `lease_s` must exceed an attempt's deadline; `poll_s` bounds a lost NOTIFY.
    """

    schedule_s: Sequence[float] = SCHEDULE_S
    concurrency: int = 4096
    per_webhook: int = 10
    per_webhook_max: int = 256
    parking: Parking = DEFAULT_PARKING
    lease_s: float = 60.0
    poll_s: float = 1.0
    drain_s: float = 20.0


class _Attempt:
    """One attempt that is under way."""

    __slots__ = ("began_at_s", "delivery", "started_at", "wave")

    def __init__(self, delivery: Delivery, wave: int, started_at: datetime, began_at_s: float) -> None:
        self.delivery = delivery
        self.wave = wave
        self.started_at = started_at
        self.began_at_s = began_at_s  # of the loop's clock


class Dispatcher:
    """Turns deliveries into attempts until it is told to stop; any number of them may run."""

    def __init__(
        self,
        database: Database,
        sender: Sender,
        signer: Signer,
        clock: ServiceClock,
        options: DispatchOptions,
        rng: random.Random,
    ) -> None:
        self._database = database
        self._sender = sender
        self._signer = signer
        self._clock = clock
        self._options = options
        self._rng = rng
        self._slots = SlotPolicy(options.concurrency, options.per_webhook, options.per_webhook_max)
        self._limited = False  # whether limits other than `per_webhook` may have left something that is due
        self._stopping = False
        self._being_claimed = 0  # at most: what turns under way have asked for
        self._after = ""  # the webhook whose turn was last
        self._ready: deque[Delivery] = deque()
        self._posting = 0  # attempts of the present wave that have no answer yet
        self._wave = 0
        self._next_wave: asyncio.TimerHandle | None = None
        self._attempts: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._joining: asyncio.TimerHandle | None = None
        self._accepted: list[Settlement] = []
        self._plenty_accepted = asyncio.Event()
        self._others: list[Settlement] = []
        self._some_others = asyncio.Event()
        self._prevented: list[tuple[Delivery, Reply]] = []
        self._some_prevented = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set, then claims nothing more and waits for what is in flight, at most `drain_s`.

        What is given up then is attempted again by whoever finds its lease ended.
        """
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(self._listen()), group.create_task(self._settle_others())]
            helpers += [group.create_task(self._end_leases()), group.create_task(self._wake_on(stop))]
            helpers.append(group.create_task(self._put_back_prevented()))
            helpers.append(group.create_task(self._turns_beside(stop, group)))
            turns = group.create_task(self._turns(stop, group))
            await stop.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.drain_s):
                    await turns
            log.info("dispatch_drained", left=self._slots.in_flight)
            self._ready.clear()
            for task in (*helpers, *self._attempts):
                task.cancel()

    async def _turns(self, stop: asyncio.Event, group: asyncio.TaskGroup) -> None:
        """One turn after the other until `stop` is set and nothing is in flight."""
        while self._slots.in_flight or not stop.is_set():
            self._wake.clear()
            try:
                found, room = await self._turn(stop, group)
                if room and found == room:
                    continue
                if await self._woken(QUIET_S):
                    if len(self._accepted) < WAVE and self._posting > 0:
                        await asyncio.sleep(SETTLE_WINDOW_S)
                    continue
                due_s = await next_due_s(self._database, self._options.per_webhook) if room else FULL_S
                if self._limited and due_s is not None:
                    due_s = max(due_s, FULL_S)  # the settle that makes room claims again
            except DatabaseUnavailable as error:
                log.warning("dispatch_waits", problem=str(error), retry_in_s=RECONNECT_S)
                due_s = RECONNECT_S
            await self._woken(self._options.poll_s if due_s is None else min(due_s, self._options.poll_s))

    async def _turns_beside(self, stop: asyncio.Event, group: asyncio.TaskGroup) -> None:
        """A second turn beside the one that is under way, when enough was accepted meanwhile."""
        while True:
            await self._plenty_accepted.wait()
            self._plenty_accepted.clear()
            try:
                await self._turn(stop, group)
            except DatabaseUnavailable as error:
                log.warning("dispatch_waits", problem=str(error), retry_in_s=RECONNECT_S)
                await asyncio.sleep(RECONNECT_S)

    def _room(self, settling: int) -> int:
        """How many to claim while so many are settled: none while half a batch has not been begun."""
        if len(self._ready) > BATCH // 2:
            return 0
        return min(self._slots.room(settling, self._being_claimed), BATCH)

    async def _turn(self, stop: asyncio.Event, group: asyncio.TaskGroup) -> tuple[int, int]:
        """Settles what was accepted and claims what there is room for; how many were claimed, of how many."""
        accepted, self._accepted = self._accepted[:BATCH], self._accepted[BATCH:]
        room = 0 if stop.is_set() else self._room(len(accepted))
        self._being_claimed += room
        try:
            found = await self._settle_and_claim(accepted, room, group)
        except DatabaseUnavailable:
            self._accepted += accepted
            raise
        finally:
            self._being_claimed -= room
        return found, room

    async def _settle_and_claim(self, accepted: Sequence[Settlement], room: int, group: asyncio.TaskGroup) -> int:
        options, lease, now_s = self._options, uuid4(), asyncio.get_running_loop().time()
        scarce, limits = self._slots.scarce(len(accepted), now_s), self._slots.limits(len(accepted))
        claiming = (room, lease, options.lease_s, options.per_webhook, self._after, scarce, limits)
        if accepted:
            settled, claimed = await settle_and_claim(self._database, accepted, *claiming)
            if settled is None:
                self._settle_apart(accepted)
            else:
                self._settled(accepted, settled)
        elif room:
            claimed = await claim(self._database, *claiming)
        else:
            return 0
        self._after = claimed.last
        self._limited = scarce is not None
        if claimed.database_time is not None:
            self._clock.check(claimed.database_time)
        found = len(claimed.deliveries)
        if accepted and found >= room:  # there was no room for all, or none before these were settled
            self._wake.set()
        if found:
            for delivery in claimed.deliveries:
                self._slots.begin(delivery.target)
            self._ready.extend(claimed.deliveries)
            self._start(group)
        return found

    def _settle_apart(self, settlements: Sequence[Settlement]) -> None:
        self._others += settlements
        self._some_others.set()

    def _settled(self, batch: Sequence[Settlement], settled: Settled) -> None:
        states: Counter[str] = Counter([one.state for one in batch])
        log.info("attempts_settled", **states)
        metrics.attempts(batch)
        if settled.held < len(batch):
            log.warning("leases_lost", attempts=len(batch) - settled.held)
        for parked in settled.parked:
            _tell(parked)
        for settlement in batch:
            self._slots.end(settlement.delivery.target)
        if self._stopping:
            self._wake.set()

    def _start(self, group: asyncio.TaskGroup) -> None:
        """Begins the next attempts, a wave at a time: few connections and warm caches where answers are quick."""
        while self._ready and self._posting < WAVE:
            delivery = self._ready.popleft()
            self._posting += 1
            now_s = asyncio.get_running_loop().time()
            self._attempt(_Attempt(delivery, self._wave, self._clock.now(), now_s), group)
            if len(self._ready) == BATCH // 2:
                self._wake.set()
        if self._ready and self._next_wave is None:
            self._next_wave = asyncio.get_running_loop().call_later(WAVE_S, self._begin_wave, group)

    def _begin_wave(self, group: asyncio.TaskGroup) -> None:
        """Waits no longer for those that are slow."""
        self._wave += 1
        self._posting = 0
        self._next_wave = None
        self._start(group)

    def _join(self) -> None:
        """Wait for no claim any longer: settle what was accepted."""
        self._joining = None
        self._wake.set()

    async def _woken(self, within_s: float) -> bool:
        """Waits until there may be something to claim; False when nobody said so in time."""
        try:
            async with asyncio.timeout(max(within_s, 0.001)):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def _attempt(self, attempt: _Attempt, group: asyncio.TaskGroup) -> None:
        delivery, at = attempt.delivery, attempt.started_at
        target = delivery.target

        def answered(reply: Reply) -> None:
            try:
                self._answered(attempt, reply, group)
            except Exception as bug:  # in the event loop's hands it would only be logged
                self._bug(bug, group)

        try:
            headers = self._signer.headers(
                target.webhook_id, target.secrets, delivery.event_id, delivery.body, delivery.attempt, at
            )
        except SealBroken as problem:
            log.error("secret_unreadable", webhook_id=target.webhook_id, problem=str(problem))
            asyncio.get_running_loop().call_soon(answered, Reply(None, "sealed", None, "", 0, None))
            return
        if not self._sender.try_post(target.url, delivery.body, headers, answered, target.account_id):
            task = group.create_task(self._connect_and_post(delivery, headers, answered))
            self._attempts.add(task)
            task.add_done_callback(self._attempts.discard)

    async def _connect_and_post(
        self, delivery: Delivery, headers: Mapping[str, str], answered: Callable[[Reply], None]
    ) -> None:
        answered(await self._sender.send(delivery.target.url, delivery.body, headers, delivery.target.account_id))

    def _bug(self, bug: Exception, group: asyncio.TaskGroup) -> None:
        """Ends the dispatcher with it, as every other bug does."""

        async def fail() -> None:
            raise bug

        self._attempts.add(group.create_task(fail()))

    def _answered(self, attempt: _Attempt, reply: Reply, group: asyncio.TaskGroup) -> None:
        webhook_id, now_s = attempt.delivery.target.webhook_id, asyncio.get_running_loop().time()
        if reply.status is not None and 200 <= reply.status < 300:
            self._accepted.append(_settlement(attempt.delivery, "delivered", attempt.started_at, reply))
            self._slots.accepted(webhook_id, attempt.began_at_s, now_s)
            if self._stopping or self._slots.pressed(webhook_id):
                self._wake.set()
            elif self._joining is None:
                self._joining = asyncio.get_running_loop().call_later(JOIN_S, self._join)
            if len(self._accepted) >= PLENTY:
                self._plenty_accepted.set()
        elif (failed := self._failed(attempt.delivery, attempt.started_at, reply)) is not None:
            self._slots.failed(webhook_id, attempt.began_at_s, now_s)
            self._settle_apart([failed])
        else:
            self._prevented.append((attempt.delivery, reply))
            self._some_prevented.set()
        if attempt.wave == self._wave:
            self._posting -= 1
            self._start(group)

    def _failed(self, delivery: Delivery, started_at: datetime, reply: Reply) -> Settlement | None:
        """Return what follows from an attempt that was not accepted; None where this host prevented it."""
        outcome = Outcome(reply.status, reply.error, reply.retry_after)
        verdict = judge(outcome, delivery.attempt, self._options.schedule_s, self._rng.random(), self._clock.now())
        if isinstance(verdict, NotAttempted):
            return None
        log.info(
            "attempt_failed",
            event_id=delivery.event_id,
            webhook_id=delivery.webhook_id,
            attempt=delivery.attempt,
            status=reply.status,
            error=reply.error,
            duration_ms=reply.duration_ms,
            verdict=type(verdict).__name__.lower(),
        )
        match verdict:
            case Retry(after_s, park_s):
                return _settlement(delivery, "scheduled", started_at, reply, after_s=after_s, park_s=park_s)
            case Exhausted(park_s):
                return _settlement(delivery, "exhausted", started_at, reply, park_s=park_s)
            case Gone():
                return _settlement(delivery, "parked", started_at, reply, gone=True)
            case Delivered():
                return _settlement(delivery, "delivered", started_at, reply)

    async def _settle_others(self) -> None:
        """Settles what was not accepted. A batch is what came in a few ms, so nobody waits for a slow receiver."""
        while True:
            await self._some_others.wait()
            if len(self._others) < BATCH and self._posting > 0:
                await asyncio.sleep(SETTLE_WINDOW_S)
            batch, self._others = self._others[:BATCH], self._others[BATCH:]
            if not self._others:
                self._some_others.clear()
            while True:
                try:
                    settled = await settle(self._database, batch, self._options.parking)
                    break
                except DatabaseUnavailable as error:
                    log.warning("settle_waits", problem=str(error), attempts=len(batch), retry_in_s=RECONNECT_S)
                    await asyncio.sleep(RECONNECT_S)
            self._settled(batch, settled)
            self._wake.set()

    async def _put_back_prevented(self) -> None:
        """Make due again what a fault of this host prevented: it counts for no schedule and no webhook's health."""
        while True:
            await self._some_prevented.wait()
            await asyncio.sleep(SETTLE_WINDOW_S)
            batch, self._prevented = self._prevented[:BATCH], self._prevented[BATCH:]
            if not self._prevented:
                self._some_prevented.clear()
            while True:
                try:
                    await put_back(self._database, [delivery for delivery, _ in batch], PUT_BACK_S)
                    break
                except DatabaseUnavailable as error:
                    log.warning("put_back_waits", problem=str(error), attempts=len(batch), retry_in_s=RECONNECT_S)
                    await asyncio.sleep(RECONNECT_S)
            faults = Counter(str(reply.error) for _, reply in batch)
            log.warning("attempts_put_back", **faults, problem=batch[0][1].excerpt, retry_in_s=PUT_BACK_S)
            metrics.put_back(faults.elements())
            for delivery, _ in batch:
                self._slots.end(delivery.target)
            self._wake.set()

    async def _end_leases(self) -> None:
        """Takes over what a process that died or froze has left."""
        mark_at_s = 0.0
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                if asyncio.get_running_loop().time() >= mark_at_s:
                    await mark_queued(self._database)
                    mark_at_s = asyncio.get_running_loop().time() + MARK_S
                    self._wake.set()
                if ended := await end_leases(self._database):
                    log.warning("leases_ended", leases=ended)
                    self._wake.set()
            await asyncio.sleep(LEASES_S)

    async def _listen(self) -> None:
        """Wakes the claimer at each NOTIFY; the poll interval covers whatever is lost here."""
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                await self._database.listen(DELIVERIES_CHANNEL, self._wake.set)
            await asyncio.sleep(RECONNECT_S)

    async def _wake_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._stopping = True
        self._wake.set()


def _tell(parked: Parked) -> None:
    streak = parked.streak
    log.info(
        "webhook_parked",
        webhook_id=parked.webhook_id,
        until=streak.parked_until,
        failures=streak.failures,
        failing_since=streak.first_failure_at,
    )


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
