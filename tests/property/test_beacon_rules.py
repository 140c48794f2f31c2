"""Times, activations, exits and withdrawals: cutting the work differently never changes what comes out."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaultevents.core.chaintime import ChainTime
from vaultevents.core.events import Observation, ValidatorWithdrawalCompleted
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32, Pubkey, ValidatorIndex
from vaultevents.core.validators import FAR_FUTURE_EPOCH, ValidatorRecord, observe
from vaultevents.core.withdrawals import IndexGap, Withdrawal, WithdrawalBlock, fold, last_index_after, wanted

pytestmark = pytest.mark.property

ADDRESSES = [Address(bytes([at]) * 20) for at in range(1, 5)]
VAULTS = frozenset(ADDRESSES[:2])
PUBKEYS = {index: Pubkey(bytes([index]) * 48) for index in range(6)}
FAST = ChainTime(0, 6_000, 4)

times = st.builds(ChainTime, st.integers(0, 2**33), st.integers(1, 60_000), st.integers(1, 64))
records = st.lists(
    st.builds(
        lambda index, prefix, vault, first, last: ValidatorRecord(
            ValidatorIndex(index), PUBKEYS[index], Hash32(prefix + bytes(11) + vault), first, last
        ),
        st.integers(0, 5),
        st.sampled_from([b"\x00", b"\x01", b"\x02"]),
        st.sampled_from(ADDRESSES),
        st.integers(0, 20) | st.just(FAR_FUTURE_EPOCH),
        st.integers(0, 20) | st.just(FAR_FUTURE_EPOCH),
    ),
    max_size=8,
)


@st.composite
def chains(draw: st.DrawFn) -> list[WithdrawalBlock]:
    """Blocks with missed slots and a gapless index of withdrawals."""
    index, slot, blocks = draw(st.integers(0, 1000)), 0, []
    for number in range(1, draw(st.integers(1, 14)) + 1):
        slot += draw(st.integers(1, 6))
        paid = []
        for _ in range(draw(st.integers(0, 4))):
            validator = draw(st.integers(0, 5) | st.just(2**40))
            to, gwei = draw(st.sampled_from(ADDRESSES)), draw(st.integers(1, 2**50))
            paid.append(Withdrawal(index, ValidatorIndex(validator), to, gwei))
            index += 1
        blocks.append(WithdrawalBlock(number, Hash32(bytes(32)), Hash32(bytes(32)), slot * 6, tuple(paid)))
    return blocks


@given(times, st.integers(0, 2**20))
def test_the_first_second_of_an_epoch_is_the_first_in_it(time: ChainTime, epoch: int) -> None:
    start_s = time.epoch_start_s(epoch)
    assert time.epoch_at(start_s) >= epoch
    assert start_s == time.genesis_s or time.epoch_at(start_s - 1) < epoch or epoch == 0
    assert 0 <= start_s * 1000 - time.epoch_start_ms(epoch) < 1000


@given(times, st.integers(0, 2**32))
def test_a_moment_lies_in_its_slot_and_its_epoch(time: ChainTime, after_s: int) -> None:
    slot = time.slot_at(time.genesis_s + after_s)
    assert slot * time.slot_ms <= after_s * 1000 < (slot + 1) * time.slot_ms
    epoch = time.epoch_at(time.genesis_s + after_s)
    assert time.first_slot(epoch) <= slot < time.first_slot(epoch + 1)


@given(records, st.integers(0, 19))
def test_two_spans_report_what_a_single_span_reports(found: list[ValidatorRecord], cut: int) -> None:
    apart = observe(found, Span(0, cut), FAST) + observe(found, Span(cut + 1, 20), FAST)
    assert apart == observe(found, Span(0, 20), FAST)


@given(records)
def test_every_known_epoch_of_a_paying_record_is_reported_once(found: list[ValidatorRecord]) -> None:
    paying = [record for record in found if record.credentials[0] in (1, 2)]
    known = sum(
        epoch != FAR_FUTURE_EPOCH for record in paying for epoch in (record.activation_epoch, record.exit_epoch)
    )
    assert len(observe(found, Span(0, 20), FAST)) == known


@given(chains())
def test_sums_equal_a_count_by_hand(blocks: list[WithdrawalBlock]) -> None:
    gwei: dict[tuple[Address, int, int], int] = defaultdict(int)
    last: dict[tuple[Address, int, int], WithdrawalBlock] = {}
    for block in blocks:
        for withdrawal in block.withdrawals:
            if withdrawal.address in VAULTS and withdrawal.validator_index != 2**40:
                key = (withdrawal.address, withdrawal.validator_index, block.timestamp_s // 6 // 4)
                gwei[key] += withdrawal.amount_gwei
                last[key] = block
    reported = fold(blocks, VAULTS, PUBKEYS, FAST)
    assert {key_of(observation): amount_gwei(observation) for observation in reported} == gwei
    assert len(reported) == len(gwei)
    assert all(
        (observation.block, observation.at_ms)
        == (last[key_of(observation)].number, last[key_of(observation)].timestamp_s * 1000)
        for observation in reported
    )
    assert [observation.block for observation in reported] == sorted(observation.block or 0 for observation in reported)
    assert wanted(blocks, VAULTS) == {index for _, index, _ in gwei}


@given(chains(), st.integers(1, 19))
def test_folding_whole_epochs_apart_gives_the_same(blocks: list[WithdrawalBlock], epoch: int) -> None:
    before = [block for block in blocks if FAST.epoch_at(block.timestamp_s) < epoch]
    after = blocks[len(before) :]
    apart = fold(before, VAULTS, PUBKEYS, FAST) + fold(after, VAULTS, PUBKEYS, FAST)
    assert apart == fold(blocks, VAULTS, PUBKEYS, FAST)


@given(chains(), st.integers(0, 14))
def test_the_proof_goes_on_across_any_cut(blocks: list[WithdrawalBlock], cut: int) -> None:
    whole = last_index_after(blocks, None)
    assert last_index_after(blocks[cut:], last_index_after(blocks[:cut], None)) == whole


@given(chains(), st.data())
def test_one_withdrawal_lost_doubled_or_swapped_is_never_missed(
    blocks: list[WithdrawalBlock], data: st.DataObject
) -> None:
    flat = [(at, withdrawal) for at, block in enumerate(blocks) for withdrawal in block.withdrawals]
    if len(flat) < 2:
        return
    victim = data.draw(st.integers(0, len(flat) - 2))
    fault = data.draw(st.sampled_from(["lost", "doubled", "swapped"]))
    if fault == "lost":
        changed = flat[:victim] + flat[victim + 1 :]
    elif fault == "doubled":
        changed = flat[: victim + 1] + flat[victim:]
    else:
        (at, one), (beside, other) = flat[victim], flat[victim + 1]
        changed = [*flat[:victim], (at, other), (beside, one), *flat[victim + 2 :]]
    broken = [
        WithdrawalBlock(
            block.number, block.hash, block.parent_hash, 0, tuple(one for where, one in changed if where == at)
        )
        for at, block in enumerate(blocks)
    ]
    with pytest.raises(IndexGap, match="block"):
        last_index_after(broken, flat[0][1].index - 1)


def key_of(observation: Observation) -> tuple[Address, int, int]:
    payload = observation.payload
    assert isinstance(payload, ValidatorWithdrawalCompleted)
    return observation.address, payload.validator_index, payload.epoch


def amount_gwei(observation: Observation) -> int:
    assert isinstance(observation.payload, ValidatorWithdrawalCompleted)
    amount, rest = divmod(observation.payload.amount_wei, 10**9)
    assert rest == 0
    return amount
