"""Leases: what a claim holds until it is settled, put back, or its time is over (rules P5 and P10).

Whatever ends a lease marks its webhook in `due_webhooks`, so that the next claim visits it (decision 0043).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vaultevents.store.deliveries import Delivery
from vaultevents.store.pool import Connection, Database


async def end_leases(database: Database) -> int:
    """Make due again what was not settled in time; return how many leases ended. Those being settled are skipped."""
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


async def put_back(database: Database, deliveries: Sequence[Delivery], after_s: float) -> int:
    """Make deliveries due again in `after_s` seconds as if they had not been claimed; how many leases were held.

    No attempt is written or counted. Deliveries that were parked, cancelled or withdrawn meanwhile stay so.
    """
    async with database.transaction() as connection:
        held = await end_own_leases(connection, deliveries)
        # in the order of the ids, as every settle, so that two writers never wait for each other
        await connection.execute("select from deliveries where id = any($1) order by id for update", held)
        await connection.execute(_DUE_AGAIN, held, after_s)
    return len(held)


async def end_own_leases(
    connection: Connection,
    deliveries: Sequence[Delivery],
    column: Literal["delivery_ids", "resend_ids"] = "delivery_ids",
) -> list[int]:
    """Take deliveries, or resends, out of the leases that their claims hold; return those that were still leased."""
    held: list[int] = await connection.fetchval(
        _END_OWN_LEASES.replace("delivery_ids", column),
        [delivery.webhook_id for delivery in deliveries],
        [delivery.lease for delivery in deliveries],
        [delivery.id for delivery in deliveries],
    )
    return held


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
