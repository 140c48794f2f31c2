"""Estimate how much a replay is going to ask and how long that may take, from a few small samples of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.core.spans import Span
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.watch.streams import Stream

SAMPLES = 3
ENDS = 2
LARGEST_SHARE = 20
"""A sample is at most a twentieth of the range, and at most what is committed at once."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What reading `positions` blocks or epochs of a stream will take, from `sampled` of them: requests over HTTP, the
    calls in them (what providers count), and seconds. Storing and the files of reports are not in it.
    """

    stream: str
    unit: str
    positions: int
    sampled: int
    requests: int
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Cost:
    requests: float
    calls: float
    seconds: float


async def estimate(stream: Stream, chain: ExecutionChain, outbox: Outbox, span: Span) -> Estimate:
    """Read samples at the beginning, in the middle and at the end, as the replay would, and two positions alone.

    These show what each step costs whatever its length: its ends. What the samples cost above that grows with the
    positions between. Nothing is written. It will take less time, since a replay reads some steps ahead.
    """
    size = min(stream.backfill_step, max(ENDS, len(span) // LARGEST_SHARE), len(span))
    starts = {span.first + place * (len(span) - size) // (SAMPLES - 1) for place in range(SAMPLES)}
    alone = await _sample(stream, chain, outbox, Span(span.first, min(span.first + ENDS - 1, span.last)))
    costs = [await _sample(stream, chain, outbox, Span(first, first + size - 1)) for first in sorted(starts)]
    steps = math.ceil(len(span) / stream.backfill_step)

    def total(step: float, samples: Sequence[float]) -> float:
        above = max(0.0, sum(samples) / len(samples) - step)
        return steps * step + (above / (size - ENDS) * (len(span) - ENDS * steps) if size > ENDS else 0.0)

    return Estimate(
        stream.source.stream,
        stream.unit,
        len(span),
        min(ENDS, len(span)) + size * len(costs),
        round(total(alone.requests, [cost.requests for cost in costs])),
        round(total(alone.calls, [cost.calls for cost in costs])),
        round(total(alone.seconds, [cost.seconds for cost in costs]), 1),
    )


async def _sample(stream: Stream, chain: ExecutionChain, outbox: Outbox, span: Span) -> _Cost:
    registry, source = await outbox.registry(), stream.source
    requests, calls, begin_s = chain.counters.requests, chain.counters.calls, time.monotonic()
    cursor = Cursor(0, source.stream, "replay", span.first, span.first - 1, None, span.last)
    await source.read(span, cursor, registry)
    seconds = time.monotonic() - begin_s
    return _Cost(chain.counters.requests - requests, chain.counters.calls - calls, seconds)
