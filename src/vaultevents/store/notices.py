"""Operator notices: recorded in the transaction of the change, logged once, posted at least once (rules D7 and A5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal
from uuid import UUID

from vaultevents.core.units import Address
from vaultevents.store.pool import Connection, Database

KEPT_DAYS: Final = 30

Kind = Literal["webhook_failing", "webhook_disabled", "delivery_exhausted", "webhook_enabled", "logs_quarantined"]
Reason = Literal["failing", "gone"]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something happened to a webhook; only `webhook_disabled` has a `reason`."""

    kind: Kind
    webhook_id: str
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class OfAddress:
    """Logs of an address cannot be decoded: `count` since its last notice, the first of the newest in `block`."""

    address: Address
    block: int
    count: int


@dataclass(frozen=True, slots=True)
class ClaimedNotice:
    """A notice leased to the caller. `attempt` counts from 1, `count` the deliveries or logs that it speaks of.

    `logs_quarantined` has an address and a block; every other kind has an account and a webhook.
    """

    id: UUID
    lease: UUID
    attempt: int
    kind: Kind
    reason: Reason | None
    count: int
    account_id: str | None
    webhook_id: str | None
    address: Address | None
    block_number: int | None
    failures: int
    failing_since: datetime | None
    created_at: datetime


async def record(connection: Connection, notices: Sequence[Notice]) -> None:
    """Keeps the notices, with the failures of each webhook as this transaction leaves them.

    Call it in the transaction of the change and after it. Equal ones are folded into one with their count.
    """
    folded = Counter(notices)
    if folded:
        await connection.execute(
            _RECORD,
            [notice.kind for notice in folded],
            [notice.webhook_id for notice in folded],
            [notice.reason for notice in folded],
            list(folded.values()),
        )


_RECORD = """
insert into notices (kind, webhook_id, reason, count, failures, failing_since)
select n.kind, n.webhook_id, n.reason, n.count, w.failures, w.first_failure_at
from unnest($1::text[], $2::text[], $3::text[], $4::integer[]) as n (kind, webhook_id, reason, count)
join webhooks w on w.id = n.webhook_id
"""


async def record_quarantined(connection: Connection, found: Sequence[OfAddress]) -> None:
    """Keep a notice for each address, in the transaction that stores its logs."""
    await connection.executemany(
        "insert into notices (kind, address, block_number, count, failures)"
        " values ('logs_quarantined', $1, $2, least($3::bigint, 2147483647), 0)",
        [(entry.address, entry.block, entry.count) for entry in found],
    )


async def claim_notices(database: Database, limit: int, lease: UUID, lease_s: float) -> list[ClaimedNotice]:
    """Up to `limit` due notices, oldest first, leased to the caller for `lease_s` seconds; others' are skipped."""
    async with database.transaction() as connection:
        rows = await connection.fetch(_CLAIM, limit, lease, lease_s)
    return [ClaimedNotice(lease=lease, **row) for row in rows]


_CLAIM = """
with due as (
    select id from notices where finished_at is null and due_at <= db_now()
    order by due_at limit $1 for update skip locked
)
update notices n set lease = $2, attempts = n.attempts + 1, due_at = db_now() + make_interval(secs => $3)
from due where n.id = due.id
returning n.id, n.attempts as attempt, n.kind, n.reason, n.count,
    (select w.account_id from webhooks w where w.id = n.webhook_id) as account_id, n.webhook_id, n.address,
    n.block_number, n.failures, n.failing_since, n.created_at
"""


async def finish(database: Database, notice_id: UUID, lease: UUID, *, sent: bool) -> bool:
    """Record that nothing more is to be done for a notice; return whether its lease was held. Else nothing changes."""
    async with database.statement() as connection:
        done = await connection.execute(
            "update notices set finished_at = db_now(), sent = $3, lease = null where id = $1 and lease = $2",
            notice_id,
            lease,
            sent,
        )
    return bool(done == "UPDATE 1")


async def postpone(database: Database, notice_id: UUID, lease: UUID, after_s: float, *, attempted: bool = True) -> bool:
    """Make a notice due again in `after_s` seconds; return whether its lease was held. Else nothing changes."""
    async with database.statement() as connection:
        done = await connection.execute(
            "update notices set due_at = db_now() + make_interval(secs => $3), lease = null,"
            " attempts = attempts - $4 where id = $1 and lease = $2",
            notice_id,
            lease,
            after_s,
            0 if attempted else 1,
        )
    return bool(done == "UPDATE 1")


async def forget(database: Database) -> None:
    """Removes what was finished 30 days ago."""
    async with database.transaction() as connection:
        await connection.execute(
            "delete from notices where finished_at < db_now() - make_interval(days => $1)", KEPT_DAYS
        )
