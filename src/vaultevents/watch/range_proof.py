"""The gap proof: a final range derived again from headers and receipts, held against what is stored (rules I2 and I6).

Nothing is written. The registry must stay the same from the beginning to the end, and the range must have been read.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import structlog

from vaultevents.chain.execution.block_proofs import ProvenRange
from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.core.errors import InputError, NodeFault, SourceUnavailable
from vaultevents.core.events import project
from vaultevents.core.log_digest import fact_line
from vaultevents.core.logs import TOPICS, Header, fold, owned
from vaultevents.core.registry import Registry, Watched
from vaultevents.core.reports import decode_all
from vaultevents.core.spans import Span, next_span
from vaultevents.core.units import Address, Hash32
from vaultevents.store.cursors import readiness
from vaultevents.store.event_comparison import Comparison, body_digest, compare_events, compare_reports
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.registry import registry_version
from vaultevents.watch.watcher import pauses

log = structlog.get_logger("audit")

SPAN_BLOCKS = 1_000
PATIENCE = 5
SHOWN_IDS = 20
BREACHES: Final = ("missing", "extra", "different")
KINDS: Final = (*BREACHES, "near_head")


@dataclass(slots=True)
class Tally:
    """How stored rows compare with the chain; of the ids that are not the same the first ones are kept."""

    same: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    shown: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def add(self, compared: Comparison) -> None:
        self.same += compared.same
        for kind in KINDS:
            ids: tuple[str, ...] = getattr(compared, kind)
            self.counts[kind] += len(ids)
            self.shown[kind] += ids[: SHOWN_IDS - len(self.shown[kind])]

    @property
    def is_whole(self) -> bool:
        return not any(self.counts[kind] for kind in BREACHES)


@dataclass(frozen=True, slots=True)
class GapProof:
    """What was found of `span`, whose last block is `last`.

    `facts` counts the logs of the two topics, of any contract, and `facts_digest` is the SHA-256 over their lines
    (`core/log_digest.py`). `undecodable` counts logs of registered addresses that cannot be decoded. `events_digest` is
    that over the stored rows of both events (`store/event_comparison.py: body_digest`).
    """

    span: Span
    last: Header
    events: Tally
    reports: Tally | None
    facts: int
    undecodable: int
    facts_digest: str
    events_digest: str
    hashes_rebuilt: int
    blocks_read: int
    roots_rebuilt: int

    @property
    def is_whole(self) -> bool:
        return self.events.is_whole and (self.reports is None or self.reports.is_whole)


async def prove(
    chain: ExecutionChain,
    database: Database,
    span: Span,
    oracles: Collection[Address],
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> GapProof:
    """Derives `span` again, a thousand blocks at a time, and compares; reports only where `oracles` are given.

    Raises `InputError` for a range that is not final or not read, and when the registry changes meanwhile.
    """
    final = await chain.final_head()
    if span.last > final.number:
        raise InputError(f"block {span.last} is not final yet: audit up to {final.number}")
    outbox = Outbox(database)
    registry = await outbox.registry()
    for stream in ("logs", "reports") if oracles else ("logs",):
        await _refuse_unread(database, stream, span)
    proof = _Running(registry, frozenset(oracles))
    position, anchor = span.first - 1, None
    while (part := next_span(position, span.last, SPAN_BLOCKS, None)) is not None:
        derived = await _derived(chain, part, anchor, oracles, registry.watched(part))
        await proof.compare(database, part, derived)
        position, anchor, last = part.last, derived.last.hash, derived.last
        progress(position - span.first + 1, len(span))
    await _check_end(chain, last)
    async with database.transaction() as connection:
        events_digest = await body_digest(connection, span)
    return proof.result(span, last, events_digest)


async def _derived(
    chain: ExecutionChain, span: Span, anchor: Hash32 | None, oracles: Collection[Address], watched: Watched
) -> ProvenRange:
    """A long audit does not end because nodes do not answer for a moment; one that contradicts itself ends it."""
    for pause_s in islice(pauses(), PATIENCE):
        try:
            return await chain.prove_range(span, anchor, oracles, watched)
        except NodeFault:
            raise
        except SourceUnavailable as error:
            log.warning("audit_waits", blocks=str(span), problem=str(error), retry_in_s=pause_s)
            await asyncio.sleep(pause_s)
    return await chain.prove_range(span, anchor, oracles, watched)


class _Running:
    """What is known so far."""

    def __init__(self, registry: Registry, oracles: frozenset[Address]) -> None:
        self._registry, self._oracles = registry, oracles
        self._events, self._reports = Tally(), Tally() if oracles else None
        self._lines, self._facts, self._undecodable = hashlib.sha256(), 0, 0
        self._hashes_rebuilt = self._blocks_read = self._roots_rebuilt = 0

    async def compare(self, database: Database, span: Span, derived: ProvenRange) -> None:
        """Takes a part of the range into account."""
        self._hashes_rebuilt += derived.hashes_rebuilt
        self._blocks_read += derived.blocks_read
        self._roots_rebuilt += derived.roots_rebuilt
        facts = [log for log in derived.logs if log.topics[0] in TOPICS]
        self._facts += len(facts)
        for log in facts:
            self._lines.update(fact_line(log))
        folded = fold(facts, derived.times_s, self._registry.watched(span))
        events = [event for observation in folded.observations for event in project(observation, self._registry)]
        reports, others = decode_all((log for log in derived.logs if log.topics[0] not in TOPICS), derived.times_s)
        self._undecodable += len(owned([*folded.undecodable, *others], self._registry))
        async with database.transaction() as connection:
            if await registry_version(connection) != self._registry.version:
                raise InputError("vaults were registered or removed during the audit: start it again")
            self._events.add(await compare_events(connection, span, events))
            if self._reports is not None:
                # a report that nobody was registered for may be kept, and need not
                due = [
                    report
                    for report in reports
                    if self._registry.watched(Span(report.block_number, report.block_number))
                ]
                self._reports.add(await compare_reports(connection, span, due, reports))

    def result(self, span: Span, last: Header, events_digest: str) -> GapProof:
        return GapProof(
            span,
            last,
            self._events,
            self._reports,
            self._facts,
            self._undecodable,
            self._lines.hexdigest(),
            events_digest,
            self._hashes_rebuilt,
            self._blocks_read,
            self._roots_rebuilt,
        )


async def _refuse_unread(database: Database, stream: str, span: Span) -> None:
    async with database.transaction() as connection:
        ready = await readiness(connection, stream)
    if ready is None:  # no daemon has begun the stream: what is there comes from replays, and all of it is compared
        return
    if span.last > ready.position:
        raise InputError(f"the stream '{stream}' is read up to block {ready.position}: audit up to there")
    for backfill in ready.backfills:
        if backfill.first <= span.last and span.first <= backfill.last:
            raise InputError(
                f"a backfill of the stream '{stream}' still reads the blocks {backfill}: audit other blocks, or wait "
                "until 'vaultevents status' no longer shows it"
            )


async def _check_end(chain: ExecutionChain, last: Header) -> None:
    """The chain of headers that was followed ends in the block that is final at its height."""
    final: Hash32 = (await chain.header(last.number)).hash
    if final != last.hash:
        raise NodeFault(
            "the execution nodes in use", f"give two blocks {last.number}, which is final: see which is wrong"
        )
