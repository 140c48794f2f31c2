"""What a sender makes of answers: good, bad, slow, cut into pieces, and followed by what nobody asked for."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from sender_factories import BODY, HEADERS, NAME, OK, hang, one, receiving, sender
from vaultevents.devnet.certificates import Authority
from vaultevents.dispatch.sender import EXCERPT_CHARS

pytestmark = pytest.mark.integration

PROMPT_MS = 10_000  # of the 15 s that a delivery may take; more than a busy machine adds


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("status", [204, 400, 404, 410, 429, 500, 503])
async def test_any_status_is_a_reply(status: int, authority: Authority) -> None:
    reply = await one(b"HTTP/1.1 %d X\r\nRetry-After: 120\r\nContent-Length: 0\r\n\r\n" % status, authority)
    assert (reply.status, reply.error, reply.retry_after, reply.excerpt) == (status, None, "120", "")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(status: int, authority: Authority) -> None:
    async with receiving(OK, authority.server(NAME)) as target:
        answer = f"HTTP/1.1 {status} X\r\nLocation: {target.url}\r\nContent-Length: 0\r\n\r\n".encode()
        async with receiving(answer, authority.server(NAME)) as receiver, sender(authority) as sending:
            reply = await sending.send(receiver.url, BODY, HEADERS)
            assert (reply.status, reply.error) == (status, None)
            assert target.connections == 0
            assert (await sending.send(target.url, BODY, HEADERS)).status == 200
            assert target.connections == 1, "the control: the target can be reached"


async def test_no_answer_ends_at_the_deadline(authority: Authority) -> None:
    reply = await one(hang, authority, total_timeout_s=0.3)
    assert (reply.status, reply.error, reply.address) == (None, "timeout", "127.0.0.1")
    assert 250 <= reply.duration_ms < PROMPT_MS


async def test_headers_that_drip_end_at_the_deadline(authority: Authority) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for n in range(1000):
            writer.write(b"x-%d: y\r\n" % n)
            await asyncio.sleep(0.05)

    reply = await one(drip, authority, total_timeout_s=0.4)
    assert (reply.status, reply.error) == (None, "timeout")
    assert reply.duration_ms < PROMPT_MS


@pytest.mark.parametrize("status", [200, 500])
async def test_a_body_that_drips_does_not_change_what_the_headers_said(status: int, authority: Authority) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 1000\r\n\r\n" % status)
        for _ in range(1000):
            writer.write(b"z")
            await asyncio.sleep(0.05)

    async with receiving(drip, authority.server(NAME)) as receiver, sender(authority, total_timeout_s=0.4) as sending:
        reply = await sending.send(receiver.url, BODY, HEADERS)
        assert (reply.status, reply.error) == (status, None)
        assert set(reply.excerpt) == {"z"}
        assert 350 <= reply.duration_ms < PROMPT_MS
        await sending.send(receiver.url, BODY, HEADERS)
        assert receiver.connections == 2, "a connection with an unfinished answer is not used again"


async def test_an_endless_body_is_cut(authority: Authority) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % 2**30)
        while True:
            writer.write(bytes(2**16))
            await writer.drain()
            sent += 2**16

    reply = await one(endless, authority)
    assert (reply.status, reply.error) == (200, None)
    assert reply.duration_ms < PROMPT_MS
    assert sent < 16 * 2**20, "only what fits into the buffers of two sockets ever left"


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", OK[:-2] + b"h"]
)
async def test_a_body_cut_short_does_not_change_what_the_headers_said(head: bytes, authority: Authority) -> None:
    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await writer.drain()
        writer.close()

    reply = await one(cut, authority)
    assert (reply.status, reply.error) == (200, None)


async def test_a_reset_after_the_body_was_read_is_no_answer(authority: Authority) -> None:
    async def reset(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    reply = await one(reset, authority)
    assert (reply.status, reply.error, reply.address) == (None, "reset", "127.0.0.1")


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n"]
)
async def test_an_answer_that_is_not_http(answer: bytes, authority: Authority) -> None:
    reply = await one(answer, authority)
    assert (reply.status, reply.error) == (None, "protocol")


@pytest.mark.parametrize("line", [b"x-%07d: y\r\n" % 0, b"x-long: " + b"y" * 40_000 + b"\r\n"], ids=["many", "long"])
async def test_headers_without_end_are_refused(line: bytes, authority: Authority) -> None:
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(10_000):
            writer.write(line * 100)
            await writer.drain()
            sent += 100 * len(line)

    reply = await one(flood, authority)
    assert (reply.status, reply.error) == (None, "protocol")
    assert reply.duration_ms < PROMPT_MS
    assert sent < 16 * 2**20


@pytest.mark.parametrize(("lines", "accepted"), [(30, True), (34, False)])
async def test_a_header_block_over_32_kib_is_not_complete(lines: int, accepted: bool, authority: Authority) -> None:
    padding = b"".join(b"x-%02d: %s\r\n" % (n, b"y" * 1000) for n in range(lines))
    reply = await one(OK.replace(b"\r\n\r\n", b"\r\n" + padding + b"\r\n"), authority)
    assert (reply.status, reply.error) == ((200, None) if accepted else (None, "protocol"))


async def test_an_upgrade_is_no_success_and_holds_nothing_up(authority: Authority) -> None:
    reply = await one(b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", authority)
    assert reply.status == 101 or reply.error == "protocol"
    assert reply.duration_ms < PROMPT_MS


async def test_an_early_hint_is_not_the_answer(authority: Authority) -> None:
    reply = await one(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n", authority
    )
    assert reply.status == 500


async def test_a_compressed_body_is_not_expanded(authority: Authority) -> None:
    bomb = gzip.compress(b"boom" * 2**20)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    reply = await one(head + bomb, authority)
    assert reply.status == 200
    assert "boom" not in reply.excerpt


async def test_an_excerpt_is_short_and_printable(authority: Authority) -> None:
    body = "Fehler: zu groß\x00\x1b[31m\u202e\r\n".encode() + b"\xff" + b"x" * 1000
    reply = await one(b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n" % len(body) + body, authority)
    assert reply.excerpt.startswith("Fehler: zu groß")
    assert reply.excerpt.isprintable()
    assert len(reply.excerpt) == EXCERPT_CHARS


async def test_cookies_are_not_kept(authority: Authority) -> None:
    answer = OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: session=1; Domain=example\r\nSet-Cookie: b=2\r\n\r\n")
    async with receiving(answer, authority.server(NAME)) as receiver, sender(authority) as sending:
        for _ in range(2):
            await sending.send(receiver.url, BODY, HEADERS)
        assert len(receiver.requests) == 2
        assert not any("cookie" in head.lower() for head, _ in receiver.requests)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (OK + OK, 200),
        (OK + b"H", 200),
        (OK.replace(b"200 OK", b"200 OK\r\nConnection: close"), 200),
        (OK.replace(b"1.1", b"1.0"), 200),
        (OK.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"), None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 200),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 100 + OK, None),
        (b"HTTP/1.1 101 X\r\n\r\n", 101),
        (OK.replace(b"\r\n", b"\n"), None),
    ],
    ids=[
        "second answer",
        "one byte more",
        "close",
        "HTTP/1.0",
        "two lengths",
        "bad chunk",
        "storm of 100",
        "101",
        "bare line feeds",
    ],
)
async def test_an_answer_that_does_not_end_cleanly_costs_its_connection(
    answer: bytes, status: int | None, authority: Authority
) -> None:
    async with receiving(answer, authority.server(NAME)) as receiver, sender(authority) as sending:
        for opened in (1, 2):
            reply = await sending.send(receiver.url, BODY, HEADERS)
            assert (reply.status, reply.error) == (status, None if status else "protocol")
            assert receiver.connections == opened
            await asyncio.sleep(0.01)


ANSWERS = {
    "length": b"HTTP/1.1 429 X\r\nRetry-After: 120\r\nContent-Length: 5\r\n\r\nhello",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    "interim": b"HTTP/1.1 103 X\r\nLink: </a>\r\n\r\nHTTP/1.1 500 X\r\nContent-Length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_an_answer_split_at_any_byte_is_the_same_reply(answer: bytes, authority: Authority) -> None:
    async def split(writer: asyncio.StreamWriter) -> None:
        cut = len(receiver.requests) - 1
        writer.write(answer[:cut])
        await writer.drain()
        await asyncio.sleep(0.002)
        writer.write(answer[cut:])

    async with receiving(split, authority.server(NAME)) as receiver, sender(authority) as sending:
        replies = [await sending.send(receiver.url, BODY, HEADERS) for _ in range(len(answer))]
        assert len({(reply.status, reply.error, reply.retry_after, reply.excerpt) for reply in replies}) == 1
        assert replies[0].excerpt == "hello"
        assert receiver.connections == 1


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_an_answer_that_comes_byte_by_byte_is_the_same_reply(answer: bytes, authority: Authority) -> None:
    async def send_bytes_then_reply(writer: asyncio.StreamWriter) -> None:
        for at in range(len(answer) if len(receiver.requests) == 1 else 0):
            writer.write(answer[at : at + 1])
            await asyncio.sleep(0.001)
        if len(receiver.requests) == 2:
            writer.write(answer)

    async with receiving(send_bytes_then_reply, authority.server(NAME)) as receiver, sender(authority) as sending:
        spelt, reported = [await sending.send(receiver.url, BODY, HEADERS) for _ in range(2)]
        assert (spelt.status, spelt.retry_after, spelt.excerpt) == (reported.status, reported.retry_after, "hello")
        assert receiver.connections == 1


CHUNKED = b"HTTP/1.1 %d X\r\nRetry-After: 120\r\nTransfer-Encoding: chunked\r\n\r\n"
BROKEN_CHUNKS = {
    "no size": b"\r\nhello\r\n",
    "a size that is none": b"zz\r\nhello\r\n",
    "a negative size": b"-5\r\nhello\r\n",
    "a size beyond 64 bits": b"f" * 17 + b"\r\nhello\r\n",
    "longer than its size": b"5\r\nhello, world\r\n0\r\n\r\n",
    "the second one": b"5\r\nhello\r\nzz\r\n",
}


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize("chunk", BROKEN_CHUNKS.values(), ids=BROKEN_CHUNKS.keys())
async def test_a_chunk_that_is_broken_changes_nothing_of_the_headers_beside_it(
    chunk: bytes, status: int, authority: Authority
) -> None:
    """Rule D3, also where both come in one packet; the connection is not used again."""
    async with receiving(CHUNKED % status + chunk, authority.server(NAME)) as receiver, sender(authority) as sending:
        for opened in (1, 2):
            reply = await sending.send(receiver.url, BODY, HEADERS)
            assert (reply.status, reply.error, reply.retry_after) == (status, None, "120")
            assert reply.excerpt in ("", "hello")
            assert receiver.connections == opened


OTHER = b"HTTP/1.1 500 X\r\nRetry-After: 120\r\nContent-Length: 5\r\n\r\nother"


@pytest.mark.parametrize(
    "more", [OTHER, OTHER[:20], b", and more", b"\0" * 40_000], ids=["answer", "half an answer", "body", "a lot"]
)
async def test_what_follows_an_answer_belongs_to_no_post(more: bytes, authority: Authority) -> None:
    async with receiving(OK + more, authority.server(NAME)) as receiver, sender(authority) as sending:
        for opened in (1, 2, 3):
            reply = await sending.send(receiver.url, BODY, HEADERS)
            assert (reply.status, reply.retry_after, reply.excerpt) == (200, None, "ok")
            assert receiver.connections == opened


async def test_an_answer_that_nobody_asked_for_is_not_the_next_ones(authority: Authority) -> None:
    async def twice(writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await asyncio.sleep(0.02)
        writer.write(OTHER)

    async with receiving(twice, authority.server(NAME)) as receiver, sender(authority) as sending:
        for opened in (1, 2, 3):
            assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200
            assert receiver.connections == opened
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("status", [204, 304])
async def test_a_status_without_a_body_has_none(status: int, authority: Authority) -> None:
    """RFC 9110, 6.4.1: whatever length it names. One that comes nevertheless costs the connection."""
    bare = b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\n" % status
    for answer, connections in ((bare, 1), (bare + b"hello", 2)):
        async with receiving(answer, authority.server(NAME)) as receiver, sender(authority) as sending:
            replies = [await sending.send(receiver.url, BODY, HEADERS) for _ in range(2)]
            assert {(reply.status, reply.excerpt) for reply in replies} == {(status, "")}
            assert receiver.connections == connections


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "does not close"])
@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 5", False),
        (b"HTTP/1.1 200 OK\r\nConnection: x, close\r\nContent-Length: 5", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 5", True),
    ],
    ids=["1.1", "close", "close among others", "1.0", "1.0 keep-alive"],
)
async def test_a_connection_is_kept_only_where_both_mean_to(
    lines: bytes, kept: bool, closes: bool, authority: Authority
) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(lines + b"\r\n\r\nhello")
        if closes:
            writer.close()

    async with receiving(answer, authority.server(NAME)) as receiver, sender(authority) as sending:
        for _ in range(2):
            reply = await sending.send(receiver.url, BODY, HEADERS)
            assert (reply.status, reply.error, reply.excerpt) == (200, None, "hello")
            await asyncio.sleep(0.05)
        assert receiver.connections == (1 if kept and not closes else 2)


@pytest.mark.parametrize("lines", [b"HTTP/1.1 200 OK\r\nConnection: close", b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK"])
async def test_a_body_without_a_length_ends_with_its_connection(lines: bytes, authority: Authority) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(lines + b"\r\n\r\nhel")
        await asyncio.sleep(0.02)
        writer.write(b"lo")
        await asyncio.sleep(0.02)
        writer.close()

    reply = await one(answer, authority)
    assert (reply.status, reply.error, reply.excerpt) == (200, None, "hello")
    assert reply.duration_ms < PROMPT_MS


@pytest.mark.parametrize("pause_s", [0, 0.02], ids=["in one packet", "apart"])
@pytest.mark.parametrize(("number", "accepted"), [(1, True), (16, True), (17, False)])
async def test_the_answer_is_what_comes_after_continue(
    number: int, accepted: bool, pause_s: float, authority: Authority
) -> None:
    """Nothing is kept of a 100 and what it says, and there may be 16 of them."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\nRetry-After: 9\r\n\r\n" * number)
        if pause_s:
            await asyncio.sleep(pause_s)
        writer.write(b"HTTP/1.1 503 X\r\nContent-Length: 5\r\n\r\nhello")

    async with receiving(answer, authority.server(NAME)) as receiver, sender(authority) as sending:
        for opened in (1, 1 if accepted else 2):
            reply = await sending.send(receiver.url, BODY, HEADERS)
            assert receiver.connections == opened
            assert (reply.status, reply.error) == ((503, None) if accepted else (None, "protocol"))
            assert (reply.retry_after, reply.excerpt) == (None, "hello" if accepted else "")


async def test_continue_alone_is_no_answer(authority: Authority) -> None:
    reply = await one(b"HTTP/1.1 100 Continue\r\nRetry-After: 9\r\n\r\n", authority, total_timeout_s=0.3)
    assert (reply.status, reply.error, reply.retry_after) == (None, "timeout", None)


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 100 Continue\r\n\r\n", OK[:-4]], ids=["nothing", "100", "half"])
async def test_a_connection_that_ends_before_the_headers_do_has_no_answer(before: bytes, authority: Authority) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(before)
        writer.close()

    reply = await one(answer, authority)
    assert (reply.status, reply.error, reply.excerpt, reply.address) == (None, "reset", "", "127.0.0.1")
