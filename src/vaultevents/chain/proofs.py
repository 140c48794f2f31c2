"""What must hold between headers and logs of one node before they are used (decision C2). Pure; raises `NodeFault`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_

from vaultevents.chain.wire import Sighting
from vaultevents.core.errors import NodeFault
from vaultevents.core.logs import TOPICS, Header, bloom_mask, bloom_may_hold, bloom_of, is_watched, pairs_of
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32, hex_text

Pair = tuple[Hash32, Address]


def by_block(sightings: Iterable[Sighting]) -> dict[int, list[Sighting]]:
    """Logs by block number, each block's in the order of their index."""
    blocks: dict[int, list[Sighting]] = defaultdict(list)
    for sighting in sightings:
        blocks[sighting.log.block_number].append(sighting)
    return {number: sorted(found, key=lambda one: one.log.log_index) for number, found in sorted(blocks.items())}


def check_headers(node: str, headers: Sequence[Header]) -> None:
    """Neighbours are linked by the parent's hash; times rise strictly with the number. `headers` are in order."""
    for before, after in pairwise(headers):
        if after.number == before.number + 1:
            check_parent(node, after, before.hash)
        if after.timestamp_s <= before.timestamp_s:
            raise NodeFault(node, f"the time of block {after.number} is not after that of block {before.number}")


def check_parent(node: str, header: Header, parent: Hash32) -> None:
    """The header names `parent` as the block before it."""
    if header.parent_hash != parent:
        raise NodeFault(node, f"block {header.number} is not linked to block {header.number - 1} ({hex_text(parent)})")


def check_logs(
    node: str,
    sightings: Sequence[Sighting],
    span: Span,
    headers: Mapping[int, Header],
    topics: Collection[Hash32] = TOPICS,
) -> None:
    """Every log was asked for, is in the span, in its block and in the block's bloom, and is there only once.

    The hash is compared with the header where it is known; all logs of one block agree on it in any case.
    """
    hashes: dict[int, Hash32] = {number: header.hash for number, header in headers.items()}
    seen: set[tuple[Hash32, int]] = set()
    for sighting in sightings:
        log = sighting.log
        if not log.topics or log.topics[0] not in topics:
            raise NodeFault(node, f"a log in block {log.block_number} has a topic that was not asked for")
        if log.block_number not in span:
            raise NodeFault(node, f"a log in block {log.block_number} is outside of the blocks {span} that were asked")
        if log.block_hash != hashes.setdefault(log.block_number, log.block_hash):
            raise NodeFault(node, f"a log in block {log.block_number} has another block hash than that block")
        if (log.block_hash, log.log_index) in seen:
            raise NodeFault(node, f"log {log.log_index} of block {log.block_number} is there twice")
        seen.add((log.block_hash, log.log_index))
        header = headers.get(log.block_number)
        if header is not None and not bloom_may_hold(header.logs_bloom, log.address, *log.topics):
            raise NodeFault(node, f"log {log.log_index} of block {log.block_number} is not in that block's bloom")


def check_transactions(node: str, sightings: Iterable[Sighting], tx_hashes: Sequence[str]) -> None:
    """Each log's transaction stands in its block where the log says: the hash becomes part of an event id.

    `tx_hashes` are those of the block as the node writes them.
    """
    for sighting in sightings:
        at, log = sighting.tx_index, sighting.log
        if at >= len(tx_hashes) or tx_hashes[at].lower() != hex_text(log.tx_hash):
            raise NodeFault(node, f"transaction {hex_text(log.tx_hash)} is not number {at} of block {log.block_number}")


def watched_blocks(blocks: Mapping[int, Sequence[Sighting]], watched: Watched) -> list[int]:
    """The blocks that have at least one log of a watched address."""
    return [number for number, found in blocks.items() if any(is_watched(one.log, watched) for one in found)]


class WatchedPairs:
    """Each watched address with its topic, so arranged that a bloom with few bits is compared with few of them."""

    __slots__ = ("_topics",)

    def __init__(self, watched: Watched) -> None:
        topics: dict[Hash32, dict[int, list[tuple[int, Pair]]]] = {}
        for pair in pairs_of(watched):
            mask = bloom_mask(pair[1])
            topics.setdefault(pair[0], {}).setdefault(mask & -mask, []).append((mask, pair))
        self._topics = [(bloom_mask(topic), _all_of(by_bit), by_bit) for topic, by_bit in topics.items()]

    def held_by(self, bloom: bytes) -> list[Pair]:
        """The pairs of which the block may have logs; often by chance (C2)."""
        have = int.from_bytes(bloom)
        held: list[Pair] = []
        for topic, first_bits, by_bit in self._topics:
            if topic & have != topic:
                continue
            rest = have & first_bits
            while rest:
                bit = rest & -rest
                rest ^= bit
                held += [pair for mask, pair in by_bit[bit] if mask & have == mask]
        return held


def _all_of(bits: Iterable[int]) -> int:
    return reduce(or_, bits, 0)


def unanswered(held: Iterable[Pair], found: Iterable[Sighting]) -> bool:
    """Whether the bloom holds a watched pair of which no log came back: a suspicion, often by chance (C2)."""
    answered = {(one.log.topics[0], one.log.address) for one in found}
    return any(pair not in answered for pair in held)


def is_chosen(block_hash: Hash32, share: float) -> bool:
    """Whether a suspicious block belongs to the share of which all logs are asked: a function of its hash alone."""
    return int.from_bytes(block_hash[:8]) < share * 2**64


def difference(found: Sequence[Sighting], again: Iterable[Sighting]) -> str | None:
    """How the logs of one block, asked by its hash, differ from what the range gave; None when they agree."""
    ranged, hashed = ([_content(one) for one in sorted(logs, key=_index)] for logs in (found, again))
    if ranged == hashed:
        return None
    return f"a range gave {len(ranged)} logs, the hash of the block gave {len(hashed)} that differ"


def full_difference(
    header: Header, found: Sequence[Sighting], everything: Sequence[Sighting], topics: Collection[Hash32] = TOPICS
) -> str | None:
    """Why `everything` is not all logs of the block, or has others of our topics than `found`; None when it is."""
    if any(one.log.block_hash != header.hash or one.log.block_number != header.number for one in everything):
        return "among all logs of the block are some of another block"
    if bloom_of(one.log for one in everything) != header.logs_bloom:
        return f"all {len(everything)} logs that it gives for the block do not make up the block's bloom"
    return difference(found, [one for one in everything if one.log.topics and one.log.topics[0] in topics])


def usable_times(ends: Sequence[Header], blocks: Mapping[int, Sequence[Sighting]]) -> dict[int, int]:
    """Block times from `blockTimestamp`, where they may stand for a header (C2); empty when they contradict.

    `ends` are the headers of a range's first and last block. The times of all blocks whose logs agree on one rise
    strictly with the number, between and together with those of the ends.
    """
    given = {number: {one.log.timestamp_s for one in found} for number, found in blocks.items()}
    times = {number: stamps.pop() for number, stamps in given.items() if len(stamps) == 1}
    known = {number: time_s for number, time_s in times.items() if time_s is not None}
    if any(known.get(end.number, end.timestamp_s) != end.timestamp_s for end in ends):
        return {}
    known |= {end.number: end.timestamp_s for end in ends}
    in_order = sorted(known.items())
    rising = all(before[1] < after[1] for before, after in pairwise(in_order))
    inside = in_order[0][0] == ends[0].number and in_order[-1][0] == ends[-1].number
    return known if rising and inside else {}


def _index(one: Sighting) -> int:
    return one.log.log_index


def _content(one: Sighting) -> tuple[object, ...]:
    log = one.log
    return log.log_index, log.address, log.topics, log.data, log.tx_hash, one.tx_index, log.block_hash, log.block_number
