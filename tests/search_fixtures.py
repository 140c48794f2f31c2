"""Thousands of events and deliveries made by the server, and a connection that checks the plan of each statement."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import store_factories as factories
from vaultevents.store.pool import Connection, Database
from vaultevents.store.postgres.embedded import ServerAddress

LARGE = ("events", "deliveries", "attempts", "queue")
MANY = 3000
LOUD, QUIET = 20_000, 400


@asynccontextmanager
async def many_events(server: ServerAddress) -> AsyncIterator[Database]:
    """Two accounts: `loud` with `LOUD` events of two vaults, and `quiet`, whose `QUIET` events are the oldest.

    Event number n of either is in block n and at n seconds, and every tenth is a claim. The webhooks of `loud` have all
    its events: `wh-000001` (tried, some failed) and `wh-000002` (the newest are pending).
    """
    async with factories.own_database(server) as database:
        for account_id in ("loud", "quiet"):
            await factories.account(database, account_id)
            await factories.vault(database, "v1", account_id=account_id, at=f"{account_id} 1")
            await factories.vault(database, "v2", account_id=account_id, at=f"{account_id} 2")
        await factories.change(database, _EVENTS, "quiet", QUIET)
        await factories.change(database, _EVENTS, "loud", LOUD)
        for number in (1, 2):
            await factories.change(database, _WEBHOOK, f"wh-{number:06}")
            await factories.change(database, _DELIVERIES, f"wh-{number:06}", LOUD if number == 1 else LOUD // 2)
        await factories.change(database, _QUEUE)
        await factories.change(database, _ATTEMPTS)
        async with database.statement() as connection:
            await connection.execute("vacuum analyze")
        yield database


_EVENTS = """
insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
    filter_revision)
select $1, t.name || '_' || $1 || '_' || n, 'v' || (1 + n % 2), t.name, n, n * 1000, 1,
    convert_to('{"payload":{"amount_wei":"5","amount_eth":"0.25","tx_hash":"0x' || n || '"}}', 'UTF8'), false, 1
from generate_series(1, $2::integer) n
    cross join lateral (select case when n % 10 = 0 then 'withdrawal_claimed' else 'funding_received' end) t (name)
"""

_WEBHOOK = "insert into webhooks (id, account_id, url, active) values ($1, 'loud', 'https://a.example/' || $1, true)"

_DELIVERIES = """
insert into deliveries (event_seq, webhook_id, state, attempts, finished_at)
select e.seq, $1, s.state, case when s.state = 'scheduled' then 0 else 1 end,
    case when s.state <> 'scheduled' then db_now() end
from events e cross join lateral (select case when e.block_number > $2 then 'scheduled'
    when e.block_number % 100 = 0 then 'exhausted' else 'delivered' end as state) s
where e.account_id = 'loud'
"""

_QUEUE = """
insert into queue (webhook_id, delivery_id, event_seq, due_at)
select webhook_id, id, event_seq, created_at from deliveries where state = 'scheduled'
"""

_ATTEMPTS = """
insert into attempts (delivery_id, number, started_at, duration_ms, status, error, excerpt)
select id, 1, created_at, event_seq % 100, case when state = 'delivered' then 200 else 500 end, null, state
from deliveries where attempts = 1
"""


class PlanCheckingConnection:
    """Runs statements like a connection, and records those whose plan reads a large table sequentially, or sorts it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.statements = 0
        self.sequential: list[str] = []
        self.sorted: list[str] = []

    async def execute(self, query: str) -> Any:
        return await self._connection.execute(query)

    async def fetch(self, query: str, *arguments: object) -> Any:
        await self._explain(query, *arguments)
        return await self._connection.fetch(query, *arguments)

    async def fetchrow(self, query: str, *arguments: object) -> Any:
        await self._explain(query, *arguments)
        return await self._connection.fetchrow(query, *arguments)

    async def fetchval(self, query: str, *arguments: object) -> Any:
        await self._explain(query, *arguments)
        return await self._connection.fetchval(query, *arguments)

    async def _explain(self, query: str, *arguments: object) -> None:
        """Look at the plan for these arguments, and at the one for any arguments, which the server may come to use."""
        self.statements += 1
        for mode, explained, given in (
            ("custom", query, arguments),
            # prepared by name: the server plans what an EXPLAIN with parameters explains for just these
            ("generic", f"execute explained{await self._prepare(query)}", ()),
        ):
            await self._connection.execute(f"set local plan_cache_mode = force_{mode}_plan")
            (top,) = json.loads(await self._connection.fetchval(f"explain (format json) {explained}", *given))
            self.sequential += [f"{mode}: {name}: {query}" for name in sequential_scans(top["Plan"])]
            self.sorted += [f"{mode}: {name}: {query}" for name in sorted_scans(top["Plan"])]
        await self._connection.execute("deallocate explained; set local plan_cache_mode = default")

    async def _prepare(self, query: str) -> str:
        """Prepare a statement by the name `explained`; the list of arguments for its execution."""
        await self._connection.execute(f"prepare explained as {query}")
        number = await self._connection.fetchval(
            "select cardinality(parameter_types) from pg_prepared_statements where name = 'explained'"
        )
        return f"({', '.join(['null'] * number)})" if number else ""


def sorted_scans(plan: dict[str, Any], below_sort: bool = False) -> Iterator[str]:
    """The large tables of which a plan sorts more rows than a page shows, instead of reading them in order."""
    if below_sort and plan.get("Relation Name") in LARGE and plan["Plan Rows"] > MANY:
        yield plan["Relation Name"]
    for part in plan.get("Plans", ()):
        yield from sorted_scans(part, plan["Node Type"] == "Sort")


def sequential_scans(plan: dict[str, Any]) -> Iterator[str]:
    """The large tables that a plan reads sequentially."""
    if plan["Node Type"] == "Seq Scan" and plan["Relation Name"] in LARGE:
        yield plan["Relation Name"]
    for part in plan.get("Plans", ()):
        yield from sequential_scans(part)
