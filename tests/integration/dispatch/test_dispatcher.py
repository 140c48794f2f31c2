"""The dispatcher with the real sender against real TLS receivers: what arrives, when, how often, and what is kept."""

from __future__ import annotations

import asyncio
import hmac
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from aiohttp import web

from dispatch_factories import bodies, dispatching, subscribe, until
from store_factories import (
    assert_delivered,
    commit,
    funding,
    own_database,
    rows,
    shift_clock,
    simple_simulation,
    states,
    values,
    webhook,
)
from timeouts import WAIT_TIMEOUT_S
from vaultevents.devnet.certificates import issue
from vaultevents.devnet.loopback import LoopbackServer
from vaultevents.devnet.receivers import (
    GONE,
    Answer,
    Hang,
    Receivers,
    Reply,
    Reset,
    always,
    flaky,
    in_turn,
    per_event,
    redirect,
    retry_after,
)
from vaultevents.dispatch import attempts
from vaultevents.store import deliveries, outbox
from vaultevents.store.deliveries import Claim, ClaimRequest, claim
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.integration


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    server = Receivers(tmp_path)
    await server.start()
    yield server
    await server.stop()


async def test_what_arrives_is_the_stored_row_signed_for_its_receiver(
    any_database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(any_database)
    hooks = [await subscribe(any_database, receivers, name) for name in ("one", "two")]
    async with dispatching(any_database, receivers.ca_path, plain_header="x-signature"):
        await commit(box, *(funding(number) for number in range(20)))
        await until(any_database, {"delivered": 40})
    for hook in hooks:
        assert {request.webhook_id: request.body for request in hook.accepted} == await bodies(any_database)
        assert len(hook.ledger) == 20
        assert all(request.verified for request in hook.ledger)
        for request in hook.ledger:
            assert request.headers["content-type"] == "application/json"
            assert request.headers["x-vaultevents-attempt"] == "1"
            assert abs(int(request.headers["webhook-timestamp"]) - time.time()) < 30
            assert hook.secret is not None
            assert request.headers["x-signature"] == hmac.digest(hook.secret.encode(), request.body, "sha256").hex()
    assert receivers.unexpected == []
    attempts = await rows(any_database, "select distinct status, error, address, number from attempts")
    assert attempts == [{"status": 200, "error": None, "address": "127.0.0.1", "number": 1}]


async def test_a_failure_is_tried_again_by_schedule_with_the_same_id_and_body(
    any_database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(any_database)
    hook = await subscribe(any_database, receivers, "flaky", per_event(Reply(500), Reset(), Reply(204)))
    async with dispatching(any_database, receivers.ca_path, schedule_s=(0.3, 0.5)):
        await commit(box, funding(1))
        await until(any_database, {"delivered": 1})
    first, second, third = hook.ledger
    assert {(request.webhook_id, request.body) for request in hook.ledger} == set((await bodies(any_database)).items())
    assert [request.headers["x-vaultevents-attempt"] for request in hook.ledger] == ["1", "2", "3"]
    assert all(request.verified for request in hook.ledger)
    assert second.at_s - first.at_s >= 0.3
    assert third.at_s - second.at_s >= 0.5
    attempts = await rows(any_database, "select status, error from attempts order by number")
    assert [tuple(attempt.values()) for attempt in attempts] == [(500, None), (None, "reset"), (204, None)]


async def test_after_the_last_delay_a_delivery_is_exhausted(any_database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(any_database)
    hook = await subscribe(any_database, receivers, "broken", always(Reply(503, body=b"out of order")))
    async with dispatching(any_database, receivers.ca_path):
        await commit(box, funding(1), funding(2))
        await until(any_database, {"exhausted": 2})
        await asyncio.sleep(0.3)
    assert Counter(request.webhook_id for request in hook.ledger) == Counter(
        dict.fromkeys(await bodies(any_database), 4)
    )
    assert set(await values(any_database, "select excerpt from attempts")) == {"out of order"}


async def test_a_receiver_that_answers_410_is_left_alone(any_database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(any_database)
    hook = await subscribe(any_database, receivers, "gone", always(GONE))
    other = await subscribe(any_database, receivers, "other")
    async with dispatching(any_database, receivers.ca_path, concurrency=1):
        await commit(box, *(funding(number) for number in range(5)))
        await until(any_database, {"parked": 5, "delivered": 5})
        await commit(box, funding(5))
        await until(any_database, {"parked": 5, "delivered": 6})
    assert len(hook.ledger) == 1
    assert len(other.accepted) == 6


async def test_a_receiver_that_asks_for_a_pause_gets_it_for_everything(
    any_database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(any_database)
    hook = await subscribe(any_database, receivers, "busy", in_turn(retry_after("1"), Reply()))
    other = await subscribe(any_database, receivers, "other")
    async with dispatching(any_database, receivers.ca_path, concurrency=1):
        await commit(box, funding(1), funding(2))
        await hook.arrivals(1)
        await until(any_database, {"delivered": 2, "scheduled": 2})
        await commit(box, funding(3))
        await until(any_database, {"delivered": 6})
    assert [request.at_s - hook.ledger[0].at_s >= 1 for request in hook.ledger] == [False, True, True, True]
    assert len(other.accepted) == 3


async def test_flaky_receivers_get_everything_in_the_end(any_database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(any_database)
    failures: list[Answer] = [Reply(500), Reset(), Reply(404), redirect("https://127.0.0.1/")]
    hooks = [
        await subscribe(any_database, receivers, f"hook-{n}", flaky(n, 0.3, answer))
        for n, answer in enumerate(failures)
    ]
    async with dispatching(any_database, receivers.ca_path, schedule_s=(0.02,) * 15):
        for number in range(0, 60, 10):
            await commit(box, *(funding(number + index) for index in range(10)))
        await until(any_database, {"delivered": 240})
    for hook in hooks:
        assert len(hook.ledger) > len(hook.accepted) == 60
        assert {request.webhook_id: request.body for request in hook.accepted} == await bodies(any_database)
        assert hook.bad_signatures == 0
    assert receivers.unexpected == []


async def test_a_receiver_that_hangs_stops_no_other(any_database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(any_database)
    hanging = await subscribe(any_database, receivers, "hanging", always(Hang()))
    healthy = await subscribe(any_database, receivers, "healthy")
    async with dispatching(any_database, receivers.ca_path, total_timeout_s=3, schedule_s=(60,), concurrency=30):
        await commit(box, *(funding(number) for number in range(10)))
        await hanging.arrivals(10)
        for number in range(10, 20):
            await commit(box, funding(number))
            await healthy.arrivals(number + 1, timeout_s=5)
        assert set(await values(any_database, "select status from attempts")) == {200}  # all of the others still hang
    assert await states(any_database) == {"scheduled": 20, "delivered": 20}
    kept = await rows(any_database, "select status, error, count(*)::int as n from attempts group by 1, 2 order by 1")
    assert [tuple(item.values()) for item in kept] == [(200, None, 20), (None, "timeout", 20)]


async def test_deliveries_are_signed_with_the_time_of_the_database(
    any_database: Database, receivers: Receivers
) -> None:
    """Rule D15: whatever the host's clock says; once the database's clock is set right, the next one is right, too."""
    box = await simple_simulation(any_database)
    hook = await subscribe(any_database, receivers, "hook")
    await shift_clock(any_database, 200)
    async with dispatching(any_database, receivers.ca_path):
        await commit(box, funding(1))
        await until(any_database, {"delivered": 1})
        await shift_clock(any_database, 0)
        await commit(box, funding(2))
        await until(any_database, {"delivered": 2})
    ahead_s = [int(request.headers["webhook-timestamp"]) - time.time() for request in hook.accepted]
    assert 180 < ahead_s[0] < 220
    assert -20 < ahead_s[1] < 20
    started_at = await values(
        any_database, "select round(extract(epoch from started_at))::bigint from attempts order by 1"
    )
    assert abs(started_at[1] - int(hook.accepted[0].headers["webhook-timestamp"])) <= 1


class Gate:
    """A receiver that answers nobody before it is opened. `inside` are the requests that wait, `most` their maximum."""

    def __init__(self, directory: Path) -> None:
        self.ca_path, tls = issue(directory)
        self.opened = asyncio.Event()
        self.inside = self.most = self.arrived = 0
        self._server = LoopbackServer(self._receive, tls)
        self._arrival = asyncio.Event()

    async def start(self) -> str:
        return await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    async def _receive(self, request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        self.arrived += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        self._arrival.set()
        try:
            await self.opened.wait()
        finally:
            self.inside -= 1
        return web.Response()

    async def arrivals(self, count: int) -> None:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while self.arrived < count:
                self._arrival.clear()
                await self._arrival.wait()


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Gate]:
    made = Gate(tmp_path)
    yield made
    await made.stop()


async def pass_through(database: Database, gate: Gate, number: int) -> Outbox:
    """A webhook that posts to the gate, and `number` deliveries for it."""
    box = await simple_simulation(database)
    await webhook(database, url=f"{await gate.start()}/")
    await commit(box, *(funding(index) for index in range(number)))
    return box


async def test_no_more_attempts_are_in_flight_than_allowed(any_database: Database, gate: Gate) -> None:
    await pass_through(any_database, gate, 40)
    async with dispatching(any_database, gate.ca_path, concurrency=7):
        await gate.arrivals(7)
        await asyncio.sleep(0.1)
        assert gate.inside == 7
        assert len(await values(any_database, "select unnest(delivery_ids) from leases")) == 7
        gate.opened.set()
        await until(any_database, {"delivered": 40})
    assert (gate.most, gate.arrived) == (7, 40)


async def test_two_turns_at_a_time_claim_no_more_than_one(
    any_database: Database, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One claims what there is room for; beside it another one settles many and claims, too."""
    monkeypatch.setattr(attempts, "FLUSH_AT", 20)
    box = await pass_through(any_database, gate, 60)
    async with dispatching(any_database, gate.ca_path, concurrency=100):
        await gate.arrivals(60)
        await asyncio.sleep(0.3)
        async with any_database.transaction() as connection:  # turns take a while from now on
            await connection.execute(
                "create table most (leased integer); create function note() returns trigger language plpgsql as $$"
                " begin perform pg_sleep(0.1);"
                " insert into most select coalesce(sum(cardinality(delivery_ids)), 0) from leases; return null; end $$;"
                " create trigger note after insert on leases for each statement execute function note()"
            )
        await commit(box, *(funding(number) for number in range(60, 300)))
        gate.opened.set()
        await until(any_database, {"delivered": 300})
    leased = await values(any_database, "select leased from most")
    assert max(leased) <= 100


async def test_stopping_waits_for_what_is_in_flight_and_takes_nothing_more(any_database: Database, gate: Gate) -> None:
    await pass_through(any_database, gate, 50)
    async with dispatching(any_database, gate.ca_path, concurrency=20) as stop:
        await gate.arrivals(20)
        stop.set()
        await asyncio.sleep(0.1)
        assert await states(any_database) == {"scheduled": 50}
        gate.opened.set()
    assert gate.arrived == 20
    assert await states(any_database) == {"delivered": 20, "scheduled": 30}
    assert await values(any_database, "select 1 from leases") == []


async def test_stopping_waits_no_longer_than_it_may(any_database: Database, gate: Gate) -> None:
    """What is given up is attempted again when its lease has ended: at least once, and nothing lost."""
    await pass_through(any_database, gate, 5)
    options: dict[str, Any] = {"concurrency": 3, "drain_s": 0.2, "lease_s": 0.5, "total_timeout_s": 15}
    async with dispatching(any_database, gate.ca_path, **options) as stop:
        await gate.arrivals(3)
        stop.set()
        started = time.monotonic()
    assert time.monotonic() - started < options["total_timeout_s"]
    assert await states(any_database) == {"scheduled": 5}
    gate.opened.set()
    async with dispatching(any_database, gate.ca_path):
        await until(any_database, {"delivered": 5})
    assert gate.arrived == 3 + 5


async def listeners(database: Database) -> list[int]:
    """The sessions that listen; of this database alone."""
    query = "select pid from pg_stat_activity where datname = current_database() and query ilike 'listen%'"
    return await values(database, query)


async def listening(database: Database, *, not_as: list[int] | None = None) -> list[int]:
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while (found := await listeners(database)) in ([], not_as):
            await asyncio.sleep(0.01)
    return found


@pytest.fixture
async def lone_database(any_postgres: ServerAddress) -> AsyncIterator[Database]:
    """A database in which nobody else gives notice."""
    async with own_database(any_postgres) as opened:
        yield opened


async def test_a_commit_wakes_the_dispatcher_at_once(lone_database: Database, receivers: Receivers) -> None:
    box = await simple_simulation(lone_database)
    hook = await subscribe(lone_database, receivers, "hook")
    delays = []
    async with dispatching(lone_database, receivers.ca_path, poll_s=30):
        await listening(lone_database)
        for number in range(5):
            await asyncio.sleep(0.2)  # it has gone to sleep
            await commit(box, funding(number))
            committed = time.monotonic()
            delays.append((await hook.arrivals(number + 1))[-1].at_s - committed)
        await until(lone_database, {"delivered": 5})
    assert statistics.median(delays) < 0.2


async def test_without_the_notice_it_would_sleep_on(
    lone_database: Database, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(outbox, "DELIVERIES_CHANNEL", "nobody_listens")
    box = await simple_simulation(lone_database)
    hook = await subscribe(lone_database, receivers, "hook")
    async with dispatching(lone_database, receivers.ca_path, poll_s=30):
        await listening(lone_database)
        await asyncio.sleep(0.3)
        await commit(box, funding(1))
        with pytest.raises(TimeoutError):
            await hook.arrivals(1, timeout_s=0.5)


async def test_a_lost_notice_costs_no_more_than_the_poll_interval(
    lone_database: Database, receivers: Receivers
) -> None:
    """Rules I21 and I25: the listener's connection is killed again and again, and it always comes back."""
    box = await simple_simulation(lone_database)
    hook = await subscribe(lone_database, receivers, "hook")
    async with dispatching(lone_database, receivers.ca_path, poll_s=0.2):
        killed: list[int] = []
        for number in range(3):
            killed = await listening(lone_database, not_as=killed)
            await values(lone_database, "select pg_terminate_backend($1)", *killed)
            await commit(box, funding(number))
            await hook.arrivals(number + 1, timeout_s=15)
        await listening(lone_database, not_as=killed)
        await until(lone_database, {"delivered": 3})


async def kill_all(server: ServerAddress, name: str) -> None:
    """Ends every session of a database, from another one."""
    elsewhere = await asyncpg.connect(**server.connect_kwargs())
    try:
        await elsewhere.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", name)
    finally:
        await elsewhere.close()


async def test_killed_connections_lose_nothing(
    any_postgres: ServerAddress, lone_database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(lone_database)
    hook = await subscribe(lone_database, receivers, "hook")
    await commit(box, *(funding(number) for number in range(300)))
    (name,) = await values(lone_database, "select current_database()")
    async with dispatching(lone_database, receivers.ca_path, concurrency=16, lease_s=2, total_timeout_s=1):
        for arrived in (30, 100, 170, 240):
            await hook.arrivals(arrived)
            await kill_all(any_postgres, name)
        await until(lone_database, {"delivered": 300})
    await assert_delivered(lone_database, 300)
    assert {request.webhook_id: request.body for request in hook.accepted} == await bodies(lone_database)
    assert len(hook.ledger) <= 300 + 4 * 16  # rule P5: at most what was in flight, once more each


async def test_results_that_cannot_be_stored_at_once_are_stored_later(
    any_database: Database, receivers: Receivers
) -> None:
    """Rule I28: the server dies at each COMMIT for a while. Nothing is posted twice, for the answers are known."""
    box = await simple_simulation(any_database)
    hook = await subscribe(any_database, receivers, "hook")
    async with any_database.transaction() as connection:
        await connection.execute(
            "create table faulty (); create function die() returns trigger language plpgsql as $$ begin"
            " if to_regclass('faulty') is not null then perform pg_terminate_backend(pg_backend_pid()); end if;"
            " return null; end $$; create constraint trigger t after insert on attempts"
            " deferrable initially deferred for each row execute function die()"
        )
    async with dispatching(any_database, receivers.ca_path):
        await commit(box, *(funding(number) for number in range(10)))
        await hook.arrivals(10)
        await asyncio.sleep(0.2)
        assert await states(any_database) == {"scheduled": 10}
        async with any_database.transaction() as connection:
            await connection.execute("drop table faulty")
        await until(any_database, {"delivered": 10})
    assert len(hook.ledger) == 10


async def test_two_dispatchers_share_the_work_and_post_everything_once(
    any_database: Database, receivers: Receivers
) -> None:
    box = await simple_simulation(any_database)
    hook = await subscribe(any_database, receivers, "hook")
    async with (
        dispatching(any_database, receivers.ca_path, concurrency=16, seed=1),
        dispatching(any_database, receivers.ca_path, concurrency=16, seed=2),
    ):
        for number in range(0, 500, 100):
            await commit(box, *(funding(number + index) for index in range(100)))
        await until(any_database, {"delivered": 500})
    assert Counter(request.webhook_id for request in hook.ledger) == Counter(
        dict.fromkeys(await bodies(any_database), 1)
    )


async def test_work_that_a_dead_process_held_is_done_when_its_lease_ends(
    any_database: Database, receivers: Receivers
) -> None:
    """Rules P10, I22 and I23: thousands of rows that are held for longer do not hide the one that is free again."""
    box = await simple_simulation(any_database)
    hook = await subscribe(any_database, receivers, "hook")
    await commit(box, *(funding(number) for number in range(2_000)))
    await claim(any_database, ClaimRequest(1_999, UUID(int=1), 3600, per_webhook=5_000))
    await claim(any_database, ClaimRequest(1, UUID(int=2), 0.5, per_webhook=5_000))
    async with dispatching(any_database, receivers.ca_path, poll_s=30, per_webhook=5_000):
        await hook.arrivals(1, timeout_s=1.5)
        await until(any_database, {"delivered": 1, "scheduled": 1_999})


async def test_delivered_before_it_was_sent_would_be_seen(
    any_database: Database, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the ledger reports a delivery that nobody received."""

    async def hasty(database: Database, request: ClaimRequest) -> Claim:
        claimed = await claim(database, request)
        async with database.transaction() as connection:
            await connection.execute(
                "update deliveries set state = 'delivered', finished_at = db_now()"
                " where id in (select unnest(delivery_ids) from leases where token = $1)",
                request.lease,
            )
        return claimed

    monkeypatch.setattr(deliveries, "claim", hasty)
    box = await simple_simulation(any_database)
    hook = await subscribe(any_database, receivers, "hook", always(Reply(500)))
    with pytest.raises(AssertionError, match="delivered without a 2xx"):
        async with dispatching(any_database, receivers.ca_path):
            await commit(box, funding(1))
            await hook.arrivals(1)
