"""Worlds with validators."""

from __future__ import annotations

from typing import Any

from vaultevents.devnet.blocks import Block
from vaultevents.devnet.simulation import Simulation


def simulation_of(seed: int = 21, blocks: int = 200, validators: int = 40, **settings: Any) -> Simulation:
    simulation = Simulation(seed, validators=validators, **settings)
    simulation.history(blocks, events=30)
    return simulation


def blocks_of(simulation: Simulation) -> list[Block]:
    return simulation.chain.blocks(0, simulation.chain.head.number)
