"""One range of blocks while its logs are being proven, and the calls that ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from vaultevents.chain import proofs, wire
from vaultevents.chain.jsonrpc import Answer, Call, RpcFailure, RpcNode
from vaultevents.chain.lines import Behind, Counters, of_any_machine
from vaultevents.chain.refusals import Refusal, allowed_blocks, limits_blocks
from vaultevents.chain.wire import Sighting
from vaultevents.core.errors import RangeTooLarge, SourceUnavailable
from vaultevents.core.logs import Header
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32, hex_text

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Terms:
    """What is read and how much of it is proven, for one reading of a span."""

    watched: Watched
    topics: tuple[Hash32, ...]
    pairs: proofs.WatchedPairs
    every_header: bool
    suspicion_share: float
    rereads: int
    batch_size: int
    batches_at_once: int
    counters: Counters


@dataclass(slots=True)
class Part:
    """The logs of `span` by block, and what is known of these blocks.

    `hashes` keeps the first hash seen of each, `held` the watched pairs that the blooms of the known headers hold.
    """

    span: Span
    blocks: dict[int, list[Sighting]]
    headers: dict[int, Header] = field(default_factory=dict)
    tx_hashes: dict[int, list[str]] = field(default_factory=dict)
    hashes: dict[int, Hash32] = field(default_factory=dict)
    held: dict[int, list[proofs.Pair]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, found in self.blocks.items():
            self.hashes[number] = found[0].log.block_hash

    def add(self, block: wire.Block, pairs: proofs.WatchedPairs) -> None:
        number = block.header.number
        self.held[number] = pairs.held_by(block.header.logs_bloom)
        self.headers[number] = block.header
        self.hashes[number] = block.header.hash
        if block.tx_hashes is not None:
            self.tx_hashes[number] = block.tx_hashes

    def replace(self, number: int, again: Sequence[Sighting]) -> None:
        """Take other logs for one block."""
        kept = [one for at, found in self.blocks.items() if at != number for one in found]
        self.blocks = proofs.by_block([*kept, *again])

    def found(self, number: int) -> list[Sighting]:
        return self.blocks.get(number, [])

    def everything(self) -> list[Sighting]:
        return [one for found in self.blocks.values() for one in found]

    def unanswered(self, numbers: Iterable[int]) -> list[int]:
        """Those whose bloom holds a watched pair of which no log came back."""
        return [number for number in numbers if proofs.unanswered(self.held.get(number, ()), self.found(number))]

    def in_order(self) -> list[Header]:
        return [header for _, header in sorted(self.headers.items())]


def range_call(span: Span, topics: Sequence[Hash32]) -> Call:
    """All logs with one of `topics` in `span`, whoever emitted them (C10)."""
    return Call("eth_getLogs", ({"fromBlock": hex(span.first), "toBlock": hex(span.last), "topics": _any_of(topics)},))


def hash_call(block_hash: Hash32, topics: Sequence[Hash32]) -> Call:
    """The same of one block by its hash: a node that lacks the block must answer an error (EIP-234)."""
    return Call("eth_getLogs", ({"blockHash": hex_text(block_hash), "topics": _any_of(topics)},))


def _any_of(topics: Sequence[Hash32]) -> list[list[str]]:
    return [[hex_text(topic) for topic in topics]]


def full_call(block_hash: Hash32) -> Call:
    """All logs of one block."""
    return Call("eth_getLogs", ({"blockHash": hex_text(block_hash)},))


def header_call(number: int) -> Call:
    """The block at a height, with the hashes of its transactions."""
    return Call("eth_getBlockByNumber", (hex(number), False))


def read_logs(node: RpcNode, answer: Answer, span: Span, topics: Sequence[Hash32]) -> list[Sighting]:
    """What `range_call` asked for. Raises `RangeTooLarge`, having noted what the node says it allows."""
    if isinstance(answer, RpcFailure):
        if answer.refusal is Refusal.SIZE:
            words = answer.message
            node.log_range.refused(len(span), allowed_blocks(words), by_blocks=limits_blocks(words))
            raise RangeTooLarge(node.name, f"refuses the logs of {len(span)} blocks from {span.first} on: {answer}")
        raise SourceUnavailable(node.name, f"cannot give the logs of blocks {span}: {answer}")
    sightings = wire.logs(node.name, answer)
    proofs.check_logs(node.name, sightings, span, {}, topics)
    return sightings


def read_block(node: RpcNode, number: int, answer: Answer, *, with_transactions: bool = False) -> wire.Block:
    """What `header_call` asked for, of a block that must be there."""
    told = block_told(node, number, answer)
    return must_have(node, number, wire.block(node.name, told, number=number, with_transactions=with_transactions))


def block_told(node: RpcNode, number: int, answer: Answer) -> msgspec.Raw:
    """The answer about one block; a node that gives none is unavailable for this question."""
    if isinstance(answer, RpcFailure):
        raise SourceUnavailable(node.name, f"cannot give block {number}: {answer}")
    return answer


def must_have(node: RpcNode, number: int, found: T | None) -> T:
    """What a node told of a block, None when it does not have it: then another one, or another machine, is asked."""
    if found is None:
        raise Behind(node.name, f"does not have block {number}: it lags behind, or has pruned it")
    return found


async def add_blocks(node: RpcNode, part: Part, numbers: Sequence[int], terms: Terms) -> None:
    """Read the headers of `numbers` and, where a block has a watched log, the hashes of its transactions."""
    watched = set(proofs.watched_blocks(part.blocks, terms.watched))

    async def batch(some: Sequence[int]) -> None:
        note_blocks(node, part, some, await node.ask([header_call(number) for number in some]), watched, terms)

    await together(
        (partial(of_any_machine, partial(batch, some)) for some in chunks(numbers, terms.batch_size)),
        terms.batches_at_once,
    )


def note_blocks(
    node: RpcNode, part: Part, numbers: Iterable[int], answers: Iterable[Answer], watched: Collection[int], terms: Terms
) -> None:
    """Take the answers to `header_call` into `part`; `watched` are the blocks with a watched log."""
    for number, answer in zip(numbers, answers, strict=True):
        part.add(read_block(node, number, answer, with_transactions=number in watched), terms.pairs)


async def together(work: Iterable[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """The results in order, of at most `at_once` at a time.

    The first error ends the rest, so that nothing goes on asking a node that is given up.
    """
    turns = asyncio.Semaphore(at_once)

    async def one(begin: Callable[[], Awaitable[T]]) -> T:
        async with turns:
            return await begin()

    tasks = [asyncio.ensure_future(one(each)) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def chunks(numbers: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    """`numbers` in pieces of at most `size`."""
    return (numbers[at : at + size] for at in range(0, len(numbers), size))
