"""What an operator wants to know at a glance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from vaultevents.store import nodes
from vaultevents.store.nodes import NodeFacts
from vaultevents.store.pool import Connection, Database
from vaultevents.store.quarantine import count_open


@dataclass(frozen=True, slots=True)
class CursorFacts:
    """A live cursor, a backfill or replay that is not done, or the audit of a node.

    `unverified_from`: since which block headers or receipts have a form that this version does not know.
    """

    stream: str
    kind: str
    first: int
    position: int
    stop: int | None
    updated_at: datetime
    problem: str | None
    problem_since: datetime | None
    node: str | None
    unverified_from: int | None


@dataclass(frozen=True, slots=True)
class OrphanFacts:
    """An event whose block is no longer on the chain, and to how many webhooks it had been delivered."""

    account_id: str
    event_id: str
    orphaned_at: datetime
    delivered: int


@dataclass(frozen=True, slots=True)
class Overview:
    """`flag_changes`: webhooks that were switched on or off or deleted, and whose deliveries do not follow yet.

    `validators_from`: `list`, or `deposits` up to block `deposits_through`, where the list of all validators is refused
    as `validator_list_refused` says, or not to be asked.
    """

    server_version: str
    accounts: int
    vaults: int
    webhooks: int
    events: int
    deliveries: dict[str, int]
    oldest_pending_s: float | None
    flag_changes: int
    oldest_flag_change_s: float | None
    pending_reports: int
    notices_waiting: int
    orphaned_events: int
    rewinds: int
    rewound_at: datetime | None
    discovery_problem: str | None
    validators_from: str
    validator_list_refused: str | None
    deposits_through: int | None
    cursors: tuple[CursorFacts, ...]
    nodes: tuple[NodeFacts, ...]
    orphaned: tuple[OrphanFacts, ...]
    audits: tuple[CursorFacts, ...]
    quarantine_open: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


SHOWN_ORPHANS: Final = 20


async def read(database: Database) -> Overview:
    """Read everything in one snapshot. The cost grows with what is pending or set apart, not with what is stored."""
    async with database.transaction() as connection:
        await connection.execute("set transaction isolation level repeatable read, read only")
        deliveries = await count_by_state(connection)
        row = await connection.fetchrow(
            "select current_setting('server_version') as server_version,"
            " (select count(*) from accounts) as accounts,"
            " (select count(*) from vault_spans where last_block is null) as vaults,"
            " (select count(*) from webhooks where deleted_at is null) as webhooks,"
            " (select coalesce(sum(difference), 0)::bigint from row_totals where counted = 'events') as events,"
            # ids of deliveries grow with time: the oldest of a webhook is the first one of its part of the index
            " (select extract(epoch from db_now() - min(d.created_at))::float8 from webhooks w cross join lateral"
            "  (select q.delivery_id from queue q where q.webhook_id = w.id order by q.delivery_id limit 1) oldest"
            "  join deliveries d on d.id = oldest.delivery_id where w.deleted_at is null) as oldest_pending_s,"
            " (select count(distinct webhook_id) from flag_changes) as flag_changes,"
            " (select extract(epoch from db_now() - min(made_at))::float8 from flag_changes) as oldest_flag_change_s,"
            " (select count(*) from reports where state = 'pending') as pending_reports,"
            " (select count(*) from notices where finished_at is null) as notices_waiting,"
            " (select count(*) from events where orphaned_at is not null) as orphaned_events,"
            " (select coalesce(sum(rewinds), 0)::bigint from cursors) as rewinds,"
            " (select max(rewound_at) from cursors) as rewound_at,"
            " (select problem from discovery where not exists"
            "  (select 1 from cursors where stream = 'validators' and kind = 'live')) as discovery_problem,"
            " (select source from discovery) as validators_from,"
            " (select list_refused from discovery) as validator_list_refused,"
            " (select min(position) from deposit_searches) as deposits_through"
        )
        facts = await read_cursors(connection)
        known = await nodes.facts(connection)
        quarantine_open = await count_open(connection)
        orphaned = await read_orphaned(connection)
    return Overview(
        **row,
        deliveries=deliveries,
        cursors=tuple(cursor for cursor in facts if cursor.kind != "audit"),
        audits=tuple(cursor for cursor in facts if cursor.kind == "audit"),
        quarantine_open=quarantine_open,
        nodes=tuple(known),
        orphaned=tuple(orphaned),
    )


async def read_cursors(connection: Connection) -> list[CursorFacts]:
    """Return the cursors that are not done, by stream."""
    rows = await connection.fetch(
        "select stream, kind, first, position, stop, updated_at, problem, problem_since, node,"
        " unverified_from from cursors"
        " where stop is null or position < stop order by stream, kind desc, id"
    )
    return [CursorFacts(**row) for row in rows]


async def read_orphaned(connection: Connection) -> list[OrphanFacts]:
    """Return the events that were orphaned last, newest first."""
    rows = await connection.fetch(
        "select e.account_id, e.id as event_id, e.orphaned_at,"
        " (select count(*) from deliveries d where d.event_seq = e.seq and d.state = 'delivered') as delivered"
        " from events e where e.orphaned_at is not null order by e.orphaned_at desc, e.seq desc limit $1",
        SHOWN_ORPHANS,
    )
    return [OrphanFacts(**row) for row in rows]


async def count_by_state(connection: Connection) -> dict[str, int]:
    """Count the deliveries in each state that has any; exact, and without reading those that are delivered.

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
select 'scheduled', count(*) from queue where delivery_id is not null
union all
select apart, count(*) from deliveries where apart is not null group by apart
"""
