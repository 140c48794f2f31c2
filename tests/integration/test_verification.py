"""What must hold between the headers and the logs of a node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vaultevents.chain import proofs
from vaultevents.chain.wire import Sighting
from vaultevents.core.errors import NodeFault
from vaultevents.core.logs import ETHER_FUNDED, WITHDRAWAL_CLAIMED, Header, Log, bloom_of
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32, hex_text

pytestmark = pytest.mark.integration

NODE = "http://node#1"
VAULT, QUEUE, FOREIGN = (Address(bytes([n]) * 20) for n in (1, 2, 3))
WATCHED = Watched(frozenset({VAULT}), frozenset({QUEUE}))


def block_hash(number: int) -> Hash32:
    return Hash32(number.to_bytes(32))


def header(number: int, *logs: Log, time_s: int | None = None) -> Header:
    at_s = 12 * number if time_s is None else time_s
    return Header(number, block_hash(number), block_hash(number - 1), at_s, bloom_of(logs))


def sighting(number: int, *, emitter: Address = VAULT, index: int = 0, time_s: int | None = None) -> Sighting:
    topics = (WITHDRAWAL_CLAIMED if emitter == QUEUE else ETHER_FUNDED,)
    return Sighting(Log(emitter, topics, bytes(32), number, block_hash(number), block_hash(77), index, time_s), 0)


def changed(one: Sighting, **fields: object) -> Sighting:
    return replace(one, log=replace(one.log, **fields))  # type: ignore[arg-type]


def test_linked_headers_with_rising_times_pass_also_with_gaps() -> None:
    proofs.check_headers(NODE, [header(1), header(2), header(5), header(6)])


def test_a_broken_link_is_a_fault_that_names_the_height() -> None:
    with pytest.raises(NodeFault, match="block 3 is not linked to block 2"):
        proofs.check_headers(NODE, [header(2), replace(header(3), parent_hash=block_hash(9))])


@pytest.mark.parametrize("time_s", [24, 23])
def test_time_that_stands_still_or_goes_back_is_a_fault(time_s: int) -> None:
    with pytest.raises(NodeFault, match="time of block 5"):
        proofs.check_headers(NODE, [header(2), header(5, time_s=time_s)])


def test_right_logs_pass_whoever_emitted_them() -> None:
    found = [sighting(1), sighting(1, emitter=FOREIGN, index=1), sighting(2, emitter=QUEUE)]
    headers = {n: header(n, *(one.log for one in found)) for n in (1, 2)}
    proofs.check_logs(NODE, found, Span(1, 2), headers)


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        ({"topics": ()}, "topic that was not asked"),
        ({"topics": (block_hash(5),)}, "topic that was not asked"),
        ({"block_number": 4}, "outside of the blocks 1..2"),
        ({"block_hash": block_hash(8)}, "another block hash"),
        ({"address": FOREIGN}, "not in that block's bloom"),
    ],
)
def test_a_lie_in_a_log_is_a_fault(lie: dict[str, object], problem: str) -> None:
    right = sighting(1)
    with pytest.raises(NodeFault, match=problem):
        proofs.check_logs(NODE, [changed(right, **lie)], Span(1, 2), {1: header(1, right.log)})


def test_a_log_that_comes_twice_is_a_fault() -> None:
    with pytest.raises(NodeFault, match="log 0 of block 1 is there twice"):
        proofs.check_logs(NODE, [sighting(1), sighting(1)], Span(1, 2), {})


def test_without_a_header_the_logs_of_a_block_must_agree_on_its_hash() -> None:
    other = changed(sighting(1, index=1), block_hash=block_hash(8))
    with pytest.raises(NodeFault, match="another block hash"):
        proofs.check_logs(NODE, [sighting(1), other], Span(1, 2), {})


def test_a_transaction_must_stand_where_its_log_says() -> None:
    right = sighting(1)
    proofs.check_transactions(NODE, [right], [hex_text(block_hash(77))])
    for numbers in ([], [78], [78, 77]):
        with pytest.raises(NodeFault, match="is not number 0 of block 1"):
            proofs.check_transactions(NODE, [right], [hex_text(block_hash(number)) for number in numbers])


def test_a_bloom_is_suspicious_exactly_while_a_watched_pair_in_it_has_no_log() -> None:
    pairs = proofs.WatchedPairs(WATCHED)
    both = [sighting(1), sighting(1, emitter=QUEUE, index=1)]
    full = header(1, *(one.log for one in both))
    assert proofs.unanswered(pairs.held_by(full.logs_bloom), [])
    assert proofs.unanswered(pairs.held_by(full.logs_bloom), both[:1])
    assert not proofs.unanswered(pairs.held_by(full.logs_bloom), both)
    assert not pairs.held_by(header(1).logs_bloom)
    assert not pairs.held_by(header(1, sighting(1, emitter=FOREIGN).log).logs_bloom)


def test_the_pairs_are_vaults_with_fundings_and_queues_with_claims() -> None:
    assert set(proofs.WatchedPairs(WATCHED).held_by(bytes([255] * 256))) == {
        (ETHER_FUNDED, VAULT),
        (WITHDRAWAL_CLAIMED, QUEUE),
    }


def test_the_share_of_proven_blocks_is_a_function_of_the_hash() -> None:
    hashes = [Hash32(bytes([n, m]) + bytes(30)) for n in range(256) for m in range(0, 256, 16)]
    chosen = [one for one in hashes if proofs.is_chosen(one, 0.05)]
    assert 0.04 < len(chosen) / len(hashes) < 0.06
    assert chosen == [one for one in hashes if proofs.is_chosen(one, 0.05)]
    assert all(proofs.is_chosen(one, 1.0) for one in [*hashes, Hash32(b"\xff" * 32)])
    assert not any(proofs.is_chosen(one, 0.0) for one in hashes)


def test_answers_agree_whatever_their_order_and_time_fields() -> None:
    first, second = sighting(1, time_s=12), sighting(1, emitter=QUEUE, index=1)
    assert proofs.difference([first, second], [second, sighting(1)]) is None
    assert proofs.difference([first], [first, second])
    assert proofs.difference([first], [changed(first, data=b"\x01" * 32)])
    assert proofs.difference([first], [replace(first, tx_index=1)])


def test_all_logs_of_a_block_must_rebuild_its_bloom() -> None:
    ours = sighting(1)
    other = changed(sighting(1, emitter=FOREIGN, index=1), topics=(block_hash(5),))
    full = header(1, ours.log, other.log)
    assert proofs.full_difference(full, [ours], [ours, other]) is None
    assert "do not make up" in str(proofs.full_difference(full, [ours], [ours]))
    assert "differ" in str(proofs.full_difference(full, [], [ours, other]))
    strange = changed(other, block_hash=block_hash(9))
    assert "another block" in str(proofs.full_difference(full, [ours], [ours, strange]))


def test_given_times_stand_for_headers_only_between_known_ends_and_rising() -> None:
    ends = [header(1), header(9)]

    def times(*found: Sighting) -> dict[int, int]:
        return proofs.usable_times(ends, proofs.by_block(found))

    assert times(sighting(3, time_s=36), sighting(5, time_s=60)) == {1: 12, 3: 36, 5: 60, 9: 108}
    assert 3 not in times(sighting(3), sighting(5, time_s=60))
    assert 3 not in times(sighting(3, time_s=36), sighting(3, index=1, time_s=37))
    assert times(sighting(3, time_s=60), sighting(5, time_s=60)) == {}
    assert times(sighting(3, time_s=108)) == {}
    assert times(sighting(3, time_s=12)) == {}
    assert times(sighting(9, time_s=107)) == {}
