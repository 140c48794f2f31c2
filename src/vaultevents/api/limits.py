"""What one process remembers about its callers, in bounded memory: request rates (A17) and tokens of reads (A13)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

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
        self._monotonic_s = monotonic_s
        self._filled: dict[str, tuple[float, float]] = {}

    def take(self, name: str) -> float:
        """0 when the request may pass, else the seconds until one may."""
        now_s = self._monotonic_s()
        per_s = self._rate.per_minute / 60
        level, at_s = self._filled.pop(name, (float(self._rate.burst), now_s))
        level = min(self._rate.burst, level + (now_s - at_s) * per_s)
        passes = level >= 1
        self._filled[name] = (level - 1 if passes else level, now_s)
        if len(self._filled) > MAX_BUCKETS:
            del self._filled[next(iter(self._filled))]
        return 0.0 if passes else (1 - level) / per_s


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

    def add(self, digest: bytes) -> bool:
        """False when the digest was seen before."""
        now_s = self._monotonic_s()
        if now_s - self._turned_at_s >= TOKEN_LIFE_S:
            self._old = self._young if now_s - self._turned_at_s < 2 * TOKEN_LIFE_S else set()
            self._young, self._turned_at_s = set(), now_s
        elif len(self._young) >= self._most:
            self._old, self._young = self._young, set()
        if digest in self._young or digest in self._old:
            return False
        self._young.add(digest)
        return True
