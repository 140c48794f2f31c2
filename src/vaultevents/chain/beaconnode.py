"""One beacon node over HTTP: its REST routes, deadlines, a cap on what is read, no URL in any error.

Of an error answer only the HTTP status counts, because its body differs from client to client. No redirect is
followed, and answers are asked for without compression, so that a cap on an answer is a cap on memory.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import aiohttp
import msgspec
from yarl import URL

from vaultevents.chain.jsonrpc import Patience, asked_pause_s
from vaultevents.chain.lines import Counters, Line, Passing, RateLimited, TooSlow
from vaultevents.chain.urls import scrub
from vaultevents.core.errors import SourceUnavailable

JSON = "application/json"
SSZ = "application/octet-stream"
_CHUNK_BYTES = 65536
_ERROR_BYTES = 4096
_MESSAGE = re.compile(rb'"(?:message|title)"\s*:\s*"([^"]{1,1000})"')
_NONE: frozenset[int] = frozenset()


@dataclass(slots=True)
class BeaconCounters(Counters):
    """What happened at the beacon nodes since the start; each number only grows."""

    posts_refused: int = 0  # id lists that had to be asked by GET
    scans: int = 0  # of all validators, begun
    scanned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """An HTTP status that the question allows for."""

    problem: str


class Sink(Protocol):
    """Takes a body piece by piece."""

    @property
    def is_done(self) -> bool:
        """Whether the rest of the body is of no interest."""

    def feed(self, piece: bytes) -> None:
        """Work in proportion to the piece."""


S = TypeVar("S", bound=Sink)
T = TypeVar("T")


class BeaconNode:
    """One node. `name` is its redacted name; `takes_post` and `gives_…` are what was learned about it."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        patience: Patience,
        stream_timeout: aiohttp.ClientTimeout,
        line: Line,
        counters: BeaconCounters,
    ) -> None:
        self.name = line.name
        self.line = line
        self.takes_post = True
        self.gives_ssz = True
        self.gives_blinded = True
        self._url = url
        self._session = session
        self._patience = patience
        self._stream_timeout = stream_timeout
        self._counters = counters

    async def get(self, path: str, ids: Sequence[int] = ()) -> bytes:
        """The body of a 200. `ids` become repeated `id=` parameters, the only form that every client reads."""
        url = self._at(path).extend_query([("id", str(one)) for one in ids])
        content = await self._whole("GET", path, url, None, _NONE)
        assert isinstance(content, bytes)
        return content

    async def find(self, path: str, missing: frozenset[int]) -> bytes | Refused:
        """Return the body of a 200; `Refused` for a status in `missing`."""
        return await self._whole("GET", path, self._at(path), None, missing)

    async def post(self, path: str, body: object, allowed: frozenset[int]) -> bytes | Refused:
        """The body of a 200 to this JSON body; `Refused` for a status in `allowed`."""
        return await self._whole("POST", path, self._at(path), msgspec.json.encode(body), allowed)

    async def stream(
        self, path: str, accept: str, sink_for: Callable[[Mapping[str, str]], S | None], allowed: frozenset[int] = _NONE
    ) -> S | Refused | None:
        """Feed the body of a 200 to the sink made for its headers; None when there is none for them.

        It is asked for once: a body that large is not begun again at the same node.
        """

        async def read(response: aiohttp.ClientResponse) -> S | Refused | None:
            if response.status != 200:
                return await self._refused(response, path, allowed)
            self._check_plain(response)
            sink = sink_for(response.headers)
            while sink is not None and not sink.is_done and (piece := await response.content.readany()):
                self._counters.scanned_bytes += len(piece)
                sink.feed(piece)
            if sink is None or sink.is_done:
                response.close()
            return sink

        ask = partial(self._exchange, "GET", self._at(path), None, {"accept": accept}, self._stream_timeout, read)
        return await self.line.ask(ask, attempts=1)

    async def _whole(
        self, method: str, path: str, url: URL, body: bytes | None, allowed: frozenset[int]
    ) -> bytes | Refused:
        async def read(response: aiohttp.ClientResponse) -> bytes | Refused:
            if response.status != 200:
                return await self._refused(response, path, allowed)
            self._check_plain(response)
            content = bytearray()
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                content += chunk
                if len(content) > self._patience.answer_bytes:
                    response.close()
                    raise SourceUnavailable(
                        self.name, f"its answer to {path} is more than {self._patience.answer_bytes} bytes"
                    )
            return bytes(content)

        ask = partial(self._exchange, method, url, body, {}, None, read)
        return await self.line.ask(ask)

    async def _exchange(
        self,
        method: str,
        url: URL,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout | None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[T]],
    ) -> T:
        self._counters.requests += 1
        problem: SourceUnavailable
        timeout = timeout or self._session.timeout
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return await read(response)
        except aiohttp.ConnectionTimeoutError:
            problem = SourceUnavailable(self.name, f"cannot be connected to within {self._patience.connect_s:g} s")
        except aiohttp.SocketTimeoutError:
            problem = TooSlow(self.name, f"sends nothing for {timeout.sock_read:g} s")
        except TimeoutError:
            problem = TooSlow(self.name, f"gives no whole answer within {timeout.total:g} s")
        except aiohttp.ClientPayloadError:
            problem = Passing(self.name, "breaks off in the middle of an answer")
        except (aiohttp.ClientError, OSError) as error:
            problem = Passing(self.name, f"cannot be reached ({type(error).__name__})")
        raise problem  # outside of the handler: aiohttp's exception carries the URL and must not hang on to this one

    def _at(self, path: str) -> URL:
        top = URL(self._url)
        return top.with_path(top.raw_path.rstrip("/") + path, encoded=True, keep_query=True)

    def _check_plain(self, response: aiohttp.ClientResponse) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise SourceUnavailable(self.name, "compresses its answers although it was asked not to")

    async def _refused(self, response: aiohttp.ClientResponse, path: str, allowed: frozenset[int]) -> Refused:
        status = response.status
        said = _MESSAGE.search(await response.content.read(_ERROR_BYTES))
        response.close()
        words = f" ({scrub(said[1].decode(errors='replace'), self._url)})" if said else ""
        problem = f"answers {path} with HTTP status {status}{words}"
        if status in allowed:
            return Refused(problem)
        if status == 429:
            raise RateLimited(self.name, "HTTP status 429", asked_pause_s(response))
        if status >= 500:
            raise Passing(self.name, problem)
        if status in (401, 403):
            problem += "; is the URL (with its key) right?"
        raise SourceUnavailable(self.name, problem)
