"""The feed of an account's events in commit order (rule A19): a reader that pages through it misses nothing.

A sequence number is no cursor, because a later number may commit first. Events are ordered by the transaction that
committed them, and only those are shown before whose transactions none is still open. So whatever writes on this server
and stays open, in any database, holds the newest events back until it ends; it never makes one be skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from vaultevents.core.pagination import CursorUnknown
from vaultevents.store.pool import Connection, Database
from vaultevents.store.sessions import allow

ADOPT_WITHIN_S: Final = 3600.0
MAX_MS: Final = 2**63 - 1
RECENT: Final = 20_000
"""How many events are looked for by their time before the order of commits is followed."""


@dataclass(frozen=True, slots=True)
class FeedPosition:
    """An event's place: `epoch` changes when the events moved to another server, `xid` is its transaction."""

    epoch: int
    xid: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.xid}.{self.seq}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of a text that `str` made."""
        return cls(*map(int, text.split(".")))


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """An event with the bytes that webhooks receive, and where the page after it begins."""

    id: str
    body: bytes
    position: FeedPosition


async def page(
    connection: Connection,
    account_id: str,
    limit: int,
    after: FeedPosition | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
) -> list[FeedEvent]:
    """The next events after a position; `since_ms` is inclusive, `until_ms` exclusive, both of `created_at`.

    Quiet events are among them, orphaned ones are not (rule C1). Raises `CursorUnknown` for a position of another epoch
    or one whose event this server does not have: it is, or was made from, an older copy of the database.
    """
    place = await connection.fetchrow(_PLACE, account_id, after.xid if after else 0, after.seq if after else None)
    if after is not None and (after.epoch != place["epoch"] or not place["reached"]):
        raise CursorUnknown
    place_of_page = (account_id, limit, after.xid if after else 0, after.seq if after else 0, place["horizon"])
    rows = None
    if since_ms is not None:
        end_ms = MAX_MS if until_ms is None else until_ms
        found = await connection.fetch(_RECENT, *place_of_page, since_ms, end_ms, RECENT)
        rows = None if found and found[0]["more"] else found
    if rows is None:
        rows = await connection.fetch(_IN_ORDER, *place_of_page, since_ms, until_ms)
    return [FeedEvent(row["id"], row["body"], FeedPosition(place["epoch"], row["xid"], row["seq"])) for row in rows]


# An event that came back after a reorg has moved on to a later transaction. The horizon may be older than the
# page: then the newest events wait for the next one.
_PLACE = """
select epoch, pg_snapshot_xmin(pg_current_snapshot()) as horizon,
    $2 < pg_snapshot_xmax(pg_current_snapshot()) and ($3::bigint is null or exists (
        select from events where account_id = $1 and seq = $3
            and (committed_xid = $2 or (near_head and committed_xid > $2))
    )) as reached
from feed
"""

_IN_ORDER = """
select id, body, committed_xid as xid, seq from events
where account_id = $1 and (committed_xid, seq) > ($3, $4) and committed_xid < $5 and orphaned_at is null
    and ($6::bigint is null or created_at_ms >= $6) and ($7::bigint is null or created_at_ms < $7)
order by committed_xid, seq limit $2
"""

# From a `since` near the end there are few events, and the order of commits has all the others before them: so they are
# found by their time, `RECENT` at most. Where there are more, one row says so.
_RECENT = """
with recent as materialized (
    select seq, committed_xid, orphaned_at from events
    where account_id = $1 and created_at_ms >= $6 and created_at_ms < $7
    order by created_at_ms limit $8::bigint + 1
), few as materialized (
    select count(*) <= $8 as are_few from recent
), page as materialized (
    select seq, committed_xid from recent
    where (select are_few from few) and (committed_xid, seq) > ($3, $4) and committed_xid < $5 and orphaned_at is null
    order by committed_xid, seq limit $2
)
select false as more, e.id, e.body, page.committed_xid as xid, page.seq
from page cross join lateral (select id, body from events where seq = page.seq and account_id = $1 offset 0) e
union all
select true, null, null, null, null from few where not are_few
order by xid, seq
"""


async def find(connection: Connection, account_id: str, event_id: str) -> bytes | None:
    """The body of one event that is not orphaned."""
    body: bytes | None = await connection.fetchval(
        "select body from events where account_id = $1 and id = $2 and orphaned_at is null", account_id, event_id
    )
    return body


async def adopt_restored_events(database: Database) -> None:
    """Show events that a dump brought from another server, where their transactions seem not to have begun.

    To be called at each start. They move to the present transaction, in the order of their numbers, and the epoch
    changes, so that no cursor of before is taken for one of now. Where nothing is to do it costs one look into the
    index for each account.
    """
    async with database.transaction() as connection:
        if not await connection.fetchval(_FOREIGN):
            return
        await allow(connection, ADOPT_WITHIN_S)
        await connection.execute("lock table feed in exclusive mode")  # another daemon may be at it
        moved = await connection.execute(
            "update events set committed_xid = pg_current_xact_id()"
            " where committed_xid >= pg_snapshot_xmax(pg_current_snapshot())",
            timeout=ADOPT_WITHIN_S,
        )
        if moved != "UPDATE 0":
            await connection.execute("update feed set epoch = epoch + 1")


_FOREIGN = """
select exists (
    select from accounts a, lateral (
        select committed_xid from events e where e.account_id = a.id order by committed_xid desc limit 1
    ) newest where newest.committed_xid >= pg_snapshot_xmax(pg_current_snapshot())
)
"""
