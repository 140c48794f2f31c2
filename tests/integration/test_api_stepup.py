"""Step-up: a change needs the present code of the second factor, and each is good for one (A15, RFC 6238, RFC 9470)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator

import pyotp
import pytest

from api_worlds import Answer, Api, Customer, FrozenClock, running_api
from store_stories import shift_clock, values
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

WEBHOOKS = "/v1/account/webhooks"
BODY = {"url": "https://example.org/hook"}
NOW_S = 1_800_000_010


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


async def create(api: Api, customer: Customer, given: str | None) -> Answer:
    return await api.call(customer, "POST", WEBHOOKS, BODY, code=given, step_up=False)


async def test_a_change_without_a_code_is_asked_for_one(api: Api) -> None:
    acme = await api.customer()
    one = (await create(api, acme, code(acme))).json["id"]
    for method, target, value in (
        ("POST", WEBHOOKS, BODY),
        ("PATCH", f"{WEBHOOKS}/{one}", {"active": False}),
        ("DELETE", f"{WEBHOOKS}/{one}", None),
    ):
        asked = await api.call(acme, method, target, value, step_up=False)
        assert (asked.status, asked.code) == (401, "mfa_required")
        assert asked.headers["www-authenticate"] == 'Bearer error="insufficient_user_authentication"'
    assert [entry["id"] for entry in (await api.call(acme, "GET", WEBHOOKS)).json] == [one]


@pytest.mark.parametrize("step", [-2, -1, 0, 1, 2])
async def test_a_code_is_good_from_the_step_before_to_the_step_after(api: Api, step: int) -> None:
    acme = await api.customer()
    answer = await create(api, acme, code(acme, step))
    assert answer.status == (201 if abs(step) <= 1 else 401)
    assert answer.status == 201 or answer.code == "mfa_code_invalid"


@pytest.mark.parametrize("form", ["{0}", " {0}", "{0} ", "0{0}", "{0:.5}", "{0:.3} {0:.3}", ""])
async def test_a_code_is_six_digits(api: Api, form: str) -> None:
    acme = await api.customer()
    given = form.format(code(acme))
    answer = await create(api, acme, given)
    # HTTP itself takes white space around a value away
    assert (answer.status == 201) == (given.strip() == code(acme))


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


async def test_what_is_refused_spends_neither_code_nor_token(api: Api) -> None:
    acme = await api.customer()
    right = code(acme)
    for method, target, value, status in (
        ("POST", WEBHOOKS, {"url": "http://example.org/"}, 422),
        ("POST", WEBHOOKS, {**BODY, "stakingVaultIds": ["nope"]}, 422),
        ("PATCH", f"{WEBHOOKS}/wh-unknown", {"active": True}, 404),
        ("DELETE", f"{WEBHOOKS}/wh-unknown", None, 404),
    ):
        assert (await api.call(acme, method, target, value, code=right)).status == status
    token = api.token(acme, WEBHOOKS, json.dumps(BODY).encode())
    for given, status in ((None, 401), (wrong(acme), 401), (right, 201), (code(acme, 1), 401)):
        answer = await api.call(acme, "POST", WEBHOOKS, BODY, code=given, step_up=False, token=token)
        assert answer.status == status
    assert answer.code == "token_replayed"


async def test_five_wrong_codes_lock_and_three_guesses_follow_each_lock(database: Database) -> None:
    clock, at_s = FrozenClock(NOW_S), 0.0
    async with running_api(database, clock=clock) as api:
        acme = await api.customer()
        told = [await create(api, acme, wrong(acme, number)) for number in range(5)]
        assert [answer.code for answer in told] == ["mfa_code_invalid"] * 4 + ["mfa_locked"]
        assert (told[-1].status, told[-1].headers["retry-after"]) == (429, "900")
        right = await create(api, acme, code(acme))
        assert (right.status, right.code) == (429, "mfa_locked")
        asked = await create(api, acme, None)
        assert asked.code == "mfa_locked"
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


async def test_parallel_guesses_are_counted_one_by_one(api: Api) -> None:
    acme = await api.customer()
    answers = await asyncio.gather(*(create(api, acme, wrong(acme, number)) for number in range(60)))
    assert Counter(answer.code for answer in answers) == {"mfa_code_invalid": 4, "mfa_locked": 56}
    assert await values(api.database, "select failures from mfa_factors") == [5]


async def test_factors_belong_to_their_account(api: Api) -> None:
    acme, umbra = await api.customer(), await api.customer("umbra", pair=1)
    assert (await create(api, acme, code(umbra))).code == "mfa_code_invalid"
    assert (await create(api, umbra, code(umbra))).status == 201
    nobody = await api.customer("nobody", enrolled=False)
    await asyncio.sleep(0.5)
    refused = await create(api, nobody, "123456")
    assert (refused.status, refused.code) == (403, "mfa_not_enrolled")
