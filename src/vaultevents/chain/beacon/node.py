"""One beacon node: the requests of its REST routes, and the bodies of its answers.

Of an error answer only the HTTP status counts, because its body differs from client to client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar

import aiohttp
import msgspec
from yarl import URL

from vaultevents.chain.upstream.http import Deadlines, HttpExchange, Request, asked_pause_s, read_body
from vaultevents.chain.upstream.node import Counters
from vaultevents.chain.upstream.redaction import scrub
from vaultevents.core.errors import SourceUnavailable

SSZ = "application/octet-stream"
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


class BeaconNode:
    """One node. `name` is its redacted name; `takes_post` and `gives_…` are what was learned about it."""

    def __init__(
        self, url: str, http: HttpExchange, scan: Deadlines, counters: BeaconCounters, *, answer_bytes: int
    ) -> None:
        self.name = http.name
        self.client = http.client
        self.takes_post = True
        self.gives_ssz = True
        self.gives_blinded = True
        self._url = url
        self._http = http
        self._scan = scan
        self._counters = counters
        self._answer_bytes = answer_bytes

    async def get(self, path: str, ids: Sequence[int | str] = ()) -> bytes:
        """Return the body of a 200. `ids` become repeated `id=` parameters, the only form that every client reads."""
        url = self._at(path).extend_query([("id", str(index)) for index in ids])
        content = await self._whole("GET", path, url, None, _NONE)
        assert isinstance(content, bytes)
        return content

    async def find(self, path: str, missing: frozenset[int]) -> bytes | Refused:
        """Return the body of a 200; `Refused` for a status in `missing`."""
        return await self._whole("GET", path, self._at(path), None, missing)

    async def post(self, path: str, body: object, allowed: frozenset[int]) -> bytes | Refused:
        """Return the body of a 200 to this JSON body; `Refused` for a status in `allowed`."""
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
            self._http.check_plain(response)
            sink = sink_for(response.headers)
            while sink is not None and not sink.is_done and (piece := await response.content.readany()):
                self._counters.scanned_bytes += len(piece)
                sink.feed(piece)
            if sink is None or sink.is_done:
                response.close()
            return sink

        request = Request("GET", self._at(path), headers={"accept": accept})
        return await self.client.ask(partial(self._http.fetch, request, read, self._scan), attempts=1)

    async def _whole(
        self, method: Literal["GET", "POST"], path: str, url: URL, body: bytes | None, allowed: frozenset[int]
    ) -> bytes | Refused:
        async def read(response: aiohttp.ClientResponse) -> bytes | Refused:
            if response.status != 200:
                return await self._refused(response, path, allowed)
            self._http.check_plain(response)
            content = await read_body(response, self._answer_bytes)
            if content is None:
                raise SourceUnavailable(self.name, f"its answer to {path} is more than {self._answer_bytes} bytes")
            return content

        return await self.client.ask(partial(self._http.fetch, Request(method, url, body), read))

    def _at(self, path: str) -> URL:
        top = URL(self._url)
        return top.with_path(top.raw_path.rstrip("/") + path, encoded=True, keep_query=True)

    async def _refused(self, response: aiohttp.ClientResponse, path: str, allowed: frozenset[int]) -> Refused:
        status = response.status
        message = _MESSAGE.search(await response.content.read(_ERROR_BYTES))
        response.close()
        reason = f" ({scrub(message[1].decode(errors='replace'), self._url)})" if message else ""
        problem = f"answers {path} with HTTP status {status}{reason}"
        if status in allowed:
            return Refused(problem)
        if status in (401, 403):
            problem += "; is the URL (with its key) right?"
        raise self._http.status_error(status, problem, asked_pause_s(response))
