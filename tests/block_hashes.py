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
    kind = int(receipt["type"], 16)
    return (bytes([kind]) if kind else b"") + rlp(fields)


def root_of(receipts: Sequence[Mapping[str, Any]], later: tuple[str, ...] = ()) -> str:
    """The tree itself is compared with another implementation in the tests of receipts."""
    return "0x" + ordered_root([encoded(receipt, later) for receipt in receipts]).hex()


def transactions_root(block: Mapping[str, Any]) -> str:
    """The root of a block's transactions, given with all of their fields."""
    return "0x" + ordered_root([signed(transaction) for transaction in block["transactions"]]).hex()


def signed(transaction: Mapping[str, Any]) -> bytes:
    """A transaction as it is hashed, types 0 to 4 (EIP-155, 2930, 1559, 4844, 7702); others have the form of type 2."""
    kind = int(transaction["type"], 16)
    price = ["gasPrice"] if kind < 2 else ["maxPriorityFeePerGas", "maxFeePerGas"]
    names = [*(["chainId"] if kind else []), "nonce", *price, "gas", "to", "value", "input"]
    names += {0: [], 3: ["accessList", "maxFeePerBlobGas", "blobVersionedHashes"]}.get(kind, ["accessList"])
    names += ["authorizationList"] if kind == 4 else []
    names += ["yParity" if kind else "v", "r", "s"]
    return (bytes([kind]) if kind else b"") + rlp([_item(name, transaction[name]) for name in names])


_BYTES = {"to", "input", "address", "storageKeys", "blobVersionedHashes"}


def _item(name: str, value: Any) -> Encodable:
    match value:
        case None:
            return b""
        case dict():
            return [_item(part, found) for part, found in value.items()]
        case list():
            return [_item(name, found) for found in value]
    return bytes.fromhex(value[2:]) if name in _BYTES else int(value, 16)
