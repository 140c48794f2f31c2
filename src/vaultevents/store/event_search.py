"""Search the events of all accounts for an operator: by type, account, vault, time, id, block or transaction.

The cost of a page is bounded, whatever is stored. What an index finds is found at once. Any other condition is tested
on a limited number of rows, and the page says how far it looked and where to go on.
"""

# ruff: noqa: S608 - statements are put together from constants of this module alone

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from vaultevents.core.errors import InputError
from vaultevents.core.events import funding_ids, type_and_account
from vaultevents.core.units import Hash32, hex_text
from vaultevents.store.pool import Connection, Record
from vaultevents.store.sessions import in_index_order

LOOKED_AT: Final = 20_000
"""How many rows one page looks at for a condition that has no index."""
MAX_ACCOUNTS: Final = 500
"""How many accounts one page searches by time: each is a range of the index of its own."""
POSITIONS: Final = 16
"""Fundings of one transaction that are found by their ids; those of later emitters are found by the rows alone."""
MAX_LIMIT: Final = 500
END: Final = 2**63 - 1

_HASH = re.compile(r"0x[0-9a-f]{64}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class EventFilter:
    """What is looked for; None: any. `since` is inclusive, `until` exclusive, both of the moment on the chain.

    `id` is an event id or the beginning of one; `tx_hash` has `0x` and 64 hexadecimal digits.
    """

    event_type: str | None = None
    account_id: str | None = None
    vault_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    id: str | None = None
    block: int | None = None
    tx_hash: str | None = None


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event without its body. `created_at` is when it happened on the chain, `stored_at` when it was committed."""

    seq: int
    account_id: str
    id: str
    vault_id: str
    event_type: str
    block_number: int | None
    created_at: datetime
    stored_at: datetime
    suppressed: bool
    near_head: bool
    orphaned_at: datetime | None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with exactly the bytes that are POSTed, and the revision of the filters that decided its deliveries."""

    row: EventRow
    body: bytes
    encoding: int
    filter_revision: int


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events, newest first. `next_before` is where to go on; None: there are no others.

    `scanned` is the number of rows that were looked at where the page ended at `LOOKED_AT`, else None: then the next
    page may have more, also if this one has none.
    """

    rows: tuple[EventRow, ...]
    next_before: int | None
    scanned: int | None = None


async def search(connection: Connection, wanted: EventFilter, before: int | None = None, limit: int = 50) -> EventPage:
    """Return the newest matching events, or those after the page that ended at `before`; in a transaction.

    Events of a filter by account, vault or time are in the order of their time, all others in the order of their
    numbers (`seq`). Raises `InputError` for a hash or block that is none, and for a time without an account where there
    are more than `MAX_ACCOUNTS`.
    """
    limit = max(1, min(limit, MAX_LIMIT))
    if wanted.block is not None and not 0 <= wanted.block <= END:
        raise InputError(f"there is no block {wanted.block}: write the number of an execution block")
    if wanted.tx_hash is not None:
        return await _by_transaction(connection, wanted, wanted.tx_hash, before, limit)
    if wanted.id is not None and (row := await _by_id(connection, wanted)) is not None:
        return EventPage((row,) if before is None else (), None)
    if wanted.block is not None:
        return await _of_block(connection, wanted, before, limit)
    return await _newest(connection, wanted, before, limit)


async def event(connection: Connection, account_id: str, event_id: str) -> StoredEvent | None:
    """Return one event of an account, also one that is orphaned or suppressed."""
    row = await connection.fetchrow(
        f"select {_COLUMNS}, e.body, e.encoding, e.filter_revision from events e where e.account_id = $1 and e.id = $2",
        account_id,
        event_id,
    )
    return None if row is None else StoredEvent(_row(row), row["body"], row["encoding"], row["filter_revision"])


async def event_by_id(connection: Connection, event_id: str) -> StoredEvent | None:
    """Return one event by its id alone, which names its account."""
    named = type_and_account(event_id)
    return None if named is None else await event(connection, named[1], event_id)


_COLUMNS: Final = (
    "e.seq, e.account_id, e.id, e.vault_id, e.event_type, e.block_number, e.created_at_ms, e.stored_at, e.suppressed,"
    " e.near_head, e.orphaned_at"
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _row(row: Record) -> EventRow:
    return EventRow(
        row["seq"],
        row["account_id"],
        row["id"],
        row["vault_id"],
        row["event_type"],
        row["block_number"],
        _EPOCH + timedelta(milliseconds=row["created_at_ms"]),
        row["stored_at"],
        row["suppressed"],
        row["near_head"],
        row["orphaned_at"],
    )


def _ms(at: datetime | None, otherwise: int) -> int:
    return otherwise if at is None else (at - _EPOCH) // timedelta(milliseconds=1)


# Conditions that no index serves; tested row by row. `$1` to `$9` mean the same in each statement that has them.
_MATCHES: Final = """
    ($1::text is null or e.event_type = $1)
    and ($2::text is null or e.account_id = $2)
    and ($3::text is null or e.vault_id = $3)
    and e.created_at_ms >= $4 and e.created_at_ms < $5
    and ($6::text is null or starts_with(e.id, $6))
    and ($7::bigint is null or e.block_number = $7)
"""


def _conditions(wanted: EventFilter) -> tuple[Any, ...]:
    """The arguments of `_MATCHES`."""
    return (
        wanted.event_type,
        wanted.account_id,
        wanted.vault_id,
        _ms(wanted.since, -END),
        _ms(wanted.until, END),
        wanted.id,
        wanted.block,
    )


async def _by_id(connection: Connection, wanted: EventFilter) -> EventRow | None:
    """Return the event whose id is the whole of `wanted.id`, if it matches everything else, too."""
    assert wanted.id is not None
    named = type_and_account(wanted.id)
    if named is None:
        return None
    row = await connection.fetchrow(_BY_ID, *_conditions(wanted), named[1])
    return None if row is None else _row(row)


_BY_ID = f"select {_COLUMNS} from events e where e.account_id = $8 and e.id = $6 and {_MATCHES}"


async def _of_block(connection: Connection, wanted: EventFilter, before: int | None, limit: int) -> EventPage:
    rows = await connection.fetch(_OF_BLOCK, *_conditions(wanted), END if before is None else before, limit + 1)
    return _page(rows, limit)


# The index by blocks alone finds the rows, lest a plan for any arguments reads the whole index by time besides; they
# are tested and sorted afterwards.
_OF_BLOCK = f"""
with found as materialized (
    select {_COLUMNS} from events e where e.block_number = $7::bigint
)
select * from found e where e.seq < $8 and {_MATCHES} order by e.seq desc limit $9
"""


def _page(rows: Sequence[Record], limit: int) -> EventPage:
    """Cut off the row that shows that there are more."""
    return EventPage(tuple(map(_row, rows[:limit])), rows[limit - 1]["seq"] if len(rows) > limit else None)


async def _newest(connection: Connection, wanted: EventFilter, before: int | None, limit: int) -> EventPage:
    """Look from the newest on: in the order of time in each account that may have it, or by number in all."""
    account_ids = await _accounts(connection, wanted)
    if account_ids is None:
        return await _by_number(connection, wanted, before, limit)
    return await _by_time(connection, wanted, account_ids, before, limit)


async def _accounts(connection: Connection, wanted: EventFilter) -> list[str] | None:
    """Return the accounts to search by time; None where no condition asks for this order."""
    if wanted.account_id is not None:
        return [wanted.account_id]
    if wanted.id is not None and (named := type_and_account(wanted.id)) is not None:
        return [named[1]]
    if wanted.vault_id is not None:
        rows = await connection.fetch(
            "select account_id as id from vaults where id = $1 limit $2", wanted.vault_id, MAX_ACCOUNTS + 1
        )
    elif wanted.since is not None or wanted.until is not None:
        rows = await connection.fetch("select id from accounts limit $1", MAX_ACCOUNTS + 1)
    else:
        return None
    if len(rows) > MAX_ACCOUNTS:
        raise InputError(f"there are more than {MAX_ACCOUNTS} accounts to search: name one")
    return [row["id"] for row in rows]


async def _by_number(connection: Connection, wanted: EventFilter, before: int | None, limit: int) -> EventPage:
    place = (END if before is None else before, limit + 1, LOOKED_AT)
    rows = await connection.fetch(_BY_NUMBER, *_conditions(wanted), *place)
    if len(rows) > limit:
        return _page(rows, limit)
    seen = await connection.fetchrow(_SEEN_BY_NUMBER, place[0], LOOKED_AT)
    return _window(rows, seen["number"], seen["last"])


def _window(rows: Sequence[Record], number: int, last: int | None) -> EventPage:
    """The page of a window that was looked at to its end; a full one is followed by another."""
    more = number >= LOOKED_AT
    return EventPage(tuple(map(_row, rows)), last if more else None, number if more else None)


_BY_NUMBER = f"""
select * from (select {_COLUMNS} from events e where e.seq < $8 order by e.seq desc limit $10) e
where {_MATCHES} order by e.seq desc limit $9
"""

_SEEN_BY_NUMBER = """
select count(*) as number, min(seq) as last from (select seq from events where seq < $1 order by seq desc limit $2) seen
"""


async def _by_time(
    connection: Connection, wanted: EventFilter, account_ids: Sequence[str], before: int | None, limit: int
) -> EventPage:
    """Each account gives its newest matches among a share of `LOOKED_AT` rows; what lies before any share waits."""
    narrowed = (wanted.event_type, wanted.vault_id, wanted.id) != (None, None, None)
    share = max(LOOKED_AT // max(len(account_ids), 1), limit + 1) if narrowed else limit + 1
    end_ms, end_seq = await _place(connection, before)
    place = (account_ids, end_ms, end_seq, share)
    async with in_index_order(connection):
        rows = await connection.fetch(_BY_TIME, *_conditions(wanted), *place, limit + 1)
        if not narrowed or (len(rows) > limit and len(account_ids) == 1):
            return _page(rows, limit)
        seen = await connection.fetchrow(_SEEN_BY_TIME, _ms(wanted.since, -END), _ms(wanted.until, END), *place)
    if seen["horizon"] is None:
        return _page(rows, limit)
    kept = [row for row in rows if [row["created_at_ms"], row["seq"]] >= seen["horizon"]]
    if len(kept) > limit:
        return _page(kept, limit)
    return EventPage(tuple(map(_row, kept)), seen["horizon"][1], seen["number"])


async def _place(connection: Connection, before: int | None) -> tuple[int, int]:
    """Return time and number of the row at which a page ended. Raises `InputError` where there is none."""
    if before is None:
        return END, END
    at_ms: int | None = await connection.fetchval("select created_at_ms from events where seq = $1", before)
    if at_ms is None:
        raise InputError("there is no such page of events: begin with the first one")
    return at_ms, before


_RANGE: Final = """
    {of}.account_id = a.id and {of}.created_at_ms >= {since} and {of}.created_at_ms < {until}
    and {of}.created_at_ms <= {end_ms} and ({of}.created_at_ms < {end_ms} or {of}.seq < {end_seq})
"""

_BY_TIME = f"""
select e.* from unnest($8::text[]) a (id) cross join lateral (
    select * from (
        select {_COLUMNS} from events e
        where {_RANGE.format(of="e", since="$4", until="$5", end_ms="$9", end_seq="$10")}
        order by e.created_at_ms desc, e.seq desc limit $11
    ) e where {_MATCHES} order by e.created_at_ms desc, e.seq desc limit $12
) e order by e.created_at_ms desc, e.seq desc limit $12
"""

# The horizon is the newest of the places at which a share ended: down to there nothing is missing.
_SEEN_BY_TIME = f"""
select sum(looked.number)::bigint as number, max(looked.last) filter (where looked.number >= $6) as horizon
from unnest($3::text[]) a (id) cross join lateral (
    select count(*) as number, min(array[e.created_at_ms, e.seq]) as last from (
        select e.created_at_ms, e.seq from events e
        where {_RANGE.format(of="e", since="$1", until="$2", end_ms="$4", end_seq="$5")}
        order by e.created_at_ms desc, e.seq desc limit $6
    ) e
) looked
"""


async def _by_transaction(
    connection: Connection, wanted: EventFilter, tx_hash: str, before: int | None, limit: int
) -> EventPage:
    """Fundings have the hash in their id, so that the first page has those of any age; the rest is in the bodies."""
    if not _HASH.fullmatch(tx_hash):
        raise InputError("a transaction hash has 0x and 64 hexadecimal digits: copy it again")
    digest = Hash32(bytes.fromhex(tx_hash[2:]))
    accounts = await connection.fetch(
        "select id from accounts where $1::text is null or id = $1 limit $2", wanted.account_id, MAX_ACCOUNTS
    )
    ids = [funding_ids(row["id"], digest, POSITIONS) for row in accounts]
    owners = [row["id"] for row, of_account in zip(accounts, ids, strict=True) for _ in of_account]
    derived = [event_id for of_account in ids for event_id in of_account]
    found = await connection.fetch(_BY_IDS, *_conditions(wanted), owners, derived)
    place = (END if before is None else before, limit + 1, LOOKED_AT)
    named = b'"tx_hash":"%b"' % hex_text(digest).encode()
    rows = await connection.fetch(_BY_BODY, *_conditions(wanted), *place, named, [row["seq"] for row in found])
    if len(rows) > limit:
        page = _page(rows, limit)
    else:
        seen = await connection.fetchrow(_SEEN_BY_NUMBER, place[0], LOOKED_AT)
        page = _window(rows, seen["number"], seen["last"])
    at_once = map(_row, found if before is None else ())
    return replace(page, rows=tuple(sorted((*at_once, *page.rows), key=lambda row: row.seq, reverse=True)))


_BY_IDS = f"""
select {_COLUMNS} from unnest($8::text[], $9::text[]) d (account_id, id)
    join events e on e.account_id = d.account_id and e.id = d.id
where {_MATCHES}
"""

# Only these types have a transaction; a body is read for them alone.
_BY_BODY = f"""
select * from (
    select {_COLUMNS}, e.body from events e where e.seq < $8 order by e.seq desc limit $10
) e
where e.event_type in ('funding_received', 'withdrawal_claimed') and {_MATCHES}
    and e.seq <> all ($12::bigint[]) and position($11::bytea in e.body) > 0
order by e.seq desc limit $9
"""
