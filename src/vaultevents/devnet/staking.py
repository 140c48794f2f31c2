"""What validators do in the simulation: deposits, activations, and exits of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from vaultevents.devnet.beacon import Beacon
from vaultevents.devnet.blocks import Payout
from vaultevents.devnet.decks import Deck
from vaultevents.devnet.payments import GWEI_PER_ETH, Payments
from vaultevents.devnet.validators import EPOCHS_AHEAD, STAKE_GWEI, Validator, paid_address, paying

FEWEST_VALIDATORS = 11

_SLASHING_PENALTY_GWEI = GWEI_PER_ETH
_CONSOLIDATION_EXCESS_GWEI = 1_000_000


class Staking:
    """Decides, epoch by epoch, what happens to `count` validators of genesis and to those that are deposited later.

    A fifth of them, six at least, pay one of `vaults`, which may grow. In each epoch that has a block, at least one
    of these is activated or exits, five epochs later or more, and one is paid in an awkward way. Of every 16 epochs
    one has no block in its first slot and one has no block at all (`is_missed`).
    """

    def __init__(self, rng: Random, beacon: Beacon, vaults: Sequence[bytes], count: int, most_swept: int) -> None:
        if count < FEWEST_VALIDATORS:
            raise ValueError(f"a simulation has no validators, or {FEWEST_VALIDATORS} or more")
        self._rng = rng
        self._beacon = beacon
        self._registry = beacon.registry
        self._vaults = vaults
        self._epoch = -1
        self._churn_epochs = 0  # by how much a long queue puts an activation or exit off
        self._own: list[Validator] = []
        self._foreign: list[Validator] = []
        self._late: list[Validator] = []
        self._lives, self._asides = Deck(rng, _LIVES), Deck(rng, _ASIDES)
        self._payments = Payments(rng, beacon, vaults, self._own, most_swept)
        self._found(count, max(6, count // 5))

    def is_missed(self, slot: int) -> bool:
        """Whether the scenario wants no block in this slot."""
        epoch, place = divmod(slot, self._beacon.slots_per_epoch)
        return (epoch % 16 == 5 and place == 0) or epoch % 16 == 3

    def payouts(self, slot: int) -> list[Payout]:
        """Decide what is due up to `slot`, in which a block is about to be mined; returns what that block pays."""
        epoch = self._beacon.epoch_of(slot)
        if epoch > self._epoch:
            self._epoch = epoch
            self._decide(slot)
            self._payments.plan(epoch)
        return self._payments.of_block(slot)

    def _found(self, count: int, own: int) -> None:
        """The genesis state: of our own three wait, two do not pay their vault yet, and three only seem to be ours."""
        vault = self._vaults[0]
        traps = [bytes(12) + vault, b"\x01" + bytes(10) + b"\x01" + vault, b"\xb0" + bytes(11) + vault]
        kinds = ["own"] * (own - 3) + ["waiting"] * 3 + ["late", "late, waiting"]
        kinds += ["foreign"] * (count - len(kinds) - len(traps))
        self._rng.shuffle(kinds)
        for kind in kinds:
            match kind:
                case "late" | "late, waiting":
                    self._late.append(self._append(0, self._no_address(), active=kind == "late"))
                case "foreign":
                    self._foreign.append(self._append(0, self._foreign_credentials(), active=True))
                case _:
                    self._own.append(self._append(0, self._own_credentials(), active=kind == "own"))
        self._foreign += [self._append(0, trap) for trap in traps]

    def _decide(self, slot: int) -> None:
        """Everything that is decided in the first block of an epoch: lives take the first epoch allowed."""
        lives = 1 + len(self._own) // 250
        for _ in range(lives):
            self._lives.deal()(self, slot)
        self._churn_epochs = self._rng.randint(0, 3)
        self._asides.deal()(self, slot)
        self._activate(self._late, slot)
        self._churn_epochs = 0
        while sum(validator.activation is None for validator in self._own) < 2 + lives:
            self.deposit(slot)

    def deposit(self, slot: int) -> None:
        self._own.append(self._append(slot, self._own_credentials()))

    def foreign_deposit(self, slot: int) -> None:
        self._foreign.append(self._append(slot, self._foreign_credentials()))

    def activation(self, slot: int) -> None:
        self._activate(self._own, slot)

    def foreign_activation(self, slot: int) -> None:
        self._activate(self._foreign, slot)

    def exit(self, slot: int) -> None:
        self._leave(self._own, slot, STAKE_GWEI + self._rng.randint(0, GWEI_PER_ETH))

    def foreign_exit(self, slot: int) -> None:
        self._leave(self._foreign, slot, STAKE_GWEI)

    def slashing(self, slot: int) -> None:
        self._leave(self._own, slot, STAKE_GWEI - _SLASHING_PENALTY_GWEI, slashed=True)

    def consolidation(self, slot: int) -> None:
        """The stake moves to another validator without a withdrawal; only what exceeds it is paid out."""
        self._leave(self._own, slot, _CONSOLIDATION_EXCESS_GWEI)

    def foreign_consolidation(self, slot: int) -> None:
        """A foreign validator merges into another, perhaps one of ours: no event for the target."""
        self._leave(self._foreign, slot, _CONSOLIDATION_EXCESS_GWEI)

    def late_credentials(self, slot: int) -> None:
        """A validator that may have been active for some time pays a vault from now on."""
        for validator in self._late:
            if validator.is_active(self._epoch):
                self._registry.change_credentials(validator.index, slot, self._own_credentials(1))
                self._late.remove(validator)
                self._own.append(validator)
                return

    def compounding(self, slot: int) -> None:
        for validator in _leavable(self._own, self._epoch):
            credentials = validator.credentials[-1][1]
            if credentials[0] == 1:
                self._registry.change_credentials(validator.index, slot, b"\x02" + credentials[1:])
                return

    def _append(self, slot: int, credentials: bytes, *, active: bool = False) -> Validator:
        return self._registry.append(slot, self._rng.randbytes(48), credentials, active=active)

    def _activate(self, pool: Sequence[Validator], slot: int) -> None:
        """The one that has waited longest, since an earlier epoch or genesis."""
        appended_before = max(self._beacon.first_slot(self._epoch), 1)
        for validator in pool:
            if validator.activation is None and validator.appended_slot < appended_before:
                self._registry.activate(validator.index, slot, self._epoch_ahead())
                return

    def _leave(self, pool: Sequence[Validator], slot: int, amount_gwei: int, *, slashed: bool = False) -> None:
        """An exit, and the payment of what is left once it is withdrawable; with few active, an activation instead."""
        candidates = _leavable(pool, self._epoch)
        if len(candidates) < 3:
            self._activate(pool, slot)
            return
        validator = self._rng.choice(candidates)
        self._registry.exit(validator.index, slot, self._epoch_ahead(), slashed=slashed)
        address = paid_address(validator.credentials[-1][1])
        if address is not None:
            withdrawable = self._beacon.first_slot(validator.withdrawable_epoch)
            swept = withdrawable + self._rng.randrange(2 * self._beacon.slots_per_epoch)
            self._payments.pay(swept, validator.index, address, amount_gwei, drained=validator)

    def _epoch_ahead(self) -> int:
        return self._epoch + EPOCHS_AHEAD + self._churn_epochs

    def _own_credentials(self, prefix: int | None = None) -> bytes:
        return paying(prefix or self._rng.choice([1, 2]), self._rng.choice(self._vaults))

    def _foreign_credentials(self) -> bytes:
        if self._rng.random() < 0.2:
            return self._no_address()
        return paying(self._rng.choice([1, 2]), self._rng.randbytes(20))

    def _no_address(self) -> bytes:
        return b"\0" + self._rng.randbytes(31)


def _leavable(pool: Sequence[Validator], epoch: int) -> list[Validator]:
    return [validator for validator in pool if validator.exit is None and validator.is_active(epoch)]


_LIVES: dict[Callable[[Staking, int], None], int] = {
    Staking.activation: 4,
    Staking.exit: 2,
    Staking.slashing: 1,
    Staking.consolidation: 1,
}
_ASIDES: dict[Callable[[Staking, int], None], int] = {
    Staking.activation: 1,
    Staking.exit: 1,
    Staking.foreign_deposit: 1,
    Staking.foreign_activation: 3,
    Staking.foreign_exit: 2,
    Staking.foreign_consolidation: 1,
    Staking.late_credentials: 2,
    Staking.compounding: 1,
}
