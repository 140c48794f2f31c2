"""No account sees or changes another's: every route × own, foreign, random and malformed ids × both accounts (rule T8).

The routes come from the description, so that a new one cannot be forgotten.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from api_fixtures import Api, ApiResponse, Customer, running_api
from store_factories import commit, funding, live_at, rows, settlement, take, values, vault
from vaultevents.core.errors import DatabaseUnusable
from vaultevents.store.deliveries import settle
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_unverified_pause")]

VARYING = ("date", "content-length", "x-request-id")

ACCOUNTS = ("acme", "umbra")
BODIES: dict[tuple[str, str], Any] = {
    ("post", "/v1/account/webhooks"): {"url": "https://new.example/"},
    ("patch", "/v1/account/webhooks/{webhook_id}"): {"url": "https://changed.example/"},
    ("post", "/v1/account/webhooks/{webhook_id}/recover"): {"since": 0},
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
    """Two accounts that watch one vault, and one more each, with webhooks, events, attempts and a kept answer."""
    customers = {
        name: await api.customer(name, vaults=(f"{name}-vault",), pair=number) for number, name in enumerate(ACCOUNTS)
    }
    webhooks = {}
    for name, customer in customers.items():
        await vault(api.database, f"{name}-shared", account_id=name, at="shared")
        webhooks[name] = await new_webhook(api, customer, {"idempotency-key": "the-same"})
    outbox = await live_at(api.database, 0)
    await commit(
        outbox, funding(0, vault="shared"), *(funding(n, vault=f"{a}-vault") for n, a in enumerate(ACCOUNTS, 1))
    )
    await settle(api.database, [settlement(delivery) for delivery in (await take(api.database)).deliveries])
    found = {}
    for name, customer in customers.items():
        await new_webhook(api, customer)
        (event_id, _) = await values(api.database, "select id from events where account_id = $1 order by seq", name)
        found[name] = Estate(customer, webhooks[name], event_id)
    return found


async def new_webhook(api: Api, customer: Customer, headers: dict[str, str] | None = None) -> str:
    body = {"url": f"https://{customer.account_id}.example/secret-path"}
    answer = await api.call(customer, "POST", "/v1/account/webhooks", body, headers=headers)
    assert answer.status == 201, answer.body
    webhook_id: str = answer.json["id"]
    return webhook_id


async def operations(api: Api, parameter: str = "") -> list[tuple[str, str]]:
    """Method and path of every route, or of those with this parameter."""
    document = (await api.send("GET", "/v1/openapi.json", {})).json
    return [
        (method, path)
        for path, methods in document["paths"].items()
        for method, facts in methods.items()
        if not parameter or parameter in (each["name"] for each in facts.get("parameters", []))
    ]


def filled(path: str, ids: dict[str, str]) -> str:
    for name, value in ids.items():
        path = path.replace("{" + name + "}", value)
    assert "{" not in path, f"give {path} an id in this test"
    return path


async def ask(api: Api, customer: Customer, method: str, path: str, ids: dict[str, str]) -> ApiResponse:
    return await api.call(customer, method.upper(), filled(path, ids), BODIES.get((method, path)))


def without_ids(answer: ApiResponse, ids: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """All of an answer but the ids that were asked for, the request's own, and the time."""
    body = answer.body
    for value in (*ids.values(), answer.json["requestId"]):
        body = body.replace(value.encode(), b"ID")
    headers = {name: value for name, value in answer.headers.items() if name not in VARYING}
    return answer.status, headers, body


OWNER = """
select c.table_name as name, case
    when c.table_name = 'accounts' then 't.id'
    when bool_or(c.column_name = 'account_id') then 't.account_id'
    when bool_or(c.column_name = 'webhook_id') then '(select account_id from webhooks where id = t.webhook_id)'
    when bool_or(c.column_name = 'delivery_id') then
        '(select account_id from webhooks where id = (select webhook_id from deliveries where id = t.delivery_id))'
    when bool_or(c.column_name = 'event_seq') then '(select account_id from events where seq = t.event_seq)'
    when bool_or(c.column_name = 'api_key_id') then '(select account_id from api_keys where id = t.api_key_id)'
end as owner
from information_schema.columns c where c.table_schema = current_schema() group by c.table_name order by 1
"""
"""Every table of the schema, and the owner of its rows; null where there is none."""

SHARED = {"cursors", "discovery", "feed", "hash_key", "key_ring", "migrations", "network", "registry", "reports"}
SHARED |= {
    "console_links",
    "console_sessions",
    "deposit_searches",
    "deposits",
    "health_probe",
    "near_blocks",
    "nodes",
    "quarantined_addresses",
    "quarantined_logs",
    "row_totals",
    "validators",
}


async def belongings(database: Database, account_id: str) -> dict[str, list[str]]:
    """Every row of an account, in every table there is."""
    tables = {row["name"]: row["owner"] for row in await rows(database, OWNER)}
    return {
        table: await values(database, f"select t::text from {table} t where {owner} = $1 order by 1", account_id)
        for table, owner in tables.items()
        if owner is not None
    }


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
            assert answer.body != b"[]", path


async def test_changes_reach_only_the_own_account(api: Api) -> None:
    estate = await estates(api)
    before = await belongings(api.database, "umbra")
    own = estate["acme"]
    routes = await operations(api)
    routes.sort(key=lambda route: route[0] == "delete")  # what it deletes, the others need
    for method, path in routes:
        if method != "get":
            answer = await ask(api, own.customer, method, path, own.ids)
            assert answer.status < 300, (method, path, answer.body)
    assert await belongings(api.database, "umbra") == before
    ownerless = {row["name"] for row in await rows(api.database, OWNER) if row["owner"] is None}
    assert ownerless == SHARED, "name the owner of the rows of a new table"


async def test_foreign_vaults_are_unknown_vaults(api: Api) -> None:
    estate = await estates(api)
    customer = estate["acme"].customer
    reported = []
    for vault_id in ("umbra-vault", "nobody-vault", "umbra-vault\u0000", "' or 1=1"):
        body = {"url": "https://x.example/", "stakingVaultIds": ["acme-vault", vault_id]}
        for method, target in (("POST", ""), ("PATCH", f"/{estate['acme'].ids['webhook_id']}")):
            answer = await api.call(customer, method, f"/v1/account/webhooks{target}", body)
            assert (answer.status, answer.pointers) == (422, [("/stakingVaultIds/1", "vault_unknown")])
            reported.append((method, answer.json["errors"][0]["detail"].replace(repr(vault_id), "ID")))
    assert len(set(reported)) == 2


async def test_a_page_link_of_another_account_is_unknown(api: Api) -> None:
    estate = await estates(api)
    own, foreign = estate["acme"], estate["umbra"]
    lists = [path for _, path in await operations(api, "cursor")]
    assert len(lists) == 4
    links = {}
    for path in lists:
        cursors = []
        for one in (own, foreign):
            target = filled(path, one.ids) + "?limit=1"
            link = (await api.call(one.customer, "GET", target)).headers["link"].split(">")[0].removeprefix("<")
            assert (await api.call(one.customer, "GET", link)).status == 200
            cursors.append(link.partition("cursor=")[2])
        links[path] = cursors
    for path, (_, of_foreign) in links.items():
        of_other_lists = [mine for other, (mine, _) in links.items() if other != path]
        reported = []
        for cursor in (of_foreign, "AAAA", *of_other_lists):
            answer = await api.call(own.customer, "GET", f"{filled(path, own.ids)}?limit=1&cursor={cursor}")
            assert (answer.status, answer.pointers) == (422, [("?cursor", "cursor_unknown")]), path
            reported.append(without_ids(answer, {}))
        assert all(line == reported[0] for line in reported)


READABLE = """
select relname as name, relrowsecurity as walled from pg_class c
where relkind in ('r', 'p', 'v', 'm') and relnamespace = current_schema()::regnamespace
    and has_any_column_privilege('vaultevents_api', c.oid, 'select')
"""


async def test_without_the_accounts_name_in_a_statement_the_second_wall_stands(api: Api) -> None:
    """In every table that the role of the API may read: one that a later migration grants has to be walled, too."""
    estate = await estates(api)
    pending = [funding(number, vault=f"{name}-vault") for number, name in enumerate(ACCOUNTS, 10)]
    await commit(Outbox(api.database), *pending)
    for own in estate.values():
        tried = await api.call(own.customer, "POST", f"/v1/account/webhooks/{own.ids['webhook_id']}/test")
        assert tried.status == 202
    async with api.database.transaction() as connection:
        await connection.execute("insert into pruned select id, 0, 'delivered', false, '{}' from webhooks")
        await connection.execute("insert into leases select id, gen_random_uuid(), db_now(), '{}' from webhooks")
    tables = await rows(api.database, READABLE)
    assert {row["name"] for row in tables if not row["walled"]} == {"registry", "feed"}, "they hold nothing of accounts"
    owners = {row["name"]: row["owner"] for row in await rows(api.database, OWNER)}
    walled = [row["name"] for row in tables if row["walled"]]
    assert len(walled) == 16
    for account_id, seen in (*((name, [name]) for name in ACCOUNTS), ("nobody", []), ("", []), ("%", [])):
        for way in (api.database.reading, api.database.of_account):
            async with way(account_id) as connection:
                for table in walled:
                    found = await connection.fetch(f"select distinct {owners[table]} from {table} t")
                    assert [row[0] for row in found] == seen, (account_id, table)


async def test_statements_that_name_no_account_change_only_ones_own_rows(api: Api) -> None:
    await estates(api)
    before = await belongings(api.database, "umbra")
    async with api.database.of_account("acme") as connection:
        for statement in (
            "update webhooks set url = 'https://evil.example/'",
            "update deliveries set state = 'cancelled'",
            "update mfa_factors set failures = 9, last_step = 0, locked_until = null",
            "update idempotent_answers set sealed = null",
            "delete from idempotent_answers",
            "delete from webhook_secrets",
        ):
            done = await connection.execute(statement)
            assert int(done.split()[1]) > 0, f"{statement} has to reach something"
    assert await belongings(api.database, "umbra") == before


FORBIDDEN = (
    "update events set body = ''",
    "delete from events",
    "insert into events (account_id) values ('acme')",
    "select sealed from webhook_secrets",
    "select * from webhook_secrets",
    "update webhook_secrets set valid_until = null",
    "select hash from api_keys",
    "select der from api_public_keys",
    "select used_at from api_key_uses",
    "select version from key_ring",
    "select sealed from hash_key",
    "update mfa_factors set sealed = ''",
    "insert into mfa_factors (account_id) values ('acme')",
    "delete from mfa_factors",
    "update accounts set name = ''",
    "update vaults set address = ''",
    "delete from used_tokens",
    "update used_tokens set used_at = used_at",
    "update attempts set status = 200",
    "insert into deliveries (webhook_id) values ('wh-1')",
    "delete from deliveries",
    "delete from webhooks",
    "update registry set version = 0",
    "update feed set epoch = 2",
    "update resends set finished_at = null",
    "insert into resends (webhook_id, event_id, body, status) select id, 't', '', 200 from webhooks",
    "select 1 from migrations",
    "create table mine (x int)",
    # and what the second wall refuses
    "insert into webhooks (id, account_id, url) values ('wh-x', 'umbra', 'https://x.example/')",
    "update webhooks set account_id = 'umbra'",
    "insert into used_tokens (digest, account_id) values (sha256(''), 'umbra')",
    "insert into idempotent_answers (account_id, key) values ('umbra', 'k')",
    "insert into webhook_secrets (webhook_id) values ((select 'wh-of-nobody'))",
    "insert into resends (webhook_id, event_id, body) values ('wh-of-nobody', 't', '')",
)


async def test_what_the_role_of_the_api_may_not_do(api: Api) -> None:
    await estates(api)
    for statement in FORBIDDEN:
        with pytest.raises(DatabaseUnusable, match=r"permission denied|row-level security"):
            async with api.database.of_account("acme") as connection:
                await connection.execute(statement)
