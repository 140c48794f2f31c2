"""Hashes of headers and roots of receipts from the JSON of a node, with an RLP encoder of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eth_hash.auto import keccak

from vaultevents.devnet.trie import ordered_root

PRAGUE = (
    *("parentHash", "sha3Uncles", "miner", "stateRoot", "transactionsRoot", "receiptsRoot", "logsBloom", "difficulty"),
    *("number", "gasLimit", "gasUsed", "timestamp", "extraData", "mixHash", "nonce", "baseFeePerGas"),
    *("withdrawalsRoot", "blobGasUsed", "excessBlobGas", "parentBeaconBlockRoot", "requestsHash"),
)
AMSTERDAM = (*PRAGUE, "blockAccessListHash", "slotNumber")
FUTURE = (*AMSTERDAM, "inclusionListRoot")
QUANTITIES = {
    *("difficulty", "number", "gasLimit", "gasUsed", "timestamp", "baseFeePerGas", "blobGasUsed", "excessBlobGas"),
    "slotNumber",
}

Encodable = bytes | int | list["Encodable"]


def rlp(value: Encodable) -> bytes:
    """Encode by the rules of the Yellow Paper, appendix B."""
    match value:
        case int():
            return rlp(value.to_bytes((value.bit_length() + 7) // 8))
        case bytes() if len(value) == 1 and value[0] < 0x80:
            return value
        case bytes():
            return _prefix(0x80, len(value)) + value
    payload = b"".join(map(rlp, value))
    return _prefix(0xC0, len(payload)) + payload


def _prefix(offset: int, size: int) -> bytes:
    if size < 56:
        return bytes([offset + size])
    digits = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([offset + 55 + len(digits)]) + digits


def header_hash(block: Mapping[str, Any], fields: tuple[str, ...] = PRAGUE) -> str:
    """The hash of a header that has exactly these fields."""
    items: list[Encodable] = [
        int(block[name], 16) if name in QUANTITIES else bytes.fromhex(block[name][2:]) for name in fields
    ]
    return "0x" + keccak(rlp(items)).hex()


def encoded(receipt: Mapping[str, Any], later: tuple[str, ...] = ()) -> bytes:
    """A receipt as it is hashed (EIP-2718), with the values of `later` at its end."""
    logs: list[Encodable] = [
        [
            bytes.fromhex(log["address"][2:]),
            [bytes.fromhex(topic[2:]) for topic in log["topics"]],
            bytes.fromhex(log["data"][2:]),
        ]
        for log in receipt["logs"]
    ]
    fields: list[Encodable] = [
        int(receipt["status"], 16),
        int(receipt["cumulativeGasUsed"], 16),
        bytes.fromhex(receipt["logsBloom"][2:]),
        logs,
        *(int(receipt[name], 16) for name in later),
    ]
    return bytes([int(receipt["type"], 16)]) + rlp(fields)


def root_of(receipts: Sequence[Mapping[str, Any]], later: tuple[str, ...] = ()) -> str:
    """The tree itself is compared with another implementation in the tests of receipts."""
    return "0x" + ordered_root([encoded(receipt, later) for receipt in receipts]).hex()
