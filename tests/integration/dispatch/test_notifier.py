"""Notices at a real TLS receiver: signed, repeated with one id, reported once in the log."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from store_factories import rows, shift_clock, simple_simulation, webhook
from timeouts import WAIT_TIMEOUT_S
from vaultevents import metrics
from vaultevents.config import given
from vaultevents.core.errors import ConfigError
from vaultevents.core.sealing import Secret
from vaultevents.core.signing import new_secret
from vaultevents.core.units import Address, checksum
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.receivers import GONE, Receivers, Reply, in_turn
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import DispatchOptions
from vaultevents.dispatch.notifier import NoticeLane, OperatorWebhook
from vaultevents.dispatch.sender import Sender
from vaultevents.egress import Guard
from vaultevents.store.clock import ServiceClock
from vaultevents.store.notices import Notice, OfAddress, record, record_quarantined
from vaultevents.store.pool import Database
from vaultevents.wiring.delivery import operator_webhook

pytestmark = pytest.mark.integration

SECRET = new_secret(bytes(32))
LOOPBACK = UrlRules(allow=(parse_allow("127.0.0.0/8:*"),))


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    server = Receivers(tmp_path)
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def notifying(database: Database, receivers: Receivers, url: str | None) -> AsyncIterator[asyncio.Task[None]]:
    to = None if url is None else OperatorWebhook(url, Secret(SECRET))
    async with Sender(Guard(LOOPBACK), ca_file=receivers.ca_path) as sender:
        clock = ServiceClock(await database.now())
        lane = NoticeLane(database, to, DispatchOptions((0.02, 0.05), poll_s=0.02), random.Random(1))
        stop = asyncio.Event()
        task = asyncio.create_task(Dispatcher(lane, sender, clock).run(stop))
        try:
            yield task
        finally:
            stop.set()
            await asyncio.wait([task], timeout=10)


async def exhausted(database: Database, count: int) -> str:
    await simple_simulation(database)
    webhook_id = (await webhook(database)).id
    async with database.transaction() as connection:
        await record(connection, [Notice("delivery_exhausted", webhook_id)] * count)
    return webhook_id


async def finished(database: Database) -> bool:
    """Whether the one notice was sent, once it is finished."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not (found := await rows(database, "select sent from notices where finished_at is not null")):
            await asyncio.sleep(0.02)
    return bool(found[0]["sent"])


async def test_a_notice_is_posted_until_it_is_accepted_and_logged_once(
    database: Database, receivers: Receivers
) -> None:
    hook = receivers.hook("operator", in_turn(Reply(500), Reply(200)))
    hook.secret = SECRET  # the reference library verifies every arrival
    webhook_id = await exhausted(database, 3)
    metrics.taken()
    with capture_logs() as lines:
        async with notifying(database, receivers, hook.url):
            assert await finished(database)
    assert metrics.taken() == [(("vaultevents_notices", "delivery_exhausted"), 1)]
    first, second = hook.ledger
    assert first.verified and second.verified
    assert (first.webhook_id, first.body) == (second.webhook_id, second.body)
    body = json.loads(first.body)
    assert (body["id"], body["type"]) == (first.webhook_id, "delivery_exhausted")
    assert (body["data"]["webhook_id"], body["data"]["count"]) == (webhook_id, 3)
    assert [line["event"] for line in lines] == ["delivery_exhausted"]


async def test_without_a_url_the_log_reports(database: Database, receivers: Receivers) -> None:
    await exhausted(database, 1)
    with capture_logs() as lines:
        async with notifying(database, receivers, None):
            assert not await finished(database)
    assert [line["event"] for line in lines] == ["delivery_exhausted"]


async def test_a_receiver_that_is_gone_is_asked_once(database: Database, receivers: Receivers) -> None:
    hook = receivers.hook("operator", in_turn(GONE))
    await exhausted(database, 1)
    with capture_logs() as lines:
        async with notifying(database, receivers, hook.url):
            assert not await finished(database)
    assert len(hook.ledger) == 1
    assert lines[-1]["event"] == "notice_not_sent"


async def test_a_post_that_was_not_marked_is_repeated_with_its_id(
    database: Database, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = receivers.hook("operator")
    await exhausted(database, 1)
    died = asyncio.Event()

    async def dies(*_: object, **__: object) -> None:
        died.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr("vaultevents.dispatch.notifier.finish", dies)
        async with notifying(database, receivers, hook.url) as task:
            await asyncio.wait_for(died.wait(), WAIT_TIMEOUT_S)
            task.cancel()
    await shift_clock(database, 61)
    async with notifying(database, receivers, hook.url):
        assert await finished(database)
    first, second = hook.ledger
    assert first.webhook_id == second.webhook_id


def test_a_url_without_a_secret_is_refused_at_the_start() -> None:
    values = {"network": "devnet", "chain_id": 1337, "operator": {"webhook_url": "https://ops.example/hook"}}
    with pytest.raises(ConfigError, match="VAULTEVENTS_OPERATOR_SECRET"):
        operator_webhook(given(values, "test"))
    with pytest.raises(ConfigError, match="not usable") as refused:
        operator_webhook(given({**values, "operator_secret": "whsec_c2hvcnQ="}, "test"))
    assert "c2hvcnQ" not in str(refused.value)
    found = operator_webhook(given({**values, "operator_secret": SECRET}, "test"))
    assert found is not None and found[0] == "https://ops.example/hook"


async def test_of_logs_that_cannot_be_decoded_the_contract_is_named(database: Database, receivers: Receivers) -> None:
    hook = receivers.hook("operator")
    hook.secret = SECRET
    contract = Address(b"\x7a" * 20)
    async with database.transaction() as connection:
        await record_quarantined(connection, [OfAddress(contract, 123, 1000)])
    metrics.taken()
    with capture_logs() as lines:
        async with notifying(database, receivers, hook.url):
            assert await finished(database)
    assert metrics.taken() == [(("vaultevents_notices", "logs_quarantined"), 1)]
    (arrival,) = hook.ledger
    assert arrival.verified
    body = json.loads(arrival.body)
    assert (body["type"], body["data"]) == (
        "logs_quarantined",
        {"address": checksum(contract), "block": 123, "count": 1000},
    )
    assert [(line["event"], line["address"]) for line in lines] == [("logs_quarantined", checksum(contract))]
    assert "vaultevents quarantine list" in lines[0]["advice"]
