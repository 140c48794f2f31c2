"""What `replay --estimate` reports is near what the replay then asks."""

from __future__ import annotations

from typing import Literal

import pytest

from simulation_fixtures import drive, open_at, reading, register, rows
from vaultevents.chain.execution.client import ExecutionOptions
from vaultevents.core.spans import Span
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.estimate import estimate
from vaultevents.watch.streams import Steps, logs_stream

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    made = Simulation(7)
    made.history(1_200, 600)
    return made


@pytest.mark.parametrize(("step", "headers"), [(50, "edges"), (400, "edges"), (400, "every")])
async def test_an_estimate_is_near_what_the_replay_asks_and_writes_nothing(
    database: Database, simulation: Simulation, step: int, headers: Literal["edges", "every"]
) -> None:
    outbox, node = Outbox(database), ExecutionServer(simulation.chain)
    await register(database, simulation)
    async with reading(node, options=ExecutionOptions(batch_size=20, headers=headers)) as source:
        stream = logs_stream(source._chain, Steps(step, step, 1))
        await open_at(database, simulation, 1_190)
        before = node.exchanges, sum(node.calls.values())
        reported = await estimate(stream, source._chain, outbox, Span(1, 1_150))
        assert await rows(database) == {}
        asked = node.exchanges - before[0], sum(node.calls.values()) - before[1]
        assert max(asked) <= 4 * max(reported.requests, reported.calls) / 3, "the samples are small"
        before = node.exchanges, sum(node.calls.values())
        await drive(source, outbox, await outbox.begin_replay("logs", Span(1, 1_150)), step)
        requests, calls = node.exchanges - before[0], sum(node.calls.values()) - before[1]
    heads = 1_150 // step + 1
    assert 0.5 * requests < reported.requests + heads < 2 * requests
    assert 0.6 * calls < reported.calls + heads < 1.6 * calls
