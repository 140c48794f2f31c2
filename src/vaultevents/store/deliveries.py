"""The queue: claim due deliveries under a lease, settle their attempts in batches (rules D5 to D8 and D14).

A claim leases what it takes, with a fresh token and until a moment. Dispatchers end the leases whose time is over:
then what a dead process held is due again. Every later write names the token: without its lease it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

import msgspec

from vaultevents.core.timing import NO_TIMING, Timing
from vaultevents.core.webhook_health import DEFAULT_PARKING, Parking, Streak, should_disable
from vaultevents.store.notices import Notice, record
from vaultevents.store.pool import Connection, Database, Record
from vaultevents.store.registry import lock_registry
from vaultevents.store.webhook_health import disable_failing, keep_streaks, lock_streaks
from vaultevents.store.webhooks import disable_webhook


class SealedSecret(NamedTuple):
    key_id: str
    sealed: bytes


@dataclass(frozen=True, slots=True)
class Target:
    """Where the deliveries of one claim go, and what signs them: the valid secrets, newest first."""

    webhook_id: str
    url: str
    secrets: tuple[SealedSecret, ...]
    account_id: str


class Delivery(msgspec.Struct, frozen=True):
    """One claimed delivery: all that an attempt needs. `attempt` counts from 1."""

    id: int
    lease: UUID
    attempt: int
    event_id: str
    body: bytes
    target: Target

    @property
    def webhook_id(self) -> str:
        return self.target.webhook_id


@dataclass(frozen=True, slots=True)
class Claim:
    """What was due, the database's time then (rule D15), which comes with deliveries only, and whose turn it was.

    The next claim may begin after the webhook `last`.
    """

    deliveries: tuple[Delivery, ...] = ()
    database_time: datetime | None = None
    last: str = ""


AttemptState = Literal["scheduled", "delivered", "exhausted", "parked"]


class Settlement(msgspec.Struct, frozen=True):
    """One finished attempt and the state it leads to.

    `after_s`: with state `scheduled`, seconds from now to the next attempt. `park_s`: the receiver asked for a pause
    of the whole webhook. `gone`: it answered 410, so it is disabled and everything pending is parked.
    """

    delivery: Delivery
    state: AttemptState
    started_at: datetime
    duration_ms: int
    status: int | None
    error: str | None
    excerpt: str
    address: str | None
    after_s: float = 0.0
    park_s: float = 0.0
    gone: bool = False
    timing: Timing = NO_TIMING

    @property
    def accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Scarce:
    """Where slots are scarce, who accepted nothing of late may have `per_unproven`; those `proven` keep theirs."""

    per_unproven: int
    proven: Sequence[str]


@dataclass(frozen=True, slots=True)
class Limits:
    """Slots of the webhooks that have others than `per_webhook`, and the accounts that get none in this claim."""

    webhooks: Mapping[str, int] = field(default_factory=dict)
    closed_accounts: Sequence[str] = ()


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What one claim may take: up to `limit`, which is part of the `free` slots of the caller.

    `lease`: the token of this claim; `after`: the webhook whose turn was last.
    """

    limit: int
    lease: UUID
    lease_s: float
    per_webhook: int = 10
    after: str = ""
    scarce: Scarce | None = None
    limits: Limits = NO_LIMITS
    free: int = 1_000_000


async def claim(database: Database, request: ClaimRequest) -> Claim:
    """Lease up to `limit` due deliveries to the caller.

    No webhook has more than `per_webhook` in flight, or what `limits` says, in all processes together. One that is
    parked or paused gets nothing. One whose failures are not forgotten gets a single delivery: the oldest that is due,
    retries included (rule D8). Otherwise first attempts go before retries. Webhooks take turns, beginning with the one
    whose id follows `after`; where several have something due, each gets its share of the claim at most, which is
    `LEAST_SHARE` at least. The cost is that of what is due, however many webhooks there are.
    """
    async with database.statement() as connection:  # one round trip, one commit: `claim_due` is a migration's
        rows = await connection.fetch(_CLAIM, _claim_request(request))
    return claimed(rows, request)


LEAST_SHARE: Final = 32
"""The smallest share of a claim that a webhook gets beside others; a claim that found less has left nothing."""

_CLAIM = "select *, null::bigint[] as lost from claim_due($1)"
_UNRESTRICTED: Final = 1_000_000


def _claim_request(request: ClaimRequest) -> tuple[Any, ...]:
    """Return the value of the type `claim_request`."""
    scarce, limits = request.scarce, request.limits
    return (
        request.limit,
        request.lease,
        request.lease_s,
        request.per_webhook,
        request.after,
        _UNRESTRICTED if scarce is None else scarce.per_unproven,
        () if scarce is None else scarce.proven,
        list(limits.webhooks),
        list(limits.webhooks.values()),
        limits.closed_accounts,
    )


def claimed(rows: Sequence[Record], request: ClaimRequest) -> Claim:
    """Read the rows of a claim. The target of a webhook comes with the first of its deliveries, or with all."""
    targets: dict[str, Target] = {}
    database_time, lease, after = None, request.lease, request.after
    deliveries = []
    for delivery_id, attempts, event_id, body, webhook_id, account_id, url, key_ids, sealed, claimed_at, _ in rows:
        if url is not None:  # once for each webhook, with the first of its deliveries
            targets[webhook_id] = Target(webhook_id, url, tuple(map(SealedSecret, key_ids, sealed)), account_id)
            database_time = claimed_at
        deliveries.append(Delivery(delivery_id, lease, attempts + 1, event_id, body, targets[webhook_id]))
    last = max(targets, key=lambda webhook_id: (webhook_id <= after, webhook_id), default=after)
    return Claim(tuple(deliveries), database_time, last)


async def settle_and_claim(
    database: Database, accepted: Sequence[Settlement], request: ClaimRequest
) -> tuple[Settled | None, Claim]:
    """`settle` and `claim` in one round trip and one commit, for attempts in the state `delivered` only.

    The slots that these had are free for what is claimed. Without a `Settled` nothing was done: a webhook has failures
    to forget, which is the business of `settle`.
    """
    async with database.statement() as connection:
        (first, *rows) = await connection.fetch(_SETTLE_AND_CLAIM, as_rows(accepted), _claim_request(request))
    lost = first["lost"]
    return None if lost is None else Settled(len(accepted) - len(lost)), claimed(rows, request)


_SETTLE_AND_CLAIM = "select * from settle_and_claim($1, $2)"


@dataclass(frozen=True, slots=True)
class Parked:
    """A webhook that gets nothing until `streak.parked_until`, and what cost it that."""

    webhook_id: str
    streak: Streak


@dataclass(frozen=True, slots=True)
class Settled:
    """How many leases were still held, and which webhooks were parked now."""

    held: int
    parked: tuple[Parked, ...] = ()


async def settle(database: Database, settlements: Sequence[Settlement], parking: Parking = DEFAULT_PARKING) -> Settled:
    """Write finished attempts, the new states of their deliveries and the health of their webhooks.

    A delivery that was cancelled, parked or withdrawn meanwhile keeps that state unless the attempt succeeded, or was
    the last one of a parked or withdrawn delivery (rule D14). Nothing counts without its lease.
    """
    if not settlements:
        return Settled(0)
    attempted = {settlement.delivery.webhook_id for settlement in settlements}
    failing = {settlement.delivery.webhook_id for settlement in settlements if settlement.state != "delivered"}
    async with database.transaction() as connection:
        if any(settlement.gone for settlement in settlements):
            await lock_registry(connection)
        streaks, now = await lock_streaks(connection, attempted, failing)  # before any delivery: the lock order
        lost = await connection.fetchval("select settle_deliveries($1, false)", as_rows(settlements))
        held = [settlement for settlement in settlements if settlement.delivery.id not in lost]
        await pause(connection, held)
        attempts = [(settled.delivery.webhook_id, settled.state == "delivered", settled.started_at) for settled in held]
        changed = await keep_streaks(connection, streaks, attempts, now, parking)
        if exhausted := [settlement.delivery for settlement in held if settlement.state == "exhausted"]:
            await connection.execute(_EXHAUST_WITHDRAWN, sorted(delivery.id for delivery in exhausted))
        await record(connection, [Notice("delivery_exhausted", delivery.webhook_id) for delivery in exhausted])
        for webhook_id in sorted({settlement.delivery.webhook_id for settlement in held if settlement.gone}):
            await disable_webhook(connection, webhook_id, "gone")
    for webhook_id in sorted(webhook_id for webhook_id, streak in changed.items() if should_disable(streak, now)):
        await disable_failing(database, webhook_id)
    parked = [Parked(name, streak) for name, streak in changed.items() if streak.parks > streaks[name][0].parks]
    return Settled(len(held), tuple(parked))


def as_rows(settlements: Iterable[Settlement]) -> list[tuple[Any, ...]]:
    """Return values of the type `settlement`, in the order of their ids, so that no two writers wait for each other."""
    return sorted(map(_as_row, settlements))


_as_row = attrgetter(
    *("delivery.id", "delivery.target.webhook_id", "delivery.lease", "delivery.attempt", "state", "after_s"),
    *("started_at", "duration_ms", "status", "error", "excerpt", "address"),
    *("timing.dns_ms", "timing.connect_ms", "timing.tls_ms", "timing.first_byte_ms"),
)

# An event that comes back is not attempted more often than the schedule says.
_EXHAUST_WITHDRAWN = """
update deliveries set state = 'exhausted', finished_at = db_now() where id = any($1) and state = 'withdrawn'
"""


async def pause(connection: Connection, settlements: Iterable[Settlement]) -> None:
    """Pause webhooks for the longest time that their receivers asked for (rule D6)."""
    for settled in sorted(settlements, key=attrgetter("delivery.webhook_id")):
        if settled.park_s:
            await connection.execute(_PAUSE, settled.delivery.webhook_id, settled.park_s)


_PAUSE = """
update webhooks set paused_until = greatest(paused_until, db_now() + make_interval(secs => $2)) where id = $1
"""


async def next_due_s(database: Database, per_webhook: int = 10) -> float | None:
    """Return the seconds until something can be claimed (0 for now), or None when nothing is scheduled.

    A webhook that has all in flight that it may is left out: the settle that ends a lease of it claims again. Reads the
    first marks only, so the answer may be early, never late.
    """
    async with database.statement() as connection:
        due = await connection.fetchval(_NEXT_DUE, per_webhook)
    return None if due is None else max(0.0, float(due))


# The first marks say when their webhooks are due at the earliest; the mark after them bounds all the others.
_NEXT_DUE = """
with marked as (
    (select webhook_id, null::timestamptz as due_at from due_webhooks where due_at is null order by webhook_id limit 17)
    union all
    (select webhook_id, due_at from due_webhooks where due_at is not null order by due_at limit 17)
), numbered as (
    select webhook_id, due_at, row_number() over (order by due_at nulls first) as place from marked
)
select extract(epoch from least(
    (select coalesce(due_at, db_now()) from numbered where place = 17),
    (select min(greatest(w.paused_until, w.parked_until, least(first.due_at, again.due_at)))
        from (select distinct webhook_id collate "default" as id from numbered where place < 17) n
        join webhooks w on w.id = n.id
        cross join lateral (
            select coalesce(array_agg(each.id), '{}') as leased
            from leases l cross join unnest(l.delivery_ids) as each (id) where l.webhook_id = w.id
        ) slots left join lateral (
            select q.due_at from queue q
            where q.webhook_id = w.id and q.turn = 0 and q.delivery_id <> all (slots.leased)
            order by q.due_at limit 1
        ) first on true left join lateral (
            select q.due_at from queue q
            where q.webhook_id = w.id and q.turn = 1 and q.delivery_id <> all (slots.leased)
            order by q.due_at limit 1
        ) again on true
        where w.active and w.deleted_at is null
            and cardinality(slots.leased) < case when w.parks > 0 then 1 else $1 end)
) - db_now())
"""
