"""Removes old finished deliveries with their attempts, and keeps which they were (rules D9, D11 and D14).

Delivered and cancelled deliveries go once they have been finished for long enough. Events, what is pending, and what is
exhausted (recoverable, rule P6) are never touched. In the transaction that removes a delivery, `pruned` takes
its event and state in, so that at any moment the ledger knows every one of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from vaultevents.core.actor import acting
from vaultevents.core.audit_chain import time_text
from vaultevents.core.errors import InputError
from vaultevents.store.audit_log import record
from vaultevents.store.pool import Connection, Database

LEAST_AGE: Final = timedelta(days=1)
"""What finished more recently is never pruned, so that the attempts of today's problems can be examined."""
LOOKED_AT: Final = 1_000
"""How many deliveries one transaction looks at."""


SAMPLES: Final = 200
SAMPLED_AT_ONCE: Final = 100
"""A dry run of more deliveries than these make looks at so many parts of so many ids each."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many rows were removed, or would be; `estimated` from samples, which only a dry run is."""

    deliveries: int = 0
    attempts: int = 0
    resends: int = 0
    estimated: bool = False

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(self.deliveries + other.deliveries, self.attempts + other.attempts, self.resends + other.resends)


async def prune(
    database: Database,
    older_than: timedelta,
    *,
    pause_s: float,
    dry_run: bool = False,
    looked_at: int = LOOKED_AT,
    progress: Callable[[int, int], None] = lambda _looked_at, _of: None,
) -> Pruned:
    """Removes what was finished more than `older_than` ago by the database's clock, oldest first.

    Each `looked_at` deliveries are a transaction of their own, with a pause of `pause_s` after it: it can be killed at
    any point, and two may run at once. `progress` is called with how many deliveries were examined, of about how many.
    With `dry_run` it only counts, and estimates where there are many: some seconds, whatever is stored. Raises
    `InputError` for less than `LEAST_AGE`.
    """
    if older_than < LEAST_AGE:
        raise InputError(f"what finished less than {LEAST_AGE.days} day ago is not pruned: give a longer time")
    horizon = await database.now() - older_than
    async with database.transaction() as connection:
        first, last = await _ids(connection, horizon)
    if dry_run:
        return await _count(database, first, last, horizon, progress)
    progress(0, last - first + 1)
    total, after = Pruned(), first - 1
    while after < last:
        async with database.transaction() as connection:
            await connection.execute(_BY_INDEX)
            row = await connection.fetchrow(f"{_OLD} {_REMOVED}", after, last, looked_at, horizon)
            removed = Pruned(row["deliveries"], row["attempts"], row["resends"])
            if removed != Pruned() and total == Pruned():
                await _record(connection, horizon)
        if row["reached"] is None:
            break
        after = row["reached"]
        total += removed
        progress(after - first + 1, last - first + 1)
        await asyncio.sleep(pause_s)
    recorded = total != Pruned()
    return total + Pruned(resends=await _prune_tests(database, horizon, pause_s, looked_at, recorded=recorded))


async def _record(connection: Connection, horizon: datetime) -> None:
    """Record a pruning in the audit log: once, with the first rows that it removes."""
    subject = f"finished before {time_text(horizon)}"
    await record(connection, acting(), "prune", subject, after={"finished_before": horizon})


async def _count(
    database: Database, first: int, last: int, horizon: datetime, progress: Callable[[int, int], None]
) -> Pruned:
    """Count what would be removed of the deliveries with the ids `first` to `last`, and of tests.

    Of many ids a part of every stretch of the same length is looked at, and stands for the stretch.
    """
    ids = last - first + 1
    estimated = ids > SAMPLES * SAMPLED_AT_ONCE
    stretch = ids / SAMPLES if estimated else float(SAMPLED_AT_ONCE)
    parts = math.ceil(ids / stretch)
    found = Pruned()
    progress(0, parts)
    for part in range(parts):
        after = first - 1 + int(part * stretch)
        async with database.transaction() as connection:
            await connection.execute(_BY_INDEX)
            row = await connection.fetchrow(
                f"{_OLD} {_COUNTED}", after, min(after + SAMPLED_AT_ONCE, last), SAMPLED_AT_ONCE, horizon
            )
        found += Pruned(row["deliveries"], row["attempts"], row["resends"])
        progress(part + 1, parts)
    share = stretch / SAMPLED_AT_ONCE
    async with database.transaction() as connection:
        tests = await connection.fetchval(_COUNT_TESTS, horizon)
    return Pruned(
        round(found.deliveries * share),
        round(found.attempts * share),
        round(found.resends * share) + tests,
        estimated,
    )


async def _ids(connection: Connection, horizon: datetime) -> tuple[int, int]:
    """The first and the last id of the deliveries made before `horizon`; ids and times of creation rise together."""
    row = await connection.fetchrow("select min(id) as first, max(id) as last from deliveries")
    if row["first"] is None:
        return 1, 0
    low, high = row["first"] - 1, row["last"]  # `low` is before the horizon; nothing after `high` is
    while low < high:
        middle = (low + high + 1) // 2
        created_at = await connection.fetchval(
            "select created_at from deliveries where id <= $1 order by id desc limit 1", middle
        )
        if created_at < horizon:
            low = middle
        else:
            high = middle - 1
    return row["first"], low


# The plan is held to the indexes, whatever the statistics of a table that has just grown or shrunk say.
_BY_INDEX = "set local enable_hashjoin = off; set local enable_mergejoin = off; set local enable_seqscan = off"

# A delivery that is leased is still in flight, and one that was resent of late is of interest.
_OLD = """
with looked_at as materialized (
    select d.id from deliveries d where d.id > $1 and d.id <= $2 order by d.id limit $3
), old as materialized (
    select d.id, d.event_seq, d.webhook_id, d.state, d.recovered from looked_at join deliveries d using (id)
    where d.state in ('delivered', 'cancelled') and d.finished_at < $4
        and not exists (select from leases l where l.webhook_id = d.webhook_id and d.id = any (l.delivery_ids))
        and not exists (select from resends r where r.webhook_id = d.webhook_id and r.event_seq = d.event_seq
            and (r.finished_at is null or r.finished_at >= $4))
    order by d.id
"""

_REMOVED = """
    for update of d skip locked
), kept as (
    insert into pruned as p (webhook_id, chunk, state, recovered, events)
    select webhook_id, event_seq >> 10, state, recovered, range_agg(int8range(event_seq, event_seq, '[]'))
    from old group by 1, 2, 3, 4 order by 1, 2, 3, 4  -- the order of every pruning, lest two wait in a circle
    on conflict (webhook_id, chunk, state, recovered) do update set events = p.events + excluded.events
), attempted as (
    delete from attempts a using old where a.delivery_id = old.id returning 1
), resent as (
    delete from resends r using old
    where r.webhook_id = old.webhook_id and r.event_seq = old.event_seq and r.finished_at is not null returning 1
), gone as (
    delete from deliveries d using old where d.id = old.id returning 1
)
select (select max(id) from looked_at) as reached, (select count(*) from gone) as deliveries,
    (select count(*) from attempted) as attempts, (select count(*) from resent) as resends
"""

_COUNTED = """
)
select (select max(id) from looked_at) as reached, (select count(*) from old) as deliveries,
    (select count(*) from attempts a join old on a.delivery_id = old.id) as attempts,
    (select count(*) from resends r join old using (webhook_id, event_seq)) as resends
"""


async def _prune_tests(database: Database, horizon: datetime, pause_s: float, at_once: int, *, recorded: bool) -> int:
    """Removes tests, which are no events and have no delivery."""
    total = 0
    while True:
        async with database.transaction() as connection:
            gone: int = await connection.fetchval(_PRUNE_TESTS, horizon, at_once)
            if gone and not recorded:
                await _record(connection, horizon)
        recorded, total = True, total + gone
        if gone == 0:
            return total
        await asyncio.sleep(pause_s)


# By the index of a webhook's resends, in which tests come last.
_COUNT_TESTS = """
select count(*) from webhooks w join resends r on r.webhook_id = w.id
where r.event_seq is null and r.finished_at < $1
"""

_PRUNE_TESTS = """
with gone as (
    delete from resends where id in (
        select id from resends where event_seq is null and finished_at < $1 order by id limit $2
        for update skip locked
    ) returning 1
)
select count(*) from gone
"""
