"""Blooms of blocks, made with the masks of the product."""

from __future__ import annotations

from collections.abc import Iterable

from vaultevents.core.logs import Log, bloom_mask


def bloom_of(logs: Iterable[Log]) -> bytes:
    """Return the bloom of a whole block, from all of its logs."""
    bits = 0
    for log in logs:
        for value in (log.address, *log.topics):
            bits |= bloom_mask(value)
    return bits.to_bytes(256)
