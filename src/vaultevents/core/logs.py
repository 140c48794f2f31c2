"""Contract logs: topics, blooms, and the fold from raw logs to observations (decisions C2, C8, E3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from eth_hash.auto import keccak

from vaultevents.core.errors import UndecodableLog
from vaultevents.core.events import FundingReceived, Observation, WithdrawalClaimed
from vaultevents.core.registry import Watched
from vaultevents.core.units import Address, Hash32, Wei, checksum, hex_text

ETHER_FUNDED = Hash32(keccak(b"EtherFunded(uint256)"))
WITHDRAWAL_CLAIMED = Hash32(keccak(b"WithdrawalClaimed(uint256,address,address,uint256)"))
REPORT_UPDATED = Hash32(keccak(b"VaultsReportDataUpdated(uint256,uint256,bytes32,string)"))
TOPICS = (ETHER_FUNDED, WITHDRAWAL_CLAIMED)
"""What the `logs` stream asks for, in one query (C10)."""


@dataclass(frozen=True, slots=True)
class Header:
    """What is used of an execution block header; `logs_bloom` has 256 bytes.

    All of it hashes to `hash`, unless the node gave `unknown_fields`: then the header is of a fork that this version
    does not know, and only the agreement of nodes speaks for it.
    """

    number: int
    hash: Hash32
    parent_hash: Hash32
    timestamp_s: int
    logs_bloom: bytes
    receipts_root: Hash32
    unknown_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Log:
    """One log as a node reports it; `timestamp_s` where the node adds `blockTimestamp`."""

    address: Address
    topics: tuple[Hash32, ...]
    data: bytes
    block_number: int
    block_hash: Hash32
    tx_hash: Hash32
    log_index: int
    timestamp_s: int | None = None


@lru_cache(maxsize=16384)
def bloom_mask(value: bytes) -> int:
    """The bits that an address or a topic sets in a bloom of 2048 (Yellow Paper §4.3.1)."""
    digest = keccak(value)
    bits = 0
    for at in (0, 2, 4):
        bits |= 1 << (int.from_bytes(digest[at : at + 2]) & 2047)
    return bits


def bloom_may_hold(bloom: bytes, *values: bytes) -> bool:
    """False proves that no log of the block has all of `values` as address or topics (Yellow Paper §4.3.1)."""
    have = int.from_bytes(bloom)
    for value in values:
        mask = bloom_mask(value)
        if mask & have != mask:
            return False
    return True


def bloom_of(logs: Iterable[Log]) -> bytes:
    """The bloom of a whole block, from all of its logs."""
    bits = 0
    for log in logs:
        for value in (log.address, *log.topics):
            bits |= bloom_mask(value)
    return bits.to_bytes(256)


def topics_of(watched: Watched) -> tuple[Hash32, ...]:
    """The topics to ask for: always both of the contracts of accounts, since one transaction may hold either (C10)."""
    return (TOPICS if watched.vaults or watched.queues else ()) + ((REPORT_UPDATED,) if watched.oracles else ())


def pairs_of(watched: Watched) -> list[tuple[Hash32, Address]]:
    """Each watched address with the topic that matters there."""
    return [
        *((ETHER_FUNDED, vault) for vault in watched.vaults),
        *((WITHDRAWAL_CLAIMED, queue) for queue in watched.queues),
        *((REPORT_UPDATED, oracle) for oracle in watched.oracles),
    ]


def is_watched(log: Log, watched: Watched) -> bool:
    """Whether this log is one of the known events at an address that is watched in that role (C7, C10)."""
    topic = log.topics[0] if log.topics else b""
    return (
        (topic == ETHER_FUNDED and log.address in watched.vaults)
        or (topic == WITHDRAWAL_CLAIMED and log.address in watched.queues)
        or (topic == REPORT_UPDATED and log.address in watched.oracles)
    )


def fold(logs: Iterable[Log], times_s: Mapping[int, int], watched: Watched) -> list[Observation]:
    """The observations of a whole span, in chain order.

    `logs` are all logs of the two topics in the span, whoever emitted them: the position of a funded vault counts
    every distinct emitter of its transaction (E3). `times_s` maps the blocks of watched logs to their times.
    Raises `UndecodableLog` for a watched log of another form (C8).
    """
    emitters: dict[Hash32, dict[Address, int]] = {}
    funded: dict[tuple[Hash32, Address], list[Log]] = {}
    placed: list[tuple[int, int, Observation]] = []
    for log in sorted(logs, key=lambda log: (log.block_number, log.log_index)):
        if log.topics[0] == ETHER_FUNDED:
            order = emitters.setdefault(log.tx_hash, {})
            order.setdefault(log.address, len(order) + 1)
        if not is_watched(log, watched):
            continue
        if log.topics[0] == ETHER_FUNDED:
            funded.setdefault((log.tx_hash, log.address), []).append(log)
        else:
            placed.append((log.block_number, log.log_index, _observation(log, times_s, _claim(log))))
    for (tx_hash, vault), parts in funded.items():
        amount = Wei(sum(_amount_wei(part, topics=1) for part in parts))
        payload = FundingReceived(tx_hash, amount, vault, emitters[tx_hash][vault])
        first = parts[0]
        placed.append((first.block_number, first.log_index, _observation(first, times_s, payload)))
    return [observation for *_, observation in sorted(placed, key=lambda place: place[:2])]


def _observation(log: Log, times_s: Mapping[int, int], payload: FundingReceived | WithdrawalClaimed) -> Observation:
    return Observation(log.address, log.block_number, times_s[log.block_number] * 1000, payload)


def _claim(log: Log) -> WithdrawalClaimed:
    amount = _amount_wei(log, topics=4)
    _, request_id, owner, recipient = log.topics
    return WithdrawalClaimed(
        tx_hash=log.tx_hash,
        request_id=int.from_bytes(request_id),
        recipient=_topic_address(log, recipient),
        owner=_topic_address(log, owner),
        amount_wei=amount,
        queue=log.address,
    )


def _amount_wei(log: Log, topics: int) -> Wei:
    if len(log.topics) != topics or len(log.data) != 32:
        raise _undecodable(log, f"has {len(log.topics)} topics and {len(log.data)} bytes, not {topics} and 32")
    return Wei(int.from_bytes(log.data))


def _topic_address(log: Log, topic: bytes) -> Address:
    if any(topic[:12]):
        raise _undecodable(log, f"has {hex_text(topic)} where an address belongs")
    return Address(topic[12:])


def _undecodable(log: Log, why: str) -> UndecodableLog:
    return UndecodableLog(
        f"the log {log.log_index} of {checksum(log.address)} in transaction {hex_text(log.tx_hash)} "
        f"(block {log.block_number}) {why}: the contract may have been upgraded; nothing was skipped, the stream "
        "'logs' waits here until a version of vaultevents that knows the new form is installed"
    )
