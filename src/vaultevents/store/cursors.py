"""The cursors that a registration brings: one live cursor for each stream, and its backfills (rule C9)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vaultevents.core.actor import acting
from vaultevents.core.errors import InputError
from vaultevents.core.spans import Span, subtract
from vaultevents.store.audit_log import record
from vaultevents.store.pool import Connection, Database
from vaultevents.store.registry import first_block, lock_registry
from vaultevents.store.reports import reopen_reports

Unit = Literal["block", "epoch"]
EPOCH_STREAMS = ("validators", "withdrawals")
"""Streams whose positions are epochs; those of all others are blocks."""


async def open_stream(
    database: Database,
    stream: str,
    head: int,
    anchor: str | None,
    earliest: Callable[[Connection], Awaitable[int | None]] = first_block,
) -> None:
    """Makes the live cursor of a stream at `head`, once, with one backfill from the earliest position registered."""
    async with database.transaction() as connection:
        await lock_registry(connection)
        made = await connection.fetchval(
            "insert into cursors (stream, kind, first, position, anchor) values ($1, 'live', $2::bigint + 1, $2, $3)"
            " on conflict do nothing returning id",
            stream,
            head,
            anchor,
        )
        begin = await earliest(connection)
        if made and begin is not None:
            await backfill(connection, stream, begin)


async def open_audits(database: Database, stream: str, nodes: Sequence[str]) -> None:
    """Make a stream's audit cursor for each node that has none, from the earliest registered block (rules C2 and I6).

    Those of nodes that are not configured any longer go. An audit from before there was one for each node is continued
    by all of them.
    """
    async with database.transaction() as connection:
        await lock_registry(connection)
        await connection.execute(
            "insert into cursors (stream, kind, node, first, position)"
            " select l.stream, 'audit', n.node, coalesce(a.first, least(l.position + 1, $2)),"
            "  coalesce(a.position, least(l.position + 1, $2) - 1)"
            " from cursors l cross join unnest($3::text[]) as n (node)"
            " left join cursors a on a.stream = l.stream and a.kind = 'audit' and a.node is null"
            " where l.stream = $1 and l.kind = 'live' on conflict do nothing",
            stream,
            await first_block(connection),
            list(nodes),
        )
        await connection.execute(
            "delete from cursors where stream = $1 and kind = 'audit' and (node is null or node <> all ($2::text[]))",
            stream,
            list(nodes),
        )


@dataclass(frozen=True, slots=True)
class Readiness:
    """How far a stream is read live, and what of it is still to be read by backfills."""

    position: int
    backfills: tuple[Span, ...]

    @property
    def through(self) -> int:
        """Up to where all of it is read that is registered."""
        return min([self.position, *(span.first - 1 for span in self.backfills)])


async def readiness(connection: Connection, stream: str) -> Readiness | None:
    """None for a stream that was never read."""
    rows = await connection.fetch(
        "select kind, position, stop from cursors where stream = $1"
        " and (kind = 'live' or (kind = 'backfill' and position < stop)) order by position",
        stream,
    )
    live = [row["position"] for row in rows if row["kind"] == "live"]
    backfills = tuple(Span(row["position"] + 1, row["stop"]) for row in rows if row["kind"] == "backfill")
    return Readiness(live[0], backfills) if live else None


async def read_through(connection: Connection, stream: str) -> int:
    """Up to where all of a stream is read that is registered; -1 for one that was never read."""
    ready = await readiness(connection, stream)
    return -1 if ready is None else ready.through


async def backfill(connection: Connection, stream: str, first: int, last: int | None = None) -> list[Span]:
    """One backfill for each part of `first`..`last` that no open backfill is going to read anyway.

    It ends at the live cursor at the latest; what lies beyond is read live. An audit that has passed the beginning
    goes back to it, since these blocks are to be read for more than it knew of. The registry must be locked.
    """
    ready = await readiness(connection, stream)
    if ready is None:
        return []
    last = ready.position if last is None else min(last, ready.position)
    if first > last:
        return []
    await connection.execute(
        "update cursors set first = least(first, $2), position = $2::bigint - 1, anchor = null"
        " where stream = $1 and kind = 'audit' and position >= $2",
        stream,
        first,
    )
    return await _insert(connection, stream, subtract(Span(first, last), ready.backfills))


async def read_again(database: Database, wanted: Mapping[str, Span], subject: str) -> dict[str, list[Span]]:
    """Have the running watcher read a span of each stream once more, beside what it reads live.

    What is missing is stored and delivered; what is stored is compared, and left as it is. Nothing is read that was
    never read, and nothing twice that an open backfill is going to read. The files of reports in the span are fetched
    again. Returns the new backfills of each stream. Raises `InputError` where there is nothing to read.
    """
    async with database.transaction() as connection:
        await lock_registry(connection)
        found: dict[str, list[Span]] = {}
        for state in await states(connection):
            span = state.read_of(wanted[state.stream]) if state.stream in wanted else None
            if span is not None:
                found[state.stream] = await _insert(connection, state.stream, subtract(span, state.ready.backfills))
        if not found:
            raise InputError(f"nothing was read yet in {subject}: choose another range")
        after = _refuse_nothing(found, subject)
        for gap in found.get("reports", []):
            await reopen_reports(connection, gap.first, gap.last)
        await record(connection, acting(), "stream.replay", subject, after=after)
    return found


async def backfill_again(
    database: Database, account_id: str, vault_id: str, wanted: Mapping[str, Span]
) -> dict[str, list[Span]]:
    """Begin the backfills of a vault anew, as its registration began them; `wanted` has the span of each stream.

    What an open backfill is going to read is left to it. Returns the new backfills of each stream. Raises `InputError`
    where there is nothing to read.
    """
    async with database.transaction() as connection:
        await lock_registry(connection)
        found = {stream: await backfill(connection, stream, span.first, span.last) for stream, span in wanted.items()}
        after = _refuse_nothing(found, f"vault '{vault_id}'")
        if "reports" in wanted:
            await reopen_reports(connection, wanted["reports"].first, wanted["reports"].last)
        await record(connection, acting(), "stream.backfill", vault_id, account_id=account_id, after=after)
    return found


def _refuse_nothing(found: Mapping[str, list[Span]], subject: str) -> dict[str, list[str]]:
    """Return new backfills as the audit log has them. Raises `InputError` where there is none."""
    spans = {stream: [str(gap) for gap in gaps] for stream, gaps in found.items() if gaps}
    if not spans:
        raise InputError(f"all of {subject} is still to be read by what runs already: see Streams, and wait for it")
    return spans


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream that was begun, and the first position that was ever to be read of it."""

    stream: str
    unit: Unit
    first: int
    ready: Readiness

    def read_of(self, span: Span) -> Span | None:
        """Return what of a span the live cursor has passed; None for nothing."""
        first, last = max(span.first, self.first), min(span.last, self.ready.position)
        return Span(first, last) if first <= last else None


async def states(connection: Connection) -> list[StreamState]:
    """Return what was read and is still to be read of each stream, by name."""
    rows = await connection.fetch(
        "select stream, min(first) as first from cursors where kind in ('live', 'backfill') group by stream"
        " order by stream"
    )
    found = []
    for row in rows:
        ready = await readiness(connection, row["stream"])
        if ready is not None:
            unit: Unit = "epoch" if row["stream"] in EPOCH_STREAMS else "block"
            found.append(StreamState(row["stream"], unit, row["first"], ready))
    return found


async def _insert(connection: Connection, stream: str, gaps: list[Span]) -> list[Span]:
    """Store a backfill for each of the spans."""
    for gap in gaps:
        await connection.execute(
            "insert into cursors (stream, kind, first, position, stop) values ($1, 'backfill', $2::bigint, $2 - 1, $3)",
            stream,
            gap.first,
            gap.last,
        )
    return gaps


async def note_problem(connection: Connection, cursor_id: int, problem: str | None) -> None:
    """Why a cursor does not move, for people; `problem_since` stays that of the first one in a row."""
    await connection.execute(
        "update cursors set problem = $2, problem_since ="
        " case when $2::text is not null then coalesce(problem_since, db_now()) end where id = $1",
        cursor_id,
        problem,
    )
