"""The methods of an execution node: what it answers about its view of a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vaultevents.devnet.blocks import Block, PlacedLog, filler, own_logs
from vaultevents.devnet.chain import Absent, Chain, resolve
from vaultevents.devnet.logquery import logs_of_block, logs_of_range, parse_filter
from vaultevents.devnet.rpc import (
    INVALID_PARAMS,
    LIMIT_STYLES,
    METHOD_NOT_FOUND,
    SERVER_ERROR,
    RpcError,
    block_json,
    data,
    limit_error,
    log_json,
    quantity,
    receipt_json,
)

CLIENT_VERSION = "vaultevents-devnet/1"
UNKNOWN_BLOCK = -39001
"""The execution API's code for a tag that the node cannot resolve."""
PRUNED = 4444
"""go-ethereum's code for blocks that are no longer kept (EIP-4444)."""


@dataclass(slots=True)
class Node:
    """One node's view of a chain, with its provider's limits.

    The newest `behind` blocks are not yet known to it. A query over more than `max_range` blocks or for more than
    `max_results` logs is refused in the words of `LIMIT_STYLES[limit_style]`. `block_timestamp` says whether its logs
    carry `blockTimestamp`. A pruned node has no blocks before `oldest`, and says so of their logs; before
    `oldest_logs` it has blocks, but says of their logs that there are none. Before `oldest_receipts` it has no
    receipts: it answers with an error or with null, as `pruned_receipts` says. `missing_methods` do not exist here.
    """

    chain: Chain
    max_range: int | None = None
    max_results: int | None = None
    limit_style: str = "infura"
    block_timestamp: bool = True
    behind: int = 0
    oldest: int = 0
    oldest_logs: int = 0
    oldest_receipts: int = 0
    pruned_receipts: Literal["error", "null"] = "error"
    missing_methods: frozenset[str] = frozenset()

    @property
    def head(self) -> int:
        return max(self.chain.head.number - self.behind, 0)

    def block_at(self, position: object) -> Block | None:
        """The canonical block at a tag or a height; None where the node has none. Raises `RpcError`.

        `position` may be an object with `blockNumber` or `blockHash` (EIP-1898); a hash may be of an orphaned block.
        """
        match position:
            case {"blockHash": block_hash}:
                return self.block_of(block_hash)
            case {"blockNumber": number}:
                return self.block_at(number)
        number = self._number(position)
        return None if number is None or not self._keeps(number) else self.chain.block(number)

    def block_of(self, block_hash: object) -> Block | None:
        """A block by its hash, also an orphaned one; None for one that the node has not seen. Raises `RpcError`."""
        block = self.chain.block_by_hash(data(block_hash, 32, "block hash"))
        return block if block is not None and self._keeps(block.number) else None

    def _keeps(self, number: int) -> bool:
        return number == 0 or self.oldest <= number <= self.head

    def logs(self, query: object) -> list[PlacedLog]:
        """eth_getLogs. An unknown block hash is an error (EIP-234); a range is cut to the blocks that the node has.

        Raises `RpcError`, also for the limits.
        """
        if "eth_getLogs" in self.missing_methods:
            raise RpcError(METHOD_NOT_FOUND, "the method eth_getLogs does not exist/is not available")
        if not isinstance(query, dict):
            raise RpcError(INVALID_PARAMS, "invalid argument: a filter object is needed")
        wanted = parse_filter(query)
        if "blockHash" in query:
            if "fromBlock" in query or "toBlock" in query:
                raise RpcError(INVALID_PARAMS, "cannot specify both BlockHash and FromBlock/ToBlock")
            block = self.block_of(query["blockHash"])
            if block is None:
                raise RpcError(SERVER_ERROR, "unknown block")
            return logs_of_block(block, wanted) if block.number >= self.oldest_logs else []
        first, last = self._edge(query, "fromBlock"), self._edge(query, "toBlock")
        if first > last:
            raise RpcError(INVALID_PARAMS, "invalid block range params")
        if first < self.oldest:
            raise RpcError(PRUNED, "pruned history unavailable")
        self._check_range(first, last)
        found = logs_of_range(self.chain, max(first, self.oldest_logs), min(last, self.head), wanted)
        self._check_results(first, last, found)
        return found

    def call(self, method: str, params: list[Any]) -> Any:
        """The result of any method but eth_getLogs. Raises `RpcError`."""
        handler = _METHODS.get(method)
        if handler is None or method in self.missing_methods:
            raise RpcError(METHOD_NOT_FOUND, f"the method {method} does not exist/is not available")
        try:
            return handler(self, params)
        except IndexError:
            raise RpcError(INVALID_PARAMS, "missing value for required argument") from None

    def _edge(self, query: dict[str, Any], name: str) -> int:
        number = self._number(query.get(name) or "latest")
        if number is None:
            raise RpcError(SERVER_ERROR, "unknown block")
        return number

    def _number(self, position: object) -> int | None:
        match position:
            case "latest" | "pending":
                return self.head
            case "earliest":
                return 0
            case "safe" | "finalized":
                return self._tagged(position)
            case _:
                return quantity(position, "block number")

    def _tagged(self, tag: str) -> int | None:
        position = self.chain.safe if tag == "safe" else self.chain.finalized
        match resolve(position, self.head):
            case Absent.UNKNOWN:
                raise RpcError(UNKNOWN_BLOCK, f"{tag} block not found")
            case Absent.NULL:
                return None
            case number:
                return number

    def _check_range(self, first: int, last: int) -> None:
        limit = self.max_range
        if limit is not None and last - first + 1 > limit:
            style = LIMIT_STYLES[self.limit_style]
            fits = first + limit - 1
            raise limit_error(style.range_code, style.range_message, limit=limit, first=first, last=last, fits=fits)

    def _check_results(self, first: int, last: int, found: list[PlacedLog]) -> None:
        limit = self.max_results
        if limit is not None and len(found) > limit:
            style = LIMIT_STYLES[self.limit_style]
            fits = max(first, found[limit].block.number - 1)
            raise limit_error(style.results_code, style.results_message, limit=limit, first=first, last=last, fits=fits)

    def _receipts(self, block: Block) -> list[dict[str, Any]]:
        logs: dict[bytes, list[PlacedLog]] = {}
        for placed in [*own_logs(block), *filler(block)]:
            logs.setdefault(placed.tx_hash, []).append(placed)
        return [
            receipt_json(block, index, logs.get(tx_hash, ()), block_timestamp=self.block_timestamp)
            for index, tx_hash in enumerate(block.transaction_hashes)
        ]

    def _block_receipts(self, params: list[Any]) -> list[dict[str, Any]] | None:
        where = params[0]
        is_hash = isinstance(where, str) and len(where) == 66
        block = self.block_of(where) if is_hash else self.block_at(where)
        return None if block is None or not self._has_receipts(block) else self._receipts(block)

    def _has_receipts(self, block: Block) -> bool:
        if block.number >= self.oldest_receipts:
            return True
        if self.pruned_receipts == "error":
            raise RpcError(PRUNED, "pruned history unavailable")
        return False

    def _receipt(self, params: list[Any]) -> dict[str, Any] | None:
        found = self.chain.included(data(params[0], 32, "transaction hash"))
        if found is None or found[0].number > self.head or not self._has_receipts(found[0]):
            return None
        block, index = found
        tx_hash = block.transaction_hashes[index]
        logs = [log for log in [*own_logs(block), *filler(block)] if log.tx_hash == tx_hash]
        return receipt_json(block, index, logs, block_timestamp=self.block_timestamp)

    def _code(self, params: list[Any]) -> str:
        block = self.block_at(params[1] if len(params) > 1 else "latest")
        if block is None:
            raise RpcError(SERVER_ERROR, "header not found")
        return "0x60006000fd" if self.chain.has_code(data(params[0], 20, "address"), block.number) else "0x"

    def log_json(self, placed: PlacedLog) -> dict[str, Any]:
        """One log as this node writes it."""
        return log_json(placed, block_timestamp=self.block_timestamp)


def _block_or_null(block: Block | None, params: list[Any]) -> dict[str, Any] | None:
    return None if block is None else block_json(block, full=params[1:2] == [True])


_METHODS: dict[str, Callable[[Node, list[Any]], Any]] = {
    "eth_chainId": lambda node, _: hex(node.chain.chain_id),
    "net_version": lambda node, _: str(node.chain.chain_id),
    "web3_clientVersion": lambda _node, _: CLIENT_VERSION,
    "eth_syncing": lambda _node, _: False,
    "eth_blockNumber": lambda node, _: hex(node.head),
    "eth_getBlockByNumber": lambda node, params: _block_or_null(node.block_at(params[0]), params),
    "eth_getBlockByHash": lambda node, params: _block_or_null(node.block_of(params[0]), params),
    "eth_getBlockReceipts": Node._block_receipts,
    "eth_getTransactionReceipt": Node._receipt,
    "eth_getCode": Node._code,
}
