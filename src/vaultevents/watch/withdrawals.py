"""Source `withdrawals`: what validators paid to vaults, by whole epochs (interface §6.5, decisions E4, C3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vaultevents.chain.beacon import BeaconChain
from vaultevents.chain.execution import ExecutionChain
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.registry import Registry
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32, Pubkey, ValidatorIndex, hex_text
from vaultevents.core.validators import ValidatorRecord
from vaultevents.core.withdrawals import WithdrawalBlock, fold, last_index_after, wanted
from vaultevents.store.pool import Database
from vaultevents.store.validators import epoch_at, known
from vaultevents.watch.watcher import Reading


@dataclass(frozen=True, slots=True)
class Reached:
    """The anchor: the last block that was read and the last withdrawal index up to it (None: there was none yet)."""

    number: int
    hash: Hash32
    last_index: int | None

    @classmethod
    def parse(cls, text: str) -> Reached:
        number, block_hash, last_index = text.split(":")
        return cls(int(number), Hash32(bytes.fromhex(block_hash[2:])), int(last_index) if last_index else None)

    def __str__(self) -> str:
        return f"{self.number}:{hex_text(self.hash)}:{'' if self.last_index is None else self.last_index}"


class WithdrawalsSource:
    """Gapless, linked withdrawals of execution blocks, folded when their epoch is final and complete.

    An epoch is complete when a final block of a later epoch exists. A validator that nobody knows yet is looked up
    for its pubkey and handed to `meet`, which adopts it (C5).
    """

    stream = "withdrawals"

    def __init__(
        self,
        chain: ExecutionChain,
        beacon: BeaconChain,
        database: Database,
        time: ChainTime,
        meet: Callable[[Sequence[ValidatorRecord]], None],
    ) -> None:
        self._chain, self._beacon, self._database, self._time, self._meet = chain, beacon, database, time, meet

    async def head(self) -> int:
        return epoch_at(self._time, (await self._chain.final_head()).timestamp_s) - 1

    async def begin(self) -> tuple[int, str | None]:
        return await self.head(), None

    async def read(self, span: Span, anchor: str | None, registry: Registry) -> Reading:
        link = Reached.parse(anchor) if anchor else None
        blocks = await self._blocks(span, link)
        if not blocks:
            return Reading((), anchor)
        vaults = registry.vault_addresses()
        seen = fold(blocks, vaults, await self._pubkeys(wanted(blocks, vaults)), self._time)
        last_index = last_index_after(blocks, link.last_index if link else None)
        return Reading(seen, str(Reached(blocks[-1].number, blocks[-1].hash, last_index)))

    async def _blocks(self, span: Span, link: Reached | None) -> list[WithdrawalBlock]:
        """All blocks of the epochs of `span`: no more than it has slots, cut off where the next epoch begins."""
        if link is not None:
            first = link.number + 1
        else:
            first = await self._chain.first_block_at(self._time.epoch_start_s(span.first))
        last = min(first + len(span) * self._time.slots_per_epoch - 1, (await self._chain.final_head()).number)
        if last < first:
            return []
        blocks = await self._chain.read_withdrawals(
            Span(first, last), link.hash if link else None, link.last_index if link else None
        )
        return [block for block in blocks if self._time.epoch_at(block.timestamp_s) <= span.last]

    async def _pubkeys(self, indices: set[ValidatorIndex]) -> dict[int, Pubkey]:
        pubkeys: dict[int, Pubkey] = {record.index: record.pubkey for record in await known(self._database)}
        if unknown := sorted(indices - pubkeys.keys()):
            met = await self._beacon.validators(unknown)
            self._meet(met)
            pubkeys.update((record.index, record.pubkey) for record in met)
        return pubkeys
