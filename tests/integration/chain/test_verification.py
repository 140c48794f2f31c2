"""What must hold between headers before they are used, and which blocks a bloom rules out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blooms import bloom_of
from vaultevents.chain.execution import verification
from vaultevents.chain.execution.log_range import LogQuery
from vaultevents.core.errors import NodeFault
from vaultevents.core.logs import ETHER_FUNDED, REPORT_UPDATED, TOPICS, WITHDRAWAL_CLAIMED, Header, Log
from vaultevents.core.registry import Watched
from vaultevents.core.units import Address, Hash32

pytestmark = pytest.mark.integration

NODE = "http://node#1"
VAULT, QUEUE, FOREIGN, ORACLE = (Address(bytes([n]) * 20) for n in (1, 2, 3, 4))
WATCHED = Watched(frozenset({VAULT}), frozenset({QUEUE}))
EMPTY, FULL = bytes(256), bytes([255]) * 256


def block_hash(number: int) -> Hash32:
    return Hash32(number.to_bytes(32))


def header(number: int, *logs: Log, time_s: int | None = None) -> Header:
    at_s = 12 * number if time_s is None else time_s
    return Header(
        number, block_hash(number), block_hash(number - 1), at_s, bloom_of(logs), block_hash(0), block_hash(0)
    )


def log(emitter: Address, topic: Hash32) -> Log:
    return Log(emitter, (topic,), bytes(32), 1, block_hash(1), block_hash(77), 0)


@pytest.mark.parametrize("strict_times", [True, False])
def test_linked_headers_with_rising_times_pass_also_with_gaps(strict_times: bool) -> None:
    headers = [header(1), header(2), header(5), header(6)]
    verification.check_links(NODE, headers, strict_times=strict_times)


@pytest.mark.parametrize("strict_times", [True, False])
def test_a_broken_link_is_a_fault_that_names_the_height(strict_times: bool) -> None:
    unlinked = [header(2), replace(header(3), parent_hash=block_hash(9))]
    with pytest.raises(NodeFault, match="block 3 is not linked to block 2") as caught:
        verification.check_links(NODE, unlinked, strict_times=strict_times)
    assert caught.value.node == NODE


@pytest.mark.parametrize(("time_s", "strict_times"), [(24, True), (23, True), (23, False)])
def test_a_time_that_does_not_rise_is_a_fault(time_s: int, strict_times: bool) -> None:
    with pytest.raises(NodeFault, match="time of block 5"):
        verification.check_links(NODE, [header(2), header(5, time_s=time_s)], strict_times=strict_times)


def test_two_blocks_may_have_one_time_where_times_are_not_strict() -> None:
    verification.check_links(NODE, [header(2), header(3, time_s=24)], strict_times=False)


def test_a_bloom_matches_a_pair_only_where_both_its_topic_and_its_address_are_in_it() -> None:
    blooms = verification.BloomMatcher([(ETHER_FUNDED, VAULT), (WITHDRAWAL_CLAIMED, QUEUE)])
    assert blooms.may_hold(bloom_of([log(VAULT, ETHER_FUNDED)]))
    assert blooms.may_hold(bloom_of([log(FOREIGN, WITHDRAWAL_CLAIMED), log(QUEUE, block_hash(5))]))
    assert blooms.may_hold(FULL)
    assert not blooms.may_hold(EMPTY)
    assert not blooms.may_hold(bloom_of([log(FOREIGN, ETHER_FUNDED)]))
    assert not blooms.may_hold(bloom_of([log(QUEUE, ETHER_FUNDED)]))
    assert not verification.BloomMatcher([]).may_hold(FULL)


def test_no_pair_of_many_is_missed() -> None:
    addresses = [Address(n.to_bytes(20)) for n in range(3_000)]
    blooms = verification.BloomMatcher((ETHER_FUNDED, address) for address in addresses)
    assert all(blooms.may_hold(bloom_of([log(address, ETHER_FUNDED)])) for address in addresses)
    others = [Address(n.to_bytes(20)) for n in range(10_000, 11_000)]
    by_chance = sum(blooms.may_hold(bloom_of([log(address, ETHER_FUNDED)])) for address in others)
    assert by_chance < 100


def test_a_header_that_is_not_authentic_rules_nothing_out() -> None:
    query = LogQuery(WATCHED, TOPICS)
    assert not query.may_be_in(header(1)) and not query.topics_may_be_in(header(1))
    unknown = replace(header(1), unknown_fields=("blobSchedule",))
    assert query.may_be_in(unknown) and query.topics_may_be_in(unknown)


def test_a_report_counts_only_where_a_watched_oracle_may_have_published_it() -> None:
    query = LogQuery(Watched(oracles=frozenset({ORACLE})), (*TOPICS, REPORT_UPDATED))
    assert query.topics_may_be_in(header(1, log(ORACLE, REPORT_UPDATED)))
    assert not query.topics_may_be_in(header(1, log(FOREIGN, REPORT_UPDATED)))
    assert query.topics_may_be_in(header(1, log(FOREIGN, ETHER_FUNDED)))
    assert query.keeps((REPORT_UPDATED,), ORACLE) and not query.keeps((REPORT_UPDATED,), FOREIGN)
    assert query.keeps((ETHER_FUNDED,), FOREIGN) and not query.keeps((), FOREIGN)
