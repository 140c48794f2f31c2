"""What accounts ask to be sent beside the schedule (rule D11): resends, recoveries and tests.

A resend is inert: one attempt with the present secret, never retried, allowed while its webhook is off or parked, and
it counts towards no health. It waits only for a pause that a receiver asked for (rule D6). A claim holds a lease; a
lease that ended is claimed again, so a crash repeats at most what was in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from vaultevents.core.actor import acting
from vaultevents.core.events import encode_test
from vaultevents.core.webhooks import Webhook
from vaultevents.store.accounts import vaults_of
from vaultevents.store.audit_log import record
from vaultevents.store.deliveries import (
    Claim,
    ClaimRequest,
    Delivery,
    Settlement,
    as_rows,
    claimed,
    pause,
)
from vaultevents.store.leases import end_own_leases
from vaultevents.store.pool import DELIVERIES_CHANNEL, Connection, Database

RESENDS_CHANNEL: Final = "vaultevents_resends"
NO_VAULT: Final = "none"
"""The vault of a test, where an account has none: it reads like an id all the same."""
LOOKED_AT: Final = 100_000
"""How many events one request to recover looks at."""

_NOTIFY = "select pg_notify($1, '')"


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The block of the event is no longer on the chain: it is sent to nobody."""


async def request_resend(
    connection: Connection, account_id: str, webhook_id: str, event_id: str
) -> datetime | Orphaned | None:
    """Asks for one more attempt of a delivery, whatever its state; when that was, or None where there is none."""
    row = await connection.fetchrow(_RESEND, account_id, webhook_id, event_id)
    if row is None or row["orphaned"]:
        return None if row is None else Orphaned()
    await connection.execute(_NOTIFY, RESENDS_CHANNEL)
    asked_at: datetime = row["requested_at"]
    await record(connection, acting(), "webhook.resend", f"{webhook_id} {event_id}", account_id=account_id)
    return asked_at


_RESEND = """
with found as (
    select w.id as webhook_id, e.seq, e.id as event_id, e.orphaned_at is not null as orphaned
    from webhooks w join events e on e.account_id = w.account_id
        join deliveries d on d.event_seq = e.seq and d.webhook_id = w.id
    where w.account_id = $1 and w.id = $2 and w.deleted_at is null and e.id = $3
), asked as (
    insert into resends (webhook_id, event_seq, event_id)
    select webhook_id, seq, event_id from found where not orphaned
    returning id, webhook_id, event_seq, requested_at
), queued as (
    insert into queue (webhook_id, resend_id, event_seq, due_at)
    select webhook_id, id, event_seq, requested_at from asked
)
select orphaned, (select requested_at from asked) as requested_at from found
"""


async def request_test(connection: Connection, account_id: str, webhook_id: str, event_id: str, body: bytes) -> None:
    """Asks for one attempt with a body that is no event."""
    done = await connection.execute(_TEST, account_id, webhook_id, event_id, body)
    if done == "INSERT 0 0":
        return
    await connection.execute(_NOTIFY, RESENDS_CHANNEL)
    await record(connection, acting(), "webhook.test", f"{webhook_id} {event_id}", account_id=account_id)


async def request_new_test(connection: Connection, webhook: Webhook, token: str, now_ms: int) -> str:
    """Ask for one attempt with a test that is made for the webhook; return its id, which ends in `token`."""
    known = webhook.vault_ids or [vault.id for vault in await vaults_of(connection, webhook.account_id)]
    event_id, body = encode_test(webhook.account_id, next(iter(known), NO_VAULT), webhook.id, token, now_ms)
    await request_test(connection, webhook.account_id, webhook.id, event_id, body)
    return event_id


@dataclass(frozen=True, slots=True)
class TestResult:
    """What came of a test that was attempted: a status, or the error that prevented one."""

    __test__ = False

    status: int | None
    error: str | None
    duration_ms: int
    excerpt: str

    @property
    def accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


async def test_result(connection: Connection, webhook_id: str, event_id: str) -> TestResult | None:
    """Return what came of a test; None while it waits."""
    row = await connection.fetchrow(_TEST_RESULT, webhook_id, event_id)
    return None if row is None else TestResult(**row)


_TEST_RESULT = """
select status, error, duration_ms, excerpt from resends
where webhook_id = $1 and event_seq is null and event_id = $2 and finished_at is not null
"""


_TEST = """
with asked as (
    insert into resends (webhook_id, event_id, body)
    select w.id, $3, $4 from webhooks w where w.account_id = $1 and w.id = $2 and w.deleted_at is null
    returning id, webhook_id, requested_at
)
insert into queue (webhook_id, resend_id, due_at) select webhook_id, id, requested_at from asked
"""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How many attempts were asked for. `next_since_ms`: where to go on; None when the range is done."""

    count: int
    next_since_ms: int | None


async def request_recovery(
    connection: Connection,
    account_id: str,
    webhook_id: str,
    since_ms: int,
    until_ms: int | None,
    looked_at: int = LOOKED_AT,
) -> Recovery:
    """Asks for every event created in [since, until) that matches the webhook's present filter and is neither
    delivered nor pending (rule D11), oldest first; at most `looked_at` events, and those as old as the last.

    A pause that the receiver asked for ends. What it held back counts: what is due is sent, and what waits for its next
    attempt is asked for.
    """
    row = await connection.fetchrow(_RECOVER, account_id, webhook_id, since_ms, until_ms, looked_at)
    if row["count"]:
        await connection.execute(_NOTIFY, RESENDS_CHANNEL)
    if row["resumed"]:
        await connection.execute(_NOTIFY, DELIVERIES_CHANNEL)
    if row["count"] or row["resumed"]:
        asked = {"since_ms": since_ms, "until_ms": until_ms, "last_ms": row["last_ms"], "count": row["count"]}
        await record(connection, acting(), "webhook.recover", webhook_id, account_id=account_id, after=asked)
    return Recovery(row["count"], row["last_ms"] + 1 if row["looked_at"] >= looked_at else None)


_RECOVER = """
with resumed as (
    update webhooks set paused_until = null
    where account_id = $1 and id = $2 and deleted_at is null and paused_until > db_now()
    returning id
), looked_at as materialized (
    select e.seq, e.id, e.event_type, e.vault_id, e.created_at_ms from events e
    where e.account_id = $1 and e.created_at_ms >= $3 and ($4::bigint is null or e.created_at_ms < $4)
        and e.orphaned_at is null
    order by e.created_at_ms fetch first ($5::integer) rows with ties
), held_back as materialized (  -- none is in flight: the webhook was paused, and what waits for its time is not due
    select q.event_seq, q.turn = 1 and q.due_at > db_now() as waits
    from resumed join queue q on q.webhook_id = resumed.id join looked_at e on e.seq = q.event_seq
    where q.delivery_id is not null
        and not exists (select from leases l where l.webhook_id = q.webhook_id and q.delivery_id = any (l.delivery_ids))
), asked as (
    insert into resends (webhook_id, event_seq, event_id)
    select w.id, e.seq, e.id from webhooks w cross join looked_at e
    where w.account_id = $1 and w.id = $2 and w.deleted_at is null
        and (w.event_types is null or e.event_type = any(w.event_types))
        and (w.vault_ids is null or e.vault_id = any(w.vault_ids))
        and (e.seq in (select event_seq from held_back where waits)
            or not exists (select from deliveries d where d.event_seq = e.seq and d.webhook_id = w.id
                and d.state in ('scheduled', 'parked', 'delivered')))
        and not exists (select from pruned p where p.webhook_id = w.id and p.chunk = e.seq >> 10
            and p.events @> e.seq)
        and not exists (select from resends r where r.webhook_id = w.id and r.event_seq = e.seq
            and r.finished_at is null)
    order by e.created_at_ms, e.seq
    returning id, webhook_id, event_seq, requested_at
), queued as (
    insert into queue (webhook_id, resend_id, event_seq, due_at)
    select webhook_id, id, event_seq, requested_at from asked
)
select ((select count(*) from asked) + (select count(*) from held_back where not waits))::integer as count,
    exists (select from resumed) as resumed, count(*)::integer as looked_at, max(created_at_ms) as last_ms
from looked_at
"""


async def claim_resends(database: Database, request: ClaimRequest) -> Claim:
    """Lease up to `limit` requests to the caller: accounts take turns, and in each its webhooks, oldest requests first.

    No webhook has more than `per_webhook` of them in flight, no account takes more than half of what it lacks to
    `free`, in all processes together. A webhook that is paused has to wait.
    """
    async with database.transaction() as connection:
        # claims take turns, lest two count the same free slots: the lock comes before the statement that counts
        await connection.execute(
            "select pg_advisory_xact_lock(hashtext('vaultevents resend'), hashtext(current_schema()))"
        )
        rows = await connection.fetch(
            _CLAIM, request.limit, request.lease, request.lease_s, request.per_webhook, request.free
        )
    return claimed(rows, request)


# Only webhooks for which something waits are looked at: `waiting` leaps from one to the next in the index.
_CLAIM = """
with recursive waiting as (
    (select webhook_id from queue where resend_id is not null order by webhook_id limit 1)
    union all
    select (select q.webhook_id from queue q where q.resend_id is not null and q.webhook_id > waiting.webhook_id
        order by q.webhook_id limit 1)
    from waiting where waiting.webhook_id is not null
), flying as materialized (
    select w.id, w.account_id, flight.resend_ids, cardinality(flight.resend_ids) as number,
        w.deleted_at is null and (w.paused_until is null or w.paused_until <= db_now()) as open
    from waiting join webhooks w on w.id = waiting.webhook_id cross join lateral (
        select coalesce(array_agg(leased.id), '{}') as resend_ids
        from leases l cross join unnest(l.resend_ids) as leased (id) where l.webhook_id = w.id
    ) flight
), accounts_open as materialized (
    select account_id, ceil(($5 - sum(number)) / 2) as free from flying group by account_id having sum(number) < $5
), due as materialized (
    select found.id, found.due_at, f.account_id, a.free,
        row_number() over (partition by f.id order by found.due_at, found.id) as place
    from flying f join accounts_open a using (account_id) cross join lateral (
        select r.id, q.due_at from queue q join resends r on r.id = q.resend_id
        where q.webhook_id = f.id and q.turn = 2 and q.due_at <= db_now() and q.resend_id <> all (f.resend_ids)
            and not exists (select from events e where e.seq = q.event_seq and e.orphaned_at is not null)
        order by q.due_at, q.resend_id limit least(greatest($4 - f.number, 0), a.free) for update of r skip locked
    ) found where f.open
), shared as (
    select id, due_at, free, row_number() over (partition by account_id order by place, due_at, id) as place from due
), taken as (
    update resends r set lease = $2
    from (select id from shared where place <= free order by place, due_at, id limit $1) chosen where r.id = chosen.id
    returning r.id, r.webhook_id, r.event_seq, r.event_id, r.body
), leased as (
    insert into leases (webhook_id, token, until, delivery_ids, resend_ids)
    select webhook_id, $2, db_now() + make_interval(secs => $3), '{}', array_agg(id) from taken group by webhook_id
)
select t.id, coalesce(d.attempts, 0) as attempts, t.event_id, coalesce(t.body, e.body) as body, t.webhook_id,
    w.account_id, w.url,
    array(select s.key_id from webhook_secrets s where s.webhook_id = w.id
        and (s.valid_until is null or s.valid_until > db_now()) order by s.created_at desc) as key_ids,
    array(select s.sealed from webhook_secrets s where s.webhook_id = w.id
        and (s.valid_until is null or s.valid_until > db_now()) order by s.created_at desc) as sealed,
    db_now() as claimed_at, null::bigint[] as lost
from taken t join webhooks w on w.id = t.webhook_id left join events e on e.seq = t.event_seq
    left join deliveries d on d.event_seq = t.event_seq and d.webhook_id = t.webhook_id
where t.body is not null or e.body is not null order by t.id
"""


async def settle_resends(database: Database, settlements: Sequence[Settlement]) -> int:
    """Write what came of the attempts whose lease is still held; return how many those are.

    A 2xx makes the delivery `delivered`, anything else leaves its state. An event without a delivery gets one, marked
    as recovered: `delivered` or `exhausted` (rule D11), unless it had one that was pruned meanwhile.
    """
    async with database.transaction() as connection:
        # first, as all that parks, resumes or schedules anew: none of them works on the same deliveries then
        await connection.execute(
            "select from webhooks where id = any($1) order by id for no key update",
            sorted({settled.delivery.webhook_id for settled in settlements if settled.accepted or settled.park_s}),
        )
        await connection.execute(_LOCK_RESENDS, sorted(settled.delivery.id for settled in settlements))
        held = await end_own_leases(connection, [settled.delivery for settled in settlements], "resend_ids")
        finished = [settled for settled in settlements if settled.delivery.id in held]
        rows = await connection.fetch(_SETTLE, as_rows(finished))
        await pause(connection, finished)
        of_events = [row for row in rows if row["event_seq"] is not None]
        accepted = {(row["event_seq"], row["webhook_id"]) for row in of_events if row["accepted"]}
        deliveries = sorted({(row["event_seq"], row["webhook_id"]) for row in of_events})
        await connection.execute(_LOCK, *_columns(deliveries))
        await connection.execute(_OUTCOME, *_columns(deliveries), [delivery in accepted for delivery in deliveries])
        await _leave_queue(connection, accepted)
    return len(held)


async def put_back_resends(database: Database, resends: Sequence[Delivery], after_s: float) -> None:
    """Make requests due again in `after_s` seconds as if they had not been claimed, where the lease is still held."""
    async with database.transaction() as connection:
        await connection.execute(_LOCK_RESENDS, sorted(resend.id for resend in resends))
        held = await end_own_leases(connection, resends, "resend_ids")
        await connection.execute(_PUT_BACK, held, after_s)


_LOCK_RESENDS = "select from resends where id = any($1) order by id for update"

_PUT_BACK = """
with freed as (update resends set lease = null where id = any($1) returning id, webhook_id)
update queue q set due_at = db_now() + make_interval(secs => $2)
from freed where q.webhook_id = freed.webhook_id and q.resend_id = freed.id
"""

_SETTLE = """
with settled as (
    update resends r set lease = null, finished_at = db_now(), started_at = s.started_at, duration_ms = s.duration_ms,
        status = s.status, error = s.error, excerpt = s.excerpt, address = s.address, dns_ms = s.dns_ms,
        connect_ms = s.connect_ms, tls_ms = s.tls_ms, first_byte_ms = s.first_byte_ms
    from unnest($1::settlement[]) s where r.id = s.id and r.finished_at is null
    returning r.id, r.webhook_id, r.event_seq, coalesce(r.status between 200 and 299, false) as accepted
), ended as (
    delete from queue q using settled s where q.webhook_id = s.webhook_id and q.resend_id = s.id
)
select id, webhook_id, event_seq, accepted from settled
"""

# In the order of the ids, as every settle: so they never wait in a circle. What is pruned just now is waited for, and
# the statements after this one see that it was.
_LOCK = """
select from unnest($1::bigint[], $2::text[]) a (event_seq, webhook_id) join deliveries d using (event_seq, webhook_id)
order by d.id for update of d
"""

_OUTCOME = """
insert into deliveries as d (event_seq, webhook_id, state, finished_at, recovered)
select event_seq, webhook_id, case when accepted then 'delivered' else 'exhausted' end, db_now(), true
from unnest($1::bigint[], $2::text[], $3::boolean[]) a (event_seq, webhook_id, accepted)
where not exists (select from pruned p where p.webhook_id = a.webhook_id and p.chunk = a.event_seq >> 10
    and p.events @> a.event_seq)
on conflict (event_seq, webhook_id) do update set state = excluded.state, finished_at = excluded.finished_at
where excluded.state = 'delivered' and d.state <> 'delivered'
"""


async def _leave_queue(connection: Connection, accepted: Collection[tuple[int, str]]) -> None:
    """Takes deliveries out of the queue. One in flight keeps its lease until it is settled, so its result is kept."""
    await connection.execute(
        "delete from queue q using unnest($1::bigint[], $2::text[]) a (event_seq, webhook_id)"
        " join deliveries d using (event_seq, webhook_id)"
        " where q.webhook_id = d.webhook_id and q.delivery_id = d.id",
        *_columns(accepted),
    )


def _columns(deliveries: Collection[tuple[int, str]]) -> tuple[list[int], list[str]]:
    ordered = sorted(deliveries)
    return [event_seq for event_seq, _ in ordered], [webhook_id for _, webhook_id in ordered]
