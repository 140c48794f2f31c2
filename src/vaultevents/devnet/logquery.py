"""eth_getLogs: the filter object, and the logs that it selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vaultevents.devnet.blocks import Block, Log, PlacedLog, filler, filler_key, filler_pattern, own_logs
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.rpc import INVALID_PARAMS, RpcError, data

Alternatives = frozenset[bytes] | None
"""The values that a position may have; None means any."""


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The address and topic conditions; `topics` has one entry for each position that is restricted or skipped."""

    addresses: Alternatives
    topics: tuple[Alternatives, ...]

    def matches(self, log: Log) -> bool:
        """Whether the log satisfies every position; a log with fewer topics than positions does not."""
        if self.addresses is not None and log.address not in self.addresses:
            return False
        return len(log.topics) >= len(self.topics) and all(
            wanted is None or topic in wanted for wanted, topic in zip(self.topics, log.topics, strict=False)
        )

    @property
    def topic0s(self) -> list[bytes] | None:
        first = self.topics[0] if self.topics else None
        return None if first is None else sorted(first)


def parse_filter(query: dict[str, Any]) -> LogFilter:
    """The conditions of an eth_getLogs filter object. Raises `RpcError`."""
    topics = query.get("topics") or []
    if not isinstance(topics, list) or len(topics) > 4:
        raise RpcError(INVALID_PARAMS, "invalid argument: topics must be a list of at most 4 positions")
    return LogFilter(
        _alternatives(query.get("address"), 20, "address"),
        tuple(_alternatives(topic, 32, "topic") for topic in topics),
    )


def _alternatives(value: object, size: int, what: str) -> Alternatives:
    values = value if isinstance(value, list) else [value]
    return None if None in values or not values else frozenset(data(value, size, what) for value in values)


def logs_of_block(block: Block, wanted: LogFilter) -> list[PlacedLog]:
    """The matching logs of one block, canonical or not."""
    return [entry for entry in [*own_logs(block), *filler_matches(block, wanted)] if wanted.matches(entry.log)]


def logs_of_range(chain: Chain, first: int, last: int, wanted: LogFilter) -> list[PlacedLog]:
    """The matching canonical logs of blocks `first`..`last` in chain order."""
    found = [entry for entry in chain.logs(first, last, wanted.topic0s) if wanted.matches(entry.log)]
    foreign = _filler_of_range(chain, first, last, wanted)
    return sorted([*found, *foreign], key=lambda one: (one.block.number, one.log_index)) if foreign else found


def filler_matches(block: Block, wanted: LogFilter) -> list[PlacedLog]:
    """The block's matching filler logs; they are made only when its pattern has one that matches."""
    return [entry for entry in filler(block) if wanted.matches(entry.log)] if _filler_hit(block, wanted) else []


def _filler_hit(block: Block, wanted: LogFilter) -> bool:
    pattern = filler_pattern(block.filler_seed, block.number, block.filler_logs)
    return any(wanted.matches(log) for log in pattern)


def _filler_of_range(chain: Chain, first: int, last: int, wanted: LogFilter) -> list[PlacedLog]:
    hits: dict[tuple[int, int], bool] = {}
    found: list[PlacedLog] = []
    for block in chain.full_blocks(first, last):
        pattern = filler_key(block)
        if pattern not in hits:
            hits[pattern] = _filler_hit(block, wanted)
        if hits[pattern]:
            found += filler_matches(block, wanted)
    return found
