"""Tells the operator: each notice once as a line of the log, at least once to the operator's webhook if there is one.

It has connections of its own and claims by itself, so that no delivery waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

import structlog

from vaultevents import __version__, metrics
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.retries import Delivered, Exhausted, Gone, NotAttempted, Outcome, Retry, judge
from vaultevents.core.sealing import Secret
from vaultevents.core.signing import delivery_headers
from vaultevents.core.units import checksum
from vaultevents.dispatch.sender import Sender
from vaultevents.store.clock import ServiceClock
from vaultevents.store.notices import ClaimedNotice, Kind, claim_notices, finish, forget, postpone
from vaultevents.store.pool import Database

log = structlog.get_logger("notices")

BATCH = 8
FORGET_S = 3600.0
RECONNECT_S = 0.5
PUT_BACK_S = 5.0

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


class Notifier:
    """Tells notices until it is told to stop; any number of them may run."""

    def __init__(
        self,
        database: Database,
        sender: Sender,
        clock: ServiceClock,
        webhook: OperatorWebhook | None,
        schedule_s: Sequence[float],
        rng: random.Random,
        *,
        lease_s: float = 60.0,
        poll_s: float = 1.0,
    ) -> None:
        self._database = database
        self._sender = sender
        self._clock = clock
        self._webhook = webhook
        self._schedule_s = schedule_s
        self._rng = rng
        self._lease_s = lease_s
        self._poll_s = poll_s

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set, then finishes what it has claimed; `lease_s` must exceed an attempt's deadline."""
        loop = asyncio.get_running_loop()
        forget_at_s = loop.time()
        while not stop.is_set():
            pause_s = self._poll_s
            try:
                if loop.time() >= forget_at_s:
                    await forget(self._database)
                    forget_at_s = loop.time() + FORGET_S
                claimed = await claim_notices(self._database, BATCH, uuid4(), self._lease_s)
                results = await asyncio.gather(*map(self._tell, claimed), return_exceptions=True)
                if problem := next((one for one in results if isinstance(one, BaseException)), None):
                    raise problem
                if len(claimed) == BATCH:
                    continue
            except DatabaseUnavailable as error:
                log.warning("notices_wait", problem=str(error), retry_in_s=RECONNECT_S)
                pause_s = RECONNECT_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()

    async def _tell(self, notice: ClaimedNotice) -> None:
        if notice.attempt == 1 or self._webhook is None:  # with no URL the line is all there is, so it may come twice
            say = log.info if notice.kind == "webhook_enabled" else log.warning
            say(notice.kind, advice=ADVICE[notice.kind], **_facts(notice))
            metrics.notice(notice.kind)
        if self._webhook is None:
            await finish(self._database, notice, sent=False)
        else:
            await self._post(self._webhook, notice)

    async def _post(self, webhook: OperatorWebhook, notice: ClaimedNotice) -> None:
        body = notice_body(notice)
        headers = delivery_headers(
            secret_texts=[webhook.secret.reveal()],
            webhook_id=str(notice.id),
            timestamp_s=int(self._clock.now().timestamp()),
            body=body,
            attempt_number=notice.attempt,
            version=__version__,
        )
        reply = await self._sender.send(webhook.url, body, headers)
        outcome = Outcome(reply.status, reply.error, reply.retry_after)
        match judge(outcome, notice.attempt, self._schedule_s, self._rng.random(), self._clock.now()):
            case Delivered():
                await finish(self._database, notice, sent=True)
            case Retry(after_s, _):
                await postpone(self._database, notice, after_s)
            case NotAttempted():
                log.warning("notice_waits", error=reply.error, problem=reply.excerpt, retry_in_s=PUT_BACK_S)
                await postpone(self._database, notice, PUT_BACK_S, attempted=False)
            case Exhausted() | Gone():
                await finish(self._database, notice, sent=False)
                log.error(
                    "notice_not_sent",
                    id=str(notice.id),
                    status=reply.status,
                    error=reply.error,
                    advice="mend the receiver at operator.webhook_url: this notice is not posted again",
                )


def notice_body(notice: ClaimedNotice) -> bytes:
    """The JSON body of a notice: the same bytes at every attempt (docs/operations.md, Notices)."""
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
