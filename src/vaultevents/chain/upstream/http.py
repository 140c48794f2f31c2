"""One HTTP exchange with an upstream: deadlines, a capped read, one kind of error, no URL in any error.

    request ─▶ response ─▶ body, chunk by chunk up to a cap ─▶ what the client reads from it
       └──────────┴───────────┴─ unreachable, too slow, cut off: `SourceUnavailable` or one of its children

JSON-RPC, the Beacon API and the IPFS gateways use it; they only build requests and read bodies. No redirect is followed
here, no proxy is taken from the environment, and answers are requested without compression, so that the cap on an
answer is the cap on memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from typing import Final, Literal, TypeVar

import aiohttp
from yarl import URL

from vaultevents.chain.upstream.node import NodeClient, RateLimited, TransientError, UpstreamTimeout
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.retries import retry_after_s

T = TypeVar("T")
JSON: Final = "application/json"
_CHUNK_BYTES = 65536
_HEADERS = {"content-type": JSON, "accept": JSON, "accept-encoding": "identity"}
_PART_OF: Final = {"answer": "an answer", "file": "the file"}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long an exchange may take: to connect, in all, and without any byte (None: as long as in all)."""

    connect_s: float = 5.0
    total_s: float = 30.0
    idle_s: float | None = None

    @property
    def timeout(self) -> aiohttp.ClientTimeout:
        """What aiohttp enforces; `HttpExchange` enforces `total_s`."""
        return aiohttp.ClientTimeout(total=None, sock_connect=self.connect_s, sock_read=self.idle_s)


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request. Headers that it does not name are those of the session."""

    method: Literal["GET", "POST"]
    url: str | URL
    body: bytes | None = None
    headers: Mapping[str, str] | None = None


def new_session(deadlines: Deadlines) -> aiohttp.ClientSession:
    """Open a session for all nodes of an upstream: no cookies, no proxy from the environment.

    Nodes are named by the operator, so the resolver of the host is used, with its whole configuration; by default
    aiohttp would use c-ares.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=aiohttp.ThreadedResolver()),
        timeout=deadlines.timeout,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers=_HEADERS,
    )


class HttpExchange:
    """The HTTP exchanges with one node. `content` is what the node serves, as errors name it."""

    def __init__(
        self,
        client: NodeClient,
        session: aiohttp.ClientSession,
        deadlines: Deadlines,
        content: Literal["answer", "file"] = "answer",
    ) -> None:
        self.name = client.name
        self.client = client
        self._session = session
        self._deadlines = deadlines
        self._content = content

    async def fetch(
        self,
        request: Request,
        read: Callable[[aiohttp.ClientResponse], Awaitable[T]],
        deadlines: Deadlines | None = None,
    ) -> T:
        """Send a request and return what `read` returns for the response. Raises `SourceUnavailable`."""
        timeout = None if deadlines is None else deadlines.timeout
        return await self.within(partial(self.send, request, read, timeout=timeout), deadlines)

    async def within(self, work: Callable[[], Awaitable[T]], deadlines: Deadlines | None = None) -> T:
        """Return the result of `work`, which sends one request or more, within the deadlines.

        Raises `UpstreamTimeout`, `TransientError` for what the next attempt may not meet, `SourceUnavailable`
        for other faults.
        """
        deadlines = deadlines or self._deadlines
        problem: SourceUnavailable
        try:
            async with asyncio.timeout(deadlines.total_s):
                return await work()
        except aiohttp.ConnectionTimeoutError:
            problem = SourceUnavailable(self.name, f"cannot be connected to within {deadlines.connect_s:g} s")
        except aiohttp.SocketTimeoutError:
            problem = UpstreamTimeout(self.name, f"sends nothing for {deadlines.idle_s or deadlines.total_s:g} s")
        except TimeoutError:
            problem = UpstreamTimeout(self.name, f"gives no whole {self._content} within {deadlines.total_s:g} s")
        except aiohttp.ClientPayloadError:
            problem = TransientError(self.name, f"breaks off in the middle of {_PART_OF[self._content]}")
        except (aiohttp.ClientError, OSError) as error:
            problem = TransientError(self.name, f"cannot be reached ({type(error).__name__})")
        raise problem  # outside of the handler: aiohttp's exception holds the URL and must not become its context

    async def send(
        self,
        request: Request,
        read: Callable[[aiohttp.ClientResponse], Awaitable[T]],
        *,
        session: aiohttp.ClientSession | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> T:
        """Send one request inside of `within`, over the session of the node or another one."""
        async with await self._response(request, session or self._session, timeout) as response:
            return await read(response)

    async def _response(
        self, request: Request, session: aiohttp.ClientSession, timeout: aiohttp.ClientTimeout | None
    ) -> aiohttp.ClientResponse:
        self.client.counters.requests += 1
        try:
            return await session.request(
                request.method,
                request.url,
                data=request.body,
                headers=request.headers,
                timeout=timeout or session.timeout,
                allow_redirects=False,
            )
        except ValueError as error:  # such as a host name that cannot be encoded for a look-up
            problem = TransientError(self.name, f"cannot be reached ({type(error).__name__})")
        raise problem

    def check_plain(self, response: aiohttp.ClientResponse) -> None:
        """Raise `SourceUnavailable` for a compressed body, whose cap would not be the cap on memory."""
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise SourceUnavailable(self.name, "compresses its answers although it was asked not to")

    def status_error(self, status: int, problem: str, pause_s: float) -> SourceUnavailable:
        """Return the error for a status that is not 200; `pause_s` is for how long the node asks to be left alone."""
        if status == 429:
            return RateLimited(self.name, "HTTP status 429", pause_s)
        return TransientError(self.name, problem) if status >= 500 else SourceUnavailable(self.name, problem)


async def read_body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes | None:
    """Read a body; None, with the connection closed, as soon as it is more than `limit_bytes`."""
    content = BytesIO()  # returns its bytes without a copy
    while chunk := await response.content.read(_CHUNK_BYTES):
        content.write(chunk)
        if content.tell() > limit_bytes:
            response.close()
            return None
    return content.getvalue()


def asked_pause_s(response: aiohttp.ClientResponse) -> float:
    """Return the seconds of the response's `Retry-After`; 0 without it."""
    return retry_after_s(response.headers.get("retry-after"), datetime.now(UTC))
