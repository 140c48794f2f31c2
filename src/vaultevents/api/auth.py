"""Authenticate each request: API key, rate, signature, address, claims, single use; in this order (rules A7 to A14).

ASGI middleware on the raw request, because a token signs the target and the body as they were sent. What it lets
through carries a `Caller`; what it refuses is a problem. No detail about claims before the signature verified.

Requests that verify count for the rate of their key, all others for that of their address and key together. So nobody
who has the API key alone can lock its owner out.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vaultevents import metrics
from vaultevents.api import problems
from vaultevents.api.limits import Buckets, Rate, SeenTokens, neighbourhood, plain_address
from vaultevents.api.problems import Problem, too_many
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.core.jsonbody import MAX_BODY_BYTES, JsonMalformed, parse_json
from vaultevents.core.rsakeys import load_public_key
from vaultevents.core.sealing import HashKey, keyed_hash
from vaultevents.core.tokens import (
    Presented,
    Token,
    TokenRejected,
    TokenRules,
    check_claims,
    read_token,
    replay_digest,
    signed_by,
)
from vaultevents.store.apikeys import ApiKey, KeyRing

log = structlog.get_logger("api")

OPEN_PATHS: Final = frozenset({"/v1/openapi.json", "/docs"})
READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
WITHOUT_BODY: Final = frozenset({*READING, "DELETE"})
MEDIA_TYPES: Final = frozenset({"application/json", "application/merge-patch+json"})
ONCE: Final = frozenset({b"x-api-key", b"authorization", b"content-type", b"x-mfa-code", b"idempotency-key"})

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """A verified request: its key, what makes it good for one change, and the step-up code as it was sent."""

    key: ApiKey
    token_digest: bytes
    code: str | None


class AuthMiddleware:
    """The middleware; `now_s` is the service clock (rule D15)."""

    def __init__(
        self,
        app: ASGIApp,
        ring: KeyRing,
        hash_key: HashKey,
        rules: TokenRules,
        rate: Rate,
        now_s: Callable[[], float],
    ) -> None:
        self._app = app
        self._ring = ring
        self._hash_key = hash_key
        self._rules = rules
        self._now_s = now_s
        self._verified, self._guesses = Buckets(rate), Buckets(rate)
        self._seen = SeenTokens()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        structlog.contextvars.bind_contextvars(request_id=request_id)
        target = _target(scope)
        path, _, query = target.partition("?")
        # routes are chosen by the very characters that were signed: nothing is decoded
        scope = {**scope, "path": path, "raw_path": path.encode(), "query_string": query.encode()}
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        send = _marked(scope, send)
        try:
            if path not in OPEN_PATHS or scope["method"] not in ("GET", "HEAD"):
                caller, body = await self._admit(scope, receive, target)
                self._ring.uses.note(caller.key.id, self._now_s())
                scope["state"]["caller"] = caller
                scope["state"]["verification"].passed = True
                receive = _again(body, receive)
        except Problem as problem:
            await problems.response(problem, path, request_id)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, target: str) -> tuple[Caller, bytes]:
        _check_repeats(scope)
        api_key, authorization = _header(scope, b"x-api-key"), _header(scope, b"authorization")
        if not api_key or not authorization:
            raise Problem("credentials_missing", "send the headers 'x-api-key' and 'Authorization: Bearer <JWT>'")
        key = await self._find(api_key)
        address = neighbourhood(_address(scope))
        source = address if key is None else f"{address} {key.id}"
        if wait_s := self._guesses.wait_s(source) if key is None else self._verified.wait_s(key.id):
            raise _limited(wait_s)
        try:
            key, token, body = await self._verify(key, authorization, scope, receive, target)
        except Problem as refused:
            if wait_s := self._guesses.take(source):
                raise _limited(wait_s, refused.headers) from None
            raise
        if wait_s := self._verified.take(key.id):
            raise _limited(wait_s)
        _check_json(scope, body)
        digest = replay_digest(key.id, token)
        if scope["method"] in READING:
            if not self._seen.add(digest):
                raise _replayed()
        elif key.role != "manage":
            raise Problem("role_insufficient", "this API key has the role 'read': use one with the role 'manage'")
        return Caller(key, digest, _header(scope, b"x-mfa-code") or None), body  # an empty one is none

    async def _verify(
        self, key: ApiKey | None, authorization: str, scope: Scope, receive: Receive, target: str
    ) -> tuple[ApiKey, Token, bytes]:
        """Return what a request proves to come from the owner of the key: all that fails here counts as a guess."""
        token = _token(authorization)
        keys = [] if key is None else self._valid_keys(key)
        if not signed_by(token, keys) or key is None:  # an unknown API key takes as long as a wrong signature
            raise Problem("credentials_invalid", "the API key is not known, or the token is not signed with its key")
        _check_address(key, scope)
        body = await _body(scope, receive)
        if body and scope["method"] in WITHOUT_BODY:
            raise Problem("body_not_allowed", f"send {scope['method']} without a body")
        try:
            check_claims(token, Presented(target, body), self._now_s(), self._rules)
        except TokenRejected as rejected:
            raise Problem(rejected.code, str(rejected)) from None
        if scope["method"] in READING and replay_digest(key.id, token) in self._seen:
            raise _replayed()
        return key, token, body

    async def _find(self, api_key: str) -> ApiKey | None:
        try:
            await self._ring.fresh()
        except (DatabaseUnavailable, DatabaseUnusable):
            raise unavailable() from None
        return self._ring.find(keyed_hash(self._hash_key, api_key))

    def _valid_keys(self, key: ApiKey) -> list[RSAPublicKey]:
        now_s = self._now_s()
        ends = [(public_key.der, public_key.valid_until) for public_key in key.public_keys]
        return [_loaded(der) for der, until in ends if until is None or until.timestamp() > now_s]


_loaded = lru_cache(maxsize=10_000)(load_public_key)


def _limited(wait_s: float, headers: Mapping[str, str] | None = None) -> Problem:
    problem = too_many("rate_limited", f"too many requests: wait {math.ceil(wait_s)} s", math.ceil(wait_s))
    problem.headers |= headers or {}  # such as the end of the connection
    return problem


def _replayed() -> Problem:
    return Problem("token_replayed", "a token is good for one request: sign each one with a new nonce")


def unavailable() -> Problem:
    """The database is away: nothing was changed."""
    return Problem("unavailable", "the service cannot answer now: try again soon", headers={"retry-after": "1"})


def _target(scope: Scope) -> str:
    """The request target as it was sent."""
    sent = scope.get("state", {}).get("target")
    if sent is None:  # not from a socket
        sent = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    text: str = sent.decode("latin-1")
    return text


def _check_repeats(scope: Scope) -> None:
    """Several headers of one name would let two readers see different requests."""
    names = [name for name, _ in scope["headers"] if name in ONCE]
    if len(names) > len(set(names)):
        repeated = max(names, key=names.count)
        raise Problem("request_malformed", f"send the header '{repeated.decode()}' once")


def _header(scope: Scope, name: bytes) -> str | None:
    found = next((value for other, value in scope["headers"] if other == name), None)
    return None if found is None else found.decode("latin-1").strip(" \t")  # white space around it is not part of it


def _token(authorization: str) -> Token:
    scheme, _, text = authorization.partition(" ")
    if scheme.lower() != "bearer":
        raise Problem("credentials_missing", "send the token as 'Authorization: Bearer <JWT>'")
    try:
        return read_token(text)
    except TokenRejected as rejected:
        raise Problem(rejected.code, str(rejected)) from None


def _address(scope: Scope) -> IPv4Address | IPv6Address | None:
    """Where the request comes from."""
    try:
        return plain_address(ip_address(scope["client"][0] if scope.get("client") else ""))
    except ValueError:
        return None


def _check_address(key: ApiKey, scope: Scope) -> None:
    if key.allowed is None:
        return
    address = _address(scope)
    if address is None or not any(address in ip_network(network) for network in key.allowed):
        raise Problem("ip_not_allowed", f"requests with this API key may not come from {address or 'here'}")


async def _body(scope: Scope, receive: Receive) -> bytes:
    too_large = Problem("body_too_large", f"send at most {MAX_BODY_BYTES} bytes", headers={"connection": "close"})
    length = _header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
        raise too_large
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem("request_timeout", "the connection ended before the request did")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise too_large
        if not message.get("more_body"):
            return b"".join(parts)


def _check_json(scope: Scope, body: bytes) -> None:
    """A body is one strict JSON value: what the framework parses then is what was signed, for every parser."""
    if not body:
        return
    media_type = (_header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if media_type not in MEDIA_TYPES:
        raise Problem("media_type_unsupported", "send the body as 'content-type: application/json'")
    try:
        parse_json(body)
    except JsonMalformed as malformed:
        raise Problem("json_malformed", str(malformed)) from None


def _request_id(scope: Scope) -> str:
    """Return the caller's id of the request where it is well-formed, else a new one."""
    sent = [value for name, value in scope["headers"] if name == b"x-request-id"]
    return sent[0].decode() if len(sent) == 1 and _REQUEST_ID.fullmatch(sent[0]) else secrets.token_hex(8)


def _marked(scope: Scope, send: Send) -> Send:
    """Give the answer its id, forbid caches to keep what is an account's, count it by its route and log it."""
    began_s = time.monotonic()

    async def marking(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"x-request-id", scope["state"]["request_id"].encode())]
            static = scope["path"] if scope["path"] in OPEN_PATHS else "none"
            if static == "none":
                headers.append((b"cache-control", b"no-store"))
            message = {**message, "headers": headers}
            # the route is known when an answer begins; what is refused before has none
            route = scope["route"].path if "route" in scope else static
            metrics.request(route, message["status"])
            _log(scope, route, message["status"], time.monotonic() - began_s)
        await send(message)

    return marking


def _log(scope: Scope, route: str, status: int, seconds: float) -> None:
    """Log changes and our own failures; all else only at level debug, since anybody can cause it."""
    caller: Caller | None = scope["state"].get("caller")
    if status >= 500:
        write = log.warning
    elif caller is not None and scope["method"] not in READING:
        write = log.info
    else:
        write = log.debug
    write(
        "request_answered",
        method=scope["method"],
        route=route,
        status=status,
        account=None if caller is None else caller.key.account_id,
        key=None if caller is None else caller.key.id,
        ms=round(seconds * 1000),
    )


def _again(body: bytes, receive: Receive) -> Receive:
    """The body once more, for the framework; then whatever the connection says."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay
