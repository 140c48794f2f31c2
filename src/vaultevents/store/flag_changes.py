"""Bring pending deliveries in line with their webhook's flags, in batches without the registry lock (rules D9 and D14).

    PATCH, DELETE, 410, failures ──▶ webhooks.active, deleted_at   under the registry lock; nothing is claimed any more
                                 └─▶ flag_changes                  one row, in the same transaction
    follow_flags, any process    ──▶ deliveries, queue, resends    batch by batch; then the row is removed

- A batch reads the flags and the rows of `flag_changes` in one snapshot. A change that commits later adds a row, which
  starts the webhook over: whatever the order of changes and batches, the last flags win.
- Nothing is kept but in the database, so that a process that is killed is followed by any other.
- Batches of different webhooks take turns: a deep queue does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import Final, Literal

import structlog

from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.store.pool import DELIVERIES_CHANNEL, Connection, Database

log = structlog.get_logger("store")

BATCH: Final = 1_000
"""Rows of one transaction: some 50 ms, for which a settle of the same webhook may have to wait."""
LOOK_EVERY_S: Final = 2.0
RECONNECT_S: Final = 0.5
WEBHOOKS_AT_ONCE: Final = 1_000
FLAGS_CHANNEL: Final = "vaultevents_flags"

Target = Literal["scheduled", "parked", "cancelled"]


@dataclass(frozen=True, slots=True)
class Pass:
    """How far one webhook is: the changes that are followed, the step, and the last delivery that is done."""

    changes: tuple[int, ...]
    target: Target
    step: int = 0
    after: int = 0


async def record_flag_change(connection: Connection, webhook_id: str, *, switched_on: bool = False) -> None:
    """Let the pending deliveries of a webhook follow its flags. Call it in the transaction that changes them.

    `switched_on`: it was off, so that what waits for a retry becomes due, too.
    """
    await connection.execute(
        "insert into flag_changes (webhook_id, switched_on) values ($1, $2)", webhook_id, switched_on
    )
    await connection.execute("select pg_notify($1, '')", FLAGS_CHANNEL)


async def follow_flags(database: Database) -> None:
    """Carry out flag changes as they come, one process at a time; never ends."""
    wake = asyncio.Event()
    passes: dict[str, Pass] = {}
    async with asyncio.TaskGroup() as group:
        group.create_task(_listen(database, wake))
        while True:
            wake.clear()
            wait_s = LOOK_EVERY_S
            try:
                if await advance(database, passes):
                    continue
            except DatabaseUnavailable as error:
                log.warning("flag_changes_wait", problem=str(error), retry_in_s=RECONNECT_S)
                passes.clear()
                wait_s = RECONNECT_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await wake.wait()


async def advance(database: Database, passes: dict[str, Pass], batch: int = BATCH) -> bool:
    """Do one batch for each webhook whose flags changed; False when nothing is left or another process is at work.

    `passes` keeps how far each webhook is, for the next call.
    """
    async with database.statement() as connection:
        rows = await connection.fetch(_CHANGED, WEBHOOKS_AT_ONCE)
    for webhook_id in passes.keys() - {row["webhook_id"] for row in rows}:
        del passes[webhook_id]
    worked = False
    for row in rows:
        if not await _advance(database, row["webhook_id"], passes, batch):
            return False
        worked = True
    return worked


_CHANGED = """
select distinct f.webhook_id from flag_changes f join webhooks w on w.id = f.webhook_id order by 1 limit $1
"""


async def _advance(database: Database, webhook_id: str, passes: dict[str, Pass], batch: int) -> bool:
    """Do one batch for a webhook; False when another process is at work."""
    async with database.transaction() as connection:
        if not await connection.fetchval(_LOCK):
            return False
        row = await connection.fetchrow(_FLAGS, webhook_id)
        if row is None:
            passes.pop(webhook_id, None)
            return True
        now = passes.get(webhook_id)
        # one that was followed half way by other flags is begun again
        if now is None or (now.changes, now.target) != (tuple(row["changes"]), row["target"]):
            now = Pass(tuple(row["changes"]), row["target"])
        await connection.execute(_BY_INDEX)
        steps, room = _STEPS[now.target], batch
        while now.step < len(steps) and room:
            statement = steps[now.step]
            since = (row["switched_on_at"],) if statement is _MAKE_DUE else ()
            done = await connection.fetchrow(statement, webhook_id, now.after, room, *since)
            if done["number"] < room:
                now = replace(now, step=now.step + 1, after=0)
            else:
                now = replace(now, after=done["last"])
            room -= done["number"]
        if now.step == len(steps):
            await connection.execute("delete from flag_changes where id = any($1)", list(now.changes))
        if now.target == "scheduled" and room < batch:
            await connection.execute("select pg_notify($1, '')", DELIVERIES_CHANNEL)
    passes[webhook_id] = now
    if now.step == len(steps):
        del passes[webhook_id]
        log.info("flag_change_done", webhook_id=webhook_id, state=now.target)
    return True


_LOCK = "select pg_try_advisory_xact_lock(hashtext('vaultevents flag changes'), hashtext(current_schema()))"

_FLAGS = """
select array_agg(f.id order by f.id) as changes, max(f.made_at) filter (where f.switched_on) as switched_on_at,
    case when w.deleted_at is not null then 'cancelled' when w.active then 'scheduled' else 'parked' end as target
from flag_changes f join webhooks w on w.id = f.webhook_id where f.webhook_id = $1 group by w.id
"""

# The plan is held to the indexes, whatever the statistics of a table that has just grown or shrunk say.
_BY_INDEX = "set local enable_hashjoin = off; set local enable_mergejoin = off; set local enable_seqscan = off"

# Deliveries are locked in the order of their ids, as by every settle, so that two never wait for each other in a
# circle. One that was settled, withdrawn or resent meanwhile is left as it is: its new state is looked at once it can
# be locked. What is in flight keeps its lease until it is settled, so that its result is kept and it is not sent twice.
_QUEUED = """
with pending as materialized (
    select d.id from queue q join deliveries d on d.id = q.delivery_id
    where q.webhook_id = $1 and q.delivery_id > $2 and d.state = 'scheduled'
    order by q.delivery_id limit $3 for update of d
), gone as (
    delete from queue q using pending where q.webhook_id = $1 and q.delivery_id = pending.id
)"""
_PARKED = """
with pending as materialized (
    select id from deliveries where webhook_id = $1 and apart = 'parked' and id > $2 order by id limit $3 for update
)"""
_PARK_THEM = """, changed as (
    update deliveries d set state = 'parked' from pending where d.id = pending.id
)"""
_CANCEL_THEM = """, changed as (
    update deliveries d set state = 'cancelled', finished_at = db_now() from pending where d.id = pending.id
)"""
_RESUME_THEM = """, changed as (
    update deliveries d set state = 'scheduled' from pending where d.id = pending.id
    returning d.id, d.event_seq, d.webhook_id, d.attempts
), queued as (
    insert into queue (delivery_id, event_seq, webhook_id, attempts, due_at)
    select id, event_seq, webhook_id, attempts, db_now() from changed
)"""
_PROGRESS = " select count(*) as number, max(id) as last from pending"

_PARK: Final = _QUEUED + _PARK_THEM + _PROGRESS
_CANCEL_QUEUED: Final = _QUEUED + _CANCEL_THEM + _PROGRESS
_CANCEL_PARKED: Final = _PARKED + _CANCEL_THEM + _PROGRESS
_RESUME: Final = _PARKED + _RESUME_THEM + _PROGRESS  # due at once; the number of the next attempt is kept (rule D9)

# A webhook that is switched on before its retries were parked: they are due, too. Not those that failed since then.
# What is just being settled is skipped.
_MAKE_DUE = """
with waiting as materialized (
    select q.delivery_id from queue q join attempts a on a.delivery_id = q.delivery_id and a.number = q.attempts
    where q.webhook_id = $1 and q.turn = 1 and q.due_at > db_now()
        and a.started_at + make_interval(secs => a.duration_ms / 1000.0) < $4
    order by q.due_at limit $3 for update of q skip locked
), due as (
    update queue q set due_at = db_now() from waiting w where q.webhook_id = $1 and q.delivery_id = w.delivery_id
)
select count(*) as number, $2::bigint as last from waiting
"""

# What is in flight stays until it is settled.
_DROP_RESENDS = """
with gone as (
    delete from resends where id in (
        select r.id from queue q join resends r on r.id = q.resend_id
        where q.webhook_id = $1 and q.resend_id > $2 and (r.lease is null
            or not exists (select from leases l where l.webhook_id = $1 and r.id = any (l.resend_ids)))
        order by q.resend_id limit $3 for update of r skip locked
    ) returning id
), taken_back as (
    delete from queue q using gone where q.webhook_id = $1 and q.resend_id = gone.id
)
select count(*) as number, max(id) as last from gone
"""

_STEPS: Final[dict[Target, tuple[str, ...]]] = {
    "scheduled": (_RESUME, _MAKE_DUE),
    "parked": (_PARK,),
    "cancelled": (_DROP_RESENDS, _CANCEL_QUEUED, _CANCEL_PARKED),
}


async def _listen(database: Database, wake: asyncio.Event) -> None:
    """Wake at each NOTIFY; the interval between looks covers whatever is lost here."""
    while True:
        with contextlib.suppress(DatabaseUnavailable):
            await database.listen(FLAGS_CHANNEL, wake.set)
        await asyncio.sleep(RECONNECT_S)
