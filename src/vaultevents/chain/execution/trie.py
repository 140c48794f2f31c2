"""The root of an ordered list in a block header, such as `receiptsRoot` (Yellow Paper, appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from vaultevents.chain.execution.rlp_encoding import encode_bytes, encode_int, encode_list
from vaultevents.core.keccak import keccak

_Entry = tuple[bytes, bytes]
"""The rest of a key, one byte for each hexadecimal digit, and its value."""

EMPTY_ROOT = keccak(encode_bytes(b""))


def list_root(values: Sequence[bytes]) -> bytes:
    """Compute the root of the Merkle-Patricia trie that maps the RLP of each position to the value there."""
    if not values:
        return EMPTY_ROOT
    entries = sorted((_key(position), value) for position, value in enumerate(values))
    return keccak(_node(entries, 0))


@lru_cache(maxsize=4096)
def _key(position: int) -> bytes:
    """The RLP of a position, one byte for each hexadecimal digit."""
    return bytes(digit for byte in encode_int(position) for digit in divmod(byte, 16))


def _node(entries: Sequence[_Entry], depth: int) -> bytes:
    """Encode a leaf, an extension or a branch for sorted entries that agree on their first `depth` digits.

    No key begins with another one, so a branch never has a value of its own.
    """
    first, last = entries[0][0], entries[-1][0]
    if len(entries) == 1:
        return encode_list((encode_bytes(_path(first[depth:], leaf=True)), encode_bytes(entries[0][1])))
    fork = next(at for at in range(depth, len(first)) if first[at] != last[at])
    if fork > depth:
        return encode_list((encode_bytes(_path(first[depth:fork], leaf=False)), _reference(entries, fork)))
    groups: list[list[_Entry]] = [[] for _ in range(16)]
    for entry in entries:
        groups[entry[0][depth]].append(entry)
    return encode_list([*(_reference(group, depth + 1) if group else b"\x80" for group in groups), b"\x80"])


def _reference(entries: Sequence[_Entry], depth: int) -> bytes:
    """A node within another: itself where its RLP is shorter than a hash, else the hash of that."""
    encoded = _node(entries, depth)
    return encoded if len(encoded) < 32 else encode_bytes(keccak(encoded))


@lru_cache(maxsize=4096)
def _path(digits: bytes, *, leaf: bool) -> bytes:
    """Hex-prefix encoding: the kind of node, whether the number of digits is odd, the digits in pairs."""
    odd = len(digits) % 2
    padded = bytes([2 * leaf + odd, *(() if odd else (0,)), *digits])
    return bytes(high << 4 | low for high, low in zip(padded[::2], padded[1::2], strict=True))
