"""Questions to contracts: `eth_call`, whether there is code at an address, and since which block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vaultevents.chain.execution import wire
from vaultevents.chain.execution.jsonrpc import Call, RpcFailure, RpcNode, RpcResponse
from vaultevents.chain.upstream import hex_values
from vaultevents.chain.upstream.node import DataUnavailable
from vaultevents.core.errors import InputError, SourceUnavailable
from vaultevents.core.units import Address, checksum, hex_text

_OLD_STATE = re.compile(r"missing trie|\bstate|prun|histor|archive|available|\bolder\b|header not found", re.IGNORECASE)
_FAILED = re.compile(
    r"revert|invalid (opcode|jump)|out of gas|stack (under|over)flow|bad ?instruction|EVM error|VM execution error",
    re.IGNORECASE,
)
"""How nodes report a call that the contract itself ends, with or without a reason."""


@dataclass(frozen=True, slots=True)
class Reverted:
    """A call that a contract refuses; `data` is the error with its selector, empty where it gives none.

    `name` and `arguments` are those of the error, where it was looked up in an ABI that has it.
    """

    data: bytes
    name: str | None = None
    arguments: tuple[Any, ...] = ()


def eth_call(to: Address, data: bytes, position: str) -> Call:
    """Return the call of a contract with `data` at a block (a tag or a number in hex)."""
    return Call("eth_call", ({"to": hex_text(to), "data": hex_text(data)}, position))


async def read_state(node: RpcNode, calls: Sequence[Call]) -> list[bytes | Reverted]:
    """Return the answers to some `eth_call` and `eth_getCode` in order; a revert is an answer."""
    answers = await node.ask(calls)
    return [_state(node, call, answer) for call, answer in zip(calls, answers, strict=True)]


def _state(node: RpcNode, call: Call, answer: RpcResponse) -> bytes | Reverted:
    if not isinstance(answer, RpcFailure):
        return hex_values.data(node.name, "the answer", wire.text(node.name, "the answer", answer))
    if call.method == "eth_call" and (answer.data or _FAILED.search(answer.message)):
        return Reverted(hex_values.data(node.name, "the reason", answer.data or "0x"))
    asked, position = call.params
    address, what = (asked["to"], "call") if call.method == "eth_call" else (asked, "give the code of")
    kind = DataUnavailable if _OLD_STATE.search(answer.message) else SourceUnavailable
    raise kind(node.name, f"cannot {what} {checksum(bytes.fromhex(address[2:]))} at block {position}: {answer}")


async def has_code(node: RpcNode, address: Address, block: int) -> bool:
    """Return whether there is a contract at `address` at a block whose state the node must have."""
    found = await _code_at(node, address, block)
    if isinstance(found, RpcFailure):
        raise SourceUnavailable(node.name, f"cannot tell whether {checksum(address)} is a contract: {found}")
    return found


async def first_block_with_code(node: RpcNode, address: Address, head: int, head_name: str) -> int | RpcFailure:
    """Return the first block up to `head` after which `address` has code, by bisection: code stays once it is there.

    The failure is that of a node without the state of a block. Raises `InputError` where there is no code at all.
    """
    if not await has_code(node, address, head):
        raise InputError(f"{checksum(address)} has no code at the {head_name} block {head}: check the address")
    first, last = 0, head
    while first < last:
        middle = (first + last) // 2
        found = await _code_at(node, address, middle)
        if isinstance(found, RpcFailure):
            if _OLD_STATE.search(found.message):
                return found
            raise SourceUnavailable(node.name, f"cannot give the code at block {middle}: {found}")
        first, last = (first, middle) if found else (middle + 1, last)
    return first


async def _code_at(node: RpcNode, address: Address, block: int) -> bool | RpcFailure:
    (answer,) = await node.ask([Call("eth_getCode", (hex_text(address), hex(block)))])
    if isinstance(answer, RpcFailure):
        return answer
    return bool(hex_values.data(node.name, "the code", wire.text(node.name, "the code", answer)))
