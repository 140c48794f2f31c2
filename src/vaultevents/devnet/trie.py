"""The root of an ordered list in a block header, such as `withdrawalsRoot` (Yellow Paper appendix D, EIP-4895)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from eth_hash.auto import keccak

from vaultevents.devnet.encoding import rlp_encode

EMPTY_TRIE_ROOT = keccak(rlp_encode(b""))

_Item = tuple[str, bytes]
"""The rest of a key in hex digits (nibbles), and its value."""


def ordered_root(values: Sequence[bytes]) -> bytes:
    """The root of the Merkle-Patricia trie that maps the RLP of each position to the value there."""
    if not values:
        return EMPTY_TRIE_ROOT
    return keccak(rlp_encode(_node([(_key(position), value) for position, value in enumerate(values)])))


@cache
def _key(position: int) -> str:
    return rlp_encode(position).hex()


def _node(items: list[_Item]) -> list[Any]:
    """A leaf, an extension or a branch. No key begins with another, so a branch itself never has a value."""
    first, value = items[0]
    if len(items) == 1:
        return [_compact(first, leaf=True), value]
    shared = _shared(items)
    if shared:
        rest = [(key[shared:], value) for key, value in items]
        return [_compact(first[:shared], leaf=False), _reference(rest)]
    children = [[(key[1:], value) for key, value in items if key[0] == digit] for digit in "0123456789abcdef"]
    return [*(_reference(child) if child else b"" for child in children), b""]


def _reference(items: list[_Item]) -> Any:
    """A node inside another: itself when its RLP is shorter than 32 bytes, else the hash of that."""
    node = _node(items)
    encoded = rlp_encode(node)
    return node if len(encoded) < 32 else keccak(encoded)


def _shared(items: list[_Item]) -> int:
    """How many digits all keys begin with."""
    first, last = min(items)[0], max(items)[0]
    return next(at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1])


def _compact(path: str, *, leaf: bool) -> bytes:
    """Hex-prefix encoding: the kind of node, whether the number of digits is odd, and the digits."""
    flag = 2 * leaf + len(path) % 2
    return bytes.fromhex(f"{flag}{path}" if len(path) % 2 else f"{flag}0{path}")
