"""The withdrawals of the simulation: the ordinary sweep, and every awkward way in which a validator is paid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random

from vaultevents.devnet.beacon import Beacon
from vaultevents.devnet.blocks import Payout
from vaultevents.devnet.decks import Deck
from vaultevents.devnet.validators import Validator, paid_address

MAX_WITHDRAWALS_PER_PAYLOAD = 16
BUILDER_FLAG = 2**40
"""A validator index from here on is that of a builder (EIP-7732)."""
GWEI_PER_ETH = 10**9

_SWEPT_SHARE = 0.6
_CREDITED_AFTER_EPOCHS = 2  # new credentials are final before anything is paid to them


class Payments:
    """Plans and makes the payments of all validators; `own` are those that pay one of `vaults`, and both may grow.

    `most_swept` is the largest number of ordinary withdrawals of a block.
    """

    def __init__(
        self, rng: Random, beacon: Beacon, vaults: Sequence[bytes], own: Sequence[Validator], most_swept: int
    ) -> None:
        if not 0 <= most_swept <= MAX_WITHDRAWALS_PER_PAYLOAD:
            raise ValueError(f"a block has {MAX_WITHDRAWALS_PER_PAYLOAD} withdrawals at most")
        self._rng = rng
        self._beacon = beacon
        self._vaults = vaults
        self._own = own
        self._most_swept = most_swept
        self._deck = Deck(rng, _PAYMENTS)
        self._due: list[tuple[int, int, Payout, Validator | None]] = []
        self._planned = 0
        self._swept = 0

    def plan(self, epoch: int) -> None:
        """One awkward payment of our own validators in this epoch."""
        self._deck.deal()(self, epoch)

    def pay(self, slot: int, index: int, address: bytes, amount_gwei: int, *, drained: Validator | None = None) -> None:
        """In the block of `slot`, or in the next that has room; `drained` has nothing left afterwards."""
        self._planned += 1
        heappush(self._due, (slot, self._planned, Payout(index, address, amount_gwei), drained))

    def of_block(self, slot: int) -> list[Payout]:
        """What the block in this slot pays: what is due, then what is swept; often nothing."""
        paid: list[Payout] = []
        while self._due and self._due[0][0] <= slot and len(paid) < MAX_WITHDRAWALS_PER_PAYLOAD:
            _, _, payout, drained = heappop(self._due)
            paid.append(payout)
            if drained is not None:
                drained.drained_slot = slot
        if self._rng.random() < _SWEPT_SHARE:
            most = self._rng.randint(0, self._most_swept)
            paid += self._sweep(slot, min(most, MAX_WITHDRAWALS_PER_PAYLOAD - len(paid)))
        return paid

    def partial(self, epoch: int) -> None:
        self._pay_own(epoch, self._some_slot(epoch))

    def several_in_a_block(self, epoch: int) -> None:
        self._pay_own(epoch, *[self._some_slot(epoch)] * self._rng.randint(2, 3))

    def several_in_an_epoch(self, epoch: int) -> None:
        self._pay_own(epoch, *(self._some_slot(epoch) for _ in range(3)))

    def around_a_boundary(self, epoch: int) -> None:
        """In the last slot of this epoch and in the first of the next."""
        boundary = self._beacon.first_slot(epoch + 1)
        self._pay_own(epoch, boundary - 1, boundary)

    def dust(self, epoch: int) -> None:
        self._pay_own(epoch, self._some_slot(epoch), amount_gwei=1)

    def of_a_builder(self, epoch: int) -> None:
        """A builder that pays a vault: its entry counts for the index and for nothing else."""
        index = BUILDER_FLAG + self._rng.randrange(1000)
        self.pay(self._some_slot(epoch), index, self._rng.choice(self._vaults), self._rng.randint(1, GWEI_PER_ETH))

    def after_the_end(self, epoch: int) -> None:
        """A top-up of a validator that has nothing left is credited and swept once more."""
        gone = [validator for validator in self._own if validator.drained_slot is not None]
        if gone:
            validator = self._rng.choice(gone)
            amount_gwei = self._rng.randint(1, 3) * GWEI_PER_ETH
            self.pay(self._some_slot(epoch), validator.index, _address(validator), amount_gwei)

    def _pay_own(self, epoch: int, *slots: int, amount_gwei: int | None = None) -> None:
        candidates = [validator for validator in self._own if self._is_paid(validator, epoch)]
        if candidates:
            validator = self._rng.choice(candidates)
            for slot in slots:
                amount = self._rng.randint(1, 5 * GWEI_PER_ETH) if amount_gwei is None else amount_gwei
                self.pay(slot, validator.index, _address(validator), amount)

    def _is_paid(self, validator: Validator, epoch: int) -> bool:
        since = self._beacon.first_slot(max(epoch - _CREDITED_AFTER_EPOCHS, 0))
        credentials = validator.credentials_at(since)
        return validator.is_active(epoch) and credentials is not None and paid_address(credentials) is not None

    def _some_slot(self, epoch: int) -> int:
        return self._beacon.first_slot(epoch) + self._rng.randrange(self._beacon.slots_per_epoch)

    def _sweep(self, slot: int, most: int) -> list[Payout]:
        """Up to `most` rewards, going round all validators."""
        paid: list[Payout] = []
        epoch, validators = self._beacon.epoch_of(slot), self._beacon.registry.validators
        for _ in range(min(4 * most, len(validators))):
            if len(paid) == most:
                break
            self._swept = (self._swept + 1) % len(validators)
            validator = validators[self._swept]
            if self._is_paid(validator, epoch):
                paid.append(Payout(validator.index, _address(validator), self._rng.randint(1_000_000, 20_000_000)))
        return paid


def _address(validator: Validator) -> bytes:
    """Where a validator that pays somebody pays to."""
    return validator.credentials[-1][1][12:]


_PAYMENTS: dict[Callable[[Payments, int], None], int] = {
    Payments.partial: 2,
    Payments.several_in_a_block: 1,
    Payments.several_in_an_epoch: 1,
    Payments.around_a_boundary: 2,
    Payments.dust: 1,
    Payments.of_a_builder: 1,
    Payments.after_the_end: 1,
}
