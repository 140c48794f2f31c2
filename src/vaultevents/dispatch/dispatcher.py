"""Claims due deliveries, posts them with bounded concurrency, settles the attempts in batches (architecture §5).

No transaction is open during a POST. A slot is free again only when its attempt is settled, so what is in memory is
bounded; a process that dies loses only leases, which end by themselves and are attempted again (P5, P10).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from uuid import uuid4

import structlog

from vaultevents import __version__
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.retries import SCHEDULE_S, Delivered, Exhausted, Gone, Outcome, Retry, Verdict, judge
from vaultevents.core.sealing import MasterKey, Secret, open_sealed
from vaultevents.core.signing import delivery_headers
from vaultevents.core.streaks import DEFAULT_PARKING, Parking
from vaultevents.dispatch.sender import Sender
from vaultevents.store.clock import ServiceClock
from vaultevents.store.deliveries import Delivery, Notice, SealedSecret, Settlement, claim, next_due_s, settle
from vaultevents.store.pool import DELIVERIES_CHANNEL, Database

log = structlog.get_logger("dispatch")

BATCH = 500
SETTLE_WINDOW_S = 0.005
RECONNECT_S = 0.5


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """`concurrency`: attempts in flight, `per_webhook` of them for one webhook.

    `lease_s` must exceed an attempt's deadline; `poll_s` bounds a lost NOTIFY.
    """

    schedule_s: Sequence[float] = SCHEDULE_S
    concurrency: int = 64
    per_webhook: int = 10
    parking: Parking = DEFAULT_PARKING
    lease_s: float = 60.0
    poll_s: float = 1.0
    drain_s: float = 20.0
    plain_header: str | None = None


class Dispatcher:
    """Turns deliveries into attempts until it is told to stop; any number of them may run."""

    def __init__(
        self,
        database: Database,
        sender: Sender,
        keys: Mapping[str, MasterKey],
        clock: ServiceClock,
        options: DispatchOptions,
        rng: random.Random,
    ) -> None:
        self._database = database
        self._sender = sender
        self._clock = clock
        self._options = options
        self._rng = rng
        self._in_flight = 0
        self._attempts: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._finished: asyncio.Queue[Settlement] = asyncio.Queue()

        @lru_cache(maxsize=4096)
        def unseal(webhook_id: str, secret: SealedSecret) -> Secret:
            return open_sealed(keys[secret.key_id], secret.sealed, webhook_id)

        self._unseal = unseal

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set, then claims nothing more and waits for what is in flight, at most `drain_s`.

        What is given up then is attempted again by whoever finds its lease ended.
        """
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(self._listen()), group.create_task(self._settle_all())]
            helpers.append(group.create_task(self._wake_on(stop)))
            await self._claim_until(stop, group)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.drain_s):
                    while self._in_flight:
                        self._wake.clear()
                        await self._wake.wait()
            log.info("dispatch_drained", left=self._in_flight)
            for task in (*helpers, *self._attempts):
                task.cancel()

    async def _claim_until(self, stop: asyncio.Event, group: asyncio.TaskGroup) -> None:
        while not stop.is_set():
            self._wake.clear()
            wait_s = self._options.poll_s
            if free := min(self._options.concurrency - self._in_flight, BATCH):
                try:
                    options = self._options
                    claimed = await claim(self._database, free, uuid4(), options.lease_s, options.per_webhook)
                    self._clock.check(claimed.database_time)
                    for delivery in claimed.deliveries:
                        self._in_flight += 1
                        attempt = group.create_task(self._attempt(delivery))
                        self._attempts.add(attempt)
                        attempt.add_done_callback(self._attempts.discard)
                    if len(claimed.deliveries) < free:
                        due_s = await next_due_s(self._database, options.per_webhook)
                        wait_s = wait_s if due_s is None else min(wait_s, due_s)
                except DatabaseUnavailable as error:
                    log.warning("dispatch_waits", problem=str(error), retry_in_s=RECONNECT_S)
                    wait_s = RECONNECT_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(wait_s, 0.001))

    async def _attempt(self, delivery: Delivery) -> None:
        started_at = self._clock.now()
        headers = delivery_headers(
            secret_texts=[self._unseal(delivery.webhook_id, secret).reveal() for secret in delivery.target.secrets],
            webhook_id=delivery.event_id,
            timestamp_s=int(started_at.timestamp()),
            body=delivery.body,
            attempt_number=delivery.attempt,
            version=__version__,
            plain_header=self._options.plain_header,
        )
        reply = await self._sender.send(delivery.target.url, delivery.body, headers)
        outcome = Outcome(reply.status, reply.error, reply.retry_after)
        now = self._clock.now()
        verdict = judge(outcome, delivery.attempt, self._options.schedule_s, self._rng.random(), now)
        log.info(
            "delivery_attempted",
            event_id=delivery.event_id,
            webhook_id=delivery.webhook_id,
            attempt=delivery.attempt,
            status=reply.status,
            error=reply.error,
            duration_ms=reply.duration_ms,
            verdict=type(verdict).__name__.lower(),
        )
        base = Settlement(
            delivery=delivery,
            state="scheduled",
            started_at=started_at,
            duration_ms=reply.duration_ms,
            status=reply.status,
            error=reply.error,
            excerpt=reply.excerpt,
            address=reply.address,
        )
        self._finished.put_nowait(_settlement(base, verdict))

    async def _settle_all(self) -> None:
        """Settles finished attempts. A batch is what came in a few ms, so nobody waits for a slow receiver."""
        while True:
            batch = [await self._finished.get()]
            await asyncio.sleep(SETTLE_WINDOW_S)
            while len(batch) < BATCH and not self._finished.empty():
                batch.append(self._finished.get_nowait())
            while True:
                try:
                    settled = await settle(self._database, batch, self._options.parking)
                    break
                except DatabaseUnavailable as error:
                    log.warning("settle_waits", problem=str(error), attempts=len(batch), retry_in_s=RECONNECT_S)
                    await asyncio.sleep(RECONNECT_S)
            if settled.held < len(batch):
                log.warning("leases_lost", attempts=len(batch) - settled.held)
            for notice in settled.notices:
                _tell(notice)
            self._in_flight -= len(batch)
            self._wake.set()

    async def _listen(self) -> None:
        """Wakes the claimer at each NOTIFY; the poll interval covers whatever is lost here."""
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                await self._database.listen(DELIVERIES_CHANNEL, self._wake.set)
            await asyncio.sleep(RECONNECT_S)

    async def _wake_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._wake.set()


def _tell(notice: Notice) -> None:
    """Says what an operator should know, and what to do."""
    streak = notice.streak
    facts = {"webhook_id": notice.webhook_id, "failures": streak.failures, "failing_since": streak.first_failure_at}
    match notice.kind:
        case "parked":
            log.info("webhook_parked", until=streak.parked_until, **facts)
        case "failing":
            log.warning("webhook_failing", advice="tell its owner: it is switched off at twice this time", **facts)
        case "disabled":
            log.warning("webhook_disabled", advice="its owner can switch it on again; nothing is lost", **facts)


def _settlement(base: Settlement, verdict: Verdict) -> Settlement:
    match verdict:
        case Delivered():
            return replace(base, state="delivered")
        case Retry(after_s, park_s):
            return replace(base, state="scheduled", after_s=after_s, park_s=park_s)
        case Exhausted(park_s):
            return replace(base, state="exhausted", park_s=park_s)
        case Gone():
            return replace(base, state="parked", gone=True)
