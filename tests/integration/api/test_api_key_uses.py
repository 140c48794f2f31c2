"""When API keys were last used: noted in memory by the API, written now and then, and never at a request's expense."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from api_fixtures import FrozenClock, running_api
from database_proxy import DatabaseProxy
from store_factories import account, change, own_database, rows, values
from timeouts import WAIT_TIMEOUT_S
from vaultevents.store import apikeys, key_uses
from vaultevents.store.key_uses import KeyUses, last_uses
from vaultevents.store.pool import Database, open_database
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.integration

NOW_S = 1_800_000_000.0
NOW = datetime.fromtimestamp(NOW_S, UTC)


async def keys(database: Database, *key_ids: str, account_id: str = "acme") -> None:
    """Add an account with these keys."""
    await account(database, account_id)
    for key_id in key_ids:
        hashed = key_id.encode().ljust(32, b".")
        await apikeys.add_key(database, key_id, account_id, key_id, "read", hashed, None, b"der", f"SHA256:{key_id}")


async def test_requests_that_are_accepted_are_uses_of_their_key(database: Database) -> None:
    clock = FrozenClock(NOW_S)
    async with running_api(database, clock=clock) as api:
        customer = await api.customer()
        reader = await api.another_key("acme", customer.seed, role="read")
        target = "/v1/account"
        token = api.token(customer, target)
        assert (await api.call(customer, "GET", target, token=token[:-4] + "AAAA")).status == 401
        assert (await api.call(reader, "POST", "/v1/account/webhooks", {"url": "https://x.example/"})).status == 403
        await api.ring.uses.save()
        assert await last_uses(database, None) == {}, "what is refused is no use"
        assert (await api.call(customer, "GET", target, token=token)).status == 200
        assert await rows(database, "select * from api_key_uses") == [], "no request waits for it to be written"
        await api.ring.uses.save()
        assert await last_uses(database, "acme") == {customer.key_id: NOW}
        clock.ahead_s = 5.0
        for _ in range(3):
            assert (await api.call(customer, "GET", target)).status == 200
        assert (await api.call(reader, "GET", target)).status == 200
        await api.ring.uses.save()
        later = NOW + timedelta(seconds=5)
        assert await last_uses(database, None) == {customer.key_id: later, reader.key_id: later}
        await change(database, "delete from api_key_uses")
        await api.ring.uses.save()
        assert await last_uses(database, None) == {}, "what is written is not written again"


async def test_the_latest_use_of_all_processes_counts(database: Database) -> None:
    await keys(database, "k1", "k2")
    await keys(database, "k3", account_id="umbra")
    ahead, behind = KeyUses(database), KeyUses(database)
    ahead.note("k1", NOW_S + 1)
    behind.note("k1", NOW_S)
    behind.note("k3", NOW_S)
    behind.note("unknown", NOW_S)  # of a copy of the database that was ahead of this one
    await ahead.save()
    await behind.save()
    assert await last_uses(database, "acme") == {"k1": NOW + timedelta(seconds=1)}
    assert await last_uses(database, None) == {"k1": NOW + timedelta(seconds=1), "k3": NOW}


async def test_neither_caches_nor_digests_of_keys_change(database: Database) -> None:
    await keys(database, "k1")
    before = await values(database, "select version from key_ring"), await apikeys.list_keys(database, None)
    uses = KeyUses(database)
    uses.note("k1", NOW_S)
    await uses.save()
    assert await last_uses(database, None) == {"k1": NOW}
    assert (await values(database, "select version from key_ring"), await apikeys.list_keys(database, None)) == before


async def test_uses_are_kept_while_the_database_is_away(
    postgres18: ServerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with own_database(postgres18) as direct, DatabaseProxy(postgres18) as proxy:
        await keys(direct, "k1", "k2")
        (name,) = await values(direct, "select current_database()::text")
        behind = await open_database({**proxy.connect_kwargs(), "database": name})
        try:
            uses = KeyUses(behind)
            uses.note("k1", NOW_S)
            proxy.network = "refusing"
            proxy.cut()
            await uses.save()
            uses.note("k2", NOW_S)
            proxy.network = "up"
            await uses.save()
            assert await last_uses(direct, None) == {"k1": NOW, "k2": NOW}

            monkeypatch.setattr(key_uses, "SAVED_WITHIN_S", 0.05)
            uses.note("k1", NOW_S + 1)
            async with direct.transaction() as connection:
                await connection.execute("lock table api_key_uses in access exclusive mode")
                await uses.save()
                uses.note("k1", NOW_S + 2)
            monkeypatch.undo()
            await uses.save()
            assert (await last_uses(direct, None))["k1"] == NOW + timedelta(seconds=2)
        finally:
            await behind.close()


async def test_uses_are_saved_at_intervals(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_uses, "SAVE_S", 0.01)
    await keys(database, "k1")
    uses = KeyUses(database)
    keeping = asyncio.create_task(uses.keep())
    for seconds in (0, 1):
        uses.note("k1", NOW_S + seconds)
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while await last_uses(database, None) != {"k1": NOW + timedelta(seconds=seconds)}:
                await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
