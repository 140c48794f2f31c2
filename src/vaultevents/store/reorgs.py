"""Near the head: which blocks were read, what a reorg takes back, and what comes back (rules C1 and P4).

Only the live cursor of the logs reads above the finalized block. There the hashes of its blocks are kept. Where the
chain has left them, the cursor is rewound to the common ancestor, and the events of the blocks that were left are
orphaned: what was not sent of them is withdrawn, and none is ever deleted. What is read again comes back under its id.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vaultevents.core.events import ENCODING, Event
from vaultevents.store import quarantine
from vaultevents.store.pool import DELIVERIES_CHANNEL, Connection
from vaultevents.store.registry import share_registry

BlockHash = str
"""In hex with 0x, as in the anchor of a cursor."""


@dataclass(frozen=True, slots=True)
class NearBlocks:
    """What was read above the finalized block `final`: the hashes of the blocks from that number on."""

    final: int
    final_hash: BlockHash
    hashes: Mapping[int, BlockHash]


@dataclass(frozen=True, slots=True)
class Rewind:
    """A live cursor went back from block `since` to block `to`: the events of the blocks in between, by account and id,
    and how many deliveries were withdrawn.
    """

    since: int
    to: int
    orphaned: tuple[tuple[str, str], ...]
    withdrawn: int


async def keep(connection: Connection, stream: str, position: int, anchor: BlockHash | None, near: NearBlocks) -> None:
    """Keeps the hashes of a span that was read from `position` on, and of that block itself; forgets what is final.

    The finalized block stays, where it was read as that: nothing is ever rewound below it.
    """
    hashes = dict(near.hashes)
    if anchor is not None and position >= near.final:
        hashes[position] = anchor
    await connection.execute(
        "insert into near_blocks (stream, number, hash) select $1, * from unnest($2::bigint[], $3::bytea[])"
        " on conflict (stream, number) do update set hash = excluded.hash",
        stream,
        list(hashes),
        [bytes.fromhex(block_hash[2:]) for block_hash in hashes.values()],
    )
    await connection.execute(
        "delete from near_blocks where stream = $1 and number < $2"
        " and exists (select from near_blocks where stream = $1 and number = $2 and hash = $3)",
        stream,
        near.final,
        bytes.fromhex(near.final_hash[2:]),
    )


async def kept(connection: Connection, stream: str) -> dict[int, BlockHash]:
    """The hashes that are kept of a stream, by block."""
    rows = await connection.fetch("select number, hash from near_blocks where stream = $1 order by number", stream)
    return {row["number"]: "0x" + row["hash"].hex() for row in rows}


async def mark_near(connection: Connection, event_seqs: Collection[int], final: int) -> None:
    """Remembers of new events that they were first seen above the finalized block."""
    await connection.execute(
        "update events set near_head = true where seq = any($1) and block_number > $2", list(event_seqs), final
    )


async def rewind(
    connection: Connection,
    cursor_id: int,
    stream: str,
    position: int,
    anchor: BlockHash | None,
    to: int,
    to_anchor: BlockHash,
) -> Rewind | None:
    """Moves a live cursor back to the common ancestor, and orphans what was read after it; all in this transaction.

    None, and nothing is done, when the cursor is no longer at `position` with `anchor`. Of open backfills the live
    cursor takes over what lies after the ancestor. An attempt that is under way is let be: when it succeeds, its
    delivery is `delivered`, and otherwise it stays withdrawn.
    """
    await share_registry(connection)
    moved = await connection.fetchval(
        "update cursors set position = $4, anchor = $5, updated_at = db_now(), rewinds = rewinds + 1,"
        " rewound_at = db_now()"
        " where id = $1 and kind = 'live' and position = $2 and anchor is not distinct from $3 and stream = $6"
        " returning id",
        cursor_id,
        position,
        anchor,
        to,
        to_anchor,
        stream,
    )
    if moved is None:
        return None
    await connection.execute(
        "update cursors set stop = greatest(position, $2), updated_at = db_now()"
        " where stream = $1 and kind = 'backfill' and position < stop and stop > $2",
        stream,
        to,
    )
    await connection.execute("delete from near_blocks where stream = $1 and number > $2", stream, to)
    orphaned = await connection.fetch(_ORPHAN, to)
    withdrawn = await connection.fetch(_WITHDRAW, [row["seq"] for row in orphaned])
    await connection.execute(
        "delete from queue q using unnest($1::text[], $2::bigint[]) as d (webhook_id, id)"
        " where q.webhook_id = d.webhook_id and q.delivery_id = d.id",
        [row["webhook_id"] for row in withdrawn],
        [row["id"] for row in withdrawn],
    )
    await quarantine.forget_after(connection, stream, to)
    return Rewind(position, to, tuple((row["account_id"], row["id"]) for row in orphaned), len(withdrawn))


_ORPHAN = """
with left_behind as (
    select seq from events where near_head and block_number > $1 and orphaned_at is null
    order by account_id, id for no key update
)
update events e set orphaned_at = db_now() from left_behind l where e.seq = l.seq
returning e.seq, e.account_id, e.id
"""

# Requests to resend that nobody is at go, too; of those in flight the result is kept.
_WITHDRAW = """
with asked as (
    delete from resends where event_seq = any($1) and finished_at is null and lease is null returning webhook_id, id
), taken_back as (
    delete from queue q using asked where q.webhook_id = asked.webhook_id and q.resend_id = asked.id
), unsent as (
    select id from deliveries where event_seq = any($1) and state in ('scheduled', 'parked') order by id for update
)
update deliveries d set state = 'withdrawn', finished_at = db_now() from unsent where d.id = unsent.id
returning d.webhook_id, d.id
"""


async def revive(connection: Connection, events: Collection[Event]) -> None:
    """Brings back orphaned events that were read again, inside the transaction of their commit.

    One that was perhaps sent keeps its bytes; of any other the new reading is taken. What was withdrawn is scheduled
    again, or parked or cancelled where its webhook was switched off or deleted meanwhile. To whom an event goes was
    decided when it was first stored, and stays. The feed shows it again, as one that was committed now.
    """
    by_key = {event.key: event for event in events}
    rows = await connection.fetch(
        "select e.seq, e.account_id, e.id from events e join unnest($1::text[], $2::text[]) as k (account_id, id)"
        " using (account_id, id) where e.orphaned_at is not null order by e.account_id, e.id for no key update of e",
        [account_id for account_id, _ in by_key],
        [event_id for _, event_id in by_key],
    )
    if not rows:
        return
    seqs = [row["seq"] for row in rows]
    # A claim of one of these from before it was withdrawn has committed after this, and shows in a lease.
    await connection.execute(_LET_CLAIMS_END)
    # Who settles takes the lease first: so none is between its snapshot and its write while a delivery comes back.
    await connection.execute(_LOCK_LEASES, seqs)
    withdrawn = [row["id"] for row in await connection.fetch(_LOCK_WITHDRAWN, seqs)]
    maybe_sent = {row["seq"] for row in await connection.fetch(_MAYBE_SENT, seqs)}
    found = [(row["seq"], by_key[row["account_id"], row["id"]]) for row in rows]
    await connection.execute(_REVIVE, [seq for seq, _ in found], [event.observation.block for _, event in found])
    unsent = [(seq, event) for seq, event in found if seq not in maybe_sent]
    await connection.execute(
        "update events e set body = n.body, created_at_ms = n.created_at_ms, encoding = $4"
        " from unnest($1::bigint[], $2::bytea[], $3::bigint[]) as n (seq, body, created_at_ms) where e.seq = n.seq",
        [seq for seq, _ in unsent],
        [event.body for _, event in unsent],
        [event.observation.at_ms for _, event in unsent],
        ENCODING,
    )
    await connection.execute(_SCHEDULE_AGAIN, withdrawn)
    await connection.execute("select pg_notify($1, '')", DELIVERIES_CHANNEL)


_LET_CLAIMS_END = """
select pg_advisory_lock(claims, here), pg_advisory_unlock(claims, here),
    pg_advisory_lock(resends, here), pg_advisory_unlock(resends, here)
from (select hashtext('vaultevents claim') as claims, hashtext('vaultevents resend') as resends,
    hashtext(current_schema()) as here) locks
"""

_LOCK_LEASES = """
select from leases l where exists (
    select from deliveries d where d.event_seq = any($1) and d.webhook_id = l.webhook_id and d.id = any (l.delivery_ids)
) order by l.webhook_id, l.token for update of l
"""

_LOCK_WITHDRAWN = """
select id from deliveries where event_seq = any($1) and state = 'withdrawn' order by id for update
"""

_MAYBE_SENT = """
select seq from unnest($1::bigint[]) as e (seq)
where exists (select from deliveries d where d.event_seq = e.seq and (d.attempts > 0 or d.state = 'delivered'
        or exists (select from leases l where l.webhook_id = d.webhook_id and d.id = any (l.delivery_ids))))
    or exists (select from resends r where r.event_seq = e.seq and (r.lease is not null or r.finished_at is not null))
    or exists (select from interrupted i where i.event_seq = e.seq)
"""

_REVIVE = """
update events e set orphaned_at = null, block_number = n.block_number, committed_xid = pg_current_xact_id()
from unnest($1::bigint[], $2::bigint[]) as n (seq, block_number) where e.seq = n.seq
"""

_SCHEDULE_AGAIN = """
with again as (
    update deliveries d set
        state = case when w.deleted_at is not null then 'cancelled' when w.active then 'scheduled' else 'parked' end,
        finished_at = case when w.deleted_at is not null then db_now() end
    from webhooks w where w.id = d.webhook_id and d.id = any($1)
    returning d.id, d.event_seq, d.webhook_id, d.attempts, d.state
)
insert into queue (delivery_id, event_seq, webhook_id, attempts, due_at)
select id, event_seq, webhook_id, attempts, db_now() from again where state = 'scheduled'
"""
