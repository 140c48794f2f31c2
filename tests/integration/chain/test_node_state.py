"""What is kept of several nodes for the operator and for the next start, and which of them falls behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node_pools import Clock, Moody, chain_of, known, started
from simulation_fixtures import whole
from timeouts import WAIT_TIMEOUT_S
from vaultevents.chain.upstream.node_lag import BEHIND_S
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.nodes import LogLimit
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.node import Node
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import gauges, nodes, status
from vaultevents.store.nodes import NodeFacts
from vaultevents.store.pool import Database
from vaultevents.wiring import node_state
from vaultevents.wiring.node_state import keep_node_state

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def made() -> Simulation:
    simulation = Simulation(7)
    simulation.history(60)
    return simulation


async def test_what_is_known_is_shown_and_forgotten_with_its_url(database: Database) -> None:
    one, two, beacon = "http://one#1", "http://two#2", "http://three#3"
    await nodes.save_node_state(database, "beacon", [known(beacon, "trial")])
    await nodes.save_node_state(database, "execution", [known(one, "open", logs=LogLimit(800, 801)), known(two)])
    shown = {node.name: node for node in (await status.read(database)).nodes}
    assert {name: facts.state for name, facts in shown.items()} == {one: "open", two: "closed", beacon: "trial"}
    assert (shown[one].problem, shown[one].log_range) == ("cannot be reached", 800)
    assert (await gauges.read(database)).nodes == {
        ("execution", "open"): 1,
        ("execution", "closed"): 1,
        ("beacon", "trial"): 1,
    }
    await nodes.save_limits(database, "execution", [known(one, logs=LogLimit(400))])
    (kept,) = [memory for memory in await nodes.load_node_states(database, "execution") if memory.name == one]
    assert (kept.state, kept.logs) == ("open", LogLimit(400)), "without watching, only learned limits are saved"
    assert 5 <= kept.since_s < 5 + WAIT_TIMEOUT_S
    await nodes.save_node_state(database, "execution", [known(two)])
    assert {facts.name for facts in (await status.read(database)).nodes} == {two, beacon}


async def test_what_changes_is_written_at_once_and_at_the_end(made: Simulation, database: Database) -> None:
    server = Moody(made.chain)
    async with started(server) as urls, chain_of(urls) as chain:
        await nodes.save_node_state(database, "ipfs", [known("http://gone#1")])
        keeping = asyncio.create_task(keep_node_state(database, {"execution": chain}))
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while [facts.upstream for facts in (await status.read(database)).nodes] != ["execution"]:
                await asyncio.sleep(0.01)
        server.faults.rates = {Fault.HTTP_500: 1.0}
        with pytest.raises(SourceUnavailable):
            await chain.header(1)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    (shown,) = (await status.read(database)).nodes
    assert (shown.state, shown.problem, shown.name) == ("open", "HTTP status 500", chain.nodes[0])


async def test_lag_and_latency_are_shown_and_saved_at_intervals(
    made: Simulation, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, behind = ExecutionServer(made.chain), ExecutionServer(made.chain, behind=20)
    async with started(first, behind) as urls, chain_of(urls) as chain:
        monkeypatch.setattr(node_state, "KEEP_NODES_S", 0.01)
        keeping = asyncio.create_task(keep_node_state(database, {"execution": chain}))

        async def shown() -> dict[str, NodeFacts]:
            return {facts.name: facts for facts in (await status.read(database)).nodes}

        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while set(await shown()) != set(chain.nodes):
                await asyncio.sleep(0.01)
        await chain.final_head()
        written = {facts.updated_at for facts in (await shown()).values()}
        await asyncio.sleep(0.1)
        assert {facts.updated_at for facts in (await shown()).values()} == written, "figures alone are not due yet"
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    found = await shown()
    ahead, lagging = (found[name] for name in chain.nodes)
    assert (ahead.behind, lagging.behind) == (0, 20)
    assert ahead.behind_at is not None and ahead.behind_at <= ahead.updated_at
    for facts in (ahead, lagging):
        assert facts.latency_p50_s is not None and facts.latency_p95_s is not None
        assert 0 < facts.latency_p50_s <= facts.latency_p95_s < WAIT_TIMEOUT_S
    await nodes.save_limits(database, "execution", [known(chain.nodes[1])])
    assert (await shown())[chain.nodes[1]].behind == 20, "another process saves its learned limits alone"


async def test_figures_are_saved_when_they_are_due(
    made: Simulation, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_state, "KEEP_NODES_S", 0.01)
    monkeypatch.setattr(node_state, "FIGURES_S", 0.02)
    async with started(ExecutionServer(made.chain)) as urls, chain_of(urls) as chain:
        keeping = asyncio.create_task(keep_node_state(database, {"execution": chain}))
        await chain.final_head()
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while [facts.behind for facts in (await status.read(database)).nodes] != [0]:
                await asyncio.sleep(0.01)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_node_that_answers_but_falls_behind_is_left_and_returned_to(made: Simulation) -> None:
    first, second = ExecutionServer(made.chain, behind=20), ExecutionServer(made.chain)
    async with started(first, second) as urls, chain_of(urls) as chain:
        clock = Clock(chain)
        assert (await chain.head()).number == whole(made).last - 20, "at first nobody knows better"
        for _ in range(2):
            clock.now_s += BEHIND_S
            await chain.head()
        clock.now_s += BEHIND_S
        assert (await chain.head()).number == whole(made).last
        assert [state.state for state in chain.node_states()] == ["open", "closed"]
        assert "is behind" in (chain.node_states()[0].problem or "")
        first.node.behind = 0
        clock.now_s += 1
        asked = first.exchanges
        assert (await chain.head()).number == whole(made).last
        assert first.exchanges > asked


async def test_a_head_that_nobody_has_makes_no_node_leave(made: Simulation) -> None:
    class Boasting(Node):
        def call(self, method: str, params: list[Any]) -> Any:
            answer = super().call(method, params)
            return {**answer, "number": hex(10**9)} if params[:1] == ["finalized"] else answer

    honest, boasting = ExecutionServer(made.chain), ExecutionServer(made.chain)
    boasting.node = Boasting(made.chain)
    async with started(honest, boasting) as urls, chain_of(urls) as chain:
        clock = Clock(chain)
        for _ in range(3):
            await chain.head()
            clock.now_s += BEHIND_S
        await boasting.stop()
        assert (await chain.head()).number == whole(made).last
        assert (await chain.head()).number == whole(made).last
