"""The guard on real sockets: a canary listens where nobody may connect, and a control shows that it can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest
from aiohttp.connector import AddrInfoType

from vaultevents import egress
from vaultevents.core.errors import InputError, VaulteventsError
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.egress import EgressRefused, Guard, is_own_address, open_session

pytestmark = pytest.mark.integration

ALLOWED, CANARY = "127.0.0.2", "127.0.0.1"
RULES = UrlRules(allow=(parse_allow("127.0.0.2/32:*"),))
ALLOW_ALL = UrlRules(allow=(parse_allow("0.0.0.0/0:*"), parse_allow("[::/0]:*")))


class Listener:
    """A plain HTTP server that counts connections and requests, so that a test sees the very first packet."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nSet-Cookie: a=b\r\n\r\nok")
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def listening(address: str, port: int = 0) -> AsyncIterator[tuple[Listener, int]]:
    listener = Listener()
    server = await asyncio.start_server(listener.serve, address, port)
    try:
        yield listener, server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Names:
    """A resolver with a script: each look-up takes the next answer, the last one holds."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


async def get(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url, allow_redirects=False) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("host", [CANARY, "[::1]", "2130706433", "127.1", "0x7f000001", "0"])
async def test_an_address_in_the_url_meets_the_guard_though_it_skips_the_resolver(host: str) -> None:
    async with listening(CANARY) as (canary, port), open_session(Guard(RULES)) as session:
        with pytest.raises((EgressRefused, aiohttp.InvalidURL, aiohttp.ClientConnectorDNSError)):
            await get(session, f"http://{host}:{port}/")
        assert canary.connections == 0


async def test_the_control_reaches_the_canary_when_everything_is_allowed() -> None:
    async with listening(CANARY) as (canary, port), open_session(Guard(ALLOW_ALL, lookup=Names([CANARY]))) as session:
        assert await get(session, f"http://{CANARY}:{port}/") == 200
        assert await get(session, f"http://receiver.example:{port}/") == 200
        assert len(canary.requests) == 2


@pytest.mark.parametrize(
    "answer", [[CANARY], [ALLOWED, CANARY], [CANARY, ALLOWED], [ALLOWED, "::1"], ["not an address"]]
)
async def test_one_denied_address_refuses_the_whole_answer(answer: list[str]) -> None:
    async with listening(CANARY) as (canary, port), listening(ALLOWED, port) as (receiver, _):
        async with open_session(Guard(RULES, lookup=Names(answer))) as session:
            with pytest.raises(EgressRefused) as refused:
                await get(session, f"http://receiver.example:{port}/secret-path")
        assert (canary.connections, receiver.connections) == (0, 0)
        assert refused.value.host == "receiver.example"
        assert "secret-path" not in str(refused.value)
        assert isinstance(refused.value, VaulteventsError)


async def test_an_answer_that_flips_between_look_ups_never_reaches_the_canary() -> None:
    async with listening(CANARY) as (canary, port), listening(ALLOWED, port) as (receiver, _):
        names = Names(*([ALLOWED], [CANARY]) * 50)
        outcomes = []
        for _ in range(100):
            async with open_session(Guard(RULES, lookup=names)) as session:
                try:
                    outcomes.append(await get(session, f"http://receiver.example:{port}/"))
                except EgressRefused:
                    outcomes.append(0)
        assert outcomes == [200, 0] * 50
        assert len(names.asked) == 100, "one look-up for each new connection: what was judged is what is dialled"
        assert (canary.connections, receiver.connections) == (0, 50)


async def test_a_kept_connection_stays_with_the_address_that_was_judged() -> None:
    async with listening(CANARY) as (canary, port), listening(ALLOWED, port) as (receiver, _):
        names = Names([ALLOWED], [CANARY])
        async with open_session(Guard(RULES, lookup=names)) as session:
            for _ in range(3):
                assert await get(session, f"http://receiver.example:{port}/") == 200
        assert len(names.asked) == 1
        assert (canary.connections, receiver.connections, len(receiver.requests)) == (0, 1, 3)


async def test_if_both_gates_failed_the_peer_is_still_compared_before_a_byte_is_sent() -> None:
    class Asleep(Guard):
        def check(self, host: str, address: str, port: int) -> None:
            """A library that skips the resolver and the socket factory would look like this."""

    async with listening(CANARY) as (canary, port), open_session(Asleep(RULES, lookup=Names([CANARY]))) as session:
        for host in (CANARY, "receiver.example"):
            with pytest.raises(EgressRefused, match="ended at"):
                await get(session, f"http://{host}:{port}/")
        await asyncio.sleep(0.05)
        assert canary.connections == 2
        assert canary.requests == []


async def test_a_public_address_of_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[AddrInfoType] = []
    guard = Guard(UrlRules(), lookup=Names(["93.184.216.34"]))
    target: AddrInfoType = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("93.184.216.34", 443))
    monkeypatch.setattr(egress, "is_own_address", lambda address: address == "93.184.216.34")
    with pytest.raises(EgressRefused, match="own"):
        await guard.resolve("receiver.example", 443)
    with pytest.raises(EgressRefused, match="own"):
        guard.open_socket(target)
    assert opened == []
    monkeypatch.setattr(egress, "is_own_address", lambda address: False)
    assert [found["host"] for found in await guard.resolve("receiver.example", 443)] == ["93.184.216.34"]
    guard.open_socket(target).close()
    with pytest.raises(EgressRefused, match="port 22"):
        await guard.resolve("receiver.example", 22)
    await guard.close()


def test_own_addresses_are_distinguished_from_others() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1")
    assert not is_own_address("2001:db8::1")
    assert not is_own_address("nonsense")


async def test_a_url_is_vetted_without_a_look_up() -> None:
    names = Names([ALLOWED])
    guard = Guard(RULES, lookup=names)
    assert str(guard.vet("https://EXAMPLE.com/a%2Fb?c=%20d")) == "https://example.com/a%2Fb?c=%20d"
    for url in ("http://example.com/", f"https://{CANARY}/", "https://localhost/", "https://2130706433/"):
        with pytest.raises(InputError):
            guard.vet(url)
    assert names.asked == []
    await guard.close()


async def test_cookies_and_the_environments_proxy_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(CANARY) as (proxy, proxy_port), listening(ALLOWED) as (receiver, port):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{CANARY}:{proxy_port}")
        async with open_session(Guard(RULES, lookup=Names([ALLOWED]))) as session:
            assert await get(session, f"http://receiver.example:{port}/") == 200
            assert await get(session, f"http://receiver.example:{port}/") == 200
        assert proxy.connections == 0
        sent = b"".join(receiver.requests).lower()
        assert sent.count(b"host: receiver.example") == 2
        for unwanted in (b"cookie", b"accept", b"user-agent", b"authorization"):
            assert unwanted not in sent
        async with aiohttp.ClientSession(trust_env=True) as control:
            await get(control, f"http://{ALLOWED}:{port}/")
        assert proxy.connections == 1, "the control: another client does use that proxy"


async def test_a_look_up_has_a_budget() -> None:
    async def never(name: str) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    guard = Guard(RULES, lookup=never, lookup_timeout_s=0.05)
    async with open_session(guard) as session:
        with pytest.raises(aiohttp.ClientConnectorDNSError):
            await get(session, "http://receiver.example/")


async def test_a_name_without_addresses_is_a_dns_error() -> None:
    async with open_session(Guard(RULES, lookup=Names([]))) as session:
        with pytest.raises(aiohttp.ClientConnectorDNSError):
            await get(session, "http://receiver.example/")
