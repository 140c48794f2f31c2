"""The lanes of customers: deliveries, and what accounts request beside the schedule (rule D11).

A lane is what differs between kinds of attempts: how they are claimed, signed, judged, settled and put back.
`dispatch/attempts.py` runs every lane the same way. Notices for the operator are a lane, too: `dispatch/notifier.py`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

import structlog

from vaultevents import metrics
from vaultevents.core.retries import SCHEDULE_S, Exhausted, NotAttempted, Outcome, Verdict, judge
from vaultevents.core.webhook_health import DEFAULT_PARKING, Parking
from vaultevents.dispatch.sender import Reply
from vaultevents.dispatch.signer import Signer
from vaultevents.store import deliveries as queue
from vaultevents.store import leases
from vaultevents.store.deliveries import Claim, ClaimRequest, Delivery, Settled, Settlement
from vaultevents.store.pool import DELIVERIES_CHANNEL, Database
from vaultevents.store.resends import RESENDS_CHANNEL, claim_resends, put_back_resends, settle_resends


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


@dataclass(frozen=True, slots=True)
class ResendOptions(DispatchOptions):
    """Slots of resends: no webhook gets more than `per_webhook`.

    An account gets more only while it has fewer than are free, so some stay free for others: alone it has half.
    """

    schedule_s: Sequence[float] = ()
    concurrency: int = 128
    per_webhook_max: int = 0


Sign = Callable[[Delivery, datetime], Mapping[str, str]]
"""Returns the headers of an attempt that is made at a time. Raises `SealBroken` when a secret cannot be opened."""


class Lane(ABC):
    """What differs between deliveries, resends and notices; every method may raise `DatabaseUnavailable`."""

    log: ClassVar[Any]
    waits: ClassVar[str]
    """The log event for a cycle that the database prevented."""

    channel: ClassVar[str | None] = None

    def __init__(self, database: Database, options: DispatchOptions, sign: Sign) -> None:
        self.database = database
        self.options = options
        self.sign = sign

    @abstractmethod
    async def claim(self, request: ClaimRequest) -> Claim:
        """Lease what is due."""

    @abstractmethod
    def judge(self, delivery: Delivery, reply: Reply, now: datetime) -> Verdict:
        """Say what follows from an attempt that was not accepted."""

    @abstractmethod
    async def settle(self, settlements: Sequence[Settlement]) -> Settled:
        """Write finished attempts."""

    @abstractmethod
    async def put_back(self, prevented: Sequence[tuple[Delivery, Reply]], after_s: float) -> None:
        """Make deliveries due again in `after_s` seconds as if they had not been claimed; log and count them."""

    async def settle_and_claim(
        self, accepted: Sequence[Settlement], request: ClaimRequest
    ) -> tuple[Settled | None, Claim]:
        """Write accepted attempts and claim, in one commit. Without a `Settled` they have to be settled apart."""
        return None, await self.claim(request) if request.limit else Claim()

    async def next_due_s(self) -> float | None:
        """Return the seconds until something can be claimed, or None where only time and NOTIFY say so."""
        return None

    async def end_leases(self) -> int:
        """Make due again what was not settled in time; return how many leases ended."""
        return 0

    async def maintain(self) -> None:
        """Do what is needed at the start and every ten minutes."""
        return

    def report_settled(self, batch: Sequence[Settlement], settled: Settled) -> None:
        """Log and count what was settled."""
        return

    def report_drained(self, left: int) -> None:
        """Log that the lane has stopped, with `left` attempts that were cancelled."""
        return


class DeliveryLane(Lane):
    """Events for webhooks, on the schedule, with the health of the webhook."""

    log = structlog.get_logger("dispatch")
    waits = "dispatch_waits"
    channel = DELIVERIES_CHANNEL

    def __init__(self, database: Database, signer: Signer, options: DispatchOptions, rng: random.Random) -> None:
        super().__init__(database, options, signer.headers)
        self._rng = rng

    async def claim(self, request: ClaimRequest) -> Claim:
        return await queue.claim(self.database, request)

    async def settle_and_claim(
        self, accepted: Sequence[Settlement], request: ClaimRequest
    ) -> tuple[Settled | None, Claim]:
        return await queue.settle_and_claim(self.database, accepted, request)

    async def next_due_s(self) -> float | None:
        return await queue.next_due_s(self.database, self.options.per_webhook)

    async def end_leases(self) -> int:
        return await leases.end_leases(self.database)

    async def maintain(self) -> None:
        await leases.mark_queued(self.database)

    def judge(self, delivery: Delivery, reply: Reply, now: datetime) -> Verdict:
        verdict = judge(outcome(reply), delivery.attempt, self.options.schedule_s, self._rng.random(), now)
        if not isinstance(verdict, NotAttempted):
            self.log.info(
                "attempt_failed",
                event_id=delivery.event_id,
                webhook_id=delivery.webhook_id,
                attempt=delivery.attempt,
                status=reply.status,
                error=reply.error,
                duration_ms=reply.duration_ms,
                verdict=type(verdict).__name__.lower(),
            )
        return verdict

    async def settle(self, settlements: Sequence[Settlement]) -> Settled:
        return await queue.settle(self.database, settlements, self.options.parking)

    def report_settled(self, batch: Sequence[Settlement], settled: Settled) -> None:
        self.log.info("attempts_settled", **Counter[str](settlement.state for settlement in batch))
        metrics.attempts(batch)
        for parked in settled.parked:
            self.log.info(
                "webhook_parked",
                webhook_id=parked.webhook_id,
                until=parked.streak.parked_until,
                failures=parked.streak.failures,
                failing_since=parked.streak.first_failure_at,
            )

    async def put_back(self, prevented: Sequence[tuple[Delivery, Reply]], after_s: float) -> None:
        await leases.put_back(self.database, [delivery for delivery, _ in prevented], after_s)
        faults = Counter(str(reply.error) for _, reply in prevented)
        self.log.warning("attempts_put_back", **faults, problem=prevented[0][1].excerpt, retry_in_s=after_s)
        metrics.put_back(faults.elements())

    def report_drained(self, left: int) -> None:
        self.log.info("dispatch_drained", left=left)


class ResendLane(Lane):
    """Resends, recoveries and tests: one attempt each, never retried, and not counted towards webhook health."""

    log = structlog.get_logger("resend")
    waits = "resends_wait"
    channel = RESENDS_CHANNEL

    def __init__(self, database: Database, signer: Signer, options: ResendOptions) -> None:
        super().__init__(database, options, signer.headers)

    async def claim(self, request: ClaimRequest) -> Claim:
        return await claim_resends(self.database, request)

    async def end_leases(self) -> int:
        return await leases.end_leases(self.database)

    def judge(self, delivery: Delivery, reply: Reply, now: datetime) -> Verdict:
        verdict = judge(outcome(reply), delivery.attempt, (), 0.0, now)
        if reply.error == "sealed":  # it lasts, and the customer who asked has to see it
            return Exhausted()
        return verdict

    async def settle(self, settlements: Sequence[Settlement]) -> Settled:
        return Settled(await settle_resends(self.database, settlements))

    def report_settled(self, batch: Sequence[Settlement], settled: Settled) -> None:
        self.log.info("resends_settled", attempts=len(batch), accepted=sum(settlement.accepted for settlement in batch))
        metrics.resends(batch)

    async def put_back(self, prevented: Sequence[tuple[Delivery, Reply]], after_s: float) -> None:
        await put_back_resends(self.database, [delivery for delivery, _ in prevented], after_s)
        problem = prevented[0][1].excerpt
        self.log.warning("attempts_put_back", resends=len(prevented), problem=problem, retry_in_s=after_s)
        metrics.put_back(str(reply.error) for _, reply in prevented)


def outcome(reply: Reply) -> Outcome:
    """Return the part of a reply that decides what follows from it."""
    return Outcome(reply.status, reply.error, reply.retry_after)
