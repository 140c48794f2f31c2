"""Builders for tests of the store and the dispatcher, and the check that every ledger adds up (rule P9)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any, Literal
from uuid import uuid4

import asyncpg

from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.events import Event, FundingReceived, Observation, WithdrawalClaimed, project
from vaultevents.core.sealing import MasterKey, Secret
from vaultevents.core.signing import new_secret
from vaultevents.core.units import Address, Hash32, Wei
from vaultevents.core.webhooks import Webhook
from vaultevents.store import accounts, cursors, webhooks
from vaultevents.store.deliveries import (
    Claim,
    ClaimRequest,
    Delivery,
    Scarce,
    Settlement,
    claim,
)
from vaultevents.store.delivery_reconciliation import audit
from vaultevents.store.flag_changes import Pass, advance
from vaultevents.store.leases import end_leases
from vaultevents.store.outbox import Committed, Cursor, Lost, Outbox
from vaultevents.store.pool import Connection, Database, migrations, open_database
from vaultevents.store.postgres.embedded import ConnectArguments, ServerAddress
from vaultevents.store.status import count_by_state

KEY = MasterKey(bytes(range(32)))
LEASE_S = 60.0
EARLIER = datetime(2026, 1, 1, tzinfo=UTC)

_serial = count(1)


def address(name: str) -> Address:
    """The same 20 bytes for the same name."""
    return Address(hashlib.sha256(name.encode()).digest()[:20])


def tx_hash(number: int) -> Hash32:
    return Hash32(hashlib.sha256(b"tx %d" % number).digest())


def funding(number: int, block: int = 10, vault: str = "v1", amount_wei: int = 10**18) -> Observation:
    """A funding of the vault at `address(vault)`, in a transaction of its own for each `number`."""
    payload = FundingReceived(tx_hash(number), Wei(amount_wei), address(vault), 1)
    return Observation(address(vault), block, 1_760_000_000_000 + 12_000 * block, payload)


def claimed(request_id: int, block: int = 10, queue: str = "q1", amount_wei: int = 10**18) -> Observation:
    """A claim at the withdrawal queue at `address(queue)`."""
    payload = WithdrawalClaimed(
        tx_hash(amount_wei), request_id, address("recipient"), address("owner"), Wei(amount_wei), address(queue)
    )
    return Observation(address(queue), block, 1_760_000_000_000 + 12_000 * block, payload)


async def account(database: Database, account_id: str = "acme") -> None:
    await accounts.add_account(database, account_id, account_id.title())


async def vault(
    database: Database,
    vault_id: str = "v1",
    *,
    account_id: str = "acme",
    at: str | None = None,
    queue: str | None = None,
    first_block: int = 0,
    deliver: bool = True,
) -> accounts.Registered:
    """Registers the vault at `address(at)`, by default at the address that is named like it."""
    queue_at = None if queue is None else address(queue)
    return await accounts.add_vault(
        database, account_id, vault_id, address(at or vault_id), queue_at, first_block, deliver=deliver
    )


@dataclass(frozen=True, slots=True)
class Subscription:
    """A stored webhook and the secret that its owner was shown."""

    webhook: Webhook
    secret: str

    @property
    def id(self) -> str:
        return self.webhook.id


async def webhook(
    database: Database,
    *,
    account_id: str = "acme",
    url: str = "https://receiver.example/hook",
    event_types: Sequence[str] | None = None,
    vault_ids: Sequence[str] | None = None,
    active: bool = True,
) -> Subscription:
    number = next(_serial)
    secret = new_secret(hashlib.sha256(b"secret %d" % number).digest())
    types = None if event_types is None else tuple(event_types)
    vaults = None if vault_ids is None else tuple(vault_ids)
    made = Webhook(f"wh-{number:06}", account_id, url, types, vaults, active)
    await webhooks.create_webhook(database, made, Secret(secret), KEY, number.to_bytes(12))
    return Subscription(made, secret)


async def live_at(database: Database, block: int) -> Outbox:
    """Makes the live cursor of the logs at `block`."""
    await cursors.open_stream(database, "logs", block, "0xanchor")
    return Outbox(database)


async def simple_simulation(database: Database) -> Outbox:
    """One account `acme` with the vault `v1` and its queue `q1` from block 1 on; the logs are read up to block 0."""
    await account(database)
    await vault(database, queue="q1", first_block=1)
    return await live_at(database, 0)


async def live(outbox: Outbox) -> Cursor:
    cursor = await outbox.live("logs")
    assert cursor is not None
    return cursor


async def events_of(outbox: Outbox, observations: Iterable[Observation]) -> tuple[list[Event], int]:
    """The events by today's registry, and its version."""
    registry = await outbox.registry()
    return [event for observation in observations for event in project(observation, registry)], registry.version


async def commit(outbox: Outbox, *observations: Observation) -> Committed:
    """Commits the events of the next block; fails when the cursor is lost."""
    cursor = await live(outbox)
    found, version = await events_of(outbox, observations)
    outcome = await outbox.commit(cursor, cursor.moved(cursor.position + 1, None), found, version)
    assert not isinstance(outcome, Lost)
    return outcome


async def some_deliveries(database: Database, number: int) -> tuple[Outbox, Subscription]:
    """A simple simulation with `number` fundings, sent to one webhook that receives everything."""
    outbox = await simple_simulation(database)
    subscription = await webhook(database)
    await commit(outbox, *(funding(n) for n in range(number)))
    return outbox, subscription


async def carry_out(database: Database) -> None:
    """Carry out all flag changes that there are."""
    passes: dict[str, Pass] = {}
    while await advance(database, passes):
        pass


async def take(
    database: Database, limit: int = 500, per_webhook: int = 10_000, after: str = "", scarce: Scarce | None = None
) -> Claim:
    """What a dispatcher would get that looks now, once pending deliveries follow the flags of their webhooks."""
    await carry_out(database)
    await end_leases(database)
    return await claim(database, ClaimRequest(limit, uuid4(), LEASE_S, per_webhook, after, scarce))


def settlement(
    delivery: Delivery,
    state: Literal["scheduled", "delivered", "exhausted", "parked"] = "delivered",
    status: int = 200,
    **options: Any,
) -> Settlement:
    """An attempt that was answered with `status`."""
    return Settlement(delivery, state, EARLIER, 5, status, None, "", "127.0.0.1", **options)


async def rows(database: Database, query: str, *arguments: object) -> list[dict[str, Any]]:
    async with database.transaction() as connection:
        return [dict(row) for row in await connection.fetch(query, *arguments)]


async def change(database: Database, query: str, *arguments: object) -> None:
    async with database.transaction() as connection:
        await connection.execute(query, *arguments)


async def values(database: Database, query: str, *arguments: object) -> list[Any]:
    """The first column of each row."""
    return [next(iter(row.values())) for row in await rows(database, query, *arguments)]


async def states(database: Database) -> dict[str, int]:
    """How many deliveries there are in each state, once the pending ones follow the flags of their webhooks."""
    await carry_out(database)
    return {row["state"]: row["n"] for row in await rows(database, _BY_STATE)}


_BY_STATE = "select state, count(*)::int as n from deliveries group by state"


async def deliveries_of(database: Database, webhook_id: str) -> list[str]:
    """The ids of the events that were fanned out to a webhook, sorted."""
    return await values(
        database,
        "select e.id from deliveries d join events e on e.seq = d.event_seq where d.webhook_id = $1 order by e.id",
        webhook_id,
    )


async def until_waiting(database: Database, number: int) -> None:
    """Return once this many sessions of this database wait for a lock."""
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while await values(database, _WAITING) != [number]:
            await asyncio.sleep(0.005)


_WAITING = """
select count(distinct waiting.pid)::int from pg_locks waiting join pg_locks held using (pid)
where not waiting.granted and held.granted
    and held.database = (select oid from pg_database where datname = current_database())
    and held.relation in (select oid from pg_class where relnamespace = current_schema()::regnamespace)
"""


async def shift_clock(database: Database, seconds: float) -> None:
    """From now on the database's clock, which decides schedules and leases, is this far ahead of the real one."""
    async with database.transaction() as connection:
        await connection.execute(
            "create or replace function db_now() returns timestamptz language sql volatile as"
            f" 'select clock_timestamp() + make_interval(secs => {float(seconds)})'"
        )


@asynccontextmanager
async def own_database(server: ServerAddress, pool_size: int = 8) -> AsyncIterator[Database]:
    """Open a copy of the migrated template database, and drop it at the end.

    A database, not only a schema: neither NOTIFY nor advisory locks nor autovacuum reach from one test to another.
    """
    name = f"d_{uuid4().hex}"
    admin = await asyncpg.connect(**server.connect_kwargs())
    try:
        await admin.execute(f"create database {name} template {await _template(server, admin)} strategy file_copy")
        try:
            opened = await open_database({**server.connect_kwargs(), "database": name}, pool_size=pool_size)
            try:
                yield opened
            finally:
                await opened.close()
        finally:
            await admin.execute(f"drop database {name} with (force)")
    finally:
        await admin.close()


async def _template(server: ServerAddress, admin: asyncpg.Connection) -> str:
    """Return the name of a database with every migration and nobody in it; the first caller makes it."""
    digest = hashlib.sha256(b"".join(migration.sha256 for migration in migrations())).hexdigest()
    name = f"template_{digest[:16]}"
    async with admin.transaction():
        await admin.execute("select pg_advisory_xact_lock(hashtext($1))", name)
        if not await admin.fetchval("select exists (select from pg_database where datname = $1)", name):
            await _make_template(server, name)
    return name


async def _make_template(server: ServerAddress, name: str) -> None:
    """Make it under another name first, so that a process that is killed meanwhile leaves no half of it."""
    other = await asyncpg.connect(**server.connect_kwargs())  # `create database` runs outside transactions
    try:
        await other.execute(f"drop database if exists {name}_new with (force)")
        await other.execute(f"create database {name}_new")
        made = await open_database({**server.connect_kwargs(), "database": f"{name}_new"}, pool_size=1)
        await made.close()
        await other.execute(f"alter database {name}_new allow_connections false")
        await other.execute(f"alter database {name}_new rename to {name}")
    finally:
        await other.close()


async def target_of(server: ServerAddress, database: Database) -> ConnectArguments:
    """Return what another process needs to open `database`."""
    (name,) = await values(database, "select current_database()::text")
    return {**server.connect_kwargs(), "database": name}


async def assert_ledger(database: Database) -> None:
    """Each event × webhook that matched at fan-out has exactly one delivery, and its state is what was posted.

    What `status` counts is what is there.
    """
    async with database.transaction() as connection:
        await connection.execute("set transaction isolation level repeatable read")
        problems = await ledger_problems(connection)
        counted, there = await count_by_state(connection), await connection.fetch(_BY_STATE)
    assert not problems, problems
    assert counted == {row["state"]: row["n"] for row in there}


async def ledger_problems(connection: Connection) -> list[str]:
    """What `audit` finds, each with its event and webhook."""
    found = await audit(connection)
    return [f"{one.event_id} {one.webhook_id}: {one.problem}" for one in found.breaches]


async def assert_delivered(database: Database, number: int) -> None:
    """The ledger adds up, and all of `number` deliveries were accepted."""
    await assert_ledger(database)
    assert await states(database) == {"delivered": number}
