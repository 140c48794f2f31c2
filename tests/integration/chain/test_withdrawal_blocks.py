"""What must hold between a node's blocks before their withdrawals are used, and their wire form (rule C3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sealed_blocks import sealed, without
from vaultevents.chain.execution import wire
from vaultevents.chain.execution.withdrawals import Link, check
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.units import Address, Hash32, ValidatorIndex, hex_text
from vaultevents.core.withdrawals import Withdrawal, WithdrawalBlock
from vaultevents.devnet.blocks import Payout
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.rpc import block_json
from vaultevents.devnet.trie import EMPTY_TRIE_ROOT

pytestmark = pytest.mark.integration

NODE = "http://node#1"
VAULT = Address(b"\x01" * 20)
UNKNOWN = Link(None, None)


def block_hash(number: int) -> Hash32:
    return Hash32(number.to_bytes(32))


def block(number: int, *indices: int, time_s: int | None = None) -> WithdrawalBlock:
    at_s = 12 * number if time_s is None else time_s
    paid = tuple(Withdrawal(index, ValidatorIndex(index % 7), VAULT, 10**9) for index in indices)
    return WithdrawalBlock(number, block_hash(number), block_hash(number - 1), at_s, paid)


def mined(*payouts: Payout, blocks: int = 5) -> dict[str, Any]:
    """The last block of a chain of so many, as a node gives it: its header hashes, its withdrawals make up its root."""
    chain = Chain(5)
    for _ in range(blocks - 1):
        chain.mine()
    return block_json(chain.mine(payouts=payouts))


PAID = mined(Payout(2, VAULT, 10**9))
"""Block 5 with one withdrawal."""
EMPTY = mined()
"""Block 5 without any."""


def paying(**changes: Any) -> dict[str, Any]:
    """Block 5 with one withdrawal, of which some fields are other ones."""
    (paid,) = PAID["withdrawals"]
    return {**PAID, "withdrawals": [{**paid, **changes}]}


def read(sent: object, number: int = 5) -> WithdrawalBlock | None:
    return wire.withdrawal_block(NODE, msgspec.Raw(msgspec.json.encode(sent)), number=number)


@pytest.mark.parametrize("link", [UNKNOWN, Link(block_hash(3), None), Link(None, 6), Link(block_hash(3), 6)])
def test_linked_blocks_with_gapless_withdrawals_pass(link: Link) -> None:
    check(NODE, [block(4), block(5, 7, 8), block(6), block(7, 9)], link, strict_times=True)
    check(NODE, [], link, strict_times=True)


def test_two_blocks_may_have_the_same_time_where_times_are_not_strict() -> None:
    check(NODE, [block(4), block(5, time_s=48)], UNKNOWN, strict_times=False)
    with pytest.raises(NodeFault, match="the time of block 5 is not after that of block 4"):
        check(NODE, [block(4), block(5, time_s=47)], UNKNOWN, strict_times=False)


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
        check(NODE, blocks, link, strict_times=True)
    assert caught.value.node == NODE


def test_a_block_is_read_as_it_was_written() -> None:
    found = read(PAID)
    assert found is not None
    assert (found.number, hex_text(found.hash), hex_text(found.parent_hash)) == (5, PAID["hash"], PAID["parentHash"])
    assert found.timestamp_s == int(PAID["timestamp"], 16)
    assert found.withdrawals == (Withdrawal(0, ValidatorIndex(2), VAULT, 10**9),)
    largest = [Payout(2**40, VAULT, 2**64 - 1), *(Payout(at, VAULT, at) for at in range(200))]
    read_largest = read(mined(*largest))
    assert read_largest is not None
    assert [(paid.validator_index, paid.amount_gwei) for paid in read_largest.withdrawals] == [
        (payout.validator_index, payout.amount_gwei) for payout in largest
    ]
    empty = read(EMPTY)
    assert empty is not None and empty.withdrawals == ()
    assert read({**PAID, "somethingNew": [{"withdrawals": None}]}) == found
    assert read(None) is None


LEFT_OUT = "has only one of the two: a root of its withdrawals, and their list"
OTHER_ROOT = "do not make up the root in its header"
NOT_HASHED = "does not hash to the hash given for it"
OTHER_FORM = "block 5 does not have the known form"
EMPTY_ROOT = hex_text(EMPTY_TRIE_ROOT)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ({**PAID, "withdrawals": None}, LEFT_OUT),
        (without(PAID, "withdrawals"), LEFT_OUT),
        (sealed(without(PAID, "withdrawalsRoot")), LEFT_OUT),
        (without(PAID, "withdrawalsRoot"), NOT_HASHED),
        ({**PAID, "withdrawals": []}, f"the 0 withdrawals of block 5 {OTHER_ROOT}"),
        ({**EMPTY, "withdrawals": PAID["withdrawals"]}, f"the 1 withdrawals of block 5 {OTHER_ROOT}"),
        ({**PAID, "withdrawals": PAID["withdrawals"] * 2}, f"the 2 withdrawals of block 5 {OTHER_ROOT}"),
        (sealed(PAID, withdrawalsRoot=EMPTY_ROOT), OTHER_ROOT),
        ({**PAID, "withdrawalsRoot": EMPTY_ROOT, "withdrawals": []}, NOT_HASHED),
        ({**PAID, "withdrawalsRoot": "0x12"}, NOT_HASHED),
        ({**PAID, "withdrawals": {}}, "the withdrawals of block 5 does not have the known form"),
        ({**PAID, "withdrawals": [None]}, "the withdrawals of block 5 does not have the known form"),
        (mined(Payout(2, VAULT, 10**9), blocks=6), "asked for block 5, it answered with block 6"),
        ({**PAID, "hash": "0x12"}, "the hash of block 5 is '0x12', not 32 hexadecimal bytes"),
        ({**PAID, "timestamp": 60}, OTHER_FORM),
        ({**PAID, "timestamp": "0x1"}, NOT_HASHED),
        ({**PAID, "stateRoot": "0x" + "ab" * 32}, NOT_HASHED),
        (without(PAID, "parentHash"), OTHER_FORM),
        (paying(address="0x" + "01" * 19), "not 20 hexadecimal bytes"),
        (paying(address="0x" + "01" * 21), "not 20 hexadecimal bytes"),
        (paying(address="0x" + "02" * 20), OTHER_ROOT),
        (paying(address=None), "does not have the known form"),
        (paying(amount="0x1" + "0" * 16), "at most 64 bits"),
        (paying(amount="1000000000"), "not a hexadecimal quantity"),
        (paying(amount=10**9), "does not have the known form"),
        (paying(amount="-0x1"), "not a hexadecimal quantity"),
        (paying(amount="0x3b9aca01"), OTHER_ROOT),
        (paying(validatorIndex="0x"), "not a hexadecimal quantity"),
        (paying(validatorIndex="0x3"), OTHER_ROOT),
        (paying(index="0x1" + "0" * 16), "at most 64 bits"),
        (paying(index="0x1"), OTHER_ROOT),
        (paying(index=None), "does not have the known form"),
        ([], OTHER_FORM),
        ("0x5", OTHER_FORM),
    ],
)
def test_another_form_or_content_is_a_fault_and_never_an_empty_list(sent: object, problem: str) -> None:
    with pytest.raises(NodeFault, match="block 5") as caught:
        read(sent)
    assert problem in caught.value.problem
    assert caught.value.node == NODE


def test_without_the_root_check_an_altered_withdrawal_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    root = bytes.fromhex(PAID["withdrawalsRoot"][2:])
    monkeypatch.setattr(wire, "list_root", lambda _: root)
    found = read(paying(amount="0x1"))
    assert found is not None and [paid.amount_gwei for paid in found.withdrawals] == [1]


def test_without_the_header_hash_an_altered_list_with_its_own_root_gets_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = mined(Payout(2, VAULT, 1))
    lie = {**PAID, "withdrawals": other["withdrawals"], "withdrawalsRoot": other["withdrawalsRoot"]}
    with pytest.raises(NodeFault, match=NOT_HASHED):
        read(lie)
    monkeypatch.setattr(wire, "compute_hash", lambda fields: bytes.fromhex(fields.hash[2:]))
    found = read(lie)
    assert found is not None and [paid.amount_gwei for paid in found.withdrawals] == [1]


@pytest.mark.parametrize("missing", [{}, {"withdrawals": None}])
def test_a_block_from_before_withdrawals_says_what_to_do(missing: dict[str, None]) -> None:
    old = sealed(without(EMPTY, "withdrawals", "withdrawalsRoot"))
    with pytest.raises(SourceUnavailable, match=r"before the Capella .* begin at a later one") as caught:
        read({**old, **missing})
    assert not isinstance(caught.value, NodeFault)
