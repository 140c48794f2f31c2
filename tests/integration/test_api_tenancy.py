"""No account sees or changes another one's: every route × own, foreign, random and malformed ids × both accounts (S4).

The routes come from the description, so that a new one cannot be forgotten.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asyncpg import InsufficientPrivilegeError

from api_worlds import Answer, Api, Customer, running_api
from store_stories import commit, funding, live_at, rows, settlement, take
from vaultevents.store.deliveries import settle
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

ACCOUNTS = ("acme", "umbra")
BODIES: dict[tuple[str, str], Any] = {
    ("post", "/v1/account/webhooks"): {"url": "https://new.example/"},
    ("patch", "/v1/account/webhooks/{webhook_id}"): {"url": "https://changed.example/"},
}
RANDOM = {"webhook_id": "wh-0123456789abcdef01234567", "event_id": "funding_received_nobody_0XAB"}
MALFORMED = {"webhook_id": "%27%20or%201=1--", "event_id": "..%2f..%2fumbra"}


class Estate:
    """What belongs to one account."""

    def __init__(self, customer: Customer, webhook_id: str, event_id: str) -> None:
        self.customer = customer
        self.ids = {"webhook_id": webhook_id, "event_id": event_id}


@pytest.fixture
async def api(database: Database) -> AsyncIterator[Api]:
    async with running_api(database) as running:
        yield running


async def estates(api: Api) -> dict[str, Estate]:
    """Two accounts that watch the same vault under ids of their own, with webhooks, events and attempts."""
    customers = [
        await api.customer(account_id, vaults=(f"{account_id}-vault",), pair=number)
        for number, account_id in enumerate(ACCOUNTS)
    ]
    found = {}
    for customer in customers:
        body = {"url": f"https://{customer.account_id}.example/secret-path"}
        made = await api.call(customer, "POST", "/v1/account/webhooks", body)
        assert made.status == 201, made.body
        found[customer.account_id] = (customer, made.json["id"])
    outbox = await live_at(api.database, 0)
    await commit(outbox, *(funding(n, vault=f"{name}-vault") for n, name in enumerate(ACCOUNTS)))
    await settle(api.database, [settlement(one) for one in (await take(api.database)).deliveries])
    events = {row["account_id"]: row["id"] for row in await rows(api.database, "select account_id, id from events")}
    return {name: Estate(customer, webhook, events[name]) for name, (customer, webhook) in found.items()}


async def operations(api: Api) -> list[tuple[str, str]]:
    document = (await api.send("GET", "/v1/openapi.json", {})).json
    return [(method, path) for path, methods in document["paths"].items() for method in methods]


def filled(path: str, ids: dict[str, str]) -> str:
    for name, value in ids.items():
        path = path.replace("{" + name + "}", value)
    assert "{" not in path, f"give {path} an id in this test"
    return path


async def ask(api: Api, customer: Customer, method: str, path: str, ids: dict[str, str]) -> Answer:
    return await api.call(customer, method.upper(), filled(path, ids), BODIES.get((method, path)))


def without_ids(answer: Answer, ids: dict[str, str]) -> tuple[int, Any]:
    """All that is told but the ids that were asked for and the request's own."""
    text = answer.body.decode()
    for value in ids.values():
        text = text.replace(value, "ID")
    told = json.loads(text) if text else None
    if isinstance(told, dict):
        told.pop("requestId", None)
    return answer.status, told


async def belongings(database: Database, account_id: str) -> dict[str, list[dict[str, Any]]]:
    """Every row of an account."""
    by_account = ("accounts", "vaults", "events", "webhooks", "webhook_revisions", "api_keys")
    found = {
        table: await rows(
            database,
            f"select * from {table} where {'id' if table == 'accounts' else 'account_id'} = $1 order by 1, 2",
            account_id,
        )
        for table in by_account
    }
    for table in ("webhook_secrets", "deliveries"):
        found[table] = await rows(
            database,
            f"select t.* from {table} t join webhooks w on w.id = t.webhook_id where w.account_id = $1 order by 1, 2",
            account_id,
        )
    return found


def other_than(account_id: str) -> str:
    return next(name for name in ACCOUNTS if name != account_id)


async def test_foreign_ids_are_unknown_ids_on_every_route(api: Api) -> None:
    estate = await estates(api)
    asked = 0
    for account_id in ACCOUNTS:
        own, foreign = estate[account_id], estate[other_than(account_id)]
        before = await belongings(api.database, foreign.customer.account_id)
        for method, path in await operations(api):
            if "{" not in path:
                continue
            names = [name for name in RANDOM if "{" + name + "}" in path]
            for name in names:
                mixed = {**own.ids, name: foreign.ids[name]}
                random = {**own.ids, name: RANDOM[name]}
                malformed = {**own.ids, name: MALFORMED[name]}
                answers = [
                    without_ids(await ask(api, own.customer, method, path, ids), ids)
                    for ids in (mixed, random, malformed)
                ]
                asked += 3
                assert answers[0][0] == 404, (method, path, answers[0])
                assert answers[0] == answers[1] == answers[2], (method, path)
        assert await belongings(api.database, foreign.customer.account_id) == before
    assert asked >= 2 * 3 * 8


async def test_what_each_account_reads_is_its_own(api: Api) -> None:
    """And the routes work at all, else the test above would prove nothing."""
    estate = await estates(api)
    for account_id in ACCOUNTS:
        own, foreign = estate[account_id], other_than(account_id)
        for method, path in await operations(api):
            if method != "get":
                continue
            answer = await ask(api, own.customer, method, path, own.ids)
            assert answer.status == 200, (path, answer.body)
            assert foreign.encode() not in answer.body.lower(), path
            if path not in ("/v1/account/webhooks/{webhook_id}/health",):
                assert answer.body != b"[]", path


async def test_changes_reach_only_the_own_account(api: Api) -> None:
    estate = await estates(api)
    before = await belongings(api.database, "umbra")
    own = estate["acme"]
    for method, path in await operations(api):
        if method != "get":
            answer = await ask(api, own.customer, method, path, own.ids)
            assert answer.status < 300, (method, path, answer.body)
    assert await belongings(api.database, "umbra") == before


async def test_foreign_vaults_are_unknown_vaults(api: Api) -> None:
    estate = await estates(api)
    customer = estate["acme"].customer
    told = []
    for vault_id in ("umbra-vault", "nobody-vault", "umbra-vault\u0000", "' or 1=1"):
        body = {"url": "https://x.example/", "stakingVaultIds": ["acme-vault", vault_id]}
        for method, target in (("POST", ""), ("PATCH", f"/{estate['acme'].ids['webhook_id']}")):
            answer = await api.call(customer, method, f"/v1/account/webhooks{target}", body)
            assert (answer.status, answer.pointers) == (422, [("/stakingVaultIds/1", "vault_unknown")])
            told.append((method, answer.json["errors"][0]["detail"].replace(repr(vault_id), "ID")))
    assert len(set(told)) == 2


async def test_a_page_link_of_another_account_is_unknown(api: Api) -> None:
    estate = await estates(api)
    acme, umbra = (estate[name].customer for name in ACCOUNTS)
    for customer in (acme, umbra):
        for number in range(2):
            await api.call(customer, "POST", "/v1/account/webhooks", {"url": f"https://more.example/{number}"})
    for path in ("/v1/account/webhooks", "/v1/account/events"):
        link = (await api.call(umbra, "GET", f"{path}?limit=1")).headers["link"]
        target = link.split(">")[0].removeprefix("<")
        assert (await api.call(umbra, "GET", target)).status == 200
        foreign = await api.call(acme, "GET", target)
        invented = await api.call(acme, "GET", f"{path}?limit=1&cursor=AAAA")
        assert (foreign.status, foreign.pointers) == (422, [("?cursor", "cursor_unknown")])
        assert without_ids(foreign, {}) == without_ids(invented, {})


WALLED = {
    "accounts": "id",
    "vaults": "account_id",
    "vault_spans": "account_id",
    "events": "account_id",
    "webhooks": "account_id",
    "webhook_revisions": "account_id",
    "mfa_factors": "account_id",
    "used_tokens": "account_id",
}


async def test_without_the_accounts_name_in_a_statement_the_second_wall_stands(api: Api) -> None:
    await estates(api)
    for account_id in ACCOUNTS:
        async with api.database.reading(account_id) as connection:
            for table, column in WALLED.items():
                seen = {row[0] for row in await connection.fetch(f"select distinct {column} from {table}")}
                assert seen == {account_id}, table
            for table in ("deliveries", "attempts"):
                assert await connection.fetchval(f"select count(*) from {table}") == 1, table


async def test_the_wall_covers_every_table_that_the_api_may_read(api: Api) -> None:
    """A table that a later migration grants must have row-level security, or hold nothing of an account."""
    open_tables = await rows(
        api.database,
        "select relname as name from pg_class c where relkind = 'r' and relnamespace = current_schema()::regnamespace"
        " and has_any_column_privilege('vaultevents_api', c.oid, 'select') and not c.relrowsecurity",
    )
    assert {row["name"] for row in open_tables} == {"registry", "feed"}


def statements() -> Iterator[str]:
    yield "update events set body = ''"
    yield "delete from events"
    yield "insert into events (account_id) values ('acme')"
    yield "select sealed from webhook_secrets"
    yield "select hash from api_keys"
    yield "select sealed from hash_key"
    yield "update accounts set name = ''"
    yield "update vaults set address = ''"
    yield "delete from used_tokens"
    yield "update attempts set status = 200"
    yield "update registry set version = 0"


@pytest.mark.parametrize("statement", list(statements()))
async def test_what_the_role_of_the_api_may_not_do(api: Api, statement: str) -> None:
    async with api.database.reading("acme") as connection:
        with pytest.raises(InsufficientPrivilegeError):
            await connection.execute(statement)
