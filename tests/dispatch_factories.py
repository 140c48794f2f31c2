"""A running dispatcher with the real sender, hooks that are subscribed to it, and waits for what it has done."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from store_factories import KEY, assert_ledger, rows, states, webhook
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.webhook_health import Parking
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.receivers import Behaviour, Hook, Receivers
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import DeliveryLane, DispatchOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.egress import Guard
from vaultevents.store.clock import ServiceClock
from vaultevents.store.pool import Database

LOOPBACK = UrlRules(allow=(parse_allow("127.0.0.0/8:*"),))
QUICK_S = (0.02, 0.05, 0.1)
NEVER = Parking(after=10**9)


@asynccontextmanager
async def dispatching(
    database: Database,
    ca_path: Path,
    *,
    total_timeout_s: float = 5.0,
    seed: int = 1,
    plain_header: str | None = None,
    **options: Any,
) -> AsyncIterator[asyncio.Event]:
    """A running dispatcher, and what stops it; at the end it is stopped, has drained, and the ledger adds up."""
    settings = DispatchOptions(**{"schedule_s": QUICK_S, "per_webhook": 1000, "parking": NEVER, **options})
    async with Sender(Guard(LOOPBACK), ca_file=ca_path, total_timeout_s=total_timeout_s) as sender:
        clock = ServiceClock(await database.now())
        lane = DeliveryLane(database, Signer({KEY.id: KEY}, plain_header), settings, random.Random(seed))
        running = Dispatcher(lane, sender, clock)
        stop = asyncio.Event()
        task = asyncio.create_task(running.run(stop))
        try:
            yield stop
        finally:
            stop.set()
            await asyncio.wait_for(task, WAIT_TIMEOUT_S)
    await assert_ledger(database)


async def subscribe(database: Database, receivers: Receivers, name: str, behaviour: Behaviour | None = None) -> Hook:
    """A hook of the receivers and the webhook of `acme` that posts to it."""
    hook = receivers.hook(name, behaviour)
    hook.secret = (await webhook(database, url=hook.url)).secret
    return hook


async def until(database: Database, wanted: dict[str, int]) -> None:
    """Returns once the deliveries are in these states; asks again where a scenario kills connections, this one too."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                if await states(database) == wanted:
                    return
            await asyncio.sleep(0.01)


async def bodies(database: Database) -> dict[str, bytes]:
    return {row["id"]: row["body"] for row in await rows(database, "select id, body from events")}
