"""A devnet simulation, registered in a database and read through the real source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial

from vaultevents.chain.beacon.client import BeaconChain, BeaconOptions
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.logs import TOPICS, Log
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, hex_text
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.truth import Registration
from vaultevents.store import accounts, cursors
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.store.pool import Database
from vaultevents.store.registry import current_registry
from vaultevents.store.validators import earliest_epoch
from vaultevents.watch.discovery import Discovery
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.prefetch import Prefetcher
from vaultevents.watch.source import Source
from vaultevents.watch.validators import ValidatorsSource
from vaultevents.watch.watcher import Advanced, Done, Idle, advance
from vaultevents.watch.withdrawals import WithdrawalsSource

Rows = dict[tuple[str, str], bytes]
LogFact = tuple[int, int, bytes, bytes, bytes]
"""Of a log: its block, its index there, its transaction, its emitter and its data."""


@dataclass(frozen=True, slots=True)
class StakingSources:
    """What reads activations, exits and withdrawals of a simulation."""

    discovery: Discovery
    validators: ValidatorsSource
    withdrawals: WithdrawalsSource
    beacon: BeaconChain
    time: ChainTime

    async def open(self, database: Database) -> None:
        """Makes the live cursors at the heads, as the first start of the daemon does."""
        await self.discovery.step()
        for source in (self.validators, self.withdrawals):
            earliest = partial(earliest_epoch, time=self.time)
            await cursors.open_stream(database, source.stream, await source.head(), None, earliest)

    async def follow(self, outbox: Outbox, step: int = 3) -> None:
        """Discovery, then both streams up to their heads."""
        await self.discovery.step()
        for source in (self.validators, self.withdrawals):
            await read_to_head(source, outbox, step)
        await self.discovery.step()
        await read_to_head(self.validators, outbox, step)


@asynccontextmanager
async def in_background(endless: Coroutine[object, object, object]) -> AsyncIterator[None]:
    """Runs what never ends beside the test, which fails if it ended."""
    task = asyncio.create_task(endless)
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def connected(
    *servers: ExecutionServer, options: ExecutionOptions | None = None, head: str = "finalized"
) -> AsyncIterator[ExecutionChain]:
    """The chain as seen through devnet nodes that run, the first one preferred."""
    urls = [await server.start() for server in servers]
    try:
        async with ExecutionChain(urls, head=HeadPolicy.parse(head), options=options) as chain:
            yield chain
    finally:
        for server in servers:
            await server.stop()


@asynccontextmanager
async def reading(
    *servers: ExecutionServer, options: ExecutionOptions | None = None, head: str = "finalized"
) -> AsyncIterator[LogsSource]:
    """The logs source over running devnet nodes."""
    async with connected(*servers, options=options, head=head) as chain:
        yield LogsSource(chain)


@asynccontextmanager
async def staking(
    database: Database, simulation: Simulation, node: ExecutionServer, beacon_node: BeaconServer
) -> AsyncIterator[StakingSources]:
    """Discovery and the two sources of the beacon chain, whose clock shows the time of the chain's head."""
    beacon_options = BeaconOptions(retry_wait_s=0.01, set_aside_s=0.05)
    options = ExecutionOptions(retry_wait_s=0.01, set_aside_s=0.05)

    def now_s() -> float:
        return float(simulation.chain.head.timestamp_s)

    urls = [await node.start()], [await beacon_node.start()]
    try:
        async with (
            ExecutionChain(urls[0], head=HeadPolicy(), options=options) as chain,
            BeaconChain(urls[1], beacon_options, clock=now_s) as beacon,
        ):
            identity = await beacon.identity()
            beacon.expect(identity)
            discovery = Discovery(beacon, chain, database, identity.time, poll_s=0.05)
            validators = ValidatorsSource(database, identity.time, lambda: int(now_s()))
            withdrawals = WithdrawalsSource(chain, beacon, database, identity.time, discovery.meet)
            yield StakingSources(discovery, validators, withdrawals, beacon, identity.time)
    finally:
        await node.stop()
        await beacon_node.stop()


def watched(simulation: Simulation) -> Watched:
    return Watched(
        frozenset(Address(registration.address) for registration in simulation.registrations),
        frozenset(
            Address(registration.queue) for registration in simulation.registrations if registration.queue is not None
        ),
    )


def whole(simulation: Simulation) -> Span:
    """All that is final."""
    assert simulation.chain.finalized_number is not None
    return Span(0, simulation.chain.finalized_number)


def truth(simulation: Simulation, span: Span) -> list[LogFact]:
    """The logs of the contract events in a span, by the chain's own record."""
    return [
        (log.block.number, log.log_index, log.tx_hash, log.log.address, log.log.data)
        for log in simulation.chain.logs(span.first, span.last, TOPICS)
    ]


def log_facts(logs: Iterable[Log]) -> list[LogFact]:
    """Logs that were read, in the form of `truth`."""
    return [(log.block_number, log.log_index, log.tx_hash, log.address, log.data) for log in logs]


async def add_accounts(database: Database, registrations: Iterable[Registration]) -> None:
    for account_id in sorted({registration.account_id for registration in registrations}):
        await accounts.add_account(database, account_id, account_id)


async def add_vault(database: Database, one: Registration) -> accounts.Registered:
    queue = None if one.queue is None else Address(one.queue)
    return await accounts.add_vault(
        database, one.account_id, one.vault_id, Address(one.address), queue, one.first_block
    )


async def register(database: Database, simulation: Simulation) -> None:
    await add_accounts(database, simulation.registrations)
    for registration in simulation.registrations:
        await add_vault(database, registration)


async def open_at(database: Database, simulation: Simulation, block: int) -> None:
    """Makes the live cursor at a block of the simulation, as the first start of the daemon does at the head."""
    found = simulation.chain.block(block)
    assert found is not None
    await cursors.open_stream(database, "logs", block, hex_text(found.hash))


async def read_to_head(source: Source, outbox: Outbox, step: int = 50) -> list[Advanced]:
    """Live and backfills, one span each in turn, until neither has anything left."""
    steps: list[Advanced] = []
    while True:
        live = await outbox.live(source.stream)
        assert live is not None
        before = len(steps)
        for cursor in [live, *await outbox.backfills(source.stream)]:
            with closing(Prefetcher(source, step)) as reader:
                outcome = await advance(reader, outbox, cursor)
            if isinstance(outcome, Advanced):
                steps.append(outcome)
        if len(steps) == before and not await outbox.backfills(source.stream):
            return steps


async def drive(source: Source, outbox: Outbox, cursor: Cursor, step: int) -> list[Advanced]:
    """One cursor up to its stop or the head."""
    steps: list[Advanced] = []
    with closing(Prefetcher(source, step)) as reader:
        while not isinstance(outcome := await advance(reader, outbox, cursor), Done | Idle):
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
        for vault in (await current_registry(database)).vaults
        for span in vault.spans
    ]
