"""Transactions as they are hashed, one by one and for the `transactionsRoot` of a header (EIP-2718).

Receipts do not contain the hash of their transaction, and event ids do: without this proof a node could alter it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from vaultevents.chain.rlp_encoding import encode_bytes, encode_int, encode_list

_Json = Mapping[str, Any]
_Encoder = Callable[[_Json], bytes]

_TRANSACTIONS: Final = msgspec.json.Decoder(list[dict[str, Any]])


class UnknownTransactionType(Exception):
    """A transaction is of a type that this version does not know."""


def encode_transactions(raw: msgspec.Raw) -> list[bytes]:
    """Encode full transactions as they are hashed, in their order.

    Raises `UnknownTransactionType`, and `ValueError` for what is no list of transactions.
    """
    try:
        return [_encode(transaction) for transaction in _TRANSACTIONS.decode(raw)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
        raise ValueError("not a list of transactions") from error


def _encode(transaction: _Json) -> bytes:
    kind = int(transaction.get("type") or "0x0", 16)
    if kind not in _FIELDS:
        raise UnknownTransactionType(f"{kind:#x}")
    fields = encode_list(encoder(transaction) for encoder in _FIELDS[kind])
    return bytes([kind]) + fields if kind else fields


def _number(name: str) -> _Encoder:
    return lambda transaction: encode_int(int(transaction[name], 16))


def _data(name: str) -> _Encoder:
    return lambda transaction: encode_bytes(bytes.fromhex(transaction[name][2:]))


def _to(transaction: _Json) -> bytes:
    """The receiver; nothing where the transaction creates a contract."""
    return encode_bytes(bytes.fromhex((transaction.get("to") or "0x")[2:]))


def _parity(transaction: _Json) -> bytes:
    return encode_int(int(transaction["yParity"] if "yParity" in transaction else transaction["v"], 16))


def _hashes(values: Sequence[str]) -> bytes:
    return encode_list(encode_bytes(bytes.fromhex(value[2:])) for value in values)


def _access_list(transaction: _Json) -> bytes:
    return encode_list(
        encode_list((encode_bytes(bytes.fromhex(entry["address"][2:])), _hashes(entry["storageKeys"])))
        for entry in transaction["accessList"]
    )


def _blob_hashes(transaction: _Json) -> bytes:
    return _hashes(transaction["blobVersionedHashes"])


def _authorizations(transaction: _Json) -> bytes:
    return encode_list(
        encode_list(encoder(entry) for encoder in _AUTHORIZATION) for entry in transaction["authorizationList"]
    )


_SIGNATURE: Final = (_number("r"), _number("s"))
_AUTHORIZATION: Final = (_number("chainId"), _data("address"), _number("nonce"), _parity, *_SIGNATURE)
_CALL: Final = (_number("gas"), _to, _number("value"), _data("input"))
_FEES: Final = (_number("chainId"), _number("nonce"), _number("maxPriorityFeePerGas"), _number("maxFeePerGas"))
_PRICE: Final = (_number("nonce"), _number("gasPrice"))
_FIELDS: Final[Mapping[int, Sequence[_Encoder]]] = {
    0: (*_PRICE, *_CALL, _number("v"), *_SIGNATURE),
    1: (_number("chainId"), *_PRICE, *_CALL, _access_list, _parity, *_SIGNATURE),
    2: (*_FEES, *_CALL, _access_list, _parity, *_SIGNATURE),
    3: (*_FEES, *_CALL, _access_list, _number("maxFeePerBlobGas"), _blob_hashes, _parity, *_SIGNATURE),
    4: (*_FEES, *_CALL, _access_list, _authorizations, _parity, *_SIGNATURE),
}
"""What is hashed of each type: legacy, EIP-2930, EIP-1559, EIP-4844 and EIP-7702."""
