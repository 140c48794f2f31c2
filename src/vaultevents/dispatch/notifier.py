"""Notify the operator: each notice once as a log line, and at least once at the operator's webhook if there is one.

Notices are a lane of their own, with connections of their own, so that no delivery waits for them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import structlog

from vaultevents import __version__, metrics
from vaultevents.core.retries import Verdict, judge
from vaultevents.core.sealing import Secret
from vaultevents.core.signing import delivery_headers
from vaultevents.core.units import checksum
from vaultevents.dispatch.lanes import DispatchOptions, Lane, outcome
from vaultevents.dispatch.sender import Reply
from vaultevents.store.deliveries import Claim, ClaimRequest, Delivery, Settled, Settlement, Target
from vaultevents.store.notices import ClaimedNotice, Kind, claim_notices, finish, forget, postpone
from vaultevents.store.pool import Database

SLOTS: Final = 8
"""Attempts in flight; all of them go to the same webhook."""

ADVICE: Final[dict[Kind, str]] = {
    "webhook_failing": "tell its owner: it is switched off at twice this time",
    "webhook_disabled": "its owner can switch it on again; nothing is lost",
    "delivery_exhausted": "tell its owner: these events are not sent again, but stay in the event feed",
    "webhook_enabled": "nothing to do: what was parked is being sent",
    "logs_quarantined": "see 'vaultevents quarantine list': these logs cannot be decoded, their events are withheld",
}


@dataclass(frozen=True, slots=True)
class OperatorWebhook:
    """Where notices are posted, and what signs them."""

    url: str
    secret: Secret


class NoticeLane(Lane):
    """Notices for the operator, on the schedule of deliveries; without a webhook the log line is all there is."""

    log = structlog.get_logger("notices")
    waits = "notices_wait"

    def __init__(
        self, database: Database, webhook: OperatorWebhook | None, options: DispatchOptions, rng: random.Random
    ) -> None:
        options = replace(options, concurrency=SLOTS, per_webhook=SLOTS, per_webhook_max=SLOTS)
        super().__init__(database, options, self._headers)
        self._webhook = webhook
        self._rng = rng

    async def claim(self, request: ClaimRequest) -> Claim:
        if self._webhook is None:
            while await self._log_and_finish(request):
                pass
            return Claim()
        claimed = await claim_notices(self.database, request.limit, request.lease, request.lease_s)
        target = Target("operator", self._webhook.url, (), "")
        deliveries = []
        for notice in claimed:
            if notice.attempt == 1:
                self._log_notice(notice)
            body = notice_body(notice)
            deliveries.append(Delivery(0, notice.lease, notice.attempt, str(notice.id), body, target))
        return Claim(tuple(deliveries))

    async def _log_and_finish(self, request: ClaimRequest) -> bool:
        """Without a webhook a line is all there is, so it may be repeated. Return whether there may be more."""
        claimed = await claim_notices(self.database, request.limit, request.lease, request.lease_s)
        for notice in claimed:
            self._log_notice(notice)
            await finish(self.database, notice.id, notice.lease, sent=False)
        return len(claimed) == request.limit

    def _log_notice(self, notice: ClaimedNotice) -> None:
        write = self.log.info if notice.kind == "webhook_enabled" else self.log.warning
        write(notice.kind, advice=ADVICE[notice.kind], **_facts(notice))
        metrics.notice(notice.kind)

    async def maintain(self) -> None:
        await forget(self.database)

    def _headers(self, delivery: Delivery, at: datetime) -> Mapping[str, str]:
        return delivery_headers(
            secret_texts=[] if self._webhook is None else [self._webhook.secret.reveal()],
            webhook_id=delivery.event_id,
            timestamp_s=int(at.timestamp()),
            body=delivery.body,
            attempt_number=delivery.attempt,
            version=__version__,
        )

    def judge(self, delivery: Delivery, reply: Reply, now: datetime) -> Verdict:
        return judge(outcome(reply), delivery.attempt, self.options.schedule_s, self._rng.random(), now)

    async def settle(self, settlements: Sequence[Settlement]) -> Settled:
        return Settled(sum([await self._settle(settlement) for settlement in settlements]))

    async def _settle(self, settlement: Settlement) -> bool:
        delivery = settlement.delivery
        notice_id = UUID(delivery.event_id)
        if settlement.state == "scheduled":
            return await postpone(self.database, notice_id, delivery.lease, settlement.after_s)
        held = await finish(self.database, notice_id, delivery.lease, sent=settlement.accepted)
        if not settlement.accepted:
            self.log.error(
                "notice_not_sent",
                id=delivery.event_id,
                status=settlement.status,
                error=settlement.error,
                advice="correct the receiver at operator.webhook_url: this notice is not posted again",
            )
        return held

    async def put_back(self, prevented: Sequence[tuple[Delivery, Reply]], after_s: float) -> None:
        for delivery, reply in prevented:
            await postpone(self.database, UUID(delivery.event_id), delivery.lease, after_s, attempted=False)
            self.log.warning("notice_waits", error=reply.error, problem=reply.excerpt, retry_in_s=after_s)


def notice_body(notice: ClaimedNotice) -> bytes:
    """Return the JSON body of a notice: the same bytes at every attempt (docs/operations.md, Notices)."""
    body = {"id": str(notice.id), "type": notice.kind, "created_at": _text(notice.created_at), "data": _facts(notice)}
    return json.dumps(body, separators=(",", ":")).encode()


def _facts(notice: ClaimedNotice) -> dict[str, Any]:
    if notice.address is not None:
        return {"address": checksum(notice.address), "block": notice.block_number, "count": notice.count}
    return {
        "account_id": notice.account_id,
        "webhook_id": notice.webhook_id,
        "reason": notice.reason,
        "count": notice.count,
        "failures": notice.failures,
        "failing_since": None if notice.failing_since is None else _text(notice.failing_since),
    }


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
