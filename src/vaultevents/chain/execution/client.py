"""Read heads, headers and proven logs from execution nodes, of which none is trusted.

Rule C1 (which head), rule C2 (trust in the node), rule C10 (query shape), rule E10 (one network).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import aiohttp

from vaultevents import metrics
from vaultevents.chain.execution import contract_calls, wire, withdrawals
from vaultevents.chain.execution.anchoring import Anchor, check_blocks, confirm
from vaultevents.chain.execution.block_proofs import Budget, ProvenRange, ReadOptions, oldest_with_receipts, prove_range
from vaultevents.chain.execution.blocks import block_answer, header_call, read_block, read_header, read_linked_headers
from vaultevents.chain.execution.contract_calls import Reverted, eth_call
from vaultevents.chain.execution.jsonrpc import Call, RpcFailure, RpcNode
from vaultevents.chain.execution.log_range import EmitterQuery, LogContent, LogQuery, read_claims
from vaultevents.chain.execution.logs import LogRange, read_logs
from vaultevents.chain.execution.receipts import ReceiptOptions, ReceiptsUnavailable
from vaultevents.chain.execution.recent_blocks import RecentBlocks
from vaultevents.chain.upstream import hex_values
from vaultevents.chain.upstream.http import Deadlines, HttpExchange
from vaultevents.chain.upstream.learned_range import LearnedRange
from vaultevents.chain.upstream.network import PinnedNetwork
from vaultevents.chain.upstream.node import Counters
from vaultevents.chain.upstream.node_lag import BEHIND_S, HeadPolicy, NodeLag
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import ConfigError, InputError, NodeFault, SourceUnavailable
from vaultevents.core.logs import REPORT_UPDATED, TOPICS, Header, Log, topics_of
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32, checksum, hex_text
from vaultevents.core.withdrawals import WithdrawalBlock

__all__ = ["Anchor", "ExecutionChain", "ExecutionOptions", "HeadPolicy", "Identity", "LogRange", "Reverted"]

OLDEST_KNOWN_S = 600.0
NOTHING = Watched()
FUTURE_S = 60.0
"""So far may a node's head be ahead of the clock."""


Completeness = Literal["union", "receipts"]


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """Settings of the execution layer; the defaults fit a node of one's own on mainnet.

    `headers`: `every` reads and links each header in any case; with `edges` a backfill may do with those of its spans'
    ends and of blocks with logs.
    `ask`: how many nodes are asked at once which blocks hold logs; None: all (rule C2).
    `completeness`: with `receipts` each block that may hold a watched log by its bloom is read, whatever nodes claim.
    `blooms_per_day`: how many such blocks are read in a day where a single node answers.
    `strict`: the rules of public networks hold, which a development chain may break: two blocks never have the same
    time, none is of the future, and transactions make up the root in their header.
    `log_range_start`: how many blocks are asked for at first of a node of which nothing is known; None: the most.
    `batches_at_once`: how many batches of blocks are asked for at the same time.
    `answer_limit_bytes`: the most that is read of one answer; `receipt_limit_bytes`: of a single large receipt.
    """

    headers: Literal["every", "edges"] = "edges"
    ask: int | None = None
    completeness: Completeness = "union"
    blooms_per_day: int = 10_000
    strict: bool = True
    batch_size: int = 100
    batches_at_once: int = 4
    log_range_start: int | None = None
    log_range_max: int = 10_000
    connect_timeout_s: float = 5.0
    total_timeout_s: float = 30.0
    answer_limit_bytes: int = 32 * 2**20
    receipt_limit_bytes: int = 128 * 2**20
    attempts: int = 3
    retry_wait_s: float = 0.25
    set_aside_s: float = 30.0

    def __post_init__(self) -> None:
        start = self.log_range_max if self.log_range_start is None else self.log_range_start
        asked = 1 if self.ask is None else self.ask
        counts = (self.batch_size, self.batches_at_once, start, self.log_range_max, self.attempts, asked)
        if min(counts) < 1 or min(self.answer_limit_bytes, self.receipt_limit_bytes) < 1:
            raise ConfigError("sizes, limits and attempts of the execution layer must be at least 1")
        if min(self.connect_timeout_s, self.total_timeout_s) <= 0 or min(self.retry_wait_s, self.set_aside_s) < 0:
            raise ConfigError("times of the execution layer cannot be negative, and its deadlines not 0")
        if self.blooms_per_day < 0:
            raise ConfigError("blooms_per_day cannot be negative")

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(self.connect_timeout_s, self.total_timeout_s)


@dataclass(frozen=True, slots=True)
class Identity:
    """What distinguishes one network from another (rule E10)."""

    chain_id: int
    genesis_hash: Hash32

    def __str__(self) -> str:
        return f"chain id {self.chain_id} with block 0 {hex_text(self.genesis_hash)}"


class ExecutionChain(PinnedNetwork[RpcNode, Identity, Counters]):
    """Async context manager over the nodes of one network, the first URL preferred.

    Every method raises `SourceUnavailable` when no node can answer (or its children `NodeFault`, `RangeTooLarge`),
    and `WrongNetwork` when no node belongs to the expected network.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        head: HeadPolicy,
        options: ExecutionOptions | None = None,
        anchor: Anchor | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` gives the time in seconds, by which a head of the future is refused."""
        self._head = head
        self._options = options or ExecutionOptions()
        self._heads: dict[HeadPolicy, NodeLag] = {}
        self._clock = clock
        self._confirmed: Header | None = None
        self._live_budget = Budget(self._options.blooms_per_day)
        self._past_budget = Budget(self._options.blooms_per_day)
        self._checkpoint: tuple[int, Hash32] | None = None
        self._recent = RecentBlocks()
        self._oldest_receipts: tuple[int | None, float] | None = None
        self._final_asked_at = 0.0
        self.anchor = anchor
        self._finality: tuple[ChainTime, Callable[[], float]] | None = None
        super().__init__("execution", urls, self._options.deadlines, Counters())

    def _node(self, url: str, session: aiohttp.ClientSession) -> RpcNode:
        options = self._options
        client = self._client(
            url, attempts=options.attempts, wait_s=options.retry_wait_s, set_aside_s=options.set_aside_s
        )
        client.log_range = LearnedRange(options.log_range_start or options.log_range_max, options.log_range_max)
        http = HttpExchange(client, session, options.deadlines)
        return RpcNode(
            url, http, client.log_range, answer_bytes=options.answer_limit_bytes, batch_size=options.batch_size
        )

    async def _identify(self, node: RpcNode) -> Identity:
        return await _identity(node)

    @property
    def log_range_blocks(self) -> int:
        """Over how many blocks the preferred node is asked for logs at once, by what was learned of it so far."""
        return self._open.nodes[0].log_range.blocks

    @property
    def reads_every_header(self) -> bool:
        """Whether backfills read each header, too."""
        return self._options.headers == "every" or self._options.completeness == "receipts"

    async def head(self) -> Header:
        """The header of the block up to which may be read. Never falls back to a less final one (rule C1)."""
        if self._head.tag == "finalized":
            return await self.final_head()
        return await self._open.ask(partial(self._newest_head, self._head), hedge=True)

    async def final_head(self) -> Header:
        """The header of the finalized block, whatever the policy: validators and withdrawals are read final (rule C1).

        Every node that has a block at this height, and the beacon chain, have the same one there: raises
        `ChainDisagreement` with both sides where they differ. While by the rules of the beacon chain no later block can
        be final, no node is asked.
        """
        if self._confirmed is not None and not self._finality_due(self._confirmed):
            return self._confirmed
        self._final_asked_at = time.monotonic()
        found = await self._open.ask(partial(self._newest_head, HeadPolicy()), hedge=True)
        known = self._confirmed
        if known is None or (known.number, known.hash) != (found.number, found.hash):
            self._confirmed = found = await confirm(self._open, self.anchor, found)
        return found

    def _finality_due(self, known: Header) -> bool:
        """Whether a later block than `known` can be final, or a wrong clock may be the cause that none seems to be."""
        if self._finality is None:
            return True
        beacon_time, clock = self._finality
        is_long = time.monotonic() - self._final_asked_at >= beacon_time.epoch_s
        return is_long or beacon_time.may_finalize(beacon_time.slot_at(known.timestamp_s), int(clock()))

    def expect_finality(self, beacon_time: ChainTime, clock: Callable[[], float]) -> None:
        """Ask for the finalized block only when, by the rules of public networks, a later one can be final."""
        self._finality = beacon_time, clock

    async def _newest_head(self, policy: HeadPolicy, node: RpcNode) -> Header:
        """A node's head; one that has fallen behind another node in use is left, although it answers."""
        found = await self._head_at(node, policy)
        if self._is_of_future(found):
            raise NodeFault(node.name, f"its {policy.tag} block {found.number} is of the future ({found.timestamp_s})")
        self._open.note_head(str(policy), node, found.number)
        if policy.tag == "finalized":
            metrics.finalized(found.number)
        if len(self.nodes) == 1:
            return found
        heads, clock = self._heads.setdefault(policy, NodeLag()), node.client.clock
        look = heads.seen(found.number, clock())
        if look or found.number < heads.due:
            other = await self._open.ask_another(node, partial(self._other_head, policy))
            if other is not None:
                heads.seen(other.number, clock())
            if found.number < heads.due and other is not None and other.number >= heads.due:
                raise SourceUnavailable(
                    node.name,
                    f"is behind: its {policy.tag} block is {found.number}, and other nodes had {heads.due} "
                    f"{BEHIND_S:g} s ago: see why it does not keep up",
                )
            if found.number < heads.due:
                heads.forget()
        return found

    def _is_of_future(self, head: Header) -> bool:
        return self._options.strict and head.timestamp_s > self._clock() + FUTURE_S

    async def _other_head(self, policy: HeadPolicy, node: RpcNode) -> Header:
        found = await self._head_at(node, policy)
        if not self._is_of_future(found):
            self._open.note_head(str(policy), node, found.number)
        return found

    async def _head_at(self, node: RpcNode, policy: HeadPolicy | None = None) -> Header:
        policy = policy or self._head
        (answer,) = await node.ask([Call("eth_getBlockByNumber", (policy.tag, False))])
        found = None if isinstance(answer, RpcFailure) else wire.block(node.name, answer, number=None)
        if found is None:
            why = f" ({answer})" if isinstance(answer, RpcFailure) else ""
            raise SourceUnavailable(
                node.name,
                f"does not know its {policy.tag} block{why}; nothing less final is read instead: wait until the chain "
                "finalizes, or check that the node follows a consensus client",
            )
        if policy.depth == 0:
            return found.header
        return await read_header(node, max(0, found.header.number - policy.depth))

    async def safe_block(self) -> int | None:
        """Return the number of the safe block at the node in use; None where it does not know that tag."""

        async def read(node: RpcNode) -> int | None:
            (answer,) = await node.ask([Call("eth_getBlockByNumber", ("safe", False))])
            found = None if isinstance(answer, RpcFailure) else wire.block(node.name, answer, number=None)
            return None if found is None else found.header.number

        return await self._open.ask(read)

    def remember(self, number: int, block_hash: Hash32) -> None:
        """Note a final block that was read: from now on no node is asked for logs that has another one there."""
        if self._checkpoint is None or number > self._checkpoint[0]:
            self._checkpoint = (number, block_hash)

    async def header(self, number: int) -> Header:
        """The header at a height; `SourceUnavailable` when no node has it."""
        return await self._open.ask(partial(read_header, number=number), hedge=True)

    @property
    def reads_near_head(self) -> bool:
        """Whether blocks are read that a reorg may still replace (rule C1)."""
        return self._head.tag != "finalized"

    async def headers(self, numbers: Sequence[int]) -> dict[int, Header]:
        """The headers at these heights, all from one node; those that it does not have are left out."""

        async def read(node: RpcNode) -> dict[int, Header]:
            answers = await node.ask([header_call(number) for number in numbers])
            found: dict[int, Header] = {}
            for number, answer in zip(numbers, answers, strict=True):
                block = wire.block(node.name, block_answer(node, number, answer), number=number)
                if block is not None:
                    found[number] = block.header
            return found

        return await self._open.ask(read)

    async def linked_headers(self, span: Span, anchor: Hash32 | None) -> dict[int, Header]:
        """Every header of `span`, all from one node and linked; the first one to `anchor` where it is given."""
        options = self._options
        read = partial(
            read_linked_headers,
            span=span,
            parent=anchor,
            strict_times=options.strict,
            batch_size=options.batch_size,
            at_once=options.batches_at_once,
        )
        return {header.number: header for header in await self._open.ask(read)}

    async def read_logs(
        self,
        span: Span,
        watched: Watched,
        anchor: Hash32 | None,
        *,
        every: bool = True,
        final: bool = True,
        live: bool = False,
        only: str | None = None,
        also: Collection[int] = (),
    ) -> LogRange:
        """All logs of the topics in the blocks of `span` that hold watched ones, proven and complete as rule C2 says.

        `anchor` is the hash of the block before the span, to which its first block must be linked. With nothing
        watched only the last block's header is read (rule C10). With `every` each header is read and linked; without
        it, unless the options say so, those of each span's ends and of blocks with logs. `final`: no block of the span
        can be replaced. `live`: do not wait for slow nodes. `only`: what this node alone claims. `also`: blocks to read
        in any case.
        """
        if not watched:
            last = await self.header(span.last)
            parent = hex_text(last.parent_hash) if len(span) == 1 else None
            return LogRange([], {}, last, parent, {span.last: last})
        read = self._read_options(every=every, final=final, live=live, only=only)
        query = LogQuery(watched, topics_of(watched), frozenset(also))
        return await self._read_logs(span, query, anchor, read)

    async def read_deposits(
        self, span: Span, contract: Address, vaults: frozenset[Address], anchor: Hash32 | None
    ) -> LogRange:
        """Read the final deposits of `span` to the beacon chain that pay one of `vaults`, as the contract logs them.

        Whatever the options say, few headers are read: that no deposit is missing is seen by the indices of all
        deposits, which are in the result. `anchor` as in `read_logs`.
        """
        watched = Watched(depositees=vaults, deposit_contracts=frozenset({contract}))
        options = self._read_options(only=None)
        checkpoint = options.checkpoint if anchor is None else None  # the anchor is a final block that was read before
        read = replace(options, every_header=False, all_possible=False, checkpoint=checkpoint)
        return await self._read_logs(span, LogQuery(watched, topics_of(watched)), anchor, read)

    async def _read_logs(self, span: Span, query: LogQuery, anchor: Hash32 | None, read: ReadOptions) -> LogRange:
        try:
            found = await read_logs(self._open, span, query, anchor, read)
        except ReceiptsUnavailable as error:
            raise await self._with_oldest(error, span) from None
        if self.anchor is not None and read.is_final:
            await self._check_range(self.anchor, found, every_header=read.every_header)
        return found

    async def read_emitted(self, span: Span, query: EmitterQuery) -> list[Log]:
        """Read the logs of some contracts in `span`, in chain order, proven as those of `read_logs` are.

        Only the headers of the span's ends and of blocks with logs are read. Raises what `read_logs` does.
        """
        options = replace(self._read_options(only=None), every_header=False)
        try:
            return (await read_logs(self._open, span, query, None, options)).logs
        except ReceiptsUnavailable as error:
            raise await self._with_oldest(error, span) from None

    async def claimed_logs(self, span: Span, query: EmitterQuery) -> dict[int, list[LogContent]]:
        """Return the logs that any node claims of `span`, by block; none of them is proven."""
        read = partial(read_claims, span=span, query=query, parent=None)
        found: dict[int, list[LogContent]] = {}
        for _, claims in await self._open.ask_each(read, most=self._options.ask, urgent=True):
            for number, logs in claims.logs.items():
                found.setdefault(number, []).extend(logs.values())
        return found

    async def _with_oldest(self, error: ReceiptsUnavailable, span: Span) -> ReceiptsUnavailable:
        """The error with the first block from which on the nodes give receipts, which is looked for now and then."""
        head, now = self._confirmed, time.monotonic()
        if head is None or span.first >= head.number:
            return error
        if self._oldest_receipts is None or now - self._oldest_receipts[1] > OLDEST_KNOWN_S:
            oldest = await oldest_with_receipts(self._open, Span(span.first, head.number))
            self._oldest_receipts = (oldest, now)
        oldest = self._oldest_receipts[0]
        if oldest is None:
            return error
        return ReceiptsUnavailable(
            error.node,
            f"{error.problem}; blocks from {oldest} on can be proven: name a node that keeps older receipts in "
            "execution.urls",
        )

    def _read_options(
        self, *, every: bool = True, final: bool = True, live: bool = False, only: str | None
    ) -> ReadOptions:
        options = self._options
        return ReadOptions(
            every_header=every or self.reads_every_header,
            is_final=final,
            urgent=live,
            most=options.ask,
            only=only,
            all_possible=options.completeness == "receipts",
            budget=self._live_budget if live else self._past_budget,
            anchored=self._confirmed,
            checkpoint=None if live else self._checkpoint,
            strict=options.strict,
            batch_size=options.batch_size,
            batches_at_once=options.batches_at_once,
            receipt_limit_bytes=options.receipt_limit_bytes,
            recent=self._recent,
        )

    async def _check_range(self, anchor: Anchor, found: LogRange, *, every_header: bool) -> None:
        """Hold what was read against the beacon chain where nothing else does.

        A span that ends before the finalized block is not linked to it yet. Where few headers are read, blocks are not
        linked at all: then, if a single node answered, each block with logs is held against the beacon chain.
        """
        headers = [] if self._confirmed is not None and self._confirmed.hash == found.last.hash else [found.last]
        if not every_header and found.witnesses == 1:
            headers += [found.headers[number] for number in found.times_s]
        await check_blocks(self._open, anchor, headers)

    async def prove_range(
        self, span: Span, anchor: Hash32 | None, oracles: Collection[Address], watched: Watched = NOTHING
    ) -> ProvenRange:
        """All logs of the two topics in `span`, of any contract, and the reports of `oracles`.

        They come from headers and receipts alone. No node is asked which blocks hold logs: each block whose bloom may
        hold one of the topics is read. The hashes of transactions are proven where a log is `watched`. `anchor` as in
        `read_logs`.
        """
        looked_for = Watched(watched.vaults, watched.queues, frozenset(oracles))
        query = LogQuery(looked_for, (*TOPICS, *((REPORT_UPDATED,) if oracles else ())))
        return await prove_range(self._open, span, anchor, query, self._read_options(only=None))

    async def oldest_with_receipts(self, span: Span) -> int | None:
        """Return the block of `span` from which on the nodes give receipts; None when not even of the last one."""
        return await oldest_with_receipts(self._open, span)

    @property
    def receipt_options(self) -> ReceiptOptions:
        return ReceiptOptions(self._options.receipt_limit_bytes, self._options.strict)

    async def read_withdrawals(
        self, span: Span, anchor: Hash32 | None, last_index: int | None
    ) -> list[WithdrawalBlock]:
        """Every block of `span` with its withdrawals, in order, proven as rule C3 says.

        Those that are not among the recent blocks are all from one node.

        `anchor` is the hash of the block before the span, `last_index` the last withdrawal up to there; the first
        block is held against what of these is given. A block whose withdrawals are not there is never empty.
        """
        options, link = self._options, withdrawals.Link(anchor, last_index)
        recent = withdrawals.recent_blocks(self._recent.first_of(span), link, strict_times=options.strict)
        left, link = withdrawals.after(recent, span, link)
        if left is None:
            return recent

        async def read(node: RpcNode) -> list[WithdrawalBlock]:
            return await withdrawals.read_span(
                node,
                left,
                link,
                batch_size=options.batch_size,
                batches_at_once=options.batches_at_once,
                strict_times=options.strict,
            )

        try:
            return [*recent, *await self._open.ask(read)]
        except NodeFault:
            self._recent.clear()  # a block that a node in use had before may be the one that does not fit
            raise

    async def first_block_at(self, time_s: int) -> int:
        """The first block whose time is `time_s` or later, up to the finalized one (rule C1): by bisection.

        Raises `SourceUnavailable` when the finalized block is older.
        """

        async def search(node: RpcNode) -> int:
            head = await self._head_at(node, HeadPolicy())
            return await withdrawals.first_block_at(node, head, time_s, strict_times=self._options.strict)

        return await self._open.ask(search)

    async def has_code(self, address: Address) -> bool:
        """Return whether there is a contract at `address`, at the head."""

        async def ask(node: RpcNode) -> bool:
            return await contract_calls.has_code(node, address, (await self._head_at(node)).number)

        return await self._open.ask(ask)

    async def call(self, to: Address, data: bytes, block: int | None = None) -> bytes | Reverted:
        """Return what a contract answers to `data` at a block (default: the finalized one), or its revert.

        Raises `SourceUnavailable` when no node can answer, as for the state of an old block.
        """
        (answer,) = await self.read_state([eth_call(to, data, "finalized" if block is None else hex(block))])
        return answer

    async def read_state(self, calls: Sequence[Call]) -> list[bytes | Reverted]:
        """Return the answers to some `eth_call` and `eth_getCode` in order, all from one node; a revert is an answer.

        Raises `SourceUnavailable` when no node can answer all of them.
        """
        return await self._open.ask(partial(contract_calls.read_state, calls=calls))

    async def creation_block(self, address: Address) -> int:
        """Return the first block after which `address` has code, up to the head.

        Raises `InputError` when it has none, and when no node keeps the old state that the search needs.
        """

        async def search(node: RpcNode) -> int | RpcFailure:
            return await contract_calls.first_block_with_code(
                node, address, (await self._head_at(node)).number, str(self._head)
            )

        async def search_with_stand_in(node: RpcNode) -> int | RpcFailure:
            found = await search(node)
            again = await self._open.ask_another(node, search) if isinstance(found, RpcFailure) else None
            return again if isinstance(again, int) else found

        found = await self._open.ask(search_with_stand_in)
        if isinstance(found, RpcFailure):
            raise InputError(
                f"the creation block of {checksum(address)} cannot be found, because no node in use keeps old state "
                f"({found}): give a block number instead"
            )
        return found


async def _identity(node: RpcNode) -> Identity:
    chain_id, genesis = await node.ask([Call("eth_chainId"), header_call(0)])
    if isinstance(chain_id, RpcFailure):
        raise SourceUnavailable(node.name, f"cannot tell its chain id: {chain_id}")
    number = hex_values.quantity(node.name, "the chain id", wire.text(node.name, "the chain id", chain_id))
    return Identity(number, read_block(node, 0, genesis).header.hash)
