"""Recursive length prefix encoding (Yellow Paper, appendix B): short, because a devnet encodes millions of items."""

from __future__ import annotations

from collections.abc import Sequence

Encodable = bytes | int | Sequence["Encodable"]


def rlp_encode(value: Encodable) -> bytes:
    """Encode bytes, a number without leading zeros, or a list of such values."""
    if isinstance(value, int):
        value = minimal(value)
    if isinstance(value, bytes):
        return value if len(value) == 1 and value[0] < 0x80 else _prefix(0x80, len(value)) + value
    return rlp_list([rlp_encode(item) for item in value])


def rlp_list(encoded_items: Sequence[bytes]) -> bytes:
    """Join items that are encoded already."""
    payload = b"".join(encoded_items)
    return _prefix(0xC0, len(payload)) + payload


def _prefix(offset: int, size: int) -> bytes:
    if size < 56:
        return bytes((offset + size,))
    digits = minimal(size)
    return bytes((offset + 55 + len(digits),)) + digits


def minimal(number: int) -> bytes:
    """Return an integer big-endian without leading zeros."""
    return number.to_bytes((number.bit_length() + 7) // 8)
