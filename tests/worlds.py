"""A devnet world, registered in a database and read through the real source."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from vaultevents.chain.execution import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.core.units import Address, hex_text
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.truth import Registration
from vaultevents.devnet.world import World
from vaultevents.store import accounts
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.watcher import Advanced, Done, Idle, Source, advance

Rows = dict[tuple[str, str], bytes]


@asynccontextmanager
async def reading(*servers: ExecutionServer, options: ExecutionOptions | None = None) -> AsyncIterator[LogsSource]:
    """The logs source over running devnet nodes."""
    urls = [await server.start() for server in servers]
    try:
        async with ExecutionChain(urls, head=HeadPolicy(), options=options) as chain:
            yield LogsSource(chain)
    finally:
        for server in servers:
            await server.stop()


async def add_accounts(database: Database, registrations: Iterable[Registration]) -> None:
    for account_id in sorted({one.account_id for one in registrations}):
        await accounts.add_account(database, account_id, account_id)


async def add_vault(database: Database, one: Registration) -> accounts.Registered:
    queue = None if one.queue is None else Address(one.queue)
    return await accounts.add_vault(
        database, one.account_id, one.vault_id, Address(one.address), queue, one.first_block
    )


async def register(database: Database, world: World) -> None:
    await add_accounts(database, world.registrations)
    for one in world.registrations:
        await add_vault(database, one)


async def open_at(database: Database, world: World, block: int) -> None:
    """Makes the live cursor at a block of the world, as the first start of the daemon does at the head."""
    found = world.chain.block(block)
    assert found is not None
    await accounts.open_stream(database, "logs", block, hex_text(found.hash))


async def read_to_head(source: Source, outbox: Outbox, step: int = 50) -> list[Advanced]:
    """Live and backfills, one span each in turn, until neither has anything left."""
    steps: list[Advanced] = []
    while True:
        live = await outbox.live(source.stream)
        assert live is not None
        before = len(steps)
        for cursor in [live, *await outbox.backfills(source.stream)]:
            outcome = await advance(source, outbox, cursor, step)
            if isinstance(outcome, Advanced):
                steps.append(outcome)
        if len(steps) == before and not await outbox.backfills(source.stream):
            return steps


async def drive(source: Source, outbox: Outbox, cursor: Cursor, step: int) -> list[Advanced]:
    """One cursor up to its stop or the head."""
    steps: list[Advanced] = []
    while not isinstance(outcome := await advance(source, outbox, cursor, step), Done | Idle):
        assert isinstance(outcome, Advanced)
        cursor = outcome.cursor
        steps.append(outcome)
    return steps


async def rows(database: Database) -> Rows:
    """Everything in the outbox."""
    async with database.transaction() as connection:
        found = await connection.fetch("select account_id, id, body from events")
    return {(row["account_id"], row["id"]): row["body"] for row in found}


async def spans(database: Database) -> list[Registration]:
    """What is registered, in the form of the ground truth: one entry for each span."""
    return [
        Registration(vault.account_id, vault.id, vault.address, vault.queue, span.first, span.last)
        for vault in (await accounts.registry(database)).vaults
        for span in vault.spans
    ]
