"""Customers' changes of webhooks, and their effect on deliveries under way (rules A2 to A5, A16, A17 and D9)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from step_up_factories import Customer, changing, enrolled, fresh_bytes
from store_factories import (
    KEY,
    account,
    assert_delivered,
    assert_ledger,
    commit,
    deliveries_of,
    funding,
    own_database,
    rows,
    settlement,
    shift_clock,
    simple_simulation,
    states,
    take,
    until_waiting,
    values,
    vault,
    webhook,
)
from timeouts import WAIT_TIMEOUT_S
from vaultevents.core.sealing import MasterKey, SealBroken, Secret, open_sealed
from vaultevents.core.webhooks import Webhook
from vaultevents.store import accounts, webhook_management, webhooks
from vaultevents.store.authorized_transaction import forget, mutation
from vaultevents.store.deliveries import Delivery, settle
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import DELIVERIES_CHANNEL, Database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.rotation import sealed_key_ids
from vaultevents.store.webhook_management import Idempotency, IdempotencyConflict, TooManyWebhooks
from vaultevents.store.webhooks import StoredWebhook, VaultsUnknown, WebhookUnknown

pytestmark = pytest.mark.integration


async def simulation(database: Database) -> tuple[Outbox, Customer]:
    """A simple simulation whose account has a second factor."""
    return await simple_simulation(database), await enrolled(database)


def draft(account_id: str = "acme", **options: Any) -> Webhook:
    """A new webhook that receives everything, by default."""
    url = "https://receiver.example/hook"
    return replace(Webhook(f"wh-{fresh_bytes(8).hex()}", account_id, url, None, None, True), **options)


async def create(
    database: Database, customer: Customer, *, limit: int = 20, idempotency: Idempotency | None = None, **options: Any
) -> Secret:
    """Creates a webhook as the API does, and gives the answer, which is its id and secret; or the stored answer."""
    made = draft(customer.account_id, **options)
    async with mutation(database, customer.grant(), KEY) as change:
        answer = None if idempotency is None else await webhook_management.repeated(change, idempotency, KEY)
        if answer is not None:
            await change.step_up()
            return answer
        await webhook_management.check_vaults(change, made.vault_ids)
        await webhook_management.check_room(change, limit)
        await change.step_up()
        await webhook_management.create(change, made, Secret(f"whsec_{made.id}"), KEY, fresh_bytes(12))
        answer = Secret(f"{made.id} whsec_{made.id}")
        if idempotency is not None:
            await webhook_management.keep_answer(change, idempotency, made.id, answer, KEY, fresh_bytes(12))
    return answer


async def amend(database: Database, customer: Customer, webhook_id: str, **fields: Any) -> StoredWebhook:
    async with changing(database, customer) as change:
        return await webhook_management.amend(change, webhook_id, fields)


async def delete(database: Database, customer: Customer, webhook_id: str) -> None:
    async with changing(database, customer) as change:
        await webhook_management.delete(change, webhook_id)


async def find(database: Database, webhook_id: str, account_id: str = "acme") -> StoredWebhook:
    async with database.reading(account_id) as connection:
        return await webhook_management.find(connection, account_id, webhook_id)


async def revisions(database: Database) -> int:
    (number,) = await values(database, "select count(*)::int from webhook_revisions")
    assert isinstance(number, int)
    return number


async def deliver(database: Database) -> list[Delivery]:
    """Delivers all that is due."""
    claimed = list((await take(database)).deliveries)
    await settle(database, [settlement(delivery) for delivery in claimed])
    return claimed


# Creating


async def test_a_new_webhook_is_as_its_owner_wrote_it_and_its_secret_is_sealed(any_database: Database) -> None:
    outbox, acme = await simulation(any_database)
    made = draft(event_types=("funding_received",), vault_ids=("v1",))
    async with changing(any_database, acme) as change:
        stored = await webhook_management.create(change, made, Secret("whsec_canary"), KEY, fresh_bytes(12))
    assert (stored.webhook, stored.disabled_reason, stored.parked_until) == (made, None, None)
    assert await find(any_database, made.id) == stored
    assert await webhooks.list_webhooks(any_database, "acme") == [stored]
    await commit(outbox, funding(1))
    (one,) = await deliver(any_database)
    assert b"canary" not in one.target.secrets[0].sealed
    assert open_sealed(KEY, one.target.secrets[0].sealed, made.id).reveal() == "whsec_canary"
    assert await revisions(any_database) == 1
    await assert_delivered(any_database, 1)


async def test_a_webhook_that_comes_during_a_commit_waits_and_receives_nothing_of_it(any_database: Database) -> None:
    outbox, acme = await simulation(any_database)
    async with any_database.transaction() as committing:
        await committing.execute("select 1 from registry for share")
        creating = asyncio.create_task(create(any_database, acme))
        await until_waiting(any_database, 1)
        assert await values(any_database, "select 1 from webhooks") == []
    await creating
    await commit(outbox, funding(2))
    assert await states(any_database) == {"scheduled": 1}
    await assert_ledger(any_database)


async def test_a_filter_names_only_vaults_that_its_account_has_now(any_database: Database) -> None:
    _, acme = await simulation(any_database)
    await vault(any_database, "gone")
    await accounts.remove_vault(any_database, "acme", "gone", 5)
    await account(any_database, "umbra")
    await vault(any_database, "theirs", account_id="umbra")
    for vault_ids in (("v1", "gone"), ("theirs", "v1"), ("nothing",), ("gone", "theirs", "nothing")):
        with pytest.raises(VaultsUnknown) as unknown:
            await create(any_database, acme, vault_ids=vault_ids)
        assert unknown.value.vault_ids == {*vault_ids} - {"v1"}
    assert await values(any_database, "select 1 from webhooks") == []
    await create(any_database, acme, vault_ids=("v1",))


async def test_of_many_creates_at_once_as_many_succeed_as_there_is_room(any_database: Database) -> None:
    _, acme = await simulation(any_database)
    await webhook(any_database)
    await account(any_database, "umbra")
    await webhook(any_database, account_id="umbra")
    outcomes = await asyncio.gather(*(create(any_database, acme, limit=2) for _ in range(8)), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [type(one) for one in refused] == [TooManyWebhooks] * 7
    assert str(refused[0]) == "the account has 2 webhooks, and 2 is the limit: delete one first"
    first, last = await webhooks.list_webhooks(any_database, "acme")
    await delete(any_database, acme, last.webhook.id)
    await create(any_database, acme, limit=2)
    assert first in await webhooks.list_webhooks(any_database, "acme")


# Creating again: Idempotency-Key


async def test_a_repeated_create_gets_the_first_answer_and_makes_nothing(any_database: Database) -> None:
    _, acme = await simulation(any_database)
    once = Idempotency("order-7", b"a" * 32)
    first = await create(any_database, acme, idempotency=once)
    assert await create(any_database, acme, idempotency=once) == first
    other = await create(any_database, acme, idempotency=Idempotency("order-8", b"a" * 32))
    assert other != first
    with pytest.raises(IdempotencyConflict, match="used for another request: use a new one"):
        await create(any_database, acme, idempotency=replace(once, fingerprint=b"b" * 32))
    assert len(await webhooks.list_webhooks(any_database, "acme")) == 2
    (sealed, _) = await values(any_database, "select sealed from idempotent_answers order by created_at")
    assert b"whsec" not in sealed


async def test_two_accounts_may_use_the_same_idempotency_key(any_database: Database) -> None:
    _, acme = await simulation(any_database)
    await account(any_database, "umbra")
    umbra = await enrolled(any_database, "umbra")
    same = Idempotency("order-7", b"a" * 32)
    assert await create(any_database, acme, idempotency=same) != await create(any_database, umbra, idempotency=same)


async def test_a_deleted_webhook_takes_the_stored_answer_with_it(any_database: Database) -> None:
    _, acme = await simulation(any_database)
    once, operators = Idempotency("order-7", b"a" * 32), Idempotency("order-8", b"a" * 32)
    for idempotency in (once, operators):
        await create(any_database, acme, idempotency=idempotency)
    second, first = await webhooks.list_webhooks(any_database, "acme")
    await delete(any_database, acme, first.webhook.id)
    await webhooks.delete_webhook(any_database, "acme", second.webhook.id)
    assert await values(any_database, "select sealed from idempotent_answers") == [None, None]
    assert await sealed_key_ids(any_database) == {KEY.id}, "that of the second factor"
    for idempotency in (once, operators):
        with pytest.raises(IdempotencyConflict, match="is deleted: use a new one"):
            await create(any_database, acme, idempotency=idempotency)


@pytest.mark.parametrize("forgotten", [False, True])
async def test_after_a_day_the_same_key_makes_another_webhook(any_database: Database, forgotten: bool) -> None:
    _, acme = await simulation(any_database)
    once = Idempotency("order-7", b"a" * 32)
    first = await create(any_database, acme, idempotency=once)
    await shift_clock(any_database, 86_000)
    await forget(any_database)
    assert await create(any_database, acme, idempotency=once) == first
    await shift_clock(any_database, 86_500)
    if forgotten:
        await forget(any_database)
        assert await values(any_database, "select 1 from idempotent_answers") == []
    second = await create(any_database, acme, idempotency=replace(once, fingerprint=b"b" * 32))
    assert second != first
    assert await create(any_database, acme, idempotency=replace(once, fingerprint=b"b" * 32)) == second


async def test_an_answer_that_was_moved_or_sealed_with_another_key_does_not_open(any_database: Database) -> None:
    _, acme = await simulation(any_database)
    for number in (1, 2):
        await create(any_database, acme, idempotency=Idempotency(f"order-{number}", b"a" * 32))
    async with any_database.transaction() as connection:
        await connection.execute(
            "update idempotent_answers a set sealed = o.sealed from idempotent_answers o where o.key <> a.key"
        )
    with pytest.raises(SealBroken):
        await create(any_database, acme, idempotency=Idempotency("order-1", b"a" * 32))
    await create(any_database, acme, idempotency=(third := Idempotency("order-3", b"a" * 32)))
    with pytest.raises(SealBroken):
        async with changing(any_database, acme) as change:
            await webhook_management.repeated(change, third, MasterKey(bytes(32)))
    assert len(await webhooks.list_webhooks(any_database, "acme")) == 3


async def test_every_key_that_something_is_sealed_with_is_named(any_database: Database) -> None:
    _, acme = await simulation(any_database)
    ids = [f"key-{number}" for number in range(4)]
    await create(any_database, acme, idempotency=Idempotency("order-7", b"a" * 32))
    async with any_database.transaction() as connection:
        await connection.execute("insert into hash_key (key_id, sealed) values ('', '')")
        for table, key_id in zip(
            ("webhook_secrets", "mfa_factors", "hash_key", "idempotent_answers"), ids, strict=True
        ):
            await connection.execute(f"update {table} set key_id = $1", key_id)
    assert await sealed_key_ids(any_database) == set(ids)


# Changing


async def test_a_new_url_holds_for_what_is_pending(any_database: Database) -> None:
    outbox, acme = await simulation(any_database)
    one = await webhook(any_database)
    await commit(outbox, funding(1))
    changed = await amend(any_database, acme, one.id, url="https://elsewhere.example/hook")
    assert changed.webhook == replace(one.webhook, url="https://elsewhere.example/hook")
    assert await find(any_database, one.id) == changed
    assert [delivery.target.url for delivery in await deliver(any_database)] == ["https://elsewhere.example/hook"]
    await assert_delivered(any_database, 1)


async def test_a_narrowed_filter_recalls_nothing_and_holds_from_then_on(any_database: Database) -> None:
    outbox, acme = await simulation(any_database)
    await vault(any_database, "v2", first_block=1)
    one = await webhook(any_database)
    await commit(outbox, funding(1), funding(2, vault="v2"))
    await amend(any_database, acme, one.id, vault_ids=("v2",))
    await commit(outbox, funding(3), funding(4, vault="v2"))
    await amend(any_database, acme, one.id, vault_ids=None, event_types=("withdrawal_claimed",))
    await commit(outbox, funding(5), funding(6, vault="v2"))
    await amend(any_database, acme, one.id, event_types=None)
    await commit(outbox, funding(7), funding(8, vault="v2"))
    assert len(await deliveries_of(any_database, one.id)) == 2 + 1 + 0 + 2
    assert await revisions(any_database) == 4
    await deliver(any_database)
    await assert_delivered(any_database, 5)


async def test_a_filter_may_keep_a_vault_that_was_removed_since(any_database: Database) -> None:
    outbox, acme = await simulation(any_database)
    one = await webhook(any_database, vault_ids=("v1",))
    await accounts.remove_vault(any_database, "acme", "v1", 5)
    changed = await amend(any_database, acme, one.id, url="https://elsewhere.example/hook")
    assert changed.webhook.vault_ids == ("v1",)
    with pytest.raises(VaultsUnknown):
        async with changing(any_database, acme) as change:
            await webhook_management.check_vaults(change, ("v1",))
    await commit(outbox, funding(1, block=10))
    await assert_ledger(any_database)


async def test_a_webhook_that_is_switched_off_keeps_what_is_pending_and_goes_on_where_it_was(
    any_database: Database,
) -> None:
    outbox, acme = await simulation(any_database)
    one, other = await webhook(any_database), await webhook(any_database)
    await commit(outbox, funding(1))
    claimed = {delivery.webhook_id: delivery for delivery in (await take(any_database)).deliveries}
    await settle(any_database, [settlement(claimed[one.id], "scheduled", 500, after_s=3600)])
    await settle(any_database, [settlement(claimed[other.id])])
    off = await amend(any_database, acme, one.id, active=False)
    assert (off.webhook.active, off.disabled_reason) == (False, None)
    await commit(outbox, funding(2))
    await shift_clock(any_database, 7200)
    assert [delivery.webhook_id for delivery in await deliver(any_database)] == [other.id]
    assert await states(any_database) == {"delivered": 2, "parked": 1}
    await assert_ledger(any_database)
    on = await amend(any_database, acme, one.id, active=True)
    assert on.webhook.active
    (resumed,) = (await take(any_database)).deliveries
    assert (resumed.webhook_id, resumed.attempt) == (one.id, 2)
    await settle(any_database, [settlement(resumed)])
    await assert_delivered(any_database, 3)


async def test_switching_on_forgives_a_410_and_ends_a_pause(any_database: Database) -> None:
    outbox, acme = await simulation(any_database)
    one = await webhook(any_database)
    await commit(outbox, funding(1), funding(2), funding(3))
    paused, gone, _ = (await take(any_database)).deliveries
    await settle(any_database, [settlement(paused, "scheduled", 429, after_s=3600, park_s=3600)])
    await settle(any_database, [settlement(gone, "parked", 410, gone=True)])
    assert (await find(any_database, one.id)).disabled_reason == "gone"
    moved = await amend(any_database, acme, one.id, url="https://elsewhere.example/hook")
    assert (moved.webhook.active, moved.disabled_reason) == (False, "gone"), "another url alone switches nothing on"
    on = await amend(any_database, acme, one.id, active=True)
    assert (on.webhook.active, on.disabled_reason, on.parked_until) == (True, None, None)
    assert await states(any_database) == {"scheduled": 3}
    assert [delivery.attempt for delivery in await deliver(any_database)] == [2, 2]
    await assert_ledger(any_database)


async def test_what_is_in_flight_while_its_webhook_is_off_and_on_again_is_not_sent_twice(
    any_database: Database,
) -> None:
    outbox, acme = await simulation(any_database)
    one = await webhook(any_database)
    await commit(outbox, funding(1), funding(2))
    fast, _ = (await take(any_database)).deliveries
    await amend(any_database, acme, one.id, active=False)
    await amend(any_database, acme, one.id, active=True)
    assert (await take(any_database)).deliveries == (), "both are still in flight"
    await settle(any_database, [settlement(fast)])
    assert await states(any_database) == {"delivered": 1, "scheduled": 1}
    await shift_clock(any_database, 61)
    (dead,) = (await take(any_database)).deliveries
    assert dead.attempt == 1, "its process died with it"
    await settle(any_database, [settlement(dead)])
    await assert_delivered(any_database, 2)


LISTENING = "select 1 from pg_stat_activity where datname = current_database() and query ilike 'listen%'"


async def test_switching_on_wakes_the_dispatchers(any_postgres: ServerAddress) -> None:
    async with own_database(any_postgres) as database:
        outbox, acme = await simulation(database)
        one = await webhook(database)
        await commit(outbox, funding(1))
        await amend(database, acme, one.id, active=False)
        woken = asyncio.Event()
        listening = asyncio.create_task(database.listen(DELIVERIES_CHANNEL, woken.set))
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while not await values(database, LISTENING):
                await asyncio.sleep(0.01)
            woken.clear()
            await amend(database, acme, one.id, active=True)
            await woken.wait()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await deliver(database)
        await assert_delivered(database, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"active": True},
        {"url": "https://receiver.example/hook"},
        {"event_types": ("funding_received",), "vault_ids": None},
        {},
    ],
)
async def test_what_changes_nothing_leaves_no_revision(database: Database, fields: dict[str, Any]) -> None:
    _, acme = await simulation(database)
    one = await webhook(database, event_types=("funding_received",))
    before = await rows(database, "select * from webhooks")
    changed = await amend(database, acme, one.id, **fields)
    assert changed.webhook == one.webhook
    assert await rows(database, "select * from webhooks") == before
    assert await revisions(database) == 1


# Deleting, and what is not there


async def test_a_deleted_webhook_is_gone_with_its_secret_and_what_was_pending(any_database: Database) -> None:
    outbox, acme = await simulation(any_database)
    one, other = await webhook(any_database), await webhook(any_database)
    await commit(outbox, funding(1), funding(2))
    await delete(any_database, acme, one.id)
    assert await values(any_database, "select webhook_id from webhook_secrets") == [other.id]
    assert await states(any_database) == {"cancelled": 2, "scheduled": 2}
    await commit(outbox, funding(3))
    assert {delivery.webhook_id for delivery in await deliver(any_database)} == {other.id}
    await assert_ledger(any_database)


async def test_foreign_deleted_and_invented_webhooks_are_reported_alike(any_database: Database) -> None:
    _, acme = await simulation(any_database)
    await account(any_database, "umbra")
    foreign, deleted = await webhook(any_database, account_id="umbra"), await webhook(any_database)
    await delete(any_database, acme, deleted.id)
    before = await rows(any_database, "select * from webhooks order by id")
    reported = set()
    for webhook_id in (foreign.id, deleted.id, "wh-invented", "", "' or true --"):
        for action in (
            find(any_database, webhook_id),
            amend(any_database, acme, webhook_id, active=False),
            delete(any_database, acme, webhook_id),
        ):
            with pytest.raises(WebhookUnknown) as unknown:
                await action
            reported.add(str(unknown.value))
    assert len(reported) == 1
    assert await rows(any_database, "select * from webhooks order by id") == before
    assert (await find(any_database, foreign.id, "umbra")).webhook == foreign.webhook


async def test_the_statements_name_the_account_themselves(any_database: Database) -> None:
    await simple_simulation(any_database)
    await account(any_database, "umbra")
    own, foreign = await webhook(any_database), await webhook(any_database, account_id="umbra")
    async with any_database.transaction() as connection:  # a role that sees everything
        for act in (webhook_management.find, webhooks.erase_webhook):
            with pytest.raises(WebhookUnknown):
                await act(connection, "acme", foreign.id)
        found = await webhook_management.page(connection, "acme", 100, None)
    assert [stored.webhook.id for stored in found] == [own.id]


# Listing


async def pages(database: Database, limit: int, account_id: str = "acme") -> list[str]:
    """The ids of all pages, one after the other."""
    found: list[StoredWebhook] = []
    while True:
        after = (found[-1].created_at, found[-1].webhook.id) if found else None
        async with database.reading(account_id) as connection:
            page = await webhook_management.page(connection, account_id, limit, after)
        assert len(page) <= limit
        if not page:
            return [stored.webhook.id for stored in found]
        found += page


async def test_pages_hold_each_webhook_once_newest_first_also_those_of_one_moment(any_database: Database) -> None:
    await simple_simulation(any_database)
    await account(any_database, "umbra")
    made = [(await webhook(any_database)).id for _ in range(7)]
    await webhook(any_database, account_id="umbra")
    same = made[2:5]
    async with any_database.transaction() as connection:
        await connection.execute(
            "update webhooks set created_at = (select created_at from webhooks where id = $1) where id = any($2)",
            made[3],
            same,
        )
    whole = await pages(any_database, 100)
    assert whole == [*made[:4:-1], *sorted(same, reverse=True), *made[1::-1]]
    for limit in (1, 2, 3, 7):
        assert await pages(any_database, limit) == whole


async def test_a_page_goes_on_where_it_was_whatever_came_and_went_meanwhile(any_database: Database) -> None:
    _, acme = await simulation(any_database)
    made = [(await webhook(any_database)).id for _ in range(6)]
    async with any_database.reading("acme") as connection:
        first = await webhook_management.page(connection, "acme", 2, None)
    await delete(any_database, acme, first[-1].webhook.id)
    await webhook(any_database)
    async with any_database.reading("acme") as connection:
        second = await webhook_management.page(connection, "acme", 2, (first[-1].created_at, first[-1].webhook.id))
    assert [stored.webhook.id for stored in (*first, *second)] == [made[5], made[4], made[3], made[2]]
