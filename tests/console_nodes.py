"""A simulated chain behind a console: its nodes, and streams that were read up to what is final."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from simulation_fixtures import register
from store_factories import change
from vaultevents.core.units import hex_text
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import cursors
from vaultevents.store.clock import SimulatedClock
from vaultevents.store.pool import Connection, Database

SLOTS_PER_EPOCH = 8


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of a simulation that run, the settings that name them, and the clock of their chain."""

    simulation: Simulation
    settings: dict[str, Any]
    clock: SimulatedClock

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
    """Nodes of a chain that has some blocks."""
    simulation = Simulation(7, validators=11, slots_per_epoch=SLOTS_PER_EPOCH)
    simulation.history(blocks, events)
    execution, beacon = ExecutionServer(simulation.chain), BeaconServer(simulation.beacon)
    urls = {"execution": await execution.start(), "beacon": await beacon.start()}
    try:
        settings = {name: {"urls": [url]} for name, url in urls.items()}
        yield Nodes(simulation, settings, SimulatedClock(lambda: simulation.chain.head.timestamp_s))
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
