"""Step-up: a change needs the present code of the second factor, each good for one change (rule A15, RFC 6238)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator

import pyotp
import pytest

from api_fixtures import Api, ApiResponse, Customer, FrozenClock, exchange, request_bytes, running_api
from raised_conditions import raised
from store_factories import shift_clock, values, vault
from vaultevents.store.pool import Database

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_unverified_pause")]

WEBHOOKS = "/v1/account/webhooks"
BODY = {"url": "https://example.org/hook"}
NOW_S = 1_800_000_010
CHALLENGE = 'Bearer error="insufficient_user_authentication"'


@pytest.fixture
async def api(database: Database) -> AsyncIterator[Api]:
    async with running_api(database, clock=FrozenClock(NOW_S)) as running:
        yield running


def code(customer: Customer, step: int = 0) -> str:
    """The code of this moment, or of some steps away."""
    return pyotp.HOTP(customer.seed).at(NOW_S // 30 + step)


def wrong(customer: Customer, number: int = 0) -> str:
    """Six digits that no step near has."""
    right = {code(customer, step) for step in range(-3, 4)}
    return [guess for guess in (f"{n:06}" for n in range(200)) if guess not in right][number]


async def create(api: Api, customer: Customer, given: str | None) -> ApiResponse:
    return await api.call(customer, "POST", WEBHOOKS, BODY, code=given, step_up=False)


async def test_a_change_without_a_code_is_asked_for_one(api: Api) -> None:
    acme = await api.customer()
    one = (await create(api, acme, code(acme))).json["id"]
    for method, target, value in (
        ("POST", WEBHOOKS, BODY),
        ("PATCH", f"{WEBHOOKS}/{one}", {"active": False}),
        ("DELETE", f"{WEBHOOKS}/{one}", None),
    ):
        for headers in ({}, {"x-mfa-code": ""}, {"x-mfa-code": " "}):
            asked = await api.call(acme, method, target, value, step_up=False, headers=headers)
            assert (asked.status, asked.code) == (401, "mfa_required")
            assert asked.headers["www-authenticate"] == CHALLENGE
    entries = (await api.call(acme, "GET", WEBHOOKS)).json
    assert [(entry["id"], entry["active"]) for entry in entries] == [(one, True)]
    assert await values(api.database, "select failures from mfa_factors") == [0]  # to ask is no guess


@pytest.mark.parametrize("step", [-2, -1, 0, 1, 2])
async def test_a_code_is_good_from_the_step_before_to_the_step_after(api: Api, step: int) -> None:
    acme = await api.customer()
    answer = await create(api, acme, code(acme, step))
    if abs(step) <= 1:
        assert answer.status == 201
    else:
        assert (answer.status, answer.code) == (401, "mfa_code_invalid")
        assert answer.headers["www-authenticate"] == CHALLENGE
    assert len((await api.call(acme, "GET", WEBHOOKS)).json) == (abs(step) <= 1)


async def test_a_code_is_six_ascii_digits(database: Database) -> None:
    """What is malformed is no guess: it cannot lock the factor. White space around a value is none of it (RFC 9110)."""
    async with running_api(database, clock=FrozenClock(NOW_S)) as api:
        acme = await api.customer()
        right = code(acme)
        wide, arabic = (right.translate({48 + n: zero + n for n in range(10)}) for zero in (0xFF10, 0x0660))
        split = f"{right[:3]} {right[3:]}"
        for given in (
            right[:5],
            f"0{right}",
            f"{right}0",
            split,
            f"{split[:3]}-{right[3:]}",
            wide,
            arabic,
            f"+{right}",
        ):
            refused = await create(api, acme, given)
            assert (refused.status, refused.code) == (401, "mfa_code_malformed"), given
            assert refused.headers["www-authenticate"] == CHALLENGE
            assert await values(database, "select failures from mfa_factors") == [0], given
        for given, step in ((f" {right}", 0), (f"{code(acme, 1)}\t", 1)):
            assert (await create(api, acme, given)).status == 201, step


async def test_a_code_that_comes_twice_is_no_request(api: Api) -> None:
    acme, body = await api.customer(), json.dumps(BODY).encode()
    headers = {
        "x-api-key": acme.api_key,
        "authorization": f"Bearer {api.token(acme, WEBHOOKS, body)}",
        "content-type": "application/json",
        "x-mfa-code": f"{code(acme)}\r\nX-MFA-Code: {wrong(acme)}",
    }
    refused = await exchange(api.url, request_bytes("POST", WEBHOOKS, headers, body))
    assert (refused.status, refused.code) == (400, "request_malformed")
    assert await values(api.database, "select failures from mfa_factors") == [0]


async def test_a_code_is_good_once_also_across_processes(database: Database) -> None:
    clock = FrozenClock(NOW_S)
    async with running_api(database, clock=clock) as one, running_api(database, clock=clock) as two:
        acme = await one.customer()
        answers = await asyncio.gather(*(create(api, acme, code(acme)) for api in (one, two, one, two)))
        assert Counter(answer.status for answer in answers) == {201: 1, 401: 3}
        assert {answer.code for answer in answers if answer.status == 401} == {"mfa_code_invalid"}
        used = await create(two, acme, code(acme, -1))  # an older one than the one that was accepted
        assert used.code == "mfa_code_invalid"
        assert (await create(two, acme, code(acme, 1))).status == 201
    assert await values(database, "select failures from mfa_factors") == [0]  # they were no guesses


async def test_what_is_refused_spends_neither_code_nor_token(database: Database) -> None:
    """The same token and the same code serve once what was in the way is gone, and then no more."""
    async with running_api(database, clock=FrozenClock(NOW_S), max_webhooks=2) as api:
        acme = await api.customer()
        one, _ = [(await create(api, acme, code(acme, step))).json["id"] for step in (-1, 0)]
        right = code(acme, 1)
        for method, target, value, status in (
            ("POST", WEBHOOKS, {"url": "http://example.org/"}, 422),
            ("PATCH", f"{WEBHOOKS}/{one}", {}, 422),
            ("PATCH", f"{WEBHOOKS}/{one}", {"stakingVaultIds": ["v2"]}, 422),
            ("PATCH", f"{WEBHOOKS}/wh-unknown", {"active": True}, 404),
            ("DELETE", f"{WEBHOOKS}/wh-unknown", None, 404),
            ("POST", WEBHOOKS, BODY, 409),
        ):
            token = api.token(acme, target, b"" if value is None else json.dumps(value).encode())
            for _ in range(2):
                refused = await api.call(acme, method, target, value, code=right, token=token)
                assert refused.status == status, (method, target)
        wanted = {"stakingVaultIds": ["v2"]}
        token = api.token(acme, f"{WEBHOOKS}/{one}", json.dumps(wanted).encode())
        for given, status in (
            (right, 422),
            (None, 422),
            (wrong(acme), 422),
        ):  # what is wrong is reported before the code
            refused = await api.call(acme, "PATCH", f"{WEBHOOKS}/{one}", wanted, code=given, step_up=False, token=token)
            assert refused.status == status
        await vault(database, "v2")
        for given, status, reported in (
            (None, 401, "mfa_required"),
            (wrong(acme), 401, "mfa_code_invalid"),
            (right, 200, None),
            (right, 401, "token_replayed"),
        ):
            answer = await api.call(acme, "PATCH", f"{WEBHOOKS}/{one}", wanted, code=given, step_up=False, token=token)
            assert answer.status == status
            assert reported is None or answer.code == reported


async def test_a_success_forgets_the_wrong_codes_before_it(api: Api) -> None:
    acme = await api.customer()
    for step in (-1, 0, 1):
        guesses = [await create(api, acme, wrong(acme, number)) for number in range(4)]
        assert {answer.code for answer in guesses} == {"mfa_code_invalid"}
        assert (await create(api, acme, code(acme, step))).status == 201


async def test_five_wrong_codes_lock_and_three_guesses_follow_each_lock(database: Database) -> None:
    clock, at_s = FrozenClock(NOW_S), 0.0
    async with running_api(database, clock=clock) as api:
        acme = await api.customer()
        reported = [await create(api, acme, wrong(acme, number)) for number in range(5)]
        assert [answer.code for answer in reported] == ["mfa_code_invalid"] * 4 + ["mfa_locked"]
        assert (reported[-1].status, reported[-1].headers["retry-after"]) == (429, "900")
        right = await create(api, acme, code(acme))
        assert (right.status, right.code) == (429, "mfa_locked")
        asked = await create(api, acme, None)
        assert asked.code == "mfa_locked"
        assert "VaulteventsStepUpLocked" in await raised(database)
        await shift_clock(database, 901)
        assert "VaulteventsStepUpLocked" not in await raised(database)
        await shift_clock(database, 0)
    async with running_api(database, clock=clock) as api:  # a lock outlives the process
        assert (await create(api, acme, code(acme))).code == "mfa_locked"
        for lock_s in (900, 1800, 3600):
            at_s += lock_s + 1
            await shift_clock(database, at_s)
            guesses = [await create(api, acme, wrong(acme, number)) for number in range(3)]
            assert [answer.code for answer in guesses] == ["mfa_code_invalid"] * 2 + ["mfa_locked"]
            assert int(guesses[-1].headers["retry-after"]) == 2 * lock_s
        await shift_clock(database, at_s + 7201)
        assert (await create(api, acme, code(acme))).status == 201
        assert await values(database, "select failures from mfa_factors") == [0]


async def test_a_hundred_guesses_at_once_on_two_replicas_are_counted_one_by_one(database: Database) -> None:
    clock = FrozenClock(NOW_S)
    async with running_api(database, clock=clock) as one, running_api(database, clock=clock) as two:
        acme = await one.customer()
        answers = await asyncio.gather(
            *(create((one, two)[number % 2], acme, wrong(acme, number)) for number in range(100))
        )
        assert Counter(answer.code for answer in answers) == {"mfa_code_invalid": 4, "mfa_locked": 96}
        assert all(0 < int(each.headers["retry-after"]) <= 900 for each in answers if each.status == 429)
        assert await values(database, "select failures from mfa_factors") == [5]
        assert (await one.call(acme, "GET", WEBHOOKS)).json == []


async def test_a_lock_concerns_changes_of_its_account_only(api: Api) -> None:
    acme, umbra = await api.customer(), await api.customer("umbra", pair=1, vaults=())
    for number in range(5):
        await create(api, acme, wrong(acme, number))
    assert (await create(api, acme, code(acme))).code == "mfa_locked"
    for target in ("/v1/account", WEBHOOKS, "/v1/account/events"):
        assert (await api.call(acme, "GET", target)).status == 200
    assert (await create(api, umbra, code(umbra))).status == 201


async def test_factors_belong_to_their_account(api: Api) -> None:
    acme, umbra = await api.customer(), await api.customer("umbra", pair=1, vaults=())
    nobody = await api.customer("nobody", enrolled=False, vaults=(), pair=2)
    assert (await create(api, acme, code(umbra))).code == "mfa_code_invalid"
    counted = "select failures from mfa_factors order by account_id"
    assert await values(api.database, counted) == [1, 0]  # a guess at the factor of acme, none at that of umbra
    assert (await create(api, umbra, code(umbra))).status == 201
    for given in ("123456", None, code(umbra, 1)):
        refused = await create(api, nobody, given)
        assert (refused.status, refused.code) == (403, "mfa_not_enrolled")
