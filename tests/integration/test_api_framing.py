"""What is not one well-formed request, on raw sockets: a problem, and nothing after it is believed (T17, T18)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

import pytest

from api_worlds import Answer, Api, Customer, exchange, read_answer, request_bytes, running_api
from vaultevents.api import connection
from vaultevents.api.auth import MAX_BODY_BYTES
from vaultevents.api.connection import MAX_HEADER_BYTES
from vaultevents.api.server import ServerOptions, bind
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

PATH = "/v1/account"


@pytest.fixture
async def api(database: Database) -> AsyncIterator[Api]:
    async with running_api(database) as running:
        yield running


def signed(
    api: Api,
    customer: Customer,
    target: str,
    method: str = "GET",
    body: bytes = b"",
    extra: Mapping[str, str] | None = None,
) -> bytes:
    """A whole request that is signed for exactly this target and body."""
    token = api.token(customer, target, body)
    headers = {"x-api-key": customer.api_key, "authorization": f"Bearer {token}", **(extra or {})}
    return request_bytes(method, target, headers, body)


@pytest.mark.parametrize(
    ("name", "request_text"),
    [
        ("two lengths", "POST /v1/account HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}x"),
        (
            "length and chunks",
            "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "chunks and length",
            "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n",
        ),
        ("bare LF", "GET /v1/account HTTP/1.1\nhost: x\n\n"),
        ("a negative length", "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n"),
        ("white space before a colon", "GET / HTTP/1.1\r\nhost : x\r\n\r\n"),
        ("a folded header", "GET / HTTP/1.1\r\nhost: x\r\nx-a: b\r\n c\r\n\r\n"),
        ("an unknown method", "FROB / HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("TLS", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        ("nonsense", "\x00\x01\x02\r\n\r\n"),
    ],
)
async def test_what_is_not_http(api: Api, name: str, request_text: str) -> None:
    answer = await exchange(api.url, request_text.encode("latin-1"))
    assert (answer.status, answer.code) == (400, "request_malformed"), name
    assert answer.headers["connection"] == "close"
    assert "date" in answer.headers


@pytest.mark.parametrize(
    "chunks", ["zz\r\n{}\r\n0\r\n\r\n", "2\r\n{}x\r\n0\r\n\r\n", "-1\r\n{}\r\n", "fffffffffffffffff\r\n{}"]
)
async def test_chunked_nonsense_ends_the_connection(api: Api, chunks: str) -> None:
    customer = await api.customer()
    token = api.token(customer, "/v1/account/webhooks", b"{}")
    head = request_bytes(
        "POST",
        "/v1/account/webhooks",
        {
            "x-api-key": customer.api_key,
            "authorization": f"Bearer {token}",
            "content-type": "application/json",
            "transfer-encoding": "chunked",
        },
    )
    parts = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head + chunks.encode())
    async with asyncio.timeout(10):
        rest = await reader.read()
    writer.close()
    assert b" 20" not in rest.split(b"\r\n")[0]


async def test_a_chunked_body_is_a_body(api: Api) -> None:
    customer = await api.customer()
    body = b'{"url":"https://example.org/"}'
    headers = {
        "x-api-key": customer.api_key,
        "authorization": f"Bearer {api.token(customer, '/v1/account/webhooks', body)}",
        "content-type": "application/json",
        "transfer-encoding": "chunked",
        "x-mfa-code": api.code(customer),
    }
    chunks = b"".join(b"%x\r\n%s\r\n" % (1, body[n : n + 1]) for n in range(len(body))) + b"0\r\n\r\n"
    answer = await exchange(api.url, request_bytes("POST", "/v1/account/webhooks", headers) + chunks)
    assert answer.status == 201, answer.body


TARGETS = [
    "//v1/account",
    "/v1//account",
    "/v1/account/",
    "/v1/./account",
    "/v1/x/../account",
    "/v1/%61ccount",
    "/v1%2Faccount",
    "/v1/account%2fwebhooks",
    "/v1/account;x",
    "/v1/account#x",
    "/V1/account",
    "/v1/account%00",
    "/v1/account/webhooks/%2e%2e/webhooks",
    "http://api.example.org/v1/account",
    "*",
]


@pytest.mark.parametrize("target", TARGETS)
async def test_no_other_spelling_of_a_path_runs_a_route(api: Api, target: str) -> None:
    """What was signed and what runs is the same text: nothing is decoded, folded or cut."""
    customer = await api.customer()
    answer = await exchange(api.url, signed(api, customer, target))
    assert answer.status in (400, 401, 404), answer.body
    for_route = api.token(customer, PATH)  # a token for the real path does not open the other spelling either
    headers = {"x-api-key": customer.api_key, "authorization": f"Bearer {for_route}"}
    assert (await exchange(api.url, request_bytes("GET", target, headers))).status in (400, 401)


@pytest.mark.parametrize("target", ["/v1/account", "/v1/account?", "/v1/account?x=%2F&y=..", "/v1/account??"])
async def test_a_query_may_be_signed_or_not(api: Api, target: str) -> None:
    customer = await api.customer()
    assert (await exchange(api.url, signed(api, customer, target))).status == 200
    token = api.token(customer, PATH)
    headers = {"x-api-key": customer.api_key, "authorization": f"Bearer {token}"}
    assert (await exchange(api.url, request_bytes("GET", target, headers))).status == 200


@pytest.mark.parametrize("form", ["one big", "many small", "unfinished", "the target"])
async def test_a_header_block_that_is_too_large(api: Api, form: str) -> None:
    big = "x" * (MAX_HEADER_BYTES + 1)
    sent = {
        "one big": request_bytes("GET", PATH, {"x-big": big}),
        "many small": request_bytes("GET", PATH, {f"x-{n}": "y" * 50 for n in range(1200)}),
        "unfinished": f"GET {PATH} HTTP/1.1\r\nhost: x\r\nx-big: {big}".encode(),
        "the target": request_bytes("GET", f"{PATH}?{big}", {}),
    }[form]
    answer = await exchange(api.url, sent)
    assert (answer.status, answer.code) == (431, "headers_too_large")


async def test_a_header_block_that_just_fits(api: Api) -> None:
    customer = await api.customer()
    answer = await exchange(api.url, signed(api, customer, PATH, extra={"x-big": "x" * (MAX_HEADER_BYTES - 2000)}))
    assert answer.status == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large(api: Api, chunked: bool) -> None:
    customer = await api.customer()
    for size, status in ((MAX_BODY_BYTES, 422), (MAX_BODY_BYTES + 1, 413)):
        body = b'{"url":"' + b"x" * (size - 10) + b'"}'
        token = api.token(customer, "/v1/account/webhooks", body)
        headers = {
            "x-api-key": customer.api_key,
            "authorization": f"Bearer {token}",
            "content-type": "application/json",
        }
        if chunked:
            framed = request_bytes("POST", "/v1/account/webhooks", {**headers, "transfer-encoding": "chunked"})
            sent = framed + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        else:
            sent = request_bytes("POST", "/v1/account/webhooks", headers, body)
        answer = await exchange(api.url, sent)
        assert answer.status == status, answer.body
    assert answer.code == "body_too_large"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_body_where_none_belongs(api: Api, method: str) -> None:
    customer = await api.customer()
    answer = await exchange(api.url, signed(api, customer, PATH, method, b"{}", {"content-type": "application/json"}))
    assert (answer.status, answer.code) == (400, "body_not_allowed")


@pytest.mark.parametrize(
    ("body", "media_type", "status", "code"),
    [
        (b'{"url":', "application/json", 400, "json_malformed"),
        (b'{"url":"https://a.example/","url":"https://b.example/"}', "application/json", 400, "json_malformed"),
        (b'\xef\xbb\xbf{"url":"https://a.example/"}', "application/json", 400, "json_malformed"),
        (b'{"url":NaN}', "application/json", 400, "json_malformed"),
        (b"[" * 9000, "application/json", 400, "json_malformed"),
        (b'{"url":"\\ud800"}', "application/json", 400, "json_malformed"),
        (b'{"url":"https://a.example/"}', "text/plain", 415, "media_type_unsupported"),
        (b'{"url":"https://a.example/"}', "", 415, "media_type_unsupported"),
        (b"url=https://a.example/", "application/x-www-form-urlencoded", 415, "media_type_unsupported"),
        (b"[]", "application/json", 422, "validation_failed"),
        (b"null", "application/json", 422, "validation_failed"),
        (b'"x"', "application/json; charset=utf-8", 422, "validation_failed"),
        (b"", "application/json", 422, "validation_failed"),
    ],
)
async def test_bodies_that_are_no_webhook(api: Api, body: bytes, media_type: str, status: int, code: str) -> None:
    customer = await api.customer()
    typed = {"content-type": media_type} if media_type else {}
    answer = await exchange(api.url, signed(api, customer, "/v1/account/webhooks", "POST", body, typed))
    assert (answer.status, answer.code) == (status, code)


async def test_an_upgrade_is_answered_in_http(api: Api) -> None:
    """Some clients offer HTTP/2 with every first request."""
    customer = await api.customer()
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}
    assert (await exchange(api.url, signed(api, customer, PATH, extra=offer))).status == 200


def test_the_listener_says_that_it_is_tcp() -> None:
    """Only then asyncio sets TCP_NODELAY; without it each answer, which is two writes, waits 40 ms."""
    with bind(ServerOptions(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


async def test_two_requests_in_one_piece_get_two_answers(api: Api) -> None:
    customer = await api.customer()
    parts = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(signed(api, customer, PATH) + signed(api, customer, "/v1/account/webhooks"))
    async with asyncio.timeout(10):
        first, second = await read_answer(reader), await read_answer(reader)
    writer.close()
    assert (first.json["id"], second.json) == ("acme", [])


@pytest.mark.parametrize("part", ["nothing", "half a header", "half a body", "empty lines"])
async def test_a_request_that_never_arrives(api: Api, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(connection, "ARRIVAL_S", 0.4)
    customer = await api.customer()
    whole = signed(api, customer, "/v1/account/webhooks", "POST", b'{"url":"https://example.org/"}')
    sent = {"nothing": b"", "half a header": whole[:40], "half a body": whole[:-5], "empty lines": b"\r\n" * 4}[part]
    parts = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(sent)
    began_s = time.monotonic()
    async with asyncio.timeout(10):
        rest = await reader.read()
    writer.close()
    assert time.monotonic() - began_s < 5
    assert b"request_timeout" in rest or (part == "half a body" and rest == b"")


async def test_slow_sockets_and_junk_do_not_keep_a_good_client_waiting(api: Api) -> None:
    customer = await api.customer()
    parts = urlsplit(api.url)
    slow = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(500)]
    for number, (_, writer) in enumerate(slow):
        writer.write(b"GET /v1/account HTTP/1.1\r\nhost: x\r\nx-slow: " + b"x" * (number % 50))
    ended = asyncio.Event()

    async def junk() -> int:
        sent = 0
        headers = {"x-api-key": "vek_junk", "authorization": f"Bearer {api.token(customer, '/junk')}"}
        while not ended.is_set():
            assert (await api.send("GET", PATH, headers)).status in (401, 429)
            sent += 1
        return sent

    noise = [asyncio.create_task(junk()) for _ in range(4)]
    waits: list[float] = []
    for _ in range(60):
        began_s = time.monotonic()
        answer: Answer = await api.call(customer, "GET", PATH)
        waits.append(time.monotonic() - began_s)
        assert answer.status == 200
    ended.set()
    sent = sum(await asyncio.gather(*noise))
    for _, writer in slow:
        writer.close()
    print(f"p99 {sorted(waits)[-1] * 1000:.0f} ms beside 500 slow sockets and {sent} junk requests")
    assert max(waits) < 2
