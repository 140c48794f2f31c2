"""Logs that cannot be decoded: stored with the cursor move that passes them, resolved when read again (rule C8).

At most `ROWS_OF_BLOCK` logs of one address in one block have a row each; the last of these rows counts the others. So
what a contract emits costs a bounded number of rows, and nothing depends on the rest: a block is read again as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby, islice
from typing import Any, Final, Literal

from vaultevents.core.actor import acting
from vaultevents.core.errors import InputError
from vaultevents.core.logs import UndecodableLog
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32
from vaultevents.store import notices
from vaultevents.store.audit_log import record
from vaultevents.store.pool import Connection, Database, Record

ROWS_OF_BLOCK: Final = 100
DATA_BYTES: Final = 4096
"""Of the data of a log, as much is stored; the check of the table says the same."""
ROWS_AT_ONCE: Final = 1_000
NOTICE_EVERY_S: Final = 86_400.0

State = Literal["open", "resolved", "dismissed"]
STATES: Final[tuple[State, ...]] = ("open", "resolved", "dismissed")

Place = tuple[int, Address]
"""A block and an address in it."""


@dataclass(frozen=True, slots=True)
class NewlyQuarantined:
    """The logs of one address that one commit has quarantined: how many, and the first of them."""

    address: Address
    logs: int
    first: UndecodableLog


@dataclass(frozen=True, slots=True)
class Changes:
    """What one commit has changed: the new logs by address, and where logs were resolved, with their number."""

    added: tuple[NewlyQuarantined, ...] = ()
    resolved: int = 0
    resolved_places: frozenset[Place] = field(default=frozenset())


@dataclass(frozen=True, slots=True)
class QuarantinedLog:
    """A stored row; `data` is cut at `DATA_BYTES`, and `more` counts logs of its address and block without a row."""

    id: int
    stream: str
    block_number: int
    block_hash: Hash32
    log_index: int
    tx_hash: Hash32
    address: Address
    topics: tuple[Hash32, ...]
    data: bytes
    data_bytes: int
    reason: str
    more: int
    state: State
    dismissed_because: str | None
    first_seen_at: datetime
    changed_at: datetime | None


async def synchronize(
    connection: Connection,
    stream: str,
    span: Span,
    undecodable: Sequence[UndecodableLog],
    decoded: Collection[Place],
) -> Changes:
    """Make the rows of a span what was read of it now, inside the transaction that moves the cursor.

    New logs get a row. A row whose log is no longer among `undecodable` is resolved where something of its address and
    block was `decoded`: without that it stays as it is, since its address may not be watched any longer. One that was
    resolved and cannot be decoded now is open again; one that was dismissed stays dismissed. A row of another block of
    the same number is removed.
    """
    stored = await connection.fetch(_OF_SPAN, stream, span.first, span.last)
    hashes = {entry.log.block_number: entry.log.block_hash for entry in undecodable}
    stale = {row["id"] for row in stored if hashes.get(row["block_number"], row["block_hash"]) != row["block_hash"]}
    if stale:
        await connection.execute("delete from quarantined_logs where id = any($1)", list(stale))
    known = {(row["block_number"], row["log_index"]): row for row in stored if row["id"] not in stale}
    rows = _rows(undecodable, known)
    changed = [
        (known[place]["id"], entry.reason, more)
        for place, (entry, more) in rows.items()
        if place in known and (known[place]["reason"], known[place]["more"]) != (entry.reason, more)
    ]
    reopened = [known[place]["id"] for place in rows if place in known and known[place]["state"] == "resolved"]
    resolved = [
        row
        for place, row in known.items()
        if place not in rows and row["state"] != "resolved" and (place[0], row["address"]) in decoded
    ]
    if changed:
        await connection.execute(_AMEND, *zip(*changed, strict=True))
    if reopened:
        await connection.execute("update quarantined_logs set state = 'open' where id = any($1)", reopened)
    if resolved:
        await connection.execute(_RESOLVE, [row["id"] for row in resolved])
    added = await _add(connection, stream, [row for place, row in rows.items() if place not in known])
    return Changes(
        added,
        sum(1 + row["more"] for row in resolved),
        frozenset((row["block_number"], row["address"]) for row in resolved),
    )


_OF_SPAN = """
select id, block_number, block_hash, log_index, address, reason, more, state from quarantined_logs
where stream = $1 and block_number between $2 and $3
"""
_AMEND = """
update quarantined_logs q set reason = n.reason, more = n.more
from unnest($1::bigint[], $2::text[], $3::integer[]) as n (id, reason, more) where q.id = n.id
"""
_RESOLVE = "update quarantined_logs set state = 'resolved', more = 0, changed_at = db_now() where id = any($1)"


def _rows(
    undecodable: Iterable[UndecodableLog], known: Mapping[tuple[int, int], Record]
) -> dict[tuple[int, int], tuple[UndecodableLog, int]]:
    """By block and log index: the logs that have a row or get one, each with how many others it counts."""
    groups: dict[Place, list[UndecodableLog]] = defaultdict(list)
    for entry in undecodable:
        groups[entry.log.block_number, entry.log.address].append(entry)
    rows: dict[tuple[int, int], tuple[UndecodableLog, int]] = {}
    for (block, _), group in sorted(groups.items(), key=lambda item: item[0]):
        group.sort(key=lambda entry: entry.log.log_index)
        kept = [entry for at, entry in enumerate(group) if at < ROWS_OF_BLOCK or (block, entry.log.log_index) in known]
        for entry in kept:
            rows[block, entry.log.log_index] = entry, len(group) - len(kept) if entry is kept[-1] else 0
    return rows


async def _add(
    connection: Connection, stream: str, rows: Sequence[tuple[UndecodableLog, int]]
) -> tuple[NewlyQuarantined, ...]:
    """Insert rows, a thousand at a time; those that another commit has inserted meanwhile are its own."""
    logs: dict[Address, int] = defaultdict(int)
    first: dict[Address, UndecodableLog] = {}
    for at in range(0, len(rows), ROWS_AT_ONCE):
        part = {
            (entry.log.block_number, entry.log.log_index): (entry, more) for entry, more in rows[at : at + ROWS_AT_ONCE]
        }
        inserted = await connection.fetch(_INSERT, stream, *zip(*map(_columns, part.values()), strict=True))
        for place in sorted((row["block_number"], row["log_index"]) for row in inserted):
            entry, more = part[place]
            logs[entry.log.address] += 1 + more
            first.setdefault(entry.log.address, entry)
    added = tuple(NewlyQuarantined(address, logs[address], first[address]) for address in sorted(logs))
    if added:
        await _notify(connection, added)
    return added


def _columns(row: tuple[UndecodableLog, int]) -> tuple[Any, ...]:
    entry, more = row
    log = entry.log
    return (
        *(log.block_number, log.block_hash, log.log_index, log.tx_hash, log.address, b"".join(log.topics)),
        *(log.data[:DATA_BYTES], len(log.data), entry.reason, more),
    )


_INSERT = """
insert into quarantined_logs
    (stream, block_number, block_hash, log_index, tx_hash, address, topics, data, data_bytes, reason, more)
select $1, * from unnest($2::bigint[], $3::bytea[], $4::integer[], $5::bytea[], $6::bytea[], $7::bytea[], $8::bytea[],
    $9::integer[], $10::text[], $11::integer[])
on conflict (stream, block_number, log_index) do nothing returning block_number, log_index
"""


async def _notify(connection: Connection, added: Sequence[NewlyQuarantined]) -> None:
    """Record a notice for each address of which there was none for a day; the logs of the others are counted for it."""
    addresses = [entry.address for entry in added]
    await connection.execute(_COUNT, addresses, [entry.logs for entry in added])
    blocks = {entry.address: entry.first.log.block_number for entry in added}
    due = await connection.fetch(_DUE, addresses, NOTICE_EVERY_S)
    await notices.record_quarantined(
        connection, [notices.OfAddress(row["address"], blocks[row["address"]], row["logs"]) for row in due]
    )


_COUNT = """
insert into quarantined_addresses as a (address, unnoticed) select * from unnest($1::bytea[], $2::bigint[])
on conflict (address) do update set unnoticed = a.unnoticed + excluded.unnoticed
"""
_DUE = """
update quarantined_addresses a set unnoticed = 0, noticed_at = db_now()
from quarantined_addresses before
where a.address = any($1) and before.address = a.address
    and (a.noticed_at is null or a.noticed_at <= db_now() - make_interval(secs => $2))
returning a.address, before.unnoticed as logs
"""


async def forget_after(connection: Connection, stream: str, block: int) -> None:
    """Remove the rows of blocks after `block`, which a reorg has taken off the chain (rule C1)."""
    await connection.execute("delete from quarantined_logs where stream = $1 and block_number > $2", stream, block)


async def page(
    database: Database,
    limit: int,
    *,
    state: State | None = "open",
    address: Address | None = None,
    before: int | None = None,
) -> list[QuarantinedLog]:
    """Up to `limit` rows, newest first: those with an id below `before`; `state` None means any."""
    async with database.transaction() as connection:
        rows = await connection.fetch(
            "select * from quarantined_logs where ($1::text is null or state = $1)"
            " and ($2::bytea is null or address = $2) and ($3::bigint is null or id < $3) order by id desc limit $4",
            state,
            address,
            before,
            limit,
        )
    return [_log(row) for row in rows]


async def find(database: Database, ids: Collection[int]) -> list[QuarantinedLog]:
    """The rows with these ids, in chain order. Raises `InputError` for an id that is not there."""
    async with database.transaction() as connection:
        rows = await connection.fetch(
            "select * from quarantined_logs where id = any($1) order by block_number, stream, log_index", list(ids)
        )
    if unknown := set(ids) - {row["id"] for row in rows}:
        raise InputError(f"no quarantined log has the id {min(unknown)}: see 'vaultevents quarantine list'")
    return [_log(row) for row in rows]


async def of_block(database: Database, stream: str, block: int) -> list[QuarantinedLog]:
    """All rows of one block, in chain order."""
    async with database.transaction() as connection:
        rows = await connection.fetch(
            "select * from quarantined_logs where stream = $1 and block_number = $2 order by log_index", stream, block
        )
    return [_log(row) for row in rows]


async def open_blocks(
    database: Database, limit: int, *, address: Address | None = None, from_block: int = 0
) -> list[tuple[str, int]]:
    """The blocks from `from_block` on that have open rows, with their streams, lowest first; at most `limit`."""
    async with database.transaction() as connection:
        rows = await connection.fetch(
            "select distinct block_number, stream from quarantined_logs where state = 'open' and block_number >= $1"
            " and ($2::bytea is null or address = $2) order by block_number, stream limit $3",
            from_block,
            address,
            limit,
        )
    return [(row["stream"], row["block_number"]) for row in rows]


async def dismiss(database: Database, ids: Iterable[int], because: str) -> list[int]:
    """Mark open rows as dismissed, a thousand in a transaction, and keep them; the ids of those that were open."""
    pending, done = iter(ids), []
    while part := list(islice(pending, ROWS_AT_ONCE)):
        async with database.transaction() as connection:
            rows = await connection.fetch(
                "update quarantined_logs set state = 'dismissed', dismissed_because = $2, changed_at = db_now()"
                " where id = any($1) and state = 'open' returning id",
                part,
                because,
            )
            dismissed = sorted(row["id"] for row in rows)
            if dismissed:
                after = {"dismissed": dismissed, "because": because}
                await record(connection, acting(), "quarantine.dismiss", ranges_text(dismissed), after=after)
        done += dismissed
    return sorted(done)


def ranges_text(ids: Sequence[int]) -> str:
    """Return rising ids as a text such as `4-7 9`."""
    runs = [[log_id for _, log_id in run] for _, run in groupby(enumerate(ids), key=lambda place: place[1] - place[0])]
    ends = [(run[0], run[-1]) for run in runs]
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


async def count_open(connection: Connection, rows: int | None = None) -> int:
    """How many logs are open, those without a row included; with `rows` only so many rows are looked at."""
    counted: int = await connection.fetchval(
        "select coalesce(sum(1 + more), 0)::bigint from"
        " (select more from quarantined_logs where state = 'open' limit $1) as found",
        rows,
    )
    return counted


def _log(row: Record) -> QuarantinedLog:
    columns = dict(row)
    topics = columns.pop("topics")
    return QuarantinedLog(**columns, topics=tuple(Hash32(topics[at : at + 32]) for at in range(0, len(topics), 32)))
