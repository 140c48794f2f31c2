"""Finds the validators that pay to registered vaults and keeps their records (decision C5).

Each time finality advances: the known validators again, and the network's newest by index. For vaults that were never
looked for, and once a day because credentials can change: one streamed scan of the whole finalized set for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import timedelta

import structlog

from vaultevents.chain.beacon import BeaconChain, Finality
from vaultevents.chain.execution import ExecutionChain
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import DatabaseUnavailable, SourceUnavailable
from vaultevents.core.registry import Registry
from vaultevents.core.units import Address
from vaultevents.core.validators import ValidatorRecord, vault_of
from vaultevents.store.accounts import registry as load_registry
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.validators import known, read_discovery, record, set_span_times
from vaultevents.watch.watcher import pauses

log = structlog.get_logger("discovery")

RESCAN_AFTER = timedelta(days=1)
TAIL_IDS = 64


class Discovery:
    """One worker per daemon; several daemons do the same work twice and harm nothing."""

    def __init__(
        self, beacon: BeaconChain, chain: ExecutionChain, database: Database, time: ChainTime, poll_s: float
    ) -> None:
        self._beacon, self._chain, self._database = beacon, chain, database
        self._time, self._poll_s = time, poll_s
        self._outbox = Outbox(database)
        self._met: dict[int, ValidatorRecord] = {}
        self._told: str | None = None

    def meet(self, records: Sequence[ValidatorRecord]) -> None:
        """Validators that somebody came across; they are adopted at the next step."""
        self._met.update((record.index, record) for record in records)

    async def run(self) -> None:
        """Steps for ever; waits and tries again when an upstream fails."""
        waits = pauses()
        while True:
            try:
                await self.step()
            except (SourceUnavailable, DatabaseUnavailable) as error:
                pause = next(waits)
                await self._tell(str(error))
                log.warning("discovery_waits", problem=str(error), retry_in_s=pause)
                await asyncio.sleep(pause)
                continue
            waits = pauses()
            await self._tell(None)
            await asyncio.sleep(self._poll_s)

    async def _tell(self, problem: str | None) -> None:
        """What keeps discovery keeps the stream that lives on its records."""
        if problem == self._told:
            return
        self._told = problem
        with contextlib.suppress(DatabaseUnavailable):
            live = await self._outbox.live("validators")
            if live is not None:
                await self._outbox.note_problem(live, problem)

    async def step(self) -> None:
        """Brings everything that is known up to the present finality."""
        finality = await self._beacon.finality()
        registry = await load_registry(self._database)
        await self._place_spans(registry)
        vaults = registry.vault_addresses()
        if vaults:
            await self._scan_if_due(vaults)
        await self._refresh(finality, vaults)

    async def _place_spans(self, registry: Registry) -> None:
        """The times of first and last blocks that have become final since they were registered (E12)."""
        head = await self._chain.final_head()
        blocks = {block for block in registry.blocks_without_time() if block <= head.number}
        if blocks:
            times_s = {block: (await self._chain.header(block)).timestamp_s for block in sorted(blocks)}
            await set_span_times(self._database, times_s, self._time)

    async def _scan_if_due(self, vaults: frozenset[Address]) -> None:
        state = await read_discovery(self._database)
        if vaults <= state.scanned_vaults and state.scan_age is not None and state.scan_age < RESCAN_AFTER:
            return
        log.info("validator_scan_started", vaults=len(vaults))
        scan = await self._beacon.scan(vaults)
        recorded = await record(self._database, scan.records, size=scan.count, scanned=vaults)
        log.info("validator_scan_done", validators=scan.count, ours=len(scan.records), new=recorded.new)

    async def _refresh(self, finality: Finality, vaults: frozenset[Address]) -> None:
        state = await read_discovery(self._database)
        through = self._time.epoch_of(finality.block_slot)
        behind = state.known_through is None or through > state.known_through
        if not behind and not self._met:
            return
        met, self._met = self._met, {}
        found = list(met.values())
        size = state.size
        if behind:
            indices = [one.index for one in await known(self._database)]
            found += await self._beacon.validators(indices) if indices else []
            if vaults:
                newest, size = await self._tail(size)
                found += newest
        ours = [one for one in found if vault_of(one.credentials) in vaults]
        recorded = await record(self._database, ours, size=size, known_through=through if behind else None)
        if recorded.new:
            log.info("validators_adopted", new=recorded.new)

    async def _tail(self, size: int) -> tuple[list[ValidatorRecord], int]:
        """The validators that the network got since the last look; new ones are only appended."""
        found: list[ValidatorRecord] = []
        while True:
            part = await self._beacon.tail(size)
            found += part
            size += len(part)
            if len(part) < TAIL_IDS:
                return found, size
