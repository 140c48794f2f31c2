"""What became of the events of a webhook, as its account sees it: health, deliveries, attempts (rules A19 and D14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, get_args

from vaultevents.core.timing import NO_TIMING, Timing
from vaultevents.store.pool import Connection, Record

DeliveryState = Literal["scheduled", "parked", "delivered", "exhausted", "cancelled", "withdrawn"]
APART: Final = ("parked", "exhausted", "cancelled", "withdrawn")  # found by an index of their own
COUNTED: Final = 10_000
RESENDS_LISTED: Final = 100
LOOKED_AT: Final = 1000


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that was not accepted: the receiver's status, or why there was none."""

    at: datetime
    status: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Health:
    """`deliveries` has a number for each state, `COUNTED` for more; `failures_in_a_row` are those since a success.

    What is pending counts as `scheduled` while the webhook is on, and as `parked` while it is off: that holds at once,
    also while its deliveries still follow (`flag_changes`).
    """

    deliveries: dict[DeliveryState, int]
    oldest_pending_at: datetime | None
    last_success_at: datetime | None
    last_failure: Failure | None
    failures_in_a_row: int


@dataclass(frozen=True, slots=True)
class DeliveryFacts:
    """One delivery; while an attempt is under way it is `in_flight` and has no next one.

    `next_attempt_at` is when the next attempt is due; None: it is under way, or there will be none.
    """

    id: int
    event_id: str
    event_type: str
    state: DeliveryState
    in_flight: bool
    attempts: int
    created_at: datetime
    next_attempt_at: datetime | None
    finished_at: datetime | None
    recovered: bool


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """One POST and what came back; a `resend` has no number."""

    number: int | None
    started_at: datetime
    duration_ms: int
    status: int | None
    error: str | None
    excerpt: str
    address: str | None
    timing: Timing = NO_TIMING
    resend: bool = False


async def health(connection: Connection, account_id: str, webhook_id: str) -> Health:
    """How a webhook is doing; an unknown one has no deliveries.

    The cost is bounded, whatever is stored: an index entry for each delivery up to `COUNTED` a state, and the attempts
    of some thousand deliveries: the newest, the newest before what is pending, the next retries, and of those set apart
    the newest and the first. What happened and what failed in a row is derived from these alone.
    """
    apart = await connection.fetch(_APART, account_id, webhook_id, list(APART), COUNTED)
    queued = await connection.fetchrow(_QUEUED, account_id, webhook_id, COUNTED)
    numbers: dict[DeliveryState, int] = {row["state"]: row["number"] for row in apart}
    oldest = [row["oldest_id"] for row in apart if row["state"] == "parked"]
    oldest += [] if queued is None else [queued["oldest_id"]]
    first_id = min((delivery_id for delivery_id in oldest if delivery_id is not None), default=None)
    if queued is not None:
        others = [*numbers.values(), queued["number"]]
        numbers["delivered"] = await _delivered(connection, webhook_id, others, first_id)
        pending = min(numbers["parked"] + queued["number"], COUNTED)
        numbers["scheduled"], numbers["parked"] = (pending, 0) if queued["active"] else (0, pending)
    tried = await connection.fetchrow(_TRIED, account_id, webhook_id, list(APART), LOOKED_AT, first_id)
    return Health(
        deliveries={**dict.fromkeys(get_args(DeliveryState), 0), **numbers},
        oldest_pending_at=tried["oldest_at"],
        last_success_at=tried["succeeded_at"],
        last_failure=Failure(tried["failed_at"], tried["status"], tried["error"]) if tried["failed_at"] else None,
        failures_in_a_row=tried["failures_in_a_row"],
    )


async def _delivered(
    connection: Connection, webhook_id: str, others: Sequence[int], first_pending_id: int | None
) -> int:
    """Return how many deliveries were accepted, `COUNTED` for more: all that are in none of the other states.

    Where one of these numbers is `COUNTED`, those among the newest `COUNTED`, and among as many before what is pending.
    """
    if max(others) < COUNTED:
        total: int = await connection.fetchval(_ALL, webhook_id, COUNTED + sum(others))
        return total - sum(others)
    seen: int = await connection.fetchval(_SEEN_DELIVERED, webhook_id, COUNTED, first_pending_id)
    return min(seen, COUNTED)


# Ordered, so that the plan keeps to the indexes whatever the statistics say.
_APART = """
select s.state,
    (select count(*) from (
        select from deliveries d where d.webhook_id = w.id and d.apart = s.state order by d.id limit $4
    ) few) as number,
    (select d.id from deliveries d where d.webhook_id = w.id and d.apart = s.state order by d.id limit 1)
        as oldest_id
from webhooks w cross join unnest($3::text[]) as s (state)
where w.account_id = $1 and w.id = $2 and w.deleted_at is null
"""

_QUEUED = """
select
    (select count(*) from (
        select from queue q where q.webhook_id = w.id and q.delivery_id is not null order by q.delivery_id limit $3
    ) few) as number,
    (select q.delivery_id from queue q where q.webhook_id = w.id order by q.delivery_id limit 1) as oldest_id,
    w.active
from webhooks w where w.account_id = $1 and w.id = $2 and w.deleted_at is null
"""

_ALL = "select count(*) from (select from deliveries where webhook_id = $1 order by id limit $2) few"

_SEEN_DELIVERED = """
select count(*) from (
    (select id, state from deliveries where webhook_id = $1 order by id desc limit $2)
    union
    (select id, state from deliveries where webhook_id = $1 and id < $3 order by id desc limit $2)
) seen where state = 'delivered'
"""

# Each part reads `$4` rows at most. What is pending may hide all that was attempted, so that what lies before it is
# looked at, too. Those that were tried are the first of those that are parked.
_TRIED = """
with tried as (
    select a.started_at, a.status, a.error, coalesce(a.status between 200 and 299, false) as accepted
    from webhooks w cross join lateral (
        (select q.delivery_id as id from queue q where q.webhook_id = w.id and q.turn = 1
         order by q.due_at desc limit $4)
        union
        (select d.id from deliveries d where d.webhook_id = w.id order by d.id desc limit $4)
        union
        (select d.id from deliveries d where d.webhook_id = w.id and d.id < $5 order by d.id desc limit $4)
        union
        select each.id from unnest($3::text[]) as s (state) cross join lateral (
            (select d.id from deliveries d where d.webhook_id = w.id and d.apart = s.state order by d.id desc limit $4)
            union all
            (select d.id from deliveries d where d.webhook_id = w.id and d.apart = s.state order by d.id limit $4)
        ) each
    ) newest join attempts a on a.delivery_id = newest.id
    where w.account_id = $1 and w.id = $2 and w.deleted_at is null
), success as (
    select max(started_at) as at from tried where accepted
), failure as (
    select started_at, status, error from tried where not accepted order by started_at desc limit 1
)
select (select created_at from deliveries where id = $5) as oldest_at, success.at as succeeded_at,
    failure.started_at as failed_at, failure.status, failure.error,
    (select count(*) from tried where not accepted and (success.at is null or started_at > success.at))
        as failures_in_a_row
from success left join failure on true
"""


async def deliveries(
    connection: Connection,
    account_id: str,
    webhook_id: str,
    state: DeliveryState | None,
    limit: int,
    before_id: int | None,
) -> list[DeliveryFacts]:
    """The deliveries of a webhook, of one state or of all, newest first: those before the delivery `before_id`."""
    rows = await connection.fetch(
        f"{_DELIVERIES} and ($4::bigint is null or d.id < $4) {_ONLY[state]} order by d.id desc limit $3",
        account_id,
        webhook_id,
        limit,
        before_id,
    )
    return [DeliveryFacts(**row) for row in rows]


async def delivery(
    connection: Connection, account_id: str, webhook_id: str, event_id: str
) -> tuple[DeliveryFacts, list[AttemptFacts]] | None:
    """One delivery and its attempts, oldest first, with its newest `RESENDS_LISTED` resends among them."""
    row = await connection.fetchrow(f"{_DELIVERIES} and e.id = $3", account_id, webhook_id, event_id)
    if row is None:
        return None
    attempts = await connection.fetch(_ATTEMPTS, account_id, webhook_id, row["id"], RESENDS_LISTED)
    return DeliveryFacts(**row), [attempt_of(attempt) for attempt in attempts]


def attempt_of(row: Record) -> AttemptFacts:
    """Return the attempt or resend of a row."""
    columns = ("number", "started_at", "duration_ms", "status", "error", "excerpt", "address", "resend")
    phases = ("dns_ms", "connect_ms", "tls_ms", "first_byte_ms")
    return AttemptFacts(**{name: row[name] for name in columns}, timing=Timing(*(row[name] for name in phases)))


# Each a text of its own, so that its plan always uses its index.
_ONLY: Final[dict[DeliveryState | None, str]] = {
    None: "",
    "scheduled": "and d.state = 'scheduled' and q.delivery_id is not null",
    "delivered": "and d.state = 'delivered'",
    **{state: f"and d.apart = '{state}'" for state in APART},
}

# A lease that ended belongs to a process that died: the delivery is due, nobody is at it.
_DELIVERIES = """
select d.id, e.id as event_id, e.event_type, d.state, d.attempts, d.created_at, d.finished_at, d.recovered,
    now.in_flight,
    case when d.state = 'scheduled' and w.active and not now.in_flight then q.due_at end as next_attempt_at
from webhooks w join deliveries d on d.webhook_id = w.id join events e on e.seq = d.event_seq
    left join queue q on q.webhook_id = d.webhook_id and q.delivery_id = d.id
    cross join lateral (
        select d.state = 'scheduled' and exists (select from leases l
            where l.webhook_id = d.webhook_id and l.until > db_now() and d.id = any (l.delivery_ids)) as in_flight
    ) now
where w.account_id = $1 and w.id = $2 and w.deleted_at is null and e.account_id = $1
"""

_ATTEMPTS = """
select * from (
    select a.number, a.started_at, a.duration_ms, a.status, a.error, a.excerpt, a.address, false as resend,
        a.dns_ms, a.connect_ms, a.tls_ms, a.first_byte_ms
    from webhooks w join deliveries d on d.webhook_id = w.id join attempts a on a.delivery_id = d.id
    where w.account_id = $1 and w.id = $2 and d.id = $3
    union all (
        select null, r.started_at, r.duration_ms, r.status, r.error, r.excerpt, r.address, true,
            r.dns_ms, r.connect_ms, r.tls_ms, r.first_byte_ms
        from webhooks w join deliveries d on d.webhook_id = w.id
            join resends r on r.webhook_id = d.webhook_id and r.event_seq = d.event_seq
        where w.account_id = $1 and w.id = $2 and d.id = $3 and r.finished_at is not null
        order by r.id desc limit $4
    )
) sent order by started_at, number
"""
