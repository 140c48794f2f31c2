"""Slots and epochs at their edges."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vaultevents.core.chaintime import ChainTime

pytestmark = pytest.mark.unit

MAINNET = ChainTime(genesis_s=1_606_824_023, slot_ms=12_000, slots_per_epoch=32)
ODD = ChainTime(genesis_s=1000, slot_ms=6_400, slots_per_epoch=3)  # no epoch but every fifth begins on a whole second


def test_known_moments_of_mainnet() -> None:
    assert MAINNET.epoch_of(6_209_536) == 194_048  # Capella: slot 6209536, 12 April 2023, 22:27:35 UTC
    assert MAINNET.epoch_start_s(194_048) == 1_681_338_455
    assert MAINNET.epoch_start_ms(194_048) == 1_681_338_455_000
    assert MAINNET.slot_at(1_681_338_455) == 6_209_536
    assert MAINNET.first_slot(194_048) == 6_209_536


@pytest.mark.parametrize(("time_s", "epoch"), [(0, 0), (383, 0), (384, 1), (767, 1), (768, 2)])
def test_an_epoch_begins_with_its_first_slot(time_s: int, epoch: int) -> None:
    assert MAINNET.epoch_at(MAINNET.genesis_s + time_s) == epoch


def test_a_start_between_two_seconds_is_rounded_up_to_the_first_that_is_in_the_epoch() -> None:
    assert ODD.epoch_start_ms(1) == 1_019_200
    assert ODD.epoch_start_s(1) == 1_020
    assert [ODD.epoch_at(second) for second in (1_019, 1_020)] == [0, 1]
    assert ODD.epoch_start_s(5) == 1_096  # a whole second is kept


def test_there_is_nothing_before_genesis() -> None:
    assert MAINNET.slot_at(MAINNET.genesis_s) == 0
    impossible: list[Callable[[], int]] = [
        lambda: MAINNET.slot_at(MAINNET.genesis_s - 1),
        lambda: MAINNET.epoch_at(0),
        lambda: MAINNET.epoch_of(-1),
        lambda: MAINNET.first_slot(-1),
        lambda: MAINNET.epoch_start_ms(-1),
    ]
    for wrong in impossible:
        with pytest.raises(ValueError, match=r"before genesis|there is no"):
            wrong()


@pytest.mark.parametrize("lengths", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_a_chain_without_time_is_refused(lengths: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="not the time of a chain"):
        ChainTime(*lengths)
