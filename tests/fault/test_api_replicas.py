"""One token makes one change, however many copies of its request reach however many processes (rule A13)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pyotp
import pytest

from api_fixtures import key_pair, public_pem
from command_line import Place, Running, asking, place
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

pytestmark = pytest.mark.fault

TARGET = "/v1/account/webhooks"
BODY = b'{"url":"https://example.org/hook"}'
ROUNDS = 50
COPIES = 100
FREELY = "port = 0\nrequests_per_minute = 1000000\nburst = 1000000\nwebhooks_per_account = 1000"


@dataclass(frozen=True, slots=True)
class Site:
    """Two API processes on one database, and a customer of theirs."""

    here: Place
    server: ServerAddress
    api_key: str
    seed: str

    @asynccontextmanager
    async def replicas(self) -> AsyncIterator[list[str]]:
        processes = [await self.here.shell.start("run", "--only", "api") for _ in range(2)]
        yield [await listening(process) for process in processes]
        for process in processes:
            ended = (await process.end()).ok()
            assert "Traceback" not in ended.stderr

    async def request(self, number: int) -> dict[str, str]:
        """The headers of a request that is signed once, with a code that was not used yet."""
        async with asking(self.server, self.here.schema) as connection:
            await connection.execute("update mfa_factors set last_step = 0")
        now_s = time.time()
        token = sign_request(key_pair(), target=TARGET, body=BODY, now_s=now_s, nonce=number)
        return {
            "authorization": f"Bearer {token}",
            "x-api-key": self.api_key,
            "x-mfa-code": pyotp.HOTP(self.seed).at(int(now_s) // STEP_S),
            "content-type": "application/json",
        }

    async def webhooks(self) -> int:
        async with asking(self.server, self.here.schema) as connection:
            found: int = await connection.fetchval("select count(*) from webhooks")
            return found


async def listening(process: Running) -> str:
    await process.said("api_listens")
    lines = [json.loads(line) for line in process.stderr_so_far.splitlines() if line.startswith("{")]
    (url,) = [line["url"] for line in lines if line["event"] == "api_listens"]
    return str(url)


@asynccontextmanager
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    with EmbeddedPostgres(tmp_path / "data" / "postgres") as server:
        async with place(tmp_path, tmp_path / "data", Simulation(6)) as here:
            here.configure(api=FREELY)
            api_key, seed = "vek_" + "r" * 43, new_seed(os.urandom(SEED_BYTES))
            async with open_store(config.load(here.config)) as store:
                await accounts.add_account(store.database, "acme", "Acme")
                await mfa.enroll(store.database, "acme", seed, store.key, os.urandom(NONCE_BYTES))
                der = parse_public_key(public_pem(key_pair()))
                hashed = keyed_hash(await open_hash_key(store), api_key)
                name = fingerprint(der)
                await apikeys.add_key(store.database, "key-1", "acme", "", "manage", hashed, None, der, name)
            yield Site(here, server, api_key, seed.reveal())


async def post(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> str:
    """What became of one copy: its code, or 'created'."""
    async with session.post(url + TARGET, data=BODY, headers=headers) as answer:
        reported = await answer.json(content_type=None)
        return "created" if answer.status == 201 else str(reported["code"])


async def test_a_hundred_copies_over_two_processes_make_one_webhook(tmp_path: Path) -> None:
    async with site(tmp_path) as found, found.replicas() as urls:
        connector = aiohttp.TCPConnector(limit=COPIES)
        async with aiohttp.ClientSession(connector=connector) as session:
            for number in range(ROUNDS):
                headers = await found.request(number)
                copies = [post(session, urls[copy % 2], headers) for copy in range(COPIES)]
                outcome = Counter(await asyncio.gather(*copies))
                assert outcome == {"created": 1, "token_replayed": COPIES - 1}
                assert await found.webhooks() == number + 1


async def test_a_used_token_is_refused_after_everything_was_killed_and_restarted(tmp_path: Path) -> None:
    async with site(tmp_path) as found:
        async with found.replicas() as urls, aiohttp.ClientSession() as session:
            headers = await found.request(1)
            assert await post(session, urls[0], headers) == "created"
        data = tmp_path / "data" / "postgres"
        pid = int(next(data.rglob("postmaster.pid")).read_text().splitlines()[0])
        os.kill(pid, signal.SIGKILL)
        async with found.replicas() as urls, aiohttp.ClientSession() as session:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while "unavailable" in (codes := [await post(session, url, headers) for url in urls]):
                    await asyncio.sleep(0.2)
        assert set(codes) == {"token_replayed"}
        async with asking(found.server, found.here.schema) as connection:
            await connection.execute("delete from used_tokens")  # the control: it is this table that remembers
            await connection.execute("update mfa_factors set last_step = 0")
        async with found.replicas() as urls, aiohttp.ClientSession() as session:
            assert await post(session, urls[1], headers) == "created"
