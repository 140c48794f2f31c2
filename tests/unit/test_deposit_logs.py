"""The form of a deposit's log, and the rule by which finality can move."""

from __future__ import annotations

import pytest

from vaultevents.core.chaintime import ChainTime
from vaultevents.core.deposits import DEPOSIT_EVENT, decode_deposit
from vaultevents.devnet.deposits import DEPOSIT_TOPIC, deposit_log
from vaultevents.devnet.validators import Validator, paying

pytestmark = pytest.mark.unit

PUBKEY, CREDENTIALS = bytes(range(48)), paying(2, b"\x11" * 20)
DATA = deposit_log(Validator(2**33 + 7, PUBKEY, [(0, CREDENTIALS)])).data


def test_a_deposit_is_decoded() -> None:
    assert DEPOSIT_EVENT == DEPOSIT_TOPIC
    assert DEPOSIT_EVENT.hex() == "649bbc62d0e31342afea4e5cd82d4049e7e1ee912fc0889aa790803be39038c5"
    deposit = decode_deposit(DATA)
    assert deposit is not None
    assert (deposit.index, deposit.pubkey, deposit.credentials) == (2**33 + 7, PUBKEY, CREDENTIALS)


@pytest.mark.parametrize("place", [31, 63, 95, 127, 159, 191, 287, 351, 415, 543])
def test_another_layout_is_refused(place: int) -> None:
    assert decode_deposit(DATA[:place] + bytes([DATA[place] ^ 1]) + DATA[place + 1 :]) is None
    assert decode_deposit(DATA[:-1]) is None
    assert decode_deposit(b"") is None


def test_finality_can_move_only_once_an_epoch() -> None:
    time = ChainTime(genesis_s=1000, slot_ms=12_000, slots_per_epoch=32)
    epoch_10_s = time.epoch_start_s(10)
    newest = time.first_slot(8)
    assert not any(time.may_finalize(newest, epoch_10_s + second) for second in range(384))
    assert time.may_finalize(newest, epoch_10_s + 384)
    assert time.may_finalize(newest - 1, epoch_10_s)  # the block of the checkpoint's first slot may come yet
    assert time.may_finalize(0, 999)  # before genesis no clock is right
