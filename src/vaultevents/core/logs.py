"""Contract logs: topics, blooms, and the fold from raw logs to observations (rules C2, C8 and E3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from vaultevents.core.deposits import DEPOSIT_EVENT, decode_deposit
from vaultevents.core.events import FundingReceived, Observation, WithdrawalClaimed
from vaultevents.core.keccak import keccak
from vaultevents.core.registry import Owner, Registry, Role, Watched
from vaultevents.core.units import Address, Hash32, Wei, hex_text
from vaultevents.core.validators import vault_of

ETHER_FUNDED = Hash32(keccak(b"EtherFunded(uint256)"))
WITHDRAWAL_CLAIMED = Hash32(keccak(b"WithdrawalClaimed(uint256,address,address,uint256)"))
REPORT_UPDATED = Hash32(keccak(b"VaultsReportDataUpdated(uint256,uint256,bytes32,string)"))
TOPICS = (ETHER_FUNDED, WITHDRAWAL_CLAIMED)
"""What the `logs` stream asks for, in one query (rule C10)."""


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
    transactions_root: Hash32
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


@dataclass(frozen=True, slots=True)
class UndecodableLog:
    """A log of a watched address of which no event can be made, and why, in one sentence."""

    log: Log
    reason: str


@dataclass(frozen=True, slots=True)
class Folded:
    """The observations of a span, and the logs that are withheld from them, both in chain order."""

    observations: list[Observation]
    undecodable: list[UndecodableLog]


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


def topics_of(watched: Watched) -> tuple[Hash32, ...]:
    """The topics to ask for: always both of the accounts' contracts, as a transaction may hold either (rule C10)."""
    contracts = TOPICS if watched.vaults or watched.queues else ()
    reports = (REPORT_UPDATED,) if watched.oracles else ()
    deposits = (DEPOSIT_EVENT,) if watched.depositees else ()
    return contracts + reports + deposits


def pairs_of(watched: Watched) -> list[tuple[Hash32, Address]]:
    """Each watched address with the topic that matters there."""
    return [
        *((ETHER_FUNDED, vault) for vault in watched.vaults),
        *((WITHDRAWAL_CLAIMED, queue) for queue in watched.queues),
        *((REPORT_UPDATED, oracle) for oracle in watched.oracles),
        *((DEPOSIT_EVENT, contract) for contract in watched.deposit_contracts),
    ]


def is_watched(log: Log, watched: Watched) -> bool:
    """Whether this log is one of the known events at an address that is watched in that role (rules C7 and C10)."""
    topic = log.topics[0] if log.topics else b""
    return (
        (topic == ETHER_FUNDED and log.address in watched.vaults)
        or (topic == WITHDRAWAL_CLAIMED and log.address in watched.queues)
        or (topic == REPORT_UPDATED and log.address in watched.oracles)
        or (topic == DEPOSIT_EVENT and log.address in watched.deposit_contracts and names_depositee(log.data, watched))
    )


def names_depositee(data: bytes, watched: Watched) -> bool:
    """Whether the data of a deposit names credentials that pay one of the vaults whose deposits are looked for."""
    deposit = decode_deposit(data)
    return deposit is not None and vault_of(deposit.credentials) in watched.depositees


def owners_of(topic: Hash32, address: Address, block: int, registry: Registry) -> list[Owner]:
    """Return each vault to which a log with this first topic belongs; a log of an oracle concerns all of them."""
    if topic == REPORT_UPDATED:
        return registry.registered_at(block)
    role = Role.VAULT if topic == ETHER_FUNDED else Role.QUEUE
    return registry.owners(role, address, block, 0)


def owned(undecodable: Iterable[UndecodableLog], registry: Registry) -> list[UndecodableLog]:
    """Keep the logs that belong to a vault at their block: the same for any span that was read (rule E12)."""
    return [
        entry
        for entry in undecodable
        if owners_of(entry.log.topics[0], entry.log.address, entry.log.block_number, registry)
    ]


def fold(logs: Iterable[Log], times_s: Mapping[int, int], watched: Watched) -> Folded:
    """Derive the observations of a whole span, in chain order.

    `logs` are all logs of the two topics in the span, by any emitter: the position of a funded vault counts
    every distinct emitter of its transaction, decodable or not (rule E3). `times_s` maps the blocks of watched logs to
    their times. A watched log of another form is withheld (rule C8). So are all of a vault's in a transaction where one
    is: a partial sum would be another event than the one that the whole transaction gives later.
    """
    emitters: dict[Hash32, dict[Address, int]] = {}
    funded: dict[tuple[Hash32, Address], list[Log]] = {}
    placed: list[tuple[int, int, Observation]] = []
    undecodable: list[UndecodableLog] = []
    for log in sorted(logs, key=lambda log: (log.block_number, log.log_index)):
        if log.topics[0] == ETHER_FUNDED:
            order = emitters.setdefault(log.tx_hash, {})
            order.setdefault(log.address, len(order) + 1)
        if not is_watched(log, watched):
            continue
        if log.topics[0] == ETHER_FUNDED:
            funded.setdefault((log.tx_hash, log.address), []).append(log)
        elif (problem := _problem(log)) is not None:
            undecodable.append(UndecodableLog(log, problem))
        else:
            placed.append((log.block_number, log.log_index, _observation(log, times_s, _claim(log))))
    for (tx_hash, vault), parts in funded.items():
        if withheld := _withheld(parts):
            undecodable += withheld
            continue
        amount = Wei(sum(_amount_wei(part) for part in parts))
        payload = FundingReceived(tx_hash, amount, vault, emitters[tx_hash][vault])
        first = parts[0]
        placed.append((first.block_number, first.log_index, _observation(first, times_s, payload)))
    return Folded(
        [observation for *_, observation in sorted(placed, key=lambda place: place[:2])],
        sorted(undecodable, key=lambda entry: (entry.log.block_number, entry.log.log_index)),
    )


def _observation(log: Log, times_s: Mapping[int, int], payload: FundingReceived | WithdrawalClaimed) -> Observation:
    return Observation(log.address, log.block_number, times_s[log.block_number] * 1000, payload)


def _withheld(parts: list[Log]) -> list[UndecodableLog]:
    """All logs of one vault in one transaction when one of them cannot be decoded, else none."""
    problems = [_problem(part) for part in parts]
    if not any(problems):
        return []
    odd = next(part.log_index for part, problem in zip(parts, problems, strict=True) if problem)
    return [
        UndecodableLog(part, problem or f"log {odd} of the same vault in the same transaction cannot be decoded")
        for part, problem in zip(parts, problems, strict=True)
    ]


def _problem(log: Log) -> str | None:
    """Say why a log of one of the two topics does not have the known form; None where it has."""
    expected = 1 if log.topics[0] == ETHER_FUNDED else 4
    if len(log.topics) != expected or len(log.data) != 32:
        return f"it has {len(log.topics)} topics and {len(log.data)} bytes of data, not {expected} and 32"
    for topic in log.topics[2:]:
        if any(topic[:12]):
            return f"it has {hex_text(topic)} where an address belongs"
    return None


def _claim(log: Log) -> WithdrawalClaimed:
    _, request_id, owner, recipient = log.topics
    return WithdrawalClaimed(
        tx_hash=log.tx_hash,
        request_id=int.from_bytes(request_id),
        recipient=Address(recipient[12:]),
        owner=Address(owner[12:]),
        amount_wei=_amount_wei(log),
        queue=log.address,
    )


def _amount_wei(log: Log) -> Wei:
    return Wei(int.from_bytes(log.data))
