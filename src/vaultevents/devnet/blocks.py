"""The nouns of the devnet chain: logs, transactions, withdrawals and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple

import rlp

from vaultevents.devnet.header import Header, bloom_of, minimal
from vaultevents.devnet.trie import ordered_root

FULL_BLOCK_LOGS = 440
"""Foreign logs that set more than 90 % of a bloom's bits, as a full mainnet block does (go-ethereum#25336)."""

GAS_PER_TRANSACTION = 90_000
DYNAMIC_FEE = 2
"""The type of an ordinary transaction (EIP-1559)."""

_PATTERNS = 8


@dataclass(frozen=True, slots=True)
class Log:
    """What a contract emits: `address` has 20 bytes, each topic 32."""

    address: bytes
    topics: tuple[bytes, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction, its logs, and the addresses of the contracts that it creates.

    The hash does not depend on the block, so the same transaction may be included again after a reorg.
    `kind` is its type byte (EIP-2718). `receipt_fields` follow the known fields of its receipt, in RLP and in JSON, as
    `depositNonce` does in receipts of type 0x7e on the OP Stack.
    """

    hash: bytes
    logs: tuple[Log, ...] = ()
    creates: tuple[bytes, ...] = ()
    kind: int = DYNAMIC_FEE
    receipt_fields: tuple[tuple[str, int], ...] = ()


class Payout(NamedTuple):
    """What the consensus layer wants to pay: a withdrawal that has no place on the chain yet."""

    validator_index: int
    address: bytes
    amount_gwei: int


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """One entry of a block's `withdrawals` (EIP-4895); `index` counts all withdrawals of the chain, from 0."""

    index: int
    validator_index: int
    address: bytes
    amount_gwei: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block; `filler_logs` counts the foreign logs after those of `transactions`, which are made when asked for.

    `next_withdrawal` is the index of the first withdrawal after this block.
    """

    header: Header
    hash: bytes
    slot: int
    transactions: tuple[Transaction, ...]
    filler_logs: int
    filler_seed: int
    withdrawals: tuple[Withdrawal, ...] = ()
    next_withdrawal: int = 0

    @property
    def number(self) -> int:
        return self.header.number

    @property
    def timestamp_s(self) -> int:
        return self.header.timestamp_s

    @property
    def transaction_hashes(self) -> list[bytes]:
        """All transactions in order; the filler logs belong to one more, the last."""
        hashes = [transaction.hash for transaction in self.transactions]
        return [*hashes, filler_hash(self.filler_seed, self.number)] if self.filler_logs else hashes


@dataclass(frozen=True, slots=True, eq=False)
class PlacedLog:
    """A log with its place on the chain."""

    block: Block
    tx_hash: bytes
    tx_index: int
    log_index: int
    log: Log


def withdrawals_root(withdrawals: tuple[Withdrawal, ...]) -> bytes:
    """The header's commitment to a block's withdrawals (EIP-4895)."""
    return ordered_root([_rlp(one) for one in withdrawals])


def receipts_root(transactions: tuple[Transaction, ...], filler_logs: int, filler_seed: int, number: int) -> bytes:
    """Return the header's commitment to the receipts of a block, all of them successful (EIP-658, EIP-2718)."""
    receipts = [_receipt(at, transaction) for at, transaction in enumerate(transactions)]
    if filler_logs:
        receipts.append(_filler_receipt(len(transactions), filler_seed, number % _PATTERNS, filler_logs))
    return ordered_root(receipts)


def _receipt(index: int, transaction: Transaction) -> bytes:
    bloom = bloom_of(value for log in transaction.logs for value in (log.address, *log.topics)).to_bytes(256)
    known = (b"\x01", minimal(GAS_PER_TRANSACTION * (index + 1)), bloom)
    logs = _rlp_list(b"".join(map(_encoded_log, transaction.logs)))
    later = (minimal(value) for _, value in transaction.receipt_fields)
    payload = b"".join([*map(rlp.encode, known), logs, *map(rlp.encode, later)])
    return bytes([transaction.kind]) + _rlp_list(payload)


@lru_cache(maxsize=4096)
def _encoded_log(log: Log) -> bytes:
    """Cached, because a contract may emit the same log many thousand times in one block."""
    return bytes(rlp.encode([log.address, list(log.topics), log.data]))


def _rlp_list(payload: bytes) -> bytes:
    """Put the header of an RLP list before its encoded items (Yellow Paper, appendix B)."""
    size = minimal(len(payload))
    return (bytes([0xC0 + len(payload)]) if len(payload) < 56 else bytes([0xF7 + len(size)]) + size) + payload


@lru_cache(maxsize=256)
def _filler_receipt(index: int, seed: int, pattern: int, count: int) -> bytes:
    return _receipt(index, Transaction(b"", _pattern(seed, pattern, count)))


def _rlp(one: Withdrawal) -> bytes:
    return bytes(rlp.encode([minimal(one.index), minimal(one.validator_index), one.address, minimal(one.amount_gwei)]))


def own_logs(block: Block) -> list[PlacedLog]:
    """The logs of the block's transactions without the filler."""
    placed: list[PlacedLog] = []
    for tx_index, transaction in enumerate(block.transactions):
        for log in transaction.logs:
            placed.append(PlacedLog(block, transaction.hash, tx_index, len(placed), log))
    return placed


def filler(block: Block) -> list[PlacedLog]:
    """The block's foreign logs: the same for each call, and like those of every eighth block but for their place."""
    if not block.filler_logs:
        return []
    first = sum(len(transaction.logs) for transaction in block.transactions)
    tx_hash, tx_index = filler_hash(block.filler_seed, block.number), len(block.transactions)
    logs = filler_pattern(block.filler_seed, block.number, block.filler_logs)
    return [PlacedLog(block, tx_hash, tx_index, first + at, log) for at, log in enumerate(logs)]


def filler_key(block: Block) -> tuple[int, int]:
    """Blocks of one chain with the same key have the same filler logs."""
    return block.number % _PATTERNS, block.filler_logs


def filler_pattern(seed: int, number: int, count: int) -> tuple[Log, ...]:
    """`count` logs of random contracts with random topics: one of eight patterns, chosen by the block number."""
    return _pattern(seed, number % _PATTERNS, count)


def filler_bloom(seed: int, number: int, count: int) -> int:
    """The bloom bits of `filler_pattern`."""
    return _pattern_bloom(seed, number % _PATTERNS, count)


@lru_cache(maxsize=64)
def _pattern(seed: int, index: int, count: int) -> tuple[Log, ...]:
    rng = Random(f"{seed}/filler/{index}")  # noqa: S311 (a simulation must repeat)
    return tuple(
        Log(rng.randbytes(20), tuple(rng.randbytes(32) for _ in range(3)), rng.randbytes(32)) for _ in range(count)
    )


@lru_cache(maxsize=64)
def _pattern_bloom(seed: int, index: int, count: int) -> int:
    return bloom_of(value for log in _pattern(seed, index, count) for value in (log.address, *log.topics))


def filler_hash(seed: int, number: int) -> bytes:
    """The filler transaction of a block: made of the number, so that its receipt is found without an index."""
    return b"\xf1" + (seed & (2**64 - 1)).to_bytes(23) + number.to_bytes(8)


def filler_block_number(seed: int, tx_hash: bytes) -> int | None:
    """The number in a filler transaction's hash, or None for any other hash."""
    number = int.from_bytes(tx_hash[-8:])
    return number if tx_hash == filler_hash(seed, number) else None
