"""The logs of single blocks, from receipts that make up the `receiptsRoot` of an authentic header (rule C2).

eth_getBlockReceipts by hash ─▶ each receipt encoded and dropped ─▶ the root must be that of the header
not offered, or too large     ─▶ receipt by receipt, a bounded number at once ─▶ the same root
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from vaultevents.chain.execution import wire
from vaultevents.chain.execution.blocks import header_call, read_block
from vaultevents.chain.execution.jsonrpc import Call, RpcFailure, RpcNode, RpcResponse
from vaultevents.chain.execution.log_range import LogQuery
from vaultevents.chain.execution.rlp_encoding import from_text, text_data, text_list, text_number
from vaultevents.chain.execution.trie import list_root
from vaultevents.chain.upstream import hex_values
from vaultevents.chain.upstream.batches import chunks
from vaultevents.chain.upstream.node import DataUnavailable
from vaultevents.core.errors import NodeFault, RangeTooLarge
from vaultevents.core.keccak import keccak
from vaultevents.core.logs import Header, Log
from vaultevents.core.units import Address, Hash32, hex_text

KNOWN_TYPES: Final = range(5)
"""Of transactions whose receipts have the one known form: legacy, EIP-2930, EIP-1559, EIP-4844, EIP-7702."""


class ReceiptsUnavailable(DataUnavailable):
    """The node does not have, or does not offer, the receipts of a block; it may be fine for everything else."""


class OtherBlock(DataUnavailable):
    """The node has another block at a height than was asked for."""


def other_block(node: str, header: Header, wanted: Hash32) -> OtherBlock:
    """Make the error of a node that has `header` at a height where a block with another hash was asked for."""
    return OtherBlock(node, f"gives block {header.number} as {hex_text(header.hash)}, not as {hex_text(wanted)}")


@dataclass(frozen=True, slots=True)
class BlockLogs:
    """The kept logs of a block, in order, and the positions of their transactions.

    `is_proven`: the receipts make up the root in the header. They cannot where a transaction is of a type that this
    version does not know (EIP-2718). `hashes_proven`: the hashes of the logs' transactions are those that the header's
    other root proves.
    """

    header: Header
    logs: tuple[Log, ...]
    tx_indices: tuple[int, ...]
    is_proven: bool = True
    hashes_proven: bool = False


class _WireLog(msgspec.Struct):
    address: str
    topics: list[str]
    data: str


class _WireReceipt(msgspec.Struct, rename="camel"):
    transaction_hash: str
    cumulative_gas_used: str
    logs_bloom: str
    logs: list[_WireLog]
    type: str = "0x0"
    status: str | None = None
    root: str | None = None


_RECEIPT = msgspec.json.Decoder(_WireReceipt)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(slots=True)
class _Receipts:
    """What is kept of the receipts of a block while they are read: their encodings, and logs with their indices."""

    node: str
    header: Header
    query: LogQuery
    encoded: list[bytes] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    tx_indices: list[int] = field(default_factory=list)
    index: int = 0
    unknown_type: bool = False

    def add(self, raw: msgspec.Raw) -> None:
        """Take the next receipt; raises `NodeFault` where it has another form, unless its type is unknown."""
        number = self.header.number
        try:
            receipt = _RECEIPT.decode(raw)
            kind = int(receipt.type, 16)
            outcome = text_number(receipt.status) if receipt.status else text_data(receipt.root or "0x")
            gas, bloom = text_number(receipt.cumulative_gas_used), text_data(receipt.logs_bloom)
            payload = from_text(text_list((outcome, gas, bloom, text_list(map(_log_text, receipt.logs)))))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, IndexError):
            raise NodeFault(self.node, f"a receipt of block {number} does not have the known form") from None
        self.unknown_type |= kind not in KNOWN_TYPES
        tx_hash = receipt.transaction_hash.lower()
        for log in receipt.logs:
            self._take(log, tx_hash)
        self.hashes.append(tx_hash)
        self.encoded.append(bytes([kind & 0x7F]) * (kind > 0) + payload)

    def _take(self, log: _WireLog, tx_hash: str) -> None:
        """Keep a log that is wanted."""
        if log.topics and log.topics[0].lower() in self.query.topic_texts:
            what = f"of a log in block {self.header.number}"
            address = Address(hex_values.data(self.node, f"the address {what}", log.address, 20))
            topics = tuple(Hash32(hex_values.data(self.node, f"a topic {what}", topic, 32)) for topic in log.topics)
            if self.query.keeps(topics, address):
                data = hex_values.data(self.node, f"the data {what}", log.data)
                of_tx = Hash32(hex_values.data(self.node, f"the transaction hash {what}", tx_hash, 32))
                header = self.header
                self.logs.append(Log(address, topics, data, header.number, header.hash, of_tx, self.index))
                self.tx_indices.append(len(self.encoded))
        self.index += 1

    def proven(self, tx_hashes: Sequence[str]) -> BlockLogs:
        """Check the root; raises `NodeFault` where the receipts do not make it up although all types are known."""
        number = self.header.number
        if self.hashes != [tx_hash.lower() for tx_hash in tx_hashes]:
            raise NodeFault(self.node, f"the receipts of block {number} are not those of its transactions")
        is_proven = list_root(self.encoded) == self.header.receipts_root
        if not is_proven and not self.unknown_type:
            raise NodeFault(
                self.node,
                f"the {len(self.encoded)} receipts that it gives for block {number} do not make up the block's "
                "receipts root",
            )
        return BlockLogs(self.header, tuple(self.logs), tuple(self.tx_indices), is_proven)


def _log_text(log: _WireLog) -> str:
    return text_list((text_data(log.address), text_list(map(text_data, log.topics)), text_data(log.data)))


@dataclass(frozen=True, slots=True)
class ReceiptOptions:
    """`limit_bytes`: how large the answer with a single receipt may be. `strict`: transactions make up their root."""

    limit_bytes: int
    strict: bool


Wanted = tuple[int, Hash32 | None]
"""The number of a block and, where it is known, its hash."""


async def read_blocks(
    node: RpcNode, wanted: Sequence[Wanted], query: LogQuery, options: ReceiptOptions, *, whole: bool = False
) -> list[BlockLogs]:
    """Read the kept logs of blocks in their order.

    With `whole` they are asked for with their transactions, so that those of watched logs are proven, too. Raises
    `NodeFault` for what contradicts the chain, `ReceiptsUnavailable` where the node lacks the receipts.
    """
    try:
        answers: list[RpcResponse | None] = [
            *await node.ask([call for block in wanted for call in _calls(*block, whole)])
        ]
    except RangeTooLarge:
        whole = False
        answers = [answer for block in wanted for answer in await _ask_alone(node, *block)]
    else:
        # a node that gives receipts of this size gives the transactions of as many blocks
        sizes = [len(memoryview(answer)) for answer in answers[1::2] if isinstance(answer, msgspec.Raw)]
        node.learn_receipts_size(sizes)
    pairs = zip(wanted, answers[::2], answers[1::2], strict=True)
    return [await _read_block(node, *block, answer, given, query, options, whole) for block, answer, given in pairs]


def _calls(number: int, block_hash: Hash32 | None, whole: bool) -> tuple[Call, Call]:
    """A block, and its receipts: by hash where it is known, so that a node with another block has none."""
    receipts = Call("eth_getBlockReceipts", (hex_text(block_hash) if block_hash else hex(number),))
    return header_call(number, whole=whole), receipts


async def _ask_alone(node: RpcNode, number: int, block_hash: Hash32 | None) -> tuple[RpcResponse, RpcResponse | None]:
    """The answers about one block; None for receipts that are more than is read at once."""
    block_call, receipts_call = _calls(number, block_hash, whole=False)
    (block_answer,) = await node.ask([block_call])
    try:
        (receipts_answer,) = await node.ask([receipts_call])
    except RangeTooLarge:
        return block_answer, None
    return block_answer, receipts_answer


async def _read_block(
    node: RpcNode,
    number: int,
    block_hash: Hash32 | None,
    block_answer: RpcResponse | None,
    receipts_answer: RpcResponse | None,
    query: LogQuery,
    options: ReceiptOptions,
    whole: bool,
) -> BlockLogs:
    assert block_answer is not None
    block = read_block(node, number, block_answer, "whole" if whole else "hashes")
    if block_hash is not None and block.header.hash != block_hash:
        raise other_block(node.name, block.header, block_hash)
    receipts = _Receipts(node.name, block.header, query)
    tx_hashes = block.tx_hashes or []
    raw = _given(receipts_answer)
    if raw is None:
        await _add_one_by_one(node, receipts, tx_hashes, options.limit_bytes)
    else:
        _add_all(receipts, raw)
    proven = receipts.proven(tx_hashes)
    if block.transactions is None or not query.watched_content(proven.logs):
        return proven
    try:
        return _with_hashes(node, proven, block.transactions)
    except NodeFault:
        if options.strict:
            raise
        return proven  # of a development chain, or false: other nodes are asked (`prove_transactions`)


def _given(answer: RpcResponse | None) -> msgspec.Raw | None:
    """The receipts of a block; None where they are too large, not offered or not there."""
    return None if answer is None or isinstance(answer, RpcFailure) or wire.is_null(answer) else answer


def _add_all(receipts: _Receipts, raw: msgspec.Raw) -> None:
    try:
        listed = _LIST.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        listed = None
    if listed is None:
        raise NodeFault(receipts.node, f"the receipts of block {receipts.header.number} are no list")
    for receipt in listed:
        receipts.add(receipt)


RECEIPTS_AT_ONCE: Final = 50


async def _add_one_by_one(node: RpcNode, receipts: _Receipts, tx_hashes: Sequence[str], limit_bytes: int) -> None:
    """Read the receipts by the hashes of their transactions, so that a block of any size takes bounded memory."""
    for some in chunks(tx_hashes, RECEIPTS_AT_ONCE):
        calls = [Call("eth_getTransactionReceipt", (tx_hash,)) for tx_hash in some]
        for tx_hash, answer in zip(some, await _ask_receipts(node, calls, limit_bytes), strict=True):
            raw = _given(answer)
            if raw is None:
                why = f": {answer}" if isinstance(answer, RpcFailure) else ""
                raise ReceiptsUnavailable(
                    node.name,
                    f"gives neither the receipts of block {receipts.header.number} nor that of its transaction "
                    f"{tx_hash}{why}",
                )
            receipts.add(raw)


async def _ask_receipts(node: RpcNode, calls: Sequence[Call], limit_bytes: int) -> list[RpcResponse]:
    try:
        return await node.ask(calls)
    except RangeTooLarge:
        answers: list[RpcResponse] = []
    for call in calls:
        try:
            answers += await node.ask([call], limit_bytes=limit_bytes)
        except RangeTooLarge as error:
            raise ReceiptsUnavailable(
                node.name, f"{error.problem}: raise execution.max_receipt_mb (now {limit_bytes // 2**20})"
            ) from None
    return answers


class TransactionsUnproven(DataUnavailable):
    """The full transactions that a node gives do not make up the root in the header, as on some development chains."""


async def prove_transactions(node: RpcNode, blocks: Sequence[BlockLogs], options: ReceiptOptions) -> list[BlockLogs]:
    """Give the logs of proven blocks the hashes of their transactions that the header's root proves.

    Receipts do not contain these hashes, and event ids do. Raises `NodeFault` where they do not make up the root, and
    `TransactionsUnproven` where the options are not strict.
    """
    try:
        return await _prove_transactions(node, blocks)
    except NodeFault as error:
        if options.strict:
            raise
        raise TransactionsUnproven(error.node, error.problem) from None


async def _prove_transactions(node: RpcNode, blocks: Sequence[BlockLogs]) -> list[BlockLogs]:
    answers = await node.ask([Call("eth_getBlockByHash", (hex_text(block.header.hash), True)) for block in blocks])
    proven = []
    for block, answer in zip(blocks, answers, strict=True):
        listed = read_block(node, block.header.number, answer, "whole").transactions
        assert listed is not None
        proven.append(_with_hashes(node, block, listed))
    return proven


def _with_hashes(node: RpcNode, block: BlockLogs, listed: msgspec.Raw) -> BlockLogs:
    encoded = wire.transactions(node.name, listed, block.header)
    if encoded is None:
        return replace(block, is_proven=False)
    hashes = {at: Hash32(keccak(encoded[at])) for at in set(block.tx_indices)}
    logs = (replace(log, tx_hash=hashes[at]) for log, at in zip(block.logs, block.tx_indices, strict=True))
    return replace(block, logs=tuple(logs), hashes_proven=True)


async def has_receipts(node: RpcNode, number: int) -> bool:
    """Test whether a node gives the receipts of a block, or more of them than is read at once."""
    try:
        (answer,) = await node.ask([Call("eth_getBlockReceipts", (hex(number),))])
    except RangeTooLarge:
        return True
    return _given(answer) is not None
