"""Deposits to the beacon chain, as the deposit contract logs them (rule C5).

A deposit says which validator may pay to a vault. Whether it does is in the validator's record alone: only the first
valid deposit of a public key sets the credentials.
"""

from __future__ import annotations

from dataclasses import dataclass

from vaultevents.core.keccak import keccak
from vaultevents.core.units import Hash32, Pubkey

DEPOSIT_EVENT = Hash32(keccak(b"DepositEvent(bytes,bytes,bytes,bytes,bytes)"))

_OFFSETS = b"".join(offset.to_bytes(32) for offset in (160, 256, 320, 384, 512))
_PUBKEY, _CREDENTIALS, _AMOUNT, _SIGNATURE, _INDEX = (192, 48), (288, 32), (352, 8), (416, 96), (544, 8)
_FIELDS = (_PUBKEY, _CREDENTIALS, _AMOUNT, _SIGNATURE, _INDEX)
_BYTES = 576


@dataclass(frozen=True, slots=True)
class Deposit:
    """A deposit; `index` counts all deposits of the contract from 0, without gaps."""

    index: int
    pubkey: Pubkey
    credentials: Hash32


def decode_deposit(data: bytes) -> Deposit | None:
    """Decode the data of a `DepositEvent`; None for another layout than that of the deposit contract."""
    if len(data) != _BYTES or not data.startswith(_OFFSETS):
        return None
    if any(int.from_bytes(data[begin - 32 : begin]) != size for begin, size in _FIELDS):
        return None
    pubkey, credentials, index = (data[begin : begin + size] for begin, size in (_PUBKEY, _CREDENTIALS, _INDEX))
    return Deposit(int.from_bytes(index, "little"), Pubkey(pubkey), Hash32(credentials))
