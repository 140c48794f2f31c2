"""Accounts and vaults: who may register what, for which blocks, and what is read for it (rules E9, E12 and C9)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from store_factories import account, address, claimed, commit, events_of, funding, live, live_at, rows, values, vault
from vaultevents.core.errors import InputError
from vaultevents.core.events import project
from vaultevents.core.registry import Vault, VaultSpan
from vaultevents.core.spans import Span
from vaultevents.store import accounts
from vaultevents.store.accounts import NewVault, Registered, remove_vault
from vaultevents.store.cursors import open_stream
from vaultevents.store.outbox import Lost, Outbox
from vaultevents.store.pool import Database
from vaultevents.store.registry import current_registry

pytestmark = pytest.mark.integration


async def refused(attempt: Awaitable[object], why: str, database: Database) -> None:
    """The attempt is an `InputError` that says `why`, and nothing changed."""
    before = await everything(database)
    with pytest.raises(InputError, match=why):
        await attempt
    assert await everything(database) == before


async def everything(database: Database) -> list[object]:
    names = ("accounts", "vaults", "vault_spans", "cursors", "registry")
    return [await rows(database, f"select * from {name} order by 1, 2") for name in names]


async def version(database: Database) -> int:
    return (await current_registry(database)).version


async def stored(database: Database, vault_id: str = "v1", account_id: str = "acme") -> Vault:
    found = await current_registry(database)
    return next(one for one in found.vaults if (one.account_id, one.id) == (account_id, vault_id))


async def open_backfills(database: Database) -> list[Span]:
    return [Span(backfill.position + 1, backfill.stop or 0) for backfill in await Outbox(database).backfills("logs")]


async def test_accounts_have_an_id_of_their_own_for_ever(any_database: Database) -> None:
    for account_id in ("b-2", "Acme", "a" * 64):
        await accounts.add_account(any_database, account_id, "One & Only")
    assert [one.id for one in await accounts.accounts(any_database)] == ["Acme", "a" * 64, "b-2"]
    await refused(accounts.add_account(any_database, "Acme", "Again"), "already an account 'Acme'", any_database)
    for wrong in ("", "a_b", "a.b", "ä", "a" * 65, "a b", "a\n"):
        await refused(accounts.add_account(any_database, wrong, "x"), "cannot be an account id", any_database)


async def test_a_vault_is_registered_from_a_block_on(any_database: Database) -> None:
    await account(any_database)
    done = await vault(any_database, queue="q1", first_block=7)
    assert done == Registered(Vault("acme", "v1", address("v1"), address("q1"), (VaultSpan(7),)), ())
    assert await stored(any_database) == done.vault
    await refused(vault(any_database, "v_2"), "cannot be a vault id", any_database)
    await refused(vault(any_database, "v2", account_id="umbra"), "there is no account 'umbra'", any_database)


async def test_ids_and_addresses_occur_once_in_an_account(any_database: Database) -> None:
    await account(any_database)
    await vault(any_database, "v1", queue="q1")
    await refused(vault(any_database, "v1", at="elsewhere"), "which never changes", any_database)
    await refused(vault(any_database, "v1", queue="q2"), "withdrawal queue .* never changes", any_database)
    await refused(vault(any_database, "v2", at="v1"), "already registered in this account, as vault 'v1'", any_database)
    await refused(vault(any_database, "v2", queue="q1"), "already the withdrawal queue of vault 'v1'", any_database)


async def test_many_vaults_are_registered_together_once_and_read_again_together(any_database: Database) -> None:
    await account(any_database)
    await vault(any_database, "own", at="v2", queue="q2", first_block=101)
    await live_at(any_database, 100)
    wanted = [
        NewVault("a", address("v1"), address("q1"), 40),
        NewVault("b", address("v2"), None, 50),  # has the account as 'own'
        NewVault("c", address("v3"), None, 60),
    ]
    assert await accounts.add_vaults(any_database, "acme", wanted) == [Span(40, 100)]
    assert await open_backfills(any_database) == [Span(40, 100)]
    assert (await stored(any_database, "a")).queue == address("q1")
    assert [one.id for one in (await current_registry(any_database)).vaults] == ["a", "c", "own"]
    before = await everything(any_database)
    assert await accounts.add_vaults(any_database, "acme", wanted) == []
    assert await everything(any_database) == before
    for new, why in (
        (NewVault("own", address("v4"), None, 1), "'own' has the address .* register .* under another id"),
        (NewVault("d", address("v4"), address("q1"), 1), "is already the withdrawal queue of vault 'a'"),
    ):
        await refused(accounts.add_vaults(any_database, "acme", [new]), why, any_database)
    await refused(accounts.add_vaults(any_database, "umbra", wanted), "there is no account 'umbra'", any_database)


async def test_another_account_may_watch_the_same_vault(any_database: Database) -> None:
    for account_id in ("acme", "umbra"):
        await account(any_database, account_id)
        await vault(any_database, account_id=account_id, queue="q1")
    outbox = await live_at(any_database, 0)
    done = await commit(outbox, funding(1), claimed(5))
    assert done.inserted == 4
    ids = await rows(any_database, "select account_id, id from events order by seq")
    assert {row["account_id"] for row in ids} == {"acme", "umbra"}
    assert all(row["id"].split("_")[2] == row["account_id"] for row in ids)


async def test_an_earlier_start_is_a_change_and_a_later_one_is_none(any_database: Database) -> None:
    await account(any_database)
    await vault(any_database, first_block=50)
    before = await version(any_database)
    for first_block in (50, 51, 5_000):
        await refused(vault(any_database, first_block=first_block), "already registered like this", any_database)
    assert (await vault(any_database, first_block=20)).vault.spans == (VaultSpan(20),)
    assert await version(any_database) != before


async def test_a_queue_may_be_added_later_once(any_database: Database) -> None:
    await account(any_database)
    await vault(any_database, first_block=50)
    done = await vault(any_database, queue="q1", first_block=5_000)  # the start stays, since it is earlier
    assert (done.vault.queue, done.vault.spans) == (address("q1"), (VaultSpan(50),))
    await refused(vault(any_database, queue="q1", first_block=50), "already registered like this", any_database)
    await refused(vault(any_database, first_block=50), "already registered like this", any_database)  # and it stays


async def test_each_change_of_what_is_registered_has_a_version(any_database: Database) -> None:
    await account(any_database)
    seen = [await version(any_database)]
    for change in (
        vault(any_database, first_block=50),
        vault(any_database, first_block=40),
        vault(any_database, queue="q1", first_block=40),
        remove_vault(any_database, "acme", "v1", 100),
        vault(any_database, first_block=200),
    ):
        await change
        seen.append(await version(any_database))
    assert len(set(seen)) == 6


async def test_a_vault_that_was_removed_keeps_its_events_and_may_come_back(any_database: Database) -> None:
    await account(any_database)
    await vault(any_database, first_block=10)
    assert (await remove_vault(any_database, "acme", "v1", 30)).spans == (VaultSpan(10, 30),)
    await refused(
        remove_vault(any_database, "acme", "v1", 40), "has no vault 'v1' that is registered now", any_database
    )
    await refused(vault(any_database, at="elsewhere"), "which never changes", any_database)
    again = await vault(any_database, first_block=50)
    assert again.vault.spans == (VaultSpan(10, 30), VaultSpan(50))
    found = await current_registry(any_database)
    blocks = [block for block in range(5, 60) if project(funding(1, block=block), found)]
    assert blocks == [*range(10, 31), *range(50, 60)]
    assert (await remove_vault(any_database, "acme", "v1", 70)).spans == (VaultSpan(10, 30), VaultSpan(50, 70))


async def test_only_what_is_there_can_be_removed(any_database: Database) -> None:
    for account_id in ("acme", "umbra"):
        await account(any_database, account_id)
    await vault(any_database)
    await refused(remove_vault(any_database, "acme", "v2", 5), "has no vault 'v2'", any_database)
    await refused(remove_vault(any_database, "umbra", "v1", 5), "has no vault 'v1'", any_database)


async def test_removing_closes_at_the_live_cursor_where_that_is_further(any_database: Database) -> None:
    await account(any_database)
    for vault_id in ("v1", "v2"):
        await vault(any_database, vault_id, first_block=10)
    await live_at(any_database, 40)
    assert (await remove_vault(any_database, "acme", "v1", 30)).spans == (VaultSpan(10, 40),)
    assert (await remove_vault(any_database, "acme", "v2", 45)).spans == (VaultSpan(10, 45),)


async def test_removed_before_its_start_a_vault_has_no_block(any_database: Database) -> None:
    await account(any_database)
    await vault(any_database, first_block=100)
    removed = await remove_vault(any_database, "acme", "v1", 40)
    assert removed.spans == (VaultSpan(100, 99),)
    found = await current_registry(any_database)
    assert not [block for block in range(200) if project(funding(1, block=block), found)]


async def test_what_is_behind_the_live_cursor_is_read_again_once(any_database: Database) -> None:
    await account(any_database)
    outbox = await live_at(any_database, 1_000)
    assert (await vault(any_database, "v1", first_block=400)).backfills == (Span(400, 1_000),)
    assert (await vault(any_database, "v2", first_block=600)).backfills == ()  # the same reading finds it, too
    assert (await vault(any_database, "v1", first_block=300)).backfills == (Span(300, 399),)
    assert (await vault(any_database, "v3", first_block=250)).backfills == (Span(250, 299),)
    assert (await vault(any_database, "v4", first_block=1_001)).backfills == ()
    assert (await vault(any_database, "v4", first_block=1_000)).backfills == ()
    assert await open_backfills(any_database) == [Span(400, 1_000), Span(300, 399), Span(250, 299)]
    first, *_ = await outbox.backfills("logs")
    found, seen = await events_of(outbox, [])
    assert not isinstance(await outbox.commit(first, first.moved(700, None), found, seen), Lost)
    # 400..700 is read already, 701..1000 is still to come
    assert (await vault(any_database, "v5", first_block=200)).backfills == (Span(200, 249), Span(400, 700))
    assert (await vault(any_database, "v1", queue="q1", first_block=300)).backfills == ()


async def test_a_queue_is_read_for_from_the_start_of_its_vault_on(any_database: Database) -> None:
    await account(any_database)
    await vault(any_database, first_block=100)
    await remove_vault(any_database, "acme", "v1", 200)
    await vault(any_database, first_block=300)
    await live_at(any_database, 500)
    for done in await Outbox(any_database).backfills("logs"):
        await Outbox(any_database).commit(done, done.moved(done.stop or 0, None), [], await version(any_database))
    assert (await vault(any_database, queue="q1", first_block=400)).backfills == (Span(100, 500),)


async def test_a_vault_that_comes_back_is_read_for_from_its_new_start_on(any_database: Database) -> None:
    await account(any_database)
    await live_at(any_database, 50)
    await vault(any_database, first_block=51)
    await remove_vault(any_database, "acme", "v1", 50)
    async with any_database.transaction() as connection:
        await connection.execute("update cursors set position = 100 where kind = 'live'")
    assert (await vault(any_database, first_block=90)).backfills == (Span(90, 100),)


async def test_a_registration_makes_a_span_that_is_being_read_be_read_again(any_database: Database) -> None:
    await account(any_database)
    await vault(any_database)
    outbox = await live_at(any_database, 0)
    cursor = await live(outbox)
    found, seen = await events_of(outbox, [funding(1, vault="v2")])
    assert found == []
    await vault(any_database, "v2", first_block=1)
    assert isinstance(await outbox.commit(cursor, cursor.moved(10, None), found, seen), Lost)
    found, seen = await events_of(outbox, [funding(1, vault="v2")])
    assert not isinstance(await outbox.commit(cursor, cursor.moved(10, None), found, seen), Lost)
    assert await values(any_database, "select vault_id from events") == ["v2"]


async def test_a_stream_opens_once_with_one_backfill_for_all(any_database: Database) -> None:
    await account(any_database)
    for vault_id, first_block in (("v1", 500), ("v2", 20), ("v3", 5_000)):
        await vault(any_database, vault_id, first_block=first_block)
    await asyncio.gather(*(open_stream(any_database, "logs", 1_000 + n, f"0x{n}") for n in range(5)))
    cursor = await live(Outbox(any_database))
    assert (cursor.first, cursor.anchor) == (cursor.position + 1, f"0x{cursor.position - 1_000}")
    assert await open_backfills(any_database) == [Span(20, cursor.position)]
    (backfill,) = await Outbox(any_database).backfills("logs")
    await Outbox(any_database).commit(backfill, backfill.moved(cursor.position, None), [], await version(any_database))
    await live_at(any_database, 9_000)  # the next start of the daemon
    assert await open_backfills(any_database) == []
    assert await live(Outbox(any_database)) == cursor


async def test_a_stream_without_vaults_or_with_later_ones_has_nothing_to_read_again(any_database: Database) -> None:
    await account(any_database)
    await open_stream(any_database, "other", 10, None)
    await vault(any_database, first_block=1_001)
    await live_at(any_database, 1_000)
    assert await values(any_database, "select 1 from cursors where kind = 'backfill'") == []


async def test_undelivered_is_what_was_read_when_the_vault_came(any_database: Database) -> None:
    await account(any_database)
    await refused(vault(any_database, deliver=False), "nothing has been read yet", any_database)
    await live_at(any_database, 1_000)
    assert (await vault(any_database, "v1", first_block=400, deliver=False)).vault.spans == (
        VaultSpan(400, None, 1_001),
    )
    assert (await vault(any_database, "v2", first_block=2_000)).vault.spans == (VaultSpan(2_000),)
    # the earlier blocks are undelivered, those of its first registration are not
    assert (await vault(any_database, "v2", first_block=900, deliver=False)).vault.spans == (
        VaultSpan(900, None, 1_001),
    )
    await vault(any_database, "v3", first_block=700)
    assert (await vault(any_database, "v3", first_block=600, deliver=False)).vault.spans == (VaultSpan(600, None, 700),)


async def test_a_delivered_start_before_an_undelivered_one_is_refused(any_database: Database) -> None:
    await account(any_database)
    await live_at(any_database, 1_000)
    await vault(any_database, first_block=400, deliver=False)
    await refused(vault(any_database, first_block=300), "--no-deliver", any_database)
    assert (await vault(any_database, first_block=300, deliver=False)).vault.spans == (VaultSpan(300, None, 1_001),)


async def test_a_delivered_queue_of_an_undelivered_vault_is_refused(any_database: Database) -> None:
    await account(any_database)
    await live_at(any_database, 1_000)
    await vault(any_database, first_block=400, deliver=False)
    await refused(vault(any_database, queue="q1", first_block=400), "--no-deliver", any_database)
    done = await vault(any_database, queue="q1", first_block=400, deliver=False)
    assert done.vault.spans == (VaultSpan(400, None, 1_001),)


async def test_an_undelivered_queue_never_silences_what_is_still_to_be_read(
    any_database: Database,
) -> None:
    await account(any_database)
    outbox = await live_at(any_database, 1_000)
    await vault(any_database, first_block=400)
    await refused(
        vault(any_database, queue="q1", first_block=400, deliver=False), r"still reads the blocks 400\.\.", any_database
    )
    (backfill,) = await outbox.backfills("logs")
    found, seen = await events_of(outbox, [funding(1, block=500)])
    assert not isinstance(await outbox.commit(backfill, backfill.moved(1_000, None), found, seen), Lost)
    done = await vault(any_database, queue="q1", first_block=400, deliver=False)
    assert done.vault.spans == (VaultSpan(400, None, 1_001),)
    assert await values(any_database, "select suppressed from events") == [False]


async def test_of_several_who_register_the_same_one_succeeds(any_database: Database) -> None:
    await account(any_database)
    await live_at(any_database, 1_000)
    results = await asyncio.gather(
        *(vault(any_database, first_block=400) for _ in range(5)),
        *(vault(any_database, f"v{n}", at="v1", first_block=400) for n in range(2, 6)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, Registered) for result in results) == 1
    assert sum(isinstance(result, InputError) for result in results) == 8
    assert await open_backfills(any_database) == [Span(400, 1_000)]


async def test_the_registry_is_one_moment_while_others_register(any_database: Database) -> None:
    """A vault and its version are seen together or not at all."""
    await account(any_database)
    seen: dict[int, int] = {}

    async def register() -> None:
        for number in range(30):
            await vault(any_database, f"v{number}")

    registering = asyncio.create_task(register())
    while not registering.done():
        found = await current_registry(any_database)
        assert seen.setdefault(found.version, len(found.vaults)) == len(found.vaults)
        assert all(one.spans for one in found.vaults)
    await registering
    assert len(set(seen.values())) == len(seen)


async def test_a_queue_cannot_go_undelivered_while_the_beacon_streams_are_behind(any_database: Database) -> None:
    await account(any_database)
    await live_at(any_database, 1_000)
    await vault(any_database, first_block=400)
    async with any_database.transaction() as connection:
        await connection.execute("delete from cursors where kind = 'backfill'")
    await open_stream(any_database, "withdrawals", 3, None)
    await refused(
        vault(any_database, queue="q1", first_block=400, deliver=False), "beacon chain are behind", any_database
    )
