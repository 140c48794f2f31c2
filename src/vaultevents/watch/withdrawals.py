"""Source `withdrawals`: what validators paid to vaults, by whole epochs (rules E4 and C3)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vaultevents.chain.beacon.client import BeaconChain
from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.logs import Header
from vaultevents.core.registry import Registry
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32, Pubkey, ValidatorIndex, hex_text
from vaultevents.core.validators import ValidatorRecord
from vaultevents.core.withdrawals import WithdrawalBlock, fold, last_index_after, wanted
from vaultevents.store.outbox import Cursor
from vaultevents.store.pool import Database
from vaultevents.store.validators import epoch_at, known
from vaultevents.watch.source import Reading


@dataclass(frozen=True, slots=True)
class Reached:
    """The anchor: the last block that was read and the last withdrawal index up to it."""

    number: int
    hash: Hash32
    last_index: int

    @classmethod
    def parse(cls, text: str) -> Reached:
        number, block_hash, last_index = text.split(":")
        return cls(int(number), Hash32(bytes.fromhex(block_hash[2:])), int(last_index))

    def __str__(self) -> str:
        return f"{self.number}:{hex_text(self.hash)}:{self.last_index}"


class WithdrawalsSource:
    """Gapless, linked withdrawals of execution blocks, folded when their epoch is final and complete.

    An epoch is complete when a final block of a later epoch exists. A validator that nobody knows yet is looked up
    for its pubkey and handed to `meet`, which adopts it (rule C5).
    """

    stream = "withdrawals"
    ahead = 0

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

    async def read(self, span: Span, cursor: Cursor, registry: Registry) -> Reading:
        link = Reached.parse(cursor.anchor) if cursor.anchor else None
        blocks = await self._blocks(span, link)
        if not blocks:
            return Reading((), cursor.anchor)
        vaults = registry.vault_addresses()
        seen = fold(blocks, vaults, await self._pubkeys(wanted(blocks, vaults)), self._time)
        last_index = last_index_after(blocks, link.last_index if link else None)
        # before the first withdrawal of all there is no index to link to, so the next span finds its own beginning
        reached = None if last_index is None else str(Reached(blocks[-1].number, blocks[-1].hash, last_index))
        return Reading(seen, reached)

    async def _blocks(self, span: Span, link: Reached | None) -> list[WithdrawalBlock]:
        """All blocks of the epochs of `span`; no withdrawal is missing, not even the first or the last (rule C3).

        The index shows a gap only between two withdrawals. So the same node is asked for blocks beyond the end, and
        without a link for blocks before the beginning, until some with withdrawals were seen on both sides or there
        are no more.
        """
        final = await self._final_after(span.last)
        first = link.number + 1 if link else await self._chain.first_block_at(self._time.epoch_start_s(span.first))
        slots = len(span) * self._time.slots_per_epoch
        before, after = 0, 1
        while True:
            begin, last = max(first - before, 0), min(first + slots + after - 1, final.number)
            blocks = await self._read(Span(begin, last), link, final)
            earlier, inside, later = self._cut(blocks, first, span.last)
            if not _pays(inside):
                return inside
            begins = link is not None or begin == 0 or _pays(earlier) or _first_index(inside) == 0
            ends = last == final.number or _pays(later)
            if begins and ends:
                return inside
            before, after = (before if begins else _further(before)), (after if ends else _further(after))

    async def _final_after(self, epoch: int) -> Header:
        """The finalized block; raises `SourceUnavailable` when it is not of a later epoch, so this one has no end."""
        final = await self._chain.final_head()
        if epoch_at(self._time, final.timestamp_s) <= epoch:
            raise SourceUnavailable(
                "the execution node in use",
                f"its finalized block {final.number} does not complete epoch {epoch}, which was final before: wait "
                "until it has caught up",
            )
        return final

    async def _read(self, span: Span, link: Reached | None, final: Header) -> list[WithdrawalBlock]:
        blocks = await self._chain.read_withdrawals(
            span, link.hash if link else None, link.last_index if link else None
        )
        if span.last == final.number and blocks[-1].hash != final.hash:
            raise SourceUnavailable(
                "the execution nodes in use",
                f"give two blocks {final.number}: {hex_text(final.hash)} as the finalized one and "
                f"{hex_text(blocks[-1].hash)} by its number; wait until they agree, or see which one is wrong",
            )
        return blocks

    def _cut(
        self, blocks: Sequence[WithdrawalBlock], first: int, last_epoch: int
    ) -> tuple[Sequence[WithdrawalBlock], list[WithdrawalBlock], Sequence[WithdrawalBlock]]:
        """What lies before block `first`, what from there to the end of `last_epoch`, and what after it."""
        begin = bisect_left(blocks, first, key=lambda block: block.number)
        end = bisect_right(blocks, last_epoch, key=lambda block: epoch_at(self._time, block.timestamp_s))
        return blocks[:begin], list(blocks[begin:end]), blocks[end:]

    async def _pubkeys(self, indices: set[ValidatorIndex]) -> dict[int, Pubkey]:
        pubkeys: dict[int, Pubkey] = {record.index: record.pubkey for record in await known(self._database)}
        if unknown := sorted(indices - pubkeys.keys()):
            met = await self._beacon.validators(unknown)
            self._meet(met)
            pubkeys.update((record.index, record.pubkey) for record in met)
        return pubkeys


def _pays(blocks: Sequence[WithdrawalBlock]) -> bool:
    return any(block.withdrawals for block in blocks)


def _first_index(blocks: Sequence[WithdrawalBlock]) -> int:
    return next(block.withdrawals[0].index for block in blocks if block.withdrawals)


def _further(distance: int) -> int:
    """Blocks nearly always have withdrawals; where these are rare, the search must not take a step for each block."""
    return max(1, 8 * distance)
