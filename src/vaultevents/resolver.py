"""Look up names without threads, and say whose failure a failed look-up is.

    name ─▶ c-ares: /etc/hosts, search domains, name servers ─▶ addresses
               ├─ the name does not exist ──────────────────────────────▶ OSError: of the name
               └─ no answer, or "server failure" ─▶ does our resolver ─▶ yes: OSError, of the name
                                                     answer at all?   └▶ no: LocalFault, of this host

A name whose servers never answer holds a few hundred bytes and one query for some seconds, so any number of them leaves
the look-ups of other names alone.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from typing import Final

import aiodns
from pycares import AresError
from pycares.errno import ARES_EBADNAME, ARES_ENODATA, ARES_ENOTFOUND, ARES_EREFUSED, ARES_ESERVFAIL, ARES_ETIMEOUT

from vaultevents.core.errors import LocalFault

LOOKUP_S: Final = 1.0
PROBE_S: Final = 0.5
PROBED_S: Final = 1.0
"""For so long an answer to the probe holds."""

TRY_S, TRIES = 0.5, 3
"""Until the first query is repeated, and how many are sent to a name server; c-ares adapts the time to the server."""

RECENT_S: Final = 60.0
MANY_FAILURES: Final = 3
"""So many names that fail within `RECENT_S`, and none that is found, are the resolver's failure."""

_OF_THE_NAME: Final = {ARES_ENODATA, ARES_ENOTFOUND, ARES_EBADNAME}
_OF_EITHER: Final = {ARES_ESERVFAIL, ARES_ETIMEOUT, ARES_EREFUSED}


class SystemLookup:
    """The resolver of this host, for any number of names at a time; overlapping look-ups of a name share a query.

    `servers` replaces the name servers of the host (`address` or `address:port`).
    """

    def __init__(self, servers: Sequence[str] | None = None) -> None:
        self._servers = servers
        self._resolver: aiodns.DNSResolver | None = None
        self._pending: dict[str, asyncio.Task[list[str]]] = {}
        self._probe: asyncio.Task[bool] | None = None
        self._probed_at_s = float("-inf")
        self._found_at_s = float("-inf")
        self._failed_at_s: dict[str, float] = {}

    async def __call__(self, name: str) -> list[str]:
        """Return all addresses of `name`, those first that this host reaches best.

        Raises `LocalFault` where this host or its resolver is in trouble, otherwise `OSError`.
        """
        query = self._pending.get(name)
        if query is None:
            query = self._pending[name] = asyncio.create_task(self._query(name))
            query.add_done_callback(lambda done: self._forget(name, done))
        try:
            async with asyncio.timeout(LOOKUP_S):
                return await asyncio.shield(query)
        except aiodns.error.DNSError as problem:
            code, text = int(problem.args[0]), str(problem.args[-1])
        except TimeoutError:
            code, text = ARES_ETIMEOUT, f"no answer within {LOOKUP_S:g} s"
        if code in _OF_THE_NAME:
            raise socket.gaierror(socket.EAI_NONAME, text)
        if code not in _OF_EITHER or not await self._works(name):
            raise LocalFault("resolver", f"the resolver of this host does not answer: {text}")
        raise socket.gaierror(socket.EAI_AGAIN, text)

    async def close(self) -> None:
        for task in (*self._pending.values(), *([self._probe] if self._probe else [])):
            task.cancel()
        if self._resolver is not None:
            await self._resolver.close()

    async def _query(self, name: str) -> list[str]:
        # As the system does: addresses of a family that this host cannot reach are not asked for.
        family = socket.AF_UNSPEC if has_route("2001:db8::1") else socket.AF_INET
        answer = await self._opened().getaddrinfo(name, family=family, type=socket.SOCK_STREAM)
        self._found_at_s = asyncio.get_running_loop().time()
        addresses = (node.addr[0] for node in answer.nodes)
        return list(dict.fromkeys(a.decode("ascii") if isinstance(a, bytes) else a for a in addresses))

    def _opened(self) -> aiodns.DNSResolver:
        if self._resolver is None:
            try:
                self._resolver = aiodns.DNSResolver(self._servers, timeout=TRY_S, tries=TRIES)
            except (AresError, OSError) as problem:
                raise LocalFault("resolver", f"cannot open the resolver of this host: {problem}") from None
        return self._resolver

    def _forget(self, name: str, done: asyncio.Task[list[str]]) -> None:
        self._pending.pop(name, None)
        if not done.cancelled():
            done.exception()  # every caller may have timed out

    async def _works(self, failed: str) -> bool:
        """Return whether the resolver works, so that the failure is that of the name `failed`.

        It has to answer for a name that nobody can have registered, and not to fail for every other name.
        """
        now_s = asyncio.get_running_loop().time()
        if self._probe is None or (self._probe.done() and now_s - self._probed_at_s > PROBED_S):
            self._probe, self._probed_at_s = asyncio.create_task(self.answers()), now_s
        if not await asyncio.shield(self._probe):
            return False
        recent_s = now_s - RECENT_S
        self._failed_at_s = {name: at_s for name, at_s in self._failed_at_s.items() if at_s > recent_s}
        self._failed_at_s[failed] = now_s
        return self._found_at_s > recent_s or len(self._failed_at_s) < MANY_FAILURES

    async def answers(self) -> bool:
        """Return whether the resolver answers for a name that nobody can have registered."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._opened().query_dns(f"{secrets.token_hex(8)}.invalid", "A")
        except aiodns.error.DNSError as problem:
            return int(problem.args[0]) in (_OF_THE_NAME | {ARES_EREFUSED})
        except OSError:  # TimeoutError and LocalFault are
            return False
        return True


def has_route(address: str) -> bool:
    """Return whether this host has a route to `address` and an address to send from. Sends nothing.

    Raises `OSError` when there is no descriptor to find out with.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return False
    return True
