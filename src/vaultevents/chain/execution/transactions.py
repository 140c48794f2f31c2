"""Transactions as they are hashed, one by one and for the `transactionsRoot` of a header (EIP-2718).

Receipts do not contain the hash of their transaction, and event ids do: without this proof a node could alter it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from vaultevents.chain.execution.rlp_encoding import from_text, text_data, text_list, text_number

_Json = Mapping[str, Any]
_Fields = Sequence[tuple[str, Callable[[Any], str]]]

_TRANSACTIONS: Final = msgspec.json.Decoder(list[dict[str, Any]])


class UnknownTransactionType(Exception):
    """A transaction is of a type that this version does not know."""


def encode_transactions(raw: msgspec.Raw) -> list[bytes]:
    """Encode full transactions as they are hashed, in their order.

    Raises `UnknownTransactionType`, and `ValueError` for what is no list of transactions.
    """
    try:
        return [_encode(transaction) for transaction in _TRANSACTIONS.decode(raw)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, IndexError, TypeError) as error:
        raise ValueError("not a list of transactions") from error


def _encode(transaction: _Json) -> bytes:
    kind = int(transaction.get("type") or "0x0", 16)
    if kind not in _FIELDS:
        raise UnknownTransactionType(f"{kind:#x}")
    values = _with_parity(transaction) if kind else transaction
    fields = from_text(text_list(_items(values, _FIELDS[kind])))
    return bytes([kind]) + fields if kind else fields


def _items(values: _Json, fields: _Fields) -> list[str]:
    return [encoder(values.get(name)) for name, encoder in fields]


def _to(text: str | None) -> str:
    """The receiver; nothing where the transaction creates a contract."""
    return text_data(text or "0x")


def _hashes(values: Sequence[str]) -> str:
    return text_list(map(text_data, values))


def _access_list(entries: Sequence[_Json]) -> str:
    return text_list(text_list((text_data(entry["address"]), _hashes(entry["storageKeys"]))) for entry in entries)


def _authorizations(entries: Sequence[_Json]) -> str:
    return text_list(text_list(_items(_with_parity(entry), _AUTHORIZATION)) for entry in entries)


def _with_parity(values: _Json) -> _Json:
    """Some nodes give the parity of a signature as `v` alone."""
    return values if "yParity" in values else {**values, "yParity": values["v"]}


_SIGNATURE: Final[_Fields] = (("r", text_number), ("s", text_number))
_PARITY: Final[_Fields] = (("yParity", text_number), *_SIGNATURE)
_CALL: Final[_Fields] = (("gas", text_number), ("to", _to), ("value", text_number), ("input", text_data))
_PRICE: Final[_Fields] = (("nonce", text_number), ("gasPrice", text_number))
_FEES: Final[_Fields] = (
    *(("chainId", text_number), ("nonce", text_number)),
    *(("maxPriorityFeePerGas", text_number), ("maxFeePerGas", text_number)),
)
_ACCESS: Final[_Fields] = (("accessList", _access_list),)
_BLOBS: Final[_Fields] = (("maxFeePerBlobGas", text_number), ("blobVersionedHashes", _hashes))
_AUTHORIZATION: Final[_Fields] = (
    *(("chainId", text_number), ("address", text_data), ("nonce", text_number)),
    *_PARITY,
)
_FIELDS: Final[Mapping[int, _Fields]] = {
    0: (*_PRICE, *_CALL, ("v", text_number), *_SIGNATURE),
    1: (("chainId", text_number), *_PRICE, *_CALL, *_ACCESS, *_PARITY),
    2: (*_FEES, *_CALL, *_ACCESS, *_PARITY),
    3: (*_FEES, *_CALL, *_ACCESS, *_BLOBS, *_PARITY),
    4: (*_FEES, *_CALL, *_ACCESS, ("authorizationList", _authorizations), *_PARITY),
}
"""What is hashed of each type: legacy, EIP-2930, EIP-1559, EIP-4844 and EIP-7702."""
