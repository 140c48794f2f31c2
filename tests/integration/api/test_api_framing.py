"""What is not one well-formed request, on raw sockets: a problem, and the connection ends (rules T17 and T18)."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from urllib.parse import urlsplit

import pytest

from api_fixtures import Api, ApiResponse, Customer, exchange, read_answer, request_bytes, running_api
from store_factories import values
from timeouts import WAIT_TIMEOUT_S
from vaultevents.api import connection
from vaultevents.api.connection import MAX_HEADER_BYTES, MAX_REQUEST_BYTES
from vaultevents.api.server import ServerOptions, bind
from vaultevents.core.jsonbody import MAX_BODY_BYTES
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

PATH = "/v1/account"
WEBHOOKS = "/v1/account/webhooks"
WEBHOOK = b'{"url":"https://example.org/"}'
JSON = {"content-type": "application/json"}
CHUNKED = {**JSON, "transfer-encoding": "chunked"}


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
    headers = {**credentials(api, customer, target, body), **(extra or {})}
    return request_bytes(method, target, headers, body)


def credentials(api: Api, customer: Customer, target: str, body: bytes = b"") -> dict[str, str]:
    return {"x-api-key": customer.api_key, "authorization": f"Bearer {api.token(customer, target, body)}"}


def chunks(body: bytes, size: int = 1) -> bytes:
    """`body` in chunks of this size, and the end."""
    parts = [body[n : n + size] for n in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@asynccontextmanager
async def connected(api: Api) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of one's own; nothing on it takes longer than ten seconds."""
    parts = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            yield reader, writer
    finally:
        writer.close()


async def answers(api: Api, *pieces: bytes) -> list[ApiResponse]:
    """All that comes back for these bytes until the service ends the connection."""
    async with connected(api) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05 if len(pieces) > 1 else 0)
        found = []
        while not reader.at_eof():
            try:
                found.append(await read_answer(reader))
            except asyncio.IncompleteReadError as end:
                assert end.partial == b"", "half an answer"
        return found


async def the_answer(api: Api, *pieces: bytes) -> ApiResponse:
    """The one answer before the service ends the connection."""
    (answer,) = await answers(api, *pieces)
    return answer


async def test_what_is_not_http(api: Api) -> None:
    reported = {}
    for name, request_text in {
        "two lengths": "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        "one length twice": "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        "a list of lengths": "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2, 2\r\n\r\n{}",
        "length and chunks": "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
        "transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "chunks and length": "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
        "content-length: 2\r\n\r\n0\r\n\r\n",
        "chunks of chunks": "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
        "transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "no chunks after all": "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        "a negative length": "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        "a signed length": "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +2\r\n\r\n{}",
        "a hexadecimal length": "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0x2\r\n\r\n{}",
        "an endless length": "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n{}",
        "bare LF": "GET /v1/account HTTP/1.1\nhost: x\n\n",
        "one bare LF": "GET /v1/account HTTP/1.1\r\nhost: x\nx-a: b\r\n\r\n",
        "bare CR": "GET /v1/account HTTP/1.1\rhost: x\r\r",
        "NUL in a header": "GET /v1/account HTTP/1.1\r\nhost: x\x00\r\n\r\n",
        "white space before a colon": "GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        "a folded header": "GET / HTTP/1.1\r\nhost: x\r\nx-a: b\r\n c\r\n\r\n",
        "an unknown method": "FROB / HTTP/1.1\r\nhost: x\r\n\r\n",
        "a method in small letters": "get / HTTP/1.1\r\nhost: x\r\n\r\n",
        "a tunnel": "CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        "a target outside ASCII": "GET /v1/\xe9 HTTP/1.1\r\nhost: x\r\n\r\n",
        "a query outside ASCII": "GET /docs?\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        "HTTP/2 from the start": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "nonsense": "\x00\x01\x02\r\n\r\n",
    }.items():
        answer = await the_answer(api, request_text.encode("latin-1"))
        reported[name] = (answer.status, answer.code, answer.headers["connection"], "date" in answer.headers)
    assert reported == dict.fromkeys(reported, (400, "request_malformed", "close", True))


async def test_chunked_nonsense_is_answered_and_changes_nothing(api: Api) -> None:
    customer = await api.customer()
    for nonsense in (b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}x\r\n0\r\n\r\n", b"-1\r\n{}\r\n", b"f" * 17 + b"\r\n{}"):
        sent = {**credentials(api, customer, WEBHOOKS, WEBHOOK), **CHUNKED, "x-mfa-code": api.code(customer)}
        head, begin = request_bytes("POST", WEBHOOKS, sent), chunks(WEBHOOK)[: -len(b"0\r\n\r\n")]
        for pieces in ((head + nonsense,), (head, nonsense), (head + begin, nonsense)):
            answer = await the_answer(api, *pieces)
            assert (answer.status, answer.code, answer.headers["connection"]) == (400, "request_malformed", "close")
    assert await values(api.database, "select count(*)::int from webhooks") == [0]


async def test_a_chunked_body_is_a_body(api: Api) -> None:
    customer = await api.customer()
    headers = {**credentials(api, customer, WEBHOOKS, WEBHOOK), **CHUNKED, "x-mfa-code": api.code(customer)}
    answer = await exchange(api.url, request_bytes("POST", WEBHOOKS, headers) + chunks(WEBHOOK))
    assert answer.status == 201, answer.body


async def test_what_follows_a_chunked_body_is_no_header(api: Api) -> None:
    customer = await api.customer()
    head = request_bytes("POST", WEBHOOKS, {**credentials(api, customer, WEBHOOKS, WEBHOOK), **CHUNKED})
    trailer = b"x-mfa-code: %s\r\n\r\n" % api.code(customer).encode()
    answer = await exchange(api.url, head + chunks(WEBHOOK).removesuffix(b"\r\n") + trailer)
    assert (answer.status, answer.code) == (401, "mfa_required")


TARGETS = (
    "//v1/account",
    "/v1//account",
    "/v1/account/",
    "/v1/./account",
    "/v1/x/../account",
    "/v1/%61ccount",
    "/v1/%2561ccount",
    "/v1%2Faccount",
    "/v1/account%2fwebhooks",
    "/v1/account;x",
    "/v1/account#x",
    "/v1/account?#x",
    "/V1/account",
    "/v1/account%00",
    "/v1/account%20",
    "/v1/account/webhooks/%2e%2e/webhooks",
    "/v1/account/webhooks/../webhooks",
    "\\v1\\account",
    "v1/account",
    "/docs/../v1/account",
    "http://api.example.org/v1/account",
    "http://evil.example/v1/account",
    "*",
)


async def test_no_other_spelling_of_a_path_runs_a_route(api: Api) -> None:
    """What was signed and what runs is the same text: nothing is decoded, folded or cut."""
    customer = await api.customer()
    reported = {}
    for target in TARGETS:
        signed_so = await exchange(api.url, signed(api, customer, target))
        signed_for_route = request_bytes("GET", target, credentials(api, customer, PATH))
        reported[target] = {signed_so.status, (await exchange(api.url, signed_for_route)).status}
    assert {target: statuses for target, statuses in reported.items() if not statuses <= {400, 401, 404}} == {}


async def test_a_path_parameter_is_the_text_that_was_signed(api: Api) -> None:
    customer = await api.customer()
    made = await api.call(customer, "POST", WEBHOOKS, {"url": "https://example.org/"})
    real, (first, *rest) = made.json["id"], made.json["id"]
    spelled = f"%{ord(first):02x}{''.join(rest)}"
    for webhook_id, status in ((real, 200), (spelled, 404), (f"{real};x", 404), (f"{real}%00", 404), (f"{real}/", 404)):
        target = f"{WEBHOOKS}/{webhook_id}"
        assert (await exchange(api.url, signed(api, customer, target))).status == status, target


async def test_a_query_may_be_signed_or_not(api: Api) -> None:
    customer = await api.customer()
    for target in ("/v1/account", "/v1/account?", "/v1/account?x=%2F&y=..", "/v1/account??"):
        assert (await exchange(api.url, signed(api, customer, target))).status == 200
        path_alone = request_bytes("GET", target, credentials(api, customer, PATH))
        assert (await exchange(api.url, path_alone)).status == 200


async def test_a_header_block_that_is_too_large(api: Api) -> None:
    big = "x" * (MAX_HEADER_BYTES + 1)
    for name, sent in {
        "one big": request_bytes("GET", PATH, {"x-big": big}),
        "many small": request_bytes("GET", PATH, {f"x-{n}": "y" * 50 for n in range(1200)}),
        "unfinished": f"GET {PATH} HTTP/1.1\r\nhost: x\r\nx-big: {big}".encode(),
        "the target": request_bytes("GET", f"{PATH}?{big}", {}),
    }.items():
        answer = await exchange(api.url, sent)
        assert (answer.status, answer.code) == (431, "headers_too_large"), name
        assert "date" in answer.headers


async def test_a_header_block_that_just_fits(api: Api) -> None:
    customer = await api.customer()
    answer = await exchange(api.url, signed(api, customer, PATH, extra={"x-big": "x" * (MAX_HEADER_BYTES - 2000)}))
    assert answer.status == 200


async def test_a_body_that_is_too_large(api: Api) -> None:
    customer = await api.customer()
    for size, status in ((MAX_BODY_BYTES, 422), (MAX_BODY_BYTES + 1, 413)):
        body = b'{"url":"' + b"x" * (size - 10) + b'"}'
        for chunk in (None, 1, size):
            headers = {**credentials(api, customer, WEBHOOKS, body), **(CHUNKED if chunk else JSON)}
            framed = request_bytes("POST", WEBHOOKS, headers, b"" if chunk else body)
            answer = await exchange(api.url, framed + (chunks(body, chunk) if chunk else b""))
            assert answer.status == status, (size, chunk, answer.body)
    assert answer.code == "body_too_large"


async def test_what_surrounds_a_body_is_bounded_too(api: Api) -> None:
    """Trailers and the extensions of chunks: nobody reads them, and they do not fill the memory."""
    customer = await api.customer()
    head = request_bytes("POST", WEBHOOKS, {**credentials(api, customer, WEBHOOKS, WEBHOOK), **CHUNKED})
    much = b"x" * MAX_REQUEST_BYTES
    for endless in (b"0\r\nx: " + much, b"1;" + much, b"1\r\n{\r\n0\r\n" + b"x: y\r\n" * (MAX_REQUEST_BYTES // 3)):
        answer = await exchange(api.url, head + endless)
        assert (answer.status, answer.code) == (413, "body_too_large")
        assert answer.headers["connection"] == "close"


async def test_a_body_where_none_belongs(api: Api) -> None:
    customer = await api.customer()
    for method in ("GET", "DELETE"):
        by_length = signed(api, customer, PATH, method, b"{}", JSON)
        by_chunks = signed(api, customer, PATH, method, b"", CHUNKED) + chunks(b"{}")
        for sent in (by_length, by_chunks):
            answer = await exchange(api.url, sent)
            assert (answer.status, answer.code) == (400, "body_not_allowed"), (method, sent)


BODIES: tuple[tuple[bytes, str, int, str], ...] = (
    (b'{"url":', "application/json", 400, "json_malformed"),
    (b'{"url":"https://a.example/","url":"https://b.example/"}', "application/json", 400, "json_malformed"),
    (b'\xef\xbb\xbf{"url":"https://a.example/"}', "application/json", 400, "json_malformed"),
    (b'{"url":NaN}', "application/json", 400, "json_malformed"),
    (b"[" * 9000, "application/json", 400, "json_malformed"),
    (b'{"url":"\\ud800"}', "application/json", 400, "json_malformed"),
    (b'{"url":"\xff"}', "application/json", 400, "json_malformed"),
    (WEBHOOK, "text/plain", 415, "media_type_unsupported"),
    (WEBHOOK, "", 415, "media_type_unsupported"),
    (WEBHOOK, "\xff", 415, "media_type_unsupported"),
    (b"url=https://a.example/", "application/x-www-form-urlencoded", 415, "media_type_unsupported"),
    (b"[]", "application/json", 422, "validation_failed"),
    (b"null", "application/json", 422, "validation_failed"),
    (b'"x"', "application/json; charset=utf-8", 422, "validation_failed"),
    (b"", "application/json", 422, "validation_failed"),
)


async def test_bodies_that_are_no_webhook(api: Api) -> None:
    customer = await api.customer()
    for body, media_type, status, code in BODIES:
        typed = {"content-type": media_type} if media_type else {}
        answer = await exchange(api.url, signed(api, customer, WEBHOOKS, "POST", body, typed))
        assert (answer.status, answer.code) == (status, code), (body, media_type)


async def test_an_upgrade_is_answered_in_http(api: Api) -> None:
    """Some clients offer HTTP/2 with every first request."""
    customer = await api.customer()
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}
    assert (await exchange(api.url, signed(api, customer, PATH, extra=offer))).status == 200
    async with connected(api) as (reader, writer):  # and what follows in the same piece is a request like any other
        writer.write(b"".join(signed(api, customer, PATH, extra=offer) for _ in range(20)))
        assert [(await read_answer(reader)).status for _ in range(20)] == [200] * 20


async def test_a_body_with_an_upgrade_is_a_body(api: Api) -> None:
    """Java's client offers HTTP/2 with every request on plain HTTP; a body is never another protocol or request."""
    customer = await api.customer()
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}
    for body, status in ((WEBHOOK, 201), (request_bytes("GET", "/docs", {}), 400)):
        for framing in (JSON, CHUNKED):
            framed = chunks(body, 7) if framing is CHUNKED else body
            for cuts in ((), (0,), (9,), (-1,)):
                code = api.code(customer)  # which may move the clock
                headers = {**credentials(api, customer, WEBHOOKS, body), **offer, **framing, "x-mfa-code": code}
                whole = request_bytes("POST", WEBHOOKS, headers, b"" if framing is CHUNKED else body)
                head = whole if framing is CHUNKED else whole[: -len(body)]
                sent = head + framed + signed(api, customer, PATH)
                places = [len(head) + (cut if cut >= 0 else len(framed) + cut) for cut in cuts]
                async with connected(api) as (reader, writer):
                    for begin, end in pairwise((0, *places, len(sent))):
                        writer.write(sent[begin:end])
                        await asyncio.sleep(0.02)
                    first, second = await read_answer(reader), await read_answer(reader)
                assert (first.status, second.status) == (status, 200), (first.body, second.body)
    assert await values(api.database, "select count(*)::int from webhooks") == [8]


async def test_framing_that_lies_behind_an_upgrade_is_refused(api: Api) -> None:
    for framing in (
        "transfer-encoding: xchunked",
        "transfer-encoding: chunked\r\ncontent-length: 2",
        "content-length: x",
    ):
        lying = f"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n{framing}\r\n\r\n0\r\n\r\n"
        answer = await the_answer(api, lying.encode())
        assert (answer.status, answer.code) == (400, "request_malformed"), framing


HOSTS: tuple[tuple[str, int], ...] = (
    ("host: api.example.org\r\n", 200),
    ("host: [2001:db8::1]:8420\r\n", 200),
    ("host:\r\n", 200),
    ("", 400),
    ("host: x\r\nhost: x\r\n", 400),
    ("host: x\r\nHOST: y\r\n", 400),
    ("host: x, y\r\n", 400),
    ("host: x y\r\n", 400),
    ("host: x/y\r\n", 400),
    ("host: <x>\r\n", 400),
    ("host: \xff\r\n", 400),
)


async def test_a_request_names_one_host(api: Api) -> None:
    """RFC 9112 §3.2; HTTP/1.0 knows no such header."""
    for lines, status in HOSTS:
        for method in ("GET", "HEAD"):
            request = f"{method} /docs HTTP/1.1\r\n{lines}\r\n".encode("latin-1")
            async with connected(api) as (reader, writer):
                writer.write(request)
                assert int((await reader.readline()).split()[1]) == status, lines
    assert (await exchange(api.url, b"GET /docs HTTP/1.0\r\n\r\n")).status == 200


async def test_a_client_that_asks_first_whether_to_send_its_body(api: Api) -> None:
    customer = await api.customer()
    expect = {**JSON, "expect": "100-continue"}
    asking = signed(api, customer, WEBHOOKS, "POST", WEBHOOK, {**expect, "x-mfa-code": api.code(customer)})
    async with connected(api) as (reader, writer):
        writer.write(asking[: -len(WEBHOOK)])
        assert (await read_answer(reader)).status == 100
        writer.write(WEBHOOK)
        assert (await read_answer(reader)).status == 201
    for refused, code in (
        (request_bytes("POST", WEBHOOKS, expect, WEBHOOK), "credentials_missing"),
        (signed(api, customer, WEBHOOKS, "POST", b" " * (MAX_BODY_BYTES + 1), expect), "body_too_large"),
    ):
        head = refused[: refused.index(b"\r\n\r\n") + 4]
        answer = await the_answer(api, head)  # its body may come or not: nothing after it could be believed
        assert (answer.code, answer.headers["connection"]) == (code, "close")


async def test_http_1_0_gets_one_answer(api: Api) -> None:
    customer = await api.customer()
    old = signed(api, customer, PATH, extra={"connection": "keep-alive"}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    answer = await the_answer(api, old)
    assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_the_listener_says_that_it_is_tcp() -> None:
    """Only then asyncio sets TCP_NODELAY; without it each answer, which is two writes, waits 40 ms."""
    with bind(ServerOptions(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


async def test_two_requests_in_one_piece_get_two_answers(api: Api) -> None:
    customer = await api.customer()
    async with connected(api) as (reader, writer):
        writer.write(signed(api, customer, PATH) + signed(api, customer, WEBHOOKS))
        first, second = await read_answer(reader), await read_answer(reader)
    assert (first.json["id"], second.json) == ("acme", [])


async def test_junk_behind_good_requests_does_not_cost_them_their_answers(api: Api) -> None:
    """A change that was made must be confirmed; the junk gets an answer of its own, and nothing after it is parsed."""
    customer = await api.customer()
    change = {**JSON, "x-mfa-code": api.code(customer)}
    good = (signed(api, customer, PATH), signed(api, customer, WEBHOOKS, "POST", WEBHOOK, change))
    never = signed(api, customer, PATH)
    found = await answers(api, b"".join(good) + b"\x00\x00\r\n\r\n" + never)
    assert [answer.status for answer in found] == [200, 201, 400]
    huge = b"GET / HTTP/1.1\r\nx-big: " + b"x" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n"
    assert [answer.status for answer in await answers(api, signed(api, customer, PATH) + huge)] == [200, 431]


async def test_a_request_that_never_arrives(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ARRIVAL_S", 0.3)
    customer = await api.customer()
    whole = signed(api, customer, WEBHOOKS, "POST", WEBHOOK, JSON)
    for part in (b"", b"\r\n" * 4, whole[:40], whole[:-5], whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"):
        answer = await the_answer(api, part)
        assert (answer.status, answer.code) == (408, "request_timeout"), part
        assert answer.headers["connection"] == "close"
        assert "date" in answer.headers
    after_another = await answers(api, signed(api, customer, PATH) + whole[:40])
    assert [answer.status for answer in after_another] == [200, 408]
    refused_before = await answers(api, request_bytes("POST", WEBHOOKS, JSON, WEBHOOK)[:-5])
    assert [answer.status for answer in refused_before] == [401], "one answer to one request"
    assert await values(api.database, "select count(*)::int from webhooks") == [0]


async def test_a_client_that_hangs_up_in_the_middle_leaves_no_trace(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    customer = await api.customer()
    sent = signed(api, customer, WEBHOOKS, "POST", WEBHOOK, {**JSON, "x-mfa-code": api.code(customer)})
    for part in (sent[:20], sent[:-5], sent[: -len(WEBHOOK)]):
        async with connected(api) as (_, writer):
            writer.write(part)
            await writer.drain()
    assert (await api.call(customer, "GET", WEBHOOKS)).json == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert (await exchange(api.url, sent)).status == 201, "neither token nor code was spent"


async def test_slow_sockets_and_junk_do_not_keep_a_good_client_waiting(database: Database) -> None:
    async with running_api(database, options=ServerOptions(port=0, connections_per_address=1000)) as api:
        await wait_beside_slow_sockets(api)


async def wait_beside_slow_sockets(api: Api) -> None:
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
    for _ in range(100):
        began_s = time.monotonic()
        answer: ApiResponse = await api.call(customer, "GET", PATH)
        waits.append(time.monotonic() - began_s)
        assert answer.status == 200
    ended.set()
    sent = sum(await asyncio.gather(*noise))
    for _, writer in slow:
        writer.close()
    print(f"p99 {sorted(waits)[98] * 1000:.0f} ms beside 500 slow sockets and {sent} junk requests")
    assert max(waits) < connection.ARRIVAL_S / 2
