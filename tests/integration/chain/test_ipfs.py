"""Report files over real sockets, from gateways that fail in every way."""

from __future__ import annotations

import re
import stat
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from timeouts import WAIT_TIMEOUT_S
from vaultevents.chain.ipfs import IpfsClient, IpfsLimits
from vaultevents.core import reports
from vaultevents.core.cid import matches, parse_cid
from vaultevents.core.errors import InputError, NodeFault, SourceUnavailable
from vaultevents.core.logs import Log
from vaultevents.core.units import Address, Hash32
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.acts import REPORT_TOPIC
from vaultevents.devnet.certificates import issue
from vaultevents.devnet.gateway import Gateway, Trouble
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.unixfs import cid_of
from vaultevents.egress import Guard

pytestmark = pytest.mark.integration

FILE = b'{"format": "standard-v1", "padding": "' + b"x" * 300_000 + b'"}'
OTHER = b'{"format": "standard-v1"}'
CID, OTHER_CID = cid_of(FILE), cid_of(OTHER)
QUICK = IpfsLimits(connect_s=1.0, attempt_s=1.0, gateway_s=3.0, retry_wait_s=0.0)
NOWHERE = UrlRules()
LOOPBACK = UrlRules(allow=(parse_allow("127.0.0.1/32:*"),))


def check_of(cid: str) -> Callable[[bytes], None]:
    def check(content: bytes) -> None:
        if not matches(parse_cid(cid), content):
            raise ValueError("the bytes have another CID")

    return check


def check_report(announced: reports.ReportLog, content: bytes) -> None:
    reports.read_report(content, announced)


@asynccontextmanager
async def running(*gateways: Gateway) -> AsyncIterator[list[str]]:
    urls = [await gateway.start() for gateway in gateways]
    try:
        yield urls
    finally:
        for gateway in gateways:
            await gateway.stop()


def client(urls: Sequence[str], rules: UrlRules = NOWHERE, limits: IpfsLimits = QUICK, **options: Any) -> IpfsClient:
    return IpfsClient(urls, guard=Guard(rules), limits=limits, **options)


def good(*also: bytes) -> Gateway:
    return Gateway({cid_of(content): content for content in (FILE, OTHER, *also)})


@pytest.mark.parametrize(
    "form, asked",
    [
        ("{}", "/ipfs/{}"),
        ("{}/", "/ipfs/{}"),
        ("{}/ipfs", "/ipfs/{}"),
        ("{}/ipfs/{{cid}}", "/ipfs/{}"),
        ("{}/ipfs/{{cid}}?token=a%2Bb", "/ipfs/{}?token=a%2Bb"),
        ("{}?token=abc", "/ipfs/{}?token=abc"),
        ("kubo+{}", "/api/v0/cat?arg={}"),
    ],
)
async def test_a_file_comes_from_each_form_of_gateway(form: str, asked: str) -> None:
    gateway = good()
    async with running(gateway) as [url], client([form.format(url)]) as ipfs:
        assert await ipfs.fetch(CID, check_of(CID)) == FILE
        assert gateway.paths == [asked.format(CID)]
        assert ipfs.counters.requests == 1


REASONS = {
    Trouble.MISSING: "does not have the file (HTTP status 404)",
    Trouble.HTTP_429: "limits the rate of requests for 60 s",
    Trouble.HTTP_500: "HTTP status 500",
    Trouble.HANG: "gives no whole file within 1 s",
    Trouble.DRIP: "gives no whole file within 1 s",
    Trouble.HTML: "answers with a web page instead of the file",
    Trouble.TRUNCATED: f"gives {len(FILE) // 2} bytes that are not the file: the bytes have another CID",
    Trouble.CUT_OFF: "breaks off in the middle of the file",
    Trouble.WRONG_FILE: f"gives {len(OTHER)} bytes that are not the file: the bytes have another CID",
    Trouble.ENDLESS: "its answer is more than 33554432 bytes",
    Trouble.GZIP_BOMB: "compresses its answers although it was asked not to",
    Trouble.REDIRECT: "redirects to a place that is not allowed: "
    "127.0.0.1 at port 443 is not a public address: the operator has to allow it first",
}
PATIENT = IpfsLimits(attempt_s=20.0, retry_wait_s=0.0)
LIMITS = {Trouble.ENDLESS: PATIENT}


def troubled(trouble: Trouble) -> Gateway:
    gateway = good()
    gateway.trouble = trouble
    gateway.redirect_to = f"https://127.0.0.1/ipfs/{CID}"
    return gateway


@pytest.mark.parametrize("trouble", Trouble)
async def test_a_hostile_answer_sends_us_to_the_next_gateway_soon_and_without_filling_the_memory(
    trouble: Trouble,
) -> None:
    bad, next_one = troubled(trouble), good()
    async with running(bad, next_one) as urls, client(urls, limits=LIMITS.get(trouble, QUICK)) as ipfs:
        began_s = time.monotonic()
        tracemalloc.start()
        try:
            assert await ipfs.fetch(CID, check_of(CID)) == FILE
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert bad.calls[CID] in (1, 2)
        assert next_one.calls[CID] == 1
        assert peak_bytes < 64 * 2**20
        assert time.monotonic() - began_s < WAIT_TIMEOUT_S


@pytest.mark.parametrize("trouble", Trouble)
async def test_the_reason_of_each_gateway_is_reported_without_its_url(trouble: Trouble) -> None:
    bad = [troubled(trouble), troubled(Trouble.MISSING)]
    async with (
        running(*bad) as urls,
        client([f"{url}?key=s3cr3t-k3y" for url in urls], limits=LIMITS.get(trouble, QUICK)) as ipfs,
    ):
        with pytest.raises(SourceUnavailable) as reported:
            await ipfs.fetch(CID, check_of(CID))
    first, second = str(reported.value).removeprefix("all 2 nodes: none could answer: ").split("; ")
    for line, reason in ((first, REASONS[trouble]), (second, REASONS[Trouble.MISSING])):
        assert re.fullmatch(rf"http://127\.0\.0\.1#[0-9a-f]{{8}}: {re.escape(reason)}", line)
    assert reported.value.__context__ is None  # aiohttp's own exceptions carry the URL


async def test_the_control_of_the_memory_sees_a_body_that_is_read_without_the_cap() -> None:
    limits = IpfsLimits(file_bytes=80 * 2**20, retry_wait_s=0.0)
    async with running(troubled(Trouble.ENDLESS)) as urls, client(urls, limits=limits) as ipfs:
        tracemalloc.start()
        try:
            with pytest.raises(SourceUnavailable, match="more than 83886080 bytes"):
                await ipfs.fetch(CID, check_of(CID))
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes > 64 * 2**20


async def test_the_largest_file_costs_little_more_than_itself_and_one_byte_more_is_refused() -> None:
    size = 4 * 2**20
    limits = IpfsLimits(file_bytes=size, attempts=1)
    largest, larger = b"a" * size, b"b" * (size + 1)
    async with running(good(largest, larger)) as urls, client(urls, limits=limits) as ipfs:
        tracemalloc.start()
        try:
            assert len(await ipfs.fetch(cid_of(largest), check_of(cid_of(largest)))) == size
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 2 * size  # under twice, though the server's part of it is counted too
        with pytest.raises(SourceUnavailable, match=f"more than {size} bytes"):
            await ipfs.fetch(cid_of(larger), check_of(cid_of(larger)))


async def test_an_unreachable_gateway_is_passed_over_and_then_comes_last() -> None:
    gone, there = good(), good()
    async with running(gone, there) as urls:
        await gone.stop()
        async with client(urls) as ipfs:
            await ipfs.fetch(CID, check_of(CID))
            before = ipfs.counters.requests
            assert await ipfs.fetch(OTHER_CID, check_of(OTHER_CID)) == OTHER
            assert ipfs.counters.requests == before + 1


async def test_a_passing_fault_is_asked_again_at_the_same_gateway() -> None:
    gateway = troubled(Trouble.HTTP_500)
    async with running(gateway) as urls, client(urls, limits=IpfsLimits(attempts=2, retry_wait_s=0.0)) as ipfs:
        with pytest.raises(SourceUnavailable, match="HTTP status 500"):
            await ipfs.fetch(CID, check_of(CID))
        assert gateway.calls[CID] == 2


async def test_all_attempts_together_have_a_deadline_too() -> None:
    limits = IpfsLimits(attempt_s=5.0, gateway_s=0.2)
    async with running(troubled(Trouble.HANG)) as urls, client(urls, limits=limits) as ipfs:
        with pytest.raises(SourceUnavailable, match=r"gives no whole file within 0\.2 s"):
            await ipfs.fetch(CID, check_of(CID))


async def test_every_report_of_a_simulation_arrives_and_passes_the_checks_of_the_core() -> None:
    simulation = Simulation(3, report_every=3)
    simulation.history(60)
    read = 0
    async with running(Gateway(simulation.report_files)) as urls, client(urls) as ipfs:
        for placed in simulation.chain.logs(0, 60, [REPORT_TOPIC]):
            one = placed.log
            log = Log(
                Address(one.address),
                tuple(map(Hash32, one.topics)),
                one.data,
                placed.block.number,
                Hash32(placed.block.hash),
                Hash32(placed.tx_hash),
                placed.log_index,
            )
            announced = reports.decode(log, placed.block.timestamp_s)
            assert isinstance(announced, reports.ReportLog)
            if not announced.is_empty:
                await ipfs.fetch(announced.cid, partial(check_report, announced))
                read += 1
    assert read > 15


# Redirects


@asynccontextmanager
async def redirecting(tmp_path: Path) -> AsyncIterator[tuple[str, Gateway, Gateway, Path]]:
    """A gateway that redirects to another one, which speaks TLS."""
    ca_path, tls = issue(tmp_path)
    target = Gateway({CID: FILE}, tls)
    first = troubled(Trouble.REDIRECT)
    async with running(first, target) as (url, target_url):
        first.redirect_to = f"{target_url}/ipfs/{CID}"
        yield url, first, target, ca_path


async def test_a_redirect_to_an_allowed_place_is_followed(tmp_path: Path) -> None:
    async with redirecting(tmp_path) as (url, _, target, ca_path):
        async with client([url], LOOPBACK, ca_file=ca_path) as ipfs:
            assert await ipfs.fetch(CID, check_of(CID)) == FILE
        assert target.calls[CID] == 1


@pytest.mark.parametrize(
    "place",
    [
        "https://127.0.0.1:{port}/ipfs/x",
        "//127.0.0.1:{port}/ipfs/x",
        "http://127.0.0.1:{port}/ipfs/x",
        "https://localhost:{port}/ipfs/x",
        "https://gateway.example/ipfs/x",  # a public name for a private address
        "https://user:pw@127.0.0.1:{port}/",
        "https://[::1]:{port}/",
        "https://[broken",
        "file:///etc/passwd",
        "",
    ],
)
async def test_a_redirect_to_a_private_place_is_not(tmp_path: Path, place: str) -> None:
    async def private(_: str) -> list[str]:
        return ["127.0.0.1"]

    async with redirecting(tmp_path) as (url, first, target, ca_path):
        port = int(first.redirect_to.split(":")[2].split("/")[0])
        first.redirect_to = place.format(port=port)
        async with IpfsClient([url], guard=Guard(NOWHERE, lookup=private), limits=QUICK, ca_file=ca_path) as ipfs:
            with pytest.raises(SourceUnavailable, match="redirects to a place that is not allowed"):
                await ipfs.fetch(CID, check_of(CID))
        assert target.paths == []
        assert len(first.paths) == 1


async def test_redirects_end_after_three(tmp_path: Path) -> None:
    async with redirecting(tmp_path) as (url, first, target, ca_path):
        target.trouble, target.redirect_to = Trouble.REDIRECT, first.redirect_to
        async with client([url], LOOPBACK, ca_file=ca_path) as ipfs:
            with pytest.raises(SourceUnavailable, match="redirects more than 3 times"):
                await ipfs.fetch(CID, check_of(CID))
        assert target.calls[CID] == 3


async def test_a_kubo_node_that_redirects_is_not_followed(tmp_path: Path) -> None:
    async with redirecting(tmp_path) as (url, _, target, ca_path):
        async with client([f"kubo+{url}"], LOOPBACK, ca_file=ca_path) as ipfs:
            with pytest.raises(SourceUnavailable, match="HTTP status 302"):
                await ipfs.fetch(CID, check_of(CID))
        assert target.paths == []


# The cache


async def test_a_cached_file_needs_no_gateway(tmp_path: Path) -> None:
    cache = tmp_path / "reports"
    gateway = good()
    async with running(gateway) as urls, client(urls, cache_dir=cache) as ipfs:
        await ipfs.fetch(CID, check_of(CID))
        await gateway.stop()
        assert await ipfs.fetch(CID, check_of(CID)) == FILE
    assert gateway.calls[CID] == 1
    assert [path.name for path in cache.iterdir()] == [CID]
    assert stat.S_IMODE((cache / CID).stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", [b"", FILE[:-1], OTHER])
async def test_a_damaged_cached_file_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / CID).write_bytes(damage)
    gateway = good()
    async with running(gateway) as urls, client(urls, cache_dir=tmp_path) as ipfs:
        assert await ipfs.fetch(CID, check_of(CID)) == FILE
    assert gateway.calls[CID] == 1
    assert (tmp_path / CID).read_bytes() == FILE


async def test_a_damaged_cached_file_is_removed_even_when_no_gateway_has_it(tmp_path: Path) -> None:
    (tmp_path / CID).write_bytes(OTHER)
    async with running(troubled(Trouble.MISSING)) as urls, client(urls, cache_dir=tmp_path) as ipfs:
        with pytest.raises(SourceUnavailable):
            await ipfs.fetch(CID, check_of(CID))
    assert list(tmp_path.iterdir()) == []


async def test_what_is_not_the_file_is_never_cached(tmp_path: Path) -> None:
    async with running(troubled(Trouble.WRONG_FILE)) as urls, client(urls, cache_dir=tmp_path) as ipfs:
        with pytest.raises(NodeFault):
            await ipfs.fetch(CID, check_of(CID))
    assert list(tmp_path.iterdir()) == []


async def test_a_cache_that_cannot_be_written_does_not_cost_the_file(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    async with running(good()) as urls, client(urls, cache_dir=in_the_way) as ipfs:
        assert await ipfs.fetch(CID, check_of(CID)) == FILE


# What must not get into a URL


@pytest.mark.parametrize(
    "text",
    [
        "",
        "../../etc/passwd",
        CID[:40] + "../../",
        CID + "/../" + CID,
        CID + "?format=car",
        CID + "#x",
        CID + "&arg=" + OTHER_CID,
        CID + "%2e%2e",
        CID + "\n",
        CID[:-1] + "{",
        CID[:-1] + "ſ",
        CID[:-1] + "１",
        "Q" * 129,
    ],
)
async def test_only_letters_and_digits_reach_a_url_or_a_path(tmp_path: Path, text: str) -> None:
    gateway = good()
    async with running(gateway) as [url], client([url, f"kubo+{url}"], cache_dir=tmp_path / "cache") as ipfs:
        with pytest.raises(InputError, match="not a CID"):
            await ipfs.fetch(text, check_of(CID))
    assert gateway.paths == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["", "gateway.example", "ftp://gateway.example", "https://{cid}.gateway.example", "https://a.example/#x"]
)
def test_a_gateway_that_cannot_be_asked_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        client([url])


def test_no_gateway_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="name at least one"):
        client([])
