"""The one path of live and replay: read a span, project it, commit it with the cursor (architecture §5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import structlog

from vaultevents.core.errors import DatabaseUnavailable, SourceUnavailable
from vaultevents.core.events import project
from vaultevents.core.spans import Span
from vaultevents.store.outbox import Committed, Cursor, Lost, Outbox
from vaultevents.watch.hint import Hint, until
from vaultevents.watch.reader import Reader
from vaultevents.watch.source import Source

log = structlog.get_logger("watch")

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


Outcome = Advanced | Idle | Done | Lost


async def advance(reader: Reader, outbox: Outbox, cursor: Cursor, *, deliver: bool = True) -> Outcome:
    """Moves a cursor by its reader's next span; the only way in which events come to be."""
    if cursor.stop is not None and cursor.position >= cursor.stop:
        return Done()
    span, head = await reader.next_span(cursor)
    if span is None:
        return Idle(head)
    registry = await outbox.registry()
    reading = await reader.read(span, cursor, registry)
    events = [event for observation in reading.observations for event in project(observation, registry)]
    new = cursor.moved(span.last, reading.anchor)
    outcome = await outbox.commit(cursor, new, events, registry.version, deliver=deliver, reports=reading.reports)
    if isinstance(outcome, Lost):
        return outcome
    if outcome.different:
        log.error("events_differ", stream=cursor.stream, span=str(span), ids=outcome.different)
    return Advanced(new, span, outcome)


def pauses() -> Iterator[float]:
    """How long to wait after the first failure in a row, the second and so on; the last pause holds."""
    yield from BACKOFF_S
    while True:
        yield BACKOFF_S[-1]


async def run(
    source: Source,
    outbox: Outbox,
    cursor: Cursor,
    *,
    step: int,
    poll_s: float,
    deliver: bool = True,
    patience: int | None = None,
    on_advance: Callable[[Advanced], None] = lambda _: None,
    hint: Hint | None = None,
) -> None:
    """Advances one cursor until it is done; a live one never is.

    With nothing new it looks again after `poll_s`, or as soon as `hint` is given.
    When an upstream or the database fails it waits and tries again, up to `patience` times in a row (None: for ever).
    """
    failures, waits, hint = 0, pauses(), hint or Hint()
    await outbox.note_problem(cursor, None)  # an earlier process may have left its own there
    with closing(Reader(source, step)) as reader:
        while True:
            hinted = hint.next()  # before the head is asked for: none that comes meanwhile is missed
            try:
                outcome = await advance(reader, outbox, cursor, deliver=deliver)
                if isinstance(outcome, Lost):
                    cursor = await outbox.cursor(cursor.id)
            except (SourceUnavailable, DatabaseUnavailable) as error:
                if patience is not None and failures >= patience:
                    raise
                failures, pause = failures + 1, next(waits)
                await outbox.note_problem(cursor, str(error))
                log.warning("stream_waits", stream=source.stream, problem=str(error), retry_in_s=pause)
                await asyncio.sleep(pause)
                continue
            if failures:
                failures, waits = 0, pauses()
                await outbox.note_problem(cursor, None)
            match outcome:
                case Advanced():
                    cursor = outcome.cursor
                    on_advance(outcome)
                case Idle():
                    await until(hinted, poll_s)
                case Done():
                    return


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
            await run(source, outbox, cursor, step=step, poll_s=poll_s, on_advance=on_advance)
            log.info("backfill_done", stream=source.stream, first=cursor.first, last=cursor.stop)
        await asyncio.sleep(poll_s)
