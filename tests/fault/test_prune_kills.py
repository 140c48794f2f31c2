"""`prune` is killed with -9 again and again, beside a daemon that prunes too: the ledger adds up at every moment."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from command_line import Place, asking, place
from timeouts import WAIT_TIMEOUT_S
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress

pytestmark = pytest.mark.fault

NUMBER = 30_000
OLD = """
with happened as (
    insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
        filter_revision)
    select w.account_id, 'old_' || n, 'v1', 'funding_received', n, n, 1, '{}', false, r.filter_revision
    from (select id, account_id from webhooks order by id limit 1) w, registry r, generate_series(1, $1::integer) n
    returning seq, account_id
), made as (
    insert into deliveries (event_seq, webhook_id, state, attempts, created_at, finished_at)
    select h.seq, w.id, 'delivered', 1, now() - interval '100 days', now() - interval '100 days'
    from happened h join webhooks w using (account_id) returning id
)
insert into attempts (delivery_id, number, started_at, duration_ms, status, excerpt)
select id, 1, now() - interval '100 days', 1, 200, '' from made
"""
LEFT = "select count(*)::int from deliveries where finished_at < now() - interval '90 days'"


async def proof(here: Place) -> dict[str, Any]:
    reported = (await here.run("audit", "deliveries", "--json")).ok().json
    assert reported["ok"]
    return {"states": reported["states"], "accounts": reported["accounts"]}


async def left(server: ServerAddress, schema: str) -> int:
    async with asking(server, schema) as connection:
        found: int = await connection.fetchval(LEFT)
    return found


async def below(connection: asyncpg.Connection, number: int) -> None:
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while await connection.fetchval(LEFT) >= number:
            await asyncio.sleep(0.005)


async def test_a_killed_pruning_is_taken_up_again_and_nothing_is_missed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data_dir = tmp_path_factory.mktemp("data")
    with EmbeddedPostgres(data_dir / "postgres") as server:
        async with place(tmp_path, data_dir, Simulation(7)) as here:
            await here.subscribed()
            async with asking(server, here.schema) as connection:
                await connection.execute(OLD, NUMBER)
                before = await proof(here)
                counted = (await here.run("prune", "--dry-run", "--json")).ok().json
                assert counted == {
                    "dry_run": True,
                    "estimated": True,
                    "deliveries": NUMBER,
                    "attempts": NUMBER,
                    "resends": 0,
                }
                for share in (5, 3):
                    running = await here.shell.start("prune", "--older-than", "90d")
                    await below(connection, NUMBER * share // 6)
                    await running.end(signal.SIGKILL)
                    assert await connection.fetchval(LEFT) > 0
                    assert await proof(here) == before
                here.configure(retention="keep_days = 90")
                daemon = await here.shell.start("run", "--only", "watch")
                await daemon.said('"started"')
                last = (await here.run("prune", "--json")).ok().json
                await below(connection, 1)
                (await daemon.end()).ok()
                assert 0 < last["deliveries"] < NUMBER // 2
                assert await connection.fetchval("select count(*)::int from attempts") == 0
            assert await proof(here) == before


async def test_a_daemon_prunes_by_itself_only_when_it_is_configured_to(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data_dir = tmp_path_factory.mktemp("data")
    with EmbeddedPostgres(data_dir / "postgres") as server:
        async with place(tmp_path, data_dir, Simulation(7)) as here:
            await here.subscribed()
            async with asking(server, here.schema) as connection:
                await connection.execute(OLD, 50)
            keeping = await here.shell.start("run", "--only", "watch")
            await keeping.said('"started"')
            await asyncio.sleep(0.5)
            (await keeping.end()).ok()
            assert await left(server, here.schema) == 50
            here.configure(retention="keep_days = 90")
            pruning = await here.shell.start("run", "--only", "watch")
            await pruning.said('"pruned"')
            (await pruning.end()).ok()
            assert await left(server, here.schema) == 0
            (await here.run("audit", "deliveries")).ok()
            refused = await here.run("prune", "--older-than", "3h")
            assert refused.error == "--older-than '3h' is not a number of days: write it as in 90d"
            short = await here.run("prune", "--older-than", "0d")
            assert short.error == "what finished less than 1 day ago is not pruned: give a longer time"
