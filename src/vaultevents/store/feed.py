"""The feed of an account's events in commit order (A19): a reader that pages through it misses nothing.

A sequence number is no cursor, because a later number may commit first. Events are ordered by the transaction that
committed them, and only those are shown before whose transactions none is still open. So whatever writes on this server
and stays open, in any database, holds the newest events back until it ends; it never makes one be skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from vaultevents.core.pages import CursorUnknown
from vaultevents.store.pool import Connection, Database
from vaultevents.store.sessions import allow

MEND_WITHIN_S: Final = 3600.0


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

    Quiet events are among them, orphaned ones are not (C1). Raises `CursorUnknown` for a position of another epoch, or
    one whose event this server does not have: it is, or was made from, an older copy of the database.
    """
    place = await connection.fetchrow(
        _PLACE, account_id, str(after.xid) if after else "0", after.seq if after else None
    )
    if after is not None and (after.epoch != place["epoch"] or not place["reached"]):
        raise CursorUnknown
    rows = await connection.fetch(
        _PAGE,
        account_id,
        limit,
        str(after.xid) if after else "0",
        after.seq if after else 0,
        since_ms,
        until_ms,
    )
    return [
        FeedEvent(row["id"], row["body"], FeedPosition(place["epoch"], int(row["xid"]), row["seq"])) for row in rows
    ]


# An event that came back after a reorganisation has moved on to a later transaction.
_PLACE = """
select epoch, $2::text::xid8 < pg_snapshot_xmax(pg_current_snapshot()) and ($3::bigint is null or exists (
    select from events where account_id = $1 and seq = $3
        and (committed_xid = $2::text::xid8 or (near_head and committed_xid > $2::text::xid8))
)) as reached from feed
"""
_PAGE = """
select id, body, committed_xid::text as xid, seq from events
where account_id = $1 and (committed_xid, seq) > ($3::text::xid8, $4) and orphaned_at is null
    and committed_xid < pg_snapshot_xmin(pg_current_snapshot())
    and ($5::bigint is null or created_at_ms >= $5) and ($6::bigint is null or created_at_ms < $6)
order by committed_xid, seq limit $2
"""


async def find(connection: Connection, account_id: str, event_id: str) -> bytes | None:
    """The body of one event that is not orphaned."""
    body: bytes | None = await connection.fetchval(
        "select body from events where account_id = $1 and id = $2 and orphaned_at is null", account_id, event_id
    )
    return body


async def mend(database: Database) -> None:
    """Shows the events that a dump brought from another server: on this one their transactions seem not to have begun.

    To be called at each start. They move to the present transaction, in the order of their numbers, and the epoch
    changes, so that no cursor of before is taken for one of now. Where nothing is to do it costs one look into the
    index for each account.
    """
    async with database.transaction() as connection:
        if not await connection.fetchval(_FOREIGN):
            return
        await allow(connection, MEND_WITHIN_S)
        await connection.execute("lock table feed in exclusive mode")  # another daemon may be at it
        moved = await connection.execute(
            "update events set committed_xid = pg_current_xact_id()"
            " where committed_xid >= pg_snapshot_xmax(pg_current_snapshot())",
            timeout=MEND_WITHIN_S,
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
