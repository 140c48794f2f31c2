"""Which records are of a vault, and which activations and exits follow from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vaultevents.chain.beacon import wire
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.events import ValidatorActivated, ValidatorExited
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32, Pubkey, ValidatorIndex
from vaultevents.core.validators import FAR_FUTURE_EPOCH, ValidatorRecord, observe, validators_head, vault_of

pytestmark = pytest.mark.unit

DATA = Path(__file__).parents[1] / "data" / "beacon" / "pyspec-fulu"
TIME = ChainTime(genesis_s=0, slot_ms=6_000, slots_per_epoch=8)
VAULT = Address(bytes.fromhex("1111aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa2222"))


def record(index: int, activation: int, exit_epoch: int, prefix: bytes = b"\x01") -> ValidatorRecord:
    credentials = Hash32(prefix + bytes(11) + VAULT)
    return ValidatorRecord(ValidatorIndex(index), Pubkey(bytes([index]) * 48), credentials, activation, exit_epoch)


@pytest.mark.parametrize(
    ("credentials", "vault"),
    [
        (b"\x01" + bytes(11) + VAULT, VAULT),
        (b"\x02" + bytes(11) + VAULT, VAULT),
        (b"\x00" + bytes(11) + VAULT, None),  # BLS: 31 bytes of a hash that happen to look like it
        (b"\x03" + bytes(11) + VAULT, None),
        (b"\xb0" + bytes(11) + VAULT, None),  # a builder
        (b"\x01" + bytes(10) + b"\x01" + VAULT, None),
        (b"\x01\x01" + bytes(10) + VAULT, None),
        (b"\x01" + bytes(11) + VAULT[1:], None),
        (b"\x01" + bytes(12) + VAULT, None),
        (b"", None),
    ],
)
def test_only_known_credentials_pay_an_address(credentials: bytes, vault: Address | None) -> None:
    assert vault_of(credentials) == vault


def test_an_activation_and_an_exit_are_reported_at_the_start_of_their_epochs() -> None:
    activated, exited = observe([record(7, 3, 9)], Span(3, 9), TIME)
    assert activated.payload == ValidatorActivated(ValidatorIndex(7), Pubkey(b"\x07" * 48), 3)  # type: ignore[arg-type]
    assert exited.payload == ValidatorExited(ValidatorIndex(7), Pubkey(b"\x07" * 48), 9)  # type: ignore[arg-type]
    assert [one.at_ms for one in (activated, exited)] == [3 * 48_000, 9 * 48_000]
    assert {(one.address, one.block) for one in (activated, exited)} == {(VAULT, None)}


@pytest.mark.parametrize(("span", "expected"), [((4, 8), 0), ((0, 2), 0), ((0, 3), 1), ((9, 9), 1), ((10, 2**63), 0)])
def test_only_epochs_of_the_span_count(span: tuple[int, int], expected: int) -> None:
    assert len(observe([record(7, 3, 9)], Span(*span), TIME)) == expected


def test_an_epoch_that_is_not_known_yet_is_in_no_span() -> None:
    pending = record(7, FAR_FUTURE_EPOCH, FAR_FUTURE_EPOCH)
    assert observe([pending], Span(0, FAR_FUTURE_EPOCH), TIME) == []


def test_observations_come_by_epoch_and_index_whatever_the_order_of_the_records() -> None:
    records = [record(9, 4, 5), record(2, 4, FAR_FUTURE_EPOCH), record(5, 1, 4), record(3, 2, 4, prefix=b"\x00")]
    reported = [(one.payload.event_type, one.payload.id_suffix("v")) for one in observe(records, Span(0, 10), TIME)]
    assert reported == [
        ("validator_activated", "5"),
        ("validator_activated", "2"),
        ("validator_exited", "5"),
        ("validator_activated", "9"),
        ("validator_exited", "9"),
    ]


@pytest.mark.parametrize(("current", "block", "head"), [(20, 16, 20), (20, 15, 19), (20, 30, 20), (0, 0, 0)])
def test_the_head_is_at_most_four_epochs_after_the_finalized_block(current: int, block: int, head: int) -> None:
    assert validators_head(current, block) == head


def test_a_state_made_by_the_specification_gives_its_activations_and_exits() -> None:
    records = wire.validators("node", (DATA / "validators_vault.json").read_bytes())
    reported = [
        (one.payload.event_type, one.payload.id_suffix("v"), one.at_ms // 48_000)
        for one in observe(records, Span(1, 16), TIME)
        if one.address == VAULT
    ]
    assert reported == [
        ("validator_activated", "6", 8),
        ("validator_activated", "7", 8),
        ("validator_exited", "1", 9),
        ("validator_exited", "2", 9),  # consolidated into another one: an exit like any other
    ]
