"""Blocks that anybody can fill with logs of a watched topic: nobody's events, but more than one answer holds."""

from __future__ import annotations

from vaultevents.devnet.acts import Funding, log_of
from vaultevents.devnet.blocks import Block, Transaction
from vaultevents.devnet.chain import Chain

UNREGISTERED = bytes.fromhex("f100d" * 8)
"""A contract that no account has registered."""

_LOGS_PER_TRANSACTION = 2_000


def flood(chain: Chain, logs: int, emitter: bytes = UNREGISTERED) -> list[Transaction]:
    """Return transactions with `logs` logs of `EtherFunded` in all, emitted by `emitter`, 1 wei each."""
    log = log_of(Funding(emitter, 1))
    counts = [min(_LOGS_PER_TRANSACTION, logs - first) for first in range(0, logs, _LOGS_PER_TRANSACTION)]
    return [chain.transaction([log] * count) for count in counts]


def mine_flood(chain: Chain, logs: int, emitter: bytes = UNREGISTERED) -> Block:
    """Mine a block that has only such transactions."""
    return chain.mine(flood(chain, logs, emitter))
