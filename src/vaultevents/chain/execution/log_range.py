"""Which blocks of a range hold watched logs, by the claim of one node; nothing of it is used before it is proven.

range ─▶ eth_getLogs by topic over as many blocks as the node gives at once, with the header of the last one
a single block that the node does not give by topic ─▶ by its hash and the watched addresses ─▶ else claimed as it is
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import msgspec
import structlog

from vaultevents.chain.execution import verification
from vaultevents.chain.execution.blocks import block_answer, header_call, read_block, read_header
from vaultevents.chain.execution.jsonrpc import Call, RpcFailure, RpcNode, RpcResponse
from vaultevents.chain.execution.recent_blocks import RecentBlock
from vaultevents.chain.execution.rpc_errors import Refusal, allowed_blocks, limits_blocks
from vaultevents.chain.upstream import hex_values
from vaultevents.chain.upstream.batches import chunks
from vaultevents.chain.upstream.node import UpstreamTimeout, on_any_replica
from vaultevents.core.deposits import DEPOSIT_EVENT, decode_deposit
from vaultevents.core.errors import NodeFault, RangeTooLarge, SourceUnavailable
from vaultevents.core.logs import REPORT_UPDATED, Header, Log, bloom_may_hold, names_depositee, pairs_of
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32, hex_text

_log = structlog.get_logger()

ADDRESSES_AT_ONCE = 500

LogContent = tuple[str, tuple[str, ...], str, str]
"""Address, topics, data and transaction hash of a log, in lower-case hex."""


@dataclass(frozen=True)
class LogQuery:
    """What is looked for: the logs of watched addresses among those with `topics`.

    `also` are blocks to read whatever the nodes claim.
    """

    watched: Watched
    topics: tuple[Hash32, ...]
    also: frozenset[int] = frozenset()

    @cached_property
    def topic_texts(self) -> frozenset[str]:
        """The topics as a node writes them in lower case."""
        return frozenset(map(hex_text, self.topics))

    @cached_property
    def pairs(self) -> frozenset[verification.Pair]:
        """Each watched topic with its address."""
        return frozenset(pairs_of(self.watched))

    @cached_property
    def addresses(self) -> list[Address]:
        return sorted({address for _, address in self.pairs})

    @property
    def emitters(self) -> Sequence[Address]:
        """The contracts of whose logs a range is searched; none: of any contract (rule C10)."""
        return ()

    @cached_property
    def texts(self) -> frozenset[tuple[str, str]]:
        """Each watched topic with its address, as a node writes them in lower case."""
        return frozenset((hex_text(topic), hex_text(address)) for topic, address in self.pairs)

    @cached_property
    def blooms(self) -> verification.BloomMatcher:
        return verification.BloomMatcher(self.pairs)

    def may_be_in(self, header: Header) -> bool:
        """Test whether the block may hold a watched log; a header that is not authentic proves nothing."""
        return bool(header.unknown_fields) or self.blooms.may_hold(header.logs_bloom)

    def topics_may_be_in(self, header: Header) -> bool:
        """Test whether the block may hold a log of the topics, of any contract, or a report of a watched oracle."""
        bloom = header.logs_bloom
        contracts = [topic for topic in self.topics if topic != REPORT_UPDATED]
        return (
            bool(header.unknown_fields)
            or any(bloom_may_hold(bloom, topic) for topic in contracts)
            or any(bloom_may_hold(bloom, REPORT_UPDATED, oracle) for oracle in self.watched.oracles)
        )

    def keeps(self, topics: Sequence[bytes], address: bytes) -> bool:
        """Test whether a log is kept: all with the topics of contracts (rules C10 and E3), and the oracles' reports."""
        if not topics or topics[0] not in self.topics:
            return False
        return topics[0] != REPORT_UPDATED or address in self.watched.oracles

    def watched_content(self, logs: Iterable[Log]) -> dict[int, LogContent]:
        """The watched ones of proven logs by their index, as a claim has them."""
        return {
            log.log_index: content_of(log) for log in logs if log.topics and (log.topics[0], log.address) in self.pairs
        }


@dataclass(frozen=True)
class EmitterQuery(LogQuery):
    """What is looked for: the logs of `sources` and no others; a node searches the logs of these contracts alone."""

    sources: frozenset[verification.Pair] = frozenset()

    @classmethod
    def of(cls, sources: Iterable[verification.Pair]) -> EmitterQuery:
        """Look for these topics, each of its contract."""
        wanted = frozenset(sources)
        return cls(Watched(), tuple(sorted({topic for topic, _ in wanted})), sources=wanted)

    @cached_property
    def pairs(self) -> frozenset[verification.Pair]:
        return self.sources

    @property
    def emitters(self) -> Sequence[Address]:
        return self.addresses

    def keeps(self, topics: Sequence[bytes], address: bytes) -> bool:
        """Test whether a log is one of those that are looked for."""
        return bool(topics) and (topics[0], address) in self.sources

    def topics_may_be_in(self, header: Header) -> bool:
        """Test whether the block may hold one of these logs."""
        return self.may_be_in(header)


@dataclass(slots=True)
class Claims:
    """What one node claims of a span: its watched logs by block and index, and its headers of the span's ends.

    `hashes` has the hash of each block with such logs. Blocks in `unread` are too full for the node to search; `seen`
    counts all logs that it gave. `last` is the last block, where it came with logs. `deposits` has the indices of all
    deposits, for any address, by block and log index.
    """

    node: RpcNode
    logs: dict[int, dict[int, LogContent]] = field(default_factory=dict)
    hashes: dict[int, Hash32] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    headers: dict[int, Header] = field(default_factory=dict)
    deposits: dict[tuple[int, int], int] = field(default_factory=dict)
    last: RecentBlock | None = None
    seen: int = 0

    def blocks(self) -> set[int]:
        return self.logs.keys() | self.unread


class _WireLog(msgspec.Struct, rename="camel"):
    address: str
    topics: list[str]
    data: str
    block_number: str
    block_hash: str
    transaction_hash: str
    log_index: str
    removed: bool = False


_LOGS = msgspec.json.Decoder(list[_WireLog])
_DEPOSIT = hex_text(DEPOSIT_EVENT)


def content_of(log: Log) -> LogContent:
    """A log as `Claims` has it."""
    return hex_text(log.address), tuple(map(hex_text, log.topics)), hex_text(log.data), hex_text(log.tx_hash)


async def read_claims(
    node: RpcNode,
    span: Span,
    query: LogQuery,
    parent: Hash32 | None,
    *,
    has_first: bool = True,
    has_next: bool = False,
    checkpoint: tuple[int, Hash32] | None = None,
) -> Claims:
    """Ask one node which blocks of `span` hold watched logs.

    With `has_first` the first header is read, which must link to `parent`, where given. With `has_next` the block after
    the span must link to its last one, so that a single altered block is found also at the end of a span. At the number
    of `checkpoint` the node must have the block with that hash. Raises `NodeFault` for an answer that was not asked for
    or contradicts these, `SourceUnavailable` where the node cannot answer.
    """
    claims = Claims(node)
    beside = {span.last + 1} if has_next else set()
    if has_first:
        beside.add(span.first)
    if checkpoint is not None:
        beside.add(checkpoint[0])
    position = span.first - 1
    while position < span.last:
        part = await _next_part(node, claims, position + 1, span, query, beside)
        if position < span.first and parent is not None and has_first:
            verification.check_parent(node.name, claims.headers[span.first], parent)
        position = part.last
    if not claims.unread:
        verification.check_deposits(node.name, [index for _, index in sorted(claims.deposits.items())])
    if has_next:
        verification.check_parent(node.name, claims.headers[span.last + 1], claims.headers[span.last].hash)
    if checkpoint is not None:
        _check_checkpoint(node.name, claims.headers[checkpoint[0]], checkpoint[1])
    claims.headers = {number: header for number, header in claims.headers.items() if number in span}
    return claims


def _check_checkpoint(node: str, header: Header, known: Hash32) -> None:
    if header.hash != known:
        raise NodeFault(
            node,
            f"is on another chain: it gives block {header.number} as {hex_text(header.hash)}, and that was final as "
            f"{hex_text(known)}",
        )


async def _next_part(
    node: RpcNode, claims: Claims, first: int, span: Span, query: LogQuery, beside: Collection[int]
) -> Span:
    """Ask for the blocks from `first` on, over as many as the node gives at once; return them.

    The headers of blocks `beside` come with their part; those outside of the span with its last one.
    """
    while True:
        part = Span(first, min(span.last, first + node.log_range.blocks - 1))
        edges = {part.last} | {number for number in beside if number in part}
        if part.last == span.last:
            edges.update(number for number in beside if number not in span)
        try:
            await on_any_replica(partial(_ask_part, node, claims, part, sorted(edges), query))
        except RangeTooLarge as refusal:
            node.client.counters.ranges_refused += 1
            if len(part) == 1:
                await on_any_replica(partial(_ask_full_block, node, claims, first, sorted(edges), query))
                return part
            if node.log_range.blocks >= len(part):  # the node gave no number
                node.log_range.refused(len(part))
            _log.info("log_range_refused", node=node.name, blocks=len(part), problem=refusal.problem)
        except (UpstreamTimeout, NodeFault):
            node.log_range.refused(len(part))  # the size of the range may be the cause
            raise
        else:
            node.log_range.served(len(part))
            return part


async def blocks_at_once(node: RpcNode, span: Span, query: LogQuery) -> int:
    """Return over how many blocks from the first of `span` on the node gives logs in one call."""
    return len(await _next_part(node, Claims(node), span.first, span, query, ()))


async def _ask_part(node: RpcNode, claims: Claims, part: Span, edges: Sequence[int], query: LogQuery) -> None:
    # in one exchange: the machine that searches the range has its last block
    answers = await node.ask([range_call(part, query), *(header_call(number) for number in edges)])
    logs = _decode_range(node, answers[0], part)
    headers = {
        number: read_block(node, number, answer).header for number, answer in zip(edges, answers[1:], strict=True)
    }
    claims.headers |= headers
    claims.last = RecentBlock(
        headers[part.last], bytes(block_answer(node, part.last, answers[1 + edges.index(part.last)]))
    )
    _add(claims, logs, part, query)


async def _ask_full_block(node: RpcNode, claims: Claims, number: int, edges: Sequence[int], query: LogQuery) -> None:
    """Search a block that the node does not give by topic: by its hash and the watched addresses."""
    claims.headers |= {edge: await read_header(node, edge) for edge in edges}
    claims.last = None
    calls = [
        hash_call(claims.headers[number].hash, some, query.topics)
        for some in chunks(query.addresses, ADDRESSES_AT_ONCE)
    ]
    try:
        answers: list[RpcResponse] = [answer for call in calls for answer in await node.ask([call])]
    except RangeTooLarge:
        answers = []
    if not answers or any(isinstance(answer, RpcFailure) for answer in answers):
        claims.unread.add(number)
        return
    for answer in answers:
        assert not isinstance(answer, RpcFailure)
        _add(claims, decode_logs(node.name, answer), Span(number, number), query)


def range_call(span: Span, query: LogQuery) -> Call:
    """Ask for all logs with one of the query's topics in `span`, of its emitters or of any contract (rule C10)."""
    wanted: dict[str, object] = {
        "fromBlock": hex(span.first),
        "toBlock": hex(span.last),
        "topics": _any_of(query.topics),
    }
    if query.emitters:
        wanted["address"] = [hex_text(address) for address in query.emitters]
    return Call("eth_getLogs", (wanted,))


def hash_call(block_hash: Hash32, addresses: Sequence[Address], topics: Sequence[Hash32]) -> Call:
    """Ask for those of some emitters in one block: a node that lacks the block must answer an error (EIP-234)."""
    emitters = [hex_text(address) for address in addresses]
    return Call("eth_getLogs", ({"blockHash": hex_text(block_hash), "address": emitters, "topics": _any_of(topics)},))


def _any_of(topics: Sequence[Hash32]) -> list[list[str]]:
    return [[hex_text(topic) for topic in topics]]


def _decode_range(node: RpcNode, answer: RpcResponse, span: Span) -> list[_WireLog]:
    """Decode the answer to `range_call`; raises `RangeTooLarge`, having noted what the node says it allows."""
    if isinstance(answer, RpcFailure):
        if answer.refusal is Refusal.SIZE:
            words = answer.message
            if len(span) > 1:
                node.log_range.refused(len(span), allowed_blocks(words), by_blocks=limits_blocks(words))
            raise RangeTooLarge(node.name, f"refuses the logs of {len(span)} blocks from {span.first} on: {answer}")
        raise SourceUnavailable(node.name, f"cannot give the logs of blocks {span}: {answer}")
    return decode_logs(node.name, answer)


def decode_logs(node: str, raw: msgspec.Raw) -> list[_WireLog]:
    """Decode a list of logs as a node writes them; raises `NodeFault` for another form."""
    try:
        return _LOGS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        problem = "the list of logs does not have the known form"
    raise NodeFault(node, problem)


def _add(claims: Claims, logs: Sequence[_WireLog], span: Span, query: LogQuery) -> None:
    node = claims.node.name
    claims.seen += len(logs)
    for log in logs:
        number = hex_values.quantity(node, "the block number of a log", log.block_number)
        if number not in span:
            raise NodeFault(node, f"a log in block {number} is outside of the blocks {span} that were asked for")
        if log.removed:
            raise NodeFault(node, f"a log in block {number} is marked as removed")
        topic = log.topics[0].lower() if log.topics else ""
        if topic not in query.topic_texts:
            raise NodeFault(node, f"a log in block {number} has a topic that was not asked for")
        address = log.address.lower()
        if (topic, address) not in query.texts:
            continue
        block_hash = Hash32(hex_values.data(node, f"the block hash of a log in block {number}", log.block_hash, 32))
        if claims.hashes.setdefault(number, block_hash) != block_hash:
            raise NodeFault(node, f"two logs of block {number} have different block hashes")
        index = hex_values.quantity(node, f"the index of a log in block {number}", log.log_index)
        if topic == _DEPOSIT and not _is_for_depositee(claims, log, (number, index), query.watched):
            continue
        content = address, tuple(map(str.lower, log.topics)), log.data.lower(), log.transaction_hash.lower()
        claims.logs.setdefault(number, {})[index] = content


def _is_for_depositee(claims: Claims, log: _WireLog, place: tuple[int, int], watched: Watched) -> bool:
    """Note the index of a deposit, and test whether it pays one of the vaults that are looked for."""
    node, number = claims.node.name, place[0]
    data = hex_values.data(node, f"the data of a log in block {number}", log.data)
    deposit = decode_deposit(data)
    if deposit is None:
        raise NodeFault(node, f"a deposit in block {number} does not have the form of the deposit contract")
    claims.deposits[place] = deposit.index
    return names_depositee(data, watched)
