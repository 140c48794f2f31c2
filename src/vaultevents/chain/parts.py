"""One range of blocks while its logs are being proven, and the calls that ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vaultevents.chain import proofs, wire
from vaultevents.chain.endpoints import Counters
from vaultevents.chain.jsonrpc import Answer, Call, RpcFailure, RpcNode
from vaultevents.chain.refusals import Refusal, allowed_blocks
from vaultevents.chain.wire import Sighting
from vaultevents.core.errors import RangeTooLarge, SourceUnavailable
from vaultevents.core.logs import Header
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32, hex_text


@dataclass(frozen=True, slots=True)
class Terms:
    """What is read and how much of it is proven, for one reading of a span."""

    watched: Watched
    topics: tuple[Hash32, ...]
    masks: Mapping[proofs.Pair, int]
    every_header: bool
    suspicion_share: float
    rereads: int
    batch_size: int
    counters: Counters


@dataclass(slots=True)
class Part:
    """The logs of `span` by block, and what is known of these blocks. `hashes` keeps the first hash seen of each."""

    span: Span
    blocks: dict[int, list[Sighting]]
    headers: dict[int, Header] = field(default_factory=dict)
    tx_hashes: dict[int, tuple[Hash32, ...]] = field(default_factory=dict)
    hashes: dict[int, Hash32] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, found in self.blocks.items():
            self.hashes[number] = found[0].log.block_hash

    def add(self, block: wire.Block) -> None:
        number = block.header.number
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
            node.log_range.refused(len(span), allowed_blocks(answer.message))
            raise RangeTooLarge(node.name, f"refuses the logs of {len(span)} blocks from {span.first} on: {answer}")
        raise SourceUnavailable(node.name, f"cannot give the logs of blocks {span}: {answer}")
    sightings = wire.logs(node.name, answer)
    proofs.check_logs(node.name, sightings, span, {}, topics)
    return sightings


def read_block(node: RpcNode, number: int, answer: Answer, *, with_transactions: bool = False) -> wire.Block:
    """What `header_call` asked for; a node that does not have the block is unavailable for this question."""
    if isinstance(answer, RpcFailure):
        raise SourceUnavailable(node.name, f"cannot give block {number}: {answer}")
    found = wire.block(node.name, answer, number=number, with_transactions=with_transactions)
    if found is None:
        raise SourceUnavailable(node.name, f"does not have block {number}: it lags behind, or has pruned it")
    return found


async def add_blocks(node: RpcNode, part: Part, numbers: Sequence[int], terms: Terms) -> None:
    """Read the headers of `numbers` and, where a block has a watched log, the hashes of its transactions."""
    for chunk in chunks(numbers, terms.batch_size):
        answers = await node.ask([header_call(number) for number in chunk])
        note_blocks(node, part, chunk, answers, terms)


def note_blocks(node: RpcNode, part: Part, numbers: Iterable[int], answers: Iterable[Answer], terms: Terms) -> None:
    """Take the answers to `header_call` into `part`."""
    watched = set(proofs.watched_blocks(part.blocks, terms.watched))
    for number, answer in zip(numbers, answers, strict=True):
        part.add(read_block(node, number, answer, with_transactions=number in watched))


def chunks(numbers: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    """`numbers` in pieces of at most `size`."""
    return (numbers[at : at + size] for at in range(0, len(numbers), size))
