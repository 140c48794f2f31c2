"""Customers' changes: one token, one code, one change, in any race; accounts stay apart (rules A13, A15 and T8)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import pytest

from step_up_factories import Customer, changing, enrolled, fresh_bytes
from store_factories import (
    KEY,
    account,
    assert_ledger,
    commit,
    funding,
    rows,
    settlement,
    shift_clock,
    simple_simulation,
    take,
    target_of,
    values,
    vault,
    webhook,
)
from vaultevents.core.errors import DatabaseUnusable, InputError
from vaultevents.core.sealing import SealBroken, Secret
from vaultevents.store import deliveries, mfa, resends, webhook_management
from vaultevents.store.authorized_transaction import (
    Authorization,
    StepUpRefused,
    TokenReplayed,
    action,
    forget,
    mutation,
)
from vaultevents.store.pool import Database, open_database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.retention import prune

pytestmark = pytest.mark.integration


async def rename(database: Database, grant: Authorization) -> None:
    """A small change that leaves one row."""
    async with mutation(database, grant, KEY) as change:
        await change.step_up()
        await change.connection.execute(
            "insert into webhooks (id, account_id, url, active) values ($1, $2, 'https://receiver.example', false)",
            f"wh-{fresh_bytes(6).hex()}",
            change.account_id,
        )


async def outcome(database: Database, grant: Authorization) -> str:
    """How `rename` ends, in one word."""
    try:
        await rename(database, grant)
    except TokenReplayed:
        return "replayed"
    except StepUpRefused as refused:
        return refused.reason
    return "changed"


async def refusal(database: Database, grant: Authorization) -> StepUpRefused:
    with pytest.raises(StepUpRefused) as refused:
        await rename(database, grant)
    return refused.value


async def changes(database: Database) -> int:
    (number,) = await values(database, "select count(*)::int from webhooks")
    assert isinstance(number, int)
    return number


async def factor(database: Database) -> tuple[int, int, bool]:
    """The last accepted step, the failures since, and whether it is locked now."""
    (row,) = await rows(
        database, "select last_step, failures, coalesce(locked_until > db_now(), false) as locked from mfa_factors"
    )
    return row["last_step"], row["failures"], row["locked"]


def step(customer: Customer) -> int:
    return int(customer.now_s // 30)


@asynccontextmanager
async def replica(server: ServerAddress, database: Database) -> AsyncIterator[Database]:
    """Open the same database as another process does: with its own pools."""
    opened = await open_database(await target_of(server, database))
    try:
        yield opened
    finally:
        await opened.close()


async def test_fifty_copies_of_a_request_on_two_replicas_make_one_change(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    await account(any_database)
    acme = await enrolled(any_database)
    async with replica(any_postgres, any_database) as other:
        for round_ in range(1, 4):
            grant = acme.grant()
            found = await asyncio.gather(*(outcome(db, grant) for _ in range(25) for db in (any_database, other)))
            assert Counter(found) == {"changed": 1, "replayed": 49}
            assert await changes(any_database) == round_
    (kind,) = await values(any_database, "select relpersistence from pg_class where oid = 'used_tokens'::regclass")
    assert kind == b"p", "an unlogged table is emptied by a crash"


async def test_of_two_replicas_with_one_code_one_wins_and_the_other_is_no_guess(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    await account(any_database)
    acme = await enrolled(any_database)
    async with replica(any_postgres, any_database) as other:
        for _ in range(5):
            grant = acme.grant()
            again = replace(grant, token_digest=fresh_bytes(32))
            found = await asyncio.gather(outcome(any_database, grant), outcome(other, again))
            assert sorted(found) == ["changed", "invalid"]
            assert await factor(any_database) == (step(acme), 0, False)
    assert await changes(any_database) == 5


async def test_a_used_code_and_those_before_it_are_distinguished_from_guesses(any_database: Database) -> None:
    await account(any_database)
    acme = await enrolled(any_database)
    earlier = acme.grant().code
    used = acme.grant()
    await rename(any_database, used)
    for code in (used.code, earlier):
        late = replace(used, token_digest=fresh_bytes(32), code=code)
        refused = await refusal(any_database, late)
        assert refused.reason == "invalid"
        assert "used already: wait up to 30 s for the next" in str(refused)
    assert await factor(any_database) == (step(acme), 0, False)
    await rename(any_database, acme.grant())


async def test_a_refused_change_spends_neither_token_nor_code(any_database: Database) -> None:
    await account(any_database)
    acme = await enrolled(any_database)
    grant = acme.grant()
    for steps_up in (False, True):
        with pytest.raises(InputError, match="no such vault"):
            async with mutation(any_database, grant, KEY) as change:
                if steps_up:
                    await change.step_up()
                    await change.connection.execute(
                        "insert into webhooks (id, account_id, url, active) values ('wh', 'acme', 'https://x', false)"
                    )
                raise InputError("no such vault")
        assert await factor(any_database) == (0, 0, False)
        assert await changes(any_database) == 0
    assert await outcome(any_database, grant) == "changed"
    assert await outcome(any_database, grant) == "replayed"


async def test_a_change_that_forgets_to_step_up_is_not_made(any_database: Database) -> None:
    await account(any_database)
    acme = await enrolled(any_database)
    grant = acme.grant()
    with pytest.raises(RuntimeError, match="without step-up"):
        async with mutation(any_database, grant, KEY) as change:
            await change.connection.execute(
                "insert into webhooks (id, account_id, url, active) values ('wh', 'acme', 'https://x', false)"
            )
    assert await changes(any_database) == 0
    assert await outcome(any_database, grant) == "changed"


async def test_no_factor_and_no_code_are_each_reported_and_cost_nothing(any_database: Database) -> None:
    await account(any_database)
    stranger = Customer("acme", "GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ")
    refused = await refusal(any_database, stranger.grant())
    assert refused.reason == "not_enrolled"
    assert "ask the operator" in str(refused)
    acme = await enrolled(any_database)
    grant = acme.grant()
    refused = await refusal(any_database, replace(grant, code=None))
    assert refused.reason == "required"
    assert "'X-MFA-Code'" in str(refused)
    assert await factor(any_database) == (0, 0, False)
    assert await outcome(any_database, grant) == "changed"


async def test_the_code_of_another_account_or_of_another_time_is_a_guess(any_database: Database) -> None:
    await account(any_database)
    await account(any_database, "umbra")
    umbra = await enrolled(any_database, "umbra")
    await mfa.enroll(any_database, "acme", Secret("GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ"), KEY, fresh_bytes(12))
    acme = Customer("acme", "GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ", umbra.now_s)
    old = acme.code()
    acme.now_s += 60
    assert await outcome(any_database, acme.grant(umbra.grant().code)) == "invalid"
    assert await outcome(any_database, acme.grant(old)) == "invalid"
    found = await rows(any_database, "select account_id, failures from mfa_factors order by account_id")
    assert [tuple(row.values()) for row in found] == [("acme", 2), ("umbra", 0)]
    assert await outcome(any_database, umbra.grant()) == "changed"


async def test_a_hundred_guesses_at_once_are_counted_one_by_one_until_the_lock(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    await account(any_database)
    acme = await enrolled(any_database)
    async with replica(any_postgres, any_database) as other:
        guesses = [acme.wrong_grant() for _ in range(100)]
        found = await asyncio.gather(
            *(outcome(other if number % 2 else any_database, guess) for number, guess in enumerate(guesses))
        )
    assert Counter(found) == {"invalid": 4, "locked": 96}
    assert await factor(any_database) == (0, 5, True)
    assert await values(any_database, "select 1 from used_tokens") == []


async def test_the_lock_doubles_and_a_right_code_lifts_nothing_before_its_end(any_database: Database) -> None:
    await account(any_database)
    acme = await enrolled(any_database)
    ahead_s = 0.0
    for guesses, lock_s in ((5, 900), (3, 1800), (3, 3600)):
        for _ in range(guesses - 1):
            assert (await refusal(any_database, acme.wrong_grant())).reason == "invalid"
        last = await refusal(any_database, acme.wrong_grant())
        assert (last.reason, last.retry_after_s) == ("locked", lock_s)
        right = await refusal(any_database, acme.grant())
        assert right.reason == "locked"
        assert right.retry_after_s in range(lock_s - 5, lock_s + 1)
        nothing = await refusal(any_database, replace(acme.grant(), code=None))
        assert nothing.reason == "locked"
        await shift_clock(any_database, ahead_s + lock_s - 5)
        assert await outcome(any_database, acme.grant()) == "locked"
        ahead_s += lock_s + 1
        await shift_clock(any_database, ahead_s)
    assert await factor(any_database) == (0, 11, False)
    assert await outcome(any_database, acme.grant()) == "changed"
    assert await factor(any_database) == (step(acme), 0, False)
    found = [await outcome(any_database, acme.wrong_grant()) for _ in range(5)]
    assert found == ["invalid"] * 4 + ["locked"], "five guesses again"


async def test_resetting_a_factor_lifts_its_lock_and_the_old_codes_are_gone(any_database: Database) -> None:
    await account(any_database)
    old = await enrolled(any_database)
    with pytest.raises(InputError, match="second factor already: 'vaultevents mfa reset acme' removes it"):
        await enrolled(any_database)
    for _ in range(5):
        await outcome(any_database, old.wrong_grant())
    await mfa.reset(any_database, "acme")
    assert await outcome(any_database, old.grant()) == "not_enrolled"
    with pytest.raises(InputError, match="has no second factor"):
        await mfa.reset(any_database, "acme")
    new = await enrolled(any_database)
    assert await outcome(any_database, old.grant()) == "invalid"
    assert await outcome(any_database, new.grant()) == "changed"
    for change in (mfa.reset(any_database, "nobody"), enrolled(any_database, "nobody")):
        with pytest.raises(InputError, match="there is no account 'nobody'"):
            await change


async def test_a_seed_that_was_moved_to_another_account_does_not_open(any_database: Database) -> None:
    for name in ("acme", "umbra"):
        await account(any_database, name)
    acme, umbra = await enrolled(any_database), await enrolled(any_database, "umbra")
    async with any_database.transaction() as connection:
        await connection.execute(
            "update mfa_factors m set sealed = o.sealed from mfa_factors o where o.account_id <> m.account_id"
        )
    with pytest.raises(SealBroken, match="mfa acme does not open"):
        await rename(any_database, replace(umbra.grant(), account_id="acme"))
    with pytest.raises(SealBroken):
        await rename(any_database, acme.grant())
    assert await changes(any_database) == 0


async def test_tokens_are_remembered_for_a_minute(any_database: Database) -> None:
    await account(any_database)
    acme = await enrolled(any_database)
    grant = acme.grant()
    await rename(any_database, grant)
    await shift_clock(any_database, 55)
    await forget(any_database)
    assert await outcome(any_database, grant) == "replayed"
    await shift_clock(any_database, 61)
    await forget(any_database)
    assert await values(any_database, "select 1 from used_tokens") == []


# The second wall: what a statement of the API can do that forgot its account.

OWN_ROWS_ONLY = {
    *("accounts", "vaults", "vault_spans", "events", "webhooks", "webhook_secrets", "webhook_revisions"),
    *(
        "deliveries",
        "queue",
        "leases",
        "resends",
        "attempts",
        "pruned",
        "mfa_factors",
        "used_tokens",
        "idempotent_answers",
    ),
}
WITHOUT_AN_OWNER = {"registry", "feed"}
WRITTEN_ONLY = {"audit_log", "notices", "flag_changes", "due_webhooks"}  # no account reads them


async def full_house(database: Database) -> None:
    """Two accounts, each with a row in every table that has an owner."""
    outbox = await simple_simulation(database)
    await account(database, "umbra")
    await vault(database, "v1", account_id="umbra", first_block=1)
    for name in ("acme", "umbra"):
        subscription = await webhook(database, account_id=name)
        customer = await enrolled(database, name)
        async with changing(database, customer) as change:
            await webhook_management.keep_answer(
                change,
                webhook_management.Idempotency("key", bytes(32)),
                subscription.id,
                Secret("answer"),
                KEY,
                fresh_bytes(12),
            )
        async with action(database, customer.grant()) as connection:
            await resends.request_test(connection, name, subscription.id, "test", b"{}")
    await commit(outbox, funding(1))
    await deliveries.settle(database, [settlement(delivery) for delivery in (await take(database)).deliveries])
    await shift_clock(database, 2 * 24 * 3600)
    await prune(database, timedelta(days=1), pause_s=0)
    await commit(outbox, funding(2))
    await deliveries.settle(database, [settlement(delivery) for delivery in (await take(database)).deliveries])
    await commit(outbox, funding(3))
    await take(database)


async def test_an_account_sees_its_own_rows_only_even_without_a_where_clause(any_database: Database) -> None:
    await full_house(any_database)
    may_read = (
        "select relname::text from pg_class where relkind = 'r' and relnamespace = current_schema()::regnamespace"
    )
    readable = f"{may_read} and has_any_column_privilege('vaultevents_api', oid, 'select')"
    assert set(await values(any_database, readable)) == OWN_ROWS_ONLY | WITHOUT_AN_OWNER
    assert set(await values(any_database, f"{may_read} and relrowsecurity")) == OWN_ROWS_ONLY | WRITTEN_ONLY
    for table in sorted(OWN_ROWS_ONLY):
        (everybodys,) = await values(any_database, f"select count(*)::int from {table}")
        for name in ("acme", "umbra"):
            async with any_database.of_account(name) as connection:
                own = await connection.fetchval(f"select count(*)::int from {table}")
            assert (table, own * 2) == (table, everybodys)
            assert own > 0
        async with any_database.of_account("nobody") as connection:
            assert await connection.fetchval(f"select count(*)::int from {table}") == 0
    await assert_ledger(any_database)


async def forbidden(database: Database, statement: str, account_id: str = "acme") -> None:
    with pytest.raises(DatabaseUnusable, match=r"permission denied|row-level security"):
        async with database.of_account(account_id) as connection:
            await connection.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "select sealed from webhook_secrets",
        "select 1 from api_keys",
        "select 1 from api_public_keys",
        "select 1 from hash_key",
        "select 1 from key_ring",
        "update events set body = ''",
        "update events set suppressed = true",
        "delete from events",
        "insert into events (account_id) values ('acme')",
        "insert into deliveries (event_seq, webhook_id, state) values (1, 'wh', 'parked')",
        "insert into attempts (delivery_id) values (1)",
        "update attempts set status = 200",
        "update mfa_factors set sealed = ''",
        "delete from mfa_factors",
        "delete from used_tokens",
        "update used_tokens set used_at = db_now()",
        "delete from webhook_revisions",
        "delete from deliveries",
        "delete from webhooks",
        "insert into accounts (id, name) values ('new', 'New')",
        "update accounts set name = 'Other'",
        "insert into vaults (account_id, id, address) values ('acme', 'v9', '')",
        "update registry set version = version + 1",
        "update feed set epoch = 2",
        "create table mine (id int)",
    ],
)
async def test_the_api_cannot_read_sealed_secrets_or_change_what_is_reported(
    database: Database, statement: str
) -> None:
    await forbidden(database, statement)


async def test_an_account_changes_no_row_of_another(any_database: Database) -> None:
    await full_house(any_database)
    tables = ("webhooks", "deliveries", "idempotent_answers", "mfa_factors", "webhook_secrets")
    before = [await rows(any_database, f"select * from {table} order by 1") for table in tables]
    (foreign,) = await values(any_database, "select id from webhooks where account_id = 'umbra'")
    async with any_database.of_account("acme") as connection:
        for statement in (
            "update webhooks set url = 'https://evil.example' where account_id = 'umbra'",
            f"update deliveries set state = 'cancelled' where webhook_id = '{foreign}'",
            "update idempotent_answers set sealed = null where account_id = 'umbra'",
            "update mfa_factors set failures = 0, last_step = 0 where account_id = 'umbra'",
            f"delete from webhook_secrets where webhook_id = '{foreign}'",
            "delete from idempotent_answers where account_id = 'umbra'",
        ):
            assert (await connection.execute(statement)).endswith(" 0"), statement
    assert [await rows(any_database, f"select * from {table} order by 1") for table in tables] == before
    for statement in (
        "insert into webhooks (id, account_id, url, active) values ('new', 'umbra', 'https://x', true)",
        "update webhooks set account_id = 'umbra'",
        f"insert into webhook_secrets (webhook_id, key_id, sealed) values ('{foreign}', '', '')",
        f"insert into webhook_revisions values (9, '{foreign}', 'umbra', null, null, true)",
        "insert into used_tokens (digest, account_id) values (decode(repeat('00', 32), 'hex'), 'umbra')",
    ):
        await forbidden(any_database, statement)


async def test_a_connection_of_one_account_serves_the_next_one_as_that_one(
    any_postgres: ServerAddress, any_database: Database
) -> None:
    await full_house(any_database)
    narrow = await open_database(await target_of(any_postgres, any_database), pool_size=1)
    for name in ("acme", "umbra", "acme"):
        async with narrow.of_account(name) as connection:
            assert await connection.fetchval("select id from accounts") == name
        async with narrow.reading(name) as connection:
            assert await connection.fetchval("select id from accounts") == name
    assert await values(narrow, "select count(*)::int from accounts") == [2], "the service's own connections see all"
    await narrow.close()
