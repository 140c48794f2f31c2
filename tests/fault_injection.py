"""Kinds of trouble that a node can be in, and a stream that is read while one of its nodes is in it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from simulation_fixtures import in_background, open_at, register, rows, whole
from timeouts import WAIT_TIMEOUT_S
from vaultevents.chain.beacon.client import BeaconChain, BeaconOptions
from vaultevents.chain.execution.anchoring import BeaconAnchor
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy, Identity
from vaultevents.chain.upstream.redaction import node_name
from vaultevents.core.units import Hash32
from vaultevents.devnet.acts import Funding, log_of
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.registry import first_block
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.streams import Audit, Stream, follow
from vaultevents.watch.wakeup import Wakeup

BLOCKS, FORK, BEGUN = 120, 40, 60
LAG = 20
HANG_S = 0.4
FUTILE_ATTEMPTS = 20
"""A cursor that has failed so often in a row, with nothing moved meanwhile, has stalled."""
OPTIONS = ExecutionOptions(
    headers="every",  # in backfills, too: with fewer headers the audit behind them finds what silence has hidden
    retry_wait_s=0.01,
    set_aside_s=0.1,
    log_range_start=25,
    answer_limit_bytes=2**20,
)


class Serving(Protocol):
    async def start(self) -> str: ...
    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How the stream stood when it had everything, or when nothing had moved for a while."""

    lost: int
    extra: int

    @property
    def is_right(self) -> bool:
        return not (self.lost or self.extra)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A stream that is being read while its chain may grow; `names` are those of its nodes in logs."""

    database: Database
    simulation: Simulation
    names: tuple[str, ...] = ()

    async def extra(self) -> int:
        """What is stored and not, or not so, in the chain's own record."""
        wanted = self.simulation.expected()
        return sum(wanted.get(key) != body for key, body in (await rows(self.database)).items())

    async def grow(self, blocks: int) -> None:
        for number in range(blocks):
            self.simulation.step()
            if number % 5 == 4:
                await asyncio.sleep(0.01)

    async def ending(
        self, patience_s: float = WAIT_TIMEOUT_S, behind: int = 0, log: Sequence[MutableMapping[str, Any]] = ()
    ) -> Ending:
        """Once all is read, up to `behind` blocks before the end, or nothing has moved for `patience_s`.

        With the `log` of the stream, which grows, also once each cursor that is behind has stalled.
        """
        last = whole(self.simulation).last - behind
        loop = asyncio.get_running_loop()
        seen, since_s, moved_at = None, loop.time(), 0
        while loop.time() - since_s < patience_s:
            if (now := await self._progress()) != seen:
                seen, since_s, moved_at = now, loop.time(), len(log)
            position, backfills, _ = now
            behind_kinds = {"live"} if position < last else set()
            behind_kinds |= {"backfill"} if backfills else set()
            failures = Counter(line.get("kind") for line in log[moved_at:] if line["event"] == "stream_waits")
            if all(failures[kind] >= FUTILE_ATTEMPTS for kind in behind_kinds):
                break
            await asyncio.sleep(0.03)
        return Ending(
            len(self.simulation.expected(through=last).keys() - (await rows(self.database)).keys()), await self.extra()
        )

    async def _progress(self) -> tuple[int, list[int], int]:
        outbox = Outbox(self.database)
        live = await outbox.live("logs")
        assert live is not None
        backfills = [backfill.position for backfill in await outbox.backfills("logs")]
        return live.position, backfills, len(await rows(self.database))


@asynccontextmanager
async def beacon_of(simulation: Simulation, server: BeaconServer | None = None) -> AsyncIterator[BeaconAnchor]:
    """The beacon chain of a simulation, read from `server` or an honest node, with the clock of the chain's head."""
    server = server or BeaconServer(simulation.beacon)
    options = BeaconOptions(retry_wait_s=0.01, set_aside_s=0.05)
    try:
        url = await server.start()
        async with BeaconChain([url], options, clock=lambda: float(simulation.chain.head.timestamp_s)) as beacon:
            identity = await beacon.identity()
            beacon.expect(identity)
            yield BeaconAnchor(beacon, identity.time)
    finally:
        await server.stop()


@asynccontextmanager
async def followed(
    database: Database,
    simulation: Simulation,
    *servers: Serving,
    begun: int = BEGUN,
    options: ExecutionOptions = OPTIONS,
    anchor: BeaconAnchor | None = None,
) -> AsyncIterator[Scenario]:
    """Read the logs of a simulation as the daemon does: live from block `begun` on, with a backfill of what is before.

    With an `anchor` the finalized block is compared with that of the beacon chain.
    """
    await register(database, simulation)
    await open_at(database, simulation, begun)
    genesis = simulation.chain.block(0)
    assert genesis is not None
    async with AsyncExitStack() as stack:
        urls = []
        for server in servers:
            urls.append(await server.start())
            stack.push_async_callback(server.stop)
        chain = await stack.enter_async_context(ExecutionChain(urls, head=HeadPolicy(), options=options, anchor=anchor))
        chain.expect(Identity(simulation.chain.chain_id, Hash32(genesis.hash)))
        source = LogsSource(chain)
        audit = Audit(source, chain.nodes, source.head)
        stream = Stream(source, "block", first_block, 10, 0.02, backfill_step=10, audit=audit)
        async with in_background(follow(stream, Outbox(database), lambda _: None, Wakeup())):
            yield Scenario(database, simulation, tuple(map(node_name, urls)))


def simulation_of(seed: int, blocks: int = BLOCKS, chain: Chain | None = None) -> Simulation:
    simulation = Simulation(seed, chain=chain, events_per_block=1.5)
    simulation.history(blocks, blocks)
    return simulation


def forked(simulation: Simulation, at: int, blocks: int, seed: int = 99) -> Chain:
    """A branch of which each block pays to a watched vault; a reader that trusts it reports false payments."""
    vault = simulation.registrations[0].address
    branch = simulation.chain.fork(at, seed) if at else Chain(seed)
    for _ in range(blocks):
        branch.mine([branch.transaction([log_of(Funding(vault, 10**18))])])
    return branch


def lags(server: ExecutionServer, _: Simulation) -> None:
    server.node.behind = LAG


def lies_and_fails(server: ExecutionServer, _: Simulation) -> None:
    server.faults.rates = {Fault.EMPTY_LOGS: 0.01, Fault.TRUNCATED_LOGS: 0.02, Fault.ERROR: 0.05}
    server.faults.once(Fault.EMPTY_LOGS, 2)


def is_another_chain(server: ExecutionServer, simulation: Simulation) -> None:
    server.node.chain = forked(simulation, 0, 2 * BLOCKS)


def is_on_another_fork(server: ExecutionServer, simulation: Simulation) -> None:
    server.node.chain = forked(simulation, FORK, 2 * BLOCKS)


def is_pruned(server: ExecutionServer, _: Simulation) -> None:
    server.node.oldest = BLOCKS


def has_lost_its_receipts(server: ExecutionServer, _: Simulation) -> None:
    server.node.oldest_logs = BLOCKS


def hangs(server: ExecutionServer, _: Simulation) -> None:
    server.faults.rates = {Fault.HANG: 1.0}


def heal(server: ExecutionServer, simulation: Simulation) -> None:
    server.node.chain, server.node.behind, server.node.oldest, server.node.oldest_logs = simulation.chain, 0, 0, 0
    server.faults.stop()


@dataclass(frozen=True, slots=True)
class Trouble:
    """What happens to a node, and how a scenario goes that meets it.

    `behind`: how many blocks before the end a stream may stay whose preferred node is in it. Not `from_the_start`: a
    node shows it by what does not link to the blocks before. `heals_itself`: it is got over without help, also alone.
    `bursts`: so many refusals with 429 and `Retry-After: 1` come on top later.
    """

    begin: Callable[[ExecutionServer, Simulation], None]
    options: ExecutionOptions = OPTIONS
    behind: int = 0
    from_the_start: bool = True
    heals_itself: bool = False
    bursts: int = 0


TROUBLES: Sequence[Trouble] = (
    Trouble(lags, behind=LAG),
    Trouble(lies_and_fails, heals_itself=True, bursts=2),
    Trouble(is_pruned),
    Trouble(has_lost_its_receipts),
    Trouble(hangs, options=replace(OPTIONS, total_timeout_s=HANG_S)),
    Trouble(is_another_chain, from_the_start=False),
    Trouble(is_on_another_fork, from_the_start=False),
)
