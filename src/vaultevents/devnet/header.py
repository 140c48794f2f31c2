"""Block headers as clients hash them (Prague and later) and log blooms (Yellow Paper §4.3.1, EIP-7685)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eth_hash.auto import keccak

from vaultevents.devnet.encoding import rlp_encode
from vaultevents.devnet.hardforks import HeaderField

EMPTY_UNCLES_HASH = keccak(rlp_encode([]))
NO_REQUESTS_HASH = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
"""SHA-256 of nothing: the requests hash of a block without execution requests (EIP-7685)."""
EMPTY_BLOOM = bytes(256)

_FEE_RECIPIENT = bytes.fromhex("00000000000000000000000000000000000000fe")
_EXTRA_DATA = b"devnet"
_GAS_LIMIT = 60_000_000
_BASE_FEE_WEI = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Header:
    """What differs from header to header; the remaining fields are constants of this devnet.

    `later_fields` are those that forks after Prague append.
    """

    parent_hash: bytes
    state_root: bytes
    transactions_root: bytes
    receipts_root: bytes
    logs_bloom: bytes
    number: int
    gas_used: int
    timestamp_s: int
    prev_randao: bytes
    parent_beacon_block_root: bytes
    withdrawals_root: bytes
    later_fields: tuple[HeaderField, ...] = ()

    def hash(self) -> bytes:
        """Return the Keccak hash of the RLP list of all fields (21 in Prague), in protocol order."""
        return keccak(rlp_encode(list(self.fields().values())))

    def fields(self) -> dict[str, bytes | int]:
        """All header fields in the order in which they are hashed, under their JSON-RPC names."""
        return {
            "parentHash": self.parent_hash,
            "sha3Uncles": EMPTY_UNCLES_HASH,
            "miner": _FEE_RECIPIENT,
            "stateRoot": self.state_root,
            "transactionsRoot": self.transactions_root,
            "receiptsRoot": self.receipts_root,
            "logsBloom": self.logs_bloom,
            "difficulty": 0,
            "number": self.number,
            "gasLimit": _GAS_LIMIT,
            "gasUsed": self.gas_used,
            "timestamp": self.timestamp_s,
            "extraData": _EXTRA_DATA,
            "mixHash": self.prev_randao,
            "nonce": bytes(8),
            "baseFeePerGas": _BASE_FEE_WEI,
            "withdrawalsRoot": self.withdrawals_root,
            "blobGasUsed": 0,
            "excessBlobGas": 0,
            "parentBeaconBlockRoot": self.parent_beacon_block_root,
            "requestsHash": NO_REQUESTS_HASH,
            **dict(self.later_fields),
        }

    def to_json(self) -> dict[str, Any]:
        """The header fields in JSON-RPC form: byte strings as hex data, numbers as hex quantities."""
        return {name: hex_data(v) if isinstance(v, bytes) else hex(v) for name, v in self.fields().items()}


def hex_data(value: bytes) -> str:
    """`0x` and lower-case hex."""
    return "0x" + value.hex()


@lru_cache(maxsize=65536)
def bloom_bits(value: bytes) -> int:
    """The three bits (some may coincide) that an address or a topic sets, in a 2048-bit integer."""
    digest = keccak(value)
    bits = 0
    for at in (0, 2, 4):
        bits |= 1 << ((digest[at] << 8 | digest[at + 1]) & 0x7FF)
    return bits


def bloom_of(values: Iterable[bytes]) -> int:
    """The bloom of a set of addresses and topics."""
    bits = 0
    for value in values:
        bits |= bloom_bits(value)
    return bits
