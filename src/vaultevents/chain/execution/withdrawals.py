"""All blocks of a span with their withdrawals, from one node, and the first block of a moment (rule C3).

A node's blocks are accepted when they are linked to the block before, their times rise, and the index that counts
all withdrawals of the chain has no gap: then no withdrawal was left out, whichever node answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from vaultevents.chain.execution import wire
from vaultevents.chain.execution.blocks import block_answer, header_call, must_have, read_header
from vaultevents.chain.execution.jsonrpc import RpcFailure, RpcNode
from vaultevents.chain.execution.recent_blocks import RecentBlock
from vaultevents.chain.execution.verification import check_links
from vaultevents.chain.upstream.batches import chunks, together
from vaultevents.chain.upstream.node import on_any_replica
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.logs import Header
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32, hex_text
from vaultevents.core.withdrawals import IndexGap, WithdrawalBlock, last_index_after

_NARROWING = 64
_RECENT = "blocks that were read before"


@dataclass(frozen=True, slots=True)
class Link:
    """What the first block of a span follows: the hash of the block before it, and the last withdrawal up to there.

    None for what is not known; then the first block is taken as it is.
    """

    block_hash: Hash32 | None
    last_index: int | None


def recent_blocks(recent: Iterable[RecentBlock], link: Link, *, strict_times: bool) -> list[WithdrawalBlock]:
    """Decode blocks that were read before; none where they do not follow `link` or lack withdrawals."""
    blocks: list[WithdrawalBlock] = []
    try:
        for block in recent:
            number = block.header.number
            decoded = wire.withdrawal_block(_RECENT, msgspec.Raw(block.content), number=number)
            assert decoded is not None
            blocks.append(decoded)
        check(_RECENT, blocks, link, strict_times=strict_times)
    except SourceUnavailable:
        return []
    return blocks


def after(blocks: Sequence[WithdrawalBlock], span: Span, link: Link) -> tuple[Span | None, Link]:
    """What of `span` is left behind its first `blocks`, None for nothing, and what it follows; `link` is before it."""
    if not blocks:
        return span, link
    last = blocks[-1]
    left = None if last.number == span.last else Span(last.number + 1, span.last)
    return left, Link(last.hash, last_index_after(blocks, link.last_index))


async def read_span(
    node: RpcNode, span: Span, link: Link, *, batch_size: int, batches_at_once: int, strict_times: bool
) -> list[WithdrawalBlock]:
    """Every block of `span` in order, all from `node`; at most `batches_at_once` answers are in memory at a time.

    Raises `NodeFault` for what contradicts the chain, and `SourceUnavailable` for a block that the node cannot give.
    """
    numbers = range(span.first, span.last + 1)
    parts = await together(
        (partial(on_any_replica, partial(_read, node, some)) for some in chunks(numbers, batch_size)), batches_at_once
    )
    blocks = [block for some in parts for block in some]
    check(node.name, blocks, link, strict_times=strict_times)
    return blocks


def check(node: str, blocks: Iterable[WithdrawalBlock], link: Link, *, strict_times: bool) -> None:
    """Check that neighbours are linked, times rise (as in verification.py), and no withdrawal is missing or doubled.

    `blocks` have consecutive numbers; the first of them follows `link`. Raises `NodeFault`.
    """
    blocks = list(blocks)
    parent, time_s = link.block_hash, -1
    for block in blocks:
        if parent is not None and block.parent_hash != parent:
            raise NodeFault(
                node, f"block {block.number} is not linked to block {block.number - 1} ({hex_text(parent)})"
            )
        if block.timestamp_s < time_s + strict_times:
            raise NodeFault(node, f"the time of block {block.number} is not after that of block {block.number - 1}")
        parent, time_s = block.hash, block.timestamp_s
    try:
        last_index_after(blocks, link.last_index)
    except IndexGap as gap:
        problem = str(gap)
    else:
        return
    raise NodeFault(node, problem)


async def first_block_at(node: RpcNode, head: Header, time_s: int, *, strict_times: bool) -> int:
    """The first block, up to `head`, whose time is `time_s` or later.

    A node may have pruned old blocks (EIP-4444): a block that it does not give counts as an old one, but the result
    is only taken when the block before it was seen. Raises `SourceUnavailable` when it was not, or when the head is
    older than `time_s`, and `NodeFault` when times do not rise with the number.
    """
    if head.timestamp_s < time_s:
        raise SourceUnavailable(
            node.name,
            f"its block {head.number} of time {head.timestamp_s} is the last that may be read, and none at or after "
            f"time {time_s} is known yet: wait until the chain has come that far",
        )
    floor, low, high = 0, await read_header(node, 0), head
    if low.timestamp_s >= time_s:
        return 0
    while high.number - floor > 1:  # `low` is older than time_s, `high` is not, `floor` is `low` or cannot be had
        probed = await _given(node, _probes(floor, low, high, time_s))
        known = [header for header in probed.values() if header is not None]
        check_links(node.name, [low, *known, high], strict_times=strict_times)
        low = max((header for header in known if header.timestamp_s < time_s), key=_number, default=low)
        high = min((header for header in known if header.timestamp_s >= time_s), key=_number, default=high)
        pruned = (number for number, header in probed.items() if header is None and number < high.number)
        floor = max(floor, low.number, *pruned)
    if floor != low.number:
        raise SourceUnavailable(
            node.name,
            f"cannot tell the first block at or after time {time_s}: it does not give block {floor} before it",
        )
    return high.number


def _probes(floor: int, low: Header, high: Header, time_s: int) -> list[int]:
    """Above `floor`: the middle, and a little to both sides of where `time_s` would be if all slots were filled.

    The middle bounds the number of rounds; the other two make it small where times are as regular as slots are.
    """
    share = (high.number - low.number) * (time_s - low.timestamp_s) // (high.timestamp_s - low.timestamp_s)
    guess, margin = low.number + share, max(1, (high.number - floor) // _NARROWING)
    wanted = {guess - margin, guess + margin, (floor + high.number) // 2}
    return sorted({min(max(number, floor + 1), high.number - 1) for number in wanted})


async def _read(node: RpcNode, numbers: Sequence[int]) -> list[WithdrawalBlock]:
    answers = await node.ask([header_call(number) for number in numbers])
    blocks: list[WithdrawalBlock] = []
    for number, answer in zip(numbers, answers, strict=True):
        found = block_answer(node, number, answer)
        blocks.append(must_have(node, number, wire.withdrawal_block(node.name, found, number=number)))
    return blocks


async def _given(node: RpcNode, numbers: Sequence[int]) -> dict[int, Header | None]:
    """The headers in order; None for a block that the node does not give."""
    answers = await node.ask([header_call(number) for number in numbers])
    blocks = {
        number: None if isinstance(answer, RpcFailure) else wire.block(node.name, answer, number=number)
        for number, answer in zip(numbers, answers, strict=True)
    }
    return {number: block.header if block else None for number, block in blocks.items()}


def _number(header: Header) -> int:
    return header.number
