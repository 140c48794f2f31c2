"""What each fault of the script does to a right answer. Every function returns a new value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eth_hash.auto import keccak

from vaultevents.devnet.faults import Fault
from vaultevents.devnet.header import hex_data

Json = dict[str, Any]


def tamper_logs(kind: Fault, logs: Sequence[Json]) -> list[Json]:
    """The answer of eth_getLogs under one of `LOG_FAULTS`; `logs` is not empty."""
    first, *rest = logs
    match kind:
        case Fault.EMPTY_LOGS:
            return []
        case Fault.TRUNCATED_LOGS:
            return list(logs[: len(logs) // 2])
        case Fault.WRONG_BLOCK_HASH:
            return [{**first, "blockHash": other_hash(first["blockHash"])}, *rest]
        case Fault.REMOVED:
            return [{**first, "removed": True}, *rest]
        case Fault.OUT_OF_RANGE:
            return [*logs, _elsewhere(logs[-1])]
        case Fault.DUPLICATE_LOG:
            return [first, *logs]
        case _:
            raise ValueError(f"{kind} does not concern logs")


def tamper_block(kind: Fault, block: Json) -> Json | None:
    """A block's answer under one of `BLOCK_FAULTS`, `WITHDRAWAL_FAULTS` or `WRONG_GENESIS`."""
    match kind:
        case Fault.NULL_BLOCK:
            return None
        case Fault.UNLINKED_PARENT:
            return {**block, "parentHash": other_hash(block["parentHash"])}
        case Fault.WRONG_GENESIS:
            return {**block, "hash": other_hash(block["hash"])}
        case Fault.NO_WITHDRAWALS:
            return {name: value for name, value in block.items() if name != "withdrawals"}
        case Fault.WITHDRAWAL_GAP:
            first, _, *rest = block["withdrawals"]
            return {**block, "withdrawals": [first, *rest]}
        case Fault.WITHDRAWAL_TWICE:
            return {**block, "withdrawals": [block["withdrawals"][0], *block["withdrawals"]]}
        case _:
            raise ValueError(f"{kind} does not concern blocks")


def tamper_beacon(kind: Fault, answer: Json) -> Json:
    """The answer of a beacon node under a fault of its route; records, where these are concerned, are not missing."""
    data = answer["data"]
    match kind:
        case Fault.SYNCING:
            return {**answer, "data": {**data, "is_syncing": True, "sync_distance": "64"}}
        case Fault.OPTIMISTIC if "is_optimistic" in data:
            return {**answer, "data": {**data, "is_optimistic": True}}
        case Fault.OPTIMISTIC:
            return {**answer, "execution_optimistic": True}
        case Fault.OTHER_NETWORK:
            return {**answer, "data": {**data, "genesis_validators_root": other_hash(data["genesis_validators_root"])}}
        case Fault.SHORT_ANSWER:
            return {**answer, "data": data[:-1]}
        case Fault.OTHER_PUBKEY if isinstance(data, list):
            return {**answer, "data": [_other_pubkey(data[0]), *data[1:]]}
        case Fault.OTHER_PUBKEY:
            return {**answer, "data": _other_pubkey(data)}
        case _:
            raise ValueError(f"{kind} does not concern answers of a beacon node")


def _other_pubkey(record: Json) -> Json:
    pubkey = other_hash(record["validator"]["pubkey"]) + "00" * 16
    return {**record, "validator": {**record["validator"], "pubkey": pubkey}}


def other_hash(text: str) -> str:
    """A well-formed hash that is not this one."""
    return hex_data(keccak(text.encode()))


def _elsewhere(log: Json) -> Json:
    # A million blocks on: beyond whatever range was asked for, and no block that the chain has.
    number = int(log["blockNumber"], 16) + 1_000_000
    return {**log, "blockNumber": hex(number), "blockHash": other_hash(log["blockHash"])}
