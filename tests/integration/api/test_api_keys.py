"""API keys: hashed under a key that outlives master keys, found in a ring that learns of changes within a second."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import timedelta

import pytest

from step_up_factories import fresh_bytes
from store_factories import KEY, account, own_database, rows, shift_clock, target_of, values
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.errors import DatabaseUnavailable, InputError
from vaultevents.core.sealing import HashKey, MasterKey, SealBroken, keyed_hash
from vaultevents.store import apikeys
from vaultevents.store.apikeys import ApiKey, KeyRing
from vaultevents.store.pool import Database, open_database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.rotation import sealed_key_ids

pytestmark = pytest.mark.integration

PEPPER = HashKey(bytes(32))


def hashed(key_id: str) -> bytes:
    """The hash of the secret that belongs to `key_id`."""
    return keyed_hash(PEPPER, f"secret of {key_id}")


async def key(
    database: Database,
    key_id: str = "k1",
    *,
    account_id: str = "acme",
    role: apikeys.Role = "manage",
    allowed: tuple[str, ...] | None = None,
) -> ApiKey:
    der = f"public key of {key_id}".encode()
    return await apikeys.add_key(
        database, key_id, account_id, key_id.title(), role, hashed(key_id), allowed, der, f"SHA256:{key_id}"
    )


class Stopwatch:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def found(ring: KeyRing, key_id: str = "k1") -> bool:
    """Whether a request with this key would be let in."""
    await ring.fresh()
    return ring.find(hashed(key_id)) is not None


async def queries(database: Database, table: str = "key_ring") -> int:
    """How often a table was read so far, in a database with one connection: sessions report with delay."""
    await values(database, "select pg_stat_force_next_flush()")
    (number,) = await values(
        database, "select seq_scan + coalesce(idx_scan, 0) from pg_stat_user_tables where relname = $1", table
    )
    assert isinstance(number, int)
    return number


async def test_everyone_gets_the_hash_key_that_was_stored_first(any_database: Database) -> None:
    offers = [fresh_bytes(32) for _ in range(8)]
    got = await asyncio.gather(*(apikeys.hash_key(any_database, KEY, offer, fresh_bytes(12)) for offer in offers))
    assert len({keyed_hash(one, "secret") for one in got}) == 1
    assert keyed_hash(got[0], "secret") in {keyed_hash(HashKey(offer), "secret") for offer in offers}
    (sealed,) = await values(any_database, "select sealed from hash_key")
    assert not any(offer in sealed or offer.hex().encode() in sealed for offer in offers)
    assert await sealed_key_ids(any_database) == {KEY.id}


async def test_a_hash_key_that_was_altered_or_sealed_otherwise_is_not_replaced(any_database: Database) -> None:
    await apikeys.hash_key(any_database, KEY, fresh_bytes(32), fresh_bytes(12))
    before = await rows(any_database, "select * from hash_key")
    with pytest.raises(SealBroken, match="hash key does not open"):
        await apikeys.hash_key(any_database, MasterKey(fresh_bytes(32)), fresh_bytes(32), fresh_bytes(12))
    assert await rows(any_database, "select * from hash_key") == before


async def test_keys_are_stored_as_they_were_given_and_listed_by_account(any_database: Database) -> None:
    await account(any_database)
    await account(any_database, "umbra")
    one = await key(any_database, "k1", role="read", allowed=("192.0.2.0/24", "2001:db8::/32"))
    two = await key(any_database, "k2", account_id="umbra")
    assert (one.id, one.account_id, one.name, one.role) == ("k1", "acme", "K1", "read")
    assert (one.allowed, one.revoked_at, two.allowed) == (("192.0.2.0/24", "2001:db8::/32"), None, None)
    (public,) = one.public_keys
    assert (public.fingerprint, public.der, public.valid_until) == ("SHA256:k1", b"public key of k1", None)
    assert await apikeys.list_keys(any_database, None) == [one, two]
    assert await apikeys.list_keys(any_database, "umbra") == [two]
    assert await apikeys.list_keys(any_database, "nobody") == []
    with pytest.raises(InputError, match="there is no account 'nobody'"):
        await key(any_database, "k3", account_id="nobody")
    assert [each.id for each in await apikeys.list_keys(any_database, None)] == ["k1", "k2"]


async def test_a_key_is_revoked_once_and_stays_listed(any_database: Database) -> None:
    await account(any_database)
    await key(any_database)
    revoked = await apikeys.revoke_key(any_database, "k1")
    assert revoked.revoked_at is not None
    assert await apikeys.list_keys(any_database, "acme") == [revoked]
    for key_id in ("k1", "k9"):
        for action in (
            apikeys.revoke_key(any_database, key_id),
            apikeys.rotate_public_key(any_database, key_id, b"new", "SHA256:new", 60),
        ):
            with pytest.raises(InputError, match=f"no API key '{key_id}' that is not revoked: 'vaultevents key list'"):
                await action


async def test_a_public_key_takes_over_with_an_overlap_that_a_later_one_only_shortens(any_database: Database) -> None:
    await account(any_database)
    await key(any_database)
    ring = KeyRing(any_database, max_age_s=0)
    await apikeys.rotate_public_key(any_database, "k1", b"second", "SHA256:second", 3600)
    await apikeys.rotate_public_key(any_database, "k1", b"third", "SHA256:third", 86_400)
    last = await apikeys.rotate_public_key(any_database, "k1", b"fourth", "SHA256:fourth", 0)
    now = await any_database.now()
    await ring.fresh()
    assert ring.find(hashed("k1")) == last
    assert [public.der for public in last.public_keys] == [b"public key of k1", b"second", b"third", b"fourth"]
    *others, newest = last.public_keys
    assert newest.valid_until is None
    assert all(public.valid_until is not None and public.valid_until <= now for public in others)
    with pytest.raises(InputError, match="has the public key SHA256:second already: make a new pair"):
        await apikeys.rotate_public_key(any_database, "k1", b"second", "SHA256:second", 60)


async def test_an_overlap_counts_from_the_rotation(any_database: Database) -> None:
    await account(any_database)
    await key(any_database)
    now = await any_database.now()
    rotated = await apikeys.rotate_public_key(any_database, "k1", b"second", "SHA256:second", 3600)
    until = rotated.public_keys[0].valid_until
    assert until is not None
    assert timedelta(seconds=3600) <= until - now < timedelta(seconds=3660)
    await shift_clock(any_database, 7200)
    again = await apikeys.rotate_public_key(any_database, "k1", b"third", "SHA256:third", 3600)
    assert again.public_keys[0].valid_until == until, "what has ended does not come back"


async def test_a_revoked_key_is_gone_from_every_ring_within_a_second(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    await account(any_database)
    await key(any_database)
    other = await open_database(await target_of(any_postgres, any_database))
    watch = Stopwatch()
    rings = [KeyRing(any_database, monotonic=watch), KeyRing(other, monotonic=watch)]
    assert [await found(ring) for ring in rings] == [True, True]
    await apikeys.revoke_key(any_database, "k1")
    assert [await found(ring) for ring in rings] == [True, True], "nobody asks the database for each request"
    watch.now_s += 1.0
    assert [await found(ring) for ring in rings] == [False, False]
    await key(any_database, "k2")
    watch.now_s += 1.0
    assert [await found(ring, "k2") for ring in rings] == [True, True]
    await other.close()


async def test_a_thousand_requests_at_once_ask_once_in_half_a_second(any_postgres: ServerAddress) -> None:
    async with own_database(any_postgres, pool_size=1) as database:
        await account(database)
        await key(database)
        watch = Stopwatch()
        ring = KeyRing(database, monotonic=watch)
        for now_s, asked in ((0.0, 1), (0.49, 0), (0.5, 1), (7.0, 1)):
            before, watch.now_s = await queries(database), now_s
            assert all(await asyncio.gather(*(found(ring) for _ in range(1000))))
            assert await queries(database) - before == asked, now_s


async def test_keys_are_loaded_again_only_when_one_changed(any_postgres: ServerAddress) -> None:
    async with own_database(any_postgres, pool_size=1) as database:
        await account(database)
        await key(database)
        ring = KeyRing(database, max_age_s=0)
        assert await found(ring)
        before = await queries(database, "api_keys")
        assert [await found(ring) for _ in range(10)] == [True] * 10
        assert await queries(database, "api_keys") == before
        await key(database, "k2")
        assert await found(ring, "k2")


async def test_without_the_database_nobody_is_let_in_and_all_who_wait_hear_it_at_once(
    any_postgres: ServerAddress,
) -> None:
    async with own_database(any_postgres) as database:
        await account(database)
        await key(database)
        watch = Stopwatch()
        ring = KeyRing(database, monotonic=watch)
        assert await found(ring)
        watch.now_s = 0.4
        async with database.transaction() as connection, asyncio.timeout(WAIT_TIMEOUT_S):
            await connection.execute("lock table key_ring in access exclusive mode")
            assert await found(ring), "it was asked 0.4 s ago"
            watch.now_s = 0.6
            waiting = [asyncio.create_task(found(ring)) for _ in range(100)]
            while not (stuck := await connection.fetch(_STUCK)):
                await asyncio.sleep(0.005)
            await connection.execute("select pg_terminate_backend($1)", stuck[0]["pid"])
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {DatabaseUnavailable}
        assert await found(ring), "and it is asked again as soon as it is there"


_STUCK = """
select pid from pg_locks where relation = 'key_ring'::regclass and not granted
    and database = (select oid from pg_database where datname = current_database())
"""


async def test_a_caller_who_gives_up_takes_nobody_with_it(any_postgres: ServerAddress) -> None:
    async with own_database(any_postgres) as database:
        await account(database)
        await key(database)
        ring = KeyRing(database)
        async with database.transaction() as connection, asyncio.timeout(WAIT_TIMEOUT_S):
            await connection.execute("lock table key_ring in access exclusive mode")
            first, second = (asyncio.create_task(found(ring)) for _ in range(2))
            while not await connection.fetch(_STUCK):
                await asyncio.sleep(0.005)
            first.cancel()
        assert await second
        assert first.cancelled()


async def test_the_stored_hash_of_a_key_reveals_nothing_of_it(any_database: Database) -> None:
    await account(any_database)
    await key(any_database)
    (stored,) = await values(any_database, "select hash from api_keys")
    assert stored == hashed("k1")
    assert stored != hashlib.sha256(b"secret of k1").digest(), "the database alone does not allow to try guesses"
