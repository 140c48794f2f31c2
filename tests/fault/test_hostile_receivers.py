"""Hostile receivers: each costs an attempt of bounded time and memory, and what is kept of it is true (rule T3)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import psutil
import pytest
from structlog.testing import capture_logs

from dispatch_factories import bodies, dispatching, subscribe, until
from embedded_user import postmaster, supervisor
from store_factories import KEY, assert_ledger, commit, funding, rows, simple_simulation, values, webhook
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.webhook_health import Parking
from vaultevents.core.webhooks import UrlRules, parse_allow
from vaultevents.devnet.hostile import ANSWERS, BAD_TLS, CANARY, OK, Answer, Hostile, HostileReceivers, saying, status
from vaultevents.devnet.receivers import Receivers
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import DeliveryLane, DispatchOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.egress import Guard
from vaultevents.store import deliveries
from vaultevents.store.clock import ServiceClock
from vaultevents.store.deliveries import Claim, ClaimRequest, Settled, Settlement, settle_and_claim
from vaultevents.store.pool import Database, open_database
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress

pytestmark = pytest.mark.fault

LOOPBACK = UrlRules(allow=(parse_allow("127.0.0.0/8:*"),))
MEMORY_BYTES = 20 * 2**20
CONNECT_S, TOTAL_S = 0.8, 1.4

# What one attempt comes to, by receiver; those with a choice depend on what the client had parsed by then.
OUTCOMES: dict[str, set[int | str]] = {
    "hangs before headers": {"timeout"},
    "hangs inside headers": {"timeout"},
    "drips headers": {"timeout"},
    "drips a body": {200},
    "streams a gigabyte": {200},
    "streams chunks without end": {200},
    "gzip bomb": {200},
    "headers without end": {"protocol"},
    "a million headers": {"protocol"},
    "a header line without end": {"protocol"},
    "interim answers without end": {"timeout", "protocol"},
    "redirects to metadata": {302},
    "resets after reading": {"reset"},
    "closes when idle": {200},
    "closes at the second request": {200},
    "broken chunks": {200},
    "sets a cookie": {200},
    "echoes a secret": {500},
    "speaks no HTTP": {"protocol"},
    "is gone": {410},
    "certificate expired": {"tls"},
    "certificate of another host": {"tls"},
    "certificate self-signed": {"tls"},
    "TLS 1.1 only": {"tls"},
    "plain HTTP": {"tls"},
    "handshake without end": {"connect_timeout"},
    "accepts and says nothing": {"connect_timeout"},
}


@pytest.fixture
async def hostile(tmp_path: Path) -> AsyncIterator[HostileReceivers]:
    receivers = HostileReceivers(tmp_path)
    yield receivers
    await receivers.stop()


async def start(receivers: HostileReceivers, name: str) -> Hostile:
    return await receivers.start(ANSWERS.get(name, saying(OK)), BAD_TLS.get(name, "good"))


def sender(receivers: HostileReceivers) -> Sender:
    guard = Guard(LOOPBACK)
    return Sender(guard, ca_file=receivers.ca_path, connect_timeout_s=CONNECT_S, total_timeout_s=TOTAL_S)


@asynccontextmanager
async def measured() -> AsyncIterator[list[int]]:
    """How much this process, receivers and all, grew meanwhile: samples in bytes."""
    process = psutil.Process()
    before = process.memory_info().rss
    samples: list[int] = [0]

    async def sample() -> None:
        while True:
            samples.append(process.memory_info().rss - before)
            await asyncio.sleep(0.005)

    sampling = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        sampling.cancel()


def test_every_hostile_receiver_has_its_outcome() -> None:
    assert OUTCOMES.keys() == ANSWERS.keys() | BAD_TLS.keys()


@pytest.mark.parametrize("name", OUTCOMES)
async def test_an_attempt_is_bounded_and_reports_the_truth(name: str, hostile: HostileReceivers) -> None:
    receiver, healthy = await start(hostile, name), await hostile.start(saying(OK))
    async with sender(hostile) as sending:
        await sending.send(healthy.url, b"{}", {})
        async with measured() as growth:
            reply = await sending.send(receiver.url, b"{}", {"webhook-id": "a"})
        assert (reply.status or reply.error) in OUTCOMES[name]
        assert (reply.status is None) != (reply.error is None)
        assert reply.duration_ms < (TOTAL_S + 1) * 1000
        assert max(growth) < MEMORY_BYTES
        assert reply.address == "127.0.0.1" or (name in BAD_TLS and reply.address is None)
        assert len(receiver.requests) == (name in ANSWERS), "nothing is sent before the receiver has proved who it is"
        assert len(reply.excerpt) <= 256
        assert reply.excerpt.isprintable()
        assert (await sending.send(healthy.url, b"{}", {})).status == 200


async def test_a_client_that_reads_on_would_be_seen(hostile: HostileReceivers) -> None:
    """Negative control of the measurement."""
    receiver = await start(hostile, "streams a gigabyte")
    port = int(receiver.url.split(":")[2].split("/")[0])
    tls = ssl.create_default_context(cafile=str(hostile.ca_path))
    async with measured() as growth:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        kept = await reader.readexactly(2 * MEMORY_BYTES)
        await asyncio.sleep(0.02)
        assert len(kept) == 2 * MEMORY_BYTES
    writer.transport.abort()
    assert max(growth) > MEMORY_BYTES


async def test_a_stale_connection_costs_at_most_its_own_attempt(hostile: HostileReceivers) -> None:
    idle, abrupt = await start(hostile, "closes when idle"), await start(hostile, "closes at the second request")
    async with sender(hostile) as sending:
        for _ in range(3):
            assert (await sending.send(idle.url, b"{}", {})).status == 200
            await asyncio.sleep(0.15)
        replies = [await sending.send(abrupt.url, b"{}", {}) for _ in range(3)]
    assert [reply.status or reply.error for reply in replies] == [200, "reset", 200]
    assert len(abrupt.requests) == 3, "a request that may have arrived is never sent again by the client itself"


async def test_cookies_are_never_sent_back(hostile: HostileReceivers) -> None:
    baker, other = await start(hostile, "sets a cookie"), await hostile.start(saying(OK))
    async with sender(hostile) as sending:
        for receiver in (baker, baker, other):
            await sending.send(receiver.url, b"{}", {})
    heads = [head for head, _ in (*baker.requests, *other.requests)]
    assert len(heads) == 3
    assert not any(b"cookie" in head.lower() or CANARY.encode() in head for head in heads)


SOON_S = 120
DAY_S = 86_400


def hints(now: datetime) -> dict[str, tuple[list[str], set[int]]]:
    """Spellings of Retry-After, and the seconds for which each parks its webhook."""
    soon = now + timedelta(seconds=SOON_S)
    values_and_seconds: dict[str, int] = {
        str(SOON_S): SOON_S,
        "000120": SOON_S,
        "   120  ": SOON_S,
        format_datetime(soon, usegmt=True): SOON_S,
        soon.strftime("%A, %d-%b-%y %H:%M:%S GMT"): SOON_S,
        soon.strftime("%a %b %e %H:%M:%S %Y"): SOON_S,
        "86400": DAY_S,
        "86401": 0,
        "9" * 5000: 0,
        format_datetime(now + timedelta(days=9000), usegmt=True): 0,
        format_datetime(now - timedelta(days=1), usegmt=True): 0,
        **dict.fromkeys(("-120", "+120", "1.5", "120.0", "1e3", "0x78", "120s", "120, 240", "soon", "NaN", "inf"), 0),
        **dict.fromkeys(("", "0", "\uff11\uff12\uff10", "2099-01-01T00:00:00Z", "Fri, 31 Feb 2099 00:00:00 GMT"), 0),
    }
    spelled: dict[str, tuple[list[str], set[int]]] = {
        text: ([f"Retry-After: {text}"], {seconds}) for text, seconds in values_and_seconds.items()
    }
    spelled["twice"] = (["Retry-After: 120", "Retry-After: 600"], {0, 120, 600})
    spelled["none"] = ([], {0})
    return spelled


@asynccontextmanager
async def running(database: Database, receivers: HostileReceivers, options: DispatchOptions) -> AsyncIterator[None]:
    async with sender(receivers) as sending:
        clock = ServiceClock(await database.now())
        lane = DeliveryLane(database, Signer({KEY.id: KEY}), options, random.Random(1))
        sends = Dispatcher(lane, sending, clock)
        stop = asyncio.Event()
        task = asyncio.create_task(sends.run(stop))
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(task, WAIT_TIMEOUT_S)
    await assert_ledger(database)


LEFT = """
select d.webhook_id, d.state, a.status, a.error, a.duration_ms, a.excerpt, a.address, a.number, w.active,
    coalesce(extract(epoch from w.paused_until - a.started_at), 0)::float8 as paused_s,
    extract(epoch from q.due_at - a.started_at)::float8 as due_s,
    exists (select from leases l where l.webhook_id = d.webhook_id) as leased
from deliveries d join attempts a on a.delivery_id = d.id join webhooks w on w.id = d.webhook_id
    left join queue q on q.delivery_id = d.id
"""


async def test_all_at_once_cost_a_dispatcher_its_attempts_and_nothing_else(
    database: Database, hostile: HostileReceivers
) -> None:
    """Fewer slots than receivers that hang: that all are attempted in time shows that each slot is freed."""
    box = await simple_simulation(database)
    named: dict[str, str] = {}
    for name in OUTCOMES:
        named[(await webhook(database, url=(await start(hostile, name)).url)).id] = name
    hinted: dict[str, tuple[int, str, set[int]]] = {}
    for text, (lines, seconds) in hints(datetime.now(UTC)).items():
        for code in (429, 503, 500):
            answer: Answer = saying(status(f"{code} X", *lines))
            made = await webhook(database, url=(await hostile.start(answer)).url)
            hinted[made.id] = (code, text, seconds if code != 500 else {0})
    options = DispatchOptions(schedule_s=(60,), concurrency=6, poll_s=0.2, parking=Parking(after=10**9))
    with capture_logs() as logs:
        async with running(database, hostile, options):
            await commit(box, funding(1))
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while len(await values(database, "select 1 from attempts")) < len(named) + len(hinted):
                    await asyncio.sleep(0.05)
    left = {row["webhook_id"]: row for row in await rows(database, LEFT)}
    assert left.keys() == named.keys() | hinted.keys()
    assert all(row["number"] == 1 and not row["leased"] for row in left.values())
    for webhook_id, name in named.items():
        check_named(name, left[webhook_id])
    for webhook_id, (code, text, seconds) in hinted.items():
        row = left[webhook_id]
        assert row["status"] == code
        assert any(second - 15 <= row["paused_s"] <= second + 15 for second in seconds), (code, text, row["paused_s"])
        assert row["due_s"] > 55, "a hint can only push later"
        assert row["due_s"] >= row["paused_s"] - 2, (code, text)
    assert CANARY not in repr(logs)
    holders = {one for one, row in left.items() if CANARY in repr(row)}
    assert {named[holder] for holder in holders} == {"echoes a secret"}, "only its own excerpt has it"


def check_named(name: str, row: dict[str, Any]) -> None:
    outcome = row["status"] or row["error"]
    assert outcome in OUTCOMES[name], name
    assert row["duration_ms"] < (TOTAL_S + 1) * 1000, name
    assert row["address"] == "127.0.0.1" or (name in BAD_TLS and row["address"] is None), name
    state = "delivered" if outcome == 200 else "parked" if outcome == 410 else "scheduled"
    assert (row["state"], row["active"]) == (state, outcome != 410), name
    if outcome == 302:
        assert row["excerpt"] == ""


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServerAddress]]:
    """A server that may be killed: where it lies, and how to reach it."""
    directory = tmp_path_factory.mktemp("hostile") / "db"
    with EmbeddedPostgres(directory) as address:
        yield directory, address


async def restarted(directory: Path, _database: Database) -> None:
    postmaster(directory).kill()


async def gone(directory: Path, _database: Database) -> None:
    keeper = supervisor(directory)
    keeper.suspend()
    try:
        postmaster(directory).kill()
        await asyncio.sleep(3)
    finally:
        keeper.resume()


async def read_only(_directory: Path, database: Database) -> None:
    async with database.statement() as connection:
        await connection.execute("alter system set default_transaction_read_only = on")
        await connection.execute("select pg_reload_conf()")
    await asyncio.sleep(2)
    async with database.statement() as connection:
        await connection.execute("alter system reset default_transaction_read_only")
        await connection.execute("select pg_reload_conf()")


Trouble = Callable[[Path, Database], Awaitable[None]]


async def outlast(trouble: Trouble, own_server: tuple[Path, ServerAddress], tmp_path: Path) -> None:
    """Deliveries go on through the trouble, which no lease is too short for: so nothing may be posted twice."""
    directory, address = own_server
    receivers = Receivers(tmp_path)
    await receivers.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(receivers.stop)
        database = await open_database(address.connect_kwargs(), schema=f"t_{uuid4().hex}")
        stack.push_async_callback(database.close)
        box = await simple_simulation(database)
        hook = await subscribe(database, receivers, "hook")
        await commit(box, *(funding(number) for number in range(300)))
        async with dispatching(database, receivers.ca_path, concurrency=4, lease_s=8, total_timeout_s=3):
            await hook.arrivals(30)
            await trouble(directory, database)
            assert len(hook.ledger) < 300, "there was something left to do"
            await until(database, {"delivered": 300})
        stored = await bodies(database)
        assert {request.webhook_id: request.body for request in hook.accepted} == stored
        again = Counter(request.webhook_id for request in hook.ledger) - Counter(stored.keys())
        assert not again, f"posted again: {again}"
        recorded = await rows(database, "select status, error, count(*)::int as n from attempts group by 1, 2")
        assert recorded == [{"status": 200, "error": None, "n": 300}]


@pytest.mark.parametrize("trouble", [restarted, gone, read_only])
async def test_what_receivers_answered_while_the_database_was_away_is_kept(
    trouble: Trouble, own_server: tuple[Path, ServerAddress], tmp_path: Path
) -> None:
    await outlast(trouble, own_server, tmp_path)


SettleAndClaim = Callable[..., Awaitable[tuple[Settled | None, Claim]]]


async def forgets(
    database: Database, accepted: list[Settlement], request: ClaimRequest
) -> tuple[Settled | None, Claim]:
    """As if what could not be stored had been."""
    try:
        return await settle_and_claim(database, accepted, request)
    except DatabaseUnavailable:
        return Settled(len(accepted)), Claim()


async def takes_for_lost(
    database: Database, accepted: list[Settlement], request: ClaimRequest
) -> tuple[Settled | None, Claim]:
    """As if nobody knew what the receiver had answered."""
    try:
        return await settle_and_claim(database, accepted, request)
    except DatabaseUnavailable:
        unknown = {"state": "scheduled", "status": None, "error": "timeout"}
        accepted[:] = [msgspec.structs.replace(one, **unknown) for one in accepted]
        return None, Claim()


@pytest.mark.parametrize(
    ("trouble", "broken"), [(restarted, forgets), (gone, takes_for_lost), (read_only, takes_for_lost)]
)
async def test_answers_that_do_not_outlast_the_trouble_are_missed(
    trouble: Trouble,
    broken: SettleAndClaim,
    own_server: tuple[Path, ServerAddress],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control of the scenarios above."""
    monkeypatch.setattr(deliveries, "settle_and_claim", broken)
    with pytest.raises(AssertionError, match="posted again"):
        await outlast(trouble, own_server, tmp_path)
