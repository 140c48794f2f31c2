"""RLP encoding of the few shapes that are hashed here (Yellow Paper, appendix B).

The package `rlp` takes seven times as long for a header or a receipt (60 against 9 microseconds), because it infers the
shape of each value; a backfill hashes one of each for every block with events. Tests compare the two on every shape.
"""

from __future__ import annotations

from collections.abc import Iterable


def encode_bytes(value: bytes) -> bytes:
    """Encode a byte string."""
    size = len(value)
    if size == 1 and value[0] < 0x80:
        return value
    if size < 56:
        return bytes((0x80 + size,)) + value
    length = encode_length(size)
    return bytes((0xB7 + len(length),)) + length + value


def encode_int(value: int) -> bytes:
    """Encode a non-negative integer: big-endian without leading zeros."""
    if value < 0x80:
        return bytes((value,)) if value else b"\x80"
    return encode_bytes(encode_length(value))


def encode_list(items: Iterable[bytes]) -> bytes:
    """Encode a list of items that are encoded already."""
    content = b"".join(items)
    size = len(content)
    if size < 56:
        return bytes((0xC0 + size,)) + content
    length = encode_length(size)
    return bytes((0xF7 + len(length),)) + length + content


def encode_length(value: int) -> bytes:
    """Big-endian bytes without leading zeros; empty for 0."""
    return value.to_bytes((value.bit_length() + 7) // 8)
