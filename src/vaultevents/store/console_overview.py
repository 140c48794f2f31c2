"""What the console shows at a glance, at a cost that does not grow with what is stored.

Rows are numbered in the order of time, so a binary search finds the first one of a period; how many follow is exact for
a few and the difference of the numbers for many. What became of them comes from one row of each of many equal parts,
at a place of the part that looks random: at even distances the rows could all be of one webhook.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from vaultevents.store.pool import Connection

NEWEST_EVENTS: Final = 20
MINUTES: Final = 60
OF_MINUTE: Final = 40
"""Deliveries of a minute that are looked at."""
OF_DAY: Final = 1000
"""Deliveries of 24 h that are looked at."""
COUNTED: Final = 10_000
"""Up to so many rows are counted."""


@dataclass(frozen=True, slots=True)
class EventFacts:
    """An event without its body."""

    seq: int
    id: str
    event_type: str
    account_id: str
    vault_id: str
    block_number: int | None
    stored_at: datetime
    orphaned_at: datetime | None


async def newest_events(connection: Connection, limit: int = NEWEST_EVENTS) -> list[EventFacts]:
    """Return the events that were stored last, newest first."""
    rows = await connection.fetch(
        "select seq, id, event_type, account_id, vault_id, block_number, stored_at, orphaned_at"
        " from events order by seq desc limit $1",
        limit,
    )
    return [EventFacts(**row) for row in rows]


@dataclass(frozen=True, slots=True)
class Minute:
    """The deliveries that were created in one minute, by what became of them; estimated where they are many.

    `first`: accepted at the first attempt. `later`: accepted after it. `waiting`. `failed`: any other end.
    """

    begins: datetime
    deliveries: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Day:
    """The last 24 h. `sampled` deliveries were looked at; the shares and times are theirs, None without any.

    `exact`: whether events and deliveries were counted, not estimated. Times are from the commit of the event to the
    answer that accepted it.
    """

    events: int
    deliveries: int
    exact: bool
    sampled: int
    first_share: float | None
    median_s: float | None
    p99_s: float | None


async def minutes(connection: Connection, number: int = MINUTES, sample: int = OF_MINUTE) -> list[Minute]:
    """Return the last minutes, oldest first."""
    rows = await connection.fetch(_MINUTES, number, sample)
    found: dict[datetime, dict[str, float]] = {}
    for row in rows:
        outcomes = found.setdefault(row["begins"], {})
        if row["outcome"] is not None:
            outcomes[row["outcome"]] = row["deliveries"]
    return [Minute(begins, outcomes) for begins, outcomes in sorted(found.items())]


async def day(connection: Connection, counted: int = COUNTED, sample: int = OF_DAY) -> Day:
    """Return the figures of the last 24 h."""
    events, some_events = await connection.fetchrow(_EVENTS_SINCE, timedelta(days=1), counted)
    deliveries, some_deliveries = await connection.fetchrow(_DELIVERIES_SINCE, timedelta(days=1), counted)
    row = await connection.fetchrow(_DAY, timedelta(days=1), sample)
    return Day(events, deliveries, not (some_events or some_deliveries), **row)


def _first_since(table: Literal["events", "deliveries"], begins: str) -> str:
    """Return the parts of a statement that find the first rows since the times of the query `begins` (n, begins).

    `found` has each n with the number of that row, one more than the last number where there is none.
    """
    number, time = {"events": ("seq", "stored_at"), "deliveries": ("id", "created_at")}[table]
    return f"""
    ends as (
        select coalesce((select min({number}) from {table}), 0) as low,
            coalesce((select max({number}) from {table}), 0) + 1 as high
    ), search as (
        select b.n, b.begins, e.low, case when e.low = 0 then e.low else e.high end as high
        from ({begins}) b cross join ends e
        union all
        select s.n, s.begins, case when row.at < s.begins then row.number + 1 else s.low end,
            case when row.at < s.begins then s.high else middle.number end
        from search s cross join lateral (select (s.low + s.high) / 2 as number) middle cross join lateral (
            select r.{number} as number, r.{time} as at from {table} r where r.{number} >= middle.number
            order by r.{number} limit 1
        ) row
        where s.low < s.high
    ), found as (
        select n, begins, low as first from search where low >= high
    )"""  # noqa: S608  # names of ours


_OUTCOME: Final = """case when d.state = 'delivered' and d.attempts <= 1 then 'first'
        when d.state = 'delivered' then 'later' when d.state in ('scheduled', 'parked') then 'waiting'
        else 'failed' end"""


def _count_since(table: Literal["events", "deliveries"]) -> str:
    """Return the statement that counts the rows since `db_now() - $1`, or estimates them from `$2` rows on."""
    number = {"events": "seq", "deliveries": "id"}[table]
    return f"""
with recursive {_first_since(table, "select 0 as n, db_now() - $1::interval as begins")}, few as (
    select count(*) as rows from (
        select from {table} r where r.{number} >= (select first from found) order by r.{number} limit $2
    ) counted
)
select case when few.rows < $2 then few.rows else greatest(few.rows, ends.high - found.first) end as rows,
    few.rows >= $2 as estimated
from found cross join ends cross join few
"""  # noqa: S608  # names of ours


_EVENTS_SINCE: Final = _count_since("events")
_DELIVERIES_SINCE: Final = _count_since("deliveries")

_MINUTES: Final = f"""
with recursive {
    _first_since(
        "deliveries",
        "select n, date_trunc('minute', db_now()) - make_interval(mins => n) as begins"
        " from generate_series(0, $1::integer - 1) n",
    )
}, parts as (
    select begins, first, coalesce(lead(first) over (order by begins), ends.high) as after from found cross join ends
), looked_at as (
    select p.begins, p.after - p.first as numbers, {_OUTCOME} as outcome
    from parts p cross join lateral (
        (select d.state, d.attempts from deliveries d
            where p.after - p.first <= $2 and d.id >= p.first and d.id < p.after order by d.id limit $2)
        union all
        select each.state, each.attempts from generate_series(0, $2::integer - 1) place
            cross join lateral (select p.first + place * (p.after - p.first) / $2 as low) part cross join lateral (
                select d.state, d.attempts from deliveries d
                where p.after - p.first > $2 and d.id < p.after
                    and d.id >= part.low + (hashint8(part.low) & 2147483647) % ((p.after - p.first) / $2)
                order by d.id limit 1
            ) each
    ) d
), counted as (
    select begins, outcome, count(*) as rows, max(numbers) as numbers from looked_at group by begins, outcome
)
select p.begins, c.outcome, (case when c.numbers <= $2 then c.rows
    else c.rows * c.numbers / sum(c.rows) over (partition by p.begins) end)::float8 as deliveries
from parts p left join counted c using (begins)
"""  # noqa: S608  # names of ours
"""What was created since the last whole minute is in the last row; each minute reads `$2` rows at most."""

_DAY: Final = f"""
with recursive {_first_since("deliveries", "select 0 as n, db_now() - $1::interval as begins")}, part as (
    select first, ends.high as after, greatest((ends.high - first) / $2, 1) as step from found cross join ends
), looked_at as (
    select d.state, d.attempts, d.recovered,
        extract(epoch from d.finished_at - d.created_at)::float8 as took_s
    from part p cross join lateral generate_series(p.first, p.after - 1, p.step) place cross join lateral (
        select d.state, d.attempts, d.recovered, d.created_at, d.finished_at from deliveries d
        where d.id >= place + (hashint8(place) & 2147483647) % p.step and d.id < place + p.step order by d.id limit 1
    ) d
)
select count(*)::integer as sampled,
    (count(*) filter (where state = 'delivered' and attempts = 1)
        / nullif(count(*) filter (where attempts >= 1), 0)::float8) as first_share,
    percentile_disc(0.5) within group (order by took_s) filter (where state = 'delivered') as median_s,
    percentile_disc(0.99) within group (order by took_s) filter (where state = 'delivered') as p99_s
from looked_at where not recovered
"""  # noqa: S608  # names of ours
