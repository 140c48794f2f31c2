"""Callers that mean harm beside callers that do not: guesses, floods of one account, bodies full of errors."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from api_fixtures import Api, ApiResponse, Customer, exchange, key_pair, request_bytes, running_api
from store_factories import values
from timeouts import until
from vaultevents.api.limits import Rate, Shares
from vaultevents.api.server import ServerOptions
from vaultevents.core.totp import LOCK_AFTER
from vaultevents.store.pool import Database
from vaultevents.store.sessions import LOCK_WAIT_S

pytestmark = pytest.mark.integration

ACCOUNT = "/v1/account"
WEBHOOKS = "/v1/account/webhooks"
BODY = {"url": "https://example.org/hook"}


@pytest.fixture
async def api(database: Database) -> AsyncIterator[Api]:
    async with running_api(database) as running:
        yield running


async def test_who_has_the_api_key_alone_locks_nobody_out(database: Database) -> None:
    """Wrong signatures, from the owner's address and others; each address is limited for itself."""
    options = ServerOptions(port=0, trusted_proxies=("127.0.0.1/32",))
    async with running_api(database, rate=Rate(per_minute=1, burst=10), options=options) as api:
        acme = await api.customer()
        thief = replace(acme, private_key=key_pair(1))
        hers, elsewhere = {"x-forwarded-for": "203.0.113.7"}, {"x-forwarded-for": "198.51.100.1"}
        stolen = api.token(acme, "/v1/account/events")  # signed, and for another path
        served = []
        for number in range(9):
            for origin in (hers, elsewhere):
                for guess in (
                    await api.call(thief, "GET", ACCOUNT, headers=origin),
                    await api.call(acme, "GET", ACCOUNT, headers=origin, token="x"),
                    await api.call(acme, "GET", ACCOUNT, headers=origin, token=stolen),
                ):
                    assert guess.status == (401 if number < 3 else guess.status)
                    assert guess.status in (401, 429)
            served.append((await api.call(acme, "GET", ACCOUNT, headers=hers)).status)
        assert served == [200] * 9
        for origin in (hers, elsewhere):
            limited = await api.call(thief, "GET", ACCOUNT, headers=origin)
            assert (limited.status, limited.code) == (429, "rate_limited"), "guesses are limited"
        fresh = await api.call(thief, "GET", ACCOUNT, headers={"x-forwarded-for": "192.0.2.1"})
        assert fresh.code == "credentials_invalid", "each address for itself"
        assert (await api.call(acme, "GET", ACCOUNT, headers=hers)).status == 200
        over = await api.call(acme, "GET", ACCOUNT, headers=hers)
        assert (over.status, over.code) == (429, "rate_limited"), "the owner's own rate holds"


async def test_a_malformed_code_never_locks(api: Api) -> None:
    acme = await api.customer()
    for number in range(2 * LOCK_AFTER):
        refused = await api.call(acme, "POST", WEBHOOKS, BODY, code=f"{number:05}")
        assert (refused.status, refused.code) == (401, "mfa_code_malformed")
    assert (await api.call(acme, "POST", WEBHOOKS, BODY)).status == 201
    assert await values(api.database, "select failures from mfa_factors") == [0]


async def test_one_accounts_requests_leave_the_database_to_others(database: Database) -> None:
    """The hostile account's changes all wait for a lock; the other account's reads are as quick as alone."""
    async with running_api(database) as api:
        good = await api.customer("good", vaults=())
        hostile = await api.customer("hostile", vaults=(), pair=1)
        alone = await read_times(api, good, 20)
        async with database.transaction() as connection:
            await connection.execute("select 1 from mfa_factors where account_id = 'hostile' for update")
            flood = [asyncio.create_task(api.call(hostile, "POST", WEBHOOKS, BODY, code="000000")) for _ in range(30)]
            await until(lambda: under_way(api, "hostile") >= 20)
            beside = await read_times(api, good, 20)
        await asyncio.gather(*flood)
    print(f"p95 {percentile(alone) * 1000:.1f} ms alone, {percentile(beside) * 1000:.1f} ms beside the flood")
    assert max(beside) < LOCK_WAIT_S / 2, "no read waited for the lock, which a change does for so long"


def under_way(api: Api, account_id: str) -> int:
    """Return how many requests of the account have a place or wait for one."""
    share = api.desk.shares._accounts.get(account_id)
    return 0 if share is None else share.users


async def read_times(api: Api, customer: Customer, count: int) -> list[float]:
    found = []
    for _ in range(count):
        began_s = time.monotonic()
        assert (await api.call(customer, "GET", WEBHOOKS)).status == 200
        found.append(time.monotonic() - began_s)
    return found


def percentile(times: list[float], share: float = 0.95) -> float:
    return sorted(times)[math.ceil(len(times) * share) - 1]


async def test_an_account_with_too_many_waiting_requests_is_refused(database: Database) -> None:
    async with running_api(database, shares=Shares(at_once=1, waiting=2)) as api:
        acme = await api.customer()
        other = await api.customer("other", vaults=(), pair=1)
        async with database.transaction() as connection:
            await connection.execute("select 1 from mfa_factors where account_id = 'acme' for update")
            flood = [asyncio.create_task(api.call(acme, "POST", WEBHOOKS, BODY, code="000000")) for _ in range(6)]
            await until(lambda: sum(task.done() for task in flood) == 3)
            assert (await api.call(other, "GET", WEBHOOKS)).status == 200
        answers = await asyncio.gather(*flood)
    refused = [answer for answer in answers if answer.status == 429]
    assert {(answer.code, answer.headers["retry-after"]) for answer in refused} == {("rate_limited", "1")}
    assert Counter(answer.status for answer in answers) == {429: 3, 401: 3}
    assert under_way(api, "acme") == 0


MANY_ERRORS: dict[str, Any] = {
    "unknown event types": {**BODY, "eventTypes": ["x"] * 3000},
    "values of another type": {**BODY, "eventTypes": [1] * 5000},
    "unknown vaults": {**BODY, "stakingVaultIds": [f"v{n}" for n in range(1800)]},
    "unknown fields": {f"field-{n}": 0 for n in range(1000)},
    "one long name": {**BODY, "x" * 15_000: 1},
    "one long URL": {"url": "https://" + "x" * 15_000},
    "quotes in a type": {**BODY, "eventTypes": ['"' * 7000]},
}


@pytest.mark.parametrize("value", MANY_ERRORS.values(), ids=MANY_ERRORS)
async def test_an_answer_about_errors_is_no_larger_than_the_request(api: Api, value: Any) -> None:
    acme = await api.customer()
    assert len(json.dumps(value)) > 13_000
    answer = await api.call(acme, "POST", WEBHOOKS, value)
    print(f"{len(answer.body)} bytes of errors")
    assert (answer.status, answer.code) == (422, "validation_failed")
    assert 1 <= len(answer.json["errors"]) <= 10
    assert len(answer.body) < 12_000


async def test_a_few_errors_are_all_named_and_many_are_counted(api: Api) -> None:
    acme = await api.customer()
    few = await api.call(acme, "POST", WEBHOOKS, {**BODY, "eventTypes": ["x", "y"]})
    assert [pointer for pointer, _ in few.pointers] == ["/eventTypes/0", "/eventTypes/1"]
    many = await api.call(acme, "POST", WEBHOOKS, {**BODY, "eventTypes": ["x"] * 500})
    assert many.json["detail"].endswith("; and 490 more")


async def test_answers_about_an_account_are_not_kept_by_caches(api: Api) -> None:
    acme = await api.customer()
    created = await api.call(acme, "POST", WEBHOOKS, BODY)
    one = f"{WEBHOOKS}/{created.json['id']}"
    for answer in (
        created,
        await api.call(acme, "GET", ACCOUNT),
        await api.call(acme, "GET", one),
        await api.call(acme, "GET", f"{one}/deliveries"),
        await api.call(acme, "GET", "/v1/account/events"),
        await api.call(acme, "GET", f"{WEBHOOKS}/wh-0"),
        await api.call(acme, "POST", WEBHOOKS, {}),
        await api.call(acme, "POST", f"{one}/rotate-secret"),
        await api.call(acme, "DELETE", one),
        await api.send("GET", ACCOUNT, {}),
    ):
        assert answer.headers["cache-control"] == "no-store"
    assert "cache-control" not in (await api.send("GET", "/docs", {})).headers


async def test_the_id_of_a_request_is_in_its_answer_and_in_the_log(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    acme = await api.customer()

    async def ask(sent: str) -> ApiResponse:
        return await api.call(acme, "GET", ACCOUNT, headers={"x-request-id": sent})

    for given in ("a", "2f6c-09_A.b", "x" * 64):
        answer = await ask(given)
        assert answer.headers["x-request-id"] == given
        assert f"request_id={given}" in capsys.readouterr().out
    for given in ("", "x" * 65, "a b", "a\tb", "<b>", "ä", 'a"', "a,b"):
        answer = await ask(given)
        assert answer.headers["x-request-id"] != given
        assert len(answer.headers["x-request-id"]) == 16
    mine = await api.send("GET", ACCOUNT, {"x-request-id": "mine"})
    assert (mine.code, mine.json["requestId"]) == ("credentials_missing", "mine")
    for raw in (b"nonsense\r\n\r\n", b"GET /docs HTTP/1.1\r\nhost: x\r\nx-request-id: a\r\nx-request-id: b\r\n\r\n"):
        assert len((await exchange(api.url, raw)).headers["x-request-id"]) == 16
    shown = await exchange(api.url, request_bytes("GET", "/docs", {"x-request-id": "open"}))
    assert shown.headers["x-request-id"] == "open"


async def test_a_failure_of_ours_is_logged_with_the_id_that_the_client_has(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    acme = await api.customer()
    async with api.database.transaction() as connection:
        await connection.execute("alter table accounts rename to accounts_away")
    answer = await api.call(acme, "GET", ACCOUNT)
    assert (answer.status, answer.code) == (503, "unavailable")
    lines = [line for line in capsys.readouterr().out.splitlines() if "request_answered" in line]
    assert f"request_id={answer.json['requestId']}" in lines[-1]
    assert "status=503" in lines[-1]
    assert "account=acme" in lines[-1]
    assert "warning" in lines[-1]


async def test_a_client_made_from_the_schema_changes_what_it_was_asked_to(api: Api) -> None:
    """Generators give a field that is absent the default of its schema: PATCH has none, or it would change others."""
    schema = (await api.send("GET", "/v1/openapi.json", {})).json
    operation = schema["paths"][f"{WEBHOOKS}/{{webhook_id}}"]["patch"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = schema["components"]["schemas"][reference]["properties"]
    assert set(fields) == {"url", "eventTypes", "stakingVaultIds", "active"}
    acme = await api.customer()
    wanted = {**BODY, "eventTypes": ["funding_received"], "stakingVaultIds": ["v1"], "active": False}
    one = (await api.call(acme, "POST", WEBHOOKS, wanted)).json["id"]
    for name, value in (("eventTypes", ["withdrawal_claimed"]), ("active", True), ("url", "https://example.org/b")):
        sent = {field: facts["default"] for field, facts in fields.items() if "default" in facts} | {name: value}
        changed = await api.call(acme, "PATCH", f"{WEBHOOKS}/{one}", sent)
        wanted[name] = value
        assert {field: changed.json[field] for field in wanted} == wanted
    posted = schema["components"]["schemas"]["NewWebhook"]["properties"]
    assert posted["active"]["default"] is True, "what POST says of absent fields is so"
