"""The CID of a file as the oracle's IPFS tools make it: CIDv0, chunks of 256 KiB, no raw leaves, balanced layout.

Every node of the tree is a dag-pb node that holds a UnixFS message; both are protobuf messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

CHUNK_BYTES = 262_144
_LINKS = 174
_FILE = 2
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class _Node:
    """`file_bytes` counts what of the file is below the node, `total_bytes` all encoded nodes from here down."""

    multihash: bytes
    file_bytes: int
    total_bytes: int


def cid_of(content: bytes) -> str:
    """The CIDv0, 46 characters that begin with `Qm`."""
    level = [_leaf(content[at : at + CHUNK_BYTES]) for at in range(0, max(len(content), 1), CHUNK_BYTES)]
    while len(level) > 1:
        level = [_parent(level[at : at + _LINKS]) for at in range(0, len(level), _LINKS)]
    return _base58(level[0].multihash)


def _leaf(chunk: bytes) -> _Node:
    unixfs = _number(1, _FILE) + (_field(2, chunk) if chunk else b"") + _number(3, len(chunk))
    return _node(unixfs, (), len(chunk))


def _parent(children: Sequence[_Node]) -> _Node:
    size = sum(child.file_bytes for child in children)
    unixfs = _number(1, _FILE) + _number(3, size) + b"".join(_number(4, child.file_bytes) for child in children)
    return _node(unixfs, children, size)


def _node(unixfs: bytes, children: Iterable[_Node], file_bytes: int) -> _Node:
    """The links come before the data, against the order of their field numbers."""
    links = [_field(1, child.multihash) + _field(2, b"") + _number(3, child.total_bytes) for child in children]
    encoded = b"".join(_field(2, link) for link in links) + _field(1, unixfs)
    below = sum(child.total_bytes for child in children)
    return _Node(b"\x12\x20" + sha256(encoded).digest(), file_bytes, len(encoded) + below)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    low: list[int] = []
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes([*low, value])


def _base58(raw: bytes) -> str:
    """Of bytes that do not begin with zero, as a multihash never does."""
    number, text = int.from_bytes(raw), ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    return text
