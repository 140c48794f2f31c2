"""The queue: claim due deliveries under a lease, settle their attempts in batches (architecture §5, D5, D14).

A claim sets a fresh lease token and moves `next_attempt_at` to the end of the lease, so a dead process's rows come
due again by themselves. Every later write carries the token: whoever lost the lease changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

from vaultevents.store.cursors import lock_registry
from vaultevents.store.pool import Database
from vaultevents.store.webhooks import disable_webhook


@dataclass(frozen=True, slots=True)
class SealedSecret:
    key_id: str
    sealed: bytes


@dataclass(frozen=True, slots=True)
class Delivery:
    """One claimed delivery: all that an attempt needs. `attempt` counts from 1; `secrets` newest first."""

    id: int
    lease: UUID
    attempt: int
    event_id: str
    body: bytes
    webhook_id: str
    url: str
    secrets: tuple[SealedSecret, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """What was due, and the database's time at that moment (D15)."""

    deliveries: tuple[Delivery, ...]
    database_time: datetime


@dataclass(frozen=True, slots=True)
class Settlement:
    """One finished attempt and the state it leads to.

    `after_s`: with state `scheduled`, seconds from now to the next attempt. `park_s`: the receiver asked for a pause
    of the whole webhook. `gone`: it answered 410, so it is disabled and everything pending is parked.
    """

    delivery: Delivery
    state: Literal["scheduled", "delivered", "exhausted", "parked"]
    started_at: datetime
    duration_ms: int
    status: int | None
    error: str | None
    excerpt: str
    address: str | None
    after_s: float = 0.0
    park_s: float = 0.0
    gone: bool = False


async def claim(database: Database, limit: int, lease: UUID, lease_s: float) -> Claim:
    """Up to `limit` due deliveries, now leased to the caller; rows that others hold are skipped.

    Whatever is due for a parked webhook is put off to the end of its pause instead: it may have been in flight, or
    with a dead process, when the pause began (D6).
    """
    async with database.transaction() as connection:
        rows = await connection.fetch(_CLAIM, limit, lease, lease_s)
        database_time = rows[0]["now"] if rows else await connection.fetchval("select db_now()")
    return Claim(tuple(_delivery(row, lease) for row in rows), database_time)


_CLAIM = """
with due as (
    select d.id,
        (select w.parked_until from webhooks w where w.id = d.webhook_id and w.parked_until > db_now()) as pause
    from deliveries d
    where d.state = 'scheduled' and d.next_attempt_at <= (select db_now())  -- once, so that the index can be asked
    order by d.next_attempt_at limit $1
    for update of d skip locked
), leased as (
    update deliveries d set lease = case when due.pause is null then $2::uuid end,
        next_attempt_at = coalesce(due.pause, db_now() + make_interval(secs => $3))
    from due where d.id = due.id
    returning d.id, d.event_seq, d.webhook_id, d.attempts, d.lease
)
select l.id, l.attempts, e.id as event_id, e.body, w.id as webhook_id, w.url, db_now() as now,
    array(select s.key_id from webhook_secrets s where s.webhook_id = w.id
          and (s.valid_until is null or s.valid_until > db_now()) order by s.created_at desc) as key_ids,
    array(select s.sealed from webhook_secrets s where s.webhook_id = w.id
          and (s.valid_until is null or s.valid_until > db_now()) order by s.created_at desc) as sealed
from leased l join events e on e.seq = l.event_seq join webhooks w on w.id = l.webhook_id
where l.lease is not null
"""


def _delivery(row: object, lease: UUID) -> Delivery:
    columns = dict(row)  # type: ignore[call-overload]
    secrets = zip(columns["key_ids"], columns["sealed"], strict=True)
    return Delivery(
        id=columns["id"],
        lease=lease,
        attempt=columns["attempts"] + 1,
        event_id=columns["event_id"],
        body=columns["body"],
        webhook_id=columns["webhook_id"],
        url=columns["url"],
        secrets=tuple(SealedSecret(key_id, sealed) for key_id, sealed in secrets),
    )


async def settle(database: Database, settlements: Sequence[Settlement]) -> int:
    """Writes finished attempts and their deliveries' new states; returns how many leases were still held.

    A delivery that was cancelled or parked meanwhile keeps that state unless the attempt succeeded, or was the last
    one of a parked delivery (D14). A pause or a 410 counts only with its lease.
    """
    if not settlements:
        return 0
    async with database.transaction() as connection:
        if any(settlement.gone for settlement in settlements):
            await lock_registry(connection)
        changing = sorted({one.delivery.webhook_id for one in settlements if one.gone or one.park_s})
        if changing:  # before any delivery: the lock order
            await connection.execute(_LOCK_WEBHOOKS, changing)
        rows = await connection.fetch(
            _SETTLE,
            [settlement.delivery.id for settlement in settlements],
            [settlement.delivery.lease for settlement in settlements],
            [settlement.delivery.attempt for settlement in settlements],
            [settlement.state for settlement in settlements],
            [settlement.after_s for settlement in settlements],
            [settlement.started_at for settlement in settlements],
            [settlement.duration_ms for settlement in settlements],
            [settlement.status for settlement in settlements],
            [settlement.error for settlement in settlements],
            [settlement.excerpt for settlement in settlements],
            [settlement.address for settlement in settlements],
        )
        held = {row["delivery_id"] for row in rows}
        pauses: dict[str, float] = {}
        for settlement in settlements:
            if settlement.park_s and settlement.delivery.id in held:
                webhook_id = settlement.delivery.webhook_id
                pauses[webhook_id] = max(settlement.park_s, pauses.get(webhook_id, 0.0))
        for webhook_id, seconds in sorted(pauses.items()):
            await connection.execute(_PAUSE, webhook_id, seconds)
        for webhook_id in sorted(
            {one.delivery.webhook_id for one in settlements if one.gone and one.delivery.id in held}
        ):
            await disable_webhook(connection, webhook_id, "gone")
    return len(held)


_LOCK_WEBHOOKS = "select 1 from webhooks where id = any($1) order by id for no key update"

_SETTLE = """
with result as (
    select * from unnest($1::bigint[], $2::uuid[], $3::integer[], $4::text[], $5::float8[], $6::timestamptz[],
        $7::integer[], $8::smallint[], $9::text[], $10::text[], $11::text[])
    as r (id, lease, number, state, after_s, started_at, duration_ms, status, error, excerpt, address)
), held as (
    select r.*, d.state as old_state from deliveries d join result r on r.id = d.id and r.lease = d.lease
    order by d.id for update of d
), settled as (
    update deliveries d set
        state = case when h.state = 'delivered' or h.old_state = 'scheduled' then h.state
                     when h.old_state = 'parked' and h.state = 'exhausted' then h.state else h.old_state end,
        next_attempt_at = case when h.state = 'scheduled' and h.old_state = 'scheduled'
                               then db_now() + make_interval(secs => h.after_s) end,
        finished_at = case when h.state in ('delivered', 'exhausted') then db_now() else d.finished_at end,
        attempts = h.number, lease = null
    from held h where d.id = h.id
)
insert into attempts (delivery_id, number, started_at, duration_ms, status, error, excerpt, address)
select id, number, started_at, duration_ms, status, error, excerpt, address from held
returning delivery_id
"""

_PAUSE = """
with pause as (
    update webhooks set parked_until = greatest(parked_until, db_now() + make_interval(secs => $2)) where id = $1
    returning parked_until
), waiting as (
    select id from deliveries where webhook_id = $1 and state = 'scheduled' and lease is null order by id for update
)
update deliveries d set next_attempt_at = greatest(d.next_attempt_at, pause.parked_until)
from pause, waiting where d.id = waiting.id
"""


async def next_due_s(database: Database) -> float | None:
    """Seconds until the next delivery comes due (0 for now), or None when nothing is scheduled."""
    async with database.transaction() as connection:
        due = await connection.fetchval(
            "select extract(epoch from min(next_attempt_at) - db_now()) from deliveries where state = 'scheduled'"
        )
    return None if due is None else max(0.0, float(due))


async def counts(database: Database) -> dict[str, int]:
    """How many deliveries are in each state."""
    async with database.transaction() as connection:
        rows = await connection.fetch("select state, count(*) as n from deliveries group by state")
    return {row["state"]: row["n"] for row in rows}
