"""The logs of a span, proven from receipts and complete by the union of what all nodes claim (rule C2).

every node in use ─▶ its claims: which blocks hold watched logs (log_range.py), and the header of the span's last block
the headers        ─▶ hash to their hashes, link down from that last block to the block before the span
the union          ─▶ each claimed block's receipts make up its root (receipts.py): events come from there alone
a single witness   ─▶ blocks whose bloom may hold a watched log are read too, within a budget
A node whose claim is disproved is set aside with the proof. Nodes that disagree about the chain stop the stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import structlog

from vaultevents import metrics
from vaultevents.chain.execution.anchoring import IN_USE, disagreement
from vaultevents.chain.execution.block_proofs import ReadOptions, prove_blocks
from vaultevents.chain.execution.blocks import read_headers, read_linked_headers
from vaultevents.chain.execution.jsonrpc import RpcNode
from vaultevents.chain.execution.log_range import Claims, LogContent, LogQuery, read_claims
from vaultevents.chain.execution.receipts import BlockLogs, read_blocks
from vaultevents.chain.execution.verification import check_times
from vaultevents.chain.upstream.batches import chunks
from vaultevents.chain.upstream.node import DataUnavailable
from vaultevents.chain.upstream.pool import NodePool
from vaultevents.core.deposits import DEPOSIT_EVENT, decode_deposit
from vaultevents.core.errors import ChainDisagreement, SourceUnavailable
from vaultevents.core.logs import Header, Log
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32, hex_text

_log = structlog.get_logger()

T = TypeVar("T")
CONTESTED_AT_ONCE = 4
"""Blocks that only some nodes claim, of one such node: a false claim is found before many were read in vain."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """All logs of the queried topics in the blocks that hold watched ones, of any contract (rules C10 and E3).

    In chain order and proven. `times_s` has the times of these blocks; `last` is the header of the span's last block,
    `parent` the hash of the block before the span, and `headers` are all that were read. `seen` counts the logs that
    nodes gave, `witnesses` the nodes that answered. `unverified` is the first block whose header or receipts are of a
    form that this version does not know. `deposits` has the block of each deposit of the span by its index, where these
    are looked for.
    """

    logs: list[Log]
    times_s: dict[int, int]
    last: Header
    parent: str | None
    headers: dict[int, Header]
    seen: int = 0
    witnesses: int = 0
    unverified: int | None = None
    deposits: Mapping[int, int] = field(default_factory=dict)


async def read_logs(
    nodes: NodePool[RpcNode], span: Span, query: LogQuery, parent: Hash32 | None, options: ReadOptions
) -> LogRange:
    """Read a span whose first block must link to `parent`, where it is given.

    Raises `ChainDisagreement` where nodes give different final blocks, `NodeFault` and `SourceUnavailable` where no
    node gives what can be proven.
    """
    claims = await _all_claims(nodes, span, query, parent, options, has_first=not options.every_header)
    if parent is not None and len({found.headers[span.last].hash for found in claims}) > 1:
        # a node of another chain is found by its first block, which does not link to what was read before
        claims = await _all_claims(nodes, span, query, parent, options, has_first=True)
    reading = _Reading(nodes, span, query, parent, options, _same_chain(claims, span, options))
    await reading.read_headers()
    await reading.prove(reading.claimed())
    await reading.prove_possible()
    reading.check_times()
    return reading.result()


async def _all_claims(
    nodes: NodePool[RpcNode],
    span: Span,
    query: LogQuery,
    parent: Hash32 | None,
    options: ReadOptions,
    *,
    has_first: bool,
) -> list[Claims]:
    """What each node that answers claims about the span."""
    has_next = options.is_final and options.anchored is not None and span.last < options.anchored.number
    read = partial(
        read_claims,
        span=span,
        query=query,
        parent=parent,
        has_first=has_first,
        has_next=has_next,
        checkpoint=options.checkpoint,
    )
    answers = await nodes.ask_each(read, most=options.most, only=options.only, urgent=options.urgent)
    return [claims for _, claims in answers]


def _same_chain(claims: list[Claims], span: Span, options: ReadOptions) -> list[Claims]:
    """Those whose last header is the same. Near the head nodes may differ for a while: the preferred node counts."""
    first = claims[0].headers[span.last]
    for other in claims[1:]:
        header = other.headers[span.last]
        if header.hash != first.hash and options.is_final:
            raise disagreement(claims[0].node.name, first, other.node.name, header)
    known = options.anchored
    if known is not None and known.number == span.last and known.hash != first.hash:
        raise ChainDisagreement(
            claims[0].node.name,
            f"gives block {span.last} as {hex_text(first.hash)}, and {hex_text(known.hash)} was final: "
            "find out which nodes follow the chain, and name only these",
        )
    return [found for found in claims if found.headers[span.last].hash == first.hash]


class _Reading:
    """One span while it is read."""

    def __init__(
        self,
        nodes: NodePool[RpcNode],
        span: Span,
        query: LogQuery,
        parent: Hash32 | None,
        options: ReadOptions,
        claims: list[Claims],
    ) -> None:
        self._nodes, self._span, self._query, self._parent = nodes, span, query, parent
        self._options, self._claims = options, claims
        self._headers: dict[int, Header] = dict(claims[0].headers)
        self._blocks: dict[int, BlockLogs] = {}
        self._disproved: set[str] = set()
        self._inventing: set[str] = set()

    async def read_headers(self) -> None:
        """Read what is needed of the headers; with every one of them, all are linked down from the last block."""
        if self._options.every_header:
            last = self._headers[self._span.last]
            headers = self._recent_headers(last)
            if headers is None:
                headers = await self._ask(partial(self._linked_headers, last=last))
            self._headers = {header.number: header for header in headers}
        await self._agree_on_unknown()

    def _recent_headers(self, last: Header) -> list[Header] | None:
        """The headers down from the last one, where another stream has read them; they hash to their hashes."""
        headers = self._options.recent.linked_to(last.hash, self._span)
        if headers is None or (self._parent is not None and headers[0].parent_hash != self._parent):
            return None
        return headers

    async def _linked_headers(self, node: RpcNode, last: Header) -> list[Header]:
        """Read the headers before `last`, which came with the claims, and link it to them."""
        options, span, content = self._options, self._span, self._claims[0].last
        recent = options.recent if options.is_final else None
        is_known = content is not None and len(span) > 1
        headers = await read_linked_headers(
            node,
            Span(span.first, span.last - 1) if is_known else span,
            self._parent,
            strict_times=options.strict,
            batch_size=options.batch_size,
            at_once=options.batches_at_once,
            recent=recent,
        )
        newest = headers[-1]
        wanted = last.parent_hash if is_known else last.hash
        if newest.hash != wanted:
            raise SourceUnavailable(
                node.name, f"gives block {newest.number} as {hex_text(newest.hash)}, not as {hex_text(wanted)}"
            )
        if not is_known:
            return headers
        check_times(node.name, newest, last, strict_times=options.strict)
        if recent is not None and content is not None:
            recent.add([content])
        return [*headers, last]

    async def _agree_on_unknown(self) -> None:
        """Hold headers of a form that is not known against those of every other node that answered (EIPs to come)."""
        unknown = [header for header in self._headers.values() if header.unknown_fields]
        if not unknown:
            return
        numbers = [header.number for header in unknown]
        for claims in self._claims:
            size, at_once = self._options.batch_size, self._options.batches_at_once
            for header in await read_headers(claims.node, numbers, batch_size=size, at_once=at_once):
                ours = self._headers[header.number]
                if header.hash == ours.hash and not header.unknown_fields:
                    self._headers[header.number] = header  # all of it hashes, so the fields in excess were false
                elif replace(header, unknown_fields=()) != replace(ours, unknown_fields=()):
                    raise disagreement(self._claims[0].node.name, ours, claims.node.name, header)

    def claimed(self) -> list[int]:
        """The union of the blocks that nodes claim, those first that all of them do."""
        union = set(self._query.also) & set(range(self._span.first, self._span.last + 1))
        for claims in self._claims:
            union |= claims.blocks()
        return sorted(union)

    async def prove(self, numbers: Sequence[int]) -> None:
        """Read the receipts of blocks, and hold each node's claims against them."""
        if not numbers:
            return
        contested = self._contested(numbers)
        await self._prove_all([number for number in numbers if number not in contested])
        for name in dict.fromkeys(contested.values()):
            own = [number for number, claimant in contested.items() if claimant == name]
            for some in chunks(own, CONTESTED_AT_ONCE):
                if name in self._inventing and len(self._claims) > len(self._disproved):
                    break  # nodes that were not disproved have answered for these blocks
                await self._prove_all(some)

    def _contested(self, numbers: Iterable[int]) -> dict[int, str]:
        """The blocks that a single node claims where several answered, with its name."""
        if len(self._claims) == 1:
            return {}
        found = {}
        for number in numbers:
            claimants = [claims.node.name for claims in self._claims if number in claims.blocks()]
            if len(claimants) == 1 and number not in self._query.also:
                found[number] = claimants[0]
        return found

    async def _prove_all(self, numbers: Sequence[int], *, claimed: bool = True) -> None:
        wanted = [(number, self._hash_of(number)) for number in numbers]
        options, headers = self._options, self._headers
        blocks = await prove_blocks(self._nodes, wanted, self._query, headers, options, claimed=claimed)
        for at, block in enumerate(blocks):
            if not block.is_proven or (block.header.unknown_fields and block.header.number not in self._headers):
                blocks[at] = block = await self._agree_on(block)
            self._blocks[block.header.number] = block
            self._headers.setdefault(block.header.number, block.header)
        for block in blocks:
            await self._hold_claims_against(block)

    def _hash_of(self, number: int) -> Hash32 | None:
        if number in self._headers:
            return self._headers[number].hash
        return next((claims.hashes[number] for claims in self._claims if number in claims.hashes), None)

    async def _agree_on(self, block: BlockLogs) -> BlockLogs:
        """Take a block with receipts of an unknown form only where every node that answered gives the same of it.

        Where one of them proves the block in a known form, the unknown one was false.
        """
        wanted = [(block.header.number, block.header.hash)]
        others: list[BlockLogs] = []
        for claims in self._claims:
            try:
                others += await read_blocks(claims.node, wanted, self._query, self._options.receipts)
            except DataUnavailable:
                continue  # no witness of this block
        for other in others:
            if other.is_proven and not other.header.unknown_fields:
                return other
        for other in others:
            if (other.header, other.logs) != (block.header, block.logs):
                raise ChainDisagreement(
                    IN_USE,
                    f"give different receipts of block {block.header.number}, of a form that this version does not "
                    "know: install a version that does",
                )
        return block

    async def _hold_claims_against(self, block: BlockLogs) -> None:
        number = block.header.number
        if not self._options.every_header and any(self._differs(claims, block) for claims in self._claims):
            block = await self._settle(block)
        proven = self._query.watched_content(block.logs)
        for claims in self._claims:
            if number not in claims.unread and len(claims.logs.get(number, {})) > len(proven):
                self._inventing.add(claims.node.name)
            if claims.node.name not in self._disproved and self._differs(claims, block):
                self._disprove(claims, block, claims.logs.get(number, {}), proven)

    def _differs(self, claims: Claims, block: BlockLogs) -> bool:
        """Whether a node claims of a block something else than was proven; nothing of one it cannot search."""
        number = block.header.number
        if number in claims.unread:
            return False
        same = claims.hashes.get(number, block.header.hash) == block.header.hash
        return not same or claims.logs.get(number, {}) != self._query.watched_content(block.logs)

    async def _settle(self, block: BlockLogs) -> BlockLogs:
        """Where few headers are read, nodes that claim otherwise may be on another chain: compare their blocks.

        A node whose next block does not link to its own altered it. Raises `ChainDisagreement` where two are left.
        """
        number = block.header.number
        sides: dict[Hash32, tuple[str, Header]] = {}
        for claims in self._claims:
            node = claims.node
            try:
                header, following = await read_headers(node, [number, number + 1], batch_size=2, at_once=1)
            except SourceUnavailable as error:
                _log.info("claim_not_checked", node=node.name, block=number, problem=error.problem)
                continue
            if following.parent_hash != header.hash:
                self._disproved.add(node.name)
                self._nodes.accuse(node, f"its block {number + 1} is not linked to its block {number}")
            else:
                sides.setdefault(header.hash, (node.name, header))
        if len(sides) > 1:
            (name, header), (other, others), *_ = sides.values()
            raise disagreement(name, header, other, others)
        if not sides or block.header.hash in sides:
            return block
        ((_, header),) = sides.values()
        self._headers[number] = header
        (settled,) = await prove_blocks(self._nodes, [(number, header.hash)], self._query, self._headers, self._options)
        self._blocks[number] = settled
        return settled

    def _disprove(
        self,
        claims: Claims,
        block: BlockLogs,
        claimed: Mapping[int, LogContent],
        proven: Mapping[int, LogContent],
    ) -> None:
        """Name a node whose claim differs from the receipts, with the proof."""
        node, number = claims.node, block.header.number
        self._disproved.add(node.name)
        node.client.counters.claims_disproved += 1
        is_same = claimed.keys() == proven.keys() and all(claimed[at][:3] == proven[at][:3] for at in claimed)
        if is_same and claimed != proven and not block.hashes_proven:
            raise ChainDisagreement(
                IN_USE,
                f"give different transaction hashes for the same logs of block {number}, one of them {node.name}: "
                "find out which one is wrong",
            )
        what = "hides" if len(claimed) < len(proven) else "invents" if len(claimed) > len(proven) else "alters"
        self._nodes.accuse(
            node,
            f"{what} logs of block {number}: it gave {len(claimed)} watched logs, the block's receipts prove "
            f"{len(proven)}",
        )

    async def prove_possible(self) -> None:
        """Read blocks whose bloom may hold a watched log although no node claims one.

        All of them with `all_possible`, else where a single node answered and only as many as the budget allows: with
        several nodes one that is honest suffices, and blooms of full blocks are nearly always positive by chance.
        """
        options = self._options
        if not options.every_header or (len(self._claims) > 1 and not options.all_possible):
            return
        possible = [
            number
            for number, header in self._headers.items()
            if number not in self._blocks and self._query.may_be_in(header)
        ]
        counters = self._claims[0].node.client.counters
        taken = len(possible) if options.all_possible else options.budget.take(len(possible))
        await self._prove_all(possible[:taken], claimed=False)
        counters.blooms_settled += taken
        counters.blooms_unsettled += len(possible) - taken
        metrics.blooms(taken, len(possible) - taken)

    def check_times(self) -> None:
        """Check that times rise with the numbers of the blocks."""
        headers = [header for _, header in sorted(self._headers.items())]
        for before, after in pairwise(headers):
            check_times(IN_USE, before, after, strict_times=self._options.strict)

    async def _ask(self, question: Callable[[RpcNode], Awaitable[T]]) -> T:
        """What is proven may come from any node."""
        return await self._nodes.ask(question, hedge=self._options.may_hedge(len(self._span)))

    def result(self) -> LogRange:
        """What was read."""
        proven = [block for _, block in sorted(self._blocks.items()) if self._query.watched_content(block.logs)]
        unknown = [number for number, header in self._headers.items() if header.unknown_fields]
        unknown += [block.header.number for block in self._blocks.values() if not block.is_proven]
        return LogRange(
            [log for block in proven for log in block.logs],
            {block.header.number: block.header.timestamp_s for block in proven},
            self._headers[self._span.last],
            hex_text(self._headers[self._span.first].parent_hash),
            self._headers,
            max(claims.seen for claims in self._claims),
            len(self._claims),
            min(unknown, default=None),
            self._deposits(),
        )

    def _deposits(self) -> dict[int, int]:
        """The blocks of the deposits that any node claims, and of those in blocks that were read, by index."""
        found = {index: place[0] for claims in self._claims for place, index in claims.deposits.items()}
        contracts = self._query.watched.deposit_contracts
        for block in self._blocks.values():
            for log in block.logs:
                if log.topics[0] == DEPOSIT_EVENT and log.address in contracts:
                    deposit = decode_deposit(log.data)
                    if deposit is not None:
                        found[deposit.index] = block.header.number
        return found
