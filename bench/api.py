"""The cost of one verified request: `python3 dev.py bench api --json`.

`GET /v1/account/webhooks` with an RS256 token each, a real read of five webhooks from PostgreSQL, over keep-alive
connections. The floor is the same application, handler and query without the gate that authenticates. Two server
processes take turns under the same load; a figure is the best of the rounds. Rates are requests by CPU second of the
API process (one core), so that the client and PostgreSQL, which share the machine, do not count; their shares are
printed beside it. The last line is the result; without `--json` a table stands before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from _machine import cpu_s, postgres_cpu_s
from _result import print_result

REQUESTS = 6_000
CONNECTIONS = 32
ROUNDS = 3
WEBHOOKS = 5
TARGET = "/v1/account/webhooks"
GOAL = {"requests_per_core_s": 2500.0, "cpu_x": 1.8}


async def serve(kind: str, folder: Path) -> None:
    """One API process until its stdin ends: 'verified', or 'bare' without the gate."""
    from starlette.types import ASGIApp, Receive, Scope, Send

    from vaultevents.api.app import application, build
    from vaultevents.api.auth import Caller
    from vaultevents.api.handlers import ApiContext
    from vaultevents.api.limits import Rate
    from vaultevents.api.server import ServerOptions, bind, url_of
    from vaultevents.api.server import serve as answer
    from vaultevents.core.sealing import MasterKey
    from vaultevents.core.tokens import TokenRules
    from vaultevents.core.webhooks import UrlRules
    from vaultevents.store import apikeys
    from vaultevents.store.pool import open_database
    from vaultevents.telemetry import configure_logging

    configure_logging()  # as the daemon: without it each request prints a line to the pipe that nobody reads
    facts = json.loads(folder.joinpath("facts.json").read_text())
    key = MasterKey(bytes.fromhex(facts["master_key"]))
    database = await open_database(facts["database"], schema=facts["schema"])
    hash_key = await apikeys.hash_key(database, key, bytes(32), bytes(12))
    desk = ApiContext(database, key, hash_key, UrlRules(), TokenRules(), Rate(10**9, 10**9), 20, time.time)
    ring = apikeys.KeyRing(database)
    await ring.fresh()
    caller = Caller(next(iter(await apikeys.list_keys(database, None))), bytes(32), None)

    def bare(app: ASGIApp) -> ASGIApp:
        async def let_in(scope: Scope, receive: Receive, send: Send) -> None:
            scope["state"] = {"request_id": "0" * 16, "caller": caller}
            await app(scope, receive, send)

        return let_in

    app = build(desk, ring) if kind == "verified" else bare(application(desk))
    options = ServerOptions(port=0)
    listener, stop = bind(options), asyncio.Event()
    print(json.dumps({"url": url_of(listener, options), "pid": os.getpid()}), flush=True)
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)
    await answer(app, listener, options, time.time, stop)
    await database.close()


async def prepare(folder: Path) -> Any:
    """A database with one account, its key and five webhooks; the facts that the servers and the client need."""
    from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    from vaultevents.core.rsakeys import fingerprint, parse_public_key
    from vaultevents.core.sealing import MasterKey, Secret, keyed_hash
    from vaultevents.core.signing import new_secret
    from vaultevents.core.webhooks import Webhook
    from vaultevents.store import accounts, apikeys, webhooks
    from vaultevents.store.pool import open_database
    from vaultevents.store.postgres.embedded import EmbeddedPostgres

    embedded = EmbeddedPostgres(folder / "postgres")
    address = await asyncio.to_thread(embedded.join)
    schema, raw, api_key = f"b_{os.getpid()}", os.urandom(32), f"vek_{secrets.token_urlsafe(32)}"
    key, pair = MasterKey(raw), generate_private_key(65537, 2048)
    database = await open_database(address.connect_kwargs(), schema=schema)
    hash_key = await apikeys.hash_key(database, key, os.urandom(32), os.urandom(12))
    await accounts.add_account(database, "acme", "acme")
    der = parse_public_key(pair.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    hashed = keyed_hash(hash_key, api_key)
    await apikeys.add_key(database, "key-1", "acme", "bench", "read", hashed, None, der, fingerprint(der))
    for number in range(WEBHOOKS):
        webhook = Webhook(f"wh-{number}", "acme", f"https://example.org/{number}", None, None, active=True)
        secret = Secret(new_secret(os.urandom(32)))
        await webhooks.create_webhook(database, webhook, secret, key, os.urandom(12))
    await database.close()
    folder.joinpath("key.pem").write_bytes(pair.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    folder.joinpath("facts.json").write_text(
        json.dumps(
            {
                "database": address.connect_kwargs(),
                "schema": schema,
                "master_key": raw.hex(),
                "api_key": api_key,
            }
        )
    )
    return embedded


def sign(folder: str, first: int, count: int) -> list[bytes]:
    """`count` whole requests, each with a token of its own."""
    from vaultevents.core.rsakeys import load_private_key
    from vaultevents.core.tokens import sign_request

    pair = load_private_key(Path(folder, "key.pem").read_bytes())
    api_key = json.loads(Path(folder, "facts.json").read_text())["api_key"]
    now_s = time.time()
    return [
        (
            f"GET {TARGET} HTTP/1.1\r\nhost: bench\r\nx-api-key: {api_key}\r\nauthorization: Bearer "
            f"{sign_request(pair, target=TARGET, body=b'', now_s=now_s, nonce=nonce % 100_000)}\r\n\r\n"
        ).encode()
        for nonce in range(first, first + count)
    ]


async def load(url: str, requests: list[bytes]) -> None:
    """Sends all requests over a few connections, each waiting for its answer; every answer must be a 200."""
    host, port = url.removeprefix("http://").split(":")
    pending = iter(requests)

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for request in pending:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"not answered: {head.decode()}")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    await asyncio.gather(*(client() for _ in range(CONNECTIONS)))


def turn(folder: Path, server: dict[str, Any], requests: list[bytes]) -> dict[str, float]:
    """One measured load on one server."""
    begin, cpu, postgres = time.perf_counter(), cpu_s(server["pid"]), postgres_cpu_s(folder)
    uvloop.run(load(server["url"], requests))
    seconds = time.perf_counter() - begin
    count = len(requests)
    return {
        "cpu_us": (cpu_s(server["pid"]) - cpu) * 1e6 / count,
        "postgres_cpu_us": (postgres_cpu_s(folder) - postgres) * 1e6 / count,
        "wall_requests_s": count / seconds,
    }


def compare(folder: str) -> dict[str, Any]:
    kinds = ("bare", "verified")
    processes = {
        kind: subprocess.Popen(
            [sys.executable, __file__, "serve", kind, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for kind in kinds
    }
    try:
        servers = {}
        for kind, process in processes.items():
            assert process.stdout is not None
            servers[kind] = json.loads(process.stdout.readline())
        rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        with ProcessPoolExecutor(2) as signers:
            for number in range(ROUNDS + 1):
                for kind in kinds:
                    first = number * REQUESTS
                    halves = signers.map(sign, [folder] * 2, [first, first + REQUESTS // 2], [REQUESTS // 2] * 2)
                    reported = turn(Path(folder), servers[kind], [request for half in halves for request in half])
                    if number:  # the first round only warms up
                        rounds[kind].append(reported)
    finally:
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)
    ours, floor = (min(rounds[kind], key=lambda one: one["cpu_us"]) for kind in ("verified", "bare"))
    figures = {"requests_per_core_s": 1e6 / ours["cpu_us"], **ours}
    ratio = {"cpu_x": ours["cpu_us"] / floor["cpu_us"]}
    ok = figures["requests_per_core_s"] >= GOAL["requests_per_core_s"] and ratio["cpu_x"] <= GOAL["cpu_x"]
    parts = {"figures": figures, "floor": floor, "ratio": ratio}
    rounded = {name: {key: round(value, 2) for key, value in part.items()} for name, part in parts.items()}
    return {"bench": "api", **rounded, "goal": GOAL, "ok": ok}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["serve"]:
        uvloop.run(serve(arguments[1], Path(arguments[2])))
        return 0
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        embedded = asyncio.run(prepare(Path(folder)))
        try:
            result = compare(folder)
        finally:
            embedded.leave()
    return print_result(result, as_json="--json" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
