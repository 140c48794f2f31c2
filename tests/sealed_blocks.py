"""Blocks in JSON whose header still hashes to their hash after a field was changed.

The hash is made with the package `rlp`, which the service does not use for it.
"""

from __future__ import annotations

from typing import Any, Final

import rlp
from eth_hash.auto import keccak

Json = dict[str, Any]

HEADER_FIELDS: Final = (
    *("parentHash", "sha3Uncles", "miner", "stateRoot", "transactionsRoot", "receiptsRoot", "logsBloom"),
    *("difficulty", "number", "gasLimit", "gasUsed", "timestamp", "extraData", "mixHash", "nonce", "baseFeePerGas"),
    *("withdrawalsRoot", "blobGasUsed", "excessBlobGas", "parentBeaconBlockRoot", "requestsHash"),
    *("blockAccessListHash", "slotNumber"),
)
"""In the order in which they are hashed; from `baseFeePerGas` on each fork has added some."""
FIRST_LATER_FIELD: Final = HEADER_FIELDS.index("baseFeePerGas")
NUMBERS: Final = frozenset(
    (
        *("difficulty", "number", "gasLimit", "gasUsed", "timestamp"),
        *("baseFeePerGas", "blobGasUsed", "excessBlobGas", "slotNumber"),
    )
)


def header_hash(block: Json) -> str:
    """Hash the header fields that the block has."""
    items = [_item(name, block[name]) for name in HEADER_FIELDS if name in block]
    return "0x" + keccak(rlp.encode(items)).hex()


def sealed(block: Json, **changes: Any) -> Json:
    """Change fields of a block and give it the hash that they make."""
    changed = {**block, **changes}
    return {**changed, "hash": header_hash(changed)}


def without(block: Json, *names: str) -> Json:
    """Leave fields out of a block."""
    return {name: value for name, value in block.items() if name not in names}


def _item(name: str, text: str) -> bytes:
    if name not in NUMBERS:
        return bytes.fromhex(text[2:])
    number = int(text, 16)
    return number.to_bytes((number.bit_length() + 7) // 8)
