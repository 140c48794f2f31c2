"""Blocks in JSON whose header still hashes to their hash after a field was changed."""

from __future__ import annotations

from typing import Any

from block_hashes import FUTURE, header_hash

Json = dict[str, Any]


def sealed(block: Json, **changes: Any) -> Json:
    """Change fields of a block and give it the hash that they make."""
    changed = {**block, **changes}
    return {**changed, "hash": header_hash(changed, tuple(name for name in FUTURE if name in changed))}


def without(block: Json, *names: str) -> Json:
    """Leave fields out of a block."""
    return {name: value for name, value in block.items() if name not in names}
