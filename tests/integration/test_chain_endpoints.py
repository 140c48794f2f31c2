"""Which node is asked next, how patiently, and that no URL gets into any text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from vaultevents.chain.circuits import LONGEST_PAUSE_S
from vaultevents.chain.endpoints import Endpoints
from vaultevents.chain.lines import Counters, Line, Passing
from vaultevents.chain.pacing import Lateness
from vaultevents.chain.urls import node_name, scrub
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
        self.line = Line(self.name, "execution", Counters(), attempts=3, wait_s=0.0, set_aside_s=30.0)

    async def answer(self) -> str:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.name


async def ask(node: Node) -> str:
    return await node.answer()


def endpoints(*nodes: Node, admit: Callable[[Node], Awaitable[None]] | None = None) -> tuple[Endpoints[Node], Clock]:
    async def anyone(_: Node) -> None: ...

    clock = Clock()
    for node in nodes:
        node.line.clock = clock
    return Endpoints(nodes, admit or anyone), clock


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


async def test_what_checks_on_an_earlier_answer_goes_to_another_node_while_one_is_in_use() -> None:
    first, second = Node("a"), Node("b")
    pool, _ = endpoints(first, second)
    assert await pool.ask(ask, second=True) == "b"
    second.error = SourceUnavailable("b", "is down")
    assert await pool.ask(ask, second=True) == "a"
    assert await pool.ask(ask, second=True) == "a"
    assert second.asked == 2, "a node that was set aside is not asked for this either"


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
    monkeypatch.setattr(Lateness, "_UNKNOWN_S", 0.002)
    monkeypatch.setattr(Lateness, "_LEAST_S", 0.002)
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
    assert {node.line.circuit.is_usable(clock.now_s) for node in nodes} == {True}


async def test_patience_ends() -> None:
    node = Node("a", Passing("a", "is busy"))
    with pytest.raises(SourceUnavailable, match="a: is busy") as caught:
        await node.line.ask(node.answer)
    assert type(caught.value) is SourceUnavailable
    assert node.asked == 3
    assert node.line.counters.retries == 2


async def test_a_lasting_fault_is_not_asked_again() -> None:
    node = Node("a", NodeFault("a", "lies"))
    with pytest.raises(NodeFault):
        await node.line.ask(node.answer)
    assert node.asked == 1


def test_a_name_tells_keys_apart_and_shows_none() -> None:
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
