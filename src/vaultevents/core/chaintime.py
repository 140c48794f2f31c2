"""Slots, epochs and times of one beacon chain (consensus-specs `compute_time_at_slot`, `compute_epoch_at_slot`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChainTime:
    """Slot n lasts from `genesis_s` + n slots up to, not including, the start of slot n + 1; epochs are whole slots.

    `slot_ms` need not be whole seconds, so the start of a slot is exact in milliseconds only. Raises `ValueError` for
    lengths below 1, and every method for a time before genesis and for a negative slot or epoch: there are none.
    """

    genesis_s: int
    slot_ms: int
    slots_per_epoch: int

    def __post_init__(self) -> None:
        if self.genesis_s < 0 or self.slot_ms < 1 or self.slots_per_epoch < 1:
            raise ValueError(f"not the time of a chain: {self}")

    def __str__(self) -> str:
        return f"genesis {self.genesis_s}, slots of {self.slot_ms} ms, epochs of {self.slots_per_epoch} slots"

    def slot_at(self, time_s: int) -> int:
        """The slot in which the moment `time_s` lies; for the time of a block, the block's slot."""
        if time_s < self.genesis_s:
            raise ValueError(f"time {time_s} is before genesis at {self.genesis_s}")
        return (time_s - self.genesis_s) * 1000 // self.slot_ms

    def epoch_at(self, time_s: int) -> int:
        """The epoch in which the moment `time_s` lies."""
        return self.epoch_of(self.slot_at(time_s))

    def epoch_of(self, slot: int) -> int:
        """The epoch of a slot."""
        return _not_negative("slot", slot) // self.slots_per_epoch

    def first_slot(self, epoch: int) -> int:
        """The first slot of an epoch."""
        return _not_negative("epoch", epoch) * self.slots_per_epoch

    def epoch_start_ms(self, epoch: int) -> int:
        """The moment at which an epoch begins: the `created_at` of its activations and exits (rule E2)."""
        return self.genesis_s * 1000 + self.first_slot(epoch) * self.slot_ms

    def epoch_start_s(self, epoch: int) -> int:
        """The first whole second of an epoch: the least timestamp that a block of it can have."""
        return -(-self.epoch_start_ms(epoch) // 1000)

    def may_finalize(self, final_slot: int, now_s: int) -> bool:
        """Whether a block after `final_slot` can be final at `now_s`.

        In epoch e no checkpoint after that of epoch e - 2 is final (consensus-specs
        `weigh_justification_and_finalization`), and its block is not after the first slot of its epoch.
        """
        return now_s < self.genesis_s or final_slot < self.first_slot(max(0, self.epoch_at(now_s) - 2))

    @property
    def epoch_s(self) -> float:
        """How long an epoch lasts."""
        return self.slots_per_epoch * self.slot_ms / 1000


def _not_negative(what: str, number: int) -> int:
    if number < 0:
        raise ValueError(f"there is no {what} {number}")
    return number
