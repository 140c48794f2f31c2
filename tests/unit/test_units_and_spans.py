"""Exact text forms and span arithmetic."""

from __future__ import annotations

from decimal import Decimal

import pytest
from eth_utils.address import to_checksum_address
from hypothesis import given
from hypothesis import strategies as st

from vaultevents.core.errors import InputError
from vaultevents.core.registry import check_id
from vaultevents.core.spans import Span, next_span, subtract
from vaultevents.core.units import checksum, eth_text, parse_address

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("wei", "text"),
    [
        (0, "0"),
        (1, "0.000000000000000001"),
        (10**15, "0.001"),
        (32 * 10**18, "32"),
        (10 * 10**18, "10"),
        (2**256 - 1, "115792089237316195423570985008687907853269984665640564039457.584007913129639935"),
    ],
)
def test_an_amount_is_exact_and_bare(wei: int, text: str) -> None:
    assert eth_text(wei) == text


@given(st.integers(0, 2**256 - 1))
def test_no_wei_is_lost_in_the_text(wei: int) -> None:
    text = eth_text(wei)
    whole, _, fraction = text.partition(".")
    assert int(whole) * 10**18 + int(fraction.ljust(18, "0")) == wei
    assert "e" not in text.lower() and not fraction.endswith("0")
    assert Decimal(text) == Decimal(text)


@given(st.binary(min_size=20, max_size=20))
def test_checksums_are_those_of_eip_55(address: bytes) -> None:
    assert checksum(address) == to_checksum_address(address)
    assert parse_address(checksum(address)) == address
    assert parse_address(checksum(address).lower()) == address


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0x12", "40 hexadecimal digits"),
        ("f39Fd6e51aad88F6F4ce6aB8827279cffFb92266", "expected 0x"),
        ("0xf39fd6e51aad88F6F4ce6aB8827279cffFb92266", "wrong checksum"),
        ("0xg39Fd6e51aad88F6F4ce6aB8827279cffFb92266", "hexadecimal"),
    ],
)
def test_a_mistyped_address_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_address(text)


@pytest.mark.parametrize("text", ["a_b", "a.b", "", "a" * 65, "ä", "a b", "a\n"])
def test_an_id_outside_the_charset_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="letters, digits and hyphens"):
        check_id(text, "a vault id")


def test_the_next_span_ends_at_step_head_or_stop() -> None:
    assert next_span(10, 100, 5, None) == Span(11, 15)
    assert next_span(10, 12, 5, None) == Span(11, 12)
    assert next_span(10, 100, 50, 13) == Span(11, 13)
    assert next_span(10, 10, 5, None) is None
    assert next_span(10, 3, 5, None) is None
    assert next_span(13, 100, 5, 13) is None


@given(st.integers(0, 200), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=6))
def test_what_is_left_of_a_span_is_what_nothing_else_covers(first: int, others: list[tuple[int, int]]) -> None:
    span = Span(first, first + 60)
    covered = [Span(start, start + length) for start, length in others]
    left = subtract(span, covered)
    want = {p for p in range(span.first, span.last + 1) if not any(p in other for other in covered)}
    assert [p for part in left for p in range(part.first, part.last + 1)] == sorted(want)
