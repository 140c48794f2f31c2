"""A tenant with slow receivers, or with thousands of resends, delays no other tenant (rules D8 and P8)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dispatch_factories import LOOPBACK, dispatching, subscribe, until
from store_factories import KEY, account, change, commit, funding, simple_simulation, values, vault, webhook
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.sealing import Secret, seal
from vaultevents.core.signing import new_secret
from vaultevents.core.webhook_health import Parking
from vaultevents.devnet.certificates import issue
from vaultevents.devnet.loopback import LoopbackServer
from vaultevents.devnet.receivers import Hang, Receivers, Reply, always, per_event
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import ResendLane, ResendOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.egress import Guard
from vaultevents.store import resends
from vaultevents.store.clock import ServiceClock
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

SLOW_WEBHOOKS = 500
SLOTS = 100
RESENDS = 7_000


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    server = Receivers(tmp_path)
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def resending(database: Database, ca_path: Path) -> AsyncIterator[None]:
    """A running resender, which waits for nothing when it is stopped."""
    async with Sender(Guard(LOOPBACK), ca_file=ca_path, total_timeout_s=30) as sender:
        clock = ServiceClock(await database.now())
        running = Dispatcher(ResendLane(database, Signer({KEY.id: KEY}), ResendOptions(drain_s=0.1)), sender, clock)
        stop = asyncio.Event()
        task = asyncio.create_task(running.run(stop))
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(task, WAIT_TIMEOUT_S)


async def add_slow_webhooks(database: Database, url: str, number: int) -> None:
    """Webhooks of the account `hostile`, which watches the same vault as `acme`."""
    await account(database, "hostile")
    await vault(database, "h1", account_id="hostile", at="v1", first_block=1)
    ids = [f"slow-{n}" for n in range(number)]
    secrets = [seal(KEY, Secret(new_secret(bytes(32))), webhook_id, n.to_bytes(12)) for n, webhook_id in enumerate(ids)]
    await change(
        database,
        "insert into webhooks (id, account_id, url, active) select id, 'hostile', $2, true from unnest($1::text[]) id",
        ids,
        url,
    )
    await change(
        database,
        "insert into webhook_secrets (webhook_id, key_id, sealed)"
        " select id, $2, sealed from unnest($1::text[], $3::bytea[]) as s (id, sealed)",
        ids,
        KEY.id,
        secrets,
    )
    await change(database, "update registry set filter_revision = filter_revision + $1", number)
    await change(
        database,
        "insert into webhook_revisions (revision, webhook_id, account_id, active)"
        " select filter_revision + 1 - row_number() over (), w.id, w.account_id, true"
        " from webhooks w, registry where w.account_id = 'hostile'",
    )


async def test_a_tenant_with_five_hundred_slow_webhooks_leaves_slots_to_others(
    database: Database, receivers: Receivers
) -> None:
    outbox = await simple_simulation(database)
    slow = receivers.hook("slow", always(Hang()))
    await add_slow_webhooks(database, slow.url, SLOW_WEBHOOKS)
    await commit(outbox, funding(1))
    options: dict[str, Any] = {
        "concurrency": SLOTS,
        "schedule_s": (60,),
        "drain_s": 0.1,
        "total_timeout_s": 30,
    }
    async with dispatching(database, receivers.ca_path, per_webhook=10, **options):
        await slow.arrivals(SLOTS * 3 // 4)
        await asyncio.sleep(1.0)  # until the others have all that they get
        good = await subscribe(database, receivers, "good")
        begin_s = time.monotonic()
        await commit(outbox, funding(2))
        await good.arrivals(1)
        took_s = time.monotonic() - begin_s
    assert took_s < 15, "of the 30 s that the slow ones keep their slots"
    assert len(slow.ledger) < SLOTS


async def test_a_tenant_that_recovers_thousands_to_slow_webhooks_delays_no_test_of_another(
    database: Database, receivers: Receivers
) -> None:
    await simple_simulation(database)
    slow = receivers.hook("slow", always(Hang()))
    await add_slow_webhooks(database, slow.url, 20)
    await change(
        database,
        "with asked as (insert into resends (webhook_id, event_id, body)"
        " select 'slow-' || n % 20, 'again-' || n, '{}' from generate_series(1, $1::integer) n"
        " returning id, webhook_id, requested_at)"
        " insert into queue (webhook_id, resend_id, due_at) select webhook_id, id, requested_at from asked",
        RESENDS,
    )
    good = await subscribe(database, receivers, "good")
    (good_id,) = await values(database, "select id from webhooks where account_id = 'acme'")
    async with resending(database, receivers.ca_path):
        await slow.arrivals(40)
        await asyncio.sleep(1.0)
        begin_s = time.monotonic()
        async with database.of_account("acme") as connection:
            await resends.request_test(connection, "acme", good_id, "webhook_test_acme_1", b"{}")
        await good.arrivals(1)
        took_s = time.monotonic() - begin_s
    assert took_s < 2
    assert len(slow.ledger) < 128


async def test_a_receiver_that_refuses_each_first_attempt_gets_everything(
    any_database: Database, receivers: Receivers
) -> None:
    """Five failures in a row park it, as by default; only the times are shorter."""
    outbox = await simple_simulation(any_database)
    hook = await subscribe(any_database, receivers, "hook", per_event(Reply(503), Reply()))
    parking = Parking(first=timedelta(seconds=0.3), longest=timedelta(seconds=2))
    async with dispatching(any_database, receivers.ca_path, parking=parking, per_webhook=10, schedule_s=(0.2,) * 9):
        async with asyncio.timeout(25):
            await commit(outbox, *(funding(number) for number in range(60)))
            await until(any_database, {"delivered": 60})
    assert Counter(Counter(request.webhook_id for request in hook.ledger).values()) == {2: 60}
    assert await values(any_database, "select failures + parks from webhooks") == [0]


class Timed:
    """A receiver that takes 50 ms, and refuses at once what exceeds `capacity`."""

    def __init__(self, directory: Path, capacity: int) -> None:
        self.ca_path, tls = issue(directory)
        self.capacity, self.inside, self.most, self.refused, self.accepted = capacity, 0, 0, 0, 0
        self.server = LoopbackServer(self._receive, tls)

    async def _receive(self, request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if self.inside >= self.capacity:
            self.refused += 1
            return web.Response(status=503)
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.05)
        self.inside -= 1
        self.accepted += 1
        return web.Response()


async def with_a_lone_webhook(database: Database, receiver: Timed, deliveries: int) -> None:
    outbox: Outbox = await simple_simulation(database)
    await webhook(database, url=await receiver.server.start() + "/")
    await commit(outbox, *(funding(number) for number in range(deliveries)))
    try:
        parking = Parking(first=timedelta(seconds=0.3))
        async with (
            dispatching(database, receiver.ca_path, per_webhook=10, schedule_s=(0.2,) * 9, parking=parking),
            asyncio.timeout(WAIT_TIMEOUT_S),
        ):
            await until(database, {"delivered": deliveries})
    finally:
        await receiver.server.stop()


async def test_a_lone_webhook_whose_receiver_accepts_promptly_gets_more_at_once(
    database: Database, tmp_path: Path
) -> None:
    receiver = Timed(tmp_path, capacity=1_000)
    await with_a_lone_webhook(database, receiver, 1_200)
    assert receiver.most > 30
    assert (receiver.accepted, receiver.refused) == (1_200, 0)


async def test_a_lone_webhook_whose_receiver_refuses_more_than_twenty_is_spared(
    database: Database, tmp_path: Path
) -> None:
    receiver = Timed(tmp_path, capacity=20)
    await with_a_lone_webhook(database, receiver, 1_200)
    assert receiver.most > 12
    assert receiver.refused <= 0.05 * (receiver.accepted + receiver.refused)
