"""Delivery through a forward proxy: a real CONNECT proxy between the sender and a real TLS receiver."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence

import pytest
import uvloop
from structlog.testing import capture_logs

from connect_proxy import DENIED, connect_proxy
from sender_factories import BODY, HEADERS, NAME, OK, receiving, sender
from vaultevents.config import given
from vaultevents.core.errors import ConfigError, LocalFault
from vaultevents.core.proxies import Proxy, parse_proxy
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.certificates import Authority
from vaultevents.dispatch.sender import Sender
from vaultevents.egress import Guard
from vaultevents.wiring.delivery import reach_proxy

pytestmark = pytest.mark.integration

ANY_PORT = UrlRules(ports=frozenset(range(1, 65536)))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


async def not_asked(name: str) -> Sequence[str]:
    raise AssertionError(f"{name} was looked up here")


def through(proxy: Proxy, authority: Authority, rules: UrlRules = ANY_PORT, connect_timeout_s: float = 5.0) -> Sender:
    guard = Guard(rules, lookup=not_asked)
    return Sender(guard, ca_file=authority.ca_path, proxy=proxy, connect_timeout_s=connect_timeout_s)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_delivery_goes_through_the_proxy(loop: Callable[[], asyncio.AbstractEventLoop], authority: Authority) -> None:
    async def deliver() -> None:
        async with connect_proxy() as proxy, receiving(OK, authority.server(NAME)) as receiver:
            at = parse_proxy(f"http://user:p%40ss@127.0.0.1:{proxy.port}")
            async with through(at, authority) as sending:
                replies = [await sending.send(receiver.url, BODY, HEADERS) for _ in range(3)]
            assert {(reply.status, reply.error, reply.address) for reply in replies} == {(200, None, None)}
            assert proxy.targets == [f"{NAME}:{receiver.port}"], "one tunnel, kept"
            credentials = base64.b64encode(b"user:p@ss").decode()
            assert f"proxy-authorization: Basic {credentials}\r\n" in proxy.heads[0]
            assert "x-smokescreen-role: vaultevents\r\n" in proxy.heads[0]
            assert receiver.server_names == [NAME]
            assert all("proxy" not in head.lower() for head, _ in receiver.requests)
            timing = replies[0].timing
            assert timing.dns_ms is None
            assert timing.connect_ms is not None
            assert timing.tls_ms is not None

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(deliver())


async def test_the_receivers_certificate_is_verified_inside_the_tunnel(authority: Authority) -> None:
    async with connect_proxy() as proxy, receiving(OK, authority.server("other.example")) as receiver:
        async with through(Proxy("127.0.0.1", proxy.port), authority) as sending:
            assert (await sending.send(receiver.url, BODY, HEADERS)).error == "tls"
        assert receiver.requests == []


@pytest.mark.parametrize(
    "answer",
    [
        DENIED,
        b"HTTP/1.1 403 Forbidden\r\n\r\n",
        b"HTTP/1.1 502 Bad gateway\r\n\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 3\r\n\r\nno\n",
        b"HTTP/1.1 504 Gateway timeout\r\n\r\n",
    ],
)
async def test_a_receiver_that_the_proxy_does_not_connect_to_fails(answer: bytes, authority: Authority) -> None:
    async with connect_proxy(lambda target: answer) as proxy, receiving(OK, authority.server(NAME)) as receiver:
        async with through(Proxy("127.0.0.1", proxy.port), authority) as sending:
            with capture_logs() as logs:
                reply = await sending.send(receiver.url, BODY, HEADERS)
        assert (reply.status, reply.error, reply.excerpt) == (None, "proxy", ""), "its reason is the operator's"
        assert receiver.connections == 0
    (line,) = [line for line in logs if line["event"] == "proxy_refused"]
    assert (line["host"], line["status"]) == (NAME, int(answer[9:12]))
    assert line["reason"] == ("denied by rule" if answer is DENIED else answer[13:].partition(b"\r\n")[0].decode())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=x\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + bytes(100_000),
        b"HTTP/1.1 200 OK\r\n\r\ntoo early",
        b"",
    ],
)
async def test_a_proxy_in_trouble_says_nothing_of_the_receiver(answer: bytes, authority: Authority) -> None:
    async with connect_proxy(lambda target: answer) as proxy, receiving(OK, authority.server(NAME)) as receiver:
        at = parse_proxy(f"http://user:s3cret@127.0.0.1:{proxy.port}")
        async with through(at, authority) as sending:
            reply = await sending.send(receiver.url, BODY, HEADERS)
    assert (reply.status, reply.error) == (None, "proxy_down")
    assert at.name in reply.excerpt
    assert "s3cret" not in reply.excerpt


async def test_a_proxy_that_is_down_says_nothing_of_the_receiver(authority: Authority) -> None:
    async with connect_proxy() as proxy:
        gone = Proxy("127.0.0.1", proxy.port)
        await reach_proxy(gone)
    async with receiving(OK, authority.server(NAME)) as receiver, through(gone, authority) as sending:
        assert (await sending.send(receiver.url, BODY, HEADERS)).error == "proxy_down"
    with pytest.raises(LocalFault, match=r"127\.0\.0\.1:[0-9]+ cannot be reached"):
        await reach_proxy(gone)
    named = Proxy("no-such-proxy.invalid", 4750)
    with pytest.raises(LocalFault):
        await reach_proxy(named)


async def test_a_receiver_that_is_silent_behind_the_proxy_fails(authority: Authority) -> None:
    accepted: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    at = Proxy("127.0.0.1", server.sockets[0].getsockname()[1])
    async with through(at, authority, connect_timeout_s=0.3) as sending:
        assert (await sending.send(f"https://{NAME}/", BODY, HEADERS)).error == "connect_timeout"
    server.close()
    for writer in accepted:
        writer.transport.abort()
    await asyncio.sleep(0)


async def test_the_rules_for_urls_hold_before_the_proxy_is_asked(authority: Authority) -> None:
    usual = UrlRules(allow=(parse_allow("127.0.0.2/32:8443"),))
    async with connect_proxy() as proxy, through(Proxy("127.0.0.1", proxy.port), authority, usual) as sending:
        for url in ("https://127.0.0.1/", "https://10.0.0.1/", "https://localhost/", "http://receiver.example/"):
            assert (await sending.send(url, BODY, HEADERS)).error == "refused_url", url
        assert (await sending.send("https://receiver.example:22/", BODY, HEADERS)).error == "refused_url"
        assert proxy.heads == []


async def test_without_a_proxy_none_is_asked(authority: Authority) -> None:
    async with connect_proxy() as proxy, receiving(OK, authority.server(NAME)) as receiver:
        async with sender(authority) as sending:
            assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200
        assert proxy.heads == []


def settings(url: str) -> object:
    return given({"network": "devnet", "chain_id": 1337, "delivery": {"proxy_url": url}}, "test")


@pytest.mark.parametrize(
    "url",
    ["https://proxy:1", "http://proxy", "socks5://proxy:1", "http://u:s3cret@proxy:0", "http://proxy:1/path", "x"],
)
def test_what_is_no_proxy_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"delivery\.proxy_url") as refused:
        settings(url)
    assert "s3cret" not in str(refused.value)


def test_credentials_show_nowhere() -> None:
    url = "http://user:s3cret@[::1]:4750"
    assert "s3cret" not in repr(settings(url)) + repr(parse_proxy(url)) + parse_proxy(url).name
    assert parse_proxy(url).name == "[::1]:4750"
