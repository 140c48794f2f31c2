"""Blocks proven from their receipts, whichever nodes gave them, and a whole range of them (rule C2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from vaultevents.chain.execution.blocks import read_linked_headers
from vaultevents.chain.execution.jsonrpc import RpcNode
from vaultevents.chain.execution.log_range import LogQuery
from vaultevents.chain.execution.receipts import (
    BlockLogs,
    ReceiptOptions,
    ReceiptsUnavailable,
    TransactionsUnproven,
    Wanted,
    has_receipts,
    other_block,
    prove_transactions,
    read_blocks,
)
from vaultevents.chain.execution.recent_blocks import RecentBlocks
from vaultevents.chain.upstream.batches import chunks, together
from vaultevents.chain.upstream.node import on_any_replica
from vaultevents.chain.upstream.pool import NodePool
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.logs import Header, Log
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32

_log = structlog.get_logger()

CHEAP_BLOCKS = 8
"""A live question about no more blocks is put to a second node when the first is late."""


class Budget:
    """How many blocks may be read for their blooms alone: a bucket that holds what is allowed in one day."""

    def __init__(self, per_day: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_day, self._clock = per_day, clock
        self._left, self._at = per_day, clock()

    def take(self, wanted: int) -> int:
        """Take up to `wanted`; return how many were there."""
        now = self._clock()
        self._left = min(self.per_day, self._left + (now - self._at) * self.per_day / 86_400)
        self._at = now
        taken = min(wanted, int(self._left))
        self._left -= taken
        return taken


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a span is read.

    `every_header`: read and link each header, not only those of the span's ends and of blocks with watched logs.
    `is_final`: no block of the span can be replaced. `urgent`: do not wait for slow nodes. `most`: how many nodes are
    asked; None: all. `only`: ask this node alone. `all_possible`: read each block that may hold a watched log.
    `budget`: where a single node answers, how many of these are read. `anchored`: a header that is known to be on the
    chain. `checkpoint`: the number and hash of a final block that was read before. `strict`: the rules of public
    networks hold, which a development chain may break: two blocks never have the same time, and transactions make up
    the root in their header. `recent`: final blocks that were read.
    """

    every_header: bool
    is_final: bool
    urgent: bool
    most: int | None
    only: str | None
    all_possible: bool
    budget: Budget
    anchored: Header | None
    checkpoint: tuple[int, Hash32] | None
    strict: bool
    batch_size: int
    batches_at_once: int
    receipt_limit_bytes: int
    recent: RecentBlocks

    @property
    def receipts(self) -> ReceiptOptions:
        """How the receipts of a block are read."""
        return ReceiptOptions(self.receipt_limit_bytes, self.strict)

    def may_hedge(self, blocks: int) -> bool:
        """Whether a question about so many blocks is put to a second node when the first is late."""
        return self.urgent and blocks <= CHEAP_BLOCKS


async def prove_blocks(
    nodes: NodePool[RpcNode],
    wanted: Sequence[Wanted],
    query: LogQuery,
    known: Mapping[int, Header],
    options: ReadOptions,
    *,
    claimed: bool = True,
) -> list[BlockLogs]:
    """Read blocks from their receipts, which any node may give; `known` headers are those of the chain.

    `claimed`: nodes claim that they hold watched logs, so that their transactions are needed, too.
    """

    async def read(node: RpcNode, some: Sequence[Wanted]) -> list[BlockLogs]:
        blocks = await on_any_replica(partial(read_blocks, node, some, query, options.receipts, whole=claimed))
        for block in blocks:
            header = known.get(block.header.number)
            if header is not None and header.hash != block.header.hash:
                raise other_block(node.name, block.header, header.hash)
        return blocks

    async def prove(some: Sequence[Wanted]) -> list[BlockLogs]:
        try:
            return await nodes.ask(partial(read, some=some), hedge=options.may_hedge(len(some)))
        except SourceUnavailable:
            if len(some) == 1 and (some[0][0] in known or some[0][1] is None):
                raise
        if len(some) > 1:
            return [block for item in some for block in await prove([item])]
        # no node has the hash that one of them claimed: the block at this height is read whatever its hash
        return await prove([(some[0][0], None)])

    first = nodes.nodes[0]
    blocks: list[BlockLogs] = []
    while len(blocks) < len(wanted):  # in waves, since each teaches how large receipts are
        size = first.receipts_at_once
        wave = wanted[len(blocks) : len(blocks) + size * options.batches_at_once]
        pieces = await together((partial(prove, some) for some in chunks(wave, size)), options.batches_at_once)
        blocks += [block for piece in pieces for block in piece]
    first.client.counters.blocks_proven += len(wanted)
    return await _with_transactions(nodes, blocks, query, options)


async def _with_transactions(
    nodes: NodePool[RpcNode], blocks: Sequence[BlockLogs], query: LogQuery, options: ReadOptions
) -> list[BlockLogs]:
    """Prove the hashes of the transactions of blocks with watched logs, where they are not."""
    found = {block.header.number: block for block in blocks}
    watched = [block for block in blocks if not block.hashes_proven and query.watched_content(block.logs)]
    for some in chunks(watched, nodes.nodes[0].receipts_at_once):

        async def prove(node: RpcNode, some: Sequence[BlockLogs] = some) -> list[BlockLogs]:
            return await on_any_replica(partial(prove_transactions, node, some, options.receipts))

        try:
            given = await nodes.ask(prove, hedge=options.may_hedge(len(some)))
        except TransactionsUnproven as error:
            _log.info("transactions_not_proven", blocks=len(some), problem=error.problem)
            continue  # of a development chain; nodes have to agree on the hashes
        found |= {block.header.number: block for block in given}
    return [found[block.header.number] for block in blocks]


@dataclass(frozen=True, slots=True)
class ProvenRange:
    """All logs of the queried topics in a span, of any contract, in chain order, and how they are proven.

    `times_s` has the time of each block with a log; `last` is the header of the span's last block. Of the span's
    headers `hashes_rebuilt` hash to their block's hash; of the `blocks_read` the receipts of `roots_rebuilt` make up
    the header's root.
    """

    logs: list[Log]
    times_s: dict[int, int]
    last: Header
    hashes_rebuilt: int
    blocks_read: int
    roots_rebuilt: int


async def prove_range(
    nodes: NodePool[RpcNode], span: Span, parent: Hash32 | None, query: LogQuery, options: ReadOptions
) -> ProvenRange:
    """Read every header of a span and each block whose bloom may hold one of the topics; no node's claim is asked for.

    The first block must link to `parent` where it is given.
    """
    read = partial(
        read_linked_headers,
        span=span,
        parent=parent,
        strict_times=options.strict,
        batch_size=options.batch_size,
        at_once=options.batches_at_once,
    )
    headers = await nodes.ask(read)
    wanted = [(header.number, header.hash) for header in headers if query.topics_may_be_in(header)]
    known = {header.number: header for header in headers}
    blocks = await prove_blocks(nodes, wanted, query, known, options, claimed=False)
    return ProvenRange(
        [log for block in blocks for log in block.logs],
        {block.header.number: block.header.timestamp_s for block in blocks if block.logs},
        headers[-1],
        sum(not header.unknown_fields for header in headers),
        len(blocks),
        sum(block.is_proven for block in blocks),
    )


async def oldest_with_receipts(nodes: NodePool[RpcNode], span: Span) -> int | None:
    """Find by bisection from which block of `span` on a node gives receipts; None when not even of the last one.

    Nodes keep receipts from some block on (EIP-4444).
    """
    if not await _has_receipts(nodes, span.last):
        return None
    first, last = span.first, span.last
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if await _has_receipts(nodes, middle) else (middle + 1, last)
    return last


async def _has_receipts(nodes: NodePool[RpcNode], number: int) -> bool:
    async def ask(node: RpcNode) -> bool:
        if not await has_receipts(node, number):
            raise ReceiptsUnavailable(node.name, f"gives no receipts of block {number}")
        return True

    try:
        return await nodes.ask(ask)
    except SourceUnavailable:
        return False
