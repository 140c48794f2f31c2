"""Sends what accounts ask for beside the schedule (rule D11): claim, one attempt each, settle in batches.

It works as the dispatcher does and shares its sender, so the rules of egress, deadlines and signatures are the same;
it shares no slot with it, so that a recovery delays no delivery, and no full queue delays a test.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import structlog

from vaultevents import metrics
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.retries import LOCAL_FAULTS, Exhausted, Outcome, judge
from vaultevents.core.sealing import SealBroken
from vaultevents.dispatch.sender import Reply, Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.store.clock import ServiceClock
from vaultevents.store.pool import Database
from vaultevents.store.resends import (
    RESENDS_CHANNEL,
    Resend,
    ResendResult,
    claim_resends,
    put_back_resends,
    settle_resends,
)

log = structlog.get_logger("resend")

BATCH: Final = 100
SETTLE_WINDOW_S: Final = 0.005
RECONNECT_S: Final = 0.5
PUT_BACK_S: Final = 5.0
"""After a fault of this host a request is due again."""

_PUT_BACK: Final = LOCAL_FAULTS - {"sealed"}  # that would last, and the customer who asked has to see it


@dataclass(frozen=True, slots=True)
class ResendOptions:
    """`concurrency`: attempts in flight, at most `per_webhook` of them for one webhook.

    An account gets more only while it has fewer than are free, so some stay free for others: alone it has half.

    `lease_s` must exceed an attempt's deadline; `poll_s` bounds a lost NOTIFY.
    """

    concurrency: int = 128
    per_webhook: int = 10
    lease_s: float = 60.0
    poll_s: float = 1.0
    drain_s: float = 20.0


class Resender:
    """Attempts each request once until it is told to stop; any number of them may run."""

    def __init__(
        self, database: Database, sender: Sender, signer: Signer, clock: ServiceClock, options: ResendOptions
    ) -> None:
        self._database = database
        self._sender = sender
        self._signer = signer
        self._clock = clock
        self._options = options
        self._in_flight = 0
        self._attempts: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._finished: asyncio.Queue[ResendResult] = asyncio.Queue()

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
            for task in (*helpers, *self._attempts):
                task.cancel()

    async def _claim_until(self, stop: asyncio.Event, group: asyncio.TaskGroup) -> None:
        while not stop.is_set():
            self._wake.clear()
            wait_s = self._options.poll_s
            try:
                await self._claim(group)
            except DatabaseUnavailable as error:
                log.warning("resends_wait", problem=str(error), retry_in_s=RECONNECT_S)
                wait_s = RECONNECT_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _claim(self, group: asyncio.TaskGroup) -> None:
        options = self._options
        free = options.concurrency - self._in_flight
        if not free:
            return
        room = min((free + 1) // 2, BATCH)
        claimed = await claim_resends(self._database, room, uuid4(), options.lease_s, options.per_webhook, free)
        if len(claimed) == room:
            self._wake.set()
        self._in_flight += len(claimed)
        for resend in claimed:
            attempt = group.create_task(self._attempt(resend))
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)

    async def _attempt(self, resend: Resend) -> None:
        started_at = self._clock.now()
        target = resend.target
        try:
            headers = self._signer.headers(
                target.webhook_id, target.secrets, resend.event_id, resend.body, resend.attempt, started_at
            )
        except SealBroken as problem:
            log.error("secret_unreadable", webhook_id=target.webhook_id, problem=str(problem))
            reply = Reply(None, "sealed", None, "", 0, None)
        else:
            reply = await self._sender.send(target.url, resend.body, headers, target.account_id)
        self._finished.put_nowait(
            ResendResult(
                resend,
                started_at,
                reply.duration_ms,
                reply.status,
                reply.error,
                reply.excerpt,
                reply.address,
                reply.timing,
                self._pause_s(reply),
            )
        )

    def _pause_s(self, reply: Reply) -> float:
        """What the receiver asks for (rule D6). Nothing else follows from an attempt that is never retried."""
        verdict = judge(Outcome(reply.status, reply.error, reply.retry_after), 1, (), 0.0, self._clock.now())
        return verdict.park_s if isinstance(verdict, Exhausted) else 0.0

    async def _settle_all(self) -> None:
        while True:
            batch = [await self._finished.get()]
            await asyncio.sleep(SETTLE_WINDOW_S)
            while len(batch) < BATCH and not self._finished.empty():
                batch.append(self._finished.get_nowait())
            finished = [result for result in batch if result.error not in _PUT_BACK]
            prevented = [result for result in batch if result.error in _PUT_BACK]
            while True:
                try:
                    await put_back_resends(self._database, [result.resend for result in prevented], PUT_BACK_S)
                    held = await settle_resends(self._database, finished)
                    break
                except DatabaseUnavailable as error:
                    log.warning("settle_waits", problem=str(error), attempts=len(batch), retry_in_s=RECONNECT_S)
                    await asyncio.sleep(RECONNECT_S)
            if prevented:
                problem = prevented[0].excerpt
                log.warning("attempts_put_back", resends=len(prevented), problem=problem, retry_in_s=PUT_BACK_S)
                metrics.put_back(str(result.error) for result in prevented)
            if finished:
                log.info(
                    "resends_settled", attempts=len(finished), accepted=sum(result.accepted for result in finished)
                )
                metrics.resends(finished)
            if held < len(finished):
                log.warning("leases_lost", attempts=len(finished) - held)
            self._in_flight -= len(batch)
            self._wake.set()

    async def _listen(self) -> None:
        """Wakes the claimer at each NOTIFY; the poll interval covers whatever is lost here."""
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                await self._database.listen(RESENDS_CHANNEL, self._wake.set)
            await asyncio.sleep(RECONNECT_S)

    async def _wake_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._wake.set()
