"""The deposit contract of the devnet: one log for each validator, as the contract of mainnet emits it."""

from __future__ import annotations

from collections.abc import Sequence

from eth_hash.auto import keccak

from vaultevents.devnet.blocks import Log
from vaultevents.devnet.validators import STAKE_GWEI, Validator

DEPOSIT_CONTRACT = b"\x42" * 20
DEPOSIT_TOPIC = keccak(b"DepositEvent(bytes,bytes,bytes,bytes,bytes)")


def deposit_log(validator: Validator) -> Log:
    """The log of the deposit that made a validator; its index is that of the validator, since nobody tops up."""
    credentials = validator.credentials[0][1]
    amount, index = STAKE_GWEI.to_bytes(8, "little"), validator.index.to_bytes(8, "little")
    signature = keccak(validator.pubkey) * 3
    data = _abi_encoded([validator.pubkey, credentials, amount, signature, index])
    return Log(DEPOSIT_CONTRACT, (DEPOSIT_TOPIC,), data)


def _abi_encoded(values: Sequence[bytes]) -> bytes:
    """A tuple of `bytes`: the offsets of all, then each with its length, padded to whole words."""
    heads, tails = b"", b""
    for value in values:
        heads += (32 * len(values) + len(tails)).to_bytes(32)
        tails += len(value).to_bytes(32) + value.ljust(-(-len(value) // 32) * 32, b"\0")
    return heads + tails
