"""Webhook health: failures in a row, which park a webhook and disable it in the end (rules D7 and D8)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from vaultevents.core.webhook_health import Parking, Streak, failed, should_disable, should_warn
from vaultevents.store.notices import Notice, record
from vaultevents.store.pool import Connection, Database, Record
from vaultevents.store.registry import lock_registry
from vaultevents.store.webhooks import disable_webhook


async def lock_streaks(
    connection: Connection, attempted: Collection[str], failing: Collection[str]
) -> tuple[dict[str, tuple[Streak, bool]], datetime]:
    """Lock the streaks that attempts of these webhooks may change.

    Return them, with whether the operator was warned; and the database's time.
    """
    rows = await connection.fetch(_STREAKS, sorted(failing), sorted(attempted))
    now = rows[0]["now"] if rows else await connection.fetchval("select db_now()")
    return {row["id"]: (_streak(row), row["warned_at"] is not None) for row in rows}, now


_STREAKS = """
select id, failures, first_failure_at, last_failure_at, parks, parked_until, warned_at, db_now() as now from webhooks
where id = any($1) or (id = any($2) and failures > 0) order by id for no key update
"""


def _streak(row: Record) -> Streak:
    return Streak(row["failures"], row["first_failure_at"], row["last_failure_at"], row["parks"], row["parked_until"])


async def keep_streaks(
    connection: Connection,
    streaks: Mapping[str, tuple[Streak, bool]],
    attempts: Iterable[tuple[str, bool, datetime]],
    now: datetime,
    parking: Parking,
) -> dict[str, Streak]:
    """Count failures, forget them at a success, and record which webhooks to warn of; return the streaks that changed.

    `attempts`: the webhook, whether it was accepted, and when it began.
    """
    present = {webhook_id: streak for webhook_id, (streak, _) in streaks.items()}
    for webhook_id, accepted, started_at in attempts:
        if accepted:
            present[webhook_id] = Streak()
        else:
            present[webhook_id] = failed(present.get(webhook_id, Streak()), started_at, now, parking)
    changed = {name: new for name, new in present.items() if name in streaks and new != streaks[name][0]}
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
        await record(connection, [Notice("webhook_failing", name) for name in sorted(warned) if not streaks[name][1]])
    return changed


_KEEP = """
update webhooks w set failures = n.failures, first_failure_at = n.first_failure_at,
    last_failure_at = n.last_failure_at, parks = n.parks, parked_until = n.parked_until,
    warned_at = case when n.warned then coalesce(w.warned_at, db_now()) end
from unnest($1::text[], $2::integer[], $3::timestamptz[], $4::timestamptz[], $5::integer[], $6::timestamptz[],
    $7::boolean[]) as n (id, failures, first_failure_at, last_failure_at, parks, parked_until, warned)
where w.id = n.id
"""


async def disable_failing(database: Database, webhook_id: str) -> None:
    """Disable a webhook whose failures have lasted (rule D7), unless it was disabled or succeeded meanwhile."""
    async with database.transaction() as connection:
        await lock_registry(connection)
        row = await connection.fetchrow(
            "select *, db_now() as now from webhooks where id = $1 and active for no key update", webhook_id
        )
        if row is not None and should_disable(_streak(row), row["now"]):
            await disable_webhook(connection, webhook_id, "failing")
