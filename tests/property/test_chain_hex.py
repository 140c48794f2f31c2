"""Hexadecimal from a node: exactly the numbers and bytes that were meant, or a fault that names the node."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaultevents.chain.execution import wire
from vaultevents.chain.execution.log_range import decode_logs
from vaultevents.chain.upstream import hex_values
from vaultevents.core.errors import NodeFault

pytestmark = pytest.mark.property

NODE = "http://node#1"


def any_case(text: str, picks: list[bool]) -> str:
    return "".join(c.upper() if pick else c for c, pick in zip(text, picks, strict=False))


@given(st.integers(0, 2**64 - 1), st.lists(st.booleans(), min_size=18, max_size=18))
def test_every_64_bit_quantity_survives_in_any_case(value: int, picks: list[bool]) -> None:
    assert hex_values.quantity(NODE, "it", any_case(hex(value), picks)) == value


@given(st.text(max_size=40))
def test_any_other_text_is_refused_as_a_quantity(text: str) -> None:
    digits = text[2:]
    right = text[:2] in ("0x", "0X") and 1 <= len(digits) <= 16 and all(c in "0123456789abcdefABCDEF" for c in digits)
    if right:
        assert hex_values.quantity(NODE, "it", text) == int(text, 16)
    else:
        with pytest.raises(NodeFault, match=NODE):
            hex_values.quantity(NODE, "it", text)


@pytest.mark.parametrize("text", ["", "0x", "1", "-0x1", "0x-1", "0x" + "9" * 100, "0x1 ", "0x1\n", "0x١", "0x1_0"])
def test_tempting_quantities_are_refused(text: str) -> None:
    with pytest.raises(NodeFault, match="not a hexadecimal quantity"):
        hex_values.quantity(NODE, "it", text)


@given(st.binary(max_size=64), st.lists(st.booleans(), min_size=130, max_size=130))
def test_bytes_survive_in_any_case(value: bytes, picks: list[bool]) -> None:
    text = any_case("0x" + value.hex(), picks)
    assert hex_values.data(NODE, "it", text) == value
    assert hex_values.data(NODE, "it", text, len(value)) == value
    with pytest.raises(NodeFault, match=f"not {len(value) + 1} hexadecimal bytes"):
        hex_values.data(NODE, "it", text, len(value) + 1)


@pytest.mark.parametrize("text", ["", "0", "0x0", "0xzz", "abcd", "0x12 34", "0x 1234", "0x1234\n", "0x12３4"])
def test_tempting_bytes_are_refused(text: str) -> None:
    with pytest.raises(NodeFault, match="not hexadecimal bytes"):
        hex_values.data(NODE, "it", text)


def test_a_long_lie_is_not_repeated_in_full() -> None:
    with pytest.raises(NodeFault) as caught:
        hex_values.quantity(NODE, "it", "0x" + "7" * 1_000_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "raw", [b"{}", b"[1]", b'"0x"', b"7", b'{"number": null}', b"[" * 3000 + b"]" * 3000, b'"\xff"']
)
def test_another_form_than_a_block_or_logs_is_a_fault(raw: bytes) -> None:
    with pytest.raises(NodeFault, match="does not have the known form"):
        wire.block(NODE, msgspec.Raw(raw), number=1)
    with pytest.raises(NodeFault, match="does not have the known form"):
        decode_logs(NODE, msgspec.Raw(raw))
