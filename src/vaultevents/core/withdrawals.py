"""Withdrawals of execution blocks: the proof that none is missing, and the fold into observations (rules C3 and E4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vaultevents.core.chaintime import ChainTime
from vaultevents.core.events import Observation, ValidatorWithdrawalCompleted
from vaultevents.core.units import WEI_PER_GWEI, Address, Epoch, Hash32, Pubkey, ValidatorIndex, Wei

BUILDER_FLAG = 2**40
"""A validator index from here on is that of a builder (EIP-7732) and is ignored (rule C3)."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """One entry of a block's `withdrawals` (EIP-4895); `index` counts all withdrawals of the chain."""

    index: int
    validator_index: ValidatorIndex
    address: Address
    amount_gwei: int


@dataclass(frozen=True, slots=True)
class WithdrawalBlock:
    """An execution block with its withdrawals, in their order."""

    number: int
    hash: Hash32
    parent_hash: Hash32
    timestamp_s: int
    withdrawals: tuple[Withdrawal, ...]


class IndexGap(ValueError):
    """A withdrawal is missing or repeated: the node that gave these blocks is faulty."""


def last_index_after(blocks: Iterable[WithdrawalBlock], last_index: int | None) -> int | None:
    """The index of the last withdrawal once `blocks`, in chain order, have been read; `last_index` is that before them.

    Each index must be the one before plus one, within a block and across blocks (rule C3). With `last_index` None the
    first index found is taken as it is. Raises `IndexGap`, which names the block and the indices.
    """
    for block in blocks:
        for withdrawal in block.withdrawals:
            if last_index is not None and withdrawal.index != last_index + 1:
                problem = "is there twice or out of order" if withdrawal.index <= last_index else "leaves a gap"
                raise IndexGap(f"withdrawal {withdrawal.index} in block {block.number} {problem} after {last_index}")
            last_index = withdrawal.index
    return last_index


def wanted(blocks: Iterable[WithdrawalBlock], vaults: frozenset[Address]) -> set[ValidatorIndex]:
    """The validators that pay one of `vaults` in these blocks: their public keys are needed for `fold`."""
    return {withdrawal.validator_index for block in blocks for withdrawal in _to_vaults(block, vaults)}


def fold(
    blocks: Iterable[WithdrawalBlock], vaults: frozenset[Address], pubkeys: Mapping[int, Pubkey], time: ChainTime
) -> list[Observation]:
    """One observation per (validator, epoch) that pays a vault: the sum, at its last block (rules E2 and E4).

    `blocks` are all blocks of whole epochs, in chain order; `pubkeys` has every validator that is `wanted`. The
    observations come in the order of their last withdrawals.
    """
    amounts_gwei: dict[tuple[Address, ValidatorIndex, int], int] = {}
    last_blocks: dict[tuple[Address, ValidatorIndex, int], WithdrawalBlock] = {}
    for block in blocks:
        for withdrawal in _to_vaults(block, vaults):
            key = (withdrawal.address, withdrawal.validator_index, time.epoch_at(block.timestamp_s))
            amounts_gwei[key] = amounts_gwei.pop(key, 0) + withdrawal.amount_gwei  # pop: the last comes last
            last_blocks[key] = block
    return [
        Observation(
            vault,
            last_blocks[vault, index, epoch].number,
            last_blocks[vault, index, epoch].timestamp_s * 1000,
            ValidatorWithdrawalCompleted(index, pubkeys[index], Epoch(epoch), Wei(amount_gwei * WEI_PER_GWEI)),
        )
        for (vault, index, epoch), amount_gwei in amounts_gwei.items()
    ]


def _to_vaults(block: WithdrawalBlock, vaults: frozenset[Address]) -> list[Withdrawal]:
    return [
        withdrawal
        for withdrawal in block.withdrawals
        if withdrawal.address in vaults and withdrawal.validator_index < BUILDER_FLAG
    ]
