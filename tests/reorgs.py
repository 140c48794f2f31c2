"""Reorgs of a devnet simulation: its transactions move to other blocks, vanish, and may come back later."""

from __future__ import annotations

from random import Random

from vaultevents.devnet.blocks import Transaction
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.truth import Events


class Reorganiser:
    """Rewrites the end of a simulation's chain. Nothing that creates a contract may be that near to the head."""

    def __init__(self, simulation: Simulation, rng: Random, *, vanishing: float = 0.2) -> None:
        self._simulation, self._rng, self._vanishing = simulation, rng, vanishing
        self._gone: list[Transaction] = []

    def reorg(self, depth: int, length: int | None = None) -> None:
        """Replaces the last `depth` blocks by `length` others (default: one less to one more)."""
        rng, chain = self._rng, self._simulation.chain
        length = max(1, depth + rng.randint(-1, 1)) if length is None else length
        blocks: list[list[Transaction]] = [[] for _ in range(length)]
        dropped = chain.blocks(chain.head.number - depth + 1, chain.head.number)
        back, self._gone = self._gone, []
        for transaction in [*back, *(one for block in dropped for one in block.transactions)]:
            place = rng.choice(blocks)
            (self._gone if rng.random() < self._vanishing else place).append(transaction)
        chain.reorg(depth, blocks)

    def truth(self) -> Events:
        """The events of the chain as it is now, up to its head."""
        return self._simulation.expected(through=self._simulation.chain.head.number)
