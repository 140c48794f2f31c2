"""The nouns of the devnet chain: logs, transactions, withdrawals and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple

from vaultevents.devnet.encoding import rlp_encode, rlp_list
from vaultevents.devnet.envelopes import DYNAMIC_FEE, Envelope
from vaultevents.devnet.header import Header, bloom_of
from vaultevents.devnet.trie import ordered_root

FULL_BLOCK_LOGS = 440
"""Foreign logs that set more than 90 % of a bloom's bits, as a full mainnet block does (go-ethereum#25336)."""

GAS_PER_TRANSACTION = 90_000
DEFAULT_CHAIN_ID = 1337

_PATTERNS = 8
_FIRST_FILLER_NONCE = 2**31
"""Beyond those of ordinary transactions, so that no two transactions have the same hash."""


@dataclass(frozen=True, slots=True)
class Log:
    """What a contract emits: `address` has 20 bytes, each topic 32."""

    address: bytes
    topics: tuple[bytes, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction, its logs, and the addresses of the contracts that it creates.

    The hash is that of the envelope and does not depend on the block, so the same transaction may be included again
    after a reorg. `receipt_fields` follow the known fields of its receipt, in RLP and in JSON, as `depositNonce` does
    in receipts of type 0x7e on the OP Stack.
    """

    envelope: Envelope
    hash: bytes
    logs: tuple[Log, ...] = ()
    creates: tuple[bytes, ...] = ()
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

    @property
    def envelopes(self) -> list[Envelope]:
        """What is signed of all transactions, in order."""
        envelopes = [transaction.envelope for transaction in self.transactions]
        return [*envelopes, filler_envelope(self.filler_seed, self.number)] if self.filler_logs else envelopes


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
    return ordered_root([_rlp(withdrawal) for withdrawal in withdrawals])


def transactions_root(envelopes: Sequence[Envelope]) -> bytes:
    """Return the header's commitment to a block's transactions, and so to their hashes."""
    return ordered_root([envelope.encoded() for envelope in envelopes])


def receipts_root(transactions: tuple[Transaction, ...], filler_logs: int, filler_seed: int, number: int) -> bytes:
    """Return the header's commitment to the receipts of a block, all of them successful (EIP-658, EIP-2718)."""
    receipts = [
        _receipt(at, transaction.envelope.kind, transaction.logs, transaction.receipt_fields)
        for at, transaction in enumerate(transactions)
    ]
    if filler_logs:
        receipts.append(_filler_receipt(len(transactions), filler_seed, number % _PATTERNS, filler_logs))
    return ordered_root(receipts)


def _receipt(index: int, kind: int, logs: tuple[Log, ...], later_fields: tuple[tuple[str, int], ...] = ()) -> bytes:
    bloom = bloom_of(value for log in logs for value in (log.address, *log.topics)).to_bytes(256)
    known = (rlp_encode(1), rlp_encode(GAS_PER_TRANSACTION * (index + 1)), rlp_encode(bloom))
    later = (rlp_encode(value) for _, value in later_fields)
    receipt = rlp_list([*known, rlp_list([*map(_encoded_log, logs)]), *later])
    return (bytes([kind]) if kind else b"") + receipt


@lru_cache(maxsize=4096)
def _encoded_log(log: Log) -> bytes:
    """Cached, because a contract may emit the same log many thousand times in one block."""
    return rlp_encode([log.address, log.topics, log.data])


@lru_cache(maxsize=256)
def _filler_receipt(index: int, seed: int, pattern: int, count: int) -> bytes:
    return _receipt(index, DYNAMIC_FEE, _pattern(seed, pattern, count))


def _rlp(one: Withdrawal) -> bytes:
    return rlp_encode([one.index, one.validator_index, one.address, one.amount_gwei])


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


@lru_cache(maxsize=4096)
def filler_hash(seed: int, number: int) -> bytes:
    """Return the hash of a block's filler transaction."""
    return filler_envelope(seed, number).hash()


def filler_envelope(seed: int, number: int) -> Envelope:
    """Return the filler transaction of a block, a function of its number."""
    return Envelope(DYNAMIC_FEE, DEFAULT_CHAIN_ID, seed, _FIRST_FILLER_NONCE + number)
