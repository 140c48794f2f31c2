"""Save to the database what is learned of nodes, for `status` and for the next start."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.nodes import UPSTREAMS, Latency, NodeState, Upstream
from vaultevents.store import nodes
from vaultevents.store.pool import Database

KEEP_NODES_S = 5.0
FIGURES_S = 15.0
"""Lag and latency change all the time; they are saved so often, and whenever something else is."""


class Pool(Protocol):
    """The nodes of one upstream."""

    def node_states(self) -> list[NodeState]: ...


async def keep_node_state(database: Database, pools: Mapping[Upstream, Pool]) -> None:
    """Save what changes about the nodes, every few seconds and when it is cancelled."""
    saved: dict[Upstream, tuple[int, list[NodeState]]] = {}
    figures: dict[Upstream, tuple[float, list[Latency | None]]] = {}

    async def save(figures_s: float) -> None:
        for upstream in UPSTREAMS:
            node_states = pools[upstream].node_states() if upstream in pools else []
            # an older copy of the database may lack what was saved
            lasting = (database.losses, [_lasting(memory) for memory in node_states])
            saved_at, before = figures.get(upstream, (float("-inf"), []))
            since_s, latencies = time.monotonic() - saved_at, [memory.latency for memory in node_states]
            is_due = since_s >= figures_s and (latencies != before or _has_new_lag(node_states, since_s))
            if is_due or saved.get(upstream) != lasting:
                await nodes.save_node_state(database, upstream, node_states)
                saved[upstream], figures[upstream] = lasting, (time.monotonic(), latencies)

    try:
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                await save(FIGURES_S)
            await asyncio.sleep(KEEP_NODES_S)
    finally:
        with contextlib.suppress(DatabaseUnavailable, TimeoutError):
            async with asyncio.timeout(KEEP_NODES_S):
                await save(0.0)


@asynccontextmanager
async def keeping_learned_limits(database: Database, pools: Mapping[Upstream, Pool]) -> AsyncIterator[None]:
    """Keeps at the end what was learned of the nodes' limits, beside the process that watches."""
    try:
        yield
    finally:
        with contextlib.suppress(DatabaseUnavailable):
            for upstream, pool in pools.items():
                await nodes.save_limits(database, upstream, pool.node_states())


def _lasting(memory: NodeState) -> NodeState:
    """What is worth writing: not that time goes by, nor every small step of a rate."""
    rate = memory.requests_per_s
    rounded = None if rate is None else float(f"{rate:.1g}")
    return replace(memory, since_s=0.0, requests_per_s=rounded, lag=None, latency=None)


def _has_new_lag(node_states: Iterable[NodeState], since_s: float) -> bool:
    return any(memory.lag is not None and memory.lag.age_s < since_s for memory in node_states)
