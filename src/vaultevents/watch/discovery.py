"""Finds the validators that pay to registered vaults and keeps their records (rule C5).

Each poll costs the beacon node one small call. Each time finality advances: the known validators again, and the
network's newest by index. For vaults that were never looked for, and once a day because credentials can change: one
streamed scan of the whole finalized set for all. Where the beacon node does not give the whole set, the deposits of the
vaults (deposits.py) name the public keys to ask for (decision 0053).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import structlog

from vaultevents.chain.beacon.client import BeaconChain, ListRefused
from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import DatabaseUnavailable, SourceUnavailable
from vaultevents.core.registry import Registry
from vaultevents.core.units import Address
from vaultevents.core.validators import ValidatorRecord, validators_head, vault_of
from vaultevents.store.deposits import undiscovered
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.registry import current_registry
from vaultevents.store.validators import (
    DiscoveryState,
    known,
    note_discovery_problem,
    read_discovery,
    record,
    set_span_times,
    use_deposits,
)
from vaultevents.watch.deposits import DepositOptions, Deposits, Searched
from vaultevents.watch.watcher import pauses

log = structlog.get_logger("discovery")

RESCAN_AFTER = timedelta(days=1)
SEARCH_S = 30.0
"""How long deposits are searched until the known validators are read again."""

FindBy = Literal["auto", "list", "deposits"]
"""Where validators are found: the list of all validators, deposits, or the list unless it is refused."""


class Discovery:
    """One worker per daemon; several daemons do the same work twice and harm nothing."""

    def __init__(
        self,
        beacon: BeaconChain,
        chain: ExecutionChain,
        database: Database,
        time: ChainTime,
        poll_s: float,
        *,
        find_by: FindBy = "auto",
        deposits: DepositOptions | None = None,
    ) -> None:
        self._beacon, self._chain, self._database = beacon, chain, database
        self._time, self._poll_s, self._find_by = time, poll_s, find_by
        self._deposits = Deposits(beacon, chain, database, deposits or DepositOptions())
        self._list_asked_at: float | None = None
        self._outbox = Outbox(database)
        self._met: dict[int, ValidatorRecord] = {}
        self._adopted: dict[int, ValidatorRecord] = {}  # of those that were met
        self._refreshed_epoch = self._known_through = -1
        self._losses = database.losses
        self._reported: str | None = ""  # what an earlier run has reported is withdrawn, too

    def meet(self, records: Sequence[ValidatorRecord]) -> None:
        """Validators that somebody came across; they are adopted at the next step."""
        self._met.update((record.index, record) for record in records)

    async def run(self) -> None:
        """Steps for ever; waits and tries again when an upstream fails."""
        waits = pauses()
        while True:
            try:
                is_whole = await self.step(SEARCH_S)
            except (SourceUnavailable, DatabaseUnavailable) as error:
                pause = next(waits)
                await self._report_problem(str(error))
                log.warning("discovery_waits", problem=str(error), retry_in_s=pause)
                await asyncio.sleep(pause)
                continue
            waits = pauses()
            await self._report_problem(None)
            if is_whole:
                await asyncio.sleep(self._poll_s)

    async def _report_problem(self, problem: str | None) -> None:
        """What keeps discovery keeps the stream that lives on its records."""
        if problem is None and self._reported is None:
            return
        with contextlib.suppress(DatabaseUnavailable):
            await note_discovery_problem(self._database, problem)
            live = await self._outbox.live("validators")
            if live is not None:
                await self._outbox.note_problem(live, problem)
                self._reported = problem

    async def step(self, search_s: float | None = None) -> bool:
        """Bring everything that is known up to the present finality; False where `search_s` did not suffice for it."""
        if self._database.losses != self._losses:  # an older copy of the database may lack what was adopted
            self._losses = self._database.losses
            self._met = self._adopted | self._met
            self._reported = ""
        finalized_epoch = await self._beacon.finalized_epoch()
        registry = await current_registry(self._database)
        await self._place_spans(registry)
        vaults = registry.vault_addresses()
        searched = None
        if vaults and not await self._uses_list(vaults):
            searched = await self._deposits.search(vaults, search_s)
        state = await read_discovery(self._database)
        is_new = searched is not None and not searched.vaults <= state.scanned_vaults
        if is_new or state.known_through is None or finalized_epoch > self._refreshed_epoch:
            await self._refresh(state, vaults, searched)
        if self._met:
            await self._adopt_met(vaults)
        return searched is None or searched.is_whole

    async def covers(self, epoch: int) -> bool:
        """Whether the stored records have all activations and exits up to `epoch`; the beacon node is not asked."""
        registry, state = await current_registry(self._database), await read_discovery(self._database)
        if self._met or state.known_through is None or not registry.vault_addresses() <= state.scanned_vaults:
            return False
        final = (await self._chain.final_head()).number
        placed = all(block > final for block in registry.blocks_without_time())
        return placed and validators_head(epoch, state.known_through) >= epoch

    async def _place_spans(self, registry: Registry) -> None:
        """The times of first and last blocks that have become final since they were registered (rule E12)."""
        waiting = registry.blocks_without_time()
        if not waiting:
            return
        head = await self._chain.final_head()
        if blocks := sorted(block for block in waiting if block <= head.number):
            times_s = {block: (await self._chain.header(block)).timestamp_s for block in blocks}
            await set_span_times(self._database, times_s, self._time)

    async def _uses_list(self, vaults: frozenset[Address]) -> bool:
        """Whether validators are found in the list of all, which is scanned now if it is due; else by deposits."""
        state = await read_discovery(self._database)
        if self._find_by == "deposits":
            if state.source != "deposits":
                await use_deposits(self._database, None)
            return False
        asked_at, now = self._list_asked_at, asyncio.get_running_loop().time()
        is_recent = asked_at is not None and now - asked_at < RESCAN_AFTER.total_seconds()
        if self._find_by == "auto" and state.source == "deposits" and is_recent:
            return False
        try:
            await self._scan_if_due(state, vaults)
        except ListRefused as error:
            if self._find_by == "list":
                raise SourceUnavailable(
                    error.node, f'{error.problem}; set beacon.validators = "auto" or "deposits", or name another node'
                ) from None
            self._list_asked_at = now
            log.warning("validator_list_refused", problem=str(error))
            await use_deposits(self._database, str(error))
            return False
        return True

    async def _scan_if_due(self, state: DiscoveryState, vaults: frozenset[Address]) -> None:
        went_back = (-1 if state.known_through is None else state.known_through) < self._known_through
        if went_back:  # what was adopted since that copy was made is gone, those met in withdrawals as well
            log.warning("discovery_went_back", known=self._known_through, stored=state.known_through)
            self._refreshed_epoch = -1
        elif (
            state.source == "list"
            and vaults <= state.scanned_vaults
            and state.scan_age is not None
            and state.scan_age < RESCAN_AFTER
        ):
            return
        log.info("validator_scan_started", vaults=len(vaults))
        scan = await self._beacon.scan(vaults)
        recorded = await record(self._database, scan.records, size=scan.count, scanned=vaults, source="list")
        log.info("validator_scan_done", validators=scan.count, ours=len(scan.records), new=recorded.new)

    async def _refresh(self, state: DiscoveryState, vaults: frozenset[Address], searched: Searched | None) -> None:
        """The known validators again, and those that the network got since the last look; new ones are only appended.

        Without a vault nothing was scanned, so there is no last look to go on from.
        """
        if searched is not None:
            await self._refresh_by_pubkey(vaults, searched)
            return
        if vaults:
            indices = [validator.index for validator in await known(self._database)]
            found = await self._beacon.refresh(indices, state.size)
            records = list({record.index: record for record in (*found.records, *found.newest)}.values())
            finality, size = found.finality, state.size + len(found.newest)
        else:
            finality, records, size = await self._beacon.finality(), [], state.size
        through = self._time.epoch_of(finality.block_slot)
        await self._adopt(records, vaults, size=size, known_through=through)
        self._refreshed_epoch, self._known_through = finality.epoch, through

    async def _refresh_by_pubkey(self, vaults: frozenset[Address], searched: Searched) -> None:
        """The known validators again, and those whose deposits were found.

        A validator with a later deposit than was searched cannot be active before five epochs after it.
        """
        indices = [validator.index for validator in await known(self._database)]
        pubkeys = await undiscovered(self._database, vaults)
        found = await self._beacon.refresh_by_pubkey(indices, pubkeys)
        slots = found.finality.block_slot, self._time.slot_at(searched.head.timestamp_s)
        through = self._time.epoch_of(min(slots))
        complete = through if searched.vaults else None
        await self._adopt([*found.records, *found.newest], vaults, known_through=complete, scanned=searched.vaults)
        self._refreshed_epoch, self._known_through = found.finality.epoch, through

    async def _adopt_met(self, vaults: frozenset[Address]) -> None:
        met = dict(self._met)
        await self._adopt(list(met.values()), vaults)
        self._adopted |= met
        for index in met:
            self._met.pop(index)

    async def _adopt(
        self,
        records: Sequence[ValidatorRecord],
        vaults: frozenset[Address],
        *,
        size: int | None = None,
        known_through: int | None = None,
        scanned: frozenset[Address] | None = None,
    ) -> None:
        ours = [record for record in records if vault_of(record.credentials) in vaults]
        recorded = await record(self._database, ours, size=size, known_through=known_through, scanned=scanned)
        if recorded.new:
            log.info("validators_adopted", new=recorded.new)
