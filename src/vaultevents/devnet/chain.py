"""A seeded chain with real header hashes, real links and real blooms, and positions of finality that a test scripts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from vaultevents.devnet.blocks import (
    DEFAULT_CHAIN_ID,
    GAS_PER_TRANSACTION,
    Block,
    Log,
    Payout,
    PlacedLog,
    Transaction,
    Withdrawal,
    filler_bloom,
    filler_envelope,
    filler_hash,
    own_logs,
    receipts_root,
    transactions_root,
    withdrawals_root,
)
from vaultevents.devnet.envelopes import DYNAMIC_FEE, Envelope
from vaultevents.devnet.hardforks import HARD_FORKS, HardFork, later_fields
from vaultevents.devnet.header import EMPTY_BLOOM, Header, bloom_of


@dataclass(frozen=True, slots=True)
class Lag:
    """A position this many blocks behind the head (genesis while the chain is shorter)."""

    blocks: int


@dataclass(frozen=True, slots=True)
class At:
    """A position that stays where it is: finality has stalled, or was set back by hand."""

    number: int


class Absent(Enum):
    """A position that the node cannot give: it answers null, or does not know the tag."""

    NULL = "null"
    UNKNOWN = "unknown"


Position = Lag | At | Absent


class Chain:
    """The canonical chain and every block that was ever on it.

    `on_block` holds what is called after each new block, those of a reorg included.
    `safe` and `finalized` are settable at any time. `filler_logs` is the number of foreign logs that each block mined
    from now on carries (`FULL_BLOCK_LOGS` fills its bloom); they cost memory only while somebody reads them.
    `blocks_per_timestamp` consecutive blocks have the same time, as those of anvil `--block-time 1` under load.
    Transactions that are made from now on have the type `transaction_kind` and, in their receipts, `receipt_fields`.
    """

    def __init__(
        self,
        seed: int,
        *,
        chain_id: int = DEFAULT_CHAIN_ID,
        genesis_time_s: int = 1_767_225_600,
        seconds_per_slot: int = 12,
    ) -> None:
        self.seed = seed
        self.chain_id = chain_id
        self.seconds_per_slot = seconds_per_slot
        self.safe: Position = Lag(1)
        self.finalized: Position = Lag(2)
        self.filler_logs = 0
        self.blocks_per_timestamp = 1
        self.transaction_kind = DYNAMIC_FEE
        self.receipt_fields: tuple[tuple[str, int], ...] = ()
        self.on_block: list[Callable[[], None]] = []
        self._rng = Random(f"{seed}/chain")  # noqa: S311 (a simulation must repeat)
        self._made = 0
        self._blocks: list[Block] = []
        self._by_hash: dict[bytes, Block] = {}
        self._transactions: dict[bytes, tuple[Block, int]] = {}
        self._created: dict[bytes, int] = {}
        self._full: list[int] = []
        self._filler_numbers: dict[bytes, int] = {}
        self._forks: dict[HardFork, int] = {}
        self._logs = _LogIndex()
        self._append((), slot=0, timestamp_s=genesis_time_s)

    @property
    def head(self) -> Block:
        return self._blocks[-1]

    @property
    def finalized_number(self) -> int | None:
        """The finalized block's number; None while the node cannot give one."""
        number = resolve(self.finalized, self.head.number)
        return number if isinstance(number, int) else None

    def freeze_finality(self) -> None:
        """Keep `finalized` where it is while blocks go on; without a finalized block nothing changes."""
        number = self.finalized_number
        if number is not None:
            self.finalized = At(number)

    def block(self, number: int) -> Block | None:
        """The canonical block at a height."""
        return self._blocks[number] if 0 <= number < len(self._blocks) else None

    def blocks(self, first: int, last: int) -> list[Block]:
        """The canonical blocks of `first`..`last`, as far as there are any."""
        return self._blocks[max(first, 0) : last + 1]

    def last_block_at(self, slot: int) -> Block:
        """The canonical block of a slot (0 or later), or where nobody proposed in it the last one before."""
        return self._blocks[bisect_right(self._blocks, slot, key=lambda block: block.slot) - 1]

    def block_by_hash(self, block_hash: bytes) -> Block | None:
        """A block by hash, also one that a reorg has removed from the canonical chain."""
        return self._by_hash.get(block_hash)

    def transaction(
        self, logs: Iterable[Log], creates: Iterable[bytes] = (), *, nonce: int | None = None
    ) -> Transaction:
        """A new transaction; its hash is a function of the seed and of how many were made before, or of `nonce`."""
        if nonce is None:
            self._made += 1
            nonce = self._made
        contracts = tuple(creates)
        envelope = Envelope(self.transaction_kind, self.chain_id, self.seed, nonce, bool(contracts))
        return Transaction(envelope, envelope.hash(), tuple(logs), contracts, self.receipt_fields)

    def included(self, tx_hash: bytes) -> tuple[Block, int] | None:
        """The canonical block of a transaction and the transaction's index in it."""
        number = self._filler_numbers.get(tx_hash)
        if number is None:
            return self._transactions.get(tx_hash)
        block = self.block(number)
        return (block, len(block.transactions)) if block is not None and block.filler_logs else None

    def has_code(self, address: bytes, number: int) -> bool:
        """Whether the contract exists after block `number`."""
        created = self._created.get(address)
        return created is not None and created <= number

    def logs(self, first: int, last: int, topic0s: Sequence[bytes] | None = None) -> list[PlacedLog]:
        """Canonical logs of blocks `first`..`last` in chain order, without filler; `topic0s` None means any."""
        return self._logs.between(first, last, topic0s)

    def full_blocks(self, first: int, last: int) -> list[Block]:
        """The canonical blocks of `first`..`last` that carry filler logs."""
        numbers = self._full[bisect_left(self._full, first) : bisect_right(self._full, last)]
        return [self._blocks[number] for number in numbers]

    def schedule_fork(self, fork: HardFork, at_block: int) -> None:
        """Let the headers from block `at_block` on have the fields of `fork`; a later fork has those of earlier ones.

        Raises ValueError for a fork that is not known, and for a block that exists already.
        """
        if fork not in HARD_FORKS:
            raise ValueError(f"{fork} is not a fork: choose one of {', '.join(HARD_FORKS)}")
        if at_block <= self.head.number:
            raise ValueError(f"block {at_block} exists already: the head is block {self.head.number}")
        self._forks[fork] = at_block

    def mine(
        self,
        transactions: Iterable[Transaction] = (),
        *,
        missed_slots: int = 0,
        payouts: Iterable[Payout] = (),
    ) -> Block:
        """Append a block, one slot after its parent plus the slots in which nobody proposed.

        `payouts` become its withdrawals, under the next indices of this chain.

        Raises ValueError for a transaction that is on the canonical chain already.
        """
        slots = 1 + missed_slots
        timestamp_s = self.head.timestamp_s + slots * self.seconds_per_slot
        return self._append(tuple(transactions), self.head.slot + slots, timestamp_s, payouts)

    def reorg(self, depth: int, replacement: Iterable[Iterable[Transaction]]) -> list[Block]:
        """Drop the last `depth` blocks, mine one block for each item of `replacement`, and return these.

        Raises ValueError when that would drop a finalized block or the genesis block.
        """
        floor = self.finalized_number or 0
        if not 0 < depth <= self.head.number - floor:
            raise ValueError(f"a reorg of depth {depth} would drop block {floor}, which is final")
        for block in self._blocks[-depth:]:
            for transaction in block.transactions:
                del self._transactions[transaction.hash]
                for address in transaction.creates:
                    del self._created[address]
        del self._blocks[-depth:]
        self._logs.truncate(self.head.number)
        del self._full[bisect_right(self._full, self.head.number) :]
        return [self.mine(transactions) for transactions in replacement]

    def fork(self, number: int, seed: int) -> Chain:
        """Another chain with the same blocks up to `number`; from there on, with another `seed`, it is its own."""
        other = Chain(seed, chain_id=self.chain_id, seconds_per_slot=self.seconds_per_slot)
        other.safe, other.finalized, other.filler_logs = self.safe, self.finalized, self.filler_logs
        other.blocks_per_timestamp, other._forks = self.blocks_per_timestamp, dict(self._forks)
        other.transaction_kind, other.receipt_fields = self.transaction_kind, self.receipt_fields
        other._blocks, other._by_hash = [], {}
        for block in self._blocks[: number + 1]:
            other._include(block)
        return other

    def _append(
        self, transactions: tuple[Transaction, ...], slot: int, timestamp_s: int, payouts: Iterable[Payout] = ()
    ) -> Block:
        if any(transaction.hash in self._transactions for transaction in transactions):
            raise ValueError("a transaction can be on the chain only once")
        number, filler_logs = len(self._blocks), self.filler_logs
        if number % self.blocks_per_timestamp:
            timestamp_s = self.head.timestamp_s
        bits = bloom_of(v for t in transactions for log in t.logs for v in (log.address, *log.topics))
        if filler_logs:
            bits |= filler_bloom(self.seed, number, filler_logs)
        envelopes = [transaction.envelope for transaction in transactions]
        if filler_logs:
            envelopes.append(filler_envelope(self.seed, number))
        next_withdrawal = self.head.next_withdrawal if number else 0
        withdrawals = tuple(Withdrawal(index, *one) for index, one in enumerate(payouts, next_withdrawal))
        header = Header(
            parent_hash=self.head.hash if number else bytes(32),
            state_root=self._rng.randbytes(32),
            transactions_root=transactions_root(envelopes),
            receipts_root=receipts_root(transactions, filler_logs, self.seed, number),
            logs_bloom=bits.to_bytes(256) if bits else EMPTY_BLOOM,
            number=number,
            gas_used=GAS_PER_TRANSACTION * (len(transactions) + bool(filler_logs)),
            timestamp_s=timestamp_s,
            prev_randao=self._rng.randbytes(32),
            parent_beacon_block_root=self._rng.randbytes(32),
            withdrawals_root=withdrawals_root(withdrawals),
            later_fields=later_fields(self._fork_of(number), self.seed, number, slot),
        )
        next_withdrawal += len(withdrawals)
        block = Block(header, header.hash(), slot, transactions, filler_logs, self.seed, withdrawals, next_withdrawal)
        self._include(block)
        for notify in self.on_block:
            notify()
        return block

    def _fork_of(self, number: int) -> HardFork | None:
        """The newest scheduled fork that block `number` belongs to."""
        reached = [fork for fork in HARD_FORKS if self._forks.get(fork, number + 1) <= number]
        return reached[-1] if reached else None

    def _include(self, block: Block) -> None:
        self._blocks.append(block)
        self._by_hash[block.hash] = block
        if block.filler_logs:
            self._full.append(block.number)
            self._filler_numbers[filler_hash(block.filler_seed, block.number)] = block.number
        for index, transaction in enumerate(block.transactions):
            self._transactions[transaction.hash] = (block, index)
            for address in transaction.creates:
                self._created[address] = block.number
        self._logs.extend(own_logs(block))


def resolve(position: Position, head: int) -> int | Absent:
    """The block number of a position for a node whose head is block `head`."""
    match position:
        case Lag(blocks):
            return max(head - blocks, 0)
        case At(number):
            return min(number, head)
        case absent:
            return absent


class _LogIndex:
    """Logs in chain order, all of them and by first topic, each list beside one of its block numbers to bisect in."""

    def __init__(self) -> None:
        self._lists: dict[bytes | None, tuple[list[int], list[PlacedLog]]] = defaultdict(lambda: ([], []))

    def extend(self, placed: Iterable[PlacedLog]) -> None:
        for entry in placed:
            for key in (None, entry.log.topics[0]) if entry.log.topics else (None,):
                numbers, logs = self._lists[key]
                numbers.append(entry.block.number)
                logs.append(entry)

    def truncate(self, last: int) -> None:
        for numbers, logs in self._lists.values():
            keep = bisect_right(numbers, last)
            del numbers[keep:], logs[keep:]

    def between(self, first: int, last: int, topic0s: Sequence[bytes] | None) -> list[PlacedLog]:
        keys: set[bytes | None] = {None} if topic0s is None else set(topic0s)
        found: list[PlacedLog] = []
        for key in keys & self._lists.keys():
            numbers, logs = self._lists[key]
            found += logs[bisect_left(numbers, first) : bisect_right(numbers, last)]
        return found if len(keys) == 1 else sorted(found, key=lambda one: (one.block.number, one.log_index))
