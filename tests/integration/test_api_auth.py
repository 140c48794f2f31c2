"""Who gets in: API key, signed token, single use, addresses, roles, rates (interface §5, A7-A14, A17)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from email.utils import parsedate_to_datetime

import pytest

from api_worlds import (
    Answer,
    Api,
    Clock,
    Customer,
    FrozenClock,
    exchange,
    public_pem,
    request_bytes,
    running_api,
)
from store_stories import shift_clock
from tokens_corpus import FORGED, GOLDEN, ORIGIN, Client, Sent, cached_key
from vaultevents.api.limits import Rate
from vaultevents.api.server import ServerOptions
from vaultevents.core.rsakeys import fingerprint, parse_public_key
from vaultevents.core.tokens import TokenRules
from vaultevents.store import apikeys
from vaultevents.store.embedded import ServerAddress
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

NOW_S = int(time.time())  # keys have times in the database, whose clock is the real one
RULES = TokenRules(origins=frozenset({ORIGIN}))


@pytest.fixture
async def api(database: Database) -> AsyncIterator[Api]:
    """An API whose clock stands still, so that every edge of a token's life can be met exactly."""
    async with running_api(database, rules=RULES, clock=FrozenClock(NOW_S)) as running:
        yield running


async def sign_up(api: Api, account_id: str = "acme", key: str = "acme", **options: object) -> Customer:
    """A customer who signs with one of the corpus's keys."""
    made = await api.customer(account_id, vaults=(), **options)  # type: ignore[arg-type]  # options as customer() has
    return await signing_with(api, made, key)


async def signing_with(api: Api, customer: Customer, key: str, overlap_s: float = 0.0) -> Customer:
    """The customer's API key with another public key; the one before is valid for `overlap_s` more."""
    der = parse_public_key(public_pem(cached_key(key)))
    await apikeys.rotate_public_key(api.database, customer.key_id, der, fingerprint(der), overlap_s)
    await asyncio.sleep(apikeys.MAX_AGE_S)
    return replace(customer, private_key=cached_key(key))


def client(now_s: int = NOW_S, key: str = "acme", stranger: str = "stranger") -> Client:
    return Client(cached_key(key), cached_key(stranger), now_s)


async def present(api: Api, customer: Customer, sent: Sent, **headers: str) -> Answer:
    """The very bytes of a request from the corpus."""
    credentials = {"x-api-key": customer.api_key, "authorization": f"Bearer {sent.token}"}
    typed = {"content-type": "application/json"} if sent.body else {}
    method = "POST" if sent.body else "GET"
    return await exchange(api.url, request_bytes(method, sent.target, {**credentials, **typed, **headers}, sent.body))


async def test_every_golden_token_is_accepted(database: Database) -> None:
    """Whether its body makes sense is another matter: a POST without a step-up code is asked for one."""
    sent_before = set()
    rules = TokenRules(nonce_max=99_999_999, origins=RULES.origins)
    async with running_api(database, rules=rules, clock=FrozenClock(NOW_S)) as api:
        acme = await sign_up(api)
        for case in GOLDEN:
            sent = case.make(client())
            answer = await present(api, acme, sent)
            if sent.body:  # refused for want of a code, or for what it asks: that spends no token
                assert answer.code in ("mfa_required", "validation_failed"), (case.name, answer)
            elif sent.token in sent_before:  # another case made the same
                assert answer.code == "token_replayed"
            else:
                assert answer.status == 200, (case.name, answer)
            sent_before.add(sent.token)
    assert len(sent_before) > 15


async def test_every_forged_token_is_refused_with_its_code(api: Api) -> None:
    acme = await sign_up(api)
    told = {}
    for case in FORGED:
        if case.on_wire:
            answer = await present(api, acme, case.make(client()))
            told[case.name] = (answer.status, answer.code)
    assert len(told) > 200
    wanted = {case.name: (401, case.code) for case in FORGED if case.on_wire}
    differing = {name: (found, wanted[name]) for name, found in told.items() if found != wanted[name]}
    # what HTTP itself forbids never gets as far as a token
    assert {name for name, (found, _) in differing.items() if found != (400, "request_malformed")} == set(), differing


async def test_a_good_token_passes_once(api: Api) -> None:
    acme = await sign_up(api)
    sent = client().get()
    assert (await present(api, acme, sent)).status == 200
    again = await present(api, acme, sent)
    assert (again.status, again.code) == (401, "token_replayed")
    padded = Sent(sent.token + "==", sent.target)
    assert (await present(api, acme, padded)).code == "token_malformed"


async def test_a_read_passes_once_on_each_replica(database: Database) -> None:
    clock = FrozenClock(NOW_S)
    async with running_api(database, clock=clock) as one, running_api(database, clock=clock) as two:
        acme = await sign_up(one)
        sent = client().get()
        statuses = [(await present(api, acme, sent)).status for api in (one, two, one, two)]
    assert statuses == [200, 200, 401, 401]


async def test_keys_of_others_and_keys_of_yesterday(api: Api) -> None:
    acme, umbra = await sign_up(api), await sign_up(api, "umbra", "umbra")
    by_umbra = client(key="umbra").get()
    crossed = await present(api, acme, by_umbra)
    unknown = await present(api, replace(umbra, api_key=umbra.api_key[:-1] + "-"), client(key="umbra").get())
    assert (crossed.status, crossed.code) == (unknown.status, unknown.code) == (401, "credentials_invalid")
    assert {**crossed.json, "requestId": ""} == {**unknown.json, "requestId": ""}
    newer = await signing_with(api, acme, "newer", overlap_s=3600)
    assert (await present(api, acme, client().get(nonce="1"))).status == 200
    assert (await present(api, newer, client(key="newer").get(nonce="2"))).status == 200
    assert isinstance(api.clock, FrozenClock)
    api.clock.at_s = (await api.database.now() + timedelta(hours=2)).timestamp()
    later = int(api.clock.at_s)
    assert (await present(api, acme, client(later).get())).code == "credentials_invalid"
    assert (await present(api, newer, client(later, "newer").get())).status == 200


async def test_a_revoked_key_stops_on_every_replica_within_a_second(database: Database) -> None:
    async with running_api(database) as one, running_api(database) as two:
        acme = await one.customer()
        for api in (one, two):
            assert (await api.call(acme, "GET", "/v1/account")).status == 200
        await apikeys.revoke_key(database, acme.key_id)
        await asyncio.sleep(0.95)
        for api in (one, two):
            refused = await api.call(acme, "GET", "/v1/account")
            assert (refused.status, refused.code) == (401, "credentials_invalid")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "credentials_missing"),
        ({"x-api-key": "vek_x"}, "credentials_missing"),
        ({"authorization": "Bearer x.y.z"}, "credentials_missing"),
        ({"x-api-key": "vek_x", "authorization": "Basic eA=="}, "credentials_missing"),
        ({"x-api-key": "vek_x", "authorization": "Bearer x"}, "token_malformed"),
    ],
)
async def test_missing_credentials(api: Api, headers: dict[str, str], code: str) -> None:
    answer = await api.send("GET", "/v1/account", headers)
    assert (answer.status, answer.code) == (401, code)
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert (await api.send("GET", "/v1/nothing/here", headers)).code == code


async def test_a_header_that_comes_twice_is_no_request(api: Api) -> None:
    acme = await sign_up(api)
    sent = client().get()
    for name in ("x-api-key", "authorization"):
        whole = request_bytes(
            "GET", sent.target, {"x-api-key": acme.api_key, "authorization": f"Bearer {sent.token}", name.upper(): "x"}
        )
        answer = await exchange(api.url, whole)
        assert (answer.status, answer.code) == (400, "request_malformed")


async def test_what_a_claim_has_wrong_is_told_only_after_the_signature(api: Api) -> None:
    acme = await sign_up(api)
    old = Client(cached_key("stranger"), cached_key("acme"), NOW_S - 3600).get()
    assert (await present(api, acme, old)).code == "credentials_invalid"
    mine = await present(api, acme, client(NOW_S - 3600).get())
    assert mine.code == "token_expired"
    assert "3600.0 s ago" in mine.json["detail"]


async def test_answers_are_dated_by_the_service_clock(api: Api) -> None:
    acme = await sign_up(api)
    await asyncio.sleep(1.1)  # the date is made once a second
    for answer in (await present(api, acme, client().get()), await api.send("GET", "/v1/account", {})):
        assert abs(parsedate_to_datetime(answer.headers["date"]).timestamp() - NOW_S) <= 2
    facts = (await present(api, acme, client().get(url='"/v1/account"'))).status
    assert facts == 401  # signed for another path


async def test_roles(api: Api) -> None:
    acme = await sign_up(api)
    reader = await api.another_key("acme", acme.seed, role="read")
    assert (await api.call(reader, "GET", "/v1/account")).json["apiKey"]["role"] == "read"
    for method, target, value in (
        ("POST", "/v1/account/webhooks", {"url": "https://example.org/"}),
        ("PATCH", "/v1/account/webhooks/wh-1", {"active": False}),
        ("DELETE", "/v1/account/webhooks/wh-1", None),
    ):
        refused = await api.call(reader, method, target, value)
        assert (refused.status, refused.code) == (403, "role_insufficient")


@pytest.mark.parametrize(
    ("allowed", "proxied", "forwarded", "status"),
    [
        (("127.0.0.1/32",), False, None, 200),
        (("10.0.0.0/8", "127.0.0.0/8"), False, None, 200),
        (("10.0.0.0/8",), False, None, 403),
        (("::/0",), False, None, 403),
        (("203.0.113.0/24",), False, "203.0.113.7", 403),
        (("203.0.113.0/24",), True, "203.0.113.7", 200),
        (("203.0.113.0/24",), True, "203.0.113.7, 198.51.100.1", 403),
        (("203.0.113.0/24",), True, "198.51.100.1, 203.0.113.7", 200),
        (("203.0.113.0/24",), True, "::ffff:203.0.113.7", 200),
        (("2001:db8::/32",), True, "2001:db8::7", 200),
        (("203.0.113.0/24",), True, "nonsense", 403),
    ],
)
async def test_addresses(
    database: Database, allowed: tuple[str, ...], proxied: bool, forwarded: str | None, status: int
) -> None:
    """Only a trusted proxy may say whose request it is, and only its own word counts: the last one."""
    options = ServerOptions(port=0, trusted_proxies=("127.0.0.1/32",) if proxied else ())
    async with running_api(database, options=options) as api:
        acme = await api.customer(allowed=allowed)
        headers = {} if forwarded is None else {"x-forwarded-for": forwarded}
        answer = await api.call(acme, "GET", "/v1/account", headers=headers)
    assert answer.status == status
    assert status == 200 or answer.code == "ip_not_allowed"


async def test_each_key_has_a_rate(database: Database) -> None:
    async with running_api(database, rate=Rate(per_minute=60, burst=5)) as api:
        acme = await api.customer()
        other = await api.another_key("acme", acme.seed)
        answers = [await api.call(acme, "GET", "/v1/account") for _ in range(7)]
        assert [answer.status for answer in answers] == [200] * 5 + [429] * 2
        assert answers[-1].code == "rate_limited"
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 2
        assert (await api.call(other, "GET", "/v1/account")).status == 200
        await asyncio.sleep(1.1)
        assert (await api.call(acme, "GET", "/v1/account")).status == 200


async def test_guesses_of_keys_are_limited_and_disturb_nobody(database: Database) -> None:
    async with running_api(database, rate=Rate(per_minute=60, burst=5)) as api:
        acme = await api.customer()
        guess = replace(acme, api_key="vek_" + "x" * 43)
        answers = [await api.call(guess, "GET", "/v1/account") for _ in range(8)]
        assert [answer.status for answer in answers] == [401] * 5 + [429] * 3
        assert (await api.call(acme, "GET", "/v1/account")).status == 200


async def test_only_the_description_needs_no_credentials(api: Api) -> None:
    for path in ("/docs", "/v1/openapi.json"):
        for method in ("GET", "HEAD"):
            assert (await api.send(method, path, {})).status in (200, 405)
        assert (await api.send("GET", path, {})).status == 200
        assert (await api.send("POST", path, {})).code == "credentials_missing"
        assert (await api.send("GET", f"{path}/", {})).code == "credentials_missing"
    for path in ("/", "/v1", "/v1/account", "/metrics", "/openapi.json", "/redoc", "/docs/oauth2-redirect"):
        assert (await api.send("GET", path, {})).code == "credentials_missing"


async def test_an_api_whose_database_is_away_says_so(postgres18: ServerAddress, database: Database) -> None:
    async with running_api(database) as api:
        acme = await api.customer()
        await database.close()
        await asyncio.sleep(apikeys.MAX_AGE_S)
        answer = await api.call(acme, "GET", "/v1/account")
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "unavailable", "1")


async def test_a_step_of_the_database_clock_does_not_let_old_tokens_in(database: Database) -> None:
    """D15: tokens are judged by the service clock."""
    async with running_api(database, clock=Clock()) as api:
        acme = await api.customer()
        token = api.token(acme, "/v1/account")
        api.clock.ahead_s += 31
        await shift_clock(database, -3600)
        assert (await api.call(acme, "GET", "/v1/account", token=token)).code == "token_expired"
