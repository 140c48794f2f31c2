"""The newest final blocks that were read, so that several streams and the audit ask for each of them once.

A block is found by its hash, which all of its header hashes to, or by its number where it links to its neighbours. So
it is what a node would have to answer, and nothing is proven less than by asking again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vaultevents.core.logs import Header
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32

MOST = 512


@dataclass(frozen=True, slots=True)
class RecentBlock:
    """A block: its header, and the JSON that a node gave of it."""

    header: Header
    content: bytes


class RecentBlocks:
    """At most `most` final blocks by number; a later one at the same height replaces an earlier one."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._blocks: dict[int, RecentBlock] = {}

    def add(self, blocks: Sequence[RecentBlock]) -> None:
        """Keep blocks whose headers are authentic."""
        self._blocks.update((block.header.number, block) for block in blocks if not block.header.unknown_fields)
        for number in sorted(self._blocks)[: max(0, len(self._blocks) - self._most)]:
            del self._blocks[number]

    def linked_to(self, last: Hash32, span: Span) -> list[Header] | None:
        """The headers of `span` down from the one with the hash `last`; None where one of them is not kept."""
        headers: list[Header] = []
        wanted = last
        for number in range(span.last, span.first - 1, -1):
            block = self._blocks.get(number)
            if block is None or block.header.hash != wanted:
                return None
            headers.append(block.header)
            wanted = block.header.parent_hash
        return headers[::-1]

    def first_of(self, span: Span) -> list[RecentBlock]:
        """The blocks from the first one of `span` on, as far as they are kept and linked to each other."""
        found: list[RecentBlock] = []
        for number in range(span.first, span.last + 1):
            block = self._blocks.get(number)
            if block is None or (found and block.header.parent_hash != found[-1].header.hash):
                break
            found.append(block)
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self._blocks.clear()
