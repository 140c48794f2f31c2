"""Bounded memory of one process about its callers: request rates (rule A17) and tokens of reads (rule A13)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Final

from vaultevents.core.errors import VaulteventsError

MAX_BUCKETS: Final = 20_000
TOKEN_LIFE_S: Final = 36.0
"""A token is younger than 30 s, and may be from 5 s ahead."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many requests a minute, of which `burst` may come at once."""

    per_minute: int = 240
    burst: int = 40


class Buckets:
    """A token bucket for each name. The least recently used one goes when there are too many."""

    def __init__(self, rate: Rate, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._per_s = rate.per_minute / 60
        self._monotonic_s = monotonic_s
        self._filled: dict[str, tuple[float, float]] = {}

    def wait_s(self, name: str) -> float:
        """Return what `take` would, and count nothing."""
        level, _ = self._level(name)
        return 0.0 if level >= 1 else (1 - level) / self._per_s

    def take(self, name: str) -> float:
        """0 when the request may pass, else the seconds until one may."""
        level, now_s = self._level(name)
        self._filled.pop(name, None)
        passes = level >= 1
        self._filled[name] = (level - 1 if passes else level, now_s)
        if len(self._filled) > MAX_BUCKETS:
            del self._filled[next(iter(self._filled))]
        return 0.0 if passes else (1 - level) / self._per_s

    def _level(self, name: str) -> tuple[float, float]:
        """Return how many requests may pass now, and the time."""
        now_s = self._monotonic_s()
        level, at_s = self._filled.get(name, (float(self._rate.burst), now_s))
        return min(self._rate.burst, level + (now_s - at_s) * self._per_s), now_s


class SeenTokens:
    """The digests of tokens that were used for reading, for as long as one can live, in two generations."""

    def __init__(self, most: int = 1_000_000, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._monotonic_s = monotonic_s
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._turned_at_s = monotonic_s()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._young or digest in self._old

    def add(self, digest: bytes) -> bool:
        """False when the digest was seen before."""
        now_s = self._monotonic_s()
        if now_s - self._turned_at_s >= TOKEN_LIFE_S:
            self._old = self._young if now_s - self._turned_at_s < 2 * TOKEN_LIFE_S else set()
            self._young, self._turned_at_s = set(), now_s
        elif len(self._young) >= self._most:
            self._old, self._young = self._young, set()
        if digest in self:
            return False
        self._young.add(digest)
        return True


class AccountBusy(VaulteventsError):
    """So many requests of the account wait for the database that another is refused."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How many requests of one account use the database at once, and how many more may wait for that."""

    at_once: int = 4
    waiting: int = 100


class AccountShares:
    """Bound the work of each account with the database, so that the requests of others find a connection."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._accounts: dict[str, _Share] = {}

    @asynccontextmanager
    async def share(self, account_id: str) -> AsyncIterator[None]:
        """Wait for a place, in order of arrival; raises `AccountBusy` when too many wait already."""
        share = self._accounts.get(account_id)
        if share is None:
            share = self._accounts[account_id] = _Share(asyncio.Semaphore(self._shares.at_once))
        if share.users >= self._shares.at_once + self._shares.waiting:
            raise AccountBusy("this account has too many requests under way: wait for their answers")
        share.users += 1
        try:
            async with share.places:
                yield
        finally:
            share.users -= 1
            if not share.users:
                del self._accounts[account_id]


@dataclass(slots=True)
class _Share:
    """The places of one account; `users` have one or wait for one."""

    places: asyncio.Semaphore
    users: int = field(default=0)


def plain_address(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return an IPv4 address that a socket for both families reports as an IPv6 one, any other as it is."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def neighbourhood(address: IPv4Address | IPv6Address | None) -> str:
    """Return the peers that are counted together: an IPv4 address, or the /64 that one IPv6 customer has."""
    return str(ip_network((address, 64), strict=False)) if isinstance(address, IPv6Address) else str(address)
