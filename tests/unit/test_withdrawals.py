"""Nothing lost and nothing twice among withdrawals, and one sum for each validator and epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vaultevents.core.chaintime import ChainTime
from vaultevents.core.events import ValidatorWithdrawalCompleted
from vaultevents.core.units import Address, Hash32, Pubkey, ValidatorIndex
from vaultevents.core.withdrawals import IndexGap, Withdrawal, WithdrawalBlock, fold, last_index_after, wanted

pytestmark = pytest.mark.unit

DATA = Path(__file__).parents[1] / "data" / "beacon"
TIME = ChainTime(genesis_s=0, slot_ms=6_000, slots_per_epoch=8)
VAULT = Address(bytes.fromhex("1111aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa2222"))
OTHER = Address(b"\xee" * 20)
VAULTS = frozenset({VAULT})
PUBKEYS = {index: Pubkey(bytes([index]) * 48) for index in range(100)}

Paid = tuple[int, int, Address, int]


def block(number: int, *paid: Paid, slot: int | None = None) -> WithdrawalBlock:
    withdrawals = tuple(Withdrawal(index, ValidatorIndex(validator), to, gwei) for index, validator, to, gwei in paid)
    return WithdrawalBlock(number, Hash32(bytes(32)), Hash32(bytes(32)), 6 * (slot or number), withdrawals)


def recorded(name: str) -> WithdrawalBlock:
    reported = json.loads((DATA / name).read_text())
    payload = reported.get("body", reported)["data"]["message"]["body"]["execution_payload"]
    paid = [
        (
            int(withdrawal["index"]),
            int(withdrawal["validator_index"]),
            Address(bytes.fromhex(withdrawal["address"][2:])),
            int(withdrawal["amount"]),
        )
        for withdrawal in payload["withdrawals"]
    ]
    slot = int(payload["timestamp"]) // 6
    return block(int(payload["block_number"]), *paid, slot=slot)


def sums(blocks: list[WithdrawalBlock]) -> list[tuple[str, str, int, int | None]]:
    reported = []
    for one in fold(blocks, VAULTS, PUBKEYS, TIME):
        assert isinstance(one.payload, ValidatorWithdrawalCompleted)
        reported.append((one.payload.id_suffix("v"), one.payload.data()["amount_eth"], one.at_ms, one.block))
    return reported


def test_indices_that_go_on_within_and_across_blocks_are_proven() -> None:
    blocks = [block(1, (5, 0, VAULT, 1), (6, 1, OTHER, 1)), block(2), block(3, (7, 2, OTHER, 1))]
    assert last_index_after(blocks, 4) == 7
    assert last_index_after(blocks, None) == 7  # the first index read is the baseline
    assert last_index_after([block(2)], 7) == 7
    assert last_index_after([block(2)], None) is None
    assert last_index_after([block(2, (0, 0, VAULT, 1))], None) == 0


@pytest.mark.parametrize(
    ("blocks", "last", "reported"),
    [
        ([block(9, (7, 0, OTHER, 1))], 5, "withdrawal 7 in block 9 leaves a gap after 5"),
        ([block(9, (6, 0, OTHER, 1), (8, 0, OTHER, 1))], 5, "withdrawal 8 in block 9 leaves a gap after 6"),
        (
            [block(8, (6, 0, OTHER, 1)), block(9, (8, 0, OTHER, 1))],
            None,
            "withdrawal 8 in block 9 leaves a gap after 6",
        ),
        ([block(9, (5, 0, OTHER, 1))], 5, "withdrawal 5 in block 9 is there twice or out of order after 5"),
        ([block(8, (6, 0, OTHER, 1)), block(9, (6, 0, OTHER, 1))], 5, "withdrawal 6 in block 9 is there twice"),
        (
            [block(9, (1, 0, OTHER, 1), (0, 0, OTHER, 1))],
            None,
            "withdrawal 0 in block 9 is there twice or out of order",
        ),
        ([block(9, (1, 0, OTHER, 1))], -1, "withdrawal 1 in block 9 leaves a gap after -1"),
    ],
)
def test_a_gap_or_a_repetition_is_named(blocks: list[WithdrawalBlock], last: int | None, reported: str) -> None:
    with pytest.raises(IndexGap, match=reported):
        last_index_after(blocks, last)


def test_several_withdrawals_of_one_validator_in_one_epoch_are_one_sum_at_the_last_block() -> None:
    blocks = [
        block(8, (0, 4, VAULT, 1_000_000_000), (1, 4, VAULT, 2_000_000_000)),
        block(9, (2, 7, VAULT, 5)),
        block(15, (3, 4, VAULT, 1)),
        block(16, (4, 4, VAULT, 2)),  # the next epoch
    ]
    assert sums(blocks) == [
        ("7_1", "0.000000005", 9 * 6000, 9),
        ("4_1", "3.000000001", 15 * 6000, 15),
        ("4_2", "0.000000002", 16 * 6000, 16),
    ]


def test_two_sums_that_end_in_one_block_come_in_the_order_of_their_last_withdrawals() -> None:
    blocks = [block(8, (0, 2, VAULT, 1), (1, 1, VAULT, 1)), block(9, (2, 1, VAULT, 1), (3, 2, VAULT, 1))]
    assert [suffix for suffix, *_ in sums(blocks)] == ["1_1", "2_1"]


def test_foreign_addresses_and_builders_count_for_the_proof_only() -> None:
    blocks = [block(8, (0, 2**40, VAULT, 1), (1, 3, OTHER, 1), (2, 2**40 + 5, VAULT, 1), (3, 2**40 - 1, VAULT, 7))]
    assert last_index_after(blocks, None) == 3
    assert wanted(blocks, VAULTS) == {2**40 - 1}
    (one,) = fold(blocks, VAULTS, {2**40 - 1: PUBKEYS[1]}, TIME)
    assert one.payload.id_suffix("v") == f"{2**40 - 1}_1"


def test_a_validator_that_paid_two_vaults_in_one_epoch_gives_each_its_own() -> None:
    second = Address(b"\x22" * 20)
    blocks = [block(8, (0, 3, VAULT, 1), (1, 3, second, 2))]
    reported = fold(blocks, frozenset({VAULT, second}), PUBKEYS, TIME)
    assert [(observation.address, observation.payload.data()["amount_eth"]) for observation in reported] == [
        (VAULT, "0.000000001"),
        (second, "0.000000002"),
    ]


def test_no_vault_and_no_block_give_nothing() -> None:
    blocks = [block(8, (0, 3, VAULT, 1))]
    assert fold(blocks, frozenset(), PUBKEYS, TIME) == fold([], VAULTS, PUBKEYS, TIME) == []
    assert wanted(blocks, frozenset()) == set()


def test_a_validator_without_a_known_pubkey_is_never_passed_over() -> None:
    with pytest.raises(KeyError):
        fold([block(8, (0, 3, VAULT, 1))], VAULTS, {}, TIME)


def test_blocks_made_by_the_specification() -> None:
    blocks = [recorded(f"pyspec-fulu/block_{number}.json") for number in (1, 80, 95)]
    assert wanted(blocks, VAULTS) == {0, 1, 2, 3, 4}
    assert sums(blocks) == [
        ("0_0", "1.5", 6_000, 1),
        ("4_10", "3", 480_000, 80),  # two requests of 1 and 2 ETH paid in one block
        ("3_10", "0.002264631", 480_000, 80),
        ("1_11", "32.00108597", 570_000, 95),
        ("2_11", "0.00108597", 570_000, 95),
        ("3_11", "0.001047941", 570_000, 95),
    ]
    assert last_index_after(blocks[1:2], 264) == 268
    with pytest.raises(IndexGap, match="withdrawal 325 in block 95 leaves a gap after 268"):
        last_index_after(blocks[1:], None)


def test_a_block_of_a_real_client() -> None:
    full = recorded("lodestar-1.5.1-capella/block_full_withdrawal.json")
    assert last_index_after([full], 417) == 421
    lodestar = ChainTime(genesis_s=1_795_220_907, slot_ms=2_000, slots_per_epoch=8)
    real = WithdrawalBlock(full.number, full.hash, full.parent_hash, 1_795_221_123, full.withdrawals)
    reported = fold([real], VAULTS, PUBKEYS, lodestar)
    assert [
        (observation.payload.id_suffix("v"), observation.payload.data()["amount_eth"]) for observation in reported
    ] == [
        ("0_13", "0.002298773"),
        ("1_13", "32"),
        ("2_13", "0.000502873"),
    ]
