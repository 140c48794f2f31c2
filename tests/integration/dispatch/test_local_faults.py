"""What this host cannot do is charged to no webhook: not to its schedule, not to its attempts, not to its health."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from aiohttp.connector import AddrInfoType

from dispatch_factories import NEVER, bodies, subscribe, until
from name_server import name_server
from sender_factories import BODY, HEADERS, LOOPBACK, NAME, OK, receiving, sender
from store_factories import KEY, change, commit, funding, rows, simple_simulation, some_deliveries, states, take, values
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.errors import LocalFault
from vaultevents.devnet.certificates import Authority
from vaultevents.devnet.receivers import Receivers
from vaultevents.dispatch import attempts
from vaultevents.dispatch.attempts import Dispatcher
from vaultevents.dispatch.lanes import DeliveryLane, DispatchOptions, ResendLane, ResendOptions
from vaultevents.dispatch.sender import Sender
from vaultevents.dispatch.signer import Signer
from vaultevents.egress import Guard, is_own_address
from vaultevents.resolver import SystemLookup
from vaultevents.store import resends
from vaultevents.store.clock import ServiceClock
from vaultevents.store.leases import put_back
from vaultevents.store.notices import Notice, claim_notices, postpone, record
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Nothing can be opened until the end: the limit of the process is what it has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), before[1]))
    fillers = []
    try:
        while True:
            try:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
            except OSError as full:
                assert full.errno == errno.EMFILE
                break
        yield
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_without_descriptors_nothing_is_said_of_the_receiver(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with receiving(OK, authority.server(NAME)) as receiver, sender(authority) as sending:
        with no_more_files():
            reply = await sending.send(receiver.url, BODY, HEADERS)
            with pytest.raises(LocalFault):
                is_own_address("127.0.0.1")
        assert (reply.status, reply.error) == (None, "local")
        assert "Too many open files" in reply.excerpt
        assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_what_a_socket_cannot_have_is_a_fault_of_this_host(code: int) -> None:
    class Exhausted(Guard):
        def open_socket(self, info: AddrInfoType) -> socket.socket:
            raise OSError(code, os.strerror(code))

    async with Sender(Exhausted(LOOPBACK)) as sending:
        assert (await sending.send("https://127.0.0.1:1/", BODY, HEADERS)).error == "local"


async def test_without_a_free_port_nothing_is_said_of_the_receiver() -> None:
    class Bound(Guard):
        """Whose sockets are bound already to the one address and port that the receiver has a connection from."""

        def open_socket(self, info: AddrInfoType) -> socket.socket:
            opened = super().open_socket(info)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(taken)
            return opened

    with socket.create_server(("127.0.0.1", 0)) as receiver, socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        taken = first.getsockname()
        first.connect(receiver.getsockname())
        async with Sender(Bound(LOOPBACK)) as sending:
            url = f"https://127.0.0.1:{receiver.getsockname()[1]}/"
            assert (await sending.send(url, BODY, HEADERS)).error == "local"


async def test_a_resolver_that_is_down_says_nothing_of_the_receiver() -> None:
    async with name_server(lambda _: "silent") as server:
        lookup = SystemLookup([server.address])
        async with Sender(Guard(LOOPBACK, lookup=lookup)) as sending:
            assert (await sending.send(f"https://{NAME}/", BODY, HEADERS)).error == "resolver"
        await lookup.close()


class Repairable(Guard):
    """Has no descriptors until it is repaired."""

    broken = True

    def open_socket(self, info: AddrInfoType) -> socket.socket:
        if self.broken:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open_socket(info)


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Receivers]:
    server = Receivers(tmp_path)
    await server.start()
    yield server
    await server.stop()


@contextlib.asynccontextmanager
async def working(database: Database, receivers: Receivers, guard: Guard) -> AsyncIterator[None]:
    """A dispatcher and a resender with this guard."""
    stop = asyncio.Event()
    async with Sender(guard, ca_file=receivers.ca_path) as sending, asyncio.TaskGroup() as group:
        clock, signer = ServiceClock(await database.now()), Signer({KEY.id: KEY})
        deliveries = DeliveryLane(database, signer, DispatchOptions(parking=NEVER), random.Random(1))
        group.create_task(Dispatcher(deliveries, sending, clock).run(stop))
        group.create_task(Dispatcher(ResendLane(database, signer, ResendOptions()), sending, clock).run(stop))
        try:
            yield
        finally:
            stop.set()


async def test_a_fault_of_this_host_costs_no_attempt_and_no_health(
    database: Database, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "PUT_BACK_S", 0.1)
    box = await simple_simulation(database)
    hook = await subscribe(database, receivers, "good")
    guard = Repairable(LOOPBACK)
    async with working(database, receivers, guard):
        await commit(box, *(funding(number) for number in range(20)))
        webhook_id = (await values(database, "select id from webhooks"))[0]
        async with database.of_account("acme") as connection:
            await resends.request_test(connection, "acme", webhook_id, "webhook_test_acme_1", b"{}")
        await asyncio.sleep(1)
        assert await states(database) == {"scheduled": 20}
        assert await values(database, "select count(*)::int from attempts") == [0]
        assert await rows(database, "select failures, parks, first_failure_at from webhooks") == [
            {"failures": 0, "parks": 0, "first_failure_at": None}
        ]
        assert await values(database, "select finished_at from resends") == [None]
        guard.broken = False
        await until(database, {"delivered": 20})
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while await values(database, "select status from resends") != [200]:
                await asyncio.sleep(0.01)
    assert {request.headers["x-vaultevents-attempt"] for request in hook.ledger} == {"1"}
    assert len(hook.ledger) == 21
    assert await values(database, "select distinct number from attempts") == [1]
    assert len(await bodies(database)) == 20


async def test_what_is_put_back_is_due_later_and_keeps_its_number(database: Database) -> None:
    await some_deliveries(database, 4)
    done, parked, *held = (await take(database, 4)).deliveries
    await change(database, "update deliveries set state = 'parked' where id = $1", parked.id)
    await change(database, "delete from queue where delivery_id = $1", parked.id)
    assert await put_back(database, [done], 0.0) == 1
    (again,) = (await take(database, 4)).deliveries
    assert (again.id, again.attempt) == (done.id, 1)
    assert await put_back(database, [parked, *held], 3600.0) == 3
    assert await values(database, "select state::text from deliveries where id = $1", parked.id) == ["parked"]
    assert (await take(database, 4)).deliveries == (), "the others are not due yet"
    assert await values(database, "select cardinality(delivery_ids) from leases") == [1], "that of the one taken again"
    assert await put_back(database, held, 0.0) == 0, "without the lease nothing changes"
    assert (await take(database, 4)).deliveries == ()
    assert await values(database, "select count(*)::int from attempts") == [0]


async def test_a_prevented_notice_keeps_its_number(database: Database) -> None:
    _, made = await some_deliveries(database, 1)
    async with database.transaction() as connection:
        await record(connection, [Notice("webhook_failing", made.id)])
    (notice,) = await claim_notices(database, 1, uuid4(), 60)
    assert await postpone(database, notice.id, notice.lease, 0.0, attempted=False)
    (again,) = await claim_notices(database, 1, uuid4(), 60)
    assert again.attempt == notice.attempt == 1
