"""The devnet's receivers over real TLS: whom they believe, and every way in which they misbehave."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from vaultevents.devnet.receivers import (
    GONE,
    Behaviour,
    Hang,
    Hook,
    Receivers,
    Reply,
    Reset,
    always,
    flaky,
    in_turn,
    per_event,
    redirect,
    retry_after,
)

pytestmark = pytest.mark.integration

SECRET = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
BODY = b'{"id":"t-1"}'


def signature(body: bytes, at_s: int, webhook_id: str = "t-1", secret: str = SECRET) -> str:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.digest(key, f"{webhook_id}.{at_s}.".encode() + body, hashlib.sha256)
    return "v1," + base64.b64encode(digest).decode()


def signed(body: bytes = BODY, *, at_s: int | None = None, webhook_id: str = "t-1") -> dict[str, str]:
    at_s = int(time.time()) if at_s is None else at_s
    return {
        "Webhook-Id": webhook_id,
        "Webhook-Timestamp": str(at_s),
        "Webhook-Signature": signature(body, at_s, webhook_id),
    }


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    server = Receivers(tmp_path)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def session(receivers: Receivers) -> AsyncIterator[aiohttp.ClientSession]:
    trust = ssl.create_default_context(cafile=str(receivers.ca_path))
    connector = aiohttp.TCPConnector(ssl=trust)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=5)) as session:
        yield session


def hook_of(receivers: Receivers, behaviour: Behaviour | None = None) -> Hook:
    hook = receivers.hook("acme", behaviour)
    hook.secret = SECRET
    return hook


async def post(
    session: aiohttp.ClientSession, hook: Hook, headers: dict[str, str] | None = None, body: bytes = BODY
) -> int:
    headers = signed(body) if headers is None else headers
    async with session.post(hook.url, data=body, headers=headers, allow_redirects=False) as response:
        return response.status


def test_the_published_vector_is_what_this_test_signs() -> None:
    vector = "v1,SdM7MORagcI8jh9BdAe0ZAFRnu3iGzX2aSGYHLymuww="
    assert signature(BODY, 1700000000) == vector


async def test_a_good_delivery_is_booked_with_every_byte(receivers: Receivers, session: aiohttp.ClientSession) -> None:
    hook, before = hook_of(receivers), time.monotonic()
    body = '{"id":"t-1","note":"\u00e9  "}'.encode()
    assert await post(session, hook, signed(body), body) == 200
    (received,) = await hook.arrivals(1)
    assert received.verified
    assert (received.body, received.webhook_id, received.attempt) == (body, "t-1", 0)
    assert received.headers["webhook-id"] == "t-1"
    assert before <= received.at_s <= time.monotonic()
    assert (hook.bad_signatures, hook.accepted) == (0, [received])


async def test_a_signature_of_the_former_secret_verifies_in_a_list(
    receivers: Receivers, session: aiohttp.ClientSession
) -> None:
    hook, good = hook_of(receivers), signed()
    other = signature(BODY, int(good["Webhook-Timestamp"]), secret="whsec_" + base64.b64encode(bytes(32)).decode())
    three = " ".join([other, good["Webhook-Signature"], other])
    await post(session, hook, {**good, "Webhook-Signature": three})
    assert hook.ledger[0].verified


def tampered() -> dict[str, tuple[dict[str, str], bytes]]:
    good, now = signed(), int(time.time())
    comma_list = signature(BODY, now) + "," + signature(BODY, now)
    plain_key = base64.b64encode(hmac.digest(SECRET.encode(), f"t-1.{now}.".encode() + BODY, hashlib.sha256))
    return {
        "another body": (good, b'{"id":"t-2"}'),
        "a re-serialised body": (good, b'{"id": "t-1"}'),
        "another id": ({**good, "Webhook-Id": "t-2"}, BODY),
        "another time": ({**good, "Webhook-Timestamp": str(now - 1)}, BODY),
        "too old": (signed(at_s=now - 302), BODY),
        "from the future": (signed(at_s=now + 310), BODY),
        "milliseconds": (signed(at_s=now * 1000), BODY),
        "no signature": ({k: v for k, v in good.items() if k != "Webhook-Signature"}, BODY),
        "an empty tail": ({**good, "Webhook-Signature": "v1,"}, BODY),
        "no comma": ({**good, "Webhook-Signature": "v1"}, BODY),
        "a list with commas": ({**good, "Webhook-Signature": comma_list}, BODY),
        "keyed with the text of the secret": ({**good, "Webhook-Signature": f"v1,{plain_key.decode()}"}, BODY),
        "not UTF-8": (good, b"\xff\xfe"),
    }


@pytest.mark.parametrize("case", sorted(tampered()))
async def test_a_tampered_delivery_is_booked_as_bad(
    receivers: Receivers, session: aiohttp.ClientSession, case: str
) -> None:
    headers, body = tampered()[case]
    hook = hook_of(receivers)
    assert await post(session, hook, headers, body) == 200
    assert [request.verified for request in hook.ledger] == [False]
    assert hook.bad_signatures == 1


async def test_without_a_secret_nothing_is_believed(receivers: Receivers, session: aiohttp.ClientSession) -> None:
    hook = receivers.hook("borealis")
    await post(session, hook)
    hook.secret = SECRET
    await post(session, hook)
    assert [request.verified for request in hook.ledger] == [False, True]


async def test_only_a_client_that_trusts_the_authority_gets_through(
    receivers: Receivers, session: aiohttp.ClientSession
) -> None:
    hook = hook_of(receivers)
    async with aiohttp.ClientSession() as stranger:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await post(stranger, hook)
    assert hook.ledger == []
    hook.url = hook.url.replace("127.0.0.1", "localhost")
    assert await post(session, hook) == 200


async def test_answers_in_turn_and_per_event(receivers: Receivers, session: aiohttp.ClientSession) -> None:
    hook = hook_of(receivers, in_turn(Reply(500), Reply(500), Reply()))
    assert [await post(session, hook) for _ in range(4)] == [500, 500, 200, 200]
    hook.behaviour = per_event(Reply(503), Reply(204))
    order = ["a", "b", "a", "b", "b"]
    assert [await post(session, hook, signed(webhook_id=one)) for one in order] == [503, 503, 204, 204, 204]
    assert [request.attempt for request in hook.ledger[4:]] == [0, 0, 1, 1, 2]
    assert len(hook.accepted) == 5


async def test_a_flaky_receiver_repeats_with_its_seed() -> None:
    def statuses(seed: int) -> list[bool]:
        behaviour = flaky(seed, 0.25, Reply(500))
        return [behaviour(f"event-{n}", 0, n) == Reply(500) for n in range(400)]

    assert statuses(1) == statuses(1)
    assert statuses(1) != statuses(2)
    assert 60 < sum(statuses(1)) < 140


async def test_refusals(receivers: Receivers, session: aiohttp.ClientSession) -> None:
    hook = hook_of(receivers, in_turn(GONE, retry_after("120"), redirect("https://169.254.169.254/latest")))
    assert await post(session, hook) == 410
    async with session.post(hook.url, data=BODY) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "120")
    async with session.post(hook.url, data=BODY, allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (302, "https://169.254.169.254/latest")
    assert hook.accepted == []


@pytest.mark.parametrize("answer", [Hang(), Reset()])
async def test_an_answer_that_never_comes_is_booked_all_the_same(
    receivers: Receivers, session: aiohttp.ClientSession, answer: Hang | Reset
) -> None:
    hook = hook_of(receivers, in_turn(answer, Reply()))
    expected = TimeoutError if answer == Hang() else aiohttp.ClientConnectionError
    quick = aiohttp.ClientTimeout(total=0.3)
    with pytest.raises(expected):
        await session.post(hook.url, data=BODY, headers=signed(), timeout=quick)
    assert [(request.verified, request.answer) for request in hook.ledger] == [(True, answer)]
    assert hook.accepted == []
    assert await post(session, hook) == 200


async def test_a_huge_body_can_be_cut_short(receivers: Receivers, session: aiohttp.ClientSession) -> None:
    hook = hook_of(receivers, in_turn(Reply(padding=1 << 30, body=b"x"), Reply(padding=100_000), Reply()))
    async with session.post(hook.url, data=BODY) as response:
        assert response.content_length == (1 << 30) + 1
        assert (await response.content.readexactly(16384))[:2] == b"x\0"
        response.close()
    async with session.post(hook.url, data=BODY) as response:
        assert await response.read() == bytes(100_000)
    assert await post(session, hook) == 200


async def test_a_request_for_nobody_is_listed(receivers: Receivers, session: aiohttp.ClientSession) -> None:
    hook = hook_of(receivers, always(Reply()))
    async with session.get(hook.url) as response:
        assert response.status == 404
    assert receivers.unexpected == ["GET /acme"]
    assert hook.ledger == []


async def test_waiting_for_arrivals_ends(receivers: Receivers) -> None:
    with pytest.raises(TimeoutError):
        await hook_of(receivers).arrivals(1, timeout_s=0.05)
