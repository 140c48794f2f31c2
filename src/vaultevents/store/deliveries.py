"""The queue: claim due deliveries under a lease, settle their attempts in batches (D5-D8, D14).

A claim sets a fresh lease token and moves `next_attempt_at` to the end of the lease, so a dead process's rows come
due again by themselves. Every later write carries the token: whoever lost the lease changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

from vaultevents.core.streaks import DEFAULT_PARKING, Parking, Streak, failed, should_disable, should_warn
from vaultevents.store.cursors import lock_registry
from vaultevents.store.pool import Connection, Database, Record
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


async def claim(database: Database, limit: int, lease: UUID, lease_s: float, per_webhook: int = 10) -> Claim:
    """Up to `limit` due deliveries, now leased to the caller; rows and webhooks that others hold are skipped.

    No webhook has more than `per_webhook` in flight, in all processes together; one that is parked or paused gets
    nothing, and one whose park just ended a single one (D8). First attempts go before retries; webhooks take turns.
    """
    async with database.transaction() as connection:
        rows = await connection.fetch(_CLAIM, limit, lease, lease_s, per_webhook)
        database_time = rows[0]["now"] if rows else await connection.fetchval("select db_now()")
    return Claim(tuple(_delivery(row, lease) for row in rows), database_time)


# How many more of a webhook w may be in flight. While its failures are not forgotten, one is tried at a time.
_FREE = """
greatest(0, case when w.parks > 0 then 1 else {per_webhook} end - (
    select count(*) from deliveries f
    where f.webhook_id = w.id and f.lease is not null and f.state = 'scheduled' and f.next_attempt_at > db_now()))
"""

# `due` looks for first attempts and for retries apart, each along the index. The webhooks are locked, so that two
# claimers never count the same free slots.
_CLAIM = """
with clock as materialized (
    select db_now() as now
), open as materialized (
    select w.id, (FREE)::integer as free
    from webhooks w, clock
    where w.active and w.deleted_at is null
        and (w.paused_until is null or w.paused_until <= clock.now)
        and (w.parked_until is null or w.parked_until <= clock.now)
        and (exists (select from deliveries d where d.webhook_id = w.id and d.state = 'scheduled'
                     and least(d.attempts, 1) = 0 and d.next_attempt_at <= clock.now)
          or exists (select from deliveries d where d.webhook_id = w.id and d.state = 'scheduled'
                     and least(d.attempts, 1) = 1 and d.next_attempt_at <= clock.now))
    order by w.id for no key update of w skip locked
), candidates as materialized (
    select due.id, due.next_attempt_at,
        row_number() over (partition by open.id order by due.retry, due.next_attempt_at) as turn
    from open cross join clock cross join lateral (
        (select d.id, d.next_attempt_at, false as retry from deliveries d
         where d.webhook_id = open.id and d.state = 'scheduled' and least(d.attempts, 1) = 0
            and d.next_attempt_at <= clock.now order by d.next_attempt_at limit open.free)
        union all
        (select d.id, d.next_attempt_at, true from deliveries d
         where d.webhook_id = open.id and d.state = 'scheduled' and least(d.attempts, 1) = 1
            and d.next_attempt_at <= clock.now order by d.next_attempt_at limit open.free)
        order by retry, next_attempt_at limit open.free
    ) due
), chosen as (
    select id from candidates order by turn, next_attempt_at limit $1
), due as (
    select d.id from deliveries d
    where d.id = any(array(select id from chosen))
        and d.state = 'scheduled' and d.next_attempt_at <= (select now from clock)
    for update skip locked
), leased as (
    update deliveries d set lease = $2::uuid, next_attempt_at = db_now() + make_interval(secs => $3)
    from due where d.id = due.id
    returning d.id, d.event_seq, d.webhook_id, d.attempts
)
select l.id, l.attempts, e.id as event_id, e.body, w.id as webhook_id, w.url, db_now() as now,
    array(select s.key_id from webhook_secrets s where s.webhook_id = w.id
          and (s.valid_until is null or s.valid_until > db_now()) order by s.created_at desc) as key_ids,
    array(select s.sealed from webhook_secrets s where s.webhook_id = w.id
          and (s.valid_until is null or s.valid_until > db_now()) order by s.created_at desc) as sealed
from leased l join events e on e.seq = l.event_seq join webhooks w on w.id = l.webhook_id
""".replace("FREE", _FREE.format(per_webhook="$4"))


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


@dataclass(frozen=True, slots=True)
class Notice:
    """What an operator should know: a webhook is `parked`, `failing` (at half time before it is off), `disabled`."""

    kind: Literal["parked", "failing", "disabled"]
    webhook_id: str
    streak: Streak


@dataclass(frozen=True, slots=True)
class Settled:
    """How many leases were still held, and what became of the webhooks."""

    held: int
    notices: tuple[Notice, ...] = ()


async def settle(database: Database, settlements: Sequence[Settlement], parking: Parking = DEFAULT_PARKING) -> Settled:
    """Writes finished attempts, their deliveries' new states and the streaks of their webhooks.

    A delivery that was cancelled or parked meanwhile keeps that state unless the attempt succeeded, or was the last
    one of a parked delivery (D14). Nothing counts without its lease.
    """
    if not settlements:
        return Settled(0)
    async with database.transaction() as connection:
        if any(settlement.gone for settlement in settlements):
            await lock_registry(connection)
        streaks, now = await _lock_streaks(connection, settlements)  # before any delivery: the lock order
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
        ids = {row["delivery_id"] for row in rows}
        held = [settlement for settlement in settlements if settlement.delivery.id in ids]
        for webhook_id, seconds in sorted(_pauses(held).items()):
            await connection.execute(_PAUSE, webhook_id, seconds)
        notices = await _keep_streaks(connection, streaks, held, now, parking)
        for webhook_id in sorted({one.delivery.webhook_id for one in held if one.gone}):
            await disable_webhook(connection, webhook_id, "gone")
    failing = sorted({notice.webhook_id for notice in notices if should_disable(notice.streak, now)})
    disabled = [await _disable_failing(database, webhook_id) for webhook_id in failing]
    return Settled(len(held), (*notices, *(notice for notice in disabled if notice is not None)))


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
update webhooks set paused_until = greatest(paused_until, db_now() + make_interval(secs => $2)) where id = $1
"""


def _pauses(settlements: Iterable[Settlement]) -> dict[str, float]:
    """The longest pause that each webhook's receiver asked for (D6)."""
    pauses: dict[str, float] = {}
    for settlement in settlements:
        if settlement.park_s:
            webhook_id = settlement.delivery.webhook_id
            pauses[webhook_id] = max(settlement.park_s, pauses.get(webhook_id, 0.0))
    return pauses


async def _lock_streaks(
    connection: Connection, settlements: Sequence[Settlement]
) -> tuple[dict[str, tuple[Streak, bool]], datetime]:
    """The streaks that these attempts may change, with whether the operator was warned; and the database's time."""
    failing = {one.delivery.webhook_id for one in settlements if one.state != "delivered"}
    rows = await connection.fetch(_STREAKS, sorted(failing), sorted({one.delivery.webhook_id for one in settlements}))
    now = rows[0]["now"] if rows else await connection.fetchval("select db_now()")
    return {row["id"]: (_streak(row), row["warned_at"] is not None) for row in rows}, now


_STREAKS = """
select id, failures, first_failure_at, last_failure_at, parks, parked_until, warned_at, db_now() as now from webhooks
where id = any($1) or (id = any($2) and failures > 0) order by id for no key update
"""


def _streak(row: Record) -> Streak:
    return Streak(row["failures"], row["first_failure_at"], row["last_failure_at"], row["parks"], row["parked_until"])


async def _keep_streaks(
    connection: Connection,
    streaks: Mapping[str, tuple[Streak, bool]],
    settlements: Iterable[Settlement],
    now: datetime,
    parking: Parking,
) -> list[Notice]:
    """Counts failures, forgets them at a success, and tells what an operator should know."""
    present = {webhook_id: streak for webhook_id, (streak, _) in streaks.items()}
    for settlement in settlements:
        webhook_id = settlement.delivery.webhook_id
        if settlement.state == "delivered":
            present[webhook_id] = Streak()
        else:
            present[webhook_id] = failed(present.get(webhook_id, Streak()), settlement.started_at, now, parking)
    notices = []
    for webhook_id, (old, warned) in streaks.items():
        new = present[webhook_id]
        if new == old:
            continue
        warn = should_warn(new, now)
        if new.parks > old.parks:
            notices.append(Notice("parked", webhook_id, new))
        if warn and not warned:
            notices.append(Notice("failing", webhook_id, new))
        await connection.execute(
            "update webhooks set failures = $2, first_failure_at = $3, last_failure_at = $4, parks = $5,"
            " parked_until = $6, warned_at = case when $7 then coalesce(warned_at, db_now()) end where id = $1",
            webhook_id,
            new.failures,
            new.first_failure_at,
            new.last_failure_at,
            new.parks,
            new.parked_until,
            warn,
        )
    return notices


async def _disable_failing(database: Database, webhook_id: str) -> Notice | None:
    """Switches a webhook off whose failures have lasted (D7), unless somebody was quicker or it succeeded meanwhile."""
    async with database.transaction() as connection:
        await lock_registry(connection)
        row = await connection.fetchrow(
            "select *, db_now() as now from webhooks where id = $1 and active for no key update", webhook_id
        )
        if row is None or not should_disable(streak := _streak(row), row["now"]):
            return None
        await disable_webhook(connection, webhook_id, "failing")
        return Notice("disabled", webhook_id, streak)


async def next_due_s(database: Database, per_webhook: int = 10) -> float | None:
    """Seconds until something can be claimed (0 for now), or None when nothing is scheduled.

    A webhook that has all in flight that it may is left out: whoever settles for it looks again.
    """
    async with database.transaction() as connection:
        due = await connection.fetchval(_NEXT_DUE, per_webhook)
    return None if due is None else max(0.0, float(due))


_NEXT_DUE = """
select extract(epoch from min(greatest(w.paused_until, w.parked_until, least(
    (select min(d.next_attempt_at) from deliveries d
     where d.webhook_id = w.id and d.state = 'scheduled' and least(d.attempts, 1) = 0),
    (select min(d.next_attempt_at) from deliveries d
     where d.webhook_id = w.id and d.state = 'scheduled' and least(d.attempts, 1) = 1)
))) - db_now())
from webhooks w where w.active and w.deleted_at is null and (FREE) > 0
    and exists (select from deliveries d where d.webhook_id = w.id and d.state = 'scheduled')
""".replace("FREE", _FREE.format(per_webhook="$1"))


async def counts(database: Database) -> dict[str, int]:
    """How many deliveries are in each state."""
    async with database.transaction() as connection:
        rows = await connection.fetch("select state, count(*) as n from deliveries group by state")
    return {row["state"]: row["n"] for row in rows}
