"""Signatures against published vectors and the published library, and the headers of a delivery."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from vaultevents.core.errors import ConfigError
from vaultevents.core.signing import check_plain_header, delivery_headers, new_secret, plain_signature, sign

pytestmark = pytest.mark.unit

OLD = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
SECRET = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
BODY = b'{"id":"t-1"}'
SIGNED = "v1,SdM7MORagcI8jh9BdAe0ZAFRnu3iGzX2aSGYHLymuww="


@pytest.mark.parametrize(
    ("secret", "webhook_id", "timestamp_s", "body", "signature"),
    [
        (
            OLD,
            "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk",
            1649367553,
            b'{"email":"test@example.com","username":"test_user"}',
            "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=",
        ),
        (
            "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1614265330,
            b'{"test": 2432232314}',
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        ),
        (SECRET, "t-1", 1700000000, BODY, SIGNED),
        (SECRET.rstrip("="), "t-1", 1700000000, BODY, SIGNED),
    ],
)
def test_published_vectors(secret: str, webhook_id: str, timestamp_s: int, body: bytes, signature: str) -> None:
    assert sign([secret], webhook_id, timestamp_s, body) == signature


def test_two_secrets_sign_side_by_side_newest_first() -> None:
    assert sign([SECRET, OLD], "t-1", 1700000000, BODY) == f"{SIGNED} {sign([OLD], 't-1', 1700000000, BODY)}"


def test_the_published_plain_vector() -> None:
    expected = "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    assert plain_signature("It's a Secret to Everybody", b"Hello, World!") == expected


def test_the_plain_form_is_keyed_with_the_text_not_the_decoded_key() -> None:
    assert plain_signature(SECRET, BODY) == "7652b64d1bad0c81bada4055d0b0e0be446a5b0479ec79a4c3e2ad4f406a7f29"
    assert plain_signature(SECRET, BODY) != "017f3d328012acddc9145aa47c12fd2a9b2f97779535fc3ccba3f9c1bfd1d4ff"


def headers_now(**changes: Any) -> dict[str, str]:
    fields: dict[str, Any] = {
        "secret_texts": [SECRET],
        "webhook_id": "funding_received_a_0XAB",
        "timestamp_s": int(datetime.now(UTC).timestamp()),
        "body": BODY,
        "attempt_number": 3,
        "version": "0.1.0",
    }
    return delivery_headers(**(fields | changes))


def test_the_headers_of_a_delivery() -> None:
    headers = headers_now(timestamp_s=1700000000)
    assert headers == {
        "content-type": "application/json",
        "user-agent": "vaultevents/0.1.0",
        "webhook-id": "funding_received_a_0XAB",
        "webhook-timestamp": "1700000000",
        "webhook-signature": sign([SECRET], "funding_received_a_0XAB", 1700000000, BODY),
        "x-vaultevents-attempt": "3",
    }


def test_the_plain_header_is_sent_only_when_named_and_uses_the_newest_secret() -> None:
    headers = headers_now(secret_texts=[SECRET, OLD], plain_header="x-signature")
    assert headers["x-signature"] == plain_signature(SECRET, BODY)
    assert len(headers) == len(headers_now()) + 1


def verified(secret: str, headers: dict[str, str], body: bytes = BODY) -> bool:
    try:
        Webhook(secret).verify(body, headers)
    except (WebhookVerificationError, ValueError):  # ValueError: a list it cannot split
        return False
    return True


def test_the_published_library_accepts_what_we_send() -> None:
    assert verified(SECRET, headers_now())
    both = headers_now(secret_texts=[SECRET, OLD])
    assert verified(SECRET, both)
    assert verified(OLD, both), "a receiver that has not changed its secret yet"
    middle = both["webhook-signature"].split(" ")[1]
    assert verified(OLD, {**both, "webhook-signature": f"v1,AAAA {middle} v1,BBBB"})


def test_the_published_library_refuses_what_is_not_ours() -> None:
    headers = headers_now()
    now_s = int(headers["webhook-timestamp"])
    assert not verified(OLD, headers)
    assert not verified(SECRET, headers, json.dumps(json.loads(BODY)).encode()), "a re-serialised body"
    assert not verified(SECRET, {**headers, "webhook-id": "another"})
    assert not verified(SECRET, {**headers, "webhook-timestamp": str(now_s + 1)})
    assert not verified(SECRET, {**headers, "webhook-signature": "v1,"})
    assert not verified(SECRET, {**headers, "webhook-signature": headers["webhook-signature"] + ",v1,AAAA"})
    assert not verified(SECRET, headers_now(timestamp_s=now_s - 310))
    assert not verified(SECRET, headers_now(timestamp_s=now_s + 310))
    assert not verified(SECRET, headers_now(timestamp_s=now_s * 1000)), "milliseconds"


def test_a_new_secret_has_the_documented_form() -> None:
    assert new_secret(bytes(range(32))) == SECRET
    with pytest.raises(ValueError, match="32 random bytes"):
        new_secret(bytes(24))


@pytest.mark.parametrize("secret", ["whsec_", "", "whsec_not base64", "whsec_é"])
def test_a_secret_that_is_none_is_never_signed_with(secret: str) -> None:
    with pytest.raises(ValueError, match="webhook secret"):
        sign([secret], "t-1", 1, BODY)


def test_ambiguous_or_unsigned_content_is_refused() -> None:
    with pytest.raises(ValueError, match="point"):
        sign([SECRET], "t.1", 1, BODY)
    with pytest.raises(ValueError, match="at least one secret"):
        sign([], "t-1", 1, BODY)


def test_the_name_of_the_plain_header() -> None:
    assert check_plain_header("X-Hub-Signature-256") == "x-hub-signature-256"
    for name in ("", "x signature", "x:y", "Webhook-Signature", "HOST", "x\r\ny", "é"):
        with pytest.raises(ConfigError):
            check_plain_header(name)
