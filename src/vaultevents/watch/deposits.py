"""Find the public keys that were deposited for vaults, where the beacon node does not give all validators (rule C5).

eth_getLogs of the deposit contract ─▶ the union of what nodes claim, blocks with deposits of ours from their receipts
the indices of all deposits          ─▶ consecutive, also from one range to the next: no node can leave one out
A search goes back to the last deposit where the next one shows that some are missing.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

import structlog

from vaultevents.chain.beacon.client import BeaconChain
from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.chain.execution.logs import LogRange
from vaultevents.core.deposits import DEPOSIT_EVENT, decode_deposit
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.logs import Header
from vaultevents.core.spans import Span
from vaultevents.core.units import Address
from vaultevents.core.validators import vault_of
from vaultevents.store.deposits import (
    DepositSearch,
    StoredDeposit,
    begin_deposit_search,
    deposit_searches,
    save_deposit_search,
)
from vaultevents.store.pool import Database

log = structlog.get_logger("discovery")

REPORT_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class DepositOptions:
    """Where the search for deposits begins: at a block, else at a time; `step` blocks are committed at once."""

    first_block: int | None = None
    first_time_s: int | None = None
    step: int = 10_000


@dataclass(frozen=True, slots=True)
class Searched:
    """The vaults whose deposits are known up to the finalized block `head`, and whether these are all."""

    vaults: frozenset[Address]
    head: Header
    is_whole: bool


class Deposits:
    """Reads the deposits of vaults up to the finalized block, and keeps in the database how far it is."""

    def __init__(self, beacon: BeaconChain, chain: ExecutionChain, database: Database, options: DepositOptions) -> None:
        self._beacon, self._chain, self._database, self._options = beacon, chain, database, options
        self._contract: Address | None = None

    async def search(self, vaults: frozenset[Address], within_s: float | None = None) -> Searched:
        """Read on for each vault, at most for `within_s`; those that are furthest come first.

        Raises `SourceUnavailable` when nodes do not give the deposits, or leave some out.
        """
        begun_at = reported_at = time.monotonic()
        head = await self._chain.final_head()
        searches = await deposit_searches(self._database)
        new = vaults.difference(*(search.vaults for search in searches)) if searches else vaults
        if new:
            await begin_deposit_search(self._database, new, await self._first_block())
        while behind := [search for search in await deposit_searches(self._database) if search.position < head.number]:
            now = time.monotonic()
            if within_s is not None and now - begun_at >= within_s:
                break
            if now - reported_at >= REPORT_EVERY_S:
                reported_at = now
                log.info("deposit_search", block=behind[0].position, last=head.number)
            await self._advance(behind[0], head)
        waiting = vaults & frozenset[Address]().union(*(search.vaults for search in behind))
        return Searched(vaults - waiting, head, not waiting)

    async def _first_block(self) -> int:
        options = self._options
        if options.first_block is not None:
            return options.first_block
        return 0 if options.first_time_s is None else await self._chain.first_block_at(options.first_time_s)

    async def _advance(self, search: DepositSearch, head: Header) -> None:
        if self._contract is None:
            self._contract = await self._beacon.deposit_contract()
        span = Span(search.position + 1, min(search.position + self._options.step, head.number))
        found = await self._chain.read_deposits(span, self._contract, search.vaults, search.anchor)
        if _is_whole(search.next_deposit, found.deposits):
            await save_deposit_search(
                self._database, search, _moved(search, span, found), _stored(found, search.vaults)
            )
            return
        # one that a node left out earlier lies behind the last one that was seen
        back = -1 if search.last_deposit_block is None else search.last_deposit_block - 1
        await save_deposit_search(self._database, search, replace(search, position=back, anchor=None))
        raise SourceUnavailable(
            "the execution nodes in use",
            f"leave out deposits before deposit {min(found.deposits)}: deposit {search.next_deposit} was to come next; "
            f"blocks from {back + 1} on are read again, and if this stays, name another node in execution.urls",
        )


def _is_whole(next_deposit: int | None, indices: Collection[int]) -> bool:
    """Whether the indices of all deposits of a span have no gap, also towards the deposits before it."""
    if not indices:
        return True
    first, last = min(indices), max(indices)
    return last - first + 1 == len(indices) and (next_deposit is None or first <= next_deposit)


def _moved(search: DepositSearch, span: Span, found: LogRange) -> DepositSearch:
    moved = replace(search, position=span.last, anchor=found.last.hash)
    if not found.deposits or max(found.deposits) < (search.next_deposit or 0):
        return moved
    last = max(found.deposits)
    return replace(moved, next_deposit=last + 1, last_deposit_block=found.deposits[last])


def _stored(found: LogRange, vaults: frozenset[Address]) -> list[StoredDeposit]:
    stored: list[StoredDeposit] = []
    for entry in found.logs:
        deposit = decode_deposit(entry.data) if entry.topics[0] == DEPOSIT_EVENT else None
        vault = None if deposit is None else vault_of(deposit.credentials)
        if deposit is not None and vault is not None and vault in vaults:
            stored.append(StoredDeposit(deposit.pubkey, vault, entry.block_number))
    return stored
