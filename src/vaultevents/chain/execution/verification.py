"""What must hold between headers and logs before they are used (rule C2). Pure; raises `NodeFault`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_

from vaultevents.core.errors import NodeFault
from vaultevents.core.logs import Header, bloom_mask
from vaultevents.core.units import Address, Hash32, hex_text

Pair = tuple[Hash32, Address]
"""A topic and the address that emits it."""


def check_links(node: str, headers: Sequence[Header], *, strict_times: bool) -> None:
    """Check that neighbours are linked by the parent's hash and that times rise; `headers` are in order.

    `strict_times`: two blocks never have the same time. That holds since the merge; a development chain may mine
    several blocks in one second.
    """
    for before, after in pairwise(headers):
        if after.number == before.number + 1:
            check_parent(node, after, before.hash)
        check_times(node, before, after, strict_times=strict_times)


def check_times(node: str, before: Header, after: Header, *, strict_times: bool) -> None:
    """Check that the time of a later block is later, or with `strict_times` off not earlier."""
    if after.timestamp_s < before.timestamp_s + strict_times:
        raise NodeFault(node, f"the time of block {after.number} is not after that of block {before.number}")


def check_parent(node: str, header: Header, parent: Hash32) -> None:
    """Check that the header names `parent` as the block before it."""
    if header.parent_hash != parent:
        raise NodeFault(node, f"block {header.number} is not linked to block {header.number - 1} ({hex_text(parent)})")


def check_deposits(node: str, indices: Sequence[int]) -> None:
    """Check that deposits have consecutive indices: the deposit contract counts all of them without gaps."""
    for before, after in pairwise(indices):
        if after != before + 1:
            raise NodeFault(node, f"its deposits have a gap or are out of order: deposit {after} follows {before}")


class BloomMatcher:
    """Tests blooms for watched pairs, so arranged that a bloom with few bits is compared with few of them."""

    __slots__ = ("_topics",)

    def __init__(self, pairs: Iterable[Pair]) -> None:
        topics: dict[Hash32, dict[int, list[int]]] = {}
        for topic, address in pairs:
            mask = bloom_mask(address)
            topics.setdefault(topic, {}).setdefault(mask & -mask, []).append(mask)
        self._topics = [(bloom_mask(topic), _all_of(by_bit), by_bit) for topic, by_bit in topics.items()]

    def may_hold(self, bloom: bytes) -> bool:
        """Test whether a block may have a log of one of the pairs; False proves that it has none."""
        have = int.from_bytes(bloom)
        for topic, first_bits, by_bit in self._topics:
            if topic & have != topic:
                continue
            rest = have & first_bits
            while rest:
                bit = rest & -rest
                rest ^= bit
                if any(mask & have == mask for mask in by_bit[bit]):
                    return True
        return False


def _all_of(bits: Iterable[int]) -> int:
    return reduce(or_, bits, 0)
