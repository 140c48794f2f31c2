"""Actions on a webhook: resend, recover, test and rotate its secret, as far as real receivers (rule A19)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from api_fixtures import Api, Customer, running_api
from store_factories import KEY, assert_ledger, commit, funding, live_at, rows, settlement, take, values
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.receivers import Hook, Receivers, Reply, always, in_turn
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import ResendLane, ResendOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.egress import Guard
from vaultevents.store.clock import ServiceClock
from vaultevents.store.deliveries import settle
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_unverified_pause")]

WEBHOOKS = "/v1/account/webhooks"
LOOPBACK = UrlRules(allow=(parse_allow("127.0.0.0/8:*"),))
FIELDS = ("id", "account_ref_id", "staking_vault_id", "event_type", "severity", "title", "message", "payload")


@dataclass(frozen=True, slots=True)
class Shop:
    """A customer with one webhook, the receiver behind it, and the outbox of the account's events."""

    api: Api
    acme: Customer
    webhook_id: str
    hook: Hook
    outbox: Outbox

    async def post(self, action: str, value: Any = None, **options: Any) -> Any:
        target = f"{WEBHOOKS}/{self.webhook_id}/{action}"
        return await self.api.call(self.acme, "POST", target, value, **{"step_up": False, **options})

    async def failed_delivery(self, number: int = 1) -> str:
        """One that is exhausted; the id of its event."""
        await commit(self.outbox, funding(number))
        (delivery,) = (await take(self.api.database)).deliveries
        await settle(self.api.database, [settlement(delivery, "exhausted", 500)])
        return delivery.event_id

    async def reported(self, event_id: str) -> Any:
        target = f"{WEBHOOKS}/{self.webhook_id}/deliveries/{event_id}"
        return (await self.api.call(self.acme, "GET", target)).json

    async def waiting(self, number: int = 0) -> None:
        """Until so many requests have no outcome."""
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while await values(self.api.database, "select count(*)::int from resends where finished_at is null") != [
                number
            ]:
                await asyncio.sleep(0.01)


@pytest.fixture
async def shop(database: Database, tmp_path: Path) -> AsyncIterator[Shop]:
    receivers = Receivers(tmp_path)
    await receivers.start()
    async with running_api(database) as api, resending(database, receivers.ca_path):
        acme = await api.customer()
        created = (await api.call(acme, "POST", WEBHOOKS, {"url": "https://example.org/hook"})).json
        hook = receivers.hook("acme")
        hook.secret = created["secretToken"]
        async with database.transaction() as connection:
            await connection.execute("update webhooks set url = $1", hook.url)  # which no customer may name
        yield Shop(api, acme, created["id"], hook, await live_at(database, 0))
    await receivers.stop()
    await assert_ledger(database)


@asynccontextmanager
async def resending(database: Database, ca_path: Path) -> AsyncIterator[None]:
    async with Sender(Guard(LOOPBACK), ca_file=ca_path, total_timeout_s=5) as sender:
        clock = ServiceClock(await database.now())
        running = Dispatcher(ResendLane(database, Signer({KEY.id: KEY}), ResendOptions()), sender, clock)
        stop = asyncio.Event()
        task = asyncio.create_task(running.run(stop))
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(task, WAIT_TIMEOUT_S)


async def test_an_orphaned_event_is_neither_sent_again_nor_shown(shop: Shop) -> None:
    event_id = await shop.failed_delivery()
    async with shop.api.database.transaction() as connection:
        await connection.execute("update events set orphaned_at = db_now()")
    refused = await shop.post(f"deliveries/{event_id}/resend")
    assert (refused.status, refused.json["code"]) == (409, "event_orphaned")
    assert (await shop.post("recover", {"since": 0})).json["count"] == 0
    assert (await shop.api.call(shop.acme, "GET", f"/v1/account/events/{event_id}")).status == 404
    assert (await shop.api.call(shop.acme, "GET", "/v1/account/events")).json == []
    assert len(shop.hook.ledger) == 0


async def test_a_resend_is_reported_among_the_attempts_with_its_times(shop: Shop) -> None:
    event_id = await shop.failed_delivery()
    shop.hook.behaviour = in_turn(Reply(503, body=b"not \x07now"), Reply(200, body=b"thanks"))
    for state in ("exhausted", "delivered"):
        asked = await shop.post(f"deliveries/{event_id}/resend")
        assert asked.status == 202
        assert asked.json["eventId"] == event_id
        assert abs(datetime.fromisoformat(asked.json["requestedAt"]) - datetime.now(UTC)) < timedelta(seconds=30)
        await shop.waiting()
        assert (await shop.reported(event_id))["state"] == state
    reported = await shop.reported(event_id)
    assert (reported["attempts"], reported["nextAttemptAt"], reported["recovered"]) == (1, None, False)
    seen = [
        (attempt["number"], attempt["resend"], attempt["status"], attempt["address"])
        for attempt in reported["attemptLog"]
    ]
    assert seen == [(1, False, 500, "127.0.0.1"), (None, True, 503, "127.0.0.1"), (None, True, 200, "127.0.0.1")]
    assert [attempt["responseExcerpt"] for attempt in reported["attemptLog"]][2] == "thanks"
    assert reported["attemptLog"][1]["responseExcerpt"].isprintable()
    for phase in ("connectMs", "tlsMs", "firstByteMs"):
        assert 0 <= reported["attemptLog"][1][phase] <= reported["attemptLog"][1]["durationMs"]
    assert reported["attemptLog"][2]["tlsMs"] is None, "the connection was kept"
    assert reported["attemptLog"][2]["firstByteMs"] is not None
    assert [request.verified for request in shop.hook.ledger] == [True, True]
    health = (await shop.api.call(shop.acme, "GET", f"{WEBHOOKS}/{shop.webhook_id}/health")).json
    assert (health["failuresInARow"], health["lastSuccessAt"]) == (1, None), "a resend counts for nothing"


async def test_recover_sends_what_fired_while_the_webhook_was_off(shop: Shop) -> None:
    target = f"{WEBHOOKS}/{shop.webhook_id}"
    await shop.api.call(shop.acme, "PATCH", target, {"active": False})
    await commit(shop.outbox, funding(1, block=5), funding(2, block=6))
    first, second = await rows(shop.api.database, "select id, created_at_ms as ms from events order by ms")
    none = await shop.post("recover", {"since": 0, "until": first["ms"]})
    assert (none.status, none.json) == (202, {"count": 0, "nextSince": None})
    asked = await shop.post("recover", {"since": first["ms"], "until": second["ms"]})
    assert (asked.status, asked.json) == (202, {"count": 1, "nextSince": None})
    await shop.waiting()
    assert [request.webhook_id for request in shop.hook.accepted] == [first["id"]]
    assert (await shop.post("recover", {"since": 0, "until": None})).json["count"] == 1
    await shop.waiting()
    reported = await shop.reported(second["id"])
    assert (reported["state"], reported["attempts"], reported["recovered"]) == ("delivered", 0, True)
    assert [attempt["resend"] for attempt in reported["attemptLog"]] == [True]
    assert (await shop.post("recover", {"since": 0})).json["count"] == 0


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({}, [("/since", "required")]),
        ({"since": "2026-01-01"}, [("/since", "invalid")]),
        ({"since": -1}, [("/since", "invalid")]),
        ({"since": True}, [("/since", "invalid")]),
        ({"since": 2**53}, [("/since", "invalid")]),
        ({"since": 5, "until": 5}, [("/until", "invalid")]),
        ({"since": 0, "eventTypes": None}, [("/eventTypes", "unknown_field")]),
        ([], [("", "invalid")]),
    ],
)
async def test_a_range_that_cannot_be(shop: Shop, body: Any, wrong: list[tuple[str, str]]) -> None:
    refused = await shop.post("recover", body)
    assert (refused.status, refused.pointers) == (422, wrong)
    for error in refused.json["errors"]:
        assert "Input should" not in error["detail"]
        assert "{" not in error["detail"]
    assert await values(shop.api.database, "select count(*)::int from used_tokens") == [1], "only that of the create"


async def test_a_test_arrives_as_no_event(shop: Shop) -> None:
    asked = await shop.post("test")
    assert asked.status == 202
    await shop.waiting()
    (arrived,) = shop.hook.ledger
    assert arrived.verified
    envelope = json.loads(arrived.body)
    assert tuple(envelope) == (*FIELDS, "created_at")
    assert asked.json == {"id": envelope["id"], "eventType": "webhook_test"}
    assert arrived.webhook_id == envelope["id"]
    assert envelope["id"].startswith("webhook_test_acme_")
    assert (envelope["event_type"], envelope["account_ref_id"]) == ("webhook_test", "acme")
    assert (envelope["staking_vault_id"], envelope["payload"]) == ("v1", {"webhook_id": shop.webhook_id})
    assert abs(envelope["created_at"] / 1000 - shop.api.clock.now_s()) < 60
    other = (await shop.post("test")).json["id"]
    assert other != envelope["id"]
    await shop.waiting()
    assert (await shop.api.call(shop.acme, "GET", "/v1/account/events")).json == []
    unknown = await shop.api.call(shop.acme, "GET", f"/v1/account/events/{envelope['id']}")
    assert unknown.code == "not_found"
    assert await values(shop.api.database, "select count(*)::int from deliveries") == [0]


async def test_a_rotated_secret_signs_beside_the_former_one(shop: Shop) -> None:
    asked = await shop.post("rotate-secret")
    assert (asked.status, asked.code) == (401, "mfa_required")
    rotated = await shop.post("rotate-secret", step_up=True)
    assert rotated.status == 200
    assert rotated.json.keys() == {"secretToken", "previousValidUntil"}
    assert rotated.headers["cache-control"] == "no-store"
    until = datetime.fromisoformat(rotated.json["previousValidUntil"])
    assert timedelta(hours=23) < until - datetime.now(UTC) <= timedelta(hours=24, seconds=30)
    former = shop.hook.secret
    assert rotated.json["secretToken"] != former
    for secret in (former, rotated.json["secretToken"]):
        shop.hook.secret = secret
        await shop.post("test")
        await shop.waiting()
    assert [request.verified for request in shop.hook.ledger] == [True, True]
    shown = (await shop.api.call(shop.acme, "GET", f"{WEBHOOKS}/{shop.webhook_id}")).body
    assert rotated.json["secretToken"].encode() not in shown


async def test_a_token_is_good_for_one_action_and_a_refused_one_spends_none(shop: Shop) -> None:
    target = f"{WEBHOOKS}/{shop.webhook_id}/test"
    token = shop.api.token(shop.acme, target)
    assert (await shop.post("test", token=token)).status == 202
    again = await shop.post("test", token=token)
    assert (again.status, again.code) == (401, "token_replayed")
    unknown = f"deliveries/{'x' * 20}/resend"
    token = shop.api.token(shop.acme, f"{WEBHOOKS}/{shop.webhook_id}/{unknown}")
    for _ in range(2):
        assert (await shop.post(unknown, token=token)).code == "not_found"
    await shop.waiting()


async def test_a_key_that_may_only_read_asks_for_nothing(shop: Shop) -> None:
    event_id = await shop.failed_delivery()
    reader = await shop.api.another_key("acme", shop.acme.seed, role="read")
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while (await shop.api.call(reader, "GET", WEBHOOKS)).status != 200:  # keys are looked up once a second
            await asyncio.sleep(0.1)
    for action, body in (
        (f"deliveries/{event_id}/resend", None),
        ("recover", {"since": 0}),
        ("test", None),
        ("rotate-secret", None),
    ):
        refused = await shop.api.call(reader, "POST", f"{WEBHOOKS}/{shop.webhook_id}/{action}", body)
        assert (refused.status, refused.code) == (403, "role_insufficient")
    assert await values(shop.api.database, "select count(*)::int from resends") == [0]


async def test_a_field_that_would_be_ignored_is_refused(shop: Shop) -> None:
    for action in ("test", "rotate-secret"):
        refused = await shop.post(action, {"overlap": 0}, step_up=True)
        assert (refused.status, refused.pointers) == (422, [("/overlap", "unknown_field")])
        assert (await shop.post(action, {}, step_up=True)).status < 300
    await shop.waiting()


async def test_actions_work_while_the_webhook_is_off(shop: Shop) -> None:
    event_id = await shop.failed_delivery()
    await shop.api.call(shop.acme, "PATCH", f"{WEBHOOKS}/{shop.webhook_id}", {"active": False})
    shop.hook.behaviour = always(Reply(204))
    await shop.post(f"deliveries/{event_id}/resend")
    await shop.post("test")
    await shop.waiting()
    assert len(shop.hook.accepted) == 2
    entry = (await shop.api.call(shop.acme, "GET", f"{WEBHOOKS}/{shop.webhook_id}")).json
    assert entry["active"] is False
