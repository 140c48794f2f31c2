"""Nodes that lie consistently, in every configuration: which events are stored, which are lost, and who is named.

Each cell reads a stream as the daemon does, a backfill and live beside it, from nodes of which some claim one lie in
all of their methods (`lying_node`). What the outbox has at the end is compared with the chain's own record.

    backfill  the blocks up to the one at which the live cursor began
    live      the blocks after it
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
from structlog.testing import capture_logs

from fault_injection import BEGUN, OPTIONS, Scenario, beacon_of, followed, simulation_of
from lying_node import EARLY_FORK, LATE_FORK, STALE_BLOCKS, Lie, LyingServer, branch_of
from simulation_fixtures import rows, whole
from timeouts import WAIT_TIMEOUT_S
from vaultevents.devnet.beacon import Beacon
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.watch import watcher

pytestmark = pytest.mark.fault

GROWTH = 20
STALL_S = 3.0
"""A stream has stalled that has not moved for so long, or in as many attempts as `ending` counts, and has a problem."""


class Setup(StrEnum):
    """Which nodes are configured, in order of preference."""

    LONE = "lone"  # the liar alone
    PAIR = "pair"  # the liar, then an honest node
    TRIO = "trio"  # two liars with the same lie, then an honest node
    LONE_ANCHORED = "lone + anchor"
    PAIR_ANCHORED = "pair + anchor"

    @property
    def is_anchored(self) -> bool:
        return self in (Setup.LONE_ANCHORED, Setup.PAIR_ANCHORED)

    @property
    def liars(self) -> int:
        return 2 if self is Setup.TRIO else 1

    @property
    def honest(self) -> int:
        return 0 if self in (Setup.LONE, Setup.LONE_ANCHORED) else 1


class Result(StrEnum):
    """How a part of the stream stands at the end."""

    RIGHT = "right"  # nothing wrong is stored and nothing is lost
    STALLED = "stalled"  # nothing wrong is stored; the cursor waits before what is missing, and says why
    LOST = "lost"  # the cursor has passed what is missing
    WRONG = "wrong"  # something is stored that is not in the chain's own record


RIGHT, STALLED, LOST, WRONG = Result
ANY = frozenset(Result)
"""It cannot be known: one node, consistent in itself, against nothing."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The results that are allowed of each part."""

    backfill: frozenset[Result]
    live: frozenset[Result]

    @classmethod
    def of(cls, text: str) -> Cell:
        """From `right stalled`, alternatives with `|`; one word stands for both parts, `?` for any result."""
        words = text.split()
        parts = [ANY if word == "?" else frozenset(map(Result, word.split("|"))) for word in words]
        return cls(parts[0], parts[-1])


_STALLED_LATER = "right|stalled stalled"
_STALLED_AT_HEAD = "right right|stalled"
"""Which of two blocks at the head is on the chain is known when the next one links to it."""
EXPECTED: dict[Lie, tuple[str, str, str, str, str]] = {
    # backfill and live         lone             pair              trio              lone + anchor    pair + anchor
    Lie.HIDE:                  ("stalled",       "right",          "right",          "stalled",       "right"),
    Lie.ZERO_BLOOM:            ("stalled",       "right",          "right",          "stalled",       "right"),
    Lie.ALTER:                 ("stalled",       "right",          "right",          "stalled",       "right"),
    Lie.INVENT:                ("stalled",       "right",          "right",          "stalled",       "right"),
    Lie.UNDECODABLE:           ("stalled",       "right",          "right",          "stalled",       "right"),
    Lie.TRUNCATED:             ("stalled",       "right",          "right",          "stalled",       "right"),
    Lie.FALSE_HEADER:          ("stalled",       "right",          "right",          "stalled",       "right"),
    Lie.FORGED_BLOCK:          ("stalled",       _STALLED_AT_HEAD,  _STALLED_AT_HEAD,  "stalled",     "right|stalled"),
    Lie.RENAMED:               ("stalled",       "right",          "right",          "stalled",       "right"),
    Lie.EARLY_FORK:            ("stalled",       "right|stalled",  "right|stalled",  "stalled",       "right|stalled"),
    Lie.LATE_FORK:             ("right ?",       _STALLED_LATER,   _STALLED_LATER,   _STALLED_LATER,  "right|stalled"),
    Lie.STALE:                 ("right",         "right",          "right",          "right",         "right"),
    Lie.WITHHELD_RECEIPTS:     ("stalled",       "right",          "right",          "stalled",       "right"),
    Lie.PRUNED_RECEIPTS:       ("stalled right", "right",          "right",          "stalled right", "right"),
}  # fmt: skip

DISPROVED = frozenset(
    {
        *(Lie.HIDE, Lie.ZERO_BLOOM, Lie.ALTER, Lie.INVENT, Lie.UNDECODABLE, Lie.TRUNCATED),
        *(Lie.FALSE_HEADER, Lie.FORGED_BLOCK, Lie.RENAMED),
    }
)
"""Lies that the chain contradicts: the node that makes one is named as faulty."""

FORKS = frozenset({Lie.EARLY_FORK, Lie.LATE_FORK})
"""Two sides say which chain it is: a stream that stalls names both."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "BACKOFF_S", (0.03,))


@dataclass(frozen=True, slots=True)
class Found:
    """What a cell came to. `faulty` are the nodes that were named as faulty, `problems` why the stream waited."""

    backfill: Result
    live: Result
    faulty: frozenset[str]
    problems: tuple[str, ...]


def cells() -> Iterator[Any]:
    for lie in EXPECTED:
        for setup in Setup:
            yield pytest.param(lie, setup, id=f"{lie}-{setup}".replace(" ", ""))


@pytest.mark.parametrize(("lie", "setup"), list(cells()))
async def test_a_lie_in_a_configuration(database: Database, lie: Lie, setup: Setup) -> None:
    simulation = simulation_of(61)
    expected = Cell.of(EXPECTED[lie][list(Setup).index(setup)])
    with capture_logs() as lines:
        names, results = await run_cell(database, simulation, lie, setup, expected, lines)
    found = Found(*results, frozenset(faulty_nodes(lines)), tuple(problems_in(lines)))
    print(f"{lie:18} {setup:14} {found.backfill:8} {found.live:8} faulty={marked(found.faulty, names, setup)}")
    assert found.backfill in expected.backfill and found.live in expected.live, found
    assert not found.faulty.intersection(names[setup.liars :]), "an honest node is named as faulty"
    if lie in DISPROVED and not (lie is Lie.FORGED_BLOCK and STALLED in results and setup is not Setup.LONE):
        assert found.faulty.intersection(names[: setup.liars]), "the liar is not named"
    if STALLED in results:
        assert found.problems, "the stream waits without a reason"
    if lie is Lie.PRUNED_RECEIPTS and STALLED in results:
        assert any("on can be proven" in problem for problem in found.problems), found.problems
    if lie in (*FORKS, Lie.FORGED_BLOCK) and STALLED in results and (setup.honest or setup.is_anchored):
        assert any(names_both_sides(problem, names, setup) for problem in found.problems), found.problems


async def run_cell(
    database: Database,
    simulation: Simulation,
    lie: Lie,
    setup: Setup,
    expected: Cell,
    log: Sequence[MutableMapping[str, Any]],
) -> tuple[tuple[str, ...], tuple[Result, Result]]:
    """The names of the nodes, and how the backfill and the live part end."""
    servers = [LyingServer(simulation, lie) for _ in range(setup.liars)]
    servers_then = [ExecutionServer(simulation.chain) for _ in range(setup.honest)]
    behind = STALE_BLOCKS if lie is Lie.STALE else 0
    may_stall = STALLED in expected.backfill | expected.live
    async with AsyncExitStack() as stack:
        anchor = await stack.enter_async_context(beacon_of(simulation)) if setup.is_anchored else None
        scenario = await stack.enter_async_context(
            followed(database, simulation, *servers, *servers_then, options=OPTIONS, anchor=anchor)
        )
        await scenario.grow(GROWTH)
        await scenario.ending(STALL_S if may_stall else WAIT_TIMEOUT_S, behind, log if may_stall else ())
        results = await parts(scenario, behind)
    return scenario.names, results


async def parts(scenario: Scenario, behind: int) -> tuple[Result, Result]:
    """How the backfill and the live part stand."""
    simulation, outbox = scenario.simulation, Outbox(scenario.database)
    last = whole(simulation).last - behind
    stored = await rows(scenario.database)
    truth = simulation.expected(through=simulation.chain.head.number)
    early, due = simulation.expected(through=BEGUN).keys(), simulation.expected(through=last).keys()
    live = await outbox.live("logs")
    assert live is not None
    backfills = await outbox.backfills("logs")
    wrong = {key for key, body in stored.items() if truth.get(key) != body}
    wrong_early = {key for key in wrong if key in early or created_ms(stored[key]) <= begun_ms(simulation)}
    missing = due - stored.keys()
    return (
        _result(bool(wrong_early), bool(missing & early), bool(backfills)),
        _result(bool(wrong - wrong_early), bool(missing - early), live.position < last),
    )


def _result(wrong: bool, missing: bool, waits: bool) -> Result:
    if wrong:
        return WRONG
    if missing:
        return STALLED if waits else LOST
    return RIGHT


def created_ms(body: bytes) -> int:
    return int(body.rpartition(b'"created_at":')[2].rstrip(b"}"))


def begun_ms(simulation: Simulation) -> int:
    (block,) = simulation.chain.blocks(BEGUN, BEGUN)
    return block.timestamp_s * 1000


def faulty_nodes(lines: Sequence[MutableMapping[str, Any]]) -> Iterator[str]:
    return (line["node"] for line in lines if line["event"] == "node_fault")


def problems_in(lines: Sequence[MutableMapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(line["problem"]) for line in lines if line["event"] == "stream_waits"))


def names_both_sides(problem: str, names: Sequence[str], setup: Setup) -> bool:
    """Whether a sentence names a liar and, of the others, the honest node or the beacon chain."""
    liars, others = names[: setup.liars], names[setup.liars :]
    named_other = any(name in problem for name in others) or (setup.is_anchored and "beacon" in problem.lower())
    return any(name in problem for name in liars) and named_other


def marked(faulty: frozenset[str], names: Sequence[str], setup: Setup) -> list[str]:
    return [("liar" if at < setup.liars else "HONEST") for at, name in enumerate(names) if name in faulty]


async def test_honest_nodes_alone_lose_nothing_and_are_never_named(database: Database) -> None:
    """The negative control of every cell."""
    simulation = simulation_of(61)
    with capture_logs() as lines:
        async with followed(database, simulation, *(ExecutionServer(simulation.chain) for _ in range(3))) as scenario:
            await scenario.grow(GROWTH)
            await scenario.ending()
            assert await parts(scenario, 0) == (RIGHT, RIGHT)
    assert (list(faulty_nodes(lines)), problems_in(lines)) == ([], [])


async def anchored(stack: AsyncExitStack, database: Database, simulation: Simulation, beacon: BeaconServer) -> Scenario:
    """A stream from one honest execution node, anchored by this beacon node."""
    anchor = await stack.enter_async_context(beacon_of(simulation, beacon))
    return await stack.enter_async_context(
        followed(database, simulation, ExecutionServer(simulation.chain), anchor=anchor)
    )


@pytest.mark.parametrize("behind", [0, 30])
async def test_an_honest_beacon_chain_holds_up_nothing_also_when_it_is_behind(database: Database, behind: int) -> None:
    simulation = simulation_of(63)
    with capture_logs() as lines:
        async with AsyncExitStack() as stack:
            beacon = BeaconServer(simulation.beacon, behind=behind)
            scenario = await anchored(stack, database, simulation, beacon)
            await scenario.grow(GROWTH)
            assert (await scenario.ending()).is_right
    assert list(faulty_nodes(lines)) == []


@pytest.mark.parametrize("fork", [EARLY_FORK, LATE_FORK])
async def test_a_beacon_chain_on_another_fork_stops_the_stream_and_is_named(database: Database, fork: int) -> None:
    """Which side is right cannot be known, so nothing more is sent, and both are named."""
    simulation = simulation_of(64)
    branch = branch_of(simulation, fork)
    with capture_logs() as lines:
        async with AsyncExitStack() as stack:
            scenario = await anchored(stack, database, simulation, BeaconServer(Beacon(branch)))
            await scenario.grow(GROWTH)
            await scenario.ending(STALL_S, log=lines)
            assert await scenario.extra() == 0
            _, live = await parts(scenario, 0)
    assert live is STALLED
    assert any(scenario.names[0] in problem and "beacon" in problem.lower() for problem in problems_in(lines))


async def test_the_anchor_of_a_cell_is_the_finalized_chain() -> None:
    simulation = simulation_of(65)
    async with beacon_of(simulation) as anchor:
        found = await anchor.final_payload()
        assert found is not None and found.number is not None
        (block,) = simulation.chain.blocks(found.number, found.number)
        assert found.hash == block.hash
        assert 0 <= whole(simulation).last - found.number <= 2 * simulation.beacon.slots_per_epoch


async def test_a_node_that_becomes_honest_lets_the_stream_go_on(database: Database) -> None:
    simulation = simulation_of(62)
    liar = LyingServer(simulation, Lie.ALTER, since=BEGUN + 10)
    async with followed(database, simulation, liar) as scenario:
        await asyncio.sleep(0.5)
        assert await scenario.extra() == 0
        liar.be_honest()
        assert (await scenario.ending()).is_right
