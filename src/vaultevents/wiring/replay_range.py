"""Ranges to read again: refuse what is not final, convert blocks and epochs into each other, estimate the reading."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from vaultevents.core.errors import InputError, SourceUnavailable
from vaultevents.core.spans import Span
from vaultevents.store.cursors import Unit
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.validators import epoch_at
from vaultevents.watch.estimate import Estimate, estimate
from vaultevents.wiring.sources import Sources


@dataclass(frozen=True, slots=True)
class Range:
    """What to read again, in blocks or in epochs."""

    unit: Unit
    span: Span

    def __str__(self) -> str:
        return f"{self.unit} {self.span.first}-{self.span.last}"


def whole_range(unit: Unit, first: int, last: int) -> Range:
    """Return a range. Raises `InputError` for one that ends before it begins."""
    if last < first:
        raise InputError(f"{unit} {last} lies before {unit} {first}: exchange them")
    return Range(unit, Span(first, last))


async def refuse_unfinished(sources: Sources, wanted: Range) -> None:
    """Raise `InputError` for a range that is not final in its own unit, or of epochs without a beacon chain."""
    if wanted.unit == "epoch" and sources.time is None:
        if not sources.unopened:
            raise _no_beacon()
        return  # where the epochs lie is not known, which is the failure of each stream
    final = await sources.chain.final_head()
    if wanted.unit == "block" or sources.time is None:
        head = final.number
    else:
        head = epoch_at(sources.time, final.timestamp_s) - 1  # complete as soon as a later one has a final block
    if wanted.span.last > head:
        raise InputError(f"{wanted.unit} {wanted.span.last} is not final and complete yet: replay up to {head}")


async def positions(sources: Sources, unit: Unit, wanted: Range) -> Span:
    """Return the positions of a stream of this unit that belong to the range, whether or not they are there yet.

    Of the other unit the range takes every position that it touches.
    """
    span = wanted.span
    if unit == wanted.unit:
        return span
    if sources.time is None:
        raise next(iter(sources.unopened.values()), _no_beacon())
    if unit == "block":
        first = await sources.chain.first_block_at(sources.time.epoch_start_s(span.first))
        after = await sources.chain.first_block_at(sources.time.epoch_start_s(span.last + 1))
        return Span(first, max(first, after - 1))  # an epoch may have no block
    ends = [(await sources.chain.header(block)).timestamp_s for block in (span.first, span.last)]
    return Span(*(epoch_at(sources.time, seconds) for seconds in ends))


def _no_beacon() -> InputError:
    return InputError("epochs are those of the beacon chain: name a node in beacon.urls, or give a range of blocks")


@dataclass(frozen=True, slots=True)
class Estimates:
    """One estimate for each stream; `unknown` has the streams without one, with the reason."""

    streams: list[Estimate]
    unknown: dict[str, str]
    log_range_blocks: int

    @property
    def requests(self) -> int:
        return sum(estimated.requests for estimated in self.streams)

    @property
    def calls(self) -> int:
        return sum(estimated.calls for estimated in self.streams)

    @property
    def seconds(self) -> float:
        return round(sum(estimated.seconds for estimated in self.streams), 1)


async def estimate_streams(
    sources: Sources, database: Database, wanted: Mapping[str, Span], within_s: float | None = None
) -> Estimates:
    """Estimate what reading a span of each stream asks and takes, as far as samples of it are read in time."""
    outbox = Outbox(database)
    found, unknown = list[Estimate](), {name: str(error) for name, error in sources.unopened.items()}
    ends_at_s = None if within_s is None else asyncio.get_running_loop().time() + within_s
    for stream in sources.streams:
        name = stream.source.stream
        if name not in wanted:
            continue
        try:
            async with asyncio.timeout_at(ends_at_s):
                found.append(await estimate(stream, sources.chain, outbox, wanted[name]))
        except SourceUnavailable as error:
            unknown[name] = str(error)
        except TimeoutError:
            unknown[name] = f"samples of it were not read within {within_s:g} s"
    return Estimates(found, unknown, sources.chain.log_range_blocks)
