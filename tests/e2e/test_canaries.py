"""A thousand secrets are used against a running daemon, rightly and wrongly, and found nowhere (rules T9 to T11)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pyotp
import pytest

from api_fixtures import key_pair, public_pem
from command_line import Place, asking, place
from timeouts import WAIT_TIMEOUT_S
from vaultevents import config
from vaultevents.core.rsakeys import fingerprint, parse_public_key
from vaultevents.core.sealing import NONCE_BYTES, keyed_hash
from vaultevents.core.tokens import sign_request
from vaultevents.core.totp import SEED_BYTES, STEP_S, new_seed
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import accounts, apikeys, mfa
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress
from vaultevents.wiring.database import open_hash_key, open_store

pytestmark = pytest.mark.e2e

CUSTOMERS = 120
WEBHOOKS = "/v1/account/webhooks"


@dataclass(frozen=True, slots=True)
class Customer:
    account_id: str
    api_key: str
    seed: str


@dataclass(slots=True)
class Scenario:
    """What was used, and what was seen of it."""

    canaries: set[str] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)

    def use(self, *texts: str) -> None:
        self.canaries.update(texts)


def spellings(canary: str) -> set[str]:
    """How a secret may turn up."""
    raw = canary.encode()
    return {canary, quote(canary, safe=""), raw.hex(), base64.b64encode(raw).decode().rstrip("=")}


def found(canaries: Iterable[str], text: str) -> set[str]:
    return {canary for canary in canaries if any(form in text for form in spellings(canary))}


async def dump(server: ServerAddress, schema: str) -> str:
    """Every row of every table, bytes in hex."""
    async with asking(server, schema) as connection:
        tables = await connection.fetch(
            "select relname from pg_class where relkind = 'r' and relnamespace = current_schema()::regnamespace"
        )
        parts = []
        for table in tables:
            rows = await connection.fetch(f'select t::text as line from "{table["relname"]}" t')
            parts += [row["line"] for row in rows]
    return "\n".join(parts)


@asynccontextmanager
async def site(tmp_path: Path) -> AsyncIterator[tuple[Place, ServerAddress, list[Customer], Scenario]]:
    """A configured place with its customers; what is secret of both is noted."""
    scenario, simulation = Scenario(), Simulation(8)
    simulation.history(20, 30)
    with EmbeddedPostgres(tmp_path / "data" / "postgres") as server:
        async with place(tmp_path, tmp_path / "data", simulation) as here:
            rpc_key = secrets.token_hex(16)
            here.url = f"{here.url}/?apikey={rpc_key}"
            sockets = f'websocket_urls = ["{here.url.replace("http", "ws")}", "ws://127.0.0.1:1/{rpc_key}"]'
            api = "port = 0\nrequests_per_minute = 1000000\nburst = 1000000"
            here.configure(execution=sockets, api=api, log='level = "debug"', metrics='serve = "on"\nport = 0')
            customers = await enrolled(config.load(here.config))
            scenario.use(server.password, rpc_key, (tmp_path / "data" / "master.key").read_text().strip())
            for customer in customers:
                scenario.use(customer.api_key, customer.seed)
            yield here, server, customers, scenario


async def enrolled(settings: config.Settings) -> list[Customer]:
    """Accounts, each with an API key and a second factor."""
    customers = []
    der = parse_public_key(public_pem(key_pair()))
    async with open_store(settings) as store:
        hash_key = await open_hash_key(store)
        for number in range(CUSTOMERS):
            seed = new_seed(os.urandom(SEED_BYTES))
            one = Customer(f"acct-{number}", f"vek_{secrets.token_urlsafe(32)}", seed.reveal())
            await accounts.add_account(store.database, one.account_id, one.account_id)
            await mfa.enroll(store.database, one.account_id, seed, store.key, os.urandom(NONCE_BYTES))
            hashed, name = keyed_hash(hash_key, one.api_key), fingerprint(der)
            await apikeys.add_key(
                store.database, f"key-{number}", one.account_id, "", "manage", hashed, None, der, name
            )
            customers.append(one)
    return customers


async def ask(
    session: aiohttp.ClientSession,
    scenario: Scenario,
    url: str,
    one: Customer,
    method: str,
    target: str,
    **options: str,
) -> aiohttp.ClientResponse:
    """A signed request; its token is one more secret, and a refusal one more text that must not repeat any."""
    body = options.get("body", "").encode()
    token = sign_request(
        key_pair(), target=options.get("signed", target), body=body, now_s=time.time(), nonce=secrets.randbelow(100_000)
    )
    scenario.use(token, token.rsplit(".", 1)[1])
    headers = {"x-api-key": options.get("api_key", one.api_key), "authorization": f"Bearer {token}"}
    if body:
        headers["content-type"] = "application/json"
    if "code" in options:
        headers["x-mfa-code"] = options["code"]
    answer = await session.request(method, url + target, headers=headers, data=body or None)
    text = await answer.text()
    if answer.status == 201:
        scenario.use(json.loads(text)["secretToken"])
    else:
        scenario.seen.append(text)
    scenario.seen.append(str(dict(answer.headers)))
    return answer


async def test_no_secret_is_found_anywhere(tmp_path: Path) -> None:
    async with site(tmp_path) as (here, server, customers, scenario):
        daemon = await here.shell.start("run")
        await daemon.said("api_listens")
        await daemon.said("metrics_listen")
        lines = [json.loads(line) for line in daemon.stderr_so_far.splitlines() if line.startswith("{")]
        (url,) = [line["url"] for line in lines if line["event"] == "api_listens"]
        (scraped,) = [line["url"] for line in lines if line["event"] == "metrics_listen"]
        statuses = set()
        async with aiohttp.ClientSession() as session:

            async def all_that_one_can_do(one: Customer) -> None:
                new = json.dumps({"url": f"https://hooks.example/{secrets.token_hex(4)}"})
                right = pyotp.HOTP(one.seed).at(int(time.time()) // STEP_S)
                stranger = f"vek_{secrets.token_urlsafe(32)}"
                scenario.use(stranger)
                for method, target, options in (
                    ("GET", "/v1/account", {}),
                    ("GET", WEBHOOKS, {}),
                    ("GET", "/v1/account", {"signed": "/v1/other"}),
                    ("GET", "/v1/account", {"api_key": stranger}),
                    ("POST", WEBHOOKS, {"body": new}),
                    ("POST", WEBHOOKS, {"body": new, "code": "000000" if right != "000000" else "111111"}),
                    ("POST", WEBHOOKS, {"body": '{"url":"http://x"}', "code": right}),
                    ("POST", WEBHOOKS, {"body": new, "code": right}),
                    ("GET", f"{WEBHOOKS}/nothing", {}),
                ):
                    statuses.add((await ask(session, scenario, url, one, method, target, **options)).status)

            for begin in range(0, CUSTOMERS, 10):
                await asyncio.gather(*map(all_that_one_can_do, customers[begin : begin + 10]))
        assert statuses >= {200, 201, 401, 404, 422}
        assert len(scenario.canaries) >= 1000
        async with asyncio.timeout(WAIT_TIMEOUT_S):  # the watchers have read with the key in their URL
            while not (await here.status())["cursors"]:
                await asyncio.sleep(0.2)
        reported = (await here.run("status", "--json")).stdout
        async with aiohttp.ClientSession() as session, session.get(f"{scraped}/metrics") as answer:
            measured = await answer.text()
        ended = (await daemon.end()).ok()
        places = {
            "logs": ended.stderr + ended.stdout,
            "answers": "\n".join(scenario.seen),
            "status": reported,
            "metrics": measured,
            "database": await dump(server, here.schema),
        }
        assert all(len(text) > 100 for text in places.values())
        assert {name: found(scenario.canaries, text) for name, text in places.items()} == {
            name: set() for name in places
        }

        # the control: the same search finds one that is stored in a table, and one that a log lets slip in hex
        async with asking(server, here.schema) as connection:
            await connection.execute("update accounts set name = $1 where id = 'acct-0'", customers[0].seed)
        assert found(scenario.canaries, await dump(server, here.schema)) == {customers[0].seed}
        slip = f"{places['logs']}\nkey {customers[1].api_key.encode().hex()}"
        assert found(scenario.canaries, slip) == {customers[1].api_key}
