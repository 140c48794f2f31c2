"""Ids and bodies of all six event types; docs/events.md shows the same vectors to receivers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vaultevents.core.events import (
    ENCODING,
    EVENT_TYPES,
    Event,
    FundingReceived,
    Observation,
    Payload,
    ReportUpdateAvailable,
    ValidatorActivated,
    ValidatorExited,
    ValidatorWithdrawalCompleted,
    WithdrawalClaimed,
    encode,
    encode_test,
    funding_ids,
    project,
    type_and_account,
)
from vaultevents.core.registry import Owner, Registry, Role, Vault, VaultSpan
from vaultevents.core.units import Address, Epoch, Hash32, Pubkey, ValidatorIndex, Wei, parse_address

pytestmark = pytest.mark.unit

DOCUMENT = Path(__file__).parents[2] / "docs" / "events.md"

VAULT = parse_address("0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266")
QUEUE = parse_address("0x70997970C51812dc3A010C7d01b50e0d17dc79C8")
OWNER = parse_address("0x3C44CdDdB6a900fa2b585dd299e03d12FA4293BC")
RECIPIENT = parse_address("0x90F79bf6EB2c4f870365E785982E1f101E93b906")
TX = Hash32(bytes.fromhex("5c504ed432cb51138bcf09aa5e8a410dd4a1e204ef84bfed1be16dfba1b22060"))
PUBKEY = Pubkey(
    bytes.fromhex("93247f2209abcacf57b75a51dafae777f9dd38bc7053d1af526f220a7489a6d3a2753e5f3e8b1cfe39b56f43611df74a")
)
ACME = Owner("acme", "vault-1")
AT_MS = 1_795_220_907_000


def event(payload: Payload, address: Address = VAULT) -> Event:
    return Event(ACME, Observation(address, 24_089_645, AT_MS, payload))


VECTORS = {
    "funding_received": event(FundingReceived(TX, Wei(1_500_000_000_000_000_001), VAULT, 1)),
    "funding_received, second emitter of its transaction": event(FundingReceived(TX, Wei(2**256 - 1), VAULT, 2)),
    "validator_activated": event(ValidatorActivated(ValidatorIndex(1_234_567), PUBKEY, Epoch(411_000))),
    "validator_exited": event(ValidatorExited(ValidatorIndex(1_234_567), PUBKEY, Epoch(420_500))),
    "validator_withdrawal_completed": event(
        ValidatorWithdrawalCompleted(ValidatorIndex(1_234_567), PUBKEY, Epoch(420_757), Wei(32_012_345_678 * 10**9))
    ),
    "withdrawal_claimed": event(WithdrawalClaimed(TX, 42, RECIPIENT, OWNER, Wei(10**15), QUEUE), QUEUE),
    "report_update_available": event(ReportUpdateAvailable(bytes.fromhex("4c11a509") + bytes(64), 1_795_219_200)),
}


def documented() -> dict[str, tuple[str, bytes]]:
    """The vectors of docs/events.md: heading → id and body bytes."""
    text = DOCUMENT.read_text(encoding="utf-8")
    found = re.findall(r"^### Vector: (.+)\n+```text\n(.+)\n```\n+```json\n(.+)\n```$", text, re.MULTILINE)
    return {name: (event_id, body.encode()) for name, event_id, body in found}


def test_the_document_has_a_vector_for_every_event_type() -> None:
    assert documented().keys() == VECTORS.keys()
    assert {event.event_type for event in VECTORS.values()} == set(EVENT_TYPES)


@pytest.mark.parametrize("name", VECTORS)
def test_id_and_body_are_those_of_the_document(name: str) -> None:
    event_id, body = documented()[name]
    assert VECTORS[name].id == event_id
    assert encode(VECTORS[name]) == body


@pytest.mark.parametrize("name", VECTORS)
def test_a_body_is_compact_and_ordered_like_the_interface(name: str) -> None:
    body = encode(VECTORS[name])
    envelope = json.loads(body)
    assert json.dumps(envelope, separators=(",", ":"), ensure_ascii=False).encode() == body
    assert list(envelope) == [
        "id",
        "account_ref_id",
        "staking_vault_id",
        "event_type",
        "severity",
        "title",
        "message",
        "payload",
        "created_at",
    ]
    assert envelope["created_at"] == AT_MS
    assert "\n" not in envelope["message"]


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(ValueError, match="encoding 2 is not known"):
        encode(VECTORS["validator_exited"], ENCODING + 1)


def vault(account: str, name: str, *spans: VaultSpan, queue: Address | None = None) -> Vault:
    return Vault(account, name, VAULT, queue, spans)


def funded(block: int) -> Observation:
    return Observation(VAULT, block, AT_MS, FundingReceived(TX, Wei(1), VAULT, 1))


def test_each_account_that_registered_a_vault_gets_its_own_event() -> None:
    registry = Registry(
        1, [vault("b", "x", VaultSpan(5)), vault("a", "y", VaultSpan(5)), vault("c", "z", VaultSpan(9))]
    )
    events = project(funded(7), registry)
    assert [(e.owner.account_id, e.owner.vault_id) for e in events] == [("a", "y"), ("b", "x")]
    assert len({e.id for e in events}) == 2


@pytest.mark.parametrize(
    ("block", "there"), [(4, False), (5, True), (8, True), (9, False), (11, False), (12, True), (10**9, True)]
)
def test_an_event_exists_only_inside_a_span(block: int, there: bool) -> None:
    registry = Registry(1, [vault("a", "v", VaultSpan(5, 8), VaultSpan(12))])
    assert bool(project(funded(block), registry)) is there


def test_overlapping_spans_of_one_vault_give_one_event() -> None:
    registry = Registry(1, [vault("a", "v", VaultSpan(1, 8), VaultSpan(4))])
    assert len(project(funded(6), registry)) == 1


def test_a_claim_belongs_to_whoever_registered_the_queue_not_the_vault() -> None:
    claim = Observation(QUEUE, 7, AT_MS, WithdrawalClaimed(TX, 1, RECIPIENT, OWNER, Wei(0), QUEUE))
    registry = Registry(1, [vault("a", "v", VaultSpan(1)), vault("b", "w", VaultSpan(1), queue=QUEUE)])
    assert [e.owner.account_id for e in project(claim, registry)] == ["b"]
    assert registry.owners(Role.VAULT, QUEUE, 7, AT_MS) == []


@pytest.mark.parametrize(("at_s", "there"), [(99, False), (100, True), (150, True), (200, True), (201, False)])
def test_what_has_only_a_time_lies_in_a_span_by_the_times_of_its_ends(at_s: int, there: bool) -> None:
    exit_ = ValidatorExited(ValidatorIndex(1), PUBKEY, Epoch(3))
    observation = Observation(VAULT, None, at_s * 1000, exit_)
    closed = VaultSpan(5, 9, first_time_s=100, last_time_s=200)
    assert bool(project(observation, Registry(1, [vault("a", "v", closed)]))) is there
    still_open = VaultSpan(5, first_time_s=100)
    assert bool(project(observation, Registry(1, [vault("a", "v", still_open)]))) is (at_s >= 100)
    assert project(observation, Registry(1, [vault("a", "v", VaultSpan(5))])) == []


def test_events_before_the_delivery_start_are_quiet() -> None:
    registry = Registry(1, [vault("a", "v", VaultSpan(1, None, deliver_from=10))])
    assert [project(funded(block), registry)[0].owner.suppressed for block in (9, 10)] == [True, False]


def test_what_test_sends_has_the_form_of_an_event_and_the_type_of_none() -> None:
    test_id, body = encode_test("acme", "vault-1", "wh-1", "0a1b", AT_MS)
    envelope = json.loads(body)
    assert list(envelope) == list(json.loads(encode(VECTORS["validator_exited"])))
    assert test_id == envelope["id"] == "webhook_test_acme_0a1b"
    assert (envelope["account_ref_id"], envelope["staking_vault_id"], envelope["created_at"]) == (
        "acme",
        "vault-1",
        AT_MS,
    )
    assert envelope["event_type"] not in EVENT_TYPES


def test_an_id_names_its_type_and_its_account() -> None:
    assert type_and_account("funding_received_a-b_0XAB_2") == ("funding_received", "a-b")
    assert type_and_account("validator_withdrawal_completed_a_7_9") == ("validator_withdrawal_completed", "a")
    for text in ("", "funding_received", "funding_received__0X", "other_a_1", "funding_received_a_"):
        assert type_and_account(text) is None


def test_ids_of_fundings_are_derived_from_their_transaction() -> None:
    tx_hash = Hash32(bytes(range(32)))
    made = [FundingReceived(tx_hash, Wei(1), Address(bytes(20)), position).id_suffix("v") for position in (1, 2, 3)]
    assert funding_ids("acme", tx_hash, 3) == [f"funding_received_acme_{suffix}" for suffix in made]
