"""The proof that the deliveries add up (rule P9): what matched has one row, nothing else has one (rules D9 and D14)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from vaultevents.store.accounts import require_account
from vaultevents.store.pool import Connection
from vaultevents.store.sessions import allow

SHOWN_BREACHES = 20
ROWS_AT_ONCE = 2_000
PROOF_WITHIN_S = 86_400.0  # the server sorts first, and answers nothing until then


@dataclass(frozen=True, slots=True)
class Breach:
    """One rule that one event × webhook breaks. None for what the database does not know."""

    account_id: str | None
    event_id: str | None
    webhook_id: str
    problem: str


@dataclass(frozen=True, slots=True)
class AccountLedger:
    """An account's deliveries by state.

    `digest` is the SHA-256, in hex, over a line `event_id webhook_id state` with a line feed for each delivery, sorted
    by the bytes of event id, then webhook id. The same deliveries have the same digest in every database.
    """

    account_id: str
    states: dict[str, int]
    digest: str


@dataclass(frozen=True, slots=True)
class Audit:
    """`breaches` are the first ones, `broken` is how many there are; the accounts are sorted by id.

    `states` and the ledgers of the accounts count pruned deliveries as what they were; `pruned` is how many those are.
    """

    states: dict[str, int]
    pruned: int
    broken: int
    breaches: tuple[Breach, ...]
    accounts: tuple[AccountLedger, ...]


async def audit(
    connection: Connection,
    account_id: str | None = None,
    progress: Callable[[int, int], None] = lambda _read, _expected: None,
) -> Audit:
    """Proves the deliveries of all accounts, or of one, by one query on one snapshot; memory does not grow with them.

    `progress` is called with the rows read and about how many there are, at first with none read. Must run in a
    transaction. Raises `InputError` for an account that is not known.
    """
    if account_id is not None:
        await require_account(connection, account_id)
    await allow(connection, PROOF_WITHIN_S)
    accounts = await connection.fetch("select id from accounts where id = $1 or $1::text is null", account_id)
    expected = await connection.fetchval(_COUNT, account_id, timeout=PROOF_WITHIN_S)
    owners = {row["id"]: _Running() for row in accounts}
    total: Counter[str] = Counter()
    breaches: list[Breach] = []
    broken = read = pruned = 0
    rows = connection.cursor(_PROOF, account_id, prefetch=ROWS_AT_ONCE, timeout=PROOF_WITHIN_S)
    progress(0, expected)
    async for owner, event_id, webhook_id, state, is_pruned, problems in rows:
        read += 1
        pruned += is_pruned
        if state is not None:
            total[state] += 1
        if state is not None and event_id is not None:
            owners.setdefault(owner, _Running()).add(event_id, webhook_id, state)
        broken += len(problems)
        room = SHOWN_BREACHES - len(breaches)
        breaches.extend(Breach(owner, event_id, webhook_id, problem) for problem in problems[:room])
        if read % ROWS_AT_ONCE == 0:
            progress(read, max(read, expected))
    ledgers = (AccountLedger(one, dict(running.states), running.digest) for one, running in sorted(owners.items()))
    return Audit(dict(total), pruned, broken, tuple(breaches), tuple(ledgers))


class _Running:
    """What is known of an account's deliveries so far."""

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self._lines = hashlib.sha256()

    def add(self, event_id: str, webhook_id: str, state: str) -> None:
        self.states[state] += 1
        self._lines.update(f"{event_id} {webhook_id} {state}\n".encode())

    @property
    def digest(self) -> str:
        return self._lines.hexdigest()


_COUNT = """
select (select count(*) from deliveries d where $1::text is null
        or exists (select from events e where e.seq = d.event_seq and e.account_id = $1))
    + (select coalesce(sum(upper(span) - lower(span)), 0)::bigint from pruned p, unnest(p.events) span
        where $1::text is null or exists (select from webhooks w where w.id = p.webhook_id and w.account_id = $1))
"""

# What was due follows from the history of the filters alone: each revision of a webhook's filter holds until its next
# one. What was not due may be delivered by `recover`; its row says so (rule D11). Nothing relies on a constraint: a
# restored copy may have lost it: so the outer joins, and `place` for a second row of the same event and webhook. One
# sort serves `place` and the order of the answer, and it is by bytes whatever the locale of the database. A pruned
# delivery is a row like the others, but for what only its attempts could prove. Pending deliveries follow the flags of
# their webhook in batches: until they do, it has a row in `flag_changes`.
_PROOF = """
with filters as (
    select r.*, lead(revision) over (partition by webhook_id order by revision) as next_revision
    from webhook_revisions r
), due as (
    select e.seq as event_seq, f.webhook_id, true as is_due
    from events e join filters f on f.account_id = e.account_id
        and f.revision <= e.filter_revision and (f.next_revision is null or e.filter_revision < f.next_revision)
    where f.active and not e.suppressed and ($1::text is null or e.account_id = $1)
        and (f.event_types is null or e.event_type = any(f.event_types))
        and (f.vault_ids is null or e.vault_id = any(f.vault_ids))
), stored as (
    select d.*, coalesce(e.account_id, w.account_id) as account_id
    from deliveries d left join events e on e.seq = d.event_seq left join webhooks w on w.id = d.webhook_id
    where $1::text is null or coalesce(e.account_id, w.account_id) = $1
), gone as (
    select event_seq, p.webhook_id, p.state, p.recovered
    from pruned p, unnest(p.events) span, generate_series(lower(span), upper(span) - 1) event_seq
    where $1::text is null or exists (select from webhooks w where w.id = p.webhook_id and w.account_id = $1)
), posts as (
    select delivery_id, count(*) as posted, min(number) as lowest, max(number) as highest,
        count(*) filter (where status between 200 and 299) as accepted,
        bool_or((status is null) = (error is null)) as unclear
    from attempts group by delivery_id
), sent as (
    select r.event_seq, r.webhook_id, count(*) as resent,
        count(*) filter (where r.status between 200 and 299) as booked,
        bool_or((r.status is null) = (r.error is null)) as vague
    from resends r where r.event_seq is not null and r.finished_at is not null
        and ($1::text is null or exists (select from events e where e.seq = r.event_seq and e.account_id = $1))
    group by r.event_seq, r.webhook_id
), forgotten as (
    select r.event_seq, r.webhook_id, count(*) as unqueued
    from resends r where r.finished_at is null and not exists (select from queue q where q.resend_id = r.id)
        and ($1::text is null or exists (select from webhooks w where w.id = r.webhook_id and w.account_id = $1))
    group by r.event_seq, r.webhook_id
), ledger as (
    select coalesce(e.account_id, d.account_id, w.account_id) collate "C" as account_id, e.id collate "C" as event_id,
        webhook_id collate "C" as webhook_id, is_due, coalesce(d.recovered, g.recovered) as recovered,
        d.id as delivery_id, coalesce(d.state, g.state) as state, g.state is not null as was_pruned,
        d.attempts, d.finished_at, q.delivery_id is not null as queued,
        w.id as known_webhook, w.active, w.deleted_at is not null as deleted, e.orphaned_at is not null as orphaned,
        c.webhook_id is not null as flags_changed,
        coalesce(p.posted, 0) as posted, p.lowest, p.highest, coalesce(p.accepted, 0) as accepted, p.unclear,
        coalesce(s.resent, 0) as resent, coalesce(s.booked, 0) as booked, s.vague,
        coalesce(f.unqueued, 0) as unqueued
    from due full join stored d using (event_seq, webhook_id) full join gone g using (event_seq, webhook_id)
        full join sent s using (event_seq, webhook_id) full join forgotten f using (event_seq, webhook_id)
        left join events e on e.seq = event_seq left join webhooks w on w.id = webhook_id
        left join posts p on p.delivery_id = d.id
        left join (select distinct webhook_id from flag_changes) c using (webhook_id)
        left join (select delivery_id from queue) q on q.delivery_id = d.id
), placed as (
    select *, row_number() over (partition by account_id, event_id, webhook_id order by delivery_id) as place
    from ledger
)
select account_id, event_id, webhook_id, state, was_pruned and delivery_id is null as pruned, array_remove(array[
    case when state is null and is_due then 'is missing' end,
    case when state is null and is_due is null and resent > 0 then 'resent without a delivery' end,
    case when was_pruned and delivery_id is not null then 'was pruned, and is there again' end,
    case when state is not null and is_due is null and not recovered then 'was never due' end,
    case when is_due and recovered then 'was due, and only recovered' end,
    case when recovered and state not in ('delivered', 'exhausted') then 'recovered, but not finished' end,
    case when place > 1 and state is not null then 'has more than one delivery' end,
    case when state is not null and event_id is null then 'its event is not there' end,
    case when known_webhook is null then 'its webhook is not there' end,
    case when state not in ('scheduled', 'parked', 'delivered', 'exhausted', 'cancelled', 'withdrawn')
        then 'is in a state that there is not' end,
    case when attempts <> posted then 'its number of attempts is not that of its attempt rows' end,
    case when lowest <> 1 or highest <> posted then 'its attempt rows are not numbered 1, 2, 3 …' end,
    case when unclear or vague then 'an attempt has neither or both of status and error' end,
    case when delivery_id is not null and (state = 'delivered') <> (accepted + booked > 0)
        then 'delivered without a 2xx, or a 2xx without delivered' end,
    case when accepted > 1 then 'attempted again after a 2xx' end,
    case when state = 'exhausted' and posted = 0 and not (recovered and resent > 0)
        then 'exhausted without an attempt' end,
    case when unqueued > 0 then 'a resend is unfinished, but not in the queue' end,
    case when state = 'scheduled' and not queued then 'scheduled, but not in the queue' end,
    case when state <> 'scheduled' and queued then 'in the queue, but not scheduled' end,
    case when delivery_id is not null
        and (state in ('delivered', 'exhausted', 'cancelled', 'withdrawn')) <> (finished_at is not null)
        then 'finished without saying when, or the other way round' end,
    case when state in ('scheduled', 'parked') and deleted and not flags_changed
        then 'pending for a deleted webhook' end,
    case when state = 'cancelled' and not deleted then 'cancelled for a webhook that is there' end,
    case when state in ('scheduled', 'parked') and orphaned then 'pending for an orphaned event' end,
    case when state = 'withdrawn' and event_id is not null and not orphaned
        then 'withdrawn, but its event is not orphaned' end,
    case when state = 'scheduled' and not active and not deleted and not flags_changed
        then 'due for a webhook that is off' end,
    case when state = 'parked' and active and not flags_changed then 'parked for a webhook that is on' end
], null) as problems
from placed order by account_id, event_id, webhook_id, delivery_id
"""
