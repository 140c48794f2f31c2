"""How many attempts a webhook and an account may have in flight (`dispatch.policy`)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaultevents.dispatch.policy import SCARCE, SHARED_FROM, Bursts, SlotPolicy, WebhookLimit
from vaultevents.store.deliveries import NO_LIMITS, Delivery, Target

pytestmark = pytest.mark.property

HOOK = Target("wh", "https://x.example/", (), "acme")

answers = st.lists(st.tuples(st.booleans(), st.floats(0, 20), st.floats(0, 100)), max_size=300)


@given(answers, st.integers(1, 50), st.integers(1, 300))
def test_a_limit_stays_between_its_bounds(given: list[tuple[bool, float, float]], floor: int, most: int) -> None:
    limit = WebhookLimit(floor)
    for accepted, took_s, began_at_s in given:
        before = limit.slots
        if accepted:
            limit.accept(took_s, began_at_s, floor, most)
        else:
            limit.halve(began_at_s, began_at_s + took_s, floor)
            assert limit.slots <= before
        assert floor <= limit.slots <= max(floor, most)


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "accepted", "failed"]), st.integers(0, 3)), max_size=200))
def test_what_is_counted_is_what_is_in_flight_and_nothing_is_kept_of_the_rest(steps: list[tuple[str, int]]) -> None:
    policy, flying = SlotPolicy(100, 2, 9), dict.fromkeys(range(4), 0)
    targets = [Target(f"w{number}", "", (), f"a{number % 2}") for number in range(4)]
    for step, number in steps:
        if step == "begin":
            policy.begin(targets[number])
            flying[number] += 1
        elif flying[number] and step == "end":
            policy.end(targets[number])
            flying[number] -= 1
        elif flying[number]:
            getattr(policy, step)(f"w{number}", 1.0, 1.1)
        assert policy.in_flight == sum(flying.values())
        assert all(2 <= slots <= 9 and flying[int(name[1:])] for name, slots in policy.limits(0).webhooks.items())
        assert 0 <= policy.room(0) <= max(100 - policy.in_flight, 0)


def simulate(answer: Callable[[int], tuple[bool, float]], deliveries: int, most: int = 256) -> tuple[int, float, int]:
    """One webhook with a deep queue against a receiver; `answer(at once)` is whether it accepts, and the seconds.

    Returns the refusals, the seconds in all and the most that were in flight at once.
    """
    policy, now_s, refused, peak = SlotPolicy(4096, 10, most), 0.0, 0, 0
    flying: list[tuple[float, float, bool]] = []
    for _ in range(deliveries):
        while len(flying) >= policy.slots("wh"):
            now_s, began_at_s, accepts = heapq.heappop(flying)
            (policy.accepted if accepts else policy.failed)("wh", began_at_s, now_s)
            policy.end(HOOK)
            refused += not accepts
        accepts, took_s = answer(sum(one[2] for one in flying))
        policy.begin(HOOK)
        heapq.heappush(flying, (now_s + took_s, now_s, accepts))
        peak = max(peak, len(flying))
    return refused, now_s, peak


def test_a_prompt_receiver_gets_all_it_may_have() -> None:
    refused, seconds, peak = simulate(lambda _: (True, 0.05), 60_000)
    assert (refused, peak) == (0, 256)
    assert 60_000 / seconds > 3_000


def test_one_that_refuses_what_exceeds_twenty_is_hardly_ever_asked_for_more() -> None:
    refused, _, peak = simulate(lambda at_once: (at_once < 20, 0.05 if at_once < 20 else 0.001), 20_000)
    assert refused / 20_000 < 0.05
    assert peak <= 25


@pytest.mark.parametrize("took_s", [0.6, 3.0])
def test_one_that_answers_slowly_gets_no_more_than_at_first(took_s: float) -> None:
    _, _, peak = simulate(lambda _: (True, took_s), 1_000)
    assert peak == 10


def test_an_equal_bound_switches_the_growth_off() -> None:
    _, _, peak = simulate(lambda _: (True, 0.05), 1_000, most=10)
    assert peak == 10


@given(st.integers(SHARED_FROM, 5_000), st.integers(1, 6))
def test_some_slots_stay_free_however_many_accounts_take_all_they_get(concurrency: int, accounts: int) -> None:
    policy = SlotPolicy(concurrency, 10, 256)
    for _ in range(200):
        closed = policy.limits(0).closed_accounts
        open_accounts = [f"a{number}" for number in range(accounts) if f"a{number}" not in closed]
        if not open_accounts:
            break
        for number in range(min(policy.room(0), 500)):
            policy.begin(Target("w", "", (), open_accounts[number % len(open_accounts)]))
    free = concurrency - policy.in_flight
    assert free >= concurrency // (20 * accounts)
    assert free < concurrency / 2
    assert concurrency < 100 or free > 0


def test_without_other_accounts_slots_are_plentiful_at_first() -> None:
    policy = SlotPolicy(100, 10, 256)
    for _ in range(round(100 * SCARCE)):
        policy.begin(HOOK)
    assert policy.limits(0) == NO_LIMITS
    assert policy.scarce(0, 0.0) is None


@pytest.mark.parametrize(
    ("concurrency", "per_webhook", "in_flight", "pressed"),
    [
        (4096, 10, 4, False),
        (4096, 10, 5, True),
        (4096, 100, 16, False),
        (4096, 100, 17, True),
        (4, 100, 2, False),
        (4, 100, 3, True),
        (4096, 1, 1, True),
    ],
)
def test_slots_are_freed_at_once_where_few_are_left(
    concurrency: int, per_webhook: int, in_flight: int, pressed: bool
) -> None:
    policy = SlotPolicy(concurrency, per_webhook, 256)
    for _ in range(in_flight):
        policy.begin(HOOK)
    assert policy.pressed("wh") is pressed


@given(
    st.integers(1, 200),
    st.integers(0, 300),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 600),
    st.floats(0, 9),
)
def test_a_claim_never_exceeds_the_slots_that_are_free(
    concurrency: int, begun: int, ending: int, being_claimed: int, most: int, now_s: float
) -> None:
    policy = SlotPolicy(concurrency, 10, 256)
    for number in range(min(begun, concurrency)):
        policy.begin(Target(f"w{number % 7}", "", (), f"a{number % 3}"))
    policy.being_claimed = being_claimed
    ending = min(ending, policy.in_flight)
    request = policy.request(ending, most, now_s, UUID(int=1), 60.0)
    free = max(concurrency - policy.in_flight - being_claimed + ending, 0)
    assert request.free == free
    assert 0 <= request.limit <= min(free, most)
    assert request.limit > 0 or free == 0
    assert concurrency < SHARED_FROM or request.limit <= (free + 1) // 2
    assert (request.scarce is None) is ((policy.in_flight - ending) / concurrency <= SCARCE)


@given(st.integers(1, 9), st.lists(st.sampled_from(["claim", "answer", "late", "advance"]), max_size=200))
def test_each_delivery_begins_once_in_order_and_no_burst_is_larger_than_its_size(size: int, steps: list[str]) -> None:
    bursts, claimed, begun, late = Bursts(size), 0, list[int](), 0
    for step in steps:
        if step == "claim":
            bursts.extend(Delivery(claimed + n, UUID(int=1), 1, "", b"", HOOK) for n in range(3))
            claimed += 3
        elif step == "answer" and bursts.posting:
            assert bursts.end(bursts.number)
        elif step == "late" and late:
            assert not bursts.end(bursts.number - 1), "an answer to an earlier burst makes no room in this one"
            late -= 1
        elif step == "advance" and bursts.should_pause():
            assert not bursts.should_pause(), "one pause at a time"
            late += bursts.posting
            bursts.advance()
        while (delivery := bursts.next()) is not None:
            begun.append(delivery.id)
        assert 0 <= bursts.posting <= size
        assert not bursts.waiting or bursts.posting == size
        assert bursts.waiting == claimed - len(begun)
    assert begun == list(range(len(begun)))
    bursts.clear()
    assert (bursts.next(), bursts.waiting) == (None, 0)


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=20), max_size=10), st.integers(1, 30))
def test_accounts_take_turns_and_each_keeps_its_order(claims: list[list[str]], begins: int) -> None:
    bursts, waiting, number = Bursts(10_000), dict[str, list[int]](), count()
    for claim in claims:
        claimed = [(next(number), account_id) for account_id in claim]
        bursts.extend(Delivery(n, UUID(int=1), 1, "", b"", Target("w", "", (), name)) for n, name in claimed)
        for n, account_id in claimed:
            waiting.setdefault(account_id, []).append(n)
        passed = Counter[str]()
        """How often another account was served while this one had something waiting."""
        for _ in range(begins):
            delivery = bursts.next()
            if delivery is None:
                assert not any(waiting.values())
                break
            account_id = delivery.target.account_id
            assert waiting[account_id].pop(0) == delivery.id
            passed[account_id] = 0
            passed.update(other for other, left in waiting.items() if left and other != account_id)
            assert max(passed.values()) <= 2, "an account waits for one delivery of each other account at most"
