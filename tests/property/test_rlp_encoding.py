"""RLP as the service writes it, against the package `rlp` on every shape, and roots against the package `trie`."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import rlp
from hypothesis import given
from hypothesis import strategies as st
from rlp.sedes import big_endian_int
from trie.hexary import HexaryTrie

from vaultevents.chain.execution.rlp_encoding import (
    encode_bytes,
    encode_int,
    encode_list,
    from_text,
    text_data,
    text_list,
    text_number,
)
from vaultevents.chain.execution.trie import EMPTY_ROOT, list_root

pytestmark = pytest.mark.property

Nested: TypeAlias = "bytes | list[Nested]"

SIZES = (0, 1, 2, 54, 55, 56, 57, 254, 255, 256, 257, 65_534, 65_535, 65_536, 65_537)
NUMBERS = (0, 1, 127, 128, 129, 255, 256, 2**16 - 1, 2**16, 2**63, 2**64 - 1, 2**64, 2**256 - 1)

nested = st.recursive(
    st.binary(max_size=80), lambda shapes: st.lists(shapes, max_size=12), max_leaves=60
)  # fmt: skip


def encoded(shape: Nested) -> bytes:
    return encode_bytes(shape) if isinstance(shape, bytes) else encode_list(map(encoded, shape))


def encoded_text(shape: Nested) -> str:
    return text_data(f"0x{shape.hex()}") if isinstance(shape, bytes) else text_list(map(encoded_text, shape))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fill", [b"\x00", b"\x7f", b"\x80", b"\xff"])
def test_byte_strings_of_every_size(size: int, fill: bytes) -> None:
    assert encode_bytes(fill * size) == rlp.encode(fill * size)
    assert from_text(text_data("0x" + (fill * size).hex().upper())) == rlp.encode(fill * size)


@pytest.mark.parametrize("byte", range(256))
def test_every_single_byte(byte: int) -> None:
    assert encode_bytes(bytes([byte])) == rlp.encode(bytes([byte])) == from_text(text_data(f"0X{byte:02x}"))


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_at_every_edge(number: int) -> None:
    assert encode_int(number) == rlp.encode(number, big_endian_int)
    assert from_text(text_number(hex(number))) == rlp.encode(number, big_endian_int)


@pytest.mark.parametrize("size", SIZES)
def test_lists_of_every_size(size: int) -> None:
    assert encode_list([b"\x01"] * size) == rlp.encode([b"\x01"] * size) == from_text(text_list(["01"] * size))


@given(st.integers(min_value=0, max_value=2**256))
def test_any_number(number: int) -> None:
    assert encode_int(number) == rlp.encode(number, big_endian_int)


@given(nested)
def test_any_shape(shape: Nested) -> None:
    assert encoded(shape) == rlp.encode(shape) == from_text(encoded_text(shape))


@pytest.mark.parametrize("text", ["0x0", "0x123", "1234", "zz1234", "", "0", "0x12 4", "0x1 2", "0x  "])
def test_text_that_could_be_read_with_other_borders_is_refused(text: str) -> None:
    """A node could otherwise hide a log among others whose bytes together are the same."""
    with pytest.raises(ValueError):
        from_text(text_list([text_data(text), text_data("0x11")]))


@pytest.mark.parametrize("text", ["0x12\u0663", "0x\uff11\uff12", "0xgg"])
def test_digits_of_other_scripts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_text(text_number(text))


def root_of(values: list[bytes]) -> bytes:
    trie = HexaryTrie({})
    for position, value in enumerate(values):
        trie[rlp.encode(position, big_endian_int)] = value
    return bytes(trie.root_hash)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 300])
def test_the_root_of_a_list_of_every_length(count: int, size: int) -> None:
    values = [(position + 1).to_bytes(max(size, 2)) for position in range(count)]
    assert list_root(values) == root_of(values)


@given(st.lists(st.binary(min_size=1, max_size=100), max_size=200))
def test_the_root_of_any_list(values: list[bytes]) -> None:
    assert list_root(values) == root_of(values)


def test_an_empty_list_has_the_root_that_every_empty_block_has() -> None:
    assert EMPTY_ROOT.hex() == "56e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421"
