"""Blocks and linked headers from one node; each header hashes to its block's hash (wire.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import msgspec

from vaultevents.chain.execution import verification, wire
from vaultevents.chain.execution.jsonrpc import Call, RpcFailure, RpcNode, RpcResponse
from vaultevents.chain.execution.recent_blocks import MOST, RecentBlock, RecentBlocks
from vaultevents.chain.upstream.batches import chunks, together
from vaultevents.chain.upstream.node import BlockNotFound, on_any_replica
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.logs import Header
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32

T = TypeVar("T")


def header_call(number: int, *, whole: bool = False) -> Call:
    """Ask for the block at a height, with the hashes of its transactions, or with whole transactions."""
    return Call("eth_getBlockByNumber", (hex(number), whole))


def read_block(
    node: RpcNode, number: int, answer: RpcResponse, transactions: wire.TransactionForm | None = None
) -> wire.Block:
    """Decode the answer to `header_call` for a block that must be there."""
    raw = block_answer(node, number, answer)
    return must_have(node, number, wire.block(node.name, raw, number=number, transactions=transactions))


def block_answer(node: RpcNode, number: int, answer: RpcResponse) -> msgspec.Raw:
    """Return the answer about one block; raises `SourceUnavailable` for an error answer."""
    if isinstance(answer, RpcFailure):
        raise SourceUnavailable(node.name, f"cannot give block {number}: {answer}")
    return answer


def must_have(node: RpcNode, number: int, found: T | None) -> T:
    """Return what a node has of a block; raises `BlockNotFound` for None, so that another machine or node is asked."""
    if found is None:
        raise BlockNotFound(node.name, f"does not have block {number}: it lags behind, or has pruned it")
    return found


async def read_header(node: RpcNode, number: int) -> Header:
    """Read the header at a height."""
    (answer,) = await node.ask([header_call(number)])
    return read_block(node, number, answer).header


async def read_headers(node: RpcNode, numbers: Sequence[int], *, batch_size: int, at_once: int) -> list[Header]:
    """Read the headers at these heights, in their order, in batches."""

    blocks = await read_recent(node, numbers, batch_size=batch_size, at_once=at_once)
    return [block.header for block in blocks]


async def read_recent(node: RpcNode, numbers: Sequence[int], *, batch_size: int, at_once: int) -> list[RecentBlock]:
    """Read the blocks at these heights with what the node gave of them, in their order, in batches."""

    async def read(batch: Sequence[int]) -> list[RecentBlock]:
        answers = await node.ask([header_call(number) for number in batch])
        return [
            RecentBlock(read_block(node, number, answer).header, bytes(block_answer(node, number, answer)))
            for number, answer in zip(batch, answers, strict=True)
        ]

    batches = (partial(on_any_replica, partial(read, batch)) for batch in chunks(numbers, batch_size))
    return [block for batch in await together(batches, at_once) for block in batch]


async def read_linked_headers(
    node: RpcNode,
    span: Span,
    parent: Hash32 | None,
    *,
    strict_times: bool,
    batch_size: int,
    at_once: int,
    recent: RecentBlocks | None = None,
) -> list[Header]:
    """Read every header of `span`, linked to each other, the first one to `parent` where it is given.

    The blocks are added to those that are `recent`.
    """
    numbers = range(span.first, span.last + 1)
    blocks = await read_recent(node, numbers, batch_size=batch_size, at_once=at_once)
    headers = [block.header for block in blocks]
    if parent is not None:
        verification.check_parent(node.name, headers[0], parent)
    verification.check_links(node.name, headers, strict_times=strict_times)
    if recent is not None:
        recent.add(blocks[-MOST:])
    return headers
