"""The beacon chain of the devnet: the slots and epochs of an execution chain, its finality, and its validators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from eth_hash.auto import keccak

from vaultevents.devnet.blocks import Block
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.validators import ValidatorRegistry


@dataclass(frozen=True, slots=True)
class Finality:
    """A checkpoint: `block` is the last one at or before the first slot of `epoch`, so it may be of an older epoch."""

    epoch: int
    block: Block


class Beacon:
    """Every execution block has a beacon block in its slot; where the chain missed a slot, neither exists.

    Finality is that of the chain: the newest checkpoint whose block is not newer than the chain's finalized block. So
    it stands still, goes back or is missing when a test says so of `chain.finalized`.
    """

    def __init__(self, chain: Chain, *, slots_per_epoch: int = 8) -> None:
        self.chain = chain
        self.slots_per_epoch = slots_per_epoch
        self.registry = ValidatorRegistry(slots_per_epoch)
        self.genesis_validators_root = keccak(f"{chain.seed}/validators of genesis".encode())
        self.genesis = self.last_block_at(0)

    def epoch_of(self, slot: int) -> int:
        return slot // self.slots_per_epoch

    def first_slot(self, epoch: int) -> int:
        return epoch * self.slots_per_epoch

    def epoch_start_s(self, epoch: int) -> int:
        """The time at which an epoch begins, whether or not its first slot has a block."""
        return self.genesis.timestamp_s + self.first_slot(epoch) * self.chain.seconds_per_slot

    def last_block_at(self, slot: int) -> Block:
        """The block of a slot or, where nobody proposed in it, the last one before."""
        return self.chain.last_block_at(slot)

    def finality(self, finalized_number: int | None) -> Finality:
        """The newest checkpoint at or before an execution block; that of genesis while no block is final."""
        block = None if finalized_number is None else self.chain.block(finalized_number)
        epoch = 0 if block is None else self.epoch_of(block.slot)
        return Finality(epoch, self.last_block_at(self.first_slot(epoch)))


def beacon_root(block: Block) -> bytes:
    """The root of the beacon block that carries an execution block."""
    return _root(block.hash)


@lru_cache(maxsize=65536)
def _root(execution_hash: bytes) -> bytes:
    return keccak(b"beacon block" + execution_hash)
