"""What the console's pages cost with 3 million events: `python3 dev.py bench console --json`.

3 million events of 20 accounts, 6 million deliveries of them to 100 webhooks with an attempt each, made by the server.
Measured is the time until the first byte of each page, asked for one after the other over HTTP by a browser that is
logged in, and what `status` asks of the database. The floor is the page of the login, which reads nothing.
`--scale 0.02` lays down less, for a quick try. The last line is the result; without `--json` a table stands before it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from typing import Any

import aiohttp
from _delivery import KEY, PREPARATION_S, add_webhooks, without_limit
from _scale import run_at_scale

from vaultevents import config
from vaultevents.api.server import bind, serve, url_of
from vaultevents.console.app import build
from vaultevents.console.context import ConsoleContext
from vaultevents.console.links import account_url, event_url, vault_url, webhook_url
from vaultevents.console.sessions import new_link
from vaultevents.daemon import console_options
from vaultevents.store import status
from vaultevents.store.clock import ServiceClock
from vaultevents.store.pool import Database, open_database
from vaultevents.wiring.sources import open_sources

EVENTS, ACCOUNTS, WEBHOOKS_EACH = 3_000_000, 20, 5
TO_EACH = 2  # deliveries of one event
ROUNDS = 40
GOAL_MS, STATUS_GOAL_S = 300.0, 1.0

# Rows are laid down without their references, which are right: checking them takes longer than all the rest.
_BARE = """
alter table deliveries drop constraint deliveries_event_seq_fkey, drop constraint deliveries_webhook_id_fkey
"""

_VAULTS = """
with added as (
    insert into vaults (account_id, id, address)
    select a.id, 'v' || n, substring(sha256((a.id || n)::bytea) for 20) from accounts a, generate_series(1, 5) n
    returning account_id, id
)
insert into vault_spans (account_id, vault_id, ordinal, first_block) select account_id, id, 1, 1 from added
"""

# Half of all events are of the first account. The newest happened now, one every second before it.
_EVENTS = """
insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
    filter_revision)
select a.id, t.name || '_' || a.id || '_0X' || upper(encode(sha256(n::text::bytea), 'hex')), 'v' || (1 + n % 5),
    t.name, n / 4, (extract(epoch from db_now())::bigint - $1 + n) * 1000, 1,
    convert_to('{"id":"' || n || '","payload":{"tx_hash":"0x' || encode(sha256(n::text::bytea), 'hex')
        || '","amount_wei":"1000","amount_eth":"0.5"},"filler":"' || repeat('x', 500) || '"}', 'UTF8'), false, 1
from generate_series(1, $1::integer) n
    cross join lateral (select 'a' || case when n % 2 = 0 then 0 else n % $2 end as id) a
    cross join lateral (select case when n % 10 = 0 then 'withdrawal_claimed' else 'funding_received' end as name) t
"""

# The newest are pending, one webhook refuses everything, and of every webhook a few are exhausted.
_DELIVERIES = """
insert into deliveries (event_seq, webhook_id, state, attempts, finished_at)
select e.seq, w.id, s.state, case when s.state = 'scheduled' then 0 else 1 end,
    case when s.state = 'scheduled' then null else db_now() end
from events e cross join generate_series(1, $1::integer) copy
cross join lateral (select 'wh_' || lpad((substring(e.account_id from 2)::integer * $2
    + (e.seq + copy) % $2)::text, 8, '0') as id) w
cross join lateral (select case when e.seq > $3 then 'scheduled' when w.id = 'wh_00000000' or e.seq % 1000 = 0
    then 'exhausted' else 'delivered' end as state) s
"""

_QUEUE = """
insert into queue (webhook_id, delivery_id, event_seq, due_at)
select webhook_id, id, event_seq, created_at from deliveries where state = 'scheduled'
"""

_ATTEMPTS = """
insert into attempts (delivery_id, number, started_at, duration_ms, status, error, excerpt, dns_ms, first_byte_ms)
select id, 1, created_at, id % 900, case when state = 'delivered' then 200 else 500 end, null, 'said', 1, 50
from deliveries where attempts = 1
"""

_FAILING = """
update webhooks set failures = 40, first_failure_at = db_now(), last_failure_at = db_now() where id = 'wh_00000000'
"""


async def _lay_down(database: Database, scale: float) -> int:
    events = int(EVENTS * scale)
    for account in range(ACCOUNTS):
        urls = [f"https://receiver.example/{number}" for number in range(WEBHOOKS_EACH)]
        await add_webhooks(database, urls, f"a{account}", first=account * WEBHOOKS_EACH)
    async with without_limit(database) as connection:
        for statement, *arguments in (
            (_BARE,),
            (_VAULTS,),
            (_EVENTS, events, ACCOUNTS),
            (_DELIVERIES, TO_EACH, WEBHOOKS_EACH, events * 95 // 100),
            (_QUEUE,),
            (_ATTEMPTS,),
            (_FAILING,),
            ("vacuum analyze",),
            ("checkpoint",),
        ):
            await connection.execute(statement, *arguments, timeout=2 * PREPARATION_S)
    return events


async def _paths(database: Database, events: int) -> dict[str, str]:
    """What is asked for: pages of the navigation, and searches of what is newest, oldest and not there."""
    async with database.statement() as connection:
        row = await connection.fetchrow(
            "select account_id, id, vault_id, block_number from events where seq = $1", events // 2
        )
        since = await connection.fetchval(
            "select to_char(to_timestamp(created_at_ms / 1000) at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS')"
            " from events where seq = $1",
            events // 2,
        )
    tx = row["id"].rpartition("_")[2].lower()
    return {
        "overview": "/",
        "events": "/events",
        "events_of_a_type": "/events?type=validator_exited",
        "events_of_an_account": "/events?account=a19",
        "events_of_a_vault": "/events?account=a0&vault=v3",
        "events_since": f"/events?since={since}&until={since[:-2]}59",
        "events_by_id": f"/events?id={row['id']}",
        "events_by_beginning": "/events?id=funding_received_a0_0XFFFF",
        "events_of_a_block": f"/events?block={row['block_number']}",
        "events_of_a_transaction": f"/events?tx={tx}",
        "events_deep": f"/events?before={events // 2}",
        "event": event_url(row["account_id"], row["id"]),
        "webhooks": "/webhooks",
        "webhooks_failing": "/webhooks?state=failing",
        "webhook": webhook_url("wh_00000007"),
        "webhook_failing": webhook_url("wh_00000000"),
        "webhook_delivered": webhook_url("wh_00000001") + "?state=delivered",
        "webhook_exhausted": webhook_url("wh_00000000") + "?state=exhausted",
        "vaults": "/vaults",
        "account": account_url("a0"),
        "vault": vault_url("a0", "v1"),
        **{name: f"/{name}" for name in ("replay", "streams", "nodes", "reports", "audit", "configuration")},
    }


async def _first_byte_ms(session: aiohttp.ClientSession, url: str) -> float:
    begin = time.perf_counter()
    async with session.get(url, allow_redirects=False) as answer:
        await answer.content.read(1)
        took_s = time.perf_counter() - begin
        await answer.read()
        if answer.status != 200:
            raise SystemExit(f"{url} is answered with {answer.status}")
    return took_s * 1000


async def _visit(database: Database, paths: dict[str, str]) -> dict[str, list[float]]:
    """Ask for every page `ROUNDS` times; the time until the first byte of each answer."""
    settings = config.given({"network": "devnet", "chain_id": 1337, "console": {"port": 0}}, "bench")
    options, stop = console_options(settings), asyncio.Event()
    listener = bind(options)
    url = url_of(listener, options)
    sources = partial(open_sources, settings, database, ServiceClock(await database.now()))
    context = ConsoleContext(database, settings, KEY, time.time, stop, sources=sources)
    serving = asyncio.create_task(serve(build(context), listener, options, time.time, stop))
    took_ms: dict[str, list[float]] = {name: [] for name in paths}
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        took_ms["floor"] = [await _first_byte_ms(session, f"{url}/login") for _ in range(ROUNDS)]
        code = (await new_link(database, url)).url.partition("#")[2]
        async with session.post(f"{url}/login", data={"code": code}, headers={"Origin": url}) as answer:
            if answer.status != 200:
                raise SystemExit(f"the login is answered with {answer.status}")
        for _ in range(ROUNDS):
            for name, path in paths.items():
                took_ms[name].append(await _first_byte_ms(session, url + path))
    stop.set()
    await serving
    return took_ms


def _p95(took_ms: list[float]) -> float:
    return sorted(took_ms)[len(took_ms) * 95 // 100]


async def _measure(target: dict[str, Any], scale: float) -> dict[str, Any]:
    database = await open_database(target, schema="b_console", pool_size=4)
    begin = time.perf_counter()
    events = await _lay_down(database, scale)
    laid_down_s = time.perf_counter() - begin
    took_ms = await _visit(database, await _paths(database, events))
    floor_ms = _p95(took_ms.pop("floor"))
    status_s = []
    for _ in range(5):
        begin = time.perf_counter()
        overview = await status.read(database)
        status_s.append(time.perf_counter() - begin)
    await database.close()
    slowest = max(map(_p95, took_ms.values()))
    return {
        "bench": "console",
        "figures": {
            **{f"{name}_p95_ms": round(_p95(each), 1) for name, each in took_ms.items()},
            "slowest_p95_ms": round(slowest, 1),
            "worst_ms": round(max(map(max, took_ms.values())), 1),
            "status_s": round(max(status_s), 3),
            "events": overview.events,
            "deliveries": sum(overview.deliveries.values()),
            "laid_down_s": round(laid_down_s, 1),
        },
        "floor": {"login_p95_ms": round(floor_ms, 1)},
        "ratio": {"floor_x": round(slowest / floor_ms, 1)},
        "goal": {"slowest_p95_ms": GOAL_MS, "status_s": STATUS_GOAL_S},
        "ok": slowest <= GOAL_MS and max(status_s) <= STATUS_GOAL_S,
    }


if __name__ == "__main__":
    description = "Measures the console's pages with millions of events."
    sys.exit(run_at_scale(_measure, description, "events", sys.argv[1:]))
