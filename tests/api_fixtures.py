"""The HTTP API on a real socket, with customers who sign their requests and step up, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pyotp
import yarl
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from store_factories import KEY, account, vault
from timeouts import WAIT_TIMEOUT_S
from vaultevents.api.app import build
from vaultevents.api.handlers import ApiContext
from vaultevents.api.limits import AccountShares, Rate, Shares
from vaultevents.api.server import ServerOptions, bind, serve, url_of
from vaultevents.core.rsakeys import fingerprint, parse_public_key
from vaultevents.core.sealing import KEY_BYTES, NONCE_BYTES, keyed_hash
from vaultevents.core.tokens import TokenRules, sign_request
from vaultevents.core.totp import SEED_BYTES, new_seed
from vaultevents.core.webhooks import UrlRules
from vaultevents.store import apikeys, mfa
from vaultevents.store.pool import Database

FREELY = Rate(per_minute=10**9, burst=10**9)

_nonces = itertools.count()


class Clock:
    """The service clock of a test: real time, and what the test has let pass besides."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return time.time() + self.ahead_s


class FrozenClock(Clock):
    """One that stands still, except for what the test lets pass."""

    def __init__(self, at_s: float) -> None:
        super().__init__()
        self.at_s = at_s

    def now_s(self) -> float:
        return self.at_s + self.ahead_s


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a problem, after a look at its form (RFC 9457, rule A6)."""
        assert self.headers["content-type"] == "application/problem+json", self.body
        problem = self.json
        assert problem["status"] == self.status
        assert problem["message"] == problem["detail"]
        assert problem["requestId"] == self.headers["x-request-id"]
        code: str = problem["code"]
        return code

    @property
    def pointers(self) -> list[tuple[str, str]]:
        """Where and what of a 422."""
        return [(error["pointer"], error["code"]) for error in self.json["errors"]]


@cache
def key_pair(number: int = 0) -> RSAPrivateKey:
    """An RSA key, made once for all tests of a process."""
    return generate_private_key(65537, 2048)


def public_pem(private_key: RSAPrivateKey) -> bytes:
    return private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True, slots=True)
class Customer:
    """An account with an API key, the key to sign with, and the seed of its second factor."""

    account_id: str
    key_id: str
    api_key: str
    private_key: RSAPrivateKey
    seed: str
    used_steps: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Api:
    """One running API process, as a test sees it."""

    url: str
    database: Database
    clock: Clock
    desk: ApiContext
    session: aiohttp.ClientSession
    ring: apikeys.KeyRing

    async def customer(
        self,
        account_id: str = "acme",
        *,
        role: apikeys.Role = "manage",
        allowed: tuple[str, ...] | None = None,
        enrolled: bool = True,
        pair: int = 0,
        vaults: tuple[str, ...] = ("v1",),
    ) -> Customer:
        """Registers an account with vaults, one key and (by default) a factor."""
        await account(self.database, account_id)
        for vault_id in vaults:
            await vault(self.database, vault_id, account_id=account_id)
        seed = new_seed(os.urandom(SEED_BYTES))
        if enrolled:
            await mfa.enroll(self.database, account_id, seed, KEY, os.urandom(NONCE_BYTES))
        return await self.another_key(account_id, seed.reveal(), role=role, allowed=allowed, pair=pair)

    async def another_key(
        self,
        account_id: str,
        seed: str,
        *,
        role: apikeys.Role = "manage",
        allowed: tuple[str, ...] | None = None,
        pair: int = 0,
    ) -> Customer:
        key_id, api_key = f"key-{secrets.token_hex(8)}", f"vek_{secrets.token_urlsafe(32)}"
        der = parse_public_key(public_pem(key_pair(pair)))
        hashed = keyed_hash(self.desk.hash_key, api_key)
        await apikeys.add_key(self.database, key_id, account_id, "test", role, hashed, allowed, der, fingerprint(der))
        return Customer(account_id, key_id, api_key, key_pair(pair), seed)

    def code(self, customer: Customer) -> str:
        """A code that was not used yet; where there is none, half a minute passes."""
        step = int(self.clock.now_s()) // 30
        if customer.used_steps and step <= customer.used_steps[-1]:
            self.clock.ahead_s += 30 * (customer.used_steps[-1] + 1 - step)
            step = customer.used_steps[-1] + 1
        customer.used_steps.append(step)
        return pyotp.HOTP(customer.seed).at(step)

    def token(self, customer: Customer, target: str, body: bytes = b"") -> str:
        nonce = next(_nonces) % 100_000
        return sign_request(customer.private_key, target=target, body=body, now_s=self.clock.now_s(), nonce=nonce)

    async def call(
        self,
        customer: Customer,
        method: str,
        target: str,
        value: Any = None,
        *,
        code: str | None = None,
        step_up: bool | None = None,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        raw: bytes | None = None,
    ) -> ApiResponse:
        """Sends a signed request. Changes step up with a fresh code by default."""
        body = raw if raw is not None else b"" if value is None else json.dumps(value).encode()
        if code is None and (method not in ("GET", "HEAD") if step_up is None else step_up):
            code = self.code(customer)
        sent = {
            "x-api-key": customer.api_key,
            "authorization": f"Bearer {token or self.token(customer, target, body)}",
            **({"content-type": "application/json"} if body else {}),
            **({"x-mfa-code": code} if code is not None else {}),
            **(headers or {}),
        }
        return await self.send(method, target, sent, body)

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> ApiResponse:
        """A request exactly as given, nothing added to the target."""
        url = yarl.URL(self.url + target, encoded=True)
        async with self.session.request(
            method, url, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            return ApiResponse(answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read())


async def exchange(url: str, request: bytes) -> ApiResponse:
    """Sends bytes as they are and reads one answer; the connection is this exchange's own."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(request)
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            return await read_answer(reader)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> ApiResponse:
    """One HTTP/1.1 answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return ApiResponse(int(status.split()[1]), headers, body)


def request_bytes(method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """A request as it goes over the wire."""
    framing = {"content-length": str(len(body))} if body else {}
    lines = [f"{method} {target} HTTP/1.1", "host: api.example.org"]
    lines += [f"{name}: {value}" for name, value in {**headers, **framing}.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@asynccontextmanager
async def running_api(
    database: Database,
    *,
    rate: Rate = FREELY,
    rules: TokenRules | None = None,
    max_webhooks: int = 20,
    shares: Shares | None = None,
    clock: Clock | None = None,
    options: ServerOptions | None = None,
) -> AsyncIterator[Api]:
    """The application as the daemon builds it, behind uvicorn on a free port of loopback."""
    clock = clock or Clock()
    hash_key = await apikeys.hash_key(database, KEY, os.urandom(KEY_BYTES), os.urandom(NONCE_BYTES))
    desk = ApiContext(database, KEY, hash_key, UrlRules(), rules or TokenRules(), rate, max_webhooks, clock.now_s)
    desk = replace(desk, shares=AccountShares(shares)) if shares else desk
    options = options or ServerOptions(port=0)
    listener, stop = bind(options), asyncio.Event()
    url = url_of(listener, options)
    ring = apikeys.KeyRing(database)
    serving = asyncio.create_task(serve(build(desk, ring), listener, options, clock.now_s, stop))
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            yield Api(url, database, clock, desk, session, ring)
    finally:
        stop.set()
        await serving
