"""Questions to contracts: `eth_call`, whether there is code at an address, and since which block."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vaultevents.chain.execution import wire
from vaultevents.chain.execution.jsonrpc import Call, RpcFailure, RpcNode
from vaultevents.chain.upstream import hex_values
from vaultevents.core.errors import InputError, SourceUnavailable
from vaultevents.core.units import Address, checksum, hex_text

_OLD_STATE = re.compile(r"missing trie|\bstate|prun|histor|archive|available|\bolder\b|header not found", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reverted:
    """A call that a contract refuses; `data` is the error with its selector."""

    data: bytes


async def call(node: RpcNode, to: Address, data: bytes, position: str) -> bytes | Reverted:
    """Return what a contract answers to `data` at a block (a tag or a number in hex), or its revert."""
    asked = {"to": hex_text(to), "data": hex_text(data)}
    (answer,) = await node.ask([Call("eth_call", (asked, position))])
    if isinstance(answer, RpcFailure):
        if answer.data or "revert" in answer.message.lower():
            return Reverted(hex_values.data(node.name, "the reason", answer.data or "0x"))
        raise SourceUnavailable(node.name, f"cannot call {checksum(to)} at block {position}: {answer}")
    return hex_values.data(node.name, "the answer", wire.text(node.name, "the answer", answer))


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
