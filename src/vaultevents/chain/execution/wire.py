"""From a node's JSON to checked records: exact hex forms, exact lengths. What is not of that form is a `NodeFault`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import msgspec

from vaultevents.chain.execution.header_hash import HeaderFields, compute_hash, unknown_fields
from vaultevents.chain.execution.rlp_encoding import encode_bytes, encode_int, encode_list
from vaultevents.chain.execution.transactions import UnknownTransactionType, encode_transactions
from vaultevents.chain.execution.trie import list_root
from vaultevents.chain.upstream import hex_values
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.logs import Header
from vaultevents.core.units import Address, Hash32, ValidatorIndex
from vaultevents.core.withdrawals import Withdrawal, WithdrawalBlock

BLOOM_BYTES = 256


@dataclass(frozen=True, slots=True)
class Block:
    """A header and, where they were asked for, the hashes of the block's transactions in order, and these themselves.

    Hashes are as the node writes them: a block has hundreds, of which one or two are looked at.
    """

    header: Header
    tx_hashes: list[str] | None
    transactions: msgspec.Raw | None = None


class _WireBlock(HeaderFields, rename="camel", kw_only=True):
    hash: str
    transactions: msgspec.Raw = msgspec.Raw(b"null")
    withdrawals: msgspec.Raw = msgspec.Raw(b"null")


class _WireTransaction(msgspec.Struct, gc=False):
    hash: str


class _WireWithdrawal(msgspec.Struct, rename="camel", gc=False):
    index: str
    validator_index: str
    address: str
    amount: str


_BLOCK = msgspec.json.Decoder(_WireBlock)
_WITHDRAWALS = msgspec.json.Decoder(list[_WireWithdrawal] | None)
_TEXTS = msgspec.json.Decoder(list[str])
_TRANSACTIONS = msgspec.json.Decoder(list[_WireTransaction])
_TEXT = msgspec.json.Decoder(str)

Wire = TypeVar("Wire")
TransactionForm = Literal["hashes", "whole"]


def text(node: str, what: str, raw: msgspec.Raw) -> str:
    """A JSON string."""
    return _decoded(node, what, _TEXT, raw)


def block(
    node: str, raw: msgspec.Raw, *, number: int | None, transactions: TransactionForm | None = None
) -> Block | None:
    """Decode a block whose header hashes to its hash; None for `null`. It must have the `number` that was asked for.

    `transactions` says what the block lists.
    """
    decoded = _block(node, raw, number)
    if decoded is None:
        return None
    what, wire, header = decoded
    what = f"the list of transactions of {what}"
    match transactions:
        case None:
            return Block(header, None)
        case "hashes":
            return Block(header, _decoded(node, what, _TEXTS, wire.transactions))
        case "whole":
            listed = _decoded(node, what, _TRANSACTIONS, wire.transactions)
            return Block(header, [transaction.hash for transaction in listed], wire.transactions)


def transactions(node: str, raw: msgspec.Raw, header: Header) -> list[bytes] | None:
    """Decode the whole transactions of a block, encoded as they are hashed; they must make up the root in `header`.

    None where a transaction is of an unknown type.
    """
    what = f"the transactions of block {header.number}"
    try:
        encoded = encode_transactions(raw)
    except UnknownTransactionType:
        return None
    except ValueError:
        encoded = None
    if encoded is None or list_root(encoded) != header.transactions_root:
        raise NodeFault(node, f"{what} do not make up the root in its header")
    return encoded


def withdrawal_block(node: str, raw: msgspec.Raw, *, number: int) -> WithdrawalBlock | None:
    """Decode a block and its withdrawals, which must make up the root in its header (EIP-4895); None for `null`.

    Where the list is missing it raises `SourceUnavailable` for a block from before withdrawals, which has no root of
    them either, and `NodeFault` for any other: a list that is not there is never taken for an empty one.
    """
    decoded = _block(node, raw, number)
    if decoded is None:
        return None
    what, wire, header = decoded
    return WithdrawalBlock(
        number=number,
        hash=header.hash,
        parent_hash=header.parent_hash,
        timestamp_s=header.timestamp_s,
        withdrawals=_withdrawals(node, what, wire),
    )


def _block(node: str, raw: msgspec.Raw, number: int | None) -> tuple[str, _WireBlock, Header] | None:
    if is_null(raw):
        return None
    what = "a block" if number is None else f"block {number}"
    wire = _decoded(node, what, _BLOCK, raw)
    header = Header(
        number=hex_values.quantity(node, f"the number of {what}", wire.number),
        hash=Hash32(hex_values.data(node, f"the hash of {what}", wire.hash, 32)),
        parent_hash=Hash32(hex_values.data(node, f"the parent hash of {what}", wire.parent_hash, 32)),
        timestamp_s=hex_values.quantity(node, f"the timestamp of {what}", wire.timestamp),
        logs_bloom=hex_values.data(node, f"the bloom of {what}", wire.logs_bloom, BLOOM_BYTES),
        receipts_root=Hash32(hex_values.data(node, f"the receipts root of {what}", wire.receipts_root, 32)),
        transactions_root=Hash32(hex_values.data(node, f"the transactions root of {what}", wire.transactions_root, 32)),
    )
    if number is not None and header.number != number:
        raise NodeFault(node, f"asked for block {number}, it answered with block {header.number}")
    if compute_hash(wire) != header.hash:
        unknown = unknown_fields(raw)
        if not unknown:
            raise NodeFault(node, f"the header of block {header.number} does not hash to the hash given for it")
        header = replace(header, unknown_fields=unknown)
    return what, wire, header


def is_null(raw: msgspec.Raw) -> bool:
    """Whether an answer is `null`: the node does not have what was asked for."""
    return bytes(memoryview(raw)[:5]) == b"null"


def _withdrawals(node: str, what: str, wire: _WireBlock) -> tuple[Withdrawal, ...]:
    listed = _decoded(node, f"the withdrawals of {what}", _WITHDRAWALS, wire.withdrawals)
    if listed is None and wire.withdrawals_root is None:
        raise SourceUnavailable(
            node,
            f"gives {what} without withdrawals: either the block is from before the Capella (Shanghai) upgrade, then "
            "begin at a later one, or the node leaves them out, then use another node",
        )
    if listed is None or wire.withdrawals_root is None:
        raise NodeFault(node, f"{what} has only one of the two: a root of its withdrawals, and their list")
    withdrawals = tuple(
        Withdrawal(
            index=hex_values.quantity(node, f"the index of a withdrawal in {what}", entry.index),
            validator_index=ValidatorIndex(
                hex_values.quantity(node, f"the validator index of a withdrawal in {what}", entry.validator_index)
            ),
            address=Address(hex_values.data(node, f"the address of a withdrawal in {what}", entry.address, 20)),
            amount_gwei=hex_values.quantity(node, f"the amount of a withdrawal in {what}", entry.amount),
        )
        for entry in listed
    )
    _check_withdrawals(node, what, withdrawals, wire.withdrawals_root)
    return withdrawals


def _check_withdrawals(node: str, what: str, withdrawals: Sequence[Withdrawal], root: str) -> None:
    if list_root([_encoded(withdrawal) for withdrawal in withdrawals]) != hex_values.data(
        node, f"the withdrawals root of {what}", root, 32
    ):
        raise NodeFault(node, f"the {len(withdrawals)} withdrawals of {what} do not make up the root in its header")


def _encoded(withdrawal: Withdrawal) -> bytes:
    numbers = encode_int(withdrawal.index), encode_int(withdrawal.validator_index)
    return encode_list((*numbers, encode_bytes(withdrawal.address), encode_int(withdrawal.amount_gwei)))


def _decoded(node: str, what: str, decoder: msgspec.json.Decoder[Wire], raw: msgspec.Raw) -> Wire:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{what} does not have the known form ({hex_values.shown(str(error), 120)})"
    raise NodeFault(node, problem)
