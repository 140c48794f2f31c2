"""The one path of live and replay: read a span, project it, commit it with the cursor (rule C9)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from vaultevents import metrics
from vaultevents.core.errors import (
    ChainDisagreement,
    DatabaseUnavailable,
    DatabaseUnusable,
    NodeFault,
    SourceUnavailable,
)
from vaultevents.core.spans import Span
from vaultevents.core.units import checksum
from vaultevents.store.event_comparison import Comparison
from vaultevents.store.outbox import Committed, Cursor, Lost, Outbox
from vaultevents.store.quarantine import Changes
from vaultevents.store.reorgs import Rewind
from vaultevents.watch.prefetch import Prefetcher
from vaultevents.watch.source import Reorged, Source
from vaultevents.watch.wakeup import Wakeup, until

log = structlog.get_logger("watch")

T = TypeVar("T")
SHOWN_IDS = 20
SHOWN_ADDRESSES = 20
UPGRADE = "install a version of vaultevents that knows this fork; until then nodes have to agree on its blocks"
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Advanced:
    """A span is committed; the cursor is `cursor` now."""

    cursor: Cursor
    span: Span
    committed: Committed


@dataclass(frozen=True, slots=True)
class Idle:
    """The head has nothing new."""

    head: int


@dataclass(frozen=True, slots=True)
class Done:
    """The cursor is at its stop."""


@dataclass(frozen=True, slots=True)
class Rewound:
    """The chain was reorganised: the cursor went back to the common ancestor, and is `cursor` now."""

    cursor: Cursor
    rewind: Rewind


Outcome = Advanced | Idle | Done | Lost | Rewound


async def advance(reader: Prefetcher, outbox: Outbox, cursor: Cursor, *, deliver: bool = True) -> Outcome:
    """Moves a cursor by its reader's next span; the only way in which events come to be."""
    if cursor.stop is not None and cursor.position >= cursor.stop:
        return Done()
    known = partial(outbox.near_blocks, cursor.stream)
    found = await reader.next_span(cursor, known)
    if isinstance(found, Reorged):
        return await _rewind(outbox, cursor, found)
    span, head = found
    if span is None:
        return Idle(head)
    registry = await outbox.registry()
    try:
        prepared = await reader.read(span, cursor, registry)
    except NodeFault:
        forked = await reader.fork(cursor, known)
        if forked is None:
            raise
        return await _rewind(outbox, cursor, forked)
    reading = prepared.reading
    new = cursor.moved(span.last, reading.anchor)
    outcome = await outbox.commit(
        cursor,
        new,
        prepared.events,
        registry.version,
        deliver=deliver,
        reports=reading.reports,
        near=reading.near,
        unverified=reading.unverified,
        quarantined=reading.quarantined,
    )
    if isinstance(outcome, Lost):
        return outcome
    _log_quarantine(cursor.stream, outcome.quarantine)
    if reading.unverified is not None:
        metrics.node_failure("unknown_form")
        log.error("chain_form_unknown", stream=cursor.stream, since_block=reading.unverified, advice=UPGRADE)
    if outcome.compared is not None:
        _log_comparison(cursor.stream, span, outcome.compared)
    elif outcome.different:
        log.error("events_differ", stream=cursor.stream, span=str(span), ids=outcome.different)
    return Advanced(new, span, outcome)


async def _rewind(outbox: Outbox, cursor: Cursor, forked: Reorged) -> Rewound | Lost:
    done = await outbox.rewind(cursor, forked.ancestor, forked.anchor)
    if isinstance(done, Lost):
        return done
    metrics.rewound(cursor.stream)
    log.warning(
        "stream_rewound",
        stream=cursor.stream,
        position=cursor.position,
        ancestor=forked.ancestor,
        orphaned=len(done.orphaned),
        withdrawn=done.withdrawn,
    )
    for account_id, event_id in done.orphaned:
        log.warning("event_orphaned", account=account_id, event_id=event_id)
    return Rewound(cursor.moved(forked.ancestor, forked.anchor), done)


def _log_comparison(stream: str, span: Span, compared: Comparison) -> None:
    """What an audit found; by then the missing ones are stored, and nothing else is changed."""
    for kind, event, ids in (
        ("missing", "events_were_missing", compared.missing),
        ("different", "events_differ", compared.different),
        ("without_log", "events_without_log", compared.extra),
    ):
        if ids:
            metrics.audit_finding(kind, len(ids))
            log.error(event, stream=stream, span=str(span), number=len(ids), ids=ids[:SHOWN_IDS])


def _log_quarantine(stream: str, changes: Changes) -> None:
    """Log and count what a commit has quarantined or resolved, in one line for each address."""
    for entry in changes.added:
        metrics.quarantined(stream, entry.logs)
    for entry in changes.added[:SHOWN_ADDRESSES]:
        log.warning(
            "log_quarantined",
            stream=stream,
            address=checksum(entry.address),
            number=entry.logs,
            block=entry.first.log.block_number,
            log_index=entry.first.log.log_index,
            reason=entry.first.reason,
        )
    if changes.resolved:
        log.info("quarantine_resolved", stream=stream, number=changes.resolved)


def pauses() -> Iterator[float]:
    """How long to wait after the first failure in a row, the second and so on; the last pause holds."""
    yield from BACKOFF_S
    while True:
        yield BACKOFF_S[-1]


async def begun(stream: str, begin: Callable[[], Awaitable[T]]) -> T:
    """What `begin` finds or makes, tried again for as long as an upstream or the database is away."""
    waits = pauses()
    while True:
        try:
            return await begin()
        except (SourceUnavailable, DatabaseUnavailable) as error:
            pause = next(waits)
            report = log.info if pause < 1 else log.warning  # discovery needs a moment at the first start
            report("stream_waits", stream=stream, problem=str(error), retry_in_s=pause)
            await asyncio.sleep(pause)


async def run(
    source: Source,
    outbox: Outbox,
    cursor: Cursor,
    *,
    step: int,
    poll_s: float,
    deliver: bool = True,
    patience: int | None = None,
    pause_s: float = 0.0,
    on_advance: Callable[[Advanced], None] = lambda _: None,
    wakeup: Wakeup | None = None,
) -> bool:
    """Advances one cursor until it is done; False when the database no longer has it. A live one and an audit go on.

    The stored cursor counts: it is read again after each failure of the database and each lost connection, since an
    older copy of the database may have taken over. Raises `DatabaseUnusable` when the cursor of a replay is gone.
    With nothing new it looks again after `poll_s`, or as soon as `wakeup` is given.
    When an upstream or the database fails it waits and tries again, up to `patience` times in a row (None: for ever).
    It rests for `pause_s` for each position that it has read.
    """
    failures, waits, wakeup = 0, pauses(), wakeup or Wakeup()
    await outbox.note_problem(cursor, None)  # an earlier process may have left its own there
    database = outbox.database
    with closing(Prefetcher(source, step)) as reader:
        losses, is_stored = database.losses, True
        while True:
            woken = wakeup.next()  # before the head is asked for: none that comes meanwhile is missed
            try:
                if not is_stored or database.losses != losses:
                    losses = database.losses
                    stored = await outbox.stored(cursor)
                    if stored is None:
                        _refuse_lost_replay(cursor)
                        return False
                    _log_went_back(cursor, stored)
                    cursor, is_stored = stored, True
                    if not failures:  # a copy may say what kept it earlier
                        await outbox.note_problem(cursor, None)
                outcome = await advance(reader, outbox, cursor, deliver=deliver)
                # an audit may have been set back
                is_stored = not (isinstance(outcome, Lost) or (isinstance(outcome, Idle) and cursor.kind == "audit"))
            except (SourceUnavailable, DatabaseUnavailable) as error:
                is_stored = is_stored and not isinstance(error, DatabaseUnavailable)
                if patience is not None and failures >= patience:
                    raise
                if isinstance(error, ChainDisagreement):
                    metrics.node_failure("chain_disagreement")
                failures, pause = failures + 1, next(waits)
                await outbox.note_problem(cursor, str(error))
                fields = {"stream": source.stream, "kind": cursor.kind, "problem": str(error)}
                log.warning("stream_waits", **fields, retry_in_s=pause)
                await asyncio.sleep(pause)
                continue
            if failures:
                failures, waits = 0, pauses()
                await outbox.note_problem(cursor, None)
            match outcome:
                case Advanced():
                    cursor = outcome.cursor
                    on_advance(outcome)
                    await asyncio.sleep(pause_s * len(outcome.span))
                case Rewound():
                    cursor = outcome.cursor
                case Idle():
                    await until(woken, poll_s)
                case Done():
                    return True


def _log_went_back(known: Cursor, stored: Cursor) -> None:
    """Log that the stored cursor lies before the one that was known; a registration sets an audit back by design."""
    is_other = (stored.position, stored.anchor) != (known.position, known.anchor)
    if known.kind != "audit" and is_other and stored.position <= known.position:
        log.warning(
            "cursor_went_back",
            stream=known.stream,
            kind=known.kind,
            known=known.position,
            stored=stored.position,
            reason="an older copy of the database took over, or another process followed a reorg",
        )


def _refuse_lost_replay(cursor: Cursor) -> None:
    if cursor.kind == "replay":
        raise DatabaseUnusable(
            "the database no longer has the cursor of this replay, since an older copy of it took over: start the "
            "replay again"
        )
    log.warning("cursor_gone", stream=cursor.stream, kind=cursor.kind, known=cursor.position)


async def run_backfills(
    source: Source,
    outbox: Outbox,
    *,
    step: int,
    poll_s: float,
    on_advance: Callable[[Advanced], None] = lambda _: None,
) -> None:
    """Works off the backfills of a stream, oldest first, as registrations bring them; never ends."""
    while True:
        try:
            open_now = await outbox.backfills(source.stream)
        except DatabaseUnavailable as error:
            log.warning("stream_waits", stream=source.stream, problem=str(error), retry_in_s=poll_s)
            open_now = []
        for cursor in open_now:
            log.info("backfill_started", stream=source.stream, first=cursor.position + 1, last=cursor.stop)
            if await run(source, outbox, cursor, step=step, poll_s=poll_s, on_advance=on_advance):
                log.info("backfill_done", stream=source.stream, first=cursor.first, last=cursor.stop)
        await asyncio.sleep(poll_s)
