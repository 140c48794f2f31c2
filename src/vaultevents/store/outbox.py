"""The outbox: events, their deliveries and the cursor commit in one transaction (rules P1, C9, D9 and E11)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

from vaultevents.core.actor import SERVICE, acting
from vaultevents.core.errors import DatabaseUnavailable, InputError
from vaultevents.core.events import ENCODING, Event
from vaultevents.core.logs import UndecodableLog
from vaultevents.core.registry import Registry
from vaultevents.core.reports import ReportLog
from vaultevents.core.spans import Span
from vaultevents.core.webhooks import Webhook, matches
from vaultevents.store import reorgs
from vaultevents.store.audit_log import record
from vaultevents.store.cursors import EPOCH_STREAMS, note_problem, read_through
from vaultevents.store.event_comparison import Comparison, compare_events, compare_reports, place_of_report
from vaultevents.store.pool import DELIVERIES_CHANNEL, Connection, Database, Record
from vaultevents.store.quarantine import Changes, synchronize
from vaultevents.store.registry import current_registry, registry_version, share_registry
from vaultevents.store.reports import StoredReport, add_reports, lock_report, mark_resolved
from vaultevents.store.webhooks import active_webhooks

Kind = Literal["live", "backfill", "replay", "audit"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a stream is read: `position` is done, and the next span must link to `anchor`.

    `stop` is where a backfill or a replay ends; live has none, and an audit neither, which is of one `node`.
    """

    id: int
    stream: str
    kind: Kind
    first: int
    position: int
    anchor: str | None
    stop: int | None
    node: str | None = None

    def moved(self, position: int, anchor: str | None) -> Cursor:
        return replace(self, position=position, anchor=anchor)


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of the events of one span: stored now, already there and the same, or stored otherwise (ids).

    For an audit also how all that was stored of the span compares with what was read now.
    """

    inserted: int = 0
    identical: int = 0
    different: tuple[str, ...] = field(default=())
    near_head: int = 0  # stored otherwise because first seen near the head, where blocks may be replaced (rule C1)
    compared: Comparison | None = None
    quarantine: Changes = field(default=Changes())


@dataclass(frozen=True, slots=True)
class Lost:
    """Another writer moved the cursor, or the registry changed: nothing was written, read again."""


class Outbox:
    """All writes of the watchers."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._registry: Registry | None = None
        self._losses = database.losses  # as of the registry that is kept
        self._recorded: set[int] = set()  # replays that the audit log has

    async def registry(self) -> Registry:
        """The registry as it is now; read again only when its version changed or a connection was lost."""
        losses = self.database.losses
        async with self.database.transaction() as connection:
            version = await registry_version(connection)
        if self._registry is None or self._registry.version != version or self._losses != losses:
            self._registry, self._losses = await current_registry(self.database), losses
        return self._registry

    async def live(self, stream: str) -> Cursor | None:
        async with self.database.transaction() as connection:
            row = await connection.fetchrow(f"{_SELECT} where stream = $1 and kind = 'live'", stream)
        return _cursor(row) if row else None

    async def audit(self, stream: str, node: str) -> Cursor:
        """The cursor of a stream's audit at a node, which `open_audits` makes once the stream has begun."""
        async with self.database.transaction() as connection:
            row = await connection.fetchrow(
                f"{_SELECT} where stream = $1 and kind = 'audit' and node = $2", stream, node
            )
        if row is None:
            raise DatabaseUnavailable(f"the stream '{stream}' has not begun in this copy of the database")
        return _cursor(row)

    async def backfills(self, stream: str) -> list[Cursor]:
        """The backfills of a stream that are not done, oldest first."""
        async with self.database.transaction() as connection:
            rows = await connection.fetch(
                f"{_SELECT} where stream = $1 and kind = 'backfill' and position < stop order by id", stream
            )
        return [_cursor(row) for row in rows]

    async def stored(self, cursor: Cursor) -> Cursor | None:
        """The stored state of a cursor; None where the database does not have it.

        An older copy of the database may have given its id to another cursor.
        """
        async with self.database.transaction() as connection:
            row = await connection.fetchrow(
                f"{_SELECT} where id = $1 and stream = $2 and kind = $3", cursor.id, cursor.stream, cursor.kind
            )
        return _cursor(row) if row else None

    async def note_problem(self, cursor: Cursor, problem: str | None) -> None:
        """Keeps why a cursor does not move, for `status`; None when it does again. Never fails itself."""
        with contextlib.suppress(DatabaseUnavailable):
            async with self.database.transaction() as connection:
                await note_problem(connection, cursor.id, problem)

    async def begin_replay(self, stream: str, span: Span) -> Cursor:
        """A cursor of its own for one replay; `end_replay` removes it, and what a killed one left goes here."""
        async with self.database.transaction() as connection:
            await connection.execute(
                "delete from cursors where kind = 'replay' and updated_at < db_now() - interval '1 day'"
            )
            row = await connection.fetchrow(
                "insert into cursors (stream, kind, first, position, stop)"
                " values ($1, 'replay', $2::bigint, $2 - 1, $3)"
                " returning id, stream, kind, first, position, anchor, stop, node",
                stream,
                span.first,
                span.last,
            )
        return _cursor(row)

    async def end_replay(self, cursor: Cursor) -> None:
        async with self.database.transaction() as connection:
            await connection.execute(
                "delete from cursors where id = $1 and kind = 'replay' and stream = $2", cursor.id, cursor.stream
            )

    async def commit(
        self,
        old: Cursor,
        new: Cursor,
        events: Iterable[Event],
        registry_version: int,
        *,
        deliver: bool = True,
        reports: Sequence[ReportLog] = (),
        near: reorgs.NearBlocks | None = None,
        unverified: int | None = None,
        quarantined: Sequence[UndecodableLog] = (),
    ) -> Committed | Lost:
        """Stores the events of one span with their deliveries, and `reports` as pending; moves the cursor to `new`.

        Only if the cursor is still `old` and the registry still this one; otherwise `Lost` and nothing is written. An
        event that is already stored is kept and never delivered again by this (rule D13), unless it was orphaned.
        `near` is what of the span may still be reorganised (rule C1), `unverified` its first block of unknown form;
        `quarantined` are its logs that cannot be decoded.
        """
        async with self.database.transaction() as connection:
            # keeps registrations and webhook changes out until the end
            state = await share_registry(connection)
            if state.version != registry_version or not await self._move(connection, old, new, unverified):
                return Lost()
            if new.kind == "audit" and new.position > await read_through(connection, new.stream):
                return Lost()  # it was registered meanwhile that more is to be read there first
            found = list(events)
            compared = await _compare(connection, old, new, found, reports) if new.kind == "audit" else None
            published = await add_reports(connection, reports)
            if found and not deliver:
                await _refuse_silencing(connection, new)
            if near is not None:
                await reorgs.keep(connection, old.stream, old.position, old.anchor, near)
            final = None if near is None else near.final
            stored = await _store(connection, found, state.filter_revision, deliver=deliver, final=final)
            changes = await _quarantine(connection, old, new, found, reports, quarantined)
            if compared is not None:
                compared = _without_resolved(compared, changes, found, reports)
            changed = published or stored.inserted or changes != Changes()
            records = changed and new.kind == "replay" and new.id not in self._recorded
            if records:
                await _record_replay(connection, new, deliver=deliver)
        if records:
            self._recorded.add(new.id)
        return replace(stored, compared=compared, quarantine=changes)

    async def near_blocks(self, stream: str) -> dict[int, reorgs.BlockHash]:
        """The hashes of the blocks of a stream that may still be reorganised, as they were read."""
        async with self.database.transaction() as connection:
            return await reorgs.kept(connection, stream)

    async def rewind(self, cursor: Cursor, to: int, anchor: reorgs.BlockHash) -> reorgs.Rewind | Lost:
        """Takes back what was read after block `to`, which is still on the chain; `Lost` as in `commit` (rule C1)."""
        async with self.database.transaction() as connection:
            done = await reorgs.rewind(connection, cursor.id, cursor.stream, cursor.position, cursor.anchor, to, anchor)
        return Lost() if done is None else done

    async def resolve(
        self,
        report_id: int,
        vaults: int,
        events: Sequence[Event],
        registry_version: int,
        *,
        deliver: bool = True,
        log: ReportLog | None = None,
    ) -> Committed | Lost:
        """Stores the events of a verified report with the mark that it is resolved; `Lost` as in `commit` (rule C6).

        With `log` only while the report of this id is that one.
        """
        async with self.database.transaction() as connection:
            state = await share_registry(connection)
            if state.version != registry_version:
                return Lost()
            before = None if acting() == SERVICE else await lock_report(connection, report_id)
            await mark_resolved(connection, report_id, vaults, log)
            stored = await _store(connection, events, state.filter_revision, deliver=deliver)
            if before is not None:
                await _record_resolution(connection, before, stored)
            return stored

    async def _move(self, connection: Connection, old: Cursor, new: Cursor, unverified: int | None) -> bool:
        moved = await connection.fetchval(
            "update cursors set position = $4, anchor = $5, updated_at = db_now(),"
            " unverified_from = case when $9::bigint is not null then coalesce(unverified_from, $9) end"
            " where id = $1 and position = $2 and anchor is not distinct from $3"
            " and stream = $6 and kind = $7 and stop is not distinct from $8 returning id",
            old.id,
            old.position,
            old.anchor,
            new.position,
            new.anchor,
            old.stream,
            old.kind,
            old.stop,
            unverified,
        )
        return moved is not None


_SELECT = "select id, stream, kind, first, position, anchor, stop, node from cursors"


def _cursor(row: object) -> Cursor:
    return Cursor(**row)  # type: ignore[arg-type]


async def _record_replay(connection: Connection, cursor: Cursor, *, deliver: bool) -> None:
    """Record in the audit log a replay that changes what is stored: once, with the first commit that does."""
    await record(
        connection,
        acting(),
        "replay",
        f"{cursor.stream} {cursor.first}-{cursor.stop}",
        after={"stream": cursor.stream, "first": cursor.first, "last": cursor.stop, "deliver": deliver},
    )


async def _record_resolution(connection: Connection, before: StoredReport, stored: Committed) -> None:
    """Record in the audit log that an operator, not the service, resolved a report or added events of it."""
    await record(
        connection,
        acting(),
        "report.resolve",
        str(before.log.timestamp),
        before={"state": before.state, "inserted": 0},
        after={"state": "resolved", "inserted": stored.inserted},
    )


async def _compare(
    connection: Connection, old: Cursor, new: Cursor, events: Sequence[Event], reports: Sequence[ReportLog]
) -> Comparison:
    """What is stored of a span before anything of it is stored again."""
    span = Span(old.position + 1, new.position)
    if new.stream == "reports":
        return await compare_reports(connection, span, reports)
    return await compare_events(connection, span, events)


async def _quarantine(
    connection: Connection,
    old: Cursor,
    new: Cursor,
    events: Sequence[Event],
    reports: Sequence[ReportLog],
    undecodable: Sequence[UndecodableLog],
) -> Changes:
    """What cannot be decoded of a span is stored, and what can be decoded now is resolved."""
    if new.stream in EPOCH_STREAMS:
        return Changes()
    decoded = {
        *(
            (event.observation.block, event.observation.address)
            for event in events
            if event.observation.block is not None
        ),
        *((report.block_number, report.address) for report in reports),
    }
    return await synchronize(connection, new.stream, Span(old.position + 1, new.position), undecodable, decoded)


def _without_resolved(
    compared: Comparison, changes: Changes, events: Sequence[Event], reports: Sequence[ReportLog]
) -> Comparison:
    """An event that was withheld until now was not missed: no finding of an audit."""
    late = {
        *(
            event.id
            for event in events
            if (event.observation.block, event.observation.address) in changes.resolved_places
        ),
        *(
            place_of_report(report.block_number, report.log_index)
            for report in reports
            if (report.block_number, report.address) in changes.resolved_places
        ),
    }
    return replace(compared, missing=tuple(name for name in compared.missing if name not in late))


async def _store(
    connection: Connection, events: Sequence[Event], filter_revision: int, *, deliver: bool, final: int | None = None
) -> Committed:
    """Events and their deliveries, inside the transaction of a commit; those after block `final` may be orphaned."""
    if not events:
        return Committed()
    ordered = sorted(events, key=attrgetter("key"))
    first = {event.key: event for event in reversed(ordered)}  # a queue may emit one claim twice: first wins
    stored = await _insert(connection, list(first.values())[::-1], filter_revision, deliver=deliver)
    if final is not None:
        await reorgs.mark_near(connection, stored.values(), final)
    await _fan_out(connection, [(seq, first[key]) for key, seq in stored.items()] if deliver else [])
    others = [event for event in ordered if event.key not in stored or first[event.key] is not event]
    rows = await _stored(connection, others)
    if back := [first[key] for key, row in rows.items() if row["orphaned_at"] is not None]:
        await reorgs.revive(connection, back)
        rows = await _stored(connection, others)
    unlike = [event for event in others if event.body_in(rows[event.key]["encoding"]) != rows[event.key]["body"]]
    different = tuple(event.id for event in unlike if not rows[event.key]["near_head"])
    return Committed(len(stored), len(others) - len(unlike), different, len(unlike) - len(different))


async def _refuse_silencing(connection: Connection, cursor: Cursor) -> None:
    live = await connection.fetchval("select position from cursors where stream = $1 and kind = 'live'", cursor.stream)
    if live is None or cursor.position > live:
        raise InputError(
            f"blocks beyond {live} are still to be read live, and replaying them undelivered would silence their "
            "events: end the range there, or replay without --no-deliver"
        )


async def _insert(
    connection: Connection, events: Sequence[Event], filter_revision: int, *, deliver: bool
) -> dict[tuple[str, str], int]:
    """Stores what is not there yet, in id order so that two writers never wait for each other; key → seq."""
    values = [
        (
            event.owner.account_id,
            event.id,
            event.owner.vault_id,
            event.event_type,
            event.observation.block,
            event.observation.at_ms,
            event.body,
            event.owner.suppressed or not deliver,
        )
        for event in events
    ]
    if len(values) < STAGED_FROM:
        source, given = _UNNEST, list(zip(*values, strict=True))
    else:
        source, given = "staged_events", []
        await connection.execute(_STAGING)
        await connection.copy_records_to_table("staged_events", records=values, schema_name="pg_temp")
    insert = " ".join((_INTO_EVENTS, source, _UNLESS_STORED))
    rows = await connection.fetch(insert, ENCODING, filter_revision, *given)
    return {(row["account_id"], row["id"]): row["seq"] for row in rows}


STAGED_FROM = 500
"""Events of one commit, from which on they are copied into a table of the session first: those of a backfill."""
_INTO_EVENTS = (
    "insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, body, suppressed, encoding,"
    " filter_revision) select *, $1, $2 from"
)
_UNLESS_STORED = "on conflict (account_id, id) do nothing returning account_id, id, seq"
_UNNEST = "unnest($3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::bigint[], $9::bytea[], $10::bool[])"
_STAGING = (
    "create temporary table if not exists staged_events (account_id text, id text, vault_id text, event_type text,"
    " block_number bigint, created_at_ms bigint, body bytea, suppressed boolean) on commit delete rows"
)


async def _fan_out(connection: Connection, fresh: Sequence[tuple[int, Event]]) -> None:
    """One delivery for each webhook whose filter matches now (rule D9)."""
    fresh = [(seq, event) for seq, event in fresh if not event.owner.suppressed]
    if not fresh:
        return
    webhooks: dict[str, list[Webhook]] = {}
    for webhook in await active_webhooks(connection, {event.owner.account_id for _, event in fresh}):
        webhooks.setdefault(webhook.account_id, []).append(webhook)
    pairs = [
        (seq, webhook.id)
        for seq, event in fresh
        for webhook in webhooks.get(event.owner.account_id, ())
        if matches(webhook, event)
    ]
    if not pairs:
        return
    await connection.execute(
        "with made as (insert into deliveries (event_seq, webhook_id, state) select p.seq, p.webhook_id, 'scheduled'"
        "  from unnest($1::bigint[], $2::text[]) as p (seq, webhook_id) returning id, event_seq, webhook_id)"
        " insert into queue (delivery_id, event_seq, webhook_id, due_at)"
        " select id, event_seq, webhook_id, db_now() from made",
        [seq for seq, _ in pairs],
        [webhook_id for _, webhook_id in pairs],
    )
    await connection.execute("select pg_notify($1, '')", DELIVERIES_CHANNEL)


async def _stored(connection: Connection, events: Sequence[Event]) -> dict[tuple[str, str], Record]:
    """What is stored of events, by their keys; each row with its own version of the encoding (rule E16)."""
    if not events:
        return {}
    rows = await connection.fetch(
        "select e.account_id, e.id, e.encoding, e.body, e.near_head, e.orphaned_at from events e"
        " join unnest($1::text[], $2::text[]) as k (account_id, id) using (account_id, id)",
        [event.owner.account_id for event in events],
        [event.id for event in events],
    )
    return {(row["account_id"], row["id"]): row for row in rows}
