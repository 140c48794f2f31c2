"""Webhook receivers on loopback, under TLS, with a ledger of everything that arrived."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError

from vaultevents.devnet.certificates import issue
from vaultevents.devnet.faults import fires
from vaultevents.devnet.loopback import LoopbackServer

_CHUNK = bytes(64 * 1024)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; `padding` bytes of zeros follow the body, however many they are."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Hang:
    """Read the request, then never send so much as a header."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Read the request, then reset the connection: the sender cannot know whether it was booked."""


Answer = Reply | Hang | Reset

Behaviour = Callable[[str, int, int], Answer]
"""(webhook-id, attempt for this id, request at this hook) → answer; both counts start at 0."""


def always(answer: Answer) -> Behaviour:
    """The same answer to everything."""
    return lambda _id, _attempt, _nth: answer


def in_turn(*answers: Answer) -> Behaviour:
    """One answer for each request at the hook; the last one holds."""
    return lambda _id, _attempt, nth: answers[min(nth, len(answers) - 1)]


def per_event(*answers: Answer) -> Behaviour:
    """One answer for each attempt of an event; the last one holds."""
    return lambda _id, attempt, _nth: answers[min(attempt, len(answers) - 1)]


def flaky(seed: int, rate: float, failure: Answer, success: Answer | None = None) -> Behaviour:
    """`failure` for a seeded share of the attempts."""
    good = Reply() if success is None else success
    return lambda webhook_id, attempt, _nth: failure if fires(seed, "receiver", webhook_id, attempt, rate) else good


def retry_after(value: str, status: int = 429) -> Reply:
    """A refusal with a Retry-After header in whatever spelling."""
    return Reply(status, {"Retry-After": value})


def redirect(location: str, status: int = 302) -> Reply:
    """A redirect that must not be followed."""
    return Reply(status, {"Location": location})


GONE = Reply(410)


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it arrived. `at_s` is monotonic; header names are lower-case; `answer` is what it then got."""

    at_s: float
    headers: Mapping[str, str]
    body: bytes
    webhook_id: str
    attempt: int
    verified: bool
    answer: Answer


class Hook:
    """One receiver: a URL, a secret, a behaviour and a ledger.

    Set `secret` to the subscription's `secretToken`; until then no signature is taken for good. `behaviour` may be
    changed at any time. `bad_signatures` counts the requests that did not verify.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.behaviour: Behaviour = always(Reply())
        self.ledger: list[Received] = []
        self.bad_signatures = 0
        self._secret: str | None = None
        self._verifier: Webhook | None = None
        self._attempts: Counter[str] = Counter()
        self._arrival = asyncio.Event()

    @property
    def secret(self) -> str | None:
        return self._secret

    @secret.setter
    def secret(self, token: str | None) -> None:
        self._secret = token
        self._verifier = None if token is None else Webhook(token)

    @property
    def accepted(self) -> list[Received]:
        """The requests that were answered with 2xx."""
        return [
            request
            for request in self.ledger
            if isinstance(request.answer, Reply) and 200 <= request.answer.status < 300
        ]

    async def arrivals(self, count: int, timeout_s: float = 60.0) -> list[Received]:
        """The ledger, once it has at least `count` entries. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while len(self.ledger) < count:
                self._arrival.clear()
                await self._arrival.wait()
        return self.ledger

    def book(self, headers: Mapping[str, str], body: bytes) -> Answer:
        """Enter a request into the ledger and return what it is answered with."""
        webhook_id = headers.get("webhook-id", "")
        attempt = self._attempts[webhook_id]
        self._attempts[webhook_id] += 1
        verified = self._verify(headers, body)
        self.bad_signatures += not verified
        answer = self.behaviour(webhook_id, attempt, len(self.ledger))
        self.ledger.append(Received(time.monotonic(), headers, body, webhook_id, attempt, verified, answer))
        self._arrival.set()
        return answer

    def _verify(self, headers: Mapping[str, str], body: bytes) -> bool:
        if self._verifier is None:
            return False
        try:
            self._verifier.verify(body, dict(headers), json_parse=False)
        except (WebhookVerificationError, ValueError):  # ValueError: malformed signature list, base64 or UTF-8
            return False
        return True


class Receivers:
    """A TLS server with any number of hooks; `unexpected` lists requests for paths that are nobody's.

    `ca_path` is the authority that a client must trust; it is written to `directory`, which must exist.
    """

    def __init__(self, directory: Path) -> None:
        self.ca_path, tls = issue(directory)
        self.unexpected: list[str] = []
        self._hooks: dict[str, Hook] = {}
        self._origin = ""
        self._server = LoopbackServer(self._receive, tls)

    async def start(self, port: int = 0) -> str:
        """Listen, on a free port unless one is named; returns the origin."""
        self._origin = await self._server.start(port)
        return self._origin

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        await self._server.stop()

    def hook(self, name: str, behaviour: Behaviour | None = None) -> Hook:
        """A new receiver under the path `/name`; only after `start`."""
        hook = Hook(f"{self._origin}/{name}")
        if behaviour is not None:
            hook.behaviour = behaviour
        self._hooks[f"/{name}"] = hook
        return hook

    async def _receive(self, request: web.BaseRequest) -> web.StreamResponse:
        hook = self._hooks.get(request.path)
        if hook is None or request.method != "POST":
            self.unexpected.append(f"{request.method} {request.path}")
            return web.Response(status=404)
        body = await request.read()
        answer = hook.book({name.lower(): value for name, value in request.headers.items()}, body)
        match answer:
            case Hang():
                await asyncio.Event().wait()
            case Reset():
                _reset(request)
            case Reply(padding=padding) if padding:
                return await _padded(request, answer)
            case Reply(status, headers, answer_body):
                return web.Response(status=status, headers=headers, body=answer_body)
        return web.Response()


def _reset(request: web.BaseRequest) -> None:
    """Close the connection with RST and not with FIN."""
    transport = request.transport
    if transport is not None:
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


async def _padded(request: web.BaseRequest, reply: Reply) -> web.StreamResponse:
    response = web.StreamResponse(status=reply.status, headers=reply.headers)
    response.content_length = len(reply.body) + reply.padding
    await response.prepare(request)
    await response.write(reply.body)
    for sent in range(0, reply.padding, len(_CHUNK)):
        await response.write(_CHUNK[: reply.padding - sent])
    return response
