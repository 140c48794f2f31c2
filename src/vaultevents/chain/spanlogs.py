"""The logs of a span from one node, proven as decision C2 says: the node's answers are held against each other.

range ─▶ logs + the header of the range's last block, in one batch
      ─▶ headers: every one, or those of the edges and of blocks with logs; linked, times rising
      ─▶ doubtful blocks again by hash (settling.py)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import structlog

from vaultevents.chain import proofs
from vaultevents.chain.endpoints import Endpoints
from vaultevents.chain.jsonrpc import RpcNode
from vaultevents.chain.lines import TooSlow, of_any_machine
from vaultevents.chain.parts import Part, Terms, add_blocks, header_call, note_blocks, range_call, read_logs
from vaultevents.chain.settling import settle
from vaultevents.core.errors import RangeTooLarge
from vaultevents.core.logs import Header, Log
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32, hex_text

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LogRange:
    """All logs of the two topics in a span, whoever emitted them, in chain order (C10, E3).

    `times_s` has the time of each block with a watched log; `last` is the header of the span's last block, `parent` the
    hash of the block before the span, as its first header tells it, and `headers` are all that were read.
    """

    logs: list[Log]
    times_s: dict[int, int]
    last: Header
    parent: str | None
    headers: dict[int, Header]

    def facts(self) -> tuple[object, ...]:
        """What is the same at every node that tells the truth."""
        told = [replace(log, timestamp_s=None) for log in self.logs]  # a field that not every client adds
        return self.last.hash, told, self.times_s


async def read_span(
    node: RpcNode, nodes: Endpoints[RpcNode], span: Span, anchor: Hash32 | None, terms: Terms
) -> LogRange:
    """Everything from `node`; the other `nodes` only confirm. The first block must link to `anchor` where it is given.

    Raises `NodeFault` and `SourceUnavailable`; `RangeTooLarge` when not even one block can be had.
    """
    logs: list[Log] = []
    times_s: dict[int, int] = {}
    headers: dict[int, Header] = {}
    previous: Header | None = None
    parent = Hash32(b"")
    while previous is None or previous.number < span.last:
        part = await _next_part(node, span.first if previous is None else previous.number + 1, span.last, terms)
        if terms.every_header:
            await add_blocks(node, part, range(part.span.first, part.span.last), terms)
        await _read_blocks_with_logs(node, part, terms)
        _check(node, part, previous, anchor, terms)
        if await settle(node, nodes, part, terms):
            await _read_blocks_with_logs(node, part, terms)
            _check(node, part, previous, anchor, terms)
        logs += [one.log for one in part.everything()]
        times_s |= _times(part, terms)
        headers |= part.headers
        if previous is None:
            parent = part.headers[part.span.first].parent_hash
        previous = part.headers[part.span.last]
    return LogRange(logs, times_s, previous, hex_text(parent), headers)


async def _next_part(node: RpcNode, first: int, last: int, terms: Terms) -> Part:
    """The logs from block `first` on, over as many blocks as the node gives at once, and the edges' headers."""
    while True:
        span = Span(first, min(last, first + node.log_range.blocks - 1))
        try:
            part = await of_any_machine(partial(_ask_range, node, span, terms))
        except RangeTooLarge as refusal:
            terms.counters.ranges_refused += 1
            if node.log_range.blocks >= len(span):  # it gave no hint
                node.log_range.refused(len(span))
            if len(span) == 1:
                raise
            _log.info("log_range_refused", node=node.name, blocks=len(span), problem=refusal.problem)
        except TooSlow:
            node.log_range.refused(len(span))  # it may be this range that takes the node too long
            raise
        else:
            node.log_range.served(len(span))
            return part


async def _ask_range(node: RpcNode, span: Span, terms: Terms) -> Part:
    edges = [span.last] if terms.every_header else sorted({span.first, span.last})
    answers = await node.ask([range_call(span, terms.topics), *(header_call(number) for number in edges)])
    part = Part(span, proofs.by_block(read_logs(node, answers[0], span, terms.topics)))
    watched = set(proofs.watched_blocks(part.blocks, terms.watched))
    note_blocks(node, part, edges, answers[1:], watched, terms)
    return part


async def _read_blocks_with_logs(node: RpcNode, part: Part, terms: Terms) -> None:
    """Blocks with logs that were not read as such; those whose given time is usable need no header.

    Where every header is read anyway, only those with watched logs, for the hashes of their transactions.
    """
    if terms.every_header:
        known, wanted = set(part.tx_hashes), proofs.watched_blocks(part.blocks, terms.watched)
    else:
        known, wanted = part.headers.keys() | _given_times(part).keys(), list(part.blocks)
    await add_blocks(node, part, [number for number in wanted if number not in known], terms)


def _check(node: RpcNode, part: Part, previous: Header | None, anchor: Hash32 | None, terms: Terms) -> None:
    """All that must hold within what was read, and to what was read before it."""
    headers = part.in_order()
    first = part.headers.get(part.span.first)
    if previous is None and anchor is not None and first is not None:
        proofs.check_parent(node.name, first, anchor)
    proofs.check_headers(node.name, headers if previous is None else [previous, *headers])
    proofs.check_logs(node.name, part.everything(), part.span, part.headers, terms.topics)
    for number, tx_hashes in part.tx_hashes.items():
        proofs.check_transactions(node.name, part.found(number), tx_hashes)


def _given_times(part: Part) -> dict[int, int]:
    ends = [part.headers[number] for number in sorted({part.span.first, part.span.last})]
    return proofs.usable_times(ends, part.blocks)


def _times(part: Part, terms: Terms) -> dict[int, int]:
    given = {} if terms.every_header else _given_times(part)
    return {
        number: part.headers[number].timestamp_s if number in part.headers else given[number]
        for number in proofs.watched_blocks(part.blocks, terms.watched)
    }
