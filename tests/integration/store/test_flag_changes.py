"""A webhook's flags hold at once; its pending deliveries follow in batches that block nobody (rules D9 and D14)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from store_factories import (
    assert_ledger,
    carry_out,
    commit,
    funding,
    own_database,
    rows,
    settlement,
    some_deliveries,
    states,
    target_of,
    until_waiting,
    values,
    webhook,
)
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.store import flag_changes, gauges, history, status
from vaultevents.store.deliveries import ClaimRequest, Delivery, claim, settle
from vaultevents.store.flag_changes import advance, follow_flags
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.registry import lock_registry
from vaultevents.store.webhooks import StoredWebhook, WebhookUnknown, amend_webhook, erase_webhook, find_webhook

pytestmark = pytest.mark.integration

WITHIN_S = 5.0
"""Less than the server lets a statement wait for a lock."""


async def amend(database: Database, webhook_id: str, **fields: Any) -> StoredWebhook:
    async with asyncio.timeout(WITHIN_S), database.of_account("acme") as connection:
        await lock_registry(connection)
        return await amend_webhook(connection, "acme", webhook_id, fields)


async def delete(database: Database, webhook_id: str) -> None:
    async with asyncio.timeout(WITHIN_S), database.of_account("acme") as connection:
        await lock_registry(connection)
        await erase_webhook(connection, "acme", webhook_id)


async def claimed(database: Database) -> tuple[Delivery, ...]:
    return (await claim(database, ClaimRequest(100, uuid4(), 60.0, 1000))).deliveries


async def stored(database: Database) -> dict[str, int]:
    """The states as they are now, whatever is still to follow."""
    found = await rows(database, "select state, count(*)::int as n from deliveries group by state")
    return {row["state"]: row["n"] for row in found}


async def pending(database: Database, webhook_id: str) -> tuple[int, int]:
    """What the owner sees of what is pending: scheduled and parked."""
    async with database.reading("acme") as connection:
        health = await history.health(connection, "acme", webhook_id)
    return health.deliveries["scheduled"], health.deliveries["parked"]


async def test_off_and_on_hold_at_once_and_what_is_pending_follows(any_database: Database) -> None:
    _, made = await some_deliveries(any_database, 6)
    await amend(any_database, made.id, active=False)
    assert (await claimed(any_database), await stored(any_database)) == ((), {"scheduled": 6})
    assert await pending(any_database, made.id) == (0, 6)
    async with any_database.reading("acme") as connection:
        page = await history.deliveries(connection, "acme", made.id, None, 10, None)
    assert {facts.next_attempt_at for facts in page} == {None}
    overview, reported = await status.read(any_database), await gauges.read(any_database)
    assert (overview.flag_changes, reported.flag_changes) == (1, 1)
    assert overview.oldest_flag_change_s is not None
    await assert_ledger(any_database)
    await carry_out(any_database)
    assert await stored(any_database) == {"parked": 6}
    assert await pending(any_database, made.id) == (0, 6)
    overview, reported = await status.read(any_database), await gauges.read(any_database)
    assert (overview.flag_changes, overview.oldest_flag_change_s, reported.flag_changes) == (0, None, 0)
    await assert_ledger(any_database)
    await amend(any_database, made.id, active=True)
    assert (await stored(any_database), await pending(any_database, made.id)) == ({"parked": 6}, (6, 0))
    await assert_ledger(any_database)
    await carry_out(any_database)
    assert len(await claimed(any_database)) == 6


async def test_a_delete_is_final_at_once_and_what_is_pending_follows(any_database: Database) -> None:
    _, made = await some_deliveries(any_database, 6)
    await amend(any_database, made.id, active=False)
    await advance(any_database, {}, batch=2)
    await delete(any_database, made.id)
    async with any_database.reading("acme") as connection:
        with pytest.raises(WebhookUnknown):
            await find_webhook(connection, "acme", made.id)
    assert await claimed(any_database) == ()
    assert await values(any_database, "select count(*)::int from webhook_secrets") == [0]
    assert await stored(any_database) == {"scheduled": 4, "parked": 2}
    assert (await status.read(any_database)).oldest_pending_s is None
    await assert_ledger(any_database)
    await carry_out(any_database)
    assert await stored(any_database) == {"cancelled": 6}
    assert await values(any_database, "select count(*)::int from queue") == [0]
    await assert_ledger(any_database)


async def test_nobody_waits_for_pending_deliveries_at_the_registry_lock(any_database: Database) -> None:
    """Each change ends although every pending delivery is locked, and a batch waits for them meanwhile."""
    _, made = await some_deliveries(any_database, 3)
    other = await webhook(any_database)
    async with any_database.transaction() as held:
        await held.execute("select 1 from deliveries for update")
        await amend(any_database, made.id, active=False)
        following = asyncio.create_task(carry_out(any_database))
        await until_waiting(any_database, 1)
        await amend(any_database, other.id, url="https://elsewhere.example/hook")
        await amend(any_database, made.id, active=True)
        await amend(any_database, made.id, active=False)
        await delete(any_database, other.id)
    await following
    assert await states(any_database) == {"parked": 3}
    await assert_ledger(any_database)


@pytest.mark.parametrize("seed", range(4))
async def test_the_last_flags_win_whatever_the_order(database: Database, seed: int) -> None:
    """Changes, batches, claims, attempts and new events in any order: the ledger always adds up."""
    chance = random.Random(seed)
    outbox, made = await some_deliveries(database, 7)
    on, number = True, 100
    passes: list[dict[str, flag_changes.Pass]] = [{}, {}]
    in_flight: list[Delivery] = []
    for _ in range(40):
        match chance.choice(("flip", "batch", "batch", "claim", "settle", "commit")):
            case "flip":
                on = not on
                await amend(database, made.id, active=on)
            case "batch":  # by one of two processes
                await advance(database, chance.choice(passes), batch=chance.randint(1, 4))
            case "claim":
                found = await claimed(database)
                assert on or not found
                in_flight += found
            case "settle" if in_flight:
                delivery = in_flight.pop()
                retried = settlement(delivery, "scheduled", 500, after_s=0.0)
                outcomes = (settlement(delivery), retried, settlement(delivery, "exhausted", 500))
                await settle(database, [chance.choice(outcomes)])
            case "commit":
                number += 1
                await commit(outbox, funding(number))
        await assert_ledger(database)
    await carry_out(database)
    assert ("parked" if on else "scheduled") not in await stored(database)
    await assert_ledger(database)
    if on:
        waiting = await values(database, "select count(*)::int from queue where due_at > db_now() + interval '1 s'")
        assert waiting == [0]


async def test_a_quick_off_and_on_makes_retries_due_and_leaves_later_failures_their_pause(
    any_database: Database,
) -> None:
    _, made = await some_deliveries(any_database, 2)
    early, late = await claimed(any_database)
    await settle(any_database, [settlement(early, "scheduled", 500, after_s=3600.0)])
    await amend(any_database, made.id, active=False)
    await amend(any_database, made.id, active=True)
    failed = settlement(late, "scheduled", 500, after_s=3600.0)
    await settle(any_database, [msgspec.structs.replace(failed, started_at=await any_database.now())])
    await carry_out(any_database)
    assert [delivery.id for delivery in await claimed(any_database)] == [early.id]


async def test_a_deep_queue_delays_no_other_webhook(any_database: Database) -> None:
    outbox, deep = await some_deliveries(any_database, 9)
    shallow = await webhook(any_database)
    await commit(outbox, funding(50))
    for made in (deep, shallow):
        await amend(any_database, made.id, active=False)
    await advance(any_database, {}, batch=2)
    left = await values(any_database, "select distinct webhook_id from flag_changes")
    assert left == [deep.id]


async def test_a_batch_that_is_cut_off_leaves_nothing_half_done(any_database: Database) -> None:
    _, made = await some_deliveries(any_database, 4)
    await amend(any_database, made.id, active=False)
    async with any_database.transaction() as held:
        await held.execute("select 1 from deliveries where id = (select max(id) from deliveries) for update")
        following = asyncio.create_task(carry_out(any_database))
        await until_waiting(any_database, 1)
        await held.execute(END_WAITING)
        with pytest.raises(DatabaseUnavailable):
            await following
    assert await stored(any_database) == {"scheduled": 4}
    await assert_ledger(any_database)
    await asyncio.gather(*(carry_out(any_database) for _ in range(3)))
    await carry_out(any_database)
    assert await stored(any_database) == {"parked": 4}
    await assert_ledger(any_database)


SLOW = """
import asyncio, json, sys
from vaultevents.store.flag_changes import advance
from vaultevents.store.pool import open_database
async def main():
    database, passes = await open_database(json.loads(sys.argv[1]), schema=sys.argv[2]), {}
    while await advance(database, passes, batch=1):
        await asyncio.sleep(0.02)
asyncio.run(main())
"""


async def test_what_a_killed_process_left_is_done_by_another(postgres18: ServerAddress, database: Database) -> None:
    _, made = await some_deliveries(database, 200)
    await amend(database, made.id, active=False)
    target, schema = json.dumps(await target_of(postgres18, database)), "vaultevents"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SLOW, target, schema)
    try:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while (await stored(database)).get("parked", 0) <= 3:
                await asyncio.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    left = await stored(database)
    assert left["scheduled"] > 0
    await assert_ledger(database)
    assert (await status.read(database)).flag_changes == 1
    assert await states(database) == {"parked": 200}
    await assert_ledger(database)


END_WAITING = """
select pg_terminate_backend(pid) from pg_stat_activity
where datname = current_database() and pid in (select pid from pg_locks where not granted)
"""


LISTENING = """
select count(*)::int from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and query ilike '%listen%vaultevents_flags%'
"""


async def test_the_service_is_woken_by_a_change(postgres18: ServerAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flag_changes, "LOOK_EVERY_S", 3600.0)
    async with own_database(postgres18) as database:
        _, made = await some_deliveries(database, 3)
        following = asyncio.create_task(follow_flags(database))
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while await values(database, LISTENING) == [0]:
                    await asyncio.sleep(0.01)
                await amend(database, made.id, active=False)
                while await stored(database) != {"parked": 3}:
                    await asyncio.sleep(0.01)
        finally:
            following.cancel()
