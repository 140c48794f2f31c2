"""What one execution node can do: find out before it is relied on. Nothing that is read here becomes an event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from vaultevents.chain.execution import wire
from vaultevents.chain.execution.blocks import header_call, read_block
from vaultevents.chain.execution.jsonrpc import Call, RpcFailure, RpcNode
from vaultevents.chain.execution.log_range import LogQuery, blocks_at_once
from vaultevents.chain.execution.receipts import ReceiptOptions, has_receipts, read_blocks
from vaultevents.chain.upstream import hex_values
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.logs import TOPICS, Header
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32, hex_text

BLOCKS_WITH_RECEIPTS = 16
"""Among so many blocks in a row at least one has a transaction, on any network that is in use."""


class _Progress(msgspec.Struct, rename="camel"):
    current_block: str = "0x0"
    highest_block: str = "0x0"


_SYNCING = msgspec.json.Decoder(bool | _Progress | None)


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """How far a node is that is still syncing."""

    current_block: int
    highest_block: int


async def tagged_header(node: RpcNode, tag: Literal["latest", "safe", "finalized"]) -> Header:
    """Return the header of a block tag. Raises `SourceUnavailable` where the node does not know it."""
    (answer,) = await node.ask([Call("eth_getBlockByNumber", (tag, False))])
    found = None if isinstance(answer, RpcFailure) else wire.block(node.name, answer, number=None)
    if found is None:
        why = f" ({answer})" if isinstance(answer, RpcFailure) else ""
        raise SourceUnavailable(node.name, f"does not know its {tag} block{why}")
    return found.header


async def block_number_of(node: RpcNode, block_hash: Hash32) -> int | None:
    """Return the number of the block with this hash; None where the node does not have it."""
    (answer,) = await node.ask([Call("eth_getBlockByHash", (hex_text(block_hash), False))])
    if isinstance(answer, RpcFailure):
        return None
    found = wire.block(node.name, answer, number=None)
    return None if found is None or found.header.hash != block_hash else found.header.number


async def sync_progress(node: RpcNode) -> SyncProgress | None:
    """Return how far a syncing node is; None for one that is not syncing, or offers no such method."""
    (answer,) = await node.ask([Call("eth_syncing")])
    if isinstance(answer, RpcFailure):
        return None
    try:
        found = _SYNCING.decode(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if found is True:
        return SyncProgress(0, 0)
    if not isinstance(found, _Progress):
        return None
    numbers = [
        hex_values.quantity(node.name, "its sync state", text) for text in (found.current_block, found.highest_block)
    ]
    return SyncProgress(*numbers)


async def log_blocks(node: RpcNode, last: int, blocks: int) -> int:
    """Return over how many blocks, at most `blocks` that end at `last`, the node gives logs at once.

    It is asked as the streams ask, for smaller ranges after each refusal. Raises `SourceUnavailable` where it gives
    none.
    """
    span = Span(max(0, last - blocks + 1), last)
    return await blocks_at_once(node, span, LogQuery(Watched(), TOPICS))


@dataclass(frozen=True, slots=True)
class ReceiptAccess:
    """A block whose receipts make up its receipts root, and whether the node gave them all in one call."""

    number: int
    whole: bool


async def receipt_access(node: RpcNode, numbers: Sequence[int], options: ReceiptOptions) -> ReceiptAccess:
    """Prove the receipts of the first of these blocks that has a transaction, else of the last one.

    Raises `ReceiptsUnavailable` for a node that lacks them, `NodeFault` for one that gives others.
    """
    answers = await node.ask([header_call(number) for number in numbers])
    blocks = [read_block(node, number, answer, "hashes") for number, answer in zip(numbers, answers, strict=True)]
    block = next((block for block in blocks if block.tx_hashes), blocks[-1])
    number = block.header.number
    await read_blocks(node, [(number, block.header.hash)], LogQuery(Watched(), TOPICS), options)
    return ReceiptAccess(number, await has_receipts(node, number))
