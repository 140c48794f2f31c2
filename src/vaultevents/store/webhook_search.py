"""Search webhooks, deliveries and attempts of all accounts for an operator; the cost of each read is bounded."""

# ruff: noqa: S608 - statements are put together from constants of this module alone

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, get_args

from vaultevents.core.webhooks import Webhook
from vaultevents.store.history import APART, RESENDS_LISTED, AttemptFacts, DeliveryFacts, DeliveryState, attempt_of
from vaultevents.store.pool import Connection, Record
from vaultevents.store.webhooks import UNTIL_ENABLED

WebhookState = Literal["on", "failing", "parked", "paused", "off", "deleted"]
WEBHOOK_STATES: Final[tuple[WebhookState, ...]] = get_args(WebhookState)
DELIVERY_STATES: Final[tuple[DeliveryState, ...]] = get_args(DeliveryState)

PENDING_COUNTED: Final = 1000
LOOKED_AT: Final = 20_000
"""How many deliveries one page looks at for a condition that has no index."""
ATTEMPTS: Final = 1000
"""Of how many of its newest attempts the figures of a webhook are, and how many deliveries of a kind are looked at."""
END: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class WebhookFilter:
    """What is looked for; None: any, but those that are deleted. `text` is a part of the id or the URL."""

    account_id: str | None = None
    state: WebhookState | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class WebhookRow:
    """A webhook, its health, and how many deliveries wait for it, `PENDING_COUNTED` for more.

    `state` is the first that holds: deleted, off, paused (as the receiver or an operator asked), parked (by its
    failures), failing (its last attempt failed), on. `paused_until` is `UNTIL_ENABLED` for a pause without an end.
    """

    webhook: Webhook
    state: WebhookState
    created_at: datetime
    deleted_at: datetime | None
    disabled_reason: str | None
    paused_until: datetime | None
    parked_until: datetime | None
    failures: int
    first_failure_at: datetime | None
    last_failure_at: datetime | None
    parks: int
    pending: int

    @property
    def is_paused_for_good(self) -> bool:
        return self.paused_until == UNTIL_ENABLED


@dataclass(frozen=True, slots=True)
class WebhookPage:
    """Webhooks, newest first. `next_before` is the id with which the next page begins after; None: no others."""

    rows: tuple[WebhookRow, ...]
    next_before: str | None


@dataclass(frozen=True, slots=True)
class SecretFacts:
    """When a secret was created, and until when it signs beside a newer one; None: the newest."""

    created_at: datetime
    valid_until: datetime | None


@dataclass(frozen=True, slots=True)
class RecentAttempts:
    """Figures of the newest attempts of a webhook, `ATTEMPTS` at most; durations in ms, None without any."""

    attempts: int
    accepted: int
    p50_ms: int | None
    p95_ms: int | None
    since: datetime | None
    last_success_at: datetime | None

    @property
    def success_rate(self) -> float | None:
        """The share that was accepted; None without an attempt."""
        return self.accepted / self.attempts if self.attempts else None


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that was not accepted, with its event."""

    event_id: str
    attempt: AttemptFacts


@dataclass(frozen=True, slots=True)
class DeliveryFilter:
    """What is looked for; None: any."""

    account_id: str | None = None
    webhook_id: str | None = None
    state: DeliveryState | None = None


@dataclass(frozen=True, slots=True)
class DeliveryRow(DeliveryFacts):
    """One delivery with its account, webhook and event."""

    account_id: str
    webhook_id: str
    event_seq: int


@dataclass(frozen=True, slots=True)
class DeliveryPage:
    """Deliveries, newest first; `next_before` and `scanned` as in `event_search.EventPage`."""

    rows: tuple[DeliveryRow, ...]
    next_before: int | None
    scanned: int | None = None


async def search(
    connection: Connection, wanted: WebhookFilter, before: str | None = None, limit: int = 50
) -> WebhookPage:
    """Return the newest matching webhooks, or those after the page that ended at the webhook `before`."""
    rows = await connection.fetch(
        _SEARCH, wanted.account_id, wanted.state, wanted.text, before, limit + 1, PENDING_COUNTED
    )
    more = rows[limit - 1]["id"] if len(rows) > limit else None
    return WebhookPage(tuple(map(_webhook_row, rows[:limit])), more)


async def webhook(connection: Connection, webhook_id: str) -> WebhookRow | None:
    """Return one webhook of any account, also a deleted one."""
    row = await connection.fetchrow(_ONE, webhook_id, PENDING_COUNTED)
    return None if row is None else _webhook_row(row)


async def count_states(connection: Connection) -> list[tuple[WebhookState, int]]:
    """Count the webhooks of each state that has any, deleted ones left out, those in trouble first."""
    rows = await connection.fetch(f"select {_STATE} as state, count(*) as number from webhooks w group by 1")
    numbers = {row["state"]: row["number"] for row in rows}
    order: tuple[WebhookState, ...] = ("failing", "parked", "off", "paused", "on")
    return [(state, numbers[state]) for state in order if state in numbers]


async def secrets_of(connection: Connection, webhook_id: str) -> list[SecretFacts]:
    """Return what is known of the secrets of a webhook without opening them, newest first."""
    rows = await connection.fetch(
        "select created_at, valid_until from webhook_secrets where webhook_id = $1 order by created_at desc", webhook_id
    )
    return [SecretFacts(**row) for row in rows]


def _webhook_row(row: Record) -> WebhookRow:
    types, vaults = (None if row[name] is None else tuple(row[name]) for name in ("event_types", "vault_ids"))
    return WebhookRow(
        Webhook(row["id"], row["account_id"], row["url"], types, vaults, row["active"]),
        row["state"],
        row["created_at"],
        row["deleted_at"],
        row["disabled_reason"],
        row["paused_until"],
        row["parked_until"],
        row["failures"],
        row["first_failure_at"],
        row["last_failure_at"],
        row["parks"],
        row["pending"],
    )


_STATE: Final = """
case when w.deleted_at is not null then 'deleted' when not w.active then 'off'
    when w.paused_until > db_now() then 'paused' when w.parked_until > db_now() then 'parked'
    when w.failures > 0 then 'failing' else 'on' end
"""

_PENDING: Final = """
(select count(*) from (select from queue q where q.webhook_id = w.id and q.delivery_id is not null
    order by q.delivery_id limit {limit}) waiting)
    + (select count(*) from (select from deliveries d where d.webhook_id = w.id and d.apart = 'parked'
    order by d.id limit {limit}) waiting)
"""

# The table of webhooks is small; what waits is counted for those of the page alone.
_SEARCH = f"""
with found as materialized (
    select w.*, {_STATE} as state from webhooks w
    where ($1::text is null or w.account_id = $1)
        and (case when $2::text is null then w.deleted_at is null else {_STATE} = $2 end)
        and ($3::text is null or position($3 in w.id) > 0 or position(lower($3) in lower(w.url)) > 0)
        and ($4::text is null or (w.created_at, w.id) < (select b.created_at, b.id from webhooks b where b.id = $4))
    order by w.created_at desc, w.id desc limit $5
)
select w.*, least($6::bigint, {_PENDING.format(limit="$6")}) as pending
from found w order by w.created_at desc, w.id desc
"""

_ONE = f"""
select w.*, {_STATE} as state, least($2::bigint, {_PENDING.format(limit="$2")}) as pending
from webhooks w where w.id = $1
"""


async def delivery_counts(connection: Connection, webhook_id: str) -> dict[DeliveryState, int]:
    """Count the deliveries of a webhook in each state but `delivered`, `PENDING_COUNTED` for more."""
    rows = await connection.fetch(_COUNTS, webhook_id, list(APART), PENDING_COUNTED)
    return {row["state"]: row["number"] for row in rows}


_COUNTS = """
select 'scheduled' as state, (select count(*) from (select from queue q where q.webhook_id = $1
    and q.delivery_id is not null order by q.delivery_id limit $3) few) as number
union all
select s.state, (select count(*) from (select from deliveries d where d.webhook_id = $1 and d.apart = s.state
    order by d.id limit $3) few) as number
from unnest($2::text[]) s (state)
"""


async def recent_attempts(connection: Connection, webhook_id: str) -> RecentAttempts:
    """Return how the newest attempts of a webhook went; the cost does not grow with its deliveries."""
    row = await connection.fetchrow(_RECENT, webhook_id, ATTEMPTS)
    return RecentAttempts(**row)


async def last_failures(connection: Connection, webhook_id: str, limit: int = 20) -> list[FailedAttempt]:
    """Return the newest attempts that were not accepted, newest first."""
    rows = await connection.fetch(_FAILURES, webhook_id, ATTEMPTS, list(APART), limit)
    return [FailedAttempt(row["event_id"], attempt_of(row)) for row in rows]


# Each part reads `$2` rows at most. What is pending may hide all that was attempted, so what lies before the oldest of
# it is read, too, and the retries that are due last.
_CHOSEN: Final = """
with oldest as (
    select least(
        (select q.delivery_id from queue q where q.webhook_id = $1 and q.delivery_id is not null
            order by q.delivery_id limit 1),
        (select d.id from deliveries d where d.webhook_id = $1 and d.apart = 'parked' order by d.id limit 1)
    ) as id
), chosen as (
    (select q.delivery_id as id from queue q where q.webhook_id = $1 and q.turn = 1 order by q.due_at desc limit $2)
    union
    (select d.id from deliveries d where d.webhook_id = $1 order by d.id desc limit $2)
    union
    (select d.id from deliveries d where d.webhook_id = $1 and d.id < (select id from oldest)
        order by d.id desc limit $2)
"""

# Deliveries that were set apart are left out: they are older, and all of them failed.
_RECENT = f"""
{_CHOSEN}
), tried as (
    select a.started_at, a.duration_ms, coalesce(a.status between 200 and 299, false) as accepted
    from chosen cross join lateral (select * from attempts a where a.delivery_id = chosen.id offset 0) a
    order by a.started_at desc limit $2
)
select count(*)::integer as attempts, (count(*) filter (where accepted))::integer as accepted,
    (percentile_disc(0.5) within group (order by duration_ms))::integer as p50_ms,
    (percentile_disc(0.95) within group (order by duration_ms))::integer as p95_ms,
    min(started_at) as since, max(started_at) filter (where accepted) as last_success_at
from tried
"""

_FAILURES = f"""
{_CHOSEN}
    union
    select apart.id from unnest($3::text[]) as s (state) cross join lateral (
        (select d.id from deliveries d where d.webhook_id = $1 and d.apart = s.state order by d.id desc limit $2)
        union all
        (select d.id from deliveries d where d.webhook_id = $1 and d.apart = s.state order by d.id limit $2)
    ) apart
), failed as (
    select a.* from chosen cross join lateral (select * from attempts a where a.delivery_id = chosen.id offset 0) a
    where coalesce(a.status not between 200 and 299, true) order by a.started_at desc limit $4
)
select e.id as event_id, a.number, a.started_at, a.duration_ms, a.status, a.error, a.excerpt, a.address,
    false as resend, a.dns_ms, a.connect_ms, a.tls_ms, a.first_byte_ms
from failed a cross join lateral (
    select e.id from deliveries d join events e on e.seq = d.event_seq where d.id = a.delivery_id offset 0
) e order by a.started_at desc
"""


async def deliveries(
    connection: Connection, wanted: DeliveryFilter, before: int | None = None, limit: int = 50
) -> DeliveryPage:
    """Return the newest matching deliveries, or those after the page that ended at the delivery `before`."""
    end = END if before is None else before
    text = _FOUND_ROWS.format(found=_found(wanted))
    rows = await connection.fetch(text, wanted.account_id, wanted.webhook_id, end, limit + 1)
    found = tuple(DeliveryRow(**row) for row in rows[:limit])
    if len(rows) > limit:
        return DeliveryPage(found, found[-1].id)
    if wanted.state != "delivered":
        return DeliveryPage(found, None)
    seen = await connection.fetchrow(_SEEN.format(of=_of(wanted, "$1")), wanted.webhook_id, end, LOOKED_AT)
    more = seen["number"] >= LOOKED_AT
    return DeliveryPage(found, seen["last"] if more else None, seen["number"] if more else None)


async def deliveries_of(
    connection: Connection, event_seq: int, after_webhook: str = "", limit: int = 50
) -> list[DeliveryRow]:
    """Return the deliveries of one event by the ids of their webhooks, those after `after_webhook`."""
    rows = await connection.fetch(_OF_EVENT, event_seq, after_webhook, limit)
    return [DeliveryRow(**row) for row in rows]


async def delivery(connection: Connection, delivery_id: int) -> DeliveryRow | None:
    """Return one delivery by its number."""
    row = await connection.fetchrow(_BY_NUMBER, delivery_id)
    return None if row is None else DeliveryRow(**row)


async def attempts_of(connection: Connection, found: Sequence[DeliveryRow]) -> Mapping[int, list[AttemptFacts]]:
    """Return the attempts of deliveries by their numbers, oldest first, resends (`RESENDS_LISTED` each) among them."""
    columns = zip(*((row.id, row.webhook_id, row.event_seq) for row in found), strict=True)
    listed: defaultdict[int, list[AttemptFacts]] = defaultdict(list)
    if found:
        for row in await connection.fetch(_ATTEMPTS, *map(list, columns), RESENDS_LISTED):
            listed[row["delivery_id"]].append(attempt_of(row))
    return listed


def _of(wanted: DeliveryFilter, parameter: str) -> str:
    """The condition on the webhook, where one is named."""
    return "" if wanted.webhook_id is None else f"webhook_id = {parameter} and"


def _found(wanted: DeliveryFilter) -> str:
    """The statement that finds the ids of a page, each along an index of its own."""
    state = wanted.state
    if state == "delivered":
        return _WINDOW.format(of=_of(wanted, "$2"), looked_at=LOOKED_AT)
    if wanted.webhook_id is not None:
        return _OF_WEBHOOK[state].format(webhook="$2")
    if state is None and wanted.account_id is None:
        return _NEWEST
    return _OF_EACH.format(of_webhook=_OF_WEBHOOK[state].format(webhook="w.id"))


_OF_WEBHOOK: Final[Mapping[DeliveryState | None, str]] = {
    None: "select d.id from deliveries d where d.webhook_id = {webhook} and d.id < $3 order by d.id desc limit $4",
    "scheduled": "select q.delivery_id as id from queue q where q.webhook_id = {webhook} and q.delivery_id < $3"
    " order by q.delivery_id desc limit $4",
    **{
        state: f"select d.id from deliveries d where d.webhook_id = {{webhook}} and d.apart = '{state}' and d.id < $3"
        " order by d.id desc limit $4"
        for state in APART
    },
}

_OF_EACH: Final = """
select found.id from webhooks w cross join lateral ({of_webhook}) found
where $1::text is null or w.account_id = $1 order by found.id desc limit $4
"""

_NEWEST: Final = "select d.id from deliveries d where d.id < $3 order by d.id desc limit $4"

_WINDOW: Final = """
select d.id from (
    select id, webhook_id, state from deliveries where {of} id < $3 order by id desc limit {looked_at}
) d join webhooks w on w.id = d.webhook_id
where d.state = 'delivered' and ($1::text is null or w.account_id = $1) order by d.id desc limit $4
"""

_SEEN: Final = """
select count(*) as number, min(id) as last
from (select id from deliveries where {of} id < $2 order by id desc limit $3) seen
where $1::text is null or true  -- the parameter needs a type also where no webhook is named
"""

# A lease that ended belongs to a process that died: the delivery is due, and no attempt is under way.
_FACTS: Final = """
select d.id, w.account_id, d.webhook_id, d.event_seq, e.id as event_id, e.event_type, d.state, now.in_flight,
    d.attempts, d.created_at,
    case when d.state = 'scheduled' and w.active and not now.in_flight then q.due_at end as next_attempt_at,
    d.finished_at, d.recovered
from {found} join webhooks w on w.id = d.webhook_id
    cross join lateral (select id, event_type from events where seq = d.event_seq offset 0) e
    left join lateral (
        select due_at from queue where webhook_id = d.webhook_id and delivery_id = d.id offset 0
    ) q on true
    cross join lateral (
        select d.state = 'scheduled' and exists (select from leases l
            where l.webhook_id = d.webhook_id and l.until > db_now() and d.id = any (l.delivery_ids)) as in_flight
    ) now
"""

_FOUND_ROWS: Final = (
    "with found as materialized ({found}) "
    + _FACTS.format(
        found="found cross join lateral (select * from deliveries where deliveries.id = found.id offset 0) d"
    )
    + "where ($1::text is null or w.account_id = $1) and ($2::text is null or w.id = $2) order by d.id desc"
)

_OF_EVENT: Final = (
    _FACTS.format(
        found="(select * from deliveries where event_seq = $1 and webhook_id > $2 order by webhook_id limit $3) d"
    )
    + "order by d.webhook_id"
)

_BY_NUMBER: Final = _FACTS.format(found="deliveries d") + "where d.id = $1"

_ATTEMPTS: Final = """
select * from (
    select a.delivery_id, a.number, a.started_at, a.duration_ms, a.status, a.error, a.excerpt, a.address,
        false as resend, a.dns_ms, a.connect_ms, a.tls_ms, a.first_byte_ms
    from attempts a where a.delivery_id = any ($1::bigint[])
    union all
    select d.id, null, r.started_at, r.duration_ms, r.status, r.error, r.excerpt, r.address, true,
        r.dns_ms, r.connect_ms, r.tls_ms, r.first_byte_ms
    from unnest($1::bigint[], $2::text[], $3::bigint[]) d (id, webhook_id, event_seq) cross join lateral (
        select * from resends where webhook_id = d.webhook_id and event_seq = d.event_seq and finished_at is not null
        order by id desc limit $4
    ) r
) sent order by started_at, number
"""
