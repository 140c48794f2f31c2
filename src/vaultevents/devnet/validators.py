"""The validator registry of the devnet: what was decided about each validator, and when.

Activation and exit epochs are written once and at least `EPOCHS_AHEAD` epochs ahead (consensus-specs
`compute_activation_exit_epoch`, `initiate_validator_exit`), which the registry enforces.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

FAR_FUTURE_EPOCH = 2**64 - 1
EPOCHS_AHEAD = 5
"""1 + MAX_SEED_LOOKAHEAD: an epoch decided in epoch e is e + 5 or later."""
WITHDRAWABLE_DELAY_EPOCHS = 1
SLASHED_DELAY_EPOCHS = 64
"""From exit to withdrawable: MIN_VALIDATOR_WITHDRAWABILITY_DELAY and, as in the minimal preset, that of a slashing."""
STAKE_GWEI = 32_000_000_000


@dataclass(frozen=True, slots=True)
class Assigned:
    """An epoch, and the slot in which it was decided."""

    slot: int
    epoch: int


@dataclass(slots=True, eq=False)
class Validator:
    """All decisions about one validator; `credentials` are (slot of the change, value), the oldest first."""

    index: int
    pubkey: bytes
    credentials: list[tuple[int, bytes]]
    activation: Assigned | None = None
    exit: Assigned | None = None
    slashed: bool = False
    drained_slot: int | None = None
    """When the whole balance left: swept after the exit, or moved by a consolidation."""

    @property
    def appended_slot(self) -> int:
        return self.credentials[0][0]

    @property
    def withdrawable_epoch(self) -> int:
        if self.exit is None:
            return FAR_FUTURE_EPOCH
        return self.exit.epoch + (SLASHED_DELAY_EPOCHS if self.slashed else WITHDRAWABLE_DELAY_EPOCHS)

    def credentials_at(self, slot: int) -> bytes | None:
        """The withdrawal credentials in the state after `slot`; None while the validator is not there yet."""
        return next((value for since, value in reversed(self.credentials) if since <= slot), None)

    def is_active(self, epoch: int) -> bool:
        began = self.activation is not None and self.activation.epoch <= epoch
        return began and (self.exit is None or epoch < self.exit.epoch)


@dataclass(frozen=True, slots=True)
class Record:
    """A validator as a state shows it; epochs not decided by then are `FAR_FUTURE_EPOCH`."""

    index: int
    pubkey: bytes
    credentials: bytes
    balance_gwei: int
    slashed: bool
    activation_eligibility_epoch: int
    activation_epoch: int
    exit_epoch: int
    withdrawable_epoch: int


@dataclass(slots=True)
class ValidatorRegistry:
    """Every validator by index. Validators are only appended; a decision is made in a slot and holds from then on."""

    slots_per_epoch: int
    validators: list[Validator] = field(default_factory=list)

    def append(self, slot: int, pubkey: bytes, credentials: bytes, *, active: bool = False) -> Validator:
        """A deposit. `active` is for validators of the genesis state, which need not wait.

        Raises ValueError for keys of a wrong length, a slot before that of the last deposit, and an active validator
        after genesis.
        """
        if len(pubkey) != 48 or len(credentials) != 32:
            raise ValueError("a public key has 48 bytes, withdrawal credentials have 32")
        if self.validators and slot < self.validators[-1].appended_slot:
            raise ValueError(f"slot {slot} is before the last deposit")
        if active and slot:
            raise ValueError("only genesis has validators that are active at once")
        validator = Validator(len(self.validators), pubkey, [(slot, credentials)])
        if active:
            validator.activation = Assigned(0, 0)
        self.validators.append(validator)
        return validator

    def activate(self, index: int, slot: int, epoch: int) -> None:
        """Decide in `slot` that the validator is active from `epoch` on. Raises ValueError against the rules."""
        validator = self._decidable(index, slot, epoch)
        if validator.activation is not None:
            raise ValueError(f"the activation epoch of validator {index} is decided")
        validator.activation = Assigned(slot, epoch)

    def exit(self, index: int, slot: int, epoch: int, *, slashed: bool = False) -> None:
        """Decide in `slot` that the validator exits at `epoch`. Raises ValueError against the rules."""
        validator = self._decidable(index, slot, epoch)
        if validator.exit is not None:
            raise ValueError(f"the exit epoch of validator {index} is decided")
        if not validator.is_active(slot // self.slots_per_epoch):
            raise ValueError(f"validator {index} is not active")
        validator.exit = Assigned(slot, epoch)
        validator.slashed = slashed

    def change_credentials(self, index: int, slot: int, credentials: bytes) -> None:
        """From `0x00` to `0x01`, or from `0x01` to `0x02` of the same address. Raises ValueError for another change."""
        validator = self.validators[index]
        since, before = validator.credentials[-1]
        switched = (before[0], credentials[0])
        if slot < since or not (switched == (0, 1) or (switched == (1, 2) and before[1:] == credentials[1:])):
            raise ValueError(f"validator {index} cannot change to these credentials in slot {slot}")
        validator.credentials.append((slot, credentials))

    def count(self, slot: int) -> int:
        """How many validators the state after `slot` has."""
        return bisect_right(self.validators, slot, key=lambda validator: validator.appended_slot)

    def record(self, index: int, slot: int) -> Record | None:
        """A validator as the state after `slot` shows it; None when that state does not have it."""
        validator = self.validators[index] if 0 <= index < len(self.validators) else None
        credentials = None if validator is None else validator.credentials_at(slot)
        if validator is None or credentials is None:
            return None
        exits = _epoch(validator.exit, slot)
        appended = validator.appended_slot
        return Record(
            index,
            validator.pubkey,
            credentials,
            0 if validator.drained_slot is not None and validator.drained_slot <= slot else STAKE_GWEI,
            validator.slashed and exits != FAR_FUTURE_EPOCH,
            appended // self.slots_per_epoch + 1 if appended else 0,
            _epoch(validator.activation, slot),
            exits,
            FAR_FUTURE_EPOCH if exits == FAR_FUTURE_EPOCH else validator.withdrawable_epoch,
        )

    def _decidable(self, index: int, slot: int, epoch: int) -> Validator:
        validator = self.validators[index]
        if slot < validator.appended_slot:
            raise ValueError(f"validator {index} does not exist in slot {slot}")
        if epoch < slot // self.slots_per_epoch + EPOCHS_AHEAD:
            raise ValueError(f"epoch {epoch} is less than {EPOCHS_AHEAD} epochs after slot {slot}")
        return validator


def _epoch(assigned: Assigned | None, slot: int) -> int:
    return assigned.epoch if assigned is not None and assigned.slot <= slot else FAR_FUTURE_EPOCH


def paying(prefix: int, address: bytes) -> bytes:
    """Withdrawal credentials that pay an address: `0x01`, or `0x02` for a compounding validator (EIP-7251)."""
    return bytes([prefix]) + bytes(11) + address


def paid_address(credentials: bytes) -> bytes | None:
    """The address that withdrawal credentials pay, if they pay one."""
    return credentials[12:] if credentials[:12] in (paying(1, b""), paying(2, b"")) else None
