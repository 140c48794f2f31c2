"""Validator records of the finalized state, and the activations and exits that follow from them (rules C4 and C5).

`activation_epoch` and `exit_epoch` are written once and at least five epochs ahead (consensus-specs
`initiate_validator_exit`, `compute_activation_exit_epoch`), so a record read later gives the same observations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vaultevents.core.chaintime import ChainTime
from vaultevents.core.events import Observation, ValidatorActivated, ValidatorExited
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Epoch, Hash32, Pubkey, ValidatorIndex

FAR_FUTURE_EPOCH = 2**64 - 1
"""What stands for an epoch that is not known yet."""

EPOCHS_AHEAD = 4
"""MAX_SEED_LOOKAHEAD: an epoch assigned in epoch b is at least b + 1 + this; up to b + this all are known (rule C4)."""

_PAYS_AN_ADDRESS = frozenset({b"\x01", b"\x02"})


@dataclass(frozen=True, slots=True)
class ValidatorRecord:
    """What is used of a validator: `pubkey` has 48 bytes; an epoch not yet known is `FAR_FUTURE_EPOCH`."""

    index: ValidatorIndex
    pubkey: Pubkey
    credentials: Hash32
    activation_epoch: int
    exit_epoch: int


def vault_of(credentials: bytes) -> Address | None:
    """The address that withdrawal credentials pay: `0x01` or `0x02`, 11 zero bytes, 20 bytes (EIP-7251; rule C5).

    None for all others: `0x00` (BLS) pays nobody yet, and any other prefix is not that of a validator.
    """
    if len(credentials) == 32 and credentials[:1] in _PAYS_AN_ADDRESS and not any(credentials[1:12]):
        return Address(credentials[12:])
    return None


def validators_head(current_epoch: int, finalized_block_epoch: int) -> int:
    """The epoch up to which activations and exits are complete and final (rule C4).

    `finalized_block_epoch` is that of the slot of the finalized *block*, which may be older than its checkpoint.
    """
    return min(current_epoch, finalized_block_epoch + EPOCHS_AHEAD)


def observe(records: Iterable[ValidatorRecord], span: Span, time: ChainTime) -> list[Observation]:
    """The activations and exits of a span of epochs, by epoch and index, each at its epoch's start (rules C4 and E2).

    A record whose credentials pay no address gives nothing.
    """
    seen: list[tuple[int, int, Observation]] = []
    for record in records:
        vault = vault_of(record.credentials)
        if vault is None:
            continue
        for kind, epoch in ((ValidatorActivated, record.activation_epoch), (ValidatorExited, record.exit_epoch)):
            if epoch in span and epoch != FAR_FUTURE_EPOCH:
                payload = kind(record.index, record.pubkey, Epoch(epoch))
                seen.append((epoch, record.index, Observation(vault, None, time.epoch_start_ms(epoch), payload)))
    return [observation for *_, observation in sorted(seen, key=lambda place: place[:2])]
