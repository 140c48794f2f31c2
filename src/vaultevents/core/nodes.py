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
class NodeState:
    """`name` is redacted. `since_s` is for how long the node has been in use, or has not been.

    `requests_per_s` is None while the node has refused none for their rate.
    """

    name: str
    state: CircuitState
    problem: str | None
    since_s: float
    requests_per_s: float | None
    logs: LogLimit | None = None
