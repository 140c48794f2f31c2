"""What must hold between the blocks of a node before their withdrawals are used, and their exact wire form (C3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from vaultevents.chain import wire
from vaultevents.chain.withdrawals import Link, check
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.units import Address, Hash32, ValidatorIndex, hex_text
from vaultevents.core.withdrawals import Withdrawal, WithdrawalBlock

pytestmark = pytest.mark.integration

NODE = "http://node#1"
VAULT = Address(b"\x01" * 20)
UNKNOWN = Link(None, None)
SOME_ROOT = "0x" + "12" * 32


def block_hash(number: int) -> Hash32:
    return Hash32(number.to_bytes(32))


def block(number: int, *indices: int, time_s: int | None = None) -> WithdrawalBlock:
    at_s = 12 * number if time_s is None else time_s
    paid = tuple(Withdrawal(index, ValidatorIndex(index % 7), VAULT, 10**9) for index in indices)
    return WithdrawalBlock(number, block_hash(number), block_hash(number - 1), at_s, paid)


def as_json(one: WithdrawalBlock, **changes: Any) -> dict[str, Any]:
    return {
        "number": hex(one.number),
        "hash": hex_text(one.hash),
        "parentHash": hex_text(one.parent_hash),
        "timestamp": hex(one.timestamp_s),
        "withdrawals": [
            {
                "index": hex(paid.index),
                "validatorIndex": hex(paid.validator_index),
                "address": hex_text(paid.address),
                "amount": hex(paid.amount_gwei),
            }
            for paid in one.withdrawals
        ],
        "withdrawalsRoot": SOME_ROOT if one.withdrawals else hex_text(wire.EMPTY_LIST_ROOT),
        **changes,
    }


def paying(**changes: Any) -> dict[str, Any]:
    """Block 5 with one withdrawal, of which some fields are other ones."""
    (paid,) = as_json(block(5, 9))["withdrawals"]
    return as_json(block(5, 9), withdrawals=[{**paid, **changes}])


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in as_json(block(5, 9)).items() if name != key}


def read(sent: object, number: int = 5) -> WithdrawalBlock | None:
    return wire.withdrawal_block(NODE, msgspec.Raw(msgspec.json.encode(sent)), number=number)


@pytest.mark.parametrize("link", [UNKNOWN, Link(block_hash(3), None), Link(None, 6), Link(block_hash(3), 6)])
def test_linked_blocks_with_gapless_withdrawals_pass(link: Link) -> None:
    check(NODE, [block(4), block(5, 7, 8), block(6), block(7, 9)], link)
    check(NODE, [], link)


@pytest.mark.parametrize(
    ("blocks", "link", "problem"),
    [
        ([block(4)], Link(block_hash(9), None), "block 4 is not linked to block 3"),
        ([block(4), replace(block(5), parent_hash=block_hash(9))], UNKNOWN, "block 5 is not linked to block 4"),
        ([block(4), block(5, time_s=48)], UNKNOWN, "the time of block 5 is not after that of block 4"),
        ([block(4, 8)], Link(None, 6), "withdrawal 8 in block 4 leaves a gap after 6"),
        ([block(4, 6)], Link(None, 6), "withdrawal 6 in block 4 is there twice"),
        ([block(4, 1, 3)], UNKNOWN, "withdrawal 3 in block 4 leaves a gap after 1"),
        ([block(4, 1), block(5), block(6, 3)], UNKNOWN, "withdrawal 3 in block 6 leaves a gap after 1"),
        ([block(4, 1, 2), block(5, 2)], UNKNOWN, "withdrawal 2 in block 5 is there twice"),
        ([block(4, 2, 1)], UNKNOWN, "withdrawal 1 in block 4 is there twice or out of order"),
    ],
)
def test_what_contradicts_the_chain_is_a_fault_of_the_node(
    blocks: list[WithdrawalBlock], link: Link, problem: str
) -> None:
    with pytest.raises(NodeFault, match=problem) as caught:
        check(NODE, blocks, link)
    assert caught.value.node == NODE


def test_a_block_is_read_as_it_was_written() -> None:
    largest = replace(block(5, 7, 8), timestamp_s=2**64 - 1)
    largest = replace(
        largest,
        withdrawals=(Withdrawal(2**64 - 1, ValidatorIndex(2**40), VAULT, 2**64 - 1), *largest.withdrawals),
    )
    for one in (block(5), block(5, 7, 8), largest):
        assert read(as_json(one)) == one
        assert read({**as_json(one), "somethingNew": [{"withdrawals": None}]}) == one
    assert read(None) is None


def test_a_node_that_gives_no_root_is_believed_by_the_index_alone() -> None:
    assert read(without("withdrawalsRoot")) == block(5, 9)


@pytest.mark.parametrize(
    "sent",
    [
        as_json(block(5, 9), withdrawals=None),
        without("withdrawals"),
        as_json(block(5, 9), withdrawals=[]),
        as_json(block(5), withdrawalsRoot=SOME_ROOT),
        as_json(block(5, 9), withdrawalsRoot=hex_text(wire.EMPTY_LIST_ROOT)),
        as_json(block(5, 9), withdrawalsRoot="0x12"),
        as_json(block(5, 9), withdrawals={}),
        as_json(block(5, 9), withdrawals=[None]),
        as_json(block(6, 9)),
        as_json(block(5, 9), hash="0x12"),
        as_json(block(5, 9), timestamp=60),
        without("parentHash"),
        paying(address="0x" + "01" * 19),
        paying(address="0x" + "01" * 21),
        paying(address=None),
        paying(amount="0x1" + "0" * 16),
        paying(amount="1000000000"),
        paying(amount=10**9),
        paying(amount="-0x1"),
        paying(validatorIndex="0x"),
        paying(index="0x1" + "0" * 16),
        paying(index=None),
        [],
        "0x5",
    ],
)
def test_another_form_is_a_fault_and_never_an_empty_list(sent: object) -> None:
    with pytest.raises(NodeFault, match="block 5") as caught:
        read(sent)
    assert caught.value.node == NODE


@pytest.mark.parametrize("missing", [{}, {"withdrawals": None}])
def test_a_block_from_before_withdrawals_says_what_to_do(missing: dict[str, None]) -> None:
    old = {key: value for key, value in as_json(block(5)).items() if not key.startswith("withdrawals")}
    with pytest.raises(SourceUnavailable, match=r"before the Capella .* begin at a later one") as caught:
        read({**old, **missing})
    assert not isinstance(caught.value, NodeFault)
