"""Which node is asked next, how patiently, and that no URL gets into any text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from vaultevents.chain.execution import receipts
from vaultevents.chain.upstream.circuit_breaker import LONGEST_PAUSE_S
from vaultevents.chain.upstream.node import Counters, DataUnavailable, NodeClient, Throttled, TransientError
from vaultevents.chain.upstream.pool import LATE_IN_A_ROW, NodePool
from vaultevents.chain.upstream.rate_limit import LatencyEstimate
from vaultevents.chain.upstream.redaction import node_name, scrub
from vaultevents.core.errors import InputError, NodeFault, SourceUnavailable, WrongNetwork

pytestmark = pytest.mark.integration

SECRET_URL = "https://user:hunter22@rpc.example.org:8443/v2/aBcDeF0123456789?key=s3cr3tKey&x=1"


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Node:
    name: str
    error: Exception | None = None
    asked: int = 0

    def __post_init__(self) -> None:
        self.client = NodeClient(self.name, "execution", Counters(), attempts=3, wait_s=0.0, set_aside_s=30.0)

    async def answer(self) -> str:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.name


async def ask(node: Node) -> str:
    return await node.answer()


def endpoints(*nodes: Node, admit: Callable[[Node], Awaitable[None]] | None = None) -> tuple[NodePool[Node], Clock]:
    async def anyone(_: Node) -> None: ...

    clock = Clock()
    for node in nodes:
        node.client.clock = clock
    return NodePool(nodes, admit or anyone), clock


async def test_the_primary_is_left_for_a_while_and_returned_to() -> None:
    first, second = Node("a"), Node("b")
    pool, clock = endpoints(first, second)
    assert await pool.ask(ask) == "a"
    first.error = SourceUnavailable("a", "is down")
    assert await pool.ask(ask) == "b"
    first.error = None
    clock.now_s += 29
    assert await pool.ask(ask) == "b"
    clock.now_s += 2
    assert await pool.ask(ask) == "a"


async def test_a_lone_node_is_asked_every_time() -> None:
    only = Node("a", NodeFault("a", "lies"))
    pool, _ = endpoints(only)
    with pytest.raises(NodeFault, match="a: lies"):
        await pool.ask(ask)
    only.error = None
    assert await pool.ask(ask) == "a"


async def test_when_all_fail_the_last_error_names_all_of_them() -> None:
    pool, _ = endpoints(Node("a", SourceUnavailable("a", "is down")), Node("b", NodeFault("b", "lies")))
    with pytest.raises(NodeFault, match="a: is down; b: lies"):
        await pool.ask(ask)


async def test_nodes_that_are_set_aside_are_asked_before_giving_up() -> None:
    first, second = Node("a", SourceUnavailable("a", "is down")), Node("b")
    pool, _ = endpoints(first, second)
    await pool.ask(ask)
    first.error, second.error = None, SourceUnavailable("b", "is down")
    assert await pool.ask(ask) == "a"


async def test_where_all_are_set_aside_those_at_fault_come_last() -> None:
    liar, second = Node("a", NodeFault("a", "is on another fork")), Node("b", SourceUnavailable("b", "is down"))
    pool, _ = endpoints(liar, second)
    with pytest.raises(SourceUnavailable):
        await pool.ask(ask)
    liar.error = second.error = None
    assert await pool.ask(ask) == "b"


async def test_a_node_of_another_network_is_refused_and_looked_at_again_later() -> None:
    wrong = {"a"}

    async def admit(node: Node) -> None:
        if node.name in wrong:
            raise WrongNetwork(f"{node.name} is of another network")

    first, second = Node("a"), Node("b")
    pool, clock = endpoints(first, second, admit=admit)
    assert await pool.ask(ask) == "b"
    assert first.asked == 0
    wrong.clear()
    clock.now_s += 31
    assert await pool.ask(ask) == "a"
    wrong.update("ab")
    pool.forget_admissions()
    with pytest.raises(WrongNetwork, match=r"a is of another network; b is"):
        await pool.ask(ask)


def kinds(of: type[SourceUnavailable]) -> set[type[SourceUnavailable]]:
    assert issubclass(receipts.OtherBlock, SourceUnavailable)  # all modules with errors are loaded
    return {of}.union(*(kinds(kind) for kind in of.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(kinds(SourceUnavailable) - kinds(TransientError) - {Throttled}, key=str))
async def test_whatever_all_nodes_fail_with_is_one_error_of_that_kind(kind: type[SourceUnavailable]) -> None:
    pool, _ = endpoints(Node("a", SourceUnavailable("a", "is down")), Node("b", kind("b", "cannot")))
    with pytest.raises(kind, match="all 2 nodes: none could answer: a: is down; b: ") as caught:
        await pool.ask(ask)
    assert type(caught.value) is kind


async def test_all_nodes_are_asked_at_once_and_answer_in_their_order() -> None:
    nodes = [Node(name) for name in "abc"]
    pool, _ = endpoints(*nodes)
    going: set[str] = set()
    all_asked = asyncio.Event()

    async def wait_for_all(node: Node) -> str:
        going.add(node.name)
        if len(going) == len(nodes):
            all_asked.set()
        await all_asked.wait()
        return await node.answer()

    found = await pool.ask_each(wait_for_all, urgent=False)
    assert [(node.name, answer) for node, answer in found] == [("a", "a"), ("b", "b"), ("c", "c")]
    assert [name for _, name in await pool.ask_each(ask, most=2, urgent=True)] == ["a", "b"]
    assert [name for _, name in await pool.ask_each(ask, only="c", urgent=True)] == ["c"]


async def test_those_that_fail_are_left_out_and_set_aside() -> None:
    first, second, third = Node("a", NodeFault("a", "lies")), Node("b"), Node("c", SourceUnavailable("c", "is down"))
    pool, clock = endpoints(first, second, third)
    assert [name for _, name in await pool.ask_each(ask, urgent=False)] == ["b"]
    assert [node.client.circuit.state(clock.now_s) for node in (first, second, third)] == ["open", "closed", "open"]
    await pool.ask_each(ask, urgent=False)
    assert (first.asked, second.asked, third.asked) == (1, 2, 1), "they are left alone during their pause"
    assert [name for _, name in await pool.ask_each(ask, most=1, urgent=False)] == ["b"], "the first one in use"


async def test_where_no_node_answers_all_errors_are_raised_together() -> None:
    pool, _ = endpoints(Node("a", SourceUnavailable("a", "is down")), Node("b", NodeFault("b", "lies")))
    for _ in range(2):  # in use, and all set aside
        with pytest.raises(SourceUnavailable) as caught:
            await pool.ask_each(ask, urgent=False)
        assert "a: is down" in str(caught.value) and "b: lies" in str(caught.value)


async def test_the_only_node_that_is_wanted_is_asked_also_while_it_is_set_aside() -> None:
    first, second = Node("a", SourceUnavailable("a", "is down")), Node("b")
    pool, _ = endpoints(first, second)
    await pool.ask(ask)
    with pytest.raises(SourceUnavailable, match="a: is down"):
        await pool.ask_each(ask, only="a", urgent=False)
    first.error = None
    assert [name for _, name in await pool.ask_each(ask, only="a", urgent=False)] == ["a"]


class Waiting:
    """A question that some nodes answer only when they are released."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.cancelled: list[str] = []
        self.released = asyncio.Event()

    async def __call__(self, node: Node) -> str:
        if node.name in self._names:
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancelled.append(node.name)
                raise
        return await node.answer()


async def test_an_urgent_question_leaves_late_nodes_and_one_that_is_not_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LatencyEstimate, "_UNKNOWN_S", 0.05)
    pool, clock = endpoints(Node("a"), Node("b"))
    late = Waiting("a")
    for nth in range(1, LATE_IN_A_ROW + 1):
        assert [name for _, name in await pool.ask_each(late, urgent=True)] == ["b"]
        assert late.cancelled == ["a"] * nth
    (circuit, _) = (node.client.circuit for node in pool.nodes)
    assert (circuit.state(clock.now_s), circuit.problem) == ("open", f"was late {LATE_IN_A_ROW} times in a row")
    clock.now_s += 1e6
    assert [name for _, name in await pool.ask_each(ask, urgent=False)] == ["a", "b"]
    asking = asyncio.create_task(pool.ask_each(late, urgent=False))
    await asyncio.sleep(0.2)
    assert not asking.done()
    late.released.set()
    assert [name for _, name in await asking] == ["a", "b"]


async def test_a_lone_late_node_is_waited_for_although_it_is_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatencyEstimate, "_UNKNOWN_S", 0.01)
    pool, _ = endpoints(Node("a"), Node("b", SourceUnavailable("b", "is down")))
    late = Waiting("a")
    asking = asyncio.create_task(pool.ask_each(late, urgent=True))
    await asyncio.sleep(0.1)
    assert not asking.done()
    late.released.set()
    assert [name for _, name in await asking] == ["a"]


@pytest.mark.parametrize("urgent", [False, True])
async def test_a_node_on_trial_delays_nobody_and_gives_its_place_back(
    urgent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatencyEstimate, "_UNKNOWN_S", 0.05)
    first, second = Node("a", SourceUnavailable("a", "is down")), Node("b")
    pool, clock = endpoints(first, second)
    await pool.ask_each(ask, urgent=urgent)
    clock.now_s += 31
    first.error = None
    late = Waiting("a")
    assert [name for _, name in await pool.ask_each(late, urgent=urgent)] == ["b"]
    assert late.cancelled == ["a"]
    assert first.client.circuit.is_usable(clock.now_s), "the next question finds out"
    assert [name for _, name in await pool.ask_each(ask, urgent=urgent)] == ["a", "b"]
    assert first.client.circuit.state(clock.now_s) == "closed"


async def test_what_a_node_does_not_have_neither_sets_it_aside_nor_ends_its_pause() -> None:
    first, second = Node("a", DataUnavailable("a", "has no such block")), Node("b")
    pool, clock = endpoints(first, second)
    assert await pool.ask(ask) == "b"
    assert first.client.circuit.state(clock.now_s) == "closed"
    pool.accuse(first, "hides logs of block 7")
    second.error = DataUnavailable("b", "has no such block")
    with pytest.raises(DataUnavailable):
        await pool.ask(ask)
    assert [node.client.circuit.state(clock.now_s) for node in (first, second)] == ["open", "closed"]
    clock.now_s += 31
    with pytest.raises(DataUnavailable):
        await pool.ask(ask)
    assert first.client.circuit.state(clock.now_s) == "closed"


async def test_a_cancelled_question_cancels_those_to_all_nodes() -> None:
    pool, _ = endpoints(Node("a"), Node("b"))
    late = Waiting("a", "b")
    asking = asyncio.create_task(pool.ask_each(late, urgent=False))
    await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert sorted(late.cancelled) == ["a", "b"]


async def test_a_node_of_another_network_is_no_witness() -> None:
    async def admit(node: Node) -> None:
        if node.name == "a":
            raise WrongNetwork("a is of another network")

    first, second = Node("a"), Node("b")
    pool, _ = endpoints(first, second, admit=admit)
    assert [name for _, name in await pool.ask_each(ask, urgent=False)] == ["b"]
    assert first.asked == 0


async def test_an_accused_node_is_set_aside_with_the_proof() -> None:
    first, second = Node("a"), Node("b")
    pool, clock = endpoints(first, second)
    pool.accuse(first, "hides logs of block 7")
    assert (first.client.circuit.state(clock.now_s), first.client.circuit.problem) == ("open", "hides logs of block 7")
    assert (first.client.counters.node_faults, first.client.at_fault) == (1, True)
    assert await pool.ask(ask) == "b"
    assert [name for _, name in await pool.ask_each(ask, urgent=False)] == ["b"]


async def test_a_second_opinion_comes_from_another_node_that_can_give_one() -> None:
    first, second, third = Node("a"), Node("b", SourceUnavailable("b", "is down")), Node("c")
    pool, _ = endpoints(first, second, third)
    assert await pool.ask_another(first, ask) == "c"
    assert first.asked == 0
    assert not pool.is_alone(first)
    lonely, _ = endpoints(first)
    assert lonely.is_alone(first)
    assert await lonely.ask_another(first, ask) is None


async def test_a_second_opinion_that_accuses_the_first_node_is_raised() -> None:
    first, second = Node("a"), Node("b", NodeFault("a", "left a log out"))
    pool, _ = endpoints(first, second)
    with pytest.raises(NodeFault, match="a: left a log out"):
        await pool.ask_another(first, ask)
    assert not pool.is_alone(first)


@pytest.mark.parametrize("hedge", [False, True])
async def test_one_question_tries_a_node_that_was_set_aside_and_gives_its_place_back_when_cancelled(
    hedge: bool,
) -> None:
    first, second = Node("a", SourceUnavailable("a", "is down")), Node("b")
    pool, clock = endpoints(first, second)
    assert await pool.ask(ask, hedge=hedge) == "b"
    clock.now_s += 31
    going, gone = asyncio.Event(), asyncio.Event()

    async def slow(node: Node) -> str:
        going.set()
        await gone.wait()
        return node.name

    trying = asyncio.create_task(pool.ask(slow, hedge=hedge))
    await going.wait()
    assert await pool.ask(ask, hedge=hedge) == "b", "nobody else waits for the node on trial"
    trying.cancel()
    await asyncio.gather(trying, return_exceptions=True)
    first.error = None
    assert await pool.ask(ask, hedge=hedge) == "a"


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_one_answer_is_given_and_the_primary_is_returned_to(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatencyEstimate, "_UNKNOWN_S", 0.002)
    monkeypatch.setattr(LatencyEstimate, "_LEAST_S", 0.002)
    rng = random.Random(seed)
    nodes = [Node(name) for name in "abc"]
    pool, clock = endpoints(*nodes)

    async def wild(node: Node) -> str:
        match rng.randrange(6):
            case 0:
                raise SourceUnavailable(node.name, "is down")
            case 1:
                raise NodeFault(node.name, "lies")
            case 2:
                await asyncio.sleep(0.005)
        return await node.answer()

    for _ in range(60):
        clock.now_s += rng.random() * 40
        asking = [asyncio.create_task(pool.ask(wild, hedge=rng.random() < 0.7)) for _ in range(5)]
        await asyncio.sleep(rng.random() * 0.01)
        asking[rng.randrange(5)].cancel()
        for answer in await asyncio.gather(*asking, return_exceptions=True):
            assert answer in ("a", "b", "c") or isinstance(answer, SourceUnavailable | asyncio.CancelledError)
    clock.now_s += LONGEST_PAUSE_S
    assert await pool.ask(ask) == "a"
    assert {node.client.circuit.is_usable(clock.now_s) for node in nodes} == {True}


async def test_patience_ends() -> None:
    node = Node("a", TransientError("a", "is busy"))
    with pytest.raises(SourceUnavailable, match="a: is busy") as caught:
        await node.client.ask(node.answer)
    assert type(caught.value) is SourceUnavailable
    assert node.asked == 3
    assert node.client.counters.retries == 2


async def test_a_lasting_fault_is_not_asked_again() -> None:
    node = Node("a", NodeFault("a", "lies"))
    with pytest.raises(NodeFault):
        await node.client.ask(node.answer)
    assert node.asked == 1


def test_a_name_distinguishes_keys_and_shows_none() -> None:
    names = {node_name(SECRET_URL), node_name(SECRET_URL.replace("s3cr3tKey", "another1"))}
    assert len(names) == 2
    for name in names:
        assert name.startswith("https://rpc.example.org#")
        assert not any(part in name for part in ("user", "hunter22", "aBcDeF", "s3cr3t", "another1", "v2"))


@pytest.mark.parametrize(
    "url", ["", "rpc.example.org", "ftp://rpc.example.org/s3cr3tKey", "http://", "http://[::1/s3cr3tKey"]
)
def test_an_unusable_url_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(InputError) as caught:
        node_name(url)
    assert "s3cr3tKey" not in str(caught.value)


@pytest.mark.parametrize("secret", ["hunter22", "aBcDeF0123456789", "s3cr3tKey"])
def test_a_nodes_words_are_scrubbed(secret: str) -> None:
    words = f"error for url ({SECRET_URL}), project {secret}\nnext https://other.example/{secret}\x1b[31m" + "x" * 9000
    shown = scrub(words, SECRET_URL)
    assert secret not in shown
    assert shown.isprintable()
    assert len(shown) <= 200
    assert shown.startswith("error for url")
