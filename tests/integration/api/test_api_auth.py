"""Who gets in: API key, signed token, single use, addresses, roles, rates (rules A7 to A14 and A17)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import pytest

from api_fixtures import (
    Api,
    ApiResponse,
    Clock,
    Customer,
    FrozenClock,
    exchange,
    public_pem,
    read_answer,
    request_bytes,
    running_api,
)
from store_factories import shift_clock, values
from tokens_corpus import FORGED, GOLDEN, ORIGIN, Client, Sent, cached_key
from vaultevents.api.limits import Rate
from vaultevents.api.server import ServerOptions
from vaultevents.core.rsakeys import fingerprint, parse_public_key
from vaultevents.core.tokens import TokenRules
from vaultevents.store import apikeys
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_unverified_pause")]

NOW_S = int(time.time())  # keys have times in the database, whose clock is the real one
WEBHOOK = b'{"url":"https://example.org/"}'
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


async def present(api: Api, customer: Customer, sent: Sent, **headers: str) -> ApiResponse:
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
    reported = {}
    for case in FORGED:
        if case.on_wire:
            answer = await present(api, acme, case.make(client()))
            reported[case.name] = (answer.status, answer.code)
    assert len(reported) > 200
    wanted = {case.name: (401, case.code) for case in FORGED if case.on_wire}
    differing = {name: (found, wanted[name]) for name, found in reported.items() if found != wanted[name]}
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
    api.clock.ahead_s = 31
    assert (await present(api, acme, sent)).code == "token_expired", "claims come before single use"


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
    unknown = await present(api, replace(umbra, api_key="vek_" + "x" * 43), client(key="umbra").get())
    gone = await api.another_key("umbra", umbra.seed)
    await apikeys.revoke_key(api.database, gone.key_id)
    revoked = await present(api, gone, client(key="umbra").get())
    assert crossed.code == "credentials_invalid"
    assert reported(crossed) == reported(unknown) == reported(revoked), "nobody learns which keys there are"
    newer = await signing_with(api, acme, "newer", overlap_s=3600)
    assert (await present(api, acme, client().get(nonce="1"))).status == 200
    assert (await present(api, newer, client(key="newer").get(nonce="2"))).status == 200
    assert isinstance(api.clock, FrozenClock)
    api.clock.at_s = (await api.database.now() + timedelta(hours=2)).timestamp()
    later = int(api.clock.at_s)
    assert (await present(api, acme, client(later).get())).code == "credentials_invalid"
    assert (await present(api, newer, client(later, "newer").get())).status == 200


def reported(answer: ApiResponse) -> tuple[int, dict[str, str], bytes]:
    """All of an answer but the request's own id and the time."""
    request_id = answer.json["requestId"].encode()
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
    return answer.status, headers, answer.body.replace(request_id, b"")


async def test_the_order_of_checks(database: Database) -> None:
    """A request with everything wrong, fixed one thing at a time: each answer names the first that is left."""
    clock, rate = FrozenClock(NOW_S), Rate(per_minute=1, burst=20)
    async with running_api(database, rate=rate, rules=RULES, clock=clock) as api:
        bound = await sign_up(api, role="read", allowed=("10.0.0.0/8",))
        reader, manager = [
            await signing_with(api, await api.another_key("acme", bound.seed, role=role), "acme")
            for role in ("read", "manage")
        ]
        nobody = replace(bound, api_key="vek_" + "x" * 43)
        stale, path = str(NOW_S - 99), '"/v1/nothing"'
        strange = client(key="stranger").get(iat=stale).token
        old, elsewhere = client().get(iat=stale).token, client().get().token
        bodiless = client().get(url=path).token
        of_nonsense, of_a_value = (client().get(url=path, body=body).token for body in ('"ew=="', '"e30="'))
        typed = {"content-type": "application/json"}
        found = []
        for customer, token, headers, body, code in (
            (nobody, "x", {"x-big": "x" * 70_000}, b"{", "headers_too_large"),
            (nobody, "x", {"authorization": "x", "Authorization": "x"}, b"{", "request_malformed"),
            (nobody, "x", {"authorization": ""}, b"{", "credentials_missing"),
            (nobody, "x", {}, b"{", "token_malformed"),
            (nobody, strange, {}, b"{", "credentials_invalid"),
            (bound, strange, {}, b"{", "credentials_invalid"),
            (bound, old, {}, b"{", "ip_not_allowed"),
            (reader, old, {}, b"x" * 17_000, "body_too_large"),
            (reader, old, {}, b"{", "token_expired"),
            (reader, elsewhere, {}, b"{", "token_url_mismatch"),
            (reader, bodiless, {}, b"{", "token_body_mismatch"),
            (reader, of_nonsense, {}, b"{", "media_type_unsupported"),
            (reader, of_nonsense, typed, b"{", "json_malformed"),
            (reader, of_a_value, typed, b"{}", "role_insufficient"),
            (manager, of_a_value, typed, b"{}", "not_found"),
        ):
            sent = {"x-api-key": customer.api_key, "authorization": f"Bearer {token}", **headers}
            answer = await exchange(api.url, request_bytes("POST", "/v1/nothing", sent, body))
            found.append((answer.code, code))
        assert [one for one, _ in found] == [other for _, other in found]
        hasty = [await present(api, bound, Sent("x", "/v1/account")) for _ in range(20)]
        assert (hasty[0].code, hasty[-1].code) == ("token_malformed", "rate_limited"), "before anything is computed"


async def test_every_401_says_how_to_authenticate(api: Api) -> None:
    acme = await sign_up(api)
    account, post = client().get(), client().post_signing(WEBHOOK, WEBHOOK)
    for answer, challenge in (
        (await api.send("GET", "/v1/account", {}), "Bearer"),
        (await present(api, acme, client(key="stranger").get()), 'Bearer error="invalid_token"'),
        (await present(api, acme, client(NOW_S - 99).get()), 'Bearer error="invalid_token"'),
        (await present(api, acme, replace(account, token="x")), 'Bearer error="invalid_token"'),
        (await present(api, acme, post), 'Bearer error="insufficient_user_authentication"'),
        (await present(api, acme, post, **{"x-mfa-code": "1"}), 'Bearer error="insufficient_user_authentication"'),
    ):
        assert (answer.status, answer.headers["www-authenticate"]) == (401, challenge), answer.body
    assert "www-authenticate" not in (await present(api, acme, account)).headers


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


async def test_missing_credentials(api: Api) -> None:
    for headers, code in (
        ({}, "credentials_missing"),
        ({"x-api-key": "vek_x"}, "credentials_missing"),
        ({"authorization": "Bearer x.y.z"}, "credentials_missing"),
        ({"x-api-key": "", "authorization": "Bearer x.y.z"}, "credentials_missing"),
        ({"x-api-key": "vek_x", "authorization": "Basic eA=="}, "credentials_missing"),
        ({"x-api-key": "vek_x", "authorization": "Bearer"}, "token_malformed"),
        ({"x-api-key": "vek_x", "authorization": "Bearer x"}, "token_malformed"),
        ({"x-api-key": "\xff\xfe", "authorization": "Bearer \xff"}, "token_malformed"),
    ):
        for target in ("/v1/account", "/v1/nothing/here"):  # nor does a stranger learn which paths there are
            answer = await exchange(api.url, request_bytes("GET", target, headers))
            assert (answer.status, answer.code) == (401, code), headers


async def test_a_header_that_comes_twice_is_no_request(api: Api) -> None:
    acme = await sign_up(api)
    for name in ("x-api-key", "authorization", "content-type", "x-mfa-code", "idempotency-key"):
        sent = client().post_signing(WEBHOOK, WEBHOOK)
        good = {
            "x-api-key": acme.api_key,
            "authorization": f"Bearer {sent.token}",
            "content-type": "application/json",
            "x-mfa-code": api.code(acme),
            "idempotency-key": "one",
        }
        for value in (good[name], "other"):
            twice = request_bytes("POST", sent.target, {**good, name.upper(): value}, sent.body)
            answer = await exchange(api.url, twice)
            assert (answer.status, answer.code) == (400, "request_malformed"), name
            assert f"'{name}'" in answer.json["detail"]
    assert await values(api.database, "select count(*)::int from webhooks") == [0]


async def test_what_a_claim_has_wrong_is_reported_only_after_the_signature(api: Api) -> None:
    acme = await sign_up(api)
    old = Client(cached_key("stranger"), cached_key("acme"), NOW_S - 3600).get()
    assert (await present(api, acme, old)).code == "credentials_invalid"
    mine = await present(api, acme, client(NOW_S - 3600).get())
    assert (mine.code, "3600.0 s ago" in mine.json["detail"]) == ("token_expired", True)
    early = await present(api, acme, client(NOW_S + 90).get())
    assert (early.code, "90.0 s in the future" in early.json["detail"]) == ("token_not_yet_valid", True)
    for skewed in (mine, early):
        assert datetime.fromtimestamp(NOW_S, UTC).isoformat(timespec="milliseconds") in skewed.json["detail"]


async def test_answers_are_dated_by_the_service_clock(api: Api) -> None:
    acme = await sign_up(api)
    api.clock.ahead_s = 86_400
    await asyncio.sleep(0.3)  # the date is made ten times a second
    tomorrow = NOW_S + 86_400
    for answer in (
        await present(api, acme, client(tomorrow).get()),
        await api.send("GET", "/v1/account", {}),
        await exchange(api.url, b"nonsense\r\n\r\n"),
    ):
        assert parsedate_to_datetime(answer.headers["date"]).timestamp() == tomorrow


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


ADDRESSES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], int], ...] = (
    # the service's host, the networks of the key, X-Forwarded-For (by which alone a request counts as proxied), status
    ("127.0.0.1", ("127.0.0.1/32",), (), 200),
    ("127.0.0.1", ("10.0.0.0/8", "127.0.0.0/8"), (), 200),
    ("127.0.0.1", ("10.0.0.0/8",), (), 403),
    ("127.0.0.1", ("::/0",), (), 403),
    ("127.0.0.1", ("203.0.113.0/24",), ("203.0.113.7",), 200),
    ("127.0.0.1", ("203.0.113.0/24",), ("203.0.113.7, 198.51.100.1",), 403),
    ("127.0.0.1", ("203.0.113.0/24",), ("203.0.113.7", "198.51.100.1"), 403),
    ("127.0.0.1", ("203.0.113.0/24",), ("198.51.100.1, 203.0.113.7",), 200),
    ("127.0.0.1", ("203.0.113.0/24",), ("198.51.100.1", "203.0.113.7"), 200),
    ("127.0.0.1", ("203.0.113.0/24",), ("203.0.113.7, 127.0.0.1",), 200),  # a chain of trusted proxies
    ("127.0.0.1", ("203.0.113.0/24",), ("203.0.113.7:4711",), 200),
    ("127.0.0.1", ("203.0.113.0/24",), ("::ffff:203.0.113.7",), 200),
    ("127.0.0.1", ("2001:db8::/32",), ("2001:db8::7",), 200),
    ("127.0.0.1", ("2001:db8::/32",), ("[2001:db8::7]:4711",), 200),
    ("127.0.0.1", ("0.0.0.0/0", "::/0"), ("nonsense",), 403),
    ("127.0.0.1", ("203.0.113.0/24",), ("",), 403),
    ("::1", ("::1/128",), (), 200),
    ("::1", ("127.0.0.0/8",), (), 403),
    ("::1", ("203.0.113.0/24",), ("203.0.113.7",), 403),  # this peer is no trusted proxy
    ("::", ("127.0.0.1/32",), (), 200),  # an IPv4 client of a socket for both families
    ("::", ("203.0.113.0/24",), ("203.0.113.7",), 200),
    ("::", ("203.0.113.0/24",), ("198.51.100.7",), 403),
)


async def test_addresses(database: Database) -> None:
    """Only a trusted proxy may say whose request it is, and only its own word counts: the last one."""
    seed = ""
    for host in ("127.0.0.1", "::1", "::"):
        options = ServerOptions(host=host, port=0, trusted_proxies=("127.0.0.1/32",))
        async with running_api(database, options=options) as api:
            seed = seed or (await api.customer()).seed
            url = api.url.replace("[::]", "127.0.0.1")
            bound = {
                case: await api.another_key("acme", seed, allowed=case[1]) for case in ADDRESSES if case[0] == host
            }
            for case, customer in bound.items():
                answer = await forwarded(api, url, customer, case[2])
                assert answer.status == case[3], (case, answer.body)
                assert case[3] == 200 or answer.code == "ip_not_allowed"


async def forwarded(api: Api, url: str, customer: Customer, by: tuple[str, ...]) -> ApiResponse:
    """Sends a good request with these lines of X-Forwarded-For."""
    credentials = {"x-api-key": customer.api_key, "authorization": f"Bearer {api.token(customer, '/v1/account')}"}
    lines = "".join(f"\r\nx-forwarded-for: {line}" for line in by)
    request = request_bytes("GET", "/v1/account", credentials)
    return await exchange(url, request[:-4] + lines.encode() + b"\r\n\r\n")


async def test_without_trusted_proxies_nobody_is_asked_where_a_request_comes_from(database: Database) -> None:
    async with running_api(database) as api:
        acme = await api.customer(allowed=("203.0.113.0/24",))
        assert (await forwarded(api, api.url, acme, ("203.0.113.7",))).code == "ip_not_allowed"


async def test_the_rate_is_240_a_minute_of_which_40_at_once(database: Database) -> None:
    async with running_api(database, rate=Rate()) as api:
        acme = await api.customer()
        began_s = time.monotonic()
        answers = await asyncio.gather(*(api.call(acme, "GET", "/v1/account") for _ in range(60)))
        passed = sum(answer.status == 200 for answer in answers)
        assert 40 <= passed <= 41 + 4 * (time.monotonic() - began_s)
        refused = [answer for answer in answers if answer.status != 200]
        assert {(answer.code, answer.headers["retry-after"]) for answer in refused} == {("rate_limited", "1")}


async def test_each_key_has_a_rate(database: Database) -> None:
    async with running_api(database, rate=Rate(per_minute=15, burst=5)) as api:
        acme = await api.customer()
        other = await api.another_key("acme", acme.seed)
        answers = [await api.call(acme, "GET", "/v1/account") for _ in range(7)]
        assert [answer.status for answer in answers] == [200] * 5 + [429] * 2
        assert answers[-1].code == "rate_limited"
        wait_s = int(answers[-1].headers["retry-after"])
        assert 1 <= wait_s <= 5
        assert (await api.call(other, "GET", "/v1/account")).status == 200
        await asyncio.sleep(wait_s)
        assert (await api.call(acme, "GET", "/v1/account")).status == 200


async def test_guesses_of_keys_are_limited_and_disturb_nobody(database: Database) -> None:
    """By address, of IPv6 by network of a customer; a good key from the same address is another matter."""
    options = ServerOptions(host="::", port=0, trusted_proxies=("127.0.0.1/32",))
    async with running_api(database, rate=Rate(per_minute=1, burst=3), options=options) as api:
        acme = await api.customer()
        guess, url = replace(acme, api_key="vek_" + "x" * 43), api.url.replace("[::]", "127.0.0.1")
        for addresses in (
            ["203.0.113.7"] * 5,
            ["203.0.113.8"] * 5,
            [f"2001:db8::{n}" for n in range(5)],
            [f"2001:db8:0:1::{n}" for n in range(5)],
            [f"::ffff:198.51.100.{n // 5}" for n in range(5)],
            ["nonsense"] * 5,
        ):
            statuses = [(await forwarded(api, url, guess, (address,))).status for address in addresses]
            assert statuses == [401] * 3 + [429] * 2, addresses
        assert (await forwarded(api, url, acme, ("203.0.113.7",))).status == 200


async def test_ipv4_clients_of_a_socket_for_both_families_are_distinguished(database: Database) -> None:
    async with running_api(database, rate=Rate(per_minute=1, burst=3), options=ServerOptions("::", 0)) as api:
        guess, port = request_bytes("GET", "/", {"x-api-key": "x", "authorization": "Bearer x"}), api.url.split(":")[-1]
        for address in ("127.0.0.1", "127.0.0.2"):
            found = []
            for _ in range(4):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(port), local_addr=(address, 0))
                writer.write(guess)
                found.append((await read_answer(reader)).code)
                writer.close()
            assert found == ["token_malformed"] * 3 + ["rate_limited"], address


async def test_only_the_description_needs_no_credentials(api: Api) -> None:
    for path in ("/docs", "/v1/openapi.json"):
        shown, head = await api.send("GET", path, {}), await api.send("HEAD", path, {})
        assert (shown.status, head.status, head.body) == (200, 200, b"")
        assert head.headers["content-length"] == str(len(shown.body))
        assert (await api.send("GET", f"{path}?x=1", {})).body == shown.body
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            assert (await api.send(method, path, {})).code == "credentials_missing", method
        for other in (f"{path}/", f"/{path}", f"{path};x", f"{path}%20", path.upper(), f"/.{path}"):
            assert (await api.send("GET", other, {})).code == "credentials_missing", other
    for path in ("/", "/v1", "/v1/account", "/metrics", "/health", "/openapi.json", "/redoc", "/docs/oauth2-redirect"):
        assert (await api.send("GET", path, {})).code == "credentials_missing"


async def test_an_api_whose_database_is_away_says_so(postgres18: ServerAddress, database: Database) -> None:
    async with running_api(database) as api:
        acme = await api.customer()
        await database.close()
        await asyncio.sleep(apikeys.MAX_AGE_S)
        answer = await api.call(acme, "GET", "/v1/account")
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "unavailable", "1")


async def test_a_step_of_the_database_clock_does_not_let_old_tokens_in(database: Database) -> None:
    """Rule D15: tokens are judged by the service clock."""
    async with running_api(database, clock=Clock()) as api:
        acme = await api.customer()
        token = api.token(acme, "/v1/account")
        api.clock.ahead_s += 31
        await shift_clock(database, -3600)
        assert (await api.call(acme, "GET", "/v1/account", token=token)).code == "token_expired"
