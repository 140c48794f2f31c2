"""What is known of the nodes: written by the process that asks them, read by the next one and by `status`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from vaultevents.core.nodes import CircuitState, LogLimit, NodeState, Upstream
from vaultevents.store.pool import Connection, Database


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One configured node as an operator sees it; `name` is redacted.

    `behind`: by how many blocks or slots its head was behind the newest one of its kind of node, at `behind_at`.
    `latency_…`: percentiles of the time from a request to its whole answer, over its last answers.
    """

    upstream: Upstream
    name: str
    state: CircuitState
    problem: str | None
    since: datetime
    log_range: int | None
    requests_per_s: float | None
    updated_at: datetime
    behind: int | None
    behind_at: datetime | None
    latency_p50_s: float | None
    latency_p95_s: float | None


async def save_node_state(database: Database, upstream: Upstream, node_states: Sequence[NodeState]) -> None:
    """Keeps everything, in place of what was known; nodes that are not configured any longer are forgotten."""
    async with database.transaction() as connection:
        await connection.execute(
            "delete from nodes where upstream = $1 and name <> all ($2::text[])",
            upstream,
            [memory.name for memory in node_states],
        )
        for memory in _in_order(node_states):
            await connection.execute(_REMEMBER, upstream, *_values(memory))


async def save_limits(database: Database, upstream: Upstream, node_states: Sequence[NodeState]) -> None:
    """Store the learned limits of nodes and leave the rest as another process has stored it."""
    async with database.transaction() as connection:
        for memory in _in_order(node_states):
            await connection.execute(_REMEMBER_LIMITS, upstream, *_values(memory))


async def load_node_states(database: Database, upstream: Upstream) -> list[NodeState]:
    """What was kept of the nodes of an upstream."""
    async with database.transaction() as connection:
        found = await connection.fetch(
            "select name, state, problem, extract(epoch from db_now() - since)::float8 as since_s, log_range,"
            " log_range_refused, requests_per_s from nodes where upstream = $1",
            upstream,
        )
    return [
        NodeState(
            row["name"],
            row["state"],
            row["problem"],
            row["since_s"],
            row["requests_per_s"],
            None if row["log_range"] is None else LogLimit(row["log_range"], row["log_range_refused"]),
        )
        for row in found
    ]


async def facts(connection: Connection) -> list[NodeFacts]:
    """All configured nodes, by upstream."""
    found = await connection.fetch(
        "select upstream, name, state, problem, since, log_range, requests_per_s, updated_at, behind, behind_at,"
        " latency_p50_s, latency_p95_s from nodes order by upstream desc, name"
    )
    return [NodeFacts(**row) for row in found]


def _in_order(node_states: Sequence[NodeState]) -> list[NodeState]:
    """In one order everywhere, so that two who write wait for each other and never in a circle."""
    return sorted(node_states, key=lambda memory: memory.name)


def _values(memory: NodeState) -> tuple[object, ...]:
    logs, lag, latency = memory.logs, memory.lag, memory.latency
    return (
        memory.name,
        memory.state,
        memory.problem,
        memory.since_s,
        None if logs is None else logs.blocks,
        None if logs is None else logs.refused,
        memory.requests_per_s,
        None if lag is None else lag.behind,
        None if lag is None else lag.age_s,
        None if latency is None else latency.median_s,
        None if latency is None else latency.p95_s,
    )


_REMEMBER_LIMITS = """
insert into nodes (upstream, name, state, problem, since, log_range, log_range_refused, requests_per_s,
    behind, behind_at, latency_p50_s, latency_p95_s)
values ($1, $2, $3, $4, db_now() - make_interval(secs => $5), $6, $7, $8,
    $9, db_now() - make_interval(secs => $10), $11, $12)
on conflict (upstream, name) do update set log_range = excluded.log_range,
    log_range_refused = excluded.log_range_refused, requests_per_s = excluded.requests_per_s
"""
_REMEMBER = (
    f"{_REMEMBER_LIMITS}, state = excluded.state, problem = excluded.problem, since = excluded.since,"
    " behind = excluded.behind, behind_at = excluded.behind_at, latency_p50_s = excluded.latency_p50_s,"
    " latency_p95_s = excluded.latency_p95_s, updated_at = excluded.updated_at"
)
