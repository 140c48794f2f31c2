"""What is known of one node of an upstream, as it is shown to an operator and kept for the next start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Upstream = Literal["execution", "beacon", "ipfs"]
UPSTREAMS: Final[tuple[Upstream, ...]] = ("execution", "beacon", "ipfs")

CircuitState = Literal["closed", "open", "trial"]
"""In use; left alone for a while; asked one question at a time to see whether it is back."""
CIRCUIT_STATES: Final[tuple[CircuitState, ...]] = ("closed", "open", "trial")


@dataclass(frozen=True, slots=True)
class LogLimit:
    """How many blocks one eth_getLogs may span, and the fewest that were refused for their number; None: none were."""

    blocks: int
    refused: int | None = None


@dataclass(frozen=True, slots=True)
class HeadLag:
    """By how many blocks or slots the head of a node was behind the newest head of its kind of node.

    `age_s`: how long ago the node showed its head.
    """

    behind: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Median and 95th percentile of the time from a request to its whole answer, in s, over the last answers."""

    median_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class NodeState:
    """`name` is redacted. `since_s` is for how long the node has been in use, or has not been.

    `requests_per_s` is None while the node has refused none for their rate. `lag` and `latency` are of this process
    alone; None before the node has shown a head, or answered.
    """

    name: str
    state: CircuitState
    problem: str | None
    since_s: float
    requests_per_s: float | None
    logs: LogLimit | None = None
    lag: HeadLag | None = None
    latency: Latency | None = None
