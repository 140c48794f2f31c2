"""The content identifier of a file on IPFS: reading its text, and computing it from the bytes.

Only the form in which oracle reports are published is known: one file, cut into chunks of 262,144 bytes, wrapped into
UnixFS and dag-pb nodes (no raw leaves), balanced with at most 174 links a node, hashed with sha2-256.
Sources: https://github.com/multiformats/cid, https://specs.ipfs.tech/unixfs/.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass

from vaultevents.core.units import Hash32

CHUNK_BYTES = 262_144
LINKS = 174

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
_SHA2_256 = b"\x12\x20"  # and 32 bytes: the whole of version 0
_V1_DAG_PB = b"\x01\x70"


class CidUnsupported(ValueError):
    """Not a CID, or one that cannot be compared with the bytes of a file by the rules of this module."""


@dataclass(frozen=True, slots=True)
class Cid:
    """A dag-pb node by its sha2-256 digest. Its text is that of version 0: `Qm` and 44 characters of base58btc."""

    digest: Hash32

    def __str__(self) -> str:
        return _base58(_SHA2_256 + self.digest)


def parse_cid(text: str) -> Cid:
    """Version 0, or version 1 in base32 or base58btc over a dag-pb node; raises `CidUnsupported` for all else.

    What passes consists of letters and digits only, and no two texts of one version and base are the same CID.
    """
    if len(text) == 46 and text.startswith("Qm"):
        return _of_bytes(_base58_bytes(text, 34), _SHA2_256)
    if text.startswith("b"):
        return _of_bytes(_base32_bytes(text[1:]), _V1_DAG_PB + _SHA2_256)
    if text.startswith("z"):
        return _of_bytes(_base58_bytes(text[1:], 36), _V1_DAG_PB + _SHA2_256)
    raise CidUnsupported("the text is not a CID of version 0, nor one of version 1 in base32 or base58")


def file_cid(content: bytes) -> Cid:
    """The CID under which IPFS publishes this file."""
    view = memoryview(content)
    level = [_chunk_node(view[at : at + CHUNK_BYTES]) for at in range(0, len(content) or 1, CHUNK_BYTES)]
    while len(level) > 1:
        level = [_parent_node(level[at : at + LINKS]) for at in range(0, len(level), LINKS)]
    return Cid(level[0].digest)


def matches(cid: Cid, content: bytes) -> bool:
    """Whether these are the bytes of the file with this CID."""
    return file_cid(content) == cid


@dataclass(frozen=True, slots=True)
class _Node:
    """`file_bytes` of content below it, `total_bytes` encoded with all nodes below it."""

    digest: Hash32
    file_bytes: int
    total_bytes: int


def _chunk_node(chunk: memoryview) -> _Node:
    size = len(chunk)
    # protobuf: field 2 is the content, absent from an empty file
    before = b"\x08\x02" + (b"\x12" + _varint(size) if size else b"")
    after = b"\x18" + _varint(size)
    head = b"\x0a" + _varint(len(before) + size + len(after)) + before
    digest = hashlib.sha256(head)
    digest.update(chunk)
    digest.update(after)
    return _Node(Hash32(digest.digest()), size, len(head) + size + len(after))


def _parent_node(children: list[_Node]) -> _Node:
    size = sum(child.file_bytes for child in children)
    unixfs = b"\x08\x02\x18" + _varint(size) + b"".join(b"\x20" + _varint(child.file_bytes) for child in children)
    # dag-pb writes the links (field 2) before the data (field 1)
    node = b"".join(_link(child) for child in children) + b"\x0a" + _varint(len(unixfs)) + unixfs
    total = len(node) + sum(child.total_bytes for child in children)
    return _Node(Hash32(hashlib.sha256(node).digest()), size, total)


def _link(child: _Node) -> bytes:
    link = b"\x0a\x22" + _SHA2_256 + child.digest + b"\x12\x00\x18" + _varint(child.total_bytes)
    return b"\x12" + _varint(len(link)) + link


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _of_bytes(data: bytes, prefix: bytes) -> Cid:
    if len(data) != len(prefix) + 32 or not data.startswith(prefix):
        raise CidUnsupported("the CID is not that of a dag-pb node hashed with sha2-256")
    return Cid(Hash32(data[len(prefix) :]))


def _base58(data: bytes) -> str:
    """Without the rule for leading zero bytes: what we write begins with 0x12 or 0x01."""
    number, text = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    return text


def _base58_bytes(text: str, size: int) -> bytes:
    if len(text) > 50 or not set(text) <= set(_BASE58):
        raise CidUnsupported("the CID has characters that base58 does not know, or too many")
    number = 0
    for character in text:
        number = number * 58 + _BASE58.index(character)
    if text.startswith("1") or number.bit_length() > size * 8:
        raise CidUnsupported(f"the CID does not hold {size} bytes in base58")
    return number.to_bytes(size)


def _base32_bytes(text: str) -> bytes:
    if len(text) > 64 or not set(text) <= set(_BASE32):
        raise CidUnsupported("the CID has characters that base32 does not know, or too many")
    padded = text.upper() + "=" * (-len(text) % 8)
    try:
        data = base64.b32decode(padded)
    except binascii.Error:
        raise CidUnsupported("the CID is not base32") from None
    if base64.b32encode(data).decode() != padded:
        raise CidUnsupported("the CID has stray bits at its end")
    return data
