"""From raw logs to observations: the fold by (vault, transaction) and the `_n` rule (rule E3), claims, rule C8."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from blooms import bloom_of
from vaultevents.core.events import FundingReceived, WithdrawalClaimed, project
from vaultevents.core.logs import ETHER_FUNDED, WITHDRAWAL_CLAIMED, Folded, Log, bloom_may_hold, fold, owned
from vaultevents.core.registry import Registry, Vault, VaultSpan, Watched
from vaultevents.core.units import Address, Hash32

pytestmark = pytest.mark.unit

A, B, C, X, QUEUE, PERSON = (Address(bytes([n]) * 20) for n in range(1, 7))
TX, OTHER_TX = Hash32(b"\x11" * 32), Hash32(b"\x22" * 32)
TIMES = {7: 1_700_000_000, 8: 1_700_000_012}


def topic(address: Address) -> Hash32:
    return Hash32(bytes(12) + address)


def funded(vault: Address, amount: int, index: int, tx: Hash32 = TX, block: int = 7) -> Log:
    return Log(vault, (ETHER_FUNDED,), amount.to_bytes(32), block, Hash32(bytes(32)), tx, index)


def claimed(queue: Address, request_id: int, index: int) -> Log:
    topics = (WITHDRAWAL_CLAIMED, Hash32(request_id.to_bytes(32)), topic(PERSON), topic(X))
    return Log(queue, topics, (5).to_bytes(32), 7, Hash32(bytes(32)), TX, index)


def watching(*vaults: Address, queues: tuple[Address, ...] = ()) -> Watched:
    return Watched(frozenset(vaults), frozenset(queues))


def test_the_topics_are_those_of_the_contracts() -> None:
    assert ETHER_FUNDED.hex() == "4d0a0f381b6ff1c2de8626566279f8cf649198694a36b4e0276b5ad82d837415"
    assert WITHDRAWAL_CLAIMED.hex() == "6ad26c5e238e7d002799f9a5db07e81ef14e37386ae03496d7a7ef04713e145b"


def test_a_vault_funded_twice_in_a_transaction_is_one_observation_with_the_sum() -> None:
    (seen,) = fold([funded(A, 3, 0), funded(A, 4, 1)], TIMES, watching(A)).observations
    assert seen.payload == FundingReceived(TX, 7, A, 1)  # type: ignore[arg-type]
    assert (seen.address, seen.block, seen.at_ms) == (A, 7, 1_700_000_000_000)


def test_positions_count_every_emitter_whoever_is_registered() -> None:
    logs = [funded(X, 9, 0), funded(A, 1, 1), funded(B, 2, 2), funded(A, 5, 3)]
    everyone = {o.address: o.payload for o in fold(logs, TIMES, watching(X, A, B)).observations}
    assert everyone == {
        X: FundingReceived(TX, 9, X, 1),  # type: ignore[arg-type]
        A: FundingReceived(TX, 6, A, 2),  # type: ignore[arg-type]
        B: FundingReceived(TX, 2, B, 3),  # type: ignore[arg-type]
    }
    for alone in (A, B, X):
        (seen,) = fold(logs, TIMES, watching(alone)).observations
        assert seen.payload == everyone[alone]


def test_three_vaults_in_one_transaction_get_ids_without_suffix_then_2_then_3() -> None:
    logs = [funded(A, 1, 0), funded(B, 1, 1), funded(C, 1, 2)]
    ids: dict[Address, str] = {}
    for order in ([A, B, C], [C, B, A], [B], [C, A]):
        vaults = [Vault("acme", f"v{vault.hex()[:2]}", vault, None, (VaultSpan(0),)) for vault in order]
        for observation in fold(logs, TIMES, watching(*order)).observations:
            (event,) = project(observation, Registry(1, vaults))
            assert ids.setdefault(observation.address, event.id) == event.id
    plain = "funding_received_acme_0X" + "11" * 32
    assert ids == {A: plain, B: plain + "_2", C: plain + "_3"}


def test_the_same_vault_in_two_transactions_is_two_observations_in_chain_order() -> None:
    logs = [funded(A, 2, 0, OTHER_TX, block=8), funded(A, 1, 5)]
    assert [o.payload.amount_wei for o in fold(logs, TIMES, watching(A)).observations] == [1, 2]  # type: ignore[union-attr]


def test_the_order_in_which_a_node_lists_logs_does_not_matter() -> None:
    logs = [funded(X, 9, 0), funded(A, 1, 1), claimed(QUEUE, 4, 2), funded(B, 2, 3), claimed(QUEUE, 5, 4)]
    want = fold(logs, TIMES, watching(A, B, queues=(QUEUE,)))
    for seed in range(20):
        shuffled = random.Random(seed).sample(logs, len(logs))
        assert fold(shuffled, TIMES, watching(A, B, queues=(QUEUE,))) == want


def test_a_claim_keeps_owner_and_recipient_apart() -> None:
    (seen,) = fold([claimed(QUEUE, 42, 0)], TIMES, watching(queues=(QUEUE,))).observations
    assert seen.payload == WithdrawalClaimed(TX, 42, recipient=X, owner=PERSON, amount_wei=5, queue=QUEUE)  # type: ignore[arg-type]


def test_a_claim_of_an_unwatched_queue_and_of_a_vault_is_nothing() -> None:
    assert fold([claimed(X, 42, 0), claimed(A, 1, 1)], TIMES, watching(A, queues=(QUEUE,))) == Folded([], [])


@pytest.mark.parametrize(
    "change",
    [
        {"data": b""},
        {"data": bytes(64)},
        {"topics": (ETHER_FUNDED, Hash32(bytes(32)))},
    ],
)
def test_a_watched_log_of_another_form_is_withheld_and_an_unwatched_log_is_ignored(change: dict[str, object]) -> None:
    odd = replace(funded(A, 1, 0), **change)  # type: ignore[arg-type]
    folded = fold([odd, funded(B, 1, 1)], TIMES, watching(A, B))
    assert [entry.log for entry in folded.undecodable] == [odd]
    assert f"{len(odd.topics)} topics and {len(odd.data)} bytes" in folded.undecodable[0].reason
    (seen,) = folded.observations
    assert (seen.address, seen.payload.position) == (B, 2)  # type: ignore[union-attr]
    assert fold([odd, funded(B, 1, 1)], TIMES, watching(B)) == Folded([seen], [])


def test_a_claim_with_dirt_above_an_address_is_withheld_and_the_others_are_not() -> None:
    good = claimed(QUEUE, 1, 0)
    dirty = replace(good, topics=(*good.topics[:3], Hash32(b"\x01" * 32)), log_index=1)
    folded = fold([dirty, claimed(QUEUE, 2, 2), good], TIMES, watching(queues=(QUEUE,)))
    assert [seen.payload.request_id for seen in folded.observations] == [1, 2]  # type: ignore[union-attr]
    (entry,) = folded.undecodable
    assert entry.log == dirty
    assert "where an address belongs" in entry.reason


def test_a_claim_without_indexed_arguments_is_withheld() -> None:
    odd = replace(claimed(QUEUE, 1, 0), topics=(WITHDRAWAL_CLAIMED,), data=bytes(128))
    (entry,) = fold([odd], TIMES, watching(queues=(QUEUE,))).undecodable
    assert entry.reason == "it has 1 topics and 128 bytes of data, not 4 and 32"


@pytest.mark.parametrize("odd_at", [0, 1, 2])
def test_all_of_a_vault_in_a_transaction_is_withheld_when_one_log_is_undecodable(odd_at: int) -> None:
    parts = [funded(A, n + 1, 2 * n) for n in range(3)]
    parts[odd_at] = replace(parts[odd_at], data=b"")
    others = [funded(B, 5, 1), funded(A, 7, 9, OTHER_TX)]
    folded = fold([*others, *parts], TIMES, watching(A, B))
    assert [entry.log for entry in folded.undecodable] == parts
    known = {entry.reason for at, entry in enumerate(folded.undecodable) if at != odd_at}
    assert known == {f"log {2 * odd_at} of the same vault in the same transaction cannot be decoded"}
    assert [(seen.address, seen.payload) for seen in folded.observations] == [
        (B, FundingReceived(TX, 5, B, 2)),  # type: ignore[arg-type]
        (A, FundingReceived(OTHER_TX, 7, A, 1)),  # type: ignore[arg-type]
    ]


def test_an_undecodable_log_belongs_to_nobody_outside_of_the_spans_of_its_vault() -> None:
    vault = Vault("acme", "a", A, QUEUE, (VaultSpan(8),))
    odd = [replace(funded(A, 1, 0, block=block), data=b"") for block in (7, 8)]
    claims = [replace(claimed(QUEUE, 1, 1), data=b"", block_number=block) for block in (7, 8)]
    folded = fold([*odd, *claims], TIMES, watching(A, queues=(QUEUE,)))
    assert len(folded.undecodable) == 4
    assert [entry.log for entry in owned(folded.undecodable, Registry(1, [vault]))] == [odd[1], claims[1]]


def test_a_bloom_holds_what_was_logged_and_proves_absence() -> None:
    bloom = bloom_of([funded(A, 1, 0)])
    assert bloom_may_hold(bloom, A, ETHER_FUNDED)
    assert not bloom_may_hold(bloom, B, ETHER_FUNDED)
    assert not bloom_may_hold(bytes(256), ETHER_FUNDED)
    assert bloom_may_hold(b"\xff" * 256, B, WITHDRAWAL_CLAIMED)
