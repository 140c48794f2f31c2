"""Decode hexadecimal quantities and data exactly; any other form is a `NodeFault`."""

from __future__ import annotations

import re

from vaultevents.core.errors import NodeFault

_QUANTITY = re.compile(r"0[xX][0-9a-fA-F]{1,16}")


def quantity(node: str, what: str, text: str) -> int:
    """A JSON-RPC quantity of at most 64 bits: `0x` and 1 to 16 hexadecimal digits in any case."""
    if not _QUANTITY.fullmatch(text):
        raise NodeFault(node, f"{what} is {shown(text)}, not a hexadecimal quantity of at most 64 bits")
    return int(text, 16)


def data(node: str, what: str, text: str, size: int | None = None) -> bytes:
    """`0x` and an even number of hexadecimal digits in any case; exactly `size` bytes where it is given."""
    if text[:2] in ("0x", "0X") and (size is None or len(text) == 2 + 2 * size):
        try:
            value = bytes.fromhex(text[2:])
        except ValueError:
            value = b""
        if 2 * len(value) == len(text) - 2:  # fromhex skips white space
            return value
    form = "hexadecimal bytes" if size is None else f"{size} hexadecimal bytes"
    raise NodeFault(node, f"{what} is {shown(text)}, not {form}")


def shown(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}…")
