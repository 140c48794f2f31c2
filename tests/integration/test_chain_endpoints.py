"""Which node is asked next, how patiently, and that no URL gets into any text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from vaultevents.chain.endpoints import Counters, Endpoints, Passing, node_name, patiently, scrub
from vaultevents.core.errors import InputError, NodeFault, SourceUnavailable, WrongNetwork

pytestmark = pytest.mark.integration

SECRET_URL = "https://user:hunter22@rpc.example.org:8443/v2/aBcDeF0123456789?key=s3cr3tKey&x=1"


@dataclass
class Node:
    name: str
    error: Exception | None = None
    asked: int = 0

    async def answer(self) -> str:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.name


async def ask(node: Node) -> str:
    return await node.answer()


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def endpoints(*nodes: Node, admit: Callable[[Node], Awaitable[None]] | None = None) -> tuple[Endpoints[Node], Clock]:
    async def anyone(_: Node) -> None: ...

    clock = Clock()
    return Endpoints(nodes, admit or anyone, Counters(), set_aside_s=30.0, clock=clock), clock


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


async def test_patience_ends() -> None:
    node, counters = Node("a", Passing("a", "is busy")), Counters()
    with pytest.raises(SourceUnavailable, match="a: is busy") as caught:
        await patiently(node.answer, 3, 0.0, counters)
    assert type(caught.value) is SourceUnavailable
    assert node.asked == 3
    assert counters.retries == 2


async def test_a_lasting_fault_is_not_asked_again() -> None:
    node = Node("a", NodeFault("a", "lies"))
    with pytest.raises(NodeFault):
        await patiently(node.answer, 3, 0.0, Counters())
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
