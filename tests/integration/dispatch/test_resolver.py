"""Look-ups against a real name server: dead names, a dead server, and whose failure each of them is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from name_server import Answer, name_server
from sender_factories import BODY, HEADERS, LOOPBACK, NAME, OK, receiving
from vaultevents.core.errors import LocalFault
from vaultevents.devnet.certificates import Authority
from vaultevents.dispatch.sender import Sender
from vaultevents.egress import Guard
from vaultevents.resolver import LOOKUP_S, MANY_FAILURES, PROBE_S, SystemLookup

pytestmark = pytest.mark.integration

DEAD = 80


def table(name: str) -> Answer:
    if name.startswith("dead"):
        return "silent"
    if name.startswith("failing"):
        return "failure"
    return ("127.0.0.1",) if name in (NAME, "good.example") else "unknown"


@contextlib.asynccontextmanager
async def looking_up(*servers: str) -> AsyncIterator[SystemLookup]:
    lookup = SystemLookup(servers)
    try:
        yield lookup
    finally:
        await lookup.close()


async def outcome(lookup: SystemLookup, name: str) -> str:
    """The addresses that were found, or whose failure it was that there are none."""
    try:
        return " ".join(await lookup(name))
    except LocalFault as fault:
        return fault.kind
    except OSError:
        return "of the name"


async def test_dead_names_do_not_delay_a_good_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with (
        name_server(table) as server,
        looking_up(server.address) as lookup,
        receiving(OK, authority.server(NAME)) as receiver,
        Sender(Guard(LOOPBACK, lookup=lookup), ca_file=authority.ca_path) as sending,
    ):
        urls = [f"https://dead{number}.example:{receiver.port}/" for number in range(DEAD)]
        waiting = [asyncio.create_task(sending.send(url, BODY, HEADERS, url)) for url in urls]
        while len(set(server.asked)) < DEAD:
            await asyncio.sleep(0.01)
        begun_s = time.monotonic()
        reply = await sending.send(receiver.url, BODY, HEADERS, "good")
        assert (reply.status, reply.error) == (200, None)
        assert time.monotonic() - begun_s < LOOKUP_S
        assert {(await attempt).error for attempt in waiting} == {"dns"}, "the resolver works: it is the names' failure"


async def test_a_name_that_does_not_exist_is_a_failure_of_the_name() -> None:
    async with name_server(table) as server, looking_up(server.address) as lookup:
        for _ in range(2 * MANY_FAILURES):
            assert await outcome(lookup, "no-such-name.example") == "of the name"


async def test_a_resolver_that_does_not_answer_is_no_failure_of_a_name() -> None:
    async with name_server(lambda _: "silent") as server, looking_up(server.address) as lookup:
        begun_s = time.monotonic()
        assert await outcome(lookup, "good.example") == "resolver"
        assert time.monotonic() - begun_s < 2 * (LOOKUP_S + PROBE_S)


async def test_a_resolver_that_cannot_be_reached_is_no_failure_of_a_name() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    async with looking_up(address) as lookup:
        assert await outcome(lookup, "good.example") == "resolver"


async def test_a_resolver_that_fails_for_every_name_is_in_trouble_itself() -> None:
    async with name_server(table) as server, looking_up(server.address) as lookup:
        failing = [await outcome(lookup, f"failing{number}.example") for number in range(MANY_FAILURES)]
        assert failing == ["of the name"] * (MANY_FAILURES - 1) + ["resolver"]
        assert await outcome(lookup, "good.example") == "127.0.0.1"
        assert await outcome(lookup, "failing9.example") == "of the name", "the control: another name is found"


async def test_overlapping_look_ups_of_a_name_share_a_query() -> None:
    async with name_server(table) as server, looking_up(server.address) as lookup:
        waiting = [asyncio.create_task(lookup("good.example")) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[1].cancel()  # the deadline of one caller does not end the look-up of the others
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [answer for answer in found if not isinstance(answer, asyncio.CancelledError)] == [["127.0.0.1"]] * 4
        assert server.asked.count("good.example") <= 2, "A, and AAAA where this host has IPv6"


async def test_the_files_of_the_host_are_read() -> None:
    async with name_server(lambda _: "unknown") as server, looking_up(server.address) as lookup:
        assert "127.0.0.1" in await lookup("localhost")
        lines = [line.partition("#")[0].split() for line in Path("/etc/hosts").read_text().splitlines()]
        for address, name, *_ in filter(None, lines):
            if ":" not in address:
                assert address in await lookup(name)
        assert await outcome(lookup, "not-in-the-file.example") == "of the name"
