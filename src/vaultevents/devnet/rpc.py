"""JSON-RPC shapes: errors, parameters and the JSON of blocks, logs and receipts (Ethereum execution API)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vaultevents.devnet.blocks import GAS_PER_TRANSACTION, Block, PlacedLog, Withdrawal
from vaultevents.devnet.envelopes import DYNAMIC_FEE, GAS_PRICE_WEI, SENDER
from vaultevents.devnet.header import bloom_of, hex_data

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
SERVER_ERROR = -32000
LIMIT_EXCEEDED = -32005

_QUANTITY = re.compile(r"0x(0|[1-9a-fA-F][0-9a-fA-F]*)")


class RpcError(Exception):
    """A JSON-RPC error answer."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": str(self)}


@dataclass(frozen=True, slots=True)
class LimitStyle:
    """How a provider words its two eth_getLogs limits; `limit_error` fills in what stands in braces."""

    range_code: int
    range_message: str
    results_code: int
    results_message: str


LIMIT_STYLES = {
    "infura": LimitStyle(
        INVALID_PARAMS,
        "range {blocks} exceeds limit of {limit}",
        LIMIT_EXCEEDED,
        "query returned more than {limit} results. Try with this block range [{first}, {last}].",
    ),
    "ankr": LimitStyle(
        SERVER_ERROR, "block range is too wide", LIMIT_EXCEEDED, "query returned more than {limit} results"
    ),
    "reth": LimitStyle(
        INVALID_PARAMS,
        "query exceeds max block range {limit}",
        INVALID_PARAMS,
        "query exceeds max results {limit}, retry with the range {first_decimal}-{last_decimal}",
    ),
    "alchemy": LimitStyle(
        INVALID_PARAMS,
        "Log response size exceeded. You can make eth_getLogs requests with up to a {limit} block range. Based on "
        "your parameters, this block range should work: [{first}, {last}]",
        INVALID_PARAMS,
        "Log response size exceeded. You can make eth_getLogs requests with a cap of {limit} logs in the response. "
        "Based on your parameters, this block range should work: [{first}, {last}]",
    ),
}


def limit_error(code: int, message: str, *, limit: int, first: int, last: int, fits: int) -> RpcError:
    """The refusal of a query over `first`..`last` that would have worked up to block `fits`.

    In `message`, `{first}` and `{last}` are the hints at the range that fits, `{blocks}` is the range that was asked.
    """
    return RpcError(
        code,
        message.format(
            limit=limit,
            blocks=last - first + 1,
            first=hex(first),
            last=hex(fits),
            first_decimal=first,
            last_decimal=fits,
        ),
    )


def quantity(value: object, what: str) -> int:
    """A hex quantity: no leading zeros (execution API). Raises `RpcError`."""
    if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
        raise RpcError(INVALID_PARAMS, f"invalid argument: {what} must be a hex quantity")
    return int(value, 16)


def data(value: object, size: int, what: str) -> bytes:
    """Hex data of `size` bytes in any case. Raises `RpcError`."""
    if not isinstance(value, str) or not re.fullmatch(rf"0x[0-9a-fA-F]{{{2 * size}}}", value):
        raise RpcError(INVALID_PARAMS, f"invalid argument: {what} must be {size} bytes of hex data")
    return bytes.fromhex(value[2:])


def block_json(block: Block, *, full: bool = False) -> dict[str, Any]:
    """A block with the hashes of its transactions, or with all of their fields when `full`."""
    hashes = [hex_data(tx_hash) for tx_hash in block.transaction_hashes]
    return {
        "hash": hex_data(block.hash),
        **block.header.to_json(),
        "size": hex(800 + 200 * len(block.transactions)),
        "transactions": _transactions(block, hashes) if full else hashes,
        "uncles": [],
        "withdrawals": [withdrawal_json(withdrawal) for withdrawal in block.withdrawals],
    }


def _transactions(block: Block, hashes: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            **envelope.to_json(),
            "hash": tx_hash,
            "blockHash": hex_data(block.hash),
            "blockNumber": hex(block.number),
            "transactionIndex": hex(index),
        }
        for index, (envelope, tx_hash) in enumerate(zip(block.envelopes, hashes, strict=True))
    ]


def withdrawal_json(withdrawal: Withdrawal) -> dict[str, str]:
    """One entry of `withdrawals`; the amount is in gwei."""
    return {
        "index": hex(withdrawal.index),
        "validatorIndex": hex(withdrawal.validator_index),
        "address": hex_data(withdrawal.address),
        "amount": hex(withdrawal.amount_gwei),
    }


def log_json(placed: PlacedLog, *, block_timestamp: bool) -> dict[str, Any]:
    """A log; `blockTimestamp` is a field that not every client adds."""
    log, block = placed.log, placed.block
    answer: dict[str, Any] = {
        "address": hex_data(log.address),
        "topics": [hex_data(topic) for topic in log.topics],
        "data": hex_data(log.data),
        "blockNumber": hex(block.number),
        "transactionHash": hex_data(placed.tx_hash),
        "transactionIndex": hex(placed.tx_index),
        "blockHash": hex_data(block.hash),
        "logIndex": hex(placed.log_index),
        "removed": False,
    }
    if block_timestamp:
        answer["blockTimestamp"] = hex(block.timestamp_s)
    return answer


def receipt_json(block: Block, index: int, logs: Iterable[PlacedLog], *, block_timestamp: bool) -> dict[str, Any]:
    """The receipt of the block's transaction `index`, which has `logs`."""
    logs = list(logs)
    bloom = bloom_of(value for entry in logs for value in (entry.log.address, *entry.log.topics))
    tx_hash = block.transaction_hashes[index]
    transaction = block.transactions[index] if index < len(block.transactions) else None
    creates = () if transaction is None else transaction.creates
    return {
        "type": hex(DYNAMIC_FEE if transaction is None else transaction.envelope.kind),
        "status": "0x1",
        "transactionHash": hex_data(tx_hash),
        "transactionIndex": hex(index),
        "blockHash": hex_data(block.hash),
        "blockNumber": hex(block.number),
        "from": hex_data(SENDER),
        "to": None if creates else hex_data(SENDER),
        "contractAddress": hex_data(creates[0]) if creates else None,
        "gasUsed": hex(GAS_PER_TRANSACTION),
        "cumulativeGasUsed": hex(GAS_PER_TRANSACTION * (index + 1)),
        "effectiveGasPrice": hex(GAS_PRICE_WEI),
        "logs": [log_json(entry, block_timestamp=block_timestamp) for entry in logs],
        "logsBloom": hex_data(bloom.to_bytes(256)),
        **{name: hex(value) for name, value in (() if transaction is None else transaction.receipt_fields)},
    }
