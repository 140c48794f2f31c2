"""An execution node whose answers are false in a chosen way, and the same in all of its methods.

The node serves its own picture of the chain: each block of the chain as the lie has it. Logs by range, hash or address,
headers, and receipts by block or transaction all come from that picture, so no two answers contradict each other unless
the chain itself (a header's hash, its receipts root, a link) contradicts the lie.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from eth_hash.auto import keccak

from vaultevents.devnet.acts import ETHER_FUNDED_TOPIC, WITHDRAWAL_CLAIMED_TOPIC, Funding, log_of
from vaultevents.devnet.blocks import Block, Log, PlacedLog, Transaction, filler_bloom, own_logs, receipts_root
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.header import bloom_of
from vaultevents.devnet.simulation import Simulation

TOPICS = (ETHER_FUNDED_TOPIC, WITHDRAWAL_CLAIMED_TOPIC)
STALE_BLOCKS = 20
EARLY_FORK, LATE_FORK = 40, 80
"""Up to which block the two branches agree with the chain."""

NO_RECEIPTS = 10**9


class Lie(StrEnum):
    """What is false in the answers of a node, from a given block on."""

    HIDE = "hide"  # watched logs are missing; headers are true
    ZERO_BLOOM = "zero_bloom"  # likewise, and blooms are zero under the true hash
    ALTER = "alter"  # amounts times 1000
    INVENT = "invent"  # a payment that never was, to a vault that was paid in the same block
    UNDECODABLE = "undecodable"  # watched logs have no data
    TRUNCATED = "truncated"  # the second half of each block's logs is missing
    FALSE_HEADER = "false_header"  # times and roots are others under the true hash
    FORGED_BLOCK = "forged_block"  # altered, with receipts root, bloom and hash of its own: adjacent blocks do not link
    RENAMED = "renamed"  # transactions, and so their hashes in logs and receipts, are others than those of the header
    EARLY_FORK = "early_fork"  # a branch that is consistent in itself, also claimed as finalized
    LATE_FORK = "late_fork"
    STALE = "stale"  # nothing is known of the newest blocks
    WITHHELD_RECEIPTS = "withheld_receipts"  # receipts are null
    PRUNED_RECEIPTS = "pruned_receipts"  # receipts of old blocks are refused


class LyingServer(ExecutionServer):
    """A node of a simulation's chain that answers with one `lie`, about blocks from `since` on, until `be_honest`."""

    def __init__(self, simulation: Simulation, lie: Lie, *, since: int = 1, pruned_before: int = EARLY_FORK) -> None:
        super().__init__(simulation.chain)
        self._simulation = simulation
        match lie:
            case Lie.STALE:
                self.node.behind = STALE_BLOCKS
            case Lie.WITHHELD_RECEIPTS:
                self.node.oldest_receipts, self.node.pruned_receipts = NO_RECEIPTS, "null"
            case Lie.PRUNED_RECEIPTS:
                self.node.oldest_receipts = pruned_before
            case Lie.EARLY_FORK | Lie.LATE_FORK:
                self.node.chain = branch_of(simulation, EARLY_FORK if lie is Lie.EARLY_FORK else LATE_FORK)
            case _:
                self.node.chain = FalseChain(simulation.chain, _EDITS[lie], watched_addresses(simulation), since)

    def be_honest(self) -> None:
        """Answer with the truth from now on."""
        node = self.node
        node.chain, node.behind, node.oldest_receipts = self._simulation.chain, 0, 0
        self._rendered.clear()


def watched_addresses(simulation: Simulation) -> frozenset[bytes]:
    """The vaults and queues that are registered."""
    named = ((registration.address, registration.queue) for registration in simulation.registrations)
    return frozenset(address for pair in named for address in pair if address is not None)


def branch_of(simulation: Simulation, last_common: int) -> Chain:
    """A branch that grows with the chain; each of its blocks pays to a watched vault."""
    vault = simulation.registrations[0].address
    branch = simulation.chain.fork(last_common, seed=simulation.chain.seed + 1)

    def grow() -> None:
        while branch.head.number < simulation.chain.head.number:
            branch.mine([branch.transaction([log_of(Funding(vault, 10**18))])])

    grow()
    simulation.chain.on_block.append(grow)
    return branch


Edit = Callable[[Block, Collection[bytes]], Block]
"""From a block to what is shown of it, given the watched addresses."""


class FalseChain(Chain):
    """A chain as an `Edit` shows it; what is not overridden here is that of the true one."""

    def __init__(self, truth: Chain, edit: Edit, watched: Collection[bytes], since: int) -> None:
        self.truth = truth
        self._edit = edit
        self._watched = watched
        self._since = since
        self._shown: dict[bytes, Block] = {}
        self._false: dict[bytes, Block] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.truth, name)

    def show(self, block: Block) -> Block:
        """Return the block as this chain has it."""
        if block.number < self._since:
            return block
        shown = self._shown.get(block.hash)
        if shown is None:
            shown = self._shown[block.hash] = self._edit(block, self._watched)
            self._false[shown.hash] = shown
        return shown

    @property
    def head(self) -> Block:
        return self.show(self.truth.head)

    def block(self, number: int) -> Block | None:
        found = self.truth.block(number)
        return None if found is None else self.show(found)

    def blocks(self, first: int, last: int) -> list[Block]:
        return [self.show(block) for block in self.truth.blocks(first, last)]

    def full_blocks(self, first: int, last: int) -> list[Block]:
        return [self.show(block) for block in self.truth.full_blocks(first, last)]

    def block_by_hash(self, block_hash: bytes) -> Block | None:
        found = self.truth.block_by_hash(block_hash)
        if found is None:
            return self._false.get(block_hash)
        shown = self.show(found)
        return shown if shown.hash == block_hash else None

    def included(self, tx_hash: bytes) -> tuple[Block, int] | None:
        found = self.truth.included(tx_hash)
        if found is None:
            renamed = (block for block in self._false.values() if tx_hash in block.transaction_hashes)
            block = next(renamed, None)
            return None if block is None else (block, block.transaction_hashes.index(tx_hash))
        block, index = self.show(found[0]), found[1]
        return (block, index) if block.transaction_hashes[index] == tx_hash else None

    def logs(self, first: int, last: int, topic0s: Sequence[bytes] | None = None) -> list[PlacedLog]:
        placed = [log for block in self.blocks(first, last) for log in own_logs(block)]
        return [log for log in placed if topic0s is None or (log.log.topics[:1] and log.log.topics[0] in topic0s)]


def is_watched(log: Log, watched: Collection[bytes]) -> bool:
    """Whether an event follows from the log."""
    return bool(log.topics) and log.topics[0] in TOPICS and log.address in watched


def _with_logs(block: Block, logs: Callable[[tuple[Log, ...]], Sequence[Log]]) -> Block:
    """The block under its own header, with the logs of each transaction replaced."""
    transactions = (replace(transaction, logs=tuple(logs(transaction.logs))) for transaction in block.transactions)
    return replace(block, transactions=tuple(transactions))


def _hidden(block: Block, watched: Collection[bytes]) -> Block:
    return _with_logs(block, lambda logs: [log for log in logs if not is_watched(log, watched)])


def _without_bloom(block: Block, watched: Collection[bytes]) -> Block:
    return replace(_hidden(block, watched), header=replace(block.header, logs_bloom=bytes(256)))


def _altered(block: Block, watched: Collection[bytes]) -> Block:
    def times_1000(log: Log) -> Log:
        amount = int.from_bytes(log.data) * 1000 % 2**256
        return replace(log, data=amount.to_bytes(32)) if is_watched(log, watched) else log

    return _with_logs(block, lambda logs: list(map(times_1000, logs)))


def _with_invented(block: Block, watched: Collection[bytes]) -> Block:
    """A second payment in the last transaction that pays to a vault: its address and topic are in the true bloom."""

    def funds(log: Log) -> bool:
        return is_watched(log, watched) and log.topics[0] == ETHER_FUNDED_TOPIC

    paid = [transaction for transaction in block.transactions if any(map(funds, transaction.logs))]
    if not paid:
        return block
    invented = replace(next(filter(funds, reversed(paid[-1].logs))), data=(7 * 10**18).to_bytes(32))

    def edited(transaction: Transaction) -> Transaction:
        return replace(transaction, logs=(*transaction.logs, invented)) if transaction is paid[-1] else transaction

    return replace(block, transactions=tuple(map(edited, block.transactions)))


def _undecodable(block: Block, watched: Collection[bytes]) -> Block:
    return _with_logs(block, lambda logs: [replace(log, data=b"") if is_watched(log, watched) else log for log in logs])


def _truncated(block: Block, _: Collection[bytes]) -> Block:
    left = sum(len(transaction.logs) for transaction in block.transactions) // 2
    kept = []
    for transaction in block.transactions:
        kept.append(replace(transaction, logs=transaction.logs[:left]))
        left = max(left - len(transaction.logs), 0)
    return replace(block, transactions=tuple(kept))


def _with_false_header(block: Block, _: Collection[bytes]) -> Block:
    """Times still rise with the number, and every link holds."""
    header = replace(block.header, timestamp_s=block.timestamp_s + 3, state_root=keccak(block.header.state_root))
    return replace(block, header=header)


def _forged(block: Block, watched: Collection[bytes]) -> Block:
    """Blocks without a watched log stay as they are, so the next one names the true hash as its parent."""
    if not any(is_watched(placed.log, watched) for placed in own_logs(block)):
        return block
    altered = _altered(block, watched)
    transactions = altered.transactions
    bits = bloom_of(value for placed in own_logs(altered) for value in (placed.log.address, *placed.log.topics))
    if block.filler_logs:
        bits |= filler_bloom(block.filler_seed, block.number, block.filler_logs)
    root = receipts_root(transactions, block.filler_logs, block.filler_seed, block.number)
    header = replace(block.header, receipts_root=root, logs_bloom=bits.to_bytes(256))
    return replace(altered, header=header, hash=header.hash())


def _renamed(block: Block, _: Collection[bytes]) -> Block:
    def other(transaction: Transaction) -> Transaction:
        envelope = replace(transaction.envelope, nonce=transaction.envelope.nonce + 10**6)
        return replace(transaction, envelope=envelope, hash=envelope.hash())

    return replace(block, transactions=tuple(map(other, block.transactions)))


_EDITS: dict[Lie, Edit] = {
    Lie.HIDE: _hidden,
    Lie.ZERO_BLOOM: _without_bloom,
    Lie.ALTER: _altered,
    Lie.INVENT: _with_invented,
    Lie.UNDECODABLE: _undecodable,
    Lie.TRUNCATED: _truncated,
    Lie.FALSE_HEADER: _with_false_header,
    Lie.FORGED_BLOCK: _forged,
    Lie.RENAMED: _renamed,
}
