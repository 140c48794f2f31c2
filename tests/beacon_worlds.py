"""Worlds with validators."""

from __future__ import annotations

from typing import Any

from vaultevents.devnet.blocks import Block
from vaultevents.devnet.world import World


def world_of(seed: int = 21, blocks: int = 200, validators: int = 40, **settings: Any) -> World:
    world = World(seed, validators=validators, **settings)
    world.history(blocks, events=30)
    return world


def blocks_of(world: World) -> list[Block]:
    return world.chain.blocks(0, world.chain.head.number)
