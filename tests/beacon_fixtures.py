"""Worlds with validators."""

from __future__ import annotations

from typing import Any

from vaultevents.devnet.blocks import Block
from vaultevents.devnet.simulation import Simulation


def world_of(seed: int = 21, blocks: int = 200, validators: int = 40, **settings: Any) -> Simulation:
    world = Simulation(seed, validators=validators, **settings)
    world.history(blocks, events=30)
    return world


def blocks_of(world: Simulation) -> list[Block]:
    return world.chain.blocks(0, world.chain.head.number)
