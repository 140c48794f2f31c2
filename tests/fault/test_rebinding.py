"""Names whose addresses change between look-ups and receivers that redirect: no canary is ever reached (rule T2).

Each detector runs against broken senders, too: the canaries must see what those do.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from egress_fixtures import CANARIES, DOMAIN, ON_LOOPBACK, PUBLIC, RULES, Found, Names, Stage, client_tls, on_stage
from ssrf_corpus import DENIED_ADDRESSES, PUBLIC_ADDRESSES, REFUSED_URLS
from vaultevents.core.webhooks import UrlRules
from vaultevents.dispatch.sender import Reply, Sender
from vaultevents.egress import Guard

pytestmark = pytest.mark.fault

BODY = b'{"id":"funding_received_a_0XAB"}'
HEADERS = {"content-type": "application/json", "webhook-id": "funding_received_a_0XAB"}
NAMES, FLIPS, ATTEMPTS = 125, (1, 2, 3, 4), 4
REDIRECTS = (301, 302, 303, 307, 308)


def sender(stage: Stage, names: Names, rules: UrlRules = RULES, *, lookup_timeout_s: float = 1.0) -> Sender:
    return Sender(Guard(rules, lookup=names, lookup_timeout_s=lookup_timeout_s), ca_file=stage.authority.ca_path)


def outcome(reply: Reply) -> int | str:
    assert (reply.status is None) != (reply.error is None)
    return reply.status or reply.error or ""


def answers_with(canary: str, shape: int) -> list[str]:
    """An answer that has a private address: alone, first, last, and in the middle of many."""
    return [[canary], [canary, *PUBLIC], [*PUBLIC, canary], [PUBLIC[0], canary, PUBLIC[1]]][shape]


def rebinding_names() -> dict[str, Sequence[Found]]:
    """Each name is public until its look-up number `FLIPS[n % 4]`; from then on its answer has a canary."""
    scripts: dict[str, Sequence[Found]] = {}
    for number in range(NAMES):
        before = [PUBLIC, PUBLIC[:1], PUBLIC[1:]][number % 3]
        after = answers_with(CANARIES[number % len(CANARIES)], number // 4 % 4)
        scripts[f"n{number}.{DOMAIN}"] = [*[before] * (FLIPS[number % 4] - 1), after]
    return scripts


def test_500_deliveries_to_names_that_turn_private(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        names = Names(rebinding_names())
        async with sender(stage, names) as sending:
            for attempt in range(1, ATTEMPTS + 1):
                for number in range(NAMES):
                    reply = await sending.send(stage.url(f"n{number}"), BODY, HEADERS)
                    public = attempt < FLIPS[number % 4]
                    assert outcome(reply) == (200 if public else "refused_address"), (number, attempt)
                    assert (reply.address in PUBLIC) if public else reply.address is None
        assert await stage.breaches() == []
        assert sum(names.asked.values()) == NAMES * ATTEMPTS == 500, "what was judged is what is dialled"
        assert len(stage.requests) == sum(FLIPS[number % 4] - 1 for number in range(NAMES))

    on_stage(tmp_path, scenario)


def test_a_name_that_flips_between_all_attempts_is_reached_only_while_it_is_public(tmp_path: Path) -> None:
    """TTL 0: public, private, public …, with sends that overlap."""

    async def scenario(stage: Stage) -> None:
        names = Names({f"hook.{DOMAIN}": [PUBLIC[:1], CANARIES[:1]] * 20})
        async with sender(stage, names) as sending:
            replies = await asyncio.gather(*(sending.send(stage.url(), BODY, HEADERS) for _ in range(40)))
        assert Counter(map(outcome, replies)) == {200: 20, "refused_address": 20}
        assert await stage.breaches() == []

    on_stage(tmp_path, scenario)


def test_a_kept_connection_stays_with_the_address_that_was_judged(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        names = Names({f"hook.{DOMAIN}": [PUBLIC[:1], CANARIES]})
        async with sender(stage, names) as sending:
            replies = [await sending.send(stage.url(), BODY, HEADERS) for _ in range(20)]
        assert {(reply.status, reply.address) for reply in replies} == {(200, PUBLIC[0])}
        assert stage.loop.dials == [PUBLIC[0]]
        assert await stage.breaches() == []

    on_stage(tmp_path, scenario)


def test_no_denied_address_is_dialled_whatever_stands_beside_it(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        scripts: dict[str, Sequence[Found]] = {}
        for number, address in enumerate(DENIED_ADDRESSES):
            for shape in range(4):
                scripts[f"n{number}-{shape}.{DOMAIN}"] = [answers_with(address, shape)]
        names = Names(scripts)
        async with sender(stage, names) as sending:
            for name in scripts:
                reply = await sending.send(f"https://{name}:{stage.port}/", BODY, HEADERS)
                assert (outcome(reply), reply.address) == ("refused_address", None), scripts[name]
        assert stage.loop.dials == []
        assert stage.requests == []
        assert await stage.breaches() == []

    on_stage(tmp_path, scenario)


def test_public_neighbours_of_denied_networks_are_dialled(tmp_path: Path) -> None:
    """The control of the test above; the scenario has no way out, so each dial fails as one to a dead host."""

    async def scenario(stage: Stage) -> None:
        names = Names({f"n{number}.{DOMAIN}": [[address]] for number, address in enumerate(PUBLIC_ADDRESSES)})
        async with sender(stage, names, UrlRules()) as sending:
            for name in names.scripts:
                # dialled, from where there is no way out: a network without a route, or what stands for it
                assert outcome(await sending.send(f"https://{name}/", BODY, HEADERS)) in ("local", "connect")
        assert stage.loop.dials == PUBLIC_ADDRESSES

    on_stage(tmp_path, scenario)


def test_every_refused_url_is_refused_at_the_attempt_too(tmp_path: Path) -> None:
    """A row that was stored before a rule was made is judged by the rule of today, without a look-up."""

    async def scenario(stage: Stage) -> None:
        names = Names()
        async with sender(stage, names, UrlRules()) as sending:
            for url in REFUSED_URLS:
                assert outcome(await sending.send(url, BODY, HEADERS)) == "refused_url", url
        assert (names.asked, stage.loop.dials) == (Counter(), [])

    on_stage(tmp_path, scenario)


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ([], "dns"),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), "dns"),
        (socket.gaierror(socket.EAI_AGAIN, "no answer"), "dns"),
        (OSError("the resolver is broken"), "dns"),
        (["internal.receiver.example"], "refused_address"),
        (["alias.example", PUBLIC[0]], "refused_address"),
        ([PUBLIC[0], "localhost"], "refused_address"),
        (["127.1"], "refused_address"),
        (["2130706433"], "refused_address"),
        (["0x7f000001"], "refused_address"),
        (["127.0.0.1 "], "refused_address"),
        ([""], "refused_address"),
        (["::ffff:127.0.0.2"], "refused_address"),
        (["::ffff:127.0.0.1", PUBLIC[0]], "refused_address"),
        (["fe80::1%lo"], "refused_address"),
    ],
)
def test_a_resolver_that_answers_badly(found: Found, error: str, tmp_path: Path) -> None:
    """Errors, no address, a name in the place of an address (as from a chain of aliases), and lax spellings."""

    async def scenario(stage: Stage) -> None:
        async with sender(stage, Names({f"hook.{DOMAIN}": [found]})) as sending:
            reply = await sending.send(stage.url(), BODY, HEADERS)
        assert (outcome(reply), reply.address) == (error, None)
        assert (stage.loop.dials, stage.requests) == ([], [])

    on_stage(tmp_path, scenario)


def test_a_resolver_that_takes_ten_seconds_costs_the_budget_of_a_look_up(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        names = Names({f"hook.{DOMAIN}": [PUBLIC]}, delay_s=10)
        async with sender(stage, names, lookup_timeout_s=0.3) as sending:
            replies = await asyncio.gather(*(sending.send(stage.url(), BODY, HEADERS) for _ in range(20)))
        assert {outcome(reply) for reply in replies} == {"dns"}
        assert all(250 <= reply.duration_ms < 9_000 for reply in replies), "of the 10 s that the resolver takes"
        assert stage.loop.dials == []

    on_stage(tmp_path, scenario)


def pointing_to(stage: Stage, canary: str, status: int) -> bytes:
    """An answer that asks in every way it can to go on at the canary."""
    host = f"[{canary}]:{stage.port}" if ":" in canary else f"{canary}:{stage.port}"
    lines = [f"Location: https://{host}/latest/meta-data/", f"Refresh: 0; url=https://{host}/"]
    lines += [f'Alt-Svc: h2="{host}"', f"Link: <https://{host}/>; rel=preload", f"Content-Location: https://{host}/"]
    lines += ["Content-Length: 0", "Connection: close"]
    return "\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode()


def test_redirects_are_never_followed(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        names = Names({f"hook.{DOMAIN}": [PUBLIC]})
        async with sender(stage, names) as sending:
            for status in (*REDIRECTS, 200, 300, 304):
                for canary in CANARIES:
                    stage.answer = pointing_to(stage, canary, status)
                    assert outcome(await sending.send(stage.url(), BODY, HEADERS)) == status
            stage.answer = b"HTTP/1.1 307 X\r\nLocation: /elsewhere\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            assert outcome(await sending.send(stage.url(), BODY, HEADERS)) == 307
        assert await stage.breaches() == []
        assert len(stage.requests) == 8 * len(CANARIES) + 1
        assert all(request.startswith("POST / ") for request in stage.requests)

    on_stage(tmp_path, scenario)


class Unguarded(AbstractResolver):
    """Broken: judges only the first address of an answer, or (`judged_names`) none of a name that was good once."""

    def __init__(self, names: Names, *, judged_names: bool) -> None:
        self._names = names
        self._judged: set[str] | None = set() if judged_names else None

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._names(host)
        if found[0] not in PUBLIC and (self._judged is None or host not in self._judged):
            raise OSError("refused")
        if self._judged is not None:
            self._judged.add(host)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in found
        ]

    async def close(self) -> None:
        """Holds nothing."""


async def post(stage: Stage, resolver: AbstractResolver, url: str, *, follow: bool = False) -> None:
    """One POST as a careless client would make it."""
    connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, ssl=client_tls(stage.authority))
    async with aiohttp.ClientSession(connector=connector) as session:
        try:
            async with session.post(url, data=BODY, allow_redirects=follow) as response:
                await response.read()
        except (aiohttp.ClientError, OSError):
            pass


async def all_canaries_saw_it(stage: Stage) -> None:
    assert await stage.breaches() == sorted(CANARIES)
    assert stage.canary_connections.keys() == set(CANARIES if stage.loop.isolated else ON_LOOPBACK)


def test_a_guard_that_looks_at_the_first_address_only_is_caught(tmp_path: Path) -> None:
    """Negative control. The public address does not answer, so the client goes on to the second one."""

    async def scenario(stage: Stage) -> None:
        stage.silence_public()
        for canary in CANARIES:
            names = Names({f"hook.{DOMAIN}": [[PUBLIC[0], canary]]})
            await post(stage, Unguarded(names, judged_names=False), stage.url())
        await all_canaries_saw_it(stage)

    on_stage(tmp_path, scenario)


def test_a_guard_that_judges_only_when_the_webhook_is_made_is_caught(tmp_path: Path) -> None:
    """Negative control: 500 deliveries to names that turn private, without a second judgement."""

    async def scenario(stage: Stage) -> None:
        names = Names(rebinding_names())
        resolver = Unguarded(names, judged_names=True)
        for name in names.scripts:
            for _ in range(ATTEMPTS):
                await post(stage, resolver, f"https://{name}:{stage.port}/")
        await all_canaries_saw_it(stage)

    on_stage(tmp_path, scenario)


@pytest.mark.parametrize("status", REDIRECTS)
def test_a_client_that_follows_redirects_is_caught(status: int, tmp_path: Path) -> None:
    """Negative control."""

    async def scenario(stage: Stage) -> None:
        resolver = Unguarded(Names({f"hook.{DOMAIN}": [PUBLIC]}), judged_names=False)
        for canary in CANARIES:
            stage.answer = pointing_to(stage, canary, status)
            await post(stage, resolver, stage.url(), follow=True)
        await all_canaries_saw_it(stage)

    on_stage(tmp_path, scenario)
