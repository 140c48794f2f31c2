"""Webhooks, events and the account as customers meet them (rules A1 to A8, A16, A17 and A19)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from msgspec.structs import replace

from api_fixtures import FREELY, Api, ApiResponse, Customer, running_api
from ssrf_corpus import ACCEPTED_URLS, REFUSED_URLS, RULE_TEXTS
from store_factories import (
    EARLIER,
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
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.events import EVENT_TYPES
from vaultevents.core.sealing import open_sealed
from vaultevents.core.units import checksum
from vaultevents.store import accounts
from vaultevents.store.deliveries import settle
from vaultevents.store.pool import Database

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_unverified_pause")]

WEBHOOKS = "/v1/account/webhooks"
URL = "https://example.org/hook"
ENTRY = {"id", "url", "eventTypes", "stakingVaultIds", "active", "createdAt"}


@pytest.fixture
async def api(database: Database) -> AsyncIterator[Api]:
    async with running_api(database) as running:
        yield running


async def create(api: Api, customer: Customer, **fields: Any) -> ApiResponse:
    return await api.call(customer, "POST", WEBHOOKS, {"url": URL, **fields})


async def created(api: Api, customer: Customer, **fields: Any) -> str:
    answer = await create(api, customer, **fields)
    assert answer.status == 201, answer.body
    return str(answer.json["id"])


def linked(page: ApiResponse) -> str:
    """The page after this one (RFC 8288), or nothing."""
    link = page.headers.get("link", "")
    assert link == "" or (link.startswith("<") and link.endswith('>; rel="next"'))
    return link.partition(">")[0].removeprefix("<")


async def next_link(api: Api, customer: Customer, target: str) -> str:
    """The page after `target`; events wait while any older transaction of the server is open."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not (link := linked(await api.call(customer, "GET", target))):
            await asyncio.sleep(0.02)
    return link


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
    """On POST and on PATCH alike; all that is wrong is reported with its place, and nothing is stored."""
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


async def test_urls_that_are_refused_on_post_and_on_patch(api: Api) -> None:
    acme = await api.customer()
    one = await created(api, acme)
    before = (await api.call(acme, "GET", WEBHOOKS)).json
    for url, rule in REFUSED_URLS.items():
        for method, target in (("POST", WEBHOOKS), ("PATCH", f"{WEBHOOKS}/{one}")):
            refused = await api.call(acme, method, target, {"url": url})
            assert (refused.status, refused.code) == (422, "validation_failed"), (method, url)
            assert refused.pointers == [("/url", "url_not_allowed")], (method, url)
            assert RULE_TEXTS[rule] in refused.json["detail"], (method, url)
    assert (await api.call(acme, "GET", WEBHOOKS)).json == before


async def test_a_url_is_kept_in_its_canonical_form(api: Api) -> None:
    acme = await api.customer()
    for url, kept in ACCEPTED_URLS.items():
        entry = (await create(api, acme, url=url)).json
        assert entry["url"] == kept
        target = f"{WEBHOOKS}/{entry['id']}"
        await api.call(acme, "PATCH", target, {"url": URL})
        assert (await api.call(acme, "PATCH", target, {"url": url})).json["url"] == kept
        assert (await api.call(acme, "DELETE", target)).status == 204


async def test_all_that_is_wrong_is_reported_at_once(api: Api) -> None:
    acme = await api.customer()
    refused = await create(api, acme, url="http://example.org/", eventTypes=["x", "funding_received", "y"])
    assert refused.pointers == [
        ("/url", "url_not_allowed"),
        ("/eventTypes/0", "event_type_unknown"),
        ("/eventTypes/2", "event_type_unknown"),
    ]
    assert refused.json["detail"] == "; ".join(error["detail"] for error in refused.json["errors"])
    without_url = await api.call(acme, "POST", WEBHOOKS, {"active": False})
    assert (without_url.status, [place for place, _ in without_url.pointers]) == (422, ["/url"])


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
    typed = {"content-type": "application/merge-patch+json"}  # RFC 7396
    assert (await api.call(acme, "PATCH", target, {"active": True}, headers=typed)).json["active"] is True
    empty = await api.call(acme, "PATCH", target, {})
    assert (empty.status, empty.pointers) == (422, [("", "empty")])


async def test_of_two_patches_at_once_neither_undoes_the_other(api: Api) -> None:
    """Where the one with the newer code comes first, the other's is too old: it changes nothing and is sent again."""
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
    assert done in ([200, 200], [401, 200])
    entry = (await api.call(acme, "GET", f"{WEBHOOKS}/{one}")).json
    assert entry["url"] == "https://example.org/new"
    assert entry["eventTypes"] == (["funding_received"] if done[0] == 200 else None)
    if done[0] == 401:
        assert answers[0].code == "mfa_code_invalid"
        entry = (await api.call(acme, "PATCH", f"{WEBHOOKS}/{one}", patches[0])).json
        assert (entry["url"], entry["eventTypes"]) == ("https://example.org/new", ["funding_received"])


async def test_a_deleted_webhook_is_gone_and_its_secret_erased(api: Api) -> None:
    acme = await api.customer()
    outbox = await live_at(api.database, 0)
    one = await created(api, acme)
    await commit(outbox, funding(1), funding(2))
    gone = await api.call(acme, "DELETE", f"{WEBHOOKS}/{one}")
    assert (gone.status, gone.body) == (204, b"")
    assert await states(api.database) == {"cancelled": 2}
    await assert_ledger(api.database)
    assert (await api.call(acme, "GET", WEBHOOKS)).json == []
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
        target = linked(page)
    assert (seen, pages) == (ids[::-1], 3)
    for limit in ("0", "251", "-1", "x", "", "%EF%BC%91", "1e2"):
        refused = await api.call(acme, "GET", f"{WEBHOOKS}?limit={limit}")
        assert (refused.status, refused.pointers) == (422, [("?limit", "invalid")])
    for enough in (5, 250):  # all on one page, so there is no next one
        whole = await api.call(acme, "GET", f"{WEBHOOKS}?limit={enough}")
        assert ([entry["id"] for entry in whole.json], "link" in whole.headers) == (ids[::-1], False)


async def test_a_cursor_is_good_for_the_list_it_came_from_as_it_is(api: Api) -> None:
    acme = await api.customer(vaults=("v1", "v2"))
    outbox = await live_at(api.database, 0)
    one, two = [await created(api, acme) for _ in range(2)]
    await commit(outbox, funding(1), funding(2))
    feeds = [
        *(WEBHOOKS, "/v1/account/vaults", "/v1/account/events"),
        *(f"{WEBHOOKS}/{each}/deliveries" for each in (one, two)),
    ]
    cursors = {}
    for feed in feeds:
        link = await next_link(api, acme, f"{feed}?limit=1")
        cursors[feed] = parse_qs(urlsplit(link).query)["cursor"][0]
    for feed, cursor in cursors.items():
        assert (await api.call(acme, "GET", f"{feed}?cursor={cursor}")).status == 200
        others = {other for where, other in cursors.items() if where != feed}
        middle = len(cursor) // 2
        flipped = cursor[:middle] + ("A" if cursor[middle] != "A" else "B") + cursor[middle + 1 :]
        for wrong in (*others, flipped, cursor[:-1], f"{cursor}A", f"{cursor}=", f"={cursor}", "x", ""):
            refused = await api.call(acme, "GET", f"{feed}?cursor={wrong}")
            assert (refused.status, refused.pointers) == (422, [("?cursor", "cursor_unknown")]), (feed, wrong)


async def test_an_account_has_twenty_webhooks_at_most(api: Api) -> None:
    acme, umbra = await api.customer(), await api.customer("umbra", vaults=(), pair=1)
    first, *_ = [await created(api, acme) for _ in range(20)]
    refused = await create(api, acme)
    assert (refused.status, refused.code) == (409, "webhook_limit_reached")
    assert len((await api.call(acme, "GET", f"{WEBHOOKS}?limit=250")).json) == 20
    await created(api, umbra)  # each account counts for itself
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


@pytest.mark.parametrize("answered", ["503", "410"])
async def test_on_forgives_what_failed(api: Api, answered: str) -> None:
    """A customer who repaired the receiver need not wait, whether the webhook is off (410) or still on, but parked."""
    acme = await api.customer(vaults=("v1",))
    outbox = await live_at(api.database, 0)
    one = await created(api, acme)
    await commit(outbox, *(funding(number) for number in range(30)))
    (now,) = await values(api.database, "select db_now()")
    failed = [
        replace(settlement(delivery, "scheduled", 503), started_at=now)
        for delivery in (await take(api.database)).deliveries
    ]
    if answered == "410":
        failed[0] = replace(failed[0], state="parked", status=410, gone=True)
    await settle(api.database, failed)
    assert (await take(api.database)).deliveries == ()
    health = (await api.call(acme, "GET", f"{WEBHOOKS}/{one}/health")).json
    assert health["failuresInARow"] == 30
    if answered == "410":
        assert (health["active"], health["disabledReason"], health["deliveries"]["parked"]) == (False, "gone", 30)
    else:
        assert health["active"]
        assert datetime.fromisoformat(health["parkedUntil"]) > now

    on = await api.call(acme, "PATCH", f"{WEBHOOKS}/{one}", {"active": True})
    assert (on.status, on.json["active"]) == (200, True)
    health = (await api.call(acme, "GET", f"{WEBHOOKS}/{one}/health")).json
    assert (health["active"], health["disabledReason"], health["parkedUntil"]) == (True, None, None)
    assert len((await take(api.database)).deliveries) == 30
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
    for malformed in ("with space", "", "ü", "k" * 256):
        refused = await api.call(acme, "POST", WEBHOOKS, {"url": URL}, headers={"idempotency-key": malformed})
        assert (refused.status, refused.pointers) == (422, [("", "header_invalid")])


async def test_a_repeated_create_passes_every_check_and_makes_nothing(api: Api) -> None:
    acme, umbra = await api.customer(), await api.customer("umbra", vaults=(), pair=1)
    key = {"idempotency-key": "order-67"}
    wrong = await api.call(acme, "POST", WEBHOOKS, {"url": "http://example.org/"}, headers=key)
    assert wrong.status == 422  # which is not kept: the same key is still free
    first, second = await asyncio.gather(
        *(api.call(acme, "POST", WEBHOOKS, {"url": URL}, headers=key, code=api.code(acme)) for _ in range(2))
    )
    answer = first if first.status == 201 else second
    assert answer.status == 201
    for each in (first, second):  # or its code came after the other one, which was newer
        assert each.body == answer.body or each.code == "mfa_code_invalid"
    for code, refusal in ((None, "mfa_required"), ("000000", "mfa_code_invalid")):
        asked = await api.call(acme, "POST", WEBHOOKS, {"url": URL}, headers=key, code=code, step_up=False)
        assert (asked.status, asked.code) == (401, refusal)
        assert b"whsec_" not in asked.body
    other = await api.call(umbra, "POST", WEBHOOKS, {"url": URL}, headers=key)  # a key is its account's own
    assert (other.status, other.json["id"] != answer.json["id"]) == (201, True)
    assert other.json["secretToken"] != answer.json["secretToken"]
    for _ in range(19):
        await created(api, acme)
    full = await api.call(acme, "POST", WEBHOOKS, {"url": URL}, headers=key)  # there is no room, and none is needed
    assert (full.status, full.body, full.headers["cache-control"]) == (201, answer.body, "no-store")
    assert len((await api.call(acme, "GET", f"{WEBHOOKS}?limit=250")).json) == 20


async def test_who_am_i(api: Api) -> None:
    acme, nobody = await api.customer(), await api.customer("nobody", enrolled=False, vaults=(), pair=1)
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
    assert facts["limits"] == {
        "requestsPerMinute": FREELY.per_minute,
        "burst": FREELY.burst,
        "webhooks": 20,
        "bodyBytes": 16384,
        "tokenAgeSeconds": 30,
        "nonceMax": 99999,
    }
    assert (facts["stakingVaults"][0]["id"], facts["stakingVaults"][0]["withdrawalQueueAddress"]) == ("v1", None)
    assert datetime.now(UTC) - datetime.fromisoformat(facts["createdAt"]) < timedelta(seconds=30)
    assert abs(datetime.fromisoformat(facts["serverTime"]).timestamp() - api.clock.now_s()) < 5
    api.clock.ahead_s += 3600
    later = (await api.call(acme, "GET", "/v1/account")).json
    assert abs(datetime.fromisoformat(later["serverTime"]).timestamp() - api.clock.now_s()) < 5
    first = await api.call(acme, "GET", "/v1/account/vaults?limit=1")
    rest = await api.call(acme, "GET", linked(first))
    assert ([*first.json, *rest.json], linked(rest)) == (facts["stakingVaults"], "")
    await accounts.remove_vault(api.database, "acme", "v2", 100)
    assert [one["id"] for one in (await api.call(acme, "GET", "/v1/account")).json["stakingVaults"]] == ["v1"]
    facts = (await api.call(nobody, "GET", "/v1/account")).json
    assert (facts["mfa"], facts["stakingVaults"]) == ({"enrolled": False}, [])


async def test_the_feed_gives_every_event_as_it_is_delivered(api: Api) -> None:
    acme = await api.customer(vaults=("v1",))
    outbox = await live_at(api.database, 0)
    for number in range(7):
        await commit(outbox, funding(number, block=number))
    stored = await rows(api.database, "select id, body, created_at_ms from events order by seq")
    seen: list[dict[str, Any]] = []
    target = "/v1/account/events?limit=3"
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while len(seen) < 7:  # events wait while any older transaction of the server is open
            page = await api.call(acme, "GET", target)
            seen.extend(page.json)
            target = linked(page) or target
    assert seen == [json.loads(row["body"]) for row in stored]
    assert [event["id"] for event in seen] == [row["id"] for row in stored]
    for _ in range(2):  # an end for now, to be asked again later
        end = await api.call(acme, "GET", target)
        assert (end.json, linked(end)) == ([], "")
    await commit(outbox, funding(7, block=7))
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not (more := (await api.call(acme, "GET", target)).json):
            await asyncio.sleep(0.02)
    assert [event["id"] for event in more] == await values(
        api.database, "select id from events order by seq desc limit 1"
    )
    since, until = stored[2]["created_at_ms"], stored[5]["created_at_ms"]
    chosen = (await api.call(acme, "GET", f"/v1/account/events?since={since}&until={until}")).json
    assert [event["id"] for event in chosen] == [row["id"] for row in stored[2:5]]
    for query in ("since=-1", "until=x", f"since={2**53}", "since=1e3"):
        refused = await api.call(acme, "GET", f"/v1/account/events?{query}")
        assert (refused.status, refused.pointers) == (422, [(f"?{query.partition('=')[0]}", "invalid")])


async def test_an_event_reads_byte_for_byte_as_it_was_delivered(api: Api) -> None:
    acme = await api.customer(vaults=("v1",))
    outbox = await live_at(api.database, 0)
    await created(api, acme)
    await commit(outbox, funding(1), funding(2))
    delivered = (await take(api.database)).deliveries
    assert len(delivered) == 2
    for delivery in delivered:
        one = await api.call(acme, "GET", f"/v1/account/events/{delivery.event_id}")
        assert (one.body, one.headers["content-type"]) == (delivery.body, "application/json")
    unknown = await api.call(acme, "GET", "/v1/account/events/funding_received_acme_0")
    assert (unknown.status, unknown.code) == (404, "not_found")


async def test_deliveries_and_their_attempts(api: Api) -> None:
    acme = await api.customer(vaults=("v1",))
    outbox = await live_at(api.database, 0)
    one = await created(api, acme)
    await commit(outbox, funding(1), funding(2))
    target = f"{WEBHOOKS}/{one}/deliveries"
    good, bad = (await take(api.database)).deliveries
    flying = (await api.call(acme, "GET", target)).json
    assert [(entry["inFlight"], entry["nextAttemptAt"]) for entry in flying] == [(True, None)] * 2
    second = EARLIER + timedelta(seconds=1)
    failed = replace(settlement(bad, "scheduled", 503, after_s=300.0), started_at=second, excerpt="busy")
    await settle(api.database, [settlement(good), failed])

    listed = (await api.call(acme, "GET", f"{target}?state=scheduled")).json
    assert [entry["eventId"] for entry in listed] == [bad.event_id]
    assert (listed[0]["attempts"], listed[0]["inFlight"], listed[0]["finishedAt"]) == (1, False, None)
    wait = datetime.fromisoformat(listed[0]["nextAttemptAt"]) - datetime.now(UTC)
    assert timedelta(seconds=270) < wait <= timedelta(seconds=301)
    for state, number in {"delivered": 1, "parked": 0, "exhausted": 0, "cancelled": 0, "withdrawn": 0}.items():
        assert len((await api.call(acme, "GET", f"{target}?state={state}")).json) == number
    refused = await api.call(acme, "GET", f"{target}?state=lost")
    assert (refused.status, refused.pointers) == (422, [("?state", "invalid")])

    first = await api.call(acme, "GET", f"{target}?limit=1")
    rest = await api.call(acme, "GET", linked(first))
    assert [entry["eventId"] for entry in (*first.json, *rest.json)] == [entry["eventId"] for entry in flying]
    assert linked(rest) == ""

    reported = (await api.call(acme, "GET", f"{target}/{bad.event_id}")).json
    assert {name: value for name, value in reported.items() if name != "attemptLog"} == listed[0]
    assert reported["attemptLog"] == [
        {
            "number": 1,
            "resend": False,
            "dnsMs": None,
            "connectMs": None,
            "tlsMs": None,
            "firstByteMs": None,
            "startedAt": second.isoformat().replace("+00:00", "Z"),
            "durationMs": 5,
            "status": 503,
            "error": None,
            "responseExcerpt": "busy",
            "address": "127.0.0.1",
        }
    ]
    for missing in (f"{target}/nothing", f"{WEBHOOKS}/wh-unknown/deliveries", f"{WEBHOOKS}/wh-unknown/health"):
        unknown = await api.call(acme, "GET", missing)
        assert (unknown.status, unknown.code) == (404, "not_found")


async def test_health_reports_what_came_last(api: Api) -> None:
    acme = await api.customer(vaults=("v1",))
    outbox = await live_at(api.database, 0)
    one = await created(api, acme)
    health = (await api.call(acme, "GET", f"{WEBHOOKS}/{one}/health")).json
    assert health == {
        "active": True,
        "disabledReason": None,
        "parkedUntil": None,
        "oldestPendingAt": None,
        "lastSuccessAt": None,
        "lastFailure": None,
        "failuresInARow": 0,
        "deliveries": {"scheduled": 0, "parked": 0, "delivered": 0, "exhausted": 0, "cancelled": 0, "withdrawn": 0},
    }
    await commit(outbox, funding(1), funding(2), funding(3))
    good, bad, worse = (await take(api.database)).deliveries
    second, third = (EARLIER + timedelta(seconds=after_s) for after_s in (1, 2))
    lost = replace(settlement(worse, "exhausted"), started_at=third, status=None, error="connect: refused")
    await settle(api.database, [settlement(good), replace(settlement(bad, "scheduled", 503), started_at=second), lost])
    health = (await api.call(acme, "GET", f"{WEBHOOKS}/{one}/health")).json
    assert health["deliveries"] == {
        "scheduled": 1,
        "parked": 0,
        "delivered": 1,
        "exhausted": 1,
        "cancelled": 0,
        "withdrawn": 0,
    }
    assert datetime.fromisoformat(health["lastSuccessAt"]) == EARLIER
    assert datetime.fromisoformat(health["lastFailure"].pop("at")) == third
    assert health["lastFailure"] == {"status": None, "error": "connect: refused"}
    assert health["failuresInARow"] == 2
    assert datetime.fromisoformat(health["oldestPendingAt"]) <= datetime.now(UTC)
