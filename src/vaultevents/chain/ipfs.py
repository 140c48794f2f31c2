"""From a CID to the verified bytes of its file: several gateways, a cap while streaming, deadlines, a cache on disk.

    cache ─▶ check ─▶ done
      │ none, or not the file
      ▼
    gateway ─▶ at most 3 guarded redirects ─▶ capped, uncompressed body ─▶ check ─▶ cache ─▶ done
      └ anything else: the next gateway

A gateway only carries bytes: whether they are the file is decided by `check` alone (rule C6), also for the cache.
What the file says is not a gateway's business: `check` compares it with the CID and nothing else.
The gateways are the operator's choice and may be private; where they redirect to is not, and must be public or allowed
(rule D10). No proxy is taken from the environment and no cookie is kept.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from types import TracebackType
from typing import Final, Literal
from urllib.parse import urljoin, urlsplit

import aiohttp
import structlog
from yarl import URL

from vaultevents import __version__
from vaultevents.chain.upstream.http import Deadlines, HttpExchange, Request, asked_pause_s, read_body
from vaultevents.chain.upstream.node import Counters, NodeClient, UpstreamTimeout
from vaultevents.chain.upstream.pool import NodePool
from vaultevents.chain.upstream.redaction import node_name, scrub
from vaultevents.core.errors import InputError, NodeFault, SourceUnavailable, VaulteventsError
from vaultevents.core.nodes import NodeState
from vaultevents.core.webhooks import AllowRule, UrlRules
from vaultevents.egress import EgressRefused, Guard, open_session

_log = structlog.get_logger()

Check = Callable[[bytes], None]
"""Raises `ValueError` or `VaulteventsError`, with the reason, for bytes that are not the file. Runs in a thread."""

_KUBO = "kubo+"
_PLACE = "{cid}"
# Letters and digits only: no such text can leave its place in a URL or in a path. A CIDv0 has 46, a usual CIDv1 59.
_CID = re.compile(r"[A-Za-z0-9]{46,128}", re.ASCII)
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS: Final = {"accept": "*/*", "accept-encoding": "identity", "user-agent": f"vaultevents/{__version__}"}
_EVERYWHERE: Final = UrlRules(
    allow=(AllowRule(IPv4Network("0.0.0.0/0"), "any"), AllowRule(IPv6Network("::/0"), "any")),
)


@dataclass(frozen=True, slots=True)
class IpfsLimits:
    """How much is read and how long a gateway is waited for; an attempt includes its redirects."""

    file_bytes: int = 32 * 2**20
    connect_s: float = 5.0
    attempt_s: float = 20.0
    gateway_s: float = 30.0
    attempts: int = 2
    retry_wait_s: float = 0.25
    redirects: int = 3
    set_aside_s: float = 60.0


class IpfsClient:
    """Fetches files by CID; an async context manager.

    A gateway is a URL with `{cid}` in its path or query, or a base URL to which `/ipfs/{cid}` is appended, or the API
    of a Kubo node as `kubo+http://host:5001`. Redirects go only where `guard` lets them, which the client then owns.
    `ca_file` (PEM) is trusted besides the system's roots. Raises `InputError` for a URL of none of these forms.
    """

    def __init__(
        self,
        gateways: Sequence[str],
        *,
        guard: Guard,
        cache_dir: Path | None = None,
        ca_file: Path | None = None,
        limits: IpfsLimits | None = None,
    ) -> None:
        if not gateways:
            raise InputError("no IPFS gateway is configured: name at least one")
        self.counters = Counters()
        self._limits = limits or IpfsLimits()
        self._sources = [_parsed(url) for url in gateways]
        self._guard = guard
        self._cache_dir = cache_dir
        self._ca_file = ca_file

    async def __aenter__(self) -> IpfsClient:
        limits = self._limits
        open_for = partial(open_session, ca_file=self._ca_file, connect_timeout_s=limits.connect_s)
        self._open = open_for(Guard(_EVERYWHERE, lookup_timeout_s=limits.connect_s))
        self._guarded = open_for(self._guard)
        gateways = [self._gateway(source) for source in self._sources]
        self._gateways = NodePool(gateways, _any)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.close()
        await self._guarded.close()

    def _gateway(self, source: _Source) -> _Gateway:
        limits = self._limits
        client = NodeClient(
            source.name,
            "ipfs",
            self.counters,
            attempts=limits.attempts,
            wait_s=limits.retry_wait_s,
            set_aside_s=limits.set_aside_s,
        )
        http = HttpExchange(client, self._open, Deadlines(limits.connect_s, limits.attempt_s), "file")
        return _Gateway(source, http, self._guarded, self._guard, limits)

    def node_states(self) -> list[NodeState]:
        """What is known of each gateway now, the preferred one first."""
        return self._gateways.node_states()

    def load_state(self, node_states: Iterable[NodeState]) -> None:
        """What was learned of these gateways before the last start."""
        self._gateways.load_state(node_states)

    async def fetch(self, cid: str, check: Check, *, only: str | None = None) -> bytes:
        """The bytes for which `check` returns; from the cache, else from the first gateway that has them.

        With `only` no other gateway than this one is asked.
        Raises `InputError` for a text that cannot be a CID, and `SourceUnavailable` with a reason for each gateway:
        `NodeFault` when any of them gave bytes that are not the file.
        """
        if not _CID.fullmatch(cid):
            raise InputError(f"{cid[:80]!r} is not a CID of letters and digits, so no file can be asked for")
        cached = None if self._cache_dir is None else self._cache_dir / cid
        if cached is not None:
            content = await asyncio.to_thread(_recall, cached, check, self._limits.file_bytes)
            if content is not None:
                return content
        content = await self._from_gateways(cid, check, only)
        if cached is not None:
            await asyncio.to_thread(write_cache, cached, content)
        return content

    async def _from_gateways(self, cid: str, check: Check, only: str | None) -> bytes:
        faulty: list[str] = []
        try:
            return await self._gateways.ask(partial(self._from_gateway, cid, check, faulty), only=only)
        except SourceUnavailable as error:
            problem = NodeFault(error.node, error.problem) if faulty else error
        raise problem  # outside of the handler: the former error must not become its context

    async def _from_gateway(self, cid: str, check: Check, faulty: list[str], gateway: _Gateway) -> bytes:
        """The checked bytes of one gateway, whose name joins `faulty` when they are not the file."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.gateway_s):
                content = await gateway.client.ask(partial(gateway.get, cid))
        except TimeoutError:
            raise UpstreamTimeout(gateway.name, f"gives no whole file within {limits.gateway_s:g} s") from None
        try:
            await asyncio.to_thread(check, content)
        except (ValueError, VaulteventsError) as error:
            faulty.append(gateway.name)
            reason = f"gives {len(content)} bytes that are not the file: {gateway.scrubbed(str(error))}"
            raise NodeFault(gateway.name, reason) from None
        return content


async def _any(_: _Gateway) -> None:
    """Admit every gateway: its bytes are checked."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a gateway has its files: `template` with the place of the CID; `url` is what the operator wrote."""

    name: str
    url: str
    template: str
    method: Literal["GET", "POST"]


def _parsed(url: str) -> _Source:
    plain = url.removeprefix(_KUBO)
    name = node_name(plain)
    parts = urlsplit(plain)
    if _PLACE in parts.netloc or parts.fragment:
        raise InputError(f"the gateway {name} is not usable: write {_PLACE} in its path or query, and no fragment")
    if plain != url:
        kubo = parts._replace(path=parts.path.rstrip("/") + "/api/v0/cat", query=f"arg={_PLACE}")
        return _Source(name, plain, kubo.geturl(), "POST")
    if _PLACE in plain:
        return _Source(name, plain, plain, "GET")
    base = parts.path.rstrip("/").removesuffix("/ipfs")
    return _Source(name, plain, parts._replace(path=f"{base}/ipfs/{_PLACE}").geturl(), "GET")


@dataclass(frozen=True, slots=True)
class _Redirect:
    location: str


class _Gateway:
    """One gateway. `name` is its redacted name."""

    def __init__(
        self, source: _Source, http: HttpExchange, guarded: aiohttp.ClientSession, guard: Guard, limits: IpfsLimits
    ) -> None:
        self.name = source.name
        self.client = http.client
        self._source = source
        self._http = http
        self._guarded = guarded
        self._guard = guard
        self._limits = limits

    def scrubbed(self, text: str) -> str:
        return scrub(text, self._source.url)

    async def get(self, cid: str) -> bytes:
        """Return the body of a 200, unchecked, within the deadlines of one attempt. Raises `SourceUnavailable`."""
        try:
            return await self._http.within(partial(self._follow, self._source.template.replace(_PLACE, cid)))
        except EgressRefused as error:
            problem = SourceUnavailable(self.name, f"redirects to a place that is not allowed: {error}")
        raise problem

    async def _follow(self, url: str) -> bytes:
        """Return the body at `url`, or where it redirects to."""
        session, target = None, URL(url, encoded=True)
        for _ in range(self._limits.redirects + 1):
            request = Request(self._source.method, target, headers=_HEADERS)
            found = await self._http.send(request, self._read, session=session)
            if isinstance(found, bytes):
                return found
            session, target = self._guarded, self._vetted(str(target), found.location)
        raise SourceUnavailable(self.name, f"redirects more than {self._limits.redirects} times")

    def _vetted(self, base: str, location: str) -> URL:
        try:
            return self._guard.vet(urljoin(base, location))
        except (InputError, ValueError) as error:
            reason = f"redirects to a place that is not allowed: {self.scrubbed(str(error))}"
        raise SourceUnavailable(self.name, reason)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes | _Redirect:
        """Read the body, up to the cap, or where it is. The connection of anything else is closed."""
        if response.status in _REDIRECTS and self._source.method == "GET":
            response.close()  # what comes after the headers is not needed
            return _Redirect(response.headers.get("location", ""))
        if response.status != 200:
            response.close()
            missing = "does not have the file (HTTP status 404)"
            problem = missing if response.status == 404 else f"HTTP status {response.status}"
            raise self._http.status_error(response.status, problem, asked_pause_s(response))
        self._http.check_plain(response)
        if response.content_type == "text/html":
            problem = "answers with a web page instead of the file"
        elif (response.content_length or 0) > self._limits.file_bytes:
            problem = self._too_large
        elif (content := await read_body(response, self._limits.file_bytes)) is not None:
            return content
        else:
            problem = self._too_large
        response.close()
        raise SourceUnavailable(self.name, problem)

    @property
    def _too_large(self) -> str:
        return f"its answer is more than {self._limits.file_bytes} bytes"


def _recall(path: Path, check: Check, most_bytes: int) -> bytes | None:
    """A cached file that is still right; a wrong one is removed."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("ipfs_cache_unreadable", cid=path.name, problem=str(error))
        return None
    try:
        check(content)
    except (ValueError, VaulteventsError) as error:
        _log.warning("ipfs_cache_corrupted", cid=path.name, problem=str(error)[:200])
        path.unlink(missing_ok=True)
        return None
    return content


def write_cache(path: Path, content: bytes) -> None:
    """Writes the file for its owner only, whole or not at all. A full disk costs the cache, not the file."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=".part-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(part).replace(path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    except OSError as error:
        _log.warning("ipfs_cache_unwritable", cid=path.name, problem=str(error))
