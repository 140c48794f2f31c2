"""The queue: claim due deliveries under a lease, settle their attempts in batches (D5-D8, D14).

A claim leases what it takes, with a fresh token and until a moment. Whoever works ends the leases whose time is over:
then what a dead process held is due again. Every later write proves the token: whoever lost the lease changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

import msgspec

from vaultevents.core.streaks import DEFAULT_PARKING, Parking, Streak, failed, should_disable, should_warn
from vaultevents.core.timing import NO_TIMING, Timing
from vaultevents.store.notices import Notice, record
from vaultevents.store.pool import Connection, Database, Record
from vaultevents.store.registry import lock_registry
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
    """What was due, the database's time then (D15), which is told with deliveries only, and whose turn it was.

    The next claim may begin after the webhook `last`.
    """

    deliveries: tuple[Delivery, ...]
    database_time: datetime | None
    last: str


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


async def claim(
    database: Database,
    limit: int,
    lease: UUID,
    lease_s: float,
    per_webhook: int = 10,
    after: str = "",
    scarce: Scarce | None = None,
    limits: Limits = NO_LIMITS,
) -> Claim:
    """Lease up to `limit` due deliveries to the caller.

    No webhook has more than `per_webhook` in flight, or what `limits` says, in all processes together. One that is
    parked or paused gets nothing. One whose failures are not forgotten gets a single delivery: the oldest that is due,
    retries included (D8). Otherwise first attempts go before retries. Webhooks take turns, beginning with the one whose
    id follows `after`. The cost is that of what is due, however many webhooks there are.
    """
    async with database.statement() as connection:  # one round trip, one commit: `claim_due` is a migration's
        rows = await connection.fetch(_CLAIM, limit, lease, lease_s, per_webhook, after, *_restrictions(scarce, limits))
    return _claimed(rows, lease, after)


_CLAIM = "select *, null::bigint[] as lost from claim_due($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
_UNRESTRICTED: Final = 1_000_000


def _restrictions(scarce: Scarce | None, limits: Limits) -> tuple[Any, ...]:
    per_unproven, proven = (_UNRESTRICTED, ()) if scarce is None else (scarce.per_unproven, scarce.proven)
    return per_unproven, proven, list(limits.webhooks), list(limits.webhooks.values()), limits.closed_accounts


def _claimed(rows: Sequence[Record], lease: UUID, after: str) -> Claim:
    targets: dict[str, Target] = {}
    database_time = None
    deliveries = []
    for delivery_id, attempts, event_id, body, webhook_id, account_id, url, key_ids, sealed, claimed_at, _ in rows:
        if url is not None:  # once for each webhook, with the first of its deliveries
            targets[webhook_id] = Target(webhook_id, url, tuple(map(SealedSecret, key_ids, sealed)), account_id)
            database_time = claimed_at
        deliveries.append(Delivery(delivery_id, lease, attempts + 1, event_id, body, targets[webhook_id]))
    return Claim(tuple(deliveries), database_time, max(targets, key=lambda one: (one <= after, one), default=after))


async def end_leases(database: Database) -> int:
    """Makes due again what nobody settled in time; how many leases that were. One that is being settled is let be."""
    async with database.statement() as connection:
        return len(await connection.fetch(_END_LEASES))


_END_LEASES = """
with ended as (
    select webhook_id, token, delivery_ids from leases where until <= db_now()
    order by webhook_id, token for update skip locked
), doubtful as (
    insert into interrupted select distinct e.seq
    from ended cross join unnest(ended.delivery_ids) as each (id) join deliveries d on d.id = each.id
        join events e on e.seq = d.event_seq and e.near_head
    on conflict do nothing
), marked as (
    insert into due_webhooks (webhook_id) select distinct webhook_id from ended
)
delete from leases l using ended where l.webhook_id = ended.webhook_id and l.token = ended.token returning 1
"""


async def mark_queued(database: Database) -> None:
    """Mark every webhook that has something in its queue, so that the next claims visit it.

    Claims rely on the marks that triggers leave; this finds what was copied into the database without them.
    """
    async with database.statement() as connection:
        await connection.execute(_MARK_QUEUED)


_MARK_QUEUED = """
with recursive queued as (
    (select webhook_id from queue order by webhook_id limit 1)
    union all
    select (select q.webhook_id from queue q where q.webhook_id > queued.webhook_id order by q.webhook_id limit 1)
    from queued where queued.webhook_id is not null
)
insert into due_webhooks (webhook_id) select webhook_id from queued where webhook_id is not null
"""


async def settle_and_claim(
    database: Database,
    accepted: Sequence[Settlement],
    limit: int,
    lease: UUID,
    lease_s: float,
    per_webhook: int = 10,
    after: str = "",
    scarce: Scarce | None = None,
    limits: Limits = NO_LIMITS,
) -> tuple[Settled | None, Claim]:
    """`settle` and `claim` in one round trip and one commit, for attempts in the state `delivered` only.

    The slots that these had are free for what is claimed. Without a `Settled` nothing was done: a webhook has failures
    to forget, which is the business of `settle`.
    """
    async with database.statement() as connection:
        written = (*_leased(accepted), *_results(accepted))
        claiming = (limit, lease, lease_s, per_webhook, after, *_restrictions(scarce, limits))
        (told, *rows) = await connection.fetch(_SETTLE_AND_CLAIM, *written, *claiming)
    lost = told["lost"]
    return None if lost is None else Settled(len(accepted) - len(lost)), _claimed(rows, lease, after)


_SETTLE_AND_CLAIM = """
select * from settle_and_claim_due($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18,
    $19, $20, $21, $22, $23, $24, $25, $26, $27, $28)
"""


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
    """Writes finished attempts, their deliveries' new states and the streaks of their webhooks.

    A delivery that was cancelled, parked or withdrawn meanwhile keeps that state unless the attempt succeeded, or was
    the last one of a parked or withdrawn delivery (D14). Nothing counts without its lease.
    """
    if not settlements:
        return Settled(0)
    async with database.transaction() as connection:
        if any(settlement.gone for settlement in settlements):
            await lock_registry(connection)
        streaks, now = await _lock_streaks(connection, settlements)  # before any delivery: the lock order
        lost = await connection.fetchval(_SETTLE, *_leased(settlements), *_results(settlements))
        held = [one for one in settlements if one.delivery.id not in lost] if lost else settlements
        for webhook_id, seconds in sorted(_pauses(held).items()):
            await connection.execute(_PAUSE, webhook_id, seconds)
        changed = await _keep_streaks(connection, streaks, held, now, parking)
        if last := sorted(one.delivery.id for one in held if one.state == "exhausted"):
            await connection.execute(_EXHAUST_WITHDRAWN, last)
        exhausted = [Notice("delivery_exhausted", one.delivery.webhook_id) for one in held if one.state == "exhausted"]
        await record(connection, exhausted)
        for webhook_id in sorted({one.delivery.webhook_id for one in held if one.gone}):
            await disable_webhook(connection, webhook_id, "gone")
    for webhook_id in sorted(one for one, streak in changed.items() if should_disable(streak, now)):
        await _disable_failing(database, webhook_id)
    parked = [Parked(one, new) for one, new in changed.items() if new.parks > streaks[one][0].parks]
    return Settled(len(held), tuple(parked))


async def put_back(database: Database, deliveries: Sequence[Delivery], after_s: float) -> int:
    """Make deliveries due again in `after_s` seconds as if they had not been claimed; how many leases were held.

    No attempt is written or counted. Deliveries that were parked, cancelled or withdrawn meanwhile stay so.
    """
    async with database.transaction() as connection:
        held = await connection.fetchval(
            _END_OWN_LEASES,
            [delivery.webhook_id for delivery in deliveries],
            [delivery.lease for delivery in deliveries],
            [delivery.id for delivery in deliveries],
        )
        # in the order of the ids, as every settle, so that two writers never wait for each other
        await connection.execute("select from deliveries where id = any($1) order by id for update", held)
        await connection.execute(_DUE_AGAIN, held, after_s)
    return len(held)


_END_OWN_LEASES = """
with named as (
    select webhook_id, token, array_agg(id) as ids
    from unnest($1::text[], $2::uuid[], $3::bigint[]) as n (webhook_id, token, id) group by webhook_id, token
), own as materialized (
    select l.webhook_id, l.token, l.delivery_ids, n.ids from named n join leases l using (webhook_id, token)
    order by l.webhook_id, l.token for update of l
), part as materialized (
    select webhook_id, token, array(select id from unnest(delivery_ids) id where id <> all (ids)) as remaining,
        array(select id from unnest(ids) id where id = any (delivery_ids)) as held
    from own
), done as (
    delete from leases l using part
    where l.webhook_id = part.webhook_id and l.token = part.token and part.remaining = '{}'
), kept as (
    update leases l set delivery_ids = part.remaining from part
    where l.webhook_id = part.webhook_id and l.token = part.token and part.remaining <> '{}'
), free as (
    insert into due_webhooks (webhook_id) select distinct webhook_id from part
)
select array(select unnest(held) from part)
"""

_DUE_AGAIN = """
update queue q set due_at = db_now() + make_interval(secs => $2)
from deliveries d where d.id = any($1) and q.webhook_id = d.webhook_id and q.delivery_id = d.id
"""


def _leased(settlements: Iterable[Settlement]) -> tuple[list[str], list[UUID], list[int], list[int]]:
    """Webhooks and tokens of the leases, how many deliveries end each of them, and the deliveries, lease by lease."""
    leases: dict[tuple[str, UUID], list[int]] = {}
    for one in settlements:
        delivery = one.delivery
        leases.setdefault((delivery.webhook_id, delivery.lease), []).append(delivery.id)
    return (
        [webhook_id for webhook_id, _ in leases],
        [token for _, token in leases],
        list(accumulate(map(len, leases.values()))),
        [delivery_id for ids in leases.values() for delivery_id in ids],
    )


def _results(settlements: Iterable[Settlement]) -> Iterator[list[Any] | None]:
    """The columns of what came of the deliveries, by their ids, lest two writers wait in a circle."""
    ordered = sorted(settlements, key=lambda one: one.delivery.id)
    yield [one.delivery.id for one in ordered]
    yield [one.delivery.attempt for one in ordered]
    yield _column([None if one.state == "delivered" else one.state for one in ordered])
    yield _column([one.after_s if one.state == "scheduled" else None for one in ordered])
    yield [one.started_at for one in ordered]
    yield [one.duration_ms for one in ordered]
    yield _column([one.status for one in ordered])
    yield _column([one.error for one in ordered])
    yield [one.excerpt for one in ordered]
    yield _column([one.address for one in ordered])
    yield _column([one.timing.dns_ms for one in ordered])
    yield _column([one.timing.connect_ms for one in ordered])
    yield _column([one.timing.tls_ms for one in ordered])
    yield _column([one.timing.first_byte_ms for one in ordered])


def _column(values: list[Any]) -> list[Any] | None:
    """The values, or None when all are None: encoding a thousand nulls costs as much as a thousand numbers."""
    return None if values.count(None) == len(values) else values


_SETTLE = """
select settle_deliveries(false, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)
"""

# An event that comes back is not attempted more often than the schedule says.
_EXHAUST_WITHDRAWN = """
update deliveries set state = 'exhausted', finished_at = db_now() where id = any($1) and state = 'withdrawn'
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
) -> dict[str, Streak]:
    """Counts failures, forgets them at a success, and records whom to warn of; the streaks that changed."""
    present = {webhook_id: streak for webhook_id, (streak, _) in streaks.items()}
    for settlement in settlements:
        webhook_id = settlement.delivery.webhook_id
        if settlement.state == "delivered":
            present[webhook_id] = Streak()
        else:
            present[webhook_id] = failed(present.get(webhook_id, Streak()), settlement.started_at, now, parking)
    changed = {one: new for one, new in present.items() if one in streaks and new != streaks[one][0]}
    warned = {webhook_id for webhook_id, new in changed.items() if should_warn(new, now)}
    if changed:
        await connection.execute(
            _KEEP,
            list(changed),
            [new.failures for new in changed.values()],
            [new.first_failure_at for new in changed.values()],
            [new.last_failure_at for new in changed.values()],
            [new.parks for new in changed.values()],
            [new.parked_until for new in changed.values()],
            [webhook_id in warned for webhook_id in changed],
        )
        await record(connection, [Notice("webhook_failing", one) for one in sorted(warned) if not streaks[one][1]])
    return changed


_KEEP = """
update webhooks w set failures = n.failures, first_failure_at = n.first_failure_at,
    last_failure_at = n.last_failure_at, parks = n.parks, parked_until = n.parked_until,
    warned_at = case when n.warned then coalesce(w.warned_at, db_now()) end
from unnest($1::text[], $2::integer[], $3::timestamptz[], $4::timestamptz[], $5::integer[], $6::timestamptz[],
    $7::boolean[]) as n (id, failures, first_failure_at, last_failure_at, parks, parked_until, warned)
where w.id = n.id
"""


async def _disable_failing(database: Database, webhook_id: str) -> None:
    """Switches a webhook off whose failures have lasted (D7), unless somebody was quicker or it succeeded meanwhile."""
    async with database.transaction() as connection:
        await lock_registry(connection)
        row = await connection.fetchrow(
            "select *, db_now() as now from webhooks where id = $1 and active for no key update", webhook_id
        )
        if row is not None and should_disable(_streak(row), row["now"]):
            await disable_webhook(connection, webhook_id, "failing")


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


async def counts(database: Database) -> dict[str, int]:
    """Count the deliveries in each state that has any; exact, and without reading those that are delivered."""
    async with database.statement() as connection:
        return await count_by_state(connection)


async def count_by_state(connection: Connection) -> dict[str, int]:
    """`counts` on a connection.

    One statement, so one snapshot: what is neither scheduled nor set apart is delivered. Costs an index entry for each
    delivery that is not delivered.
    """
    rows = await connection.fetch(_COUNTS)
    numbers: dict[str, int] = {row["state"]: row["number"] for row in rows}
    total = numbers.pop("total")
    numbers["delivered"] = max(0, total - sum(numbers.values()))
    return {state: number for state, number in numbers.items() if number}


_COUNTS = """
select 'total' as state, coalesce(sum(difference), 0)::bigint as number from row_totals where counted = 'deliveries'
union all
select 'scheduled', count(*) from queue
union all
select apart, count(*) from deliveries where apart is not null group by apart
"""
