"""Secrets that rotate under way, and a dispatcher with real receivers to see which of them sign."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime

from standardwebhooks import Webhook, WebhookVerificationError

from step_up_factories import fresh_bytes
from store_factories import (
    KEY,
    Subscription,
    assert_ledger,
    commit,
    funding,
    values,
)
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.sealing import MasterKey, Secret
from vaultevents.core.signing import new_secret
from vaultevents.core.webhook_health import Parking
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.receivers import Received, Receivers
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import DeliveryLane, DispatchOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.egress import Guard
from vaultevents.store import webhooks
from vaultevents.store.clock import ServiceClock
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database

HOUR_S = 3600.0
PER_WEBHOOK = 50


def fresh_secret() -> Secret:
    return Secret(new_secret(fresh_bytes(32)))


async def rotate(database: Database, one: Subscription, overlap_s: float, key: MasterKey = KEY) -> tuple[str, datetime]:
    """The new secret, and until when the one before it is valid."""
    secret = fresh_secret()
    until = await webhooks.rotate_secret(database, "acme", one.id, secret, key, fresh_bytes(12), overlap_s)
    return secret.reveal(), until


def verifies(secret: str, one: Received) -> bool:
    with suppress(WebhookVerificationError):
        Webhook(secret).verify(one.body, dict(one.headers))
        return True
    return False


@asynccontextmanager
async def delivering(
    database: Database, receivers: Receivers, *keys: MasterKey, plain_header: str | None = None
) -> AsyncIterator[None]:
    """A dispatcher that knows these keys; at the end all is delivered and the ledger adds up."""
    rules = UrlRules(allow=(parse_allow("127.0.0.0/8:*"),))
    options = DispatchOptions(
        schedule_s=(0.05, 0.05),
        per_webhook=PER_WEBHOOK,
        per_webhook_max=PER_WEBHOOK,
        parking=Parking(after=10**9),
        poll_s=0.05,
    )
    async with Sender(Guard(rules), ca_file=receivers.ca_path, total_timeout_s=5.0) as sender:
        clock, known = ServiceClock(await database.now()), {key.id: key for key in keys}
        lane = DeliveryLane(database, Signer(known, plain_header), options, random.Random(1))
        running = Dispatcher(lane, sender, clock)
        stop = asyncio.Event()
        task = asyncio.create_task(running.run(stop))
        try:
            yield
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while await values(database, "select distinct state from deliveries") != ["delivered"]:
                    await asyncio.sleep(0.02)
        finally:
            stop.set()
            await asyncio.wait_for(task, WAIT_TIMEOUT_S)
    await assert_ledger(database)


@asynccontextmanager
async def traffic(box: Outbox) -> AsyncIterator[None]:
    """An event every few milliseconds."""
    done = asyncio.Event()

    async def committing() -> None:
        number = 0
        while not done.is_set():
            number += 1
            await commit(box, funding(number))
            await asyncio.sleep(0.004)

    task = asyncio.create_task(committing())
    try:
        yield
    finally:
        done.set()
        await task
