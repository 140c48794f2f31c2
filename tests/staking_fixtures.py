"""Several nodes over one devnet simulation with validators, what reads them, and nodes that leave something out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from simulation_fixtures import Rows, StakingSources
from vaultevents.chain.beacon.client import BeaconChain, BeaconOptions
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.core.events import EVENT_TYPES
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.node import Node
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import status
from vaultevents.store.pool import Database
from vaultevents.watch.deposits import DepositOptions
from vaultevents.watch.discovery import Discovery, FindBy
from vaultevents.watch.validators import ValidatorsSource
from vaultevents.watch.withdrawals import WithdrawalsSource

STAKING_TYPES = tuple(name for name in EVENT_TYPES if name.startswith("validator_"))


def staking_simulation(blocks: int = 240, seed: int = 3, **settings: Any) -> Simulation:
    made = Simulation(seed, validators=40, **settings)
    made.history(blocks)
    return made


def due(made: Simulation, registrations: Any = None) -> Rows:
    """The events of validators that a right service has sent by now."""
    return dict(made.expected(registrations, event_types=STAKING_TYPES))


@asynccontextmanager
async def staking_of(
    database: Database,
    made: Simulation,
    nodes: Sequence[ExecutionServer] = (),
    beacon_nodes: Sequence[BeaconServer] = (),
    *,
    batch_size: int = 100,
    per_post: int = 1000,
    per_get: int = 20,
    tail: int = 64,
    timeout_s: float = 10.0,
    set_aside_s: float = 0.02,
    find_by: FindBy = "auto",
    deposit_step: int = 10_000,
) -> AsyncIterator[StakingSources]:
    """Like `simulation_fixtures.staking`, over any number of nodes (default: one of each) and with given deadlines."""
    nodes = nodes or [ExecutionServer(made.chain)]
    beacon_nodes = beacon_nodes or [BeaconServer(made.beacon)]
    servers: list[ExecutionServer | BeaconServer] = [*nodes, *beacon_nodes]
    patience = {"retry_wait_s": 0.0, "set_aside_s": set_aside_s, "attempts": 2, "total_timeout_s": timeout_s}
    options = ExecutionOptions(batch_size=batch_size, **patience)  # type: ignore[arg-type]
    beacon_options = BeaconOptions(ids_per_post=per_post, ids_per_get=per_get, tail=tail, **patience)  # type: ignore[arg-type]

    def now_s() -> int:
        return made.chain.head.timestamp_s

    urls = [await server.start() for server in servers]
    try:
        async with (
            ExecutionChain(urls[: len(nodes)], head=HeadPolicy(), options=options) as chain,
            BeaconChain(urls[len(nodes) :], beacon_options, clock=now_s) as beacon,
        ):
            identity = await beacon.identity()
            beacon.expect(identity)
            chain.expect(await chain.identity())
            deposits = DepositOptions(step=deposit_step)
            discovery = Discovery(
                beacon, chain, database, identity.time, poll_s=0.01, find_by=find_by, deposits=deposits
            )
            validators = ValidatorsSource(database, identity.time, now_s)
            withdrawals = WithdrawalsSource(chain, beacon, database, identity.time, discovery.meet)
            yield StakingSources(discovery, validators, withdrawals, beacon, identity.time)
    finally:
        for server in servers:
            await server.stop()


class LeavingOut(Node):
    """An execution node whose blocks lack what `drop` takes from their lists of withdrawals."""

    __slots__ = ("drop",)

    def __init__(self, chain: Chain, drop: Callable[[dict[str, Any]], list[Any]]) -> None:
        super().__init__(chain)
        self.drop = drop

    def call(self, method: str, params: list[Any]) -> Any:
        answer = super().call(method, params)
        if method == "eth_getBlockByNumber" and answer:
            return {**answer, "withdrawals": self.drop(answer)}
        return answer


async def problems(database: Database) -> dict[str, str | None]:
    """Why each live stream does not move, as `status` shows it."""
    return {cursor.stream: cursor.problem for cursor in (await status.read(database)).cursors if cursor.kind == "live"}
