"""What a good tenant sees beside a hostile one: `python3 dev.py bench tenants --json`.

A real daemon delivers and serves the API for two accounts. The good one has one webhook; measured are the time from the
commit of an event and from a POST of a test to the receiver, in this process, and the answers of the API, all at the
99th percentile, first alone and then beside each kind of hostile tenant (`HOSTILE`), which is a process of its own. A
ratio is to the figure alone, or to `LEAST_MS` where that is less: both share two cores with the load. The last line is
the result; without `--json` a table stands before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final

import aiohttp
import uvloop
from _delivery import BODY, receiving
from _receiver import Receiver
from _result import print_result
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from vaultevents import config
from vaultevents.core.rsakeys import fingerprint, load_private_key, parse_public_key
from vaultevents.core.sealing import NONCE_BYTES, Secret, keyed_hash
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.tokens import sign_request
from vaultevents.core.webhooks import Webhook
from vaultevents.devnet.certificates import issue
from vaultevents.store import accounts, apikeys, resends, webhooks
from vaultevents.store.pool import Database
from vaultevents.telemetry import configure_logging
from vaultevents.wiring.database import Store, open_store

HOSTILE: Final = ("slow", "dead", "dead_names", "resending", "deep_queue", "pipelining", "idle", "errors", "guessing")
MEASURED_S = 12.0
PACE_S = 0.1
WEBHOOKS = 20
LEAST_MS = 40.0
LATE_S = 20.0
GOAL = {"worst_x": 2.0}
GOOD_ID = "wh-good"
LIST = "/v1/account/webhooks"

_ARRIVE = """
with happened as (
    insert into events (account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, suppressed,
        filter_revision)
    select $1, $2 || '_' || n, 'v1', 'funding_received', 1, 1, 1, $5, false, 1 from generate_series(1, $4::integer) n
    returning seq
), made as (
    insert into deliveries (event_seq, webhook_id, state)
    select seq, ($3::text[])[1 + seq % cardinality($3::text[])], 'scheduled' from happened where $3::text[] <> '{}'
    returning id, event_seq, webhook_id
)
insert into queue (delivery_id, event_seq, webhook_id, due_at) select id, event_seq, webhook_id, db_now() from made
"""


class Arrivals(Receiver):
    """Notes when each event arrived."""

    at_s: ClassVar[dict[str, float]] = {}

    def answer(self, request: bytes) -> None:
        """Note the event, and accept it."""
        super().answer(request)
        name = request.partition(b"webhook-id: ")[2].partition(b"\r\n")[0].decode()
        Arrivals.at_s.setdefault(name, time.monotonic())


@dataclass
class Tenant:
    """An account with its key; a customer's side of the API."""

    account_id: str
    url: str
    api_key: str
    pair: RSAPrivateKey
    nonce: int = field(default_factory=lambda: secrets.randbelow(50_000))

    def headers(self, target: str, body: bytes) -> dict[str, str]:
        """Sign a request."""
        self.nonce = (self.nonce + 1) % 100_000
        token = sign_request(self.pair, target=target, body=body, now_s=time.time(), nonce=self.nonce)
        return {"x-api-key": self.api_key, "authorization": f"Bearer {token}", "content-type": "application/json"}

    async def ask(self, session: aiohttp.ClientSession, method: str, target: str, body: bytes = b"") -> Any:
        """Put one request; raises for what is no success."""
        headers = self.headers(target, body)
        async with session.request(method, self.url + target, data=body or None, headers=headers) as response:
            text = await response.read()
            if response.status >= 300:
                raise SystemExit(f"{method} {target}: {response.status} {text[:300]!r}")
            return json.loads(text) if text else None


async def commit(database: Database, account_id: str, name: str, webhook_ids: list[str], count: int = 1) -> None:
    """Commit events with a delivery each, as fan-out leaves them; without webhooks the events alone."""
    async with database.transaction() as connection:
        await connection.execute(_ARRIVE, account_id, name, webhook_ids, count, BODY, timeout=300)
        await connection.execute("select pg_notify('vaultevents_deliveries', '')")


async def add_tenant(store: Store, account_id: str, url: str, folder: Path) -> Tenant:
    """Add an account with an API key."""
    await accounts.add_account(store.database, account_id, account_id)
    hash_key = await apikeys.hash_key(store.database, store.key, os.urandom(32), os.urandom(NONCE_BYTES))
    api_key, pair = f"vek_{secrets.token_urlsafe(32)}", generate_private_key(65537, 2048)
    der = parse_public_key(pair.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    hashed = keyed_hash(hash_key, api_key)
    key_id = f"key-{account_id}"
    await apikeys.add_key(store.database, key_id, account_id, "bench", "manage", hashed, None, der, fingerprint(der))
    private = pair.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    folder.joinpath(f"{account_id}.json").write_text(
        json.dumps({"account_id": account_id, "url": url, "api_key": api_key, "pem": private.decode()})
    )
    return Tenant(account_id, url, api_key, pair)


def load_tenant(folder: Path, account_id: str) -> Tenant:
    """Load what `add_tenant` wrote."""
    facts = json.loads(folder.joinpath(f"{account_id}.json").read_text())
    return Tenant(facts["account_id"], facts["url"], facts["api_key"], load_private_key(facts["pem"].encode()))


async def add_webhook(store: Store, account_id: str, webhook_id: str, url: str) -> str:
    """Add a webhook for all events."""
    webhook = Webhook(webhook_id, account_id, url, None, None, active=True)
    secret, nonce = Secret(new_secret(secrets.token_bytes(SECRET_BYTES))), secrets.token_bytes(NONCE_BYTES)
    await webhooks.create_webhook(store.database, webhook, secret, store.key, nonce)
    return webhook_id


async def prepare_hostile(store: Store, kind: str, slow_port: int) -> None:
    """Lay down the work of a hostile tenant."""
    urls = {
        "slow": f"https://127.0.0.1:{slow_port}/hang/%d",
        "resending": f"https://127.0.0.1:{slow_port}/hang/%d",
        "dead": "https://127.0.0.1:9/%d",
        "dead_names": "https://name%d.invalid/hook",
        "deep_queue": f"https://127.0.0.1:{slow_port}/hook/%d",
    }
    if kind not in urls:
        return
    if kind == "resending":
        await commit(store.database, "bad", kind, [], 350)
    ids = [await add_webhook(store, "bad", f"wh-{kind}-{at}", urls[kind] % at) for at in range(WEBHOOKS)]
    if kind == "resending":
        for webhook_id in ids:
            async with store.database.transaction() as connection:
                await resends.request_recovery(connection, "bad", webhook_id, 0, None)
    else:
        await commit(store.database, "bad", kind, ids, 100_000 if kind == "deep_queue" else 2_000)


async def end_hostile(store: Store, kind: str) -> None:
    """Take away what a hostile tenant left."""
    async with store.database.transaction() as connection:
        await connection.execute(
            "with gone as (update webhooks set active = false, deleted_at = db_now()"
            " where account_id = 'bad' and deleted_at is null returning id),"
            " unsent as (delete from resends where webhook_id in (select id from gone))"
            " delete from queue where webhook_id in (select id from gone)",
            timeout=300,
        )


async def be_hostile(kind: str, folder: Path) -> None:
    """What a hostile tenant does to the API, until it is killed."""
    bad = load_tenant(folder, "bad")
    host, port = bad.url.removeprefix("http://").split(":")
    match kind:
        case "pipelining":
            await asyncio.gather(*(_pipeline(host, int(port)) for _ in range(60)))
        case "idle":
            opened = []
            for _ in range(2_000):
                with suppress(OSError):
                    opened.append(await asyncio.open_connection(host, int(port)))
            await asyncio.sleep(3600)
        case "errors":
            body = b'{"url": 1, "eventTypes": [' + b",".join([b"1"] * 7_000) + b"]}"
            await _ask_for_ever(bad, "POST", LIST, body)
        case "guessing":
            good = load_tenant(folder, "good")
            await _ask_for_ever(Tenant("good", good.url, good.api_key, bad.pair), "GET", LIST, b"")
        case _:
            await asyncio.sleep(3600)


async def _pipeline(host: str, port: int) -> None:
    requests = b"GET / HTTP/1.1\r\nhost: bench\r\n\r\n" * 10_000
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            for _ in range(70):
                writer.write(requests)
                await asyncio.wait_for(writer.drain(), 3600)
        await asyncio.sleep(0.2)


async def _ask_for_ever(tenant: Tenant, method: str, target: str, body: bytes) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            headers = tenant.headers(target, body)
            with suppress(aiohttp.ClientError):
                async with session.request(method, tenant.url + target, data=body or None, headers=headers) as response:
                    await response.read()
            await asyncio.sleep(0.05)


async def measure(store: Store, good: Tenant, prefix: str) -> dict[str, float]:
    """Measure what the good tenant sees; p99 in ms."""
    sent, answered_ms, tests = {}, [], {}
    begin_s, number = time.monotonic(), 0
    async with aiohttp.ClientSession() as session:
        while (due_s := begin_s + number * PACE_S) < begin_s + MEASURED_S:
            if (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            name = f"{prefix}_{number}"
            await commit(store.database, "good", name, [GOOD_ID])
            sent[f"{name}_1"] = time.monotonic()
            asked_s = time.monotonic()
            await good.ask(session, "GET", LIST)
            answered_ms.append((time.monotonic() - asked_s) * 1000)
            if number % 5 == 0:
                asked_s = time.monotonic()
                tests[(await good.ask(session, "POST", f"{LIST}/{GOOD_ID}/test"))["id"]] = asked_s
            number += 1
        for _ in range(round(LATE_S / PACE_S)):
            if (sent.keys() | tests.keys()) <= Arrivals.at_s.keys():
                break
            await asyncio.sleep(PACE_S)
    now_s = time.monotonic()
    return {
        "delivery_p99_ms": _p99([(Arrivals.at_s.get(name, now_s) - at_s) * 1000 for name, at_s in sent.items()]),
        "test_p99_ms": _p99([(Arrivals.at_s.get(name, now_s) - at_s) * 1000 for name, at_s in tests.items()]),
        "api_p99_ms": _p99(answered_ms),
    }


def _p99(values: list[float]) -> float:
    return round(sorted(values)[len(values) * 99 // 100], 1)


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@asynccontextmanager
async def daemon(folder: Path, port: int) -> AsyncIterator[None]:
    """Run `vaultevents run` for delivery and the API."""
    path = folder / "vaultevents.toml"
    path.write_text(
        f'network = "devnet"\nchain_id = 1337\ndata_dir = "{folder}"\n[execution]\nurls = ["http://127.0.0.1:9"]\n'
        f'[delivery]\nallow = ["127.0.0.0/8:*"]\nca_file = "{folder / "authorities.pem"}"\n'
        f"[api]\nport = {port}\nrequests_per_minute = 6000\nburst = 1000\n"
        '[console]\nserve = "off"\n[metrics]\nserve = "off"\n'
    )
    command = (sys.executable, "-m", "vaultevents", "run", "--only", "dispatch", "--only", "api", "--config", str(path))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    with (folder / "daemon.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(600):
            with suppress(OSError):
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            await asyncio.sleep(0.1)
        else:
            raise SystemExit(f"the daemon does not answer: {(folder / 'daemon.log').read_text()[-2000:]}")
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def beside(store: Store, good: Tenant, kind: str, slow_port: int, folder: Path) -> dict[str, float]:
    """Measure beside one kind of hostile tenant."""
    hostile = await asyncio.create_subprocess_exec(sys.executable, __file__, "hostile", kind, str(folder))
    try:
        await prepare_hostile(store, kind, slow_port)
        await asyncio.sleep(3)
        return await measure(store, good, kind)
    finally:
        hostile.kill()
        await hostile.wait()
        await end_hostile(store, kind)


async def compare(folder: Path, kinds: tuple[str, ...], *, silent: bool) -> dict[str, Any]:
    """Measure alone and beside each kind."""
    _, context = issue(folder)
    receiver = await asyncio.get_running_loop().create_server(Arrivals, "127.0.0.1", 0, ssl=context)
    port = receiver.sockets[0].getsockname()[1]
    values = {"network": "devnet", "chain_id": 1337, "data_dir": str(folder)}
    figures: dict[str, float] = {}
    ratio: dict[str, float] = {}
    slow = folder / "slow"
    slow.mkdir()
    with receiving("https", slow) as slow_port:
        authorities = [(made / "ca.pem").read_text() for made in (folder, slow)]
        (folder / "authorities.pem").write_text("".join(authorities))
        async with open_store(config.given(values, "tenants")) as store:
            url = f"http://127.0.0.1:{(api_port := free_port())}"
            good = await add_tenant(store, "good", url, folder)
            await add_tenant(store, "bad", url, folder)
            await add_webhook(store, "good", GOOD_ID, f"https://127.0.0.1:{port}/hook")
            async with daemon(folder, api_port):
                await measure(store, good, "warm")
                alone = await measure(store, good, "alone")
                for kind in kinds:
                    seen = await beside(store, good, kind, slow_port, folder)
                    for name, value in seen.items():
                        figures[f"{kind}_{name}"] = value
                        ratio[f"{kind}_{name.removesuffix('_ms')}_x"] = round(value / max(alone[name], LEAST_MS), 2)
                    if not silent:
                        print(kind, seen, file=sys.stderr, flush=True)
                    await asyncio.sleep(2)
    receiver.close()
    ok = all(value <= GOAL["worst_x"] for value in ratio.values())
    return {"bench": "tenants", "figures": figures, "floor": alone, "ratio": ratio, "goal": GOAL, "ok": ok}


def main(arguments: list[str]) -> int:
    """Read the arguments and print the result."""
    if arguments[:1] == ["hostile"]:
        asyncio.run(be_hostile(arguments[1], Path(arguments[2])))
        return 0
    configure_logging("warning")
    silent = "--json" in arguments
    kinds = tuple(kind for kind in HOSTILE if kind in arguments) or HOSTILE
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = uvloop.run(compare(Path(folder), kinds, silent=silent))
    return print_result(result, as_json=silent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
