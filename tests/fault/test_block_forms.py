"""Streams over blocks whose form changes while they are read: forks, unknown fields, equal times, faulty answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from fault_injection import BLOCKS, OPTIONS, followed, simulation_of
from timeouts import WAIT_TIMEOUT_S
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.node import Node
from vaultevents.store.pool import Database
from vaultevents.watch import watcher

pytestmark = pytest.mark.fault

GROWTH = 20
STALL_S = 3.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "BACKOFF_S", (0.03,))


async def unverified_from(database: Database) -> set[int]:
    async with database.transaction() as connection:
        rows = await connection.fetch("select unverified_from from cursors where unverified_from is not null")
    return {row["unverified_from"] for row in rows}


def events_of(lines: list[Any], event: str) -> list[Any]:
    return [line for line in lines if line["event"] == event]


async def test_a_fork_that_is_known_is_crossed_in_silence(database: Database) -> None:
    simulation = simulation_of(71)
    simulation.chain.schedule_fork("amsterdam", BLOCKS + 5)
    with capture_logs() as lines:
        async with followed(database, simulation, ExecutionServer(simulation.chain)) as scenario:
            await scenario.grow(GROWTH)
            assert (await scenario.ending()).is_right
    assert events_of(lines, "node_fault") == events_of(lines, "chain_form_unknown") == []
    assert await unverified_from(database) == set()


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_fork_that_is_not_known_is_read_with_an_alert(database: Database, nodes: int) -> None:
    simulation = simulation_of(72)
    fork = BLOCKS + 5
    simulation.chain.schedule_fork("future", fork)
    with capture_logs() as lines:
        servers = [ExecutionServer(simulation.chain) for _ in range(nodes)]
        async with followed(database, simulation, *servers) as scenario:
            await scenario.grow(GROWTH)
            assert (await scenario.ending()).is_right
            assert await unverified_from(database) == {fork}
    assert events_of(lines, "node_fault") == []
    assert events_of(lines, "chain_form_unknown")[0]["since_block"] == fork


class OtherRoot(Node):
    """A node that gives another receipts root for blocks that cannot be hashed."""

    def call(self, method: str, params: list[Any]) -> Any:
        result = super().call(method, params)
        if method == "eth_getBlockByNumber" and result and "inclusionListRoot" in result:
            return {**result, "receiptsRoot": "0x" + "11" * 32}
        return result


async def test_nodes_that_differ_about_an_unknown_form_stop_the_stream(database: Database) -> None:
    simulation = simulation_of(73)
    simulation.chain.schedule_fork("future", BLOCKS + 5)
    honest, other = ExecutionServer(simulation.chain), ExecutionServer(simulation.chain)
    other.node = OtherRoot(simulation.chain)
    with capture_logs() as lines:
        async with followed(database, simulation, other, honest) as scenario:
            await scenario.grow(GROWTH)
            ending = await scenario.ending(STALL_S, log=lines)
    assert ending.extra == 0
    assert any("give" in line["problem"] for line in events_of(lines, "stream_waits"))


@pytest.mark.parametrize("strict", [False, True])
async def test_equal_times_are_a_fault_on_public_networks_alone(database: Database, strict: bool) -> None:
    chain = Chain(74)
    chain.blocks_per_timestamp = 3
    simulation = simulation_of(74, chain=chain)
    times = [block.timestamp_s for block in chain.blocks(1, BLOCKS)]
    assert len(set(times)) < len(times)
    with capture_logs() as lines:
        async with followed(
            database, simulation, ExecutionServer(chain), options=replace(OPTIONS, strict=strict)
        ) as scenario:
            await scenario.grow(GROWTH)
            ending = await scenario.ending(STALL_S if strict else WAIT_TIMEOUT_S, log=lines if strict else ())
    assert strict or ending.is_right
    assert any("is not after" in line["problem"] for line in events_of(lines, "node_fault")) is strict


QUARTER = (Fault.HTML, Fault.ERROR, Fault.NULL_BLOCK, Fault.EMPTY_LOGS, Fault.WRONG_BLOCK_HASH)


async def test_a_single_node_whose_answers_are_faulty_a_quarter_of_the_time_is_read_whole(database: Database) -> None:
    simulation = simulation_of(75)
    server = ExecutionServer(simulation.chain)
    server.faults.rates = dict.fromkeys(QUARTER, 0.25 / len(QUARTER))
    async with followed(database, simulation, server) as scenario:
        await scenario.grow(GROWTH)
        assert (await scenario.ending()).is_right
    assert server.faults.fired.total() > 20
