"""The contract logs of a span from one node, derived again without any range of eth_getLogs: what an audit compares.

header of every block ─▶ linked; its hash rebuilt from its fields, where these are all known
blocks whose bloom may hold a topic, or proves nothing ─▶ receipts by hash ─▶ must make up the header's `receiptsRoot`
a node without receipts, or of an unknown kind of them ─▶ all logs by the block's hash ─▶ must make up the bloom
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import rlp
from eth_hash.auto import keccak

from vaultevents.chain import proofs, wire
from vaultevents.chain.jsonrpc import Answer, Call, RpcFailure, RpcNode
from vaultevents.chain.parts import chunks, full_call, header_call, read_block
from vaultevents.chain.trie import list_root
from vaultevents.chain.wire import Sighting
from vaultevents.core.errors import NodeFault, RangeTooLarge, SourceUnavailable
from vaultevents.core.logs import REPORT_UPDATED, TOPICS, Header, Log, bloom_may_hold, bloom_of
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32, hex_text

RECEIPTS_AT_ONCE = 8
"""The receipts of a full mainnet block are some 400 KB."""
KNOWN_TYPES = range(5)
"""Of transactions whose receipts have the one known form: legacy, EIP-2930, EIP-1559, EIP-4844, EIP-7702."""

# The fields of a header in the order in which they are hashed; from baseFeePerGas on each fork has added some.
_NUMBERS = frozenset(
    ("difficulty", "number", "gasLimit", "gasUsed", "timestamp", "baseFeePerGas", "blobGasUsed", "excessBlobGas")
)
_FIRST = (
    *("parentHash", "sha3Uncles", "miner", "stateRoot", "transactionsRoot", "receiptsRoot", "logsBloom", "difficulty"),
    *("number", "gasLimit", "gasUsed", "timestamp", "extraData", "mixHash", "nonce"),
)
_LATER = (
    *("baseFeePerGas", "withdrawalsRoot", "blobGasUsed", "excessBlobGas", "parentBeaconBlockRoot", "requestsHash"),
)
_FIELDS = msgspec.json.Decoder(dict[str, Any])


class _WireReceipt(msgspec.Struct, rename="camel"):
    transaction_hash: str
    cumulative_gas_used: str
    logs_bloom: str
    logs: msgspec.Raw
    type: str = "0x0"
    status: str | None = None
    root: str | None = None


_RECEIPTS = msgspec.json.Decoder(list[_WireReceipt])


@dataclass(frozen=True, slots=True)
class Derived:
    """All logs of the two topics, whoever emitted them, and those of reports, in chain order, and how they are proven.

    `times_s` has the time of each block with a log; `last` is the header of the span's last block. Of the span's
    headers `hashes_rebuilt` hash to their block's hash; of the `blocks_read` the receipts of `roots_rebuilt` make up
    the header's root, those of the others its bloom.
    """

    logs: list[Log]
    times_s: dict[int, int]
    last: Header
    hashes_rebuilt: int
    blocks_read: int
    roots_rebuilt: int


@dataclass(frozen=True, slots=True)
class _Known:
    """A block: what is used of its header, the root of its receipts, and its transactions as the node writes them."""

    header: Header
    receipts_root: bytes | None
    tx_hashes: Sequence[str]
    is_rebuilt: bool


@dataclass(slots=True)
class _Reader:
    node: RpcNode
    oracles: Collection[Address]
    has_receipts: bool = True
    logs: list[Log] = field(default_factory=list)
    times_s: dict[int, int] = field(default_factory=dict)
    hashes_rebuilt: int = 0
    blocks_read: int = 0
    roots_rebuilt: int = 0

    def may_hold(self, bloom: bytes) -> bool:
        """Whether one of the two topics may be in the block, from whomever, or a report of an oracle."""
        return any(bloom_may_hold(bloom, topic) for topic in TOPICS) or any(
            bloom_may_hold(bloom, REPORT_UPDATED, oracle) for oracle in self.oracles
        )

    def is_asked(self, log: Log) -> bool:
        topic = log.topics[0] if log.topics else b""
        return topic in TOPICS or (topic == REPORT_UPDATED and log.address in self.oracles)

    async def read(self, blocks: Sequence[_Known]) -> None:
        """The logs of some blocks, in order."""
        answers = await self._ask([_receipts_call(one.header.hash) for one in blocks]) if self.has_receipts else None
        for at, block in enumerate(blocks):
            self.blocks_read += 1
            found = self._from_receipts(block, answers[at]) if answers else None
            if found is None:
                found = await self._from_logs(block)
            asked = [one.log for one in found if self.is_asked(one.log)]
            self.logs += asked
            if asked:
                self.times_s[block.header.number] = block.header.timestamp_s

    def _from_receipts(self, block: _Known, answer: Answer | None) -> list[Sighting] | None:
        """None where the node gives no receipts, or such as make up no root that is known."""
        if answer is None or isinstance(answer, RpcFailure):
            self.has_receipts = answer is None  # of one block they may be too large; a refusal holds for all
            return None
        receipts = _decoded(self.node.name, block, answer)
        hashes = [one.lower() for one in block.tx_hashes]
        if [one.transaction_hash.lower() for one in receipts] != hashes:
            raise NodeFault(self.node.name, f"the receipts of block {block.header.number} are not of its transactions")
        found = [wire.logs(self.node.name, one.logs) for one in receipts]
        encoded = [_encoded(one, logs) for one, logs in zip(receipts, found, strict=True)]
        if block.receipts_root is None or None in encoded:
            return None
        if list_root([one for one in encoded if one is not None]) != block.receipts_root:
            raise NodeFault(
                self.node.name,
                f"the {len(receipts)} receipts that it gives for block {block.header.number} do not make up the "
                "block's receipts root",
            )
        self.roots_rebuilt += 1
        for tx_hash, logs in zip(hashes, found, strict=True):
            if any(hex_text(one.log.tx_hash) != tx_hash for one in logs):
                raise NodeFault(self.node.name, f"a receipt of block {block.header.number} has another's log")
        return self._placed(block, [one for logs in found for one in logs])

    async def _from_logs(self, block: _Known) -> list[Sighting]:
        """All logs of the block by its hash, which must make up the bloom."""
        header, name = block.header, self.node.name
        (answer,) = await self._ask([full_call(header.hash)])
        if answer is None or isinstance(answer, RpcFailure):
            why = "too large" if answer is None else str(answer)
            raise SourceUnavailable(
                name, f"gives neither the receipts nor all logs of block {header.number} ({why}): use another node"
            )
        found = sorted(wire.logs(name, answer), key=lambda one: one.log.log_index)
        if bloom_of(one.log for one in found) != header.logs_bloom:
            raise NodeFault(
                name, f"all {len(found)} logs that it gives for block {header.number} do not make up the block's bloom"
            )
        proofs.check_transactions(name, found, block.tx_hashes)
        return self._placed(block, found)

    def _placed(self, block: _Known, found: list[Sighting]) -> list[Sighting]:
        """All of this block, and numbered without a gap."""
        number = block.header.number
        for at, one in enumerate(found):
            if (one.log.block_hash, one.log.block_number) != (block.header.hash, number):
                raise NodeFault(self.node.name, f"among the logs of block {number} is one of another block")
            if one.log.log_index != at:
                raise NodeFault(self.node.name, f"the logs of block {number} are not numbered 0, 1, 2 …")
        return found

    async def _ask(self, calls: Sequence[Call]) -> list[Answer | None]:
        """The answers; None for one that is more than is read."""
        try:
            return [*await self.node.ask(calls)]
        except RangeTooLarge:
            if len(calls) == 1:
                return [None]
        return [answer for call in calls for answer in await self._ask([call])]


async def derive_span(
    node: RpcNode, span: Span, anchor: Hash32 | None, oracles: Collection[Address], batch_size: int
) -> Derived:
    """Everything from `node`. The first block must link to `anchor` where it is given.

    Raises `NodeFault` where what the node gives contradicts itself, `SourceUnavailable` where it cannot tell.
    """
    reader = _Reader(node, oracles)
    previous: Header | None = None
    for numbers in chunks(range(span.first, span.last + 1), batch_size):
        answers = await node.ask([header_call(number) for number in numbers])
        blocks = [_known(node, number, answer) for number, answer in zip(numbers, answers, strict=True)]
        headers = [one.header for one in blocks]
        if previous is None and anchor is not None:
            proofs.check_parent(node.name, headers[0], anchor)
        proofs.check_headers(node.name, headers if previous is None else [previous, *headers])
        previous = headers[-1]
        reader.hashes_rebuilt += sum(one.is_rebuilt for one in blocks)
        # a bloom proves that a block is empty only where it is proven itself
        doubtful = [one for one in blocks if not one.is_rebuilt or reader.may_hold(one.header.logs_bloom)]
        for at in range(0, len(doubtful), RECEIPTS_AT_ONCE):
            await reader.read(doubtful[at : at + RECEIPTS_AT_ONCE])
    assert previous is not None
    return Derived(
        reader.logs, reader.times_s, previous, reader.hashes_rebuilt, reader.blocks_read, reader.roots_rebuilt
    )


def header_hash(fields: Mapping[str, Any]) -> bytes | None:
    """Keccak of the RLP of all fields that a header had up to now; None where one of them is missing or malformed."""
    later = next((at for at, name in enumerate(_LATER) if fields.get(name) is None), len(_LATER))
    try:
        return keccak(rlp.encode([_item(name, fields[name]) for name in (*_FIRST, *_LATER[:later])]))
    except (KeyError, TypeError, ValueError):
        return None


def _item(name: str, text: str) -> int | bytes:
    return int(text, 16) if name in _NUMBERS else bytes.fromhex(text[2:])


def _receipts_call(block_hash: Hash32) -> Call:
    return Call("eth_getBlockReceipts", (hex_text(block_hash),))


def _known(node: RpcNode, number: int, answer: Answer) -> _Known:
    block = read_block(node, number, answer, with_transactions=True)
    assert block.tx_hashes is not None and not isinstance(answer, RpcFailure)
    fields = _FIELDS.decode(answer)
    root = fields.get("receiptsRoot")
    return _Known(
        block.header,
        wire.data(node.name, f"the receipts root of block {number}", root, 32) if isinstance(root, str) else None,
        block.tx_hashes,
        header_hash(fields) == block.header.hash,
    )


def _decoded(node: str, block: _Known, answer: msgspec.Raw) -> list[_WireReceipt]:
    if bytes(memoryview(answer)[:5]) == b"null":
        raise SourceUnavailable(node, f"does not have the receipts of block {block.header.number}: use another node")
    try:
        return _RECEIPTS.decode(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = f"the receipts of block {block.header.number} do not have the known form ({error})"
    raise NodeFault(node, problem)


def _encoded(receipt: _WireReceipt, logs: Sequence[Sighting]) -> bytes | None:
    """The receipt as it is hashed; None for one of a kind or form that is not known here (EIP-2718)."""
    try:
        kind, gas = int(receipt.type, 16), int(receipt.cumulative_gas_used, 16)
        outcome = int(receipt.status, 16) if receipt.status else bytes.fromhex((receipt.root or "")[2:])
        bloom = bytes.fromhex(receipt.logs_bloom[2:])
    except ValueError:
        return None
    if kind not in KNOWN_TYPES:
        return None
    entries = [[one.log.address, list(one.log.topics), one.log.data] for one in logs]
    payload: bytes = rlp.encode([outcome, gas, bloom, entries])
    return bytes([kind]) * (kind > 0) + payload
