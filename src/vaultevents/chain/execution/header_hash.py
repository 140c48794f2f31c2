"""The hash of a block header, computed from its fields (Yellow Paper §4.3; the EIP of each later field).

A header whose fields hash to the block's hash is authentic to the last bit, whichever node it came from.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import astuple

from vaultevents.chain.execution.rlp_encoding import from_text, text_data, text_list, text_number
from vaultevents.core.keccak import keccak


class HeaderFields(msgspec.Struct, rename="camel", gc=False):
    """The fields of a header as JSON-RPC has them, in the order in which they are hashed.

    From `base_fee_per_gas` on each fork has added some: EIP-1559, 4895, 4844, 4788, 7685, 7928 and 7843.
    """

    parent_hash: str
    sha3_uncles: str
    miner: str
    state_root: str
    transactions_root: str
    receipts_root: str
    logs_bloom: str
    difficulty: str
    number: str
    gas_limit: str
    gas_used: str
    timestamp: str
    extra_data: str
    mix_hash: str
    nonce: str
    base_fee_per_gas: str | None = None
    withdrawals_root: str | None = None
    blob_gas_used: str | None = None
    excess_blob_gas: str | None = None
    parent_beacon_block_root: str | None = None
    requests_hash: str | None = None
    block_access_list_hash: str | None = None
    slot_number: str | None = None


_NUMBERS: Final = frozenset(
    (
        *("difficulty", "number", "gas_limit", "gas_used", "timestamp"),
        *("base_fee_per_gas", "blob_gas_used", "excess_blob_gas", "slot_number"),
    )
)
_IS_NUMBER: Final = tuple(name in _NUMBERS for name in HeaderFields.__struct_fields__)
_BESIDE: Final = frozenset(("hash", "size", "totalDifficulty", "author", "uncles", "transactions", "withdrawals"))
"""What a block has in JSON-RPC beside the fields of its header."""
_KNOWN: Final = frozenset(HeaderFields.__struct_encode_fields__) | _BESIDE
_NAMES: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def compute_hash(fields: HeaderFields) -> bytes | None:
    """Hash all fields that are there; None when one is not hexadecimal."""
    try:
        items = [
            text_number(text) if is_number else text_data(text)
            for text, is_number in zip(astuple(fields), _IS_NUMBER, strict=False)  # what follows is not of the header
            if text is not None
        ]
        return keccak(from_text(text_list(items)))
    except (ValueError, IndexError):
        return None


def unknown_fields(raw: msgspec.Raw) -> tuple[str, ...]:
    """The names of text fields of a block that no fork known to this version has, sorted."""
    fields = _NAMES.decode(raw)
    return tuple(sorted(name for name, value in fields.items() if name not in _KNOWN and bytes(value)[:1] == b'"'))
