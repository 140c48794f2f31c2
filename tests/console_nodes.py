"""A simulated chain behind a console: its nodes, and streams that were read up to what is final."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from simulation_fixtures import register
from store_factories import change
from vaultevents.core.units import hex_text
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import cursors
from vaultevents.store.pool import Connection, Database

SLOTS_PER_EPOCH = 8


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of a simulation that run, and the settings that name them."""

    simulation: Simulation
    execution: ExecutionServer
    settings: dict[str, Any]

    @property
    def final(self) -> int:
        """The last final block."""
        found = self.simulation.chain.finalized_number
        assert found is not None
        return found

    def epoch_of(self, block: int) -> int:
        """The epoch of a block, by the chain itself."""
        found = self.simulation.chain.block(block)
        assert found is not None
        return found.slot // SLOTS_PER_EPOCH


@asynccontextmanager
async def running_nodes(blocks: int, events: int) -> AsyncIterator[Nodes]:
    """Nodes of a chain with slots of a second, whose clock is about ours."""
    chain = Chain(7, genesis_time_s=int(time.time()) - 2 * blocks, seconds_per_slot=1)
    simulation = Simulation(7, chain=chain, validators=11, slots_per_epoch=SLOTS_PER_EPOCH)
    simulation.history(blocks, events)
    execution, beacon = ExecutionServer(chain), BeaconServer(simulation.beacon)
    urls = {"execution": await execution.start(), "beacon": await beacon.start()}
    try:
        yield Nodes(simulation, execution, {name: {"urls": [url]} for name, url in urls.items()})
    finally:
        await execution.stop()
        await beacon.stop()


async def read_streams(database: Database, nodes: Nodes) -> None:
    """Register the vaults; cursors stand as if all that is final was read, and nothing is stored of it."""

    async def begin(_: Connection) -> int:
        return 0

    await register(database, nodes.simulation)
    final = nodes.simulation.chain.block(nodes.final)
    assert final is not None
    await cursors.open_stream(database, "logs", final.number, hex_text(final.hash))
    for stream in cursors.EPOCH_STREAMS:
        await cursors.open_stream(database, stream, nodes.epoch_of(nodes.final) - 1, None, begin)
    await change(database, "update cursors set position = stop where kind = 'backfill'")
