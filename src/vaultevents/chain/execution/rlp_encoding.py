"""RLP encoding of the few shapes that are hashed here (Yellow Paper, appendix B).

Headers, receipts and transactions come as JSON with hexadecimal text. `text_…` encode them as text, so that only a
whole one is turned into bytes: a backfill hashes several of them for each block with events, and the package `rlp`
takes some fifty microseconds for each. Tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

_SHORT: Final = tuple(f"{0x80 + size:02x}" for size in range(56))
_SHORT_LISTS: Final = tuple(f"{0xC0 + size:02x}" for size in range(56))


def encode_bytes(value: bytes) -> bytes:
    """Encode a byte string."""
    size = len(value)
    if size == 1 and value[0] < 0x80:
        return value
    if size < 56:
        return bytes((0x80 + size,)) + value
    return bytes.fromhex(_prefix(0xB7, size)) + value


def encode_int(value: int) -> bytes:
    """Encode a non-negative integer: big-endian without leading zeros."""
    if value < 0x80:
        return bytes((value,)) if value else b"\x80"
    return encode_bytes(value.to_bytes((value.bit_length() + 7) // 8))


def encode_list(items: Iterable[bytes]) -> bytes:
    """Encode a list of items that are encoded already."""
    content = b"".join(items)
    size = len(content)
    return (bytes((0xC0 + size,)) if size < 56 else bytes.fromhex(_prefix(0xF7, size))) + content


def text_data(text: str) -> str:
    """Encode `0x` and whole hexadecimal bytes, as hexadecimal text; raises `ValueError` for another form.

    Digits are looked at by `from_text`.
    """
    if len(text) & 1 or (text[:2] != "0x" and text[:2] != "0X"):
        raise ValueError("not hexadecimal bytes")
    digits = text[2:]
    size = len(digits) >> 1
    if size < 56:
        return digits if size == 1 and int(digits, 16) < 0x80 else _SHORT[size] + digits
    return _prefix(0xB7, size) + digits


def text_number(text: str) -> str:
    """Encode `0x` and a hexadecimal quantity, as hexadecimal text."""
    digits = text[2:].lstrip("0")
    if not digits:
        return "80"
    if len(digits) & 1:
        digits = "0" + digits
    size = len(digits) >> 1
    return digits if size == 1 and int(digits, 16) < 0x80 else _SHORT[size] + digits


def from_text(text: str) -> bytes:
    """Turn encoded text into bytes; raises `ValueError` for anything but hexadecimal digits, white space included.

    So equal bytes mean equal fields: none can be read with other borders than it was encoded with.
    """
    encoded = bytes.fromhex(text)
    if 2 * len(encoded) != len(text):
        raise ValueError("white space among hexadecimal digits")
    return encoded


def text_list(items: Iterable[str]) -> str:
    """Encode a list of items that are encoded already, as hexadecimal text."""
    content = "".join(items)
    size = len(content) >> 1
    return (_SHORT_LISTS[size] if size < 56 else _prefix(0xF7, size)) + content


@lru_cache(maxsize=16_384)
def _prefix(base: int, size: int) -> str:
    """What stands before a value of 56 bytes or more: how long its size is, and the size."""
    digits = f"{size:x}" if size.bit_length() % 8 == 0 or size.bit_length() % 8 > 4 else f"0{size:x}"
    return f"{base + (len(digits) >> 1):02x}{digits}"
