"""Webhooks, events and the account as customers meet them (interface §2, §4; decisions A1-A8, A16, A17, A19)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from api_worlds import Answer, Api, Customer, running_api
from store_stories import (
    address,
    assert_ledger,
    commit,
    funding,
    live_at,
    rows,
    settlement,
    shift_clock,
    states,
    take,
    values,
    vault,
)
from vaultevents.core.events import EVENT_TYPES
from vaultevents.core.sealing import open_sealed
from vaultevents.core.units import checksum
from vaultevents.store import accounts
from vaultevents.store.deliveries import settle
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

WEBHOOKS = "/v1/account/webhooks"
URL = "https://example.org/hook"
ENTRY = {"id", "url", "eventTypes", "stakingVaultIds", "active", "createdAt"}


@pytest.fixture
async def api(database: Database) -> AsyncIterator[Api]:
    async with running_api(database) as running:
        yield running


async def create(api: Api, customer: Customer, **fields: Any) -> Answer:
    return await api.call(customer, "POST", WEBHOOKS, {"url": URL, **fields})


async def created(api: Api, customer: Customer, **fields: Any) -> str:
    answer = await create(api, customer, **fields)
    assert answer.status == 201, answer.body
    return str(answer.json["id"])


async def test_create_answers_201_with_the_entry_and_once_with_its_secret(api: Api) -> None:
    acme = await api.customer()
    answer = await create(api, acme)
    assert answer.status == 201
    assert answer.json.keys() == ENTRY | {"secretToken"}
    assert answer.headers["location"] == f"{WEBHOOKS}/{answer.json['id']}"
    assert answer.headers["cache-control"] == "no-store"
    assert (answer.json["eventTypes"], answer.json["stakingVaultIds"], answer.json["active"]) == (None, None, True)
    assert answer.json["secretToken"].startswith("whsec_")
    assert datetime.now(UTC) - datetime.fromisoformat(answer.json["createdAt"]) < timedelta(seconds=30)
    entry = {name: value for name, value in answer.json.items() if name != "secretToken"}
    assert (await api.call(acme, "GET", WEBHOOKS)).json == [entry]
    assert (await api.call(acme, "GET", answer.headers["location"])).json == entry


async def test_filters_are_kept_as_they_were_sent_each_name_once(api: Api) -> None:
    acme = await api.customer(vaults=("v1", "v2"))
    fields = {"eventTypes": [*EVENT_TYPES, EVENT_TYPES[0]], "stakingVaultIds": ["v2", "v1", "v2"], "active": False}
    entry = (await create(api, acme, **fields)).json
    assert entry["eventTypes"] == list(EVENT_TYPES)
    assert (entry["stakingVaultIds"], entry["active"]) == (["v2", "v1"], False)


WRONG: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"eventTypes": []}, [("/eventTypes", "empty")]),
    ({"stakingVaultIds": []}, [("/stakingVaultIds", "empty")]),
    ({"eventTypes": ["funding_received", "vault_exploded"]}, [("/eventTypes/1", "event_type_unknown")]),
    ({"stakingVaultIds": ["v1", "nope"]}, [("/stakingVaultIds/1", "vault_unknown")]),
    ({"stakingVaultIds": ["gone"]}, [("/stakingVaultIds/0", "vault_unknown")]),
    ({"eventTypes": "funding_received"}, [("/eventTypes", "invalid")]),
    ({"eventTypes": [1]}, [("/eventTypes/0", "invalid")]),
    ({"active": "true"}, [("/active", "invalid")]),
    ({"active": 1}, [("/active", "invalid")]),
    ({"active": None}, [("/active", "invalid")]),
    ({"url": None}, [("/url", "invalid")]),
    ({"id": "wh-1"}, [("/id", "unknown_field")]),
    ({"createdAt": "2026-01-01T00:00:00Z"}, [("/createdAt", "unknown_field")]),
    ({"secretToken": "whsec_x"}, [("/secretToken", "unknown_field")]),
    ({"event_types": None}, [("/event_types", "unknown_field")]),
    ({"a/b~c": 1}, [("/a~1b~0c", "unknown_field")]),
]


@pytest.mark.parametrize(("fields", "wrong"), WRONG)
async def test_what_a_webhook_cannot_be(api: Api, fields: dict[str, Any], wrong: list[tuple[str, str]]) -> None:
    """On POST and on PATCH alike; all that is wrong is told with its place, and nothing is stored."""
    acme = await api.customer(vaults=("v1", "gone"))
    await accounts.remove_vault(api.database, "acme", "gone", 10)
    refused = await create(api, acme, **fields)
    assert (refused.status, refused.code, refused.pointers) == (422, "validation_failed", wrong)
    assert (await api.call(acme, "GET", WEBHOOKS)).json == []
    one = await created(api, acme)
    before = (await api.call(acme, "GET", f"{WEBHOOKS}/{one}")).json
    patched = await api.call(acme, "PATCH", f"{WEBHOOKS}/{one}", fields)
    assert (patched.status, patched.pointers) == (422, wrong)
    assert (await api.call(acme, "GET", f"{WEBHOOKS}/{one}")).json == before


@pytest.mark.parametrize(
    "url",
    [
        *("http://example.org/", "ftp://example.org/", "https:example.org", "https:///x", "example.org", ""),
        *("https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/", "https://127.1/", "https://0/"),
        *(
            "https://①②⑦.⓪.⓪.①/",
            "https://127.0.0.1./",
            "https://[::1]/",
            "https://[::ffff:7f00:1]/",
            "https://[fe80::1%25eth0]/",
        ),
        *("https://localhost/", "https://LOCALHOST./", "https://a.localhost/", "https://x.internal/", "https://db/"),
        *("https://u@example.org/", "https://u:p@example.org/", "https://example.org/#f", "https://a\\@b.example/"),
        *("https://example.org/\t", "https://example.org/\n", "https://example.org/%00", "https://host%2ecom/"),
        *("https://example.org:0/", "https://example.org:22/", "https://example.org:65536/", "https://example.org:/"),
        *("https://169.254.169.254/", "https://10.0.0.1/", "https://100.100.100.200/", "https://168.63.129.16/"),
        *(f"https://{'a' * 64}.example/", f"https://{'a.' * 127}example/", f"https://example.org/{'x' * 2040}"),
    ],
)
async def test_urls_that_are_refused_on_post_and_on_patch(api: Api, url: str) -> None:
    acme = await api.customer()
    one = await created(api, acme)
    for method, target in (("POST", WEBHOOKS), ("PATCH", f"{WEBHOOKS}/{one}")):
        refused = await api.call(acme, method, target, {"url": url})
        assert (refused.status, refused.pointers) == (422, [("/url", "url_not_allowed")])


async def test_a_patch_changes_what_it_names(api: Api) -> None:
    acme = await api.customer(vaults=("v1", "v2"))
    one = await created(api, acme, eventTypes=["funding_received"], stakingVaultIds=["v1"])
    target = f"{WEBHOOKS}/{one}"
    steps: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"url": "https://example.org/new"}, {"url": "https://example.org/new", "eventTypes": ["funding_received"]}),
        ({"eventTypes": None}, {"eventTypes": None, "stakingVaultIds": ["v1"]}),
        ({"stakingVaultIds": ["v2"]}, {"stakingVaultIds": ["v2"], "url": "https://example.org/new"}),
        ({"stakingVaultIds": None, "active": False}, {"stakingVaultIds": None, "active": False}),
    ]
    for patch, wanted in steps:
        answer = await api.call(acme, "PATCH", target, patch)
        assert answer.status == 200
        assert answer.json.keys() == ENTRY
        assert wanted.items() <= answer.json.items()
        assert (await api.call(acme, "GET", target)).json == answer.json
    empty = await api.call(acme, "PATCH", target, {})
    assert (empty.status, empty.pointers) == (422, [("", "empty")])


async def test_two_patches_at_once_both_take_place(api: Api) -> None:
    acme = await api.customer()
    one = await created(api, acme)
    patches = [{"eventTypes": ["funding_received"]}, {"url": "https://example.org/new"}]
    codes = [api.code(acme) for _ in patches]
    api.clock.ahead_s -= 15
    answers = await asyncio.gather(
        *(
            api.call(acme, "PATCH", f"{WEBHOOKS}/{one}", patch, code=code)
            for patch, code in zip(patches, codes, strict=True)
        )
    )
    done = [answer.status for answer in answers]
    assert done.count(200) >= 1
    entry = (await api.call(acme, "GET", f"{WEBHOOKS}/{one}")).json
    assert (entry["eventTypes"] == ["funding_received"]) == (done[0] == 200)
    assert (entry["url"] == "https://example.org/new") == (done[1] == 200)


async def test_a_deleted_webhook_is_gone_and_its_secret_erased(api: Api) -> None:
    acme = await api.customer()
    one = await created(api, acme)
    gone = await api.call(acme, "DELETE", f"{WEBHOOKS}/{one}")
    assert (gone.status, gone.body) == (204, b"")
    for method, value in (("DELETE", None), ("PATCH", {"active": True}), ("GET", None)):
        again = await api.call(acme, method, f"{WEBHOOKS}/{one}", value)
        assert (again.status, again.code) == (404, "not_found")
    for part in ("health", "deliveries"):
        assert (await api.call(acme, "GET", f"{WEBHOOKS}/{one}/{part}")).status == 404
    assert await values(api.database, "select count(*)::int from webhook_secrets") == [0]


async def test_the_list_comes_newest_first_in_pages(api: Api) -> None:
    acme = await api.customer()
    ids = [await created(api, acme) for _ in range(5)]
    seen, target = [], f"{WEBHOOKS}?limit=2"
    pages = 0
    while target:
        page = await api.call(acme, "GET", target)
        seen += [entry["id"] for entry in page.json]
        pages += 1
        link = page.headers.get("link", "")
        assert link == "" or link.endswith('>; rel="next"')
        target = link.split(">")[0].removeprefix("<")
    assert (seen, pages) == (ids[::-1], 3)
    for query, pointer in (
        ("limit=0", "?limit"),
        ("limit=251", "?limit"),
        ("limit=x", "?limit"),
        ("cursor=x", "?cursor"),
    ):
        refused = await api.call(acme, "GET", f"{WEBHOOKS}?{query}")
        assert (refused.status, refused.pointers[0][0]) == (422, pointer)
    assert (await api.call(acme, "GET", f"{WEBHOOKS}?limit=250")).status == 200


async def test_the_number_of_webhooks_is_limited(database: Database) -> None:
    async with running_api(database, max_webhooks=2) as api:
        acme = await api.customer()
        first, _ = [await created(api, acme) for _ in range(2)]
        refused = await create(api, acme)
        assert (refused.status, refused.code) == (409, "webhook_limit_reached")
        await api.call(acme, "DELETE", f"{WEBHOOKS}/{first}")
        await created(api, acme)


async def test_off_parks_and_on_resumes(api: Api) -> None:
    acme = await api.customer(vaults=("v1",))
    outbox = await live_at(api.database, 0)
    one = await created(api, acme)
    await commit(outbox, funding(1), funding(2))
    await api.call(acme, "PATCH", f"{WEBHOOKS}/{one}", {"active": False})
    assert await states(api.database) == {"parked": 2}
    await commit(outbox, funding(3))
    resumed = await api.call(acme, "PATCH", f"{WEBHOOKS}/{one}", {"active": True})
    assert resumed.json["active"] is True
    assert await states(api.database) == {"scheduled": 2}
    await assert_ledger(api.database)


async def test_a_repeated_create_gets_the_first_answer(api: Api) -> None:
    acme = await api.customer()
    key = {"idempotency-key": "order-66"}
    first = await api.call(acme, "POST", WEBHOOKS, {"url": URL}, headers=key)
    again = await api.call(acme, "POST", WEBHOOKS, headers=key, raw=b'{ "url" : "https:\\/\\/example.org/hook" }')
    assert (again.status, again.body, again.headers["location"]) == (201, first.body, first.headers["location"])
    other = await api.call(acme, "POST", WEBHOOKS, {"url": f"{URL}2"}, headers=key)
    assert (other.status, other.code) == (409, "idempotency_conflict")
    assert len((await api.call(acme, "GET", WEBHOOKS)).json) == 1
    (row,) = await rows(api.database, "select sealed, webhook_id from idempotent_answers")
    assert first.json["secretToken"].encode() not in row["sealed"]
    assert first.body.decode() == open_sealed(api.desk.key, row["sealed"], f"answer {row['webhook_id']}").reveal()
    await api.call(acme, "DELETE", first.headers["location"])
    erased = await api.call(acme, "POST", WEBHOOKS, {"url": URL}, headers=key)
    assert (erased.status, erased.code) == (409, "idempotency_conflict")
    await shift_clock(api.database, 24 * 3600 + 1)
    assert (await api.call(acme, "POST", WEBHOOKS, {"url": URL}, headers=key)).status == 201
    refused = await api.call(acme, "POST", WEBHOOKS, {"url": URL}, headers={"idempotency-key": "with space"})
    assert refused.status == 422


async def test_who_am_i(api: Api) -> None:
    acme = await api.customer(vaults=("v1",))
    await vault(api.database, "v2", queue="q2", first_block=77)
    facts = (await api.call(acme, "GET", "/v1/account")).json
    assert facts.keys() == {
        *("id", "name", "createdAt", "apiKey", "mfa", "stakingVaults", "limits", "serverTime"),
    }
    assert (facts["id"], facts["name"], facts["mfa"]) == ("acme", "Acme", {"enrolled": True})
    assert facts["apiKey"] == {"id": acme.key_id, "name": "test", "role": "manage"}
    assert facts["stakingVaults"][1] == {
        "id": "v2",
        "address": checksum(address("v2")),
        "withdrawalQueueAddress": checksum(address("q2")),
        "startBlock": 77,
    }
    assert abs(datetime.fromisoformat(facts["serverTime"]).timestamp() - api.clock.now_s()) < 5
    assert (await api.call(acme, "GET", "/v1/account/vaults?limit=1")).json == facts["stakingVaults"][:1]


async def test_the_feed_gives_every_event_as_it_is_delivered(api: Api) -> None:
    acme = await api.customer(vaults=("v1",))
    outbox = await live_at(api.database, 0)
    for number in range(7):
        await commit(outbox, funding(number, block=number))
    stored = await rows(api.database, "select id, body, created_at_ms from events order by seq")
    seen, target = b"", "/v1/account/events?limit=3"
    async with asyncio.timeout(20):
        while seen.count(b'"id"') < 7:  # events wait while any older transaction of the server is open
            page = await api.call(acme, "GET", target)
            seen += page.body
            if "link" in page.headers:
                target = page.headers["link"].split(">")[0].removeprefix("<")
    assert all(row["body"] in seen for row in stored)
    end = await api.call(acme, "GET", target)
    assert (end.json, "link" in end.headers) == ([], False)
    since, until = stored[2]["created_at_ms"], stored[5]["created_at_ms"]
    chosen = (await api.call(acme, "GET", f"/v1/account/events?since={since}&until={until}")).json
    assert [event["id"] for event in chosen] == [row["id"] for row in stored[2:5]]
    one = await api.call(acme, "GET", f"/v1/account/events/{stored[3]['id']}")
    assert one.body == stored[3]["body"]


async def test_deliveries_and_their_attempts(api: Api) -> None:
    acme = await api.customer(vaults=("v1",))
    outbox = await live_at(api.database, 0)
    one = await created(api, acme)
    await commit(outbox, funding(1), funding(2))
    good, bad = (await take(api.database)).deliveries
    flying = await api.call(acme, "GET", f"{WEBHOOKS}/{one}/deliveries")
    assert [entry["inFlight"] for entry in flying.json] == [True, True]
    await settle(api.database, [settlement(good), settlement(bad, "scheduled", 503, after_s=300.0)])
    listed = (await api.call(acme, "GET", f"{WEBHOOKS}/{one}/deliveries?state=scheduled")).json
    assert [entry["eventId"] for entry in listed] == [bad.event_id]
    assert (listed[0]["attempts"], listed[0]["inFlight"], listed[0]["finishedAt"]) == (1, False, None)
    told = (await api.call(acme, "GET", f"{WEBHOOKS}/{one}/deliveries/{bad.event_id}")).json
    assert [(attempt["number"], attempt["status"]) for attempt in told["attemptLog"]] == [(1, 503)]
    health = (await api.call(acme, "GET", f"{WEBHOOKS}/{one}/health")).json
    assert (health["active"], health["failuresInARow"], health["lastFailure"]["status"]) == (True, 1, 503) or (
        health["failuresInARow"] == 0  # both began at the same time
    )
    assert {name: number for name, number in health["deliveries"].items() if number} == {"delivered": 1, "scheduled": 1}
    unknown = await api.call(acme, "GET", f"{WEBHOOKS}/{one}/deliveries/nothing")
    assert (unknown.status, unknown.code) == (404, "not_found")
