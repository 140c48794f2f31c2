"""How fast backfills move, from the positions that this process saw lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from vaultevents.store.status import CursorFacts

SEEN_FOR_S: Final = 120.0

Key = tuple[str, str, int, int | None]


class Progress:
    """Positions of cursors within `SEEN_FOR_S`."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[Key, int]]] = deque()

    def note(self, cursors: Iterable[CursorFacts], now_s: float) -> None:
        """Take note of the present positions."""
        self._seen.append((now_s, {_key(cursor): cursor.position for cursor in cursors}))
        while now_s - self._seen[0][0] > SEEN_FOR_S:
            self._seen.popleft()

    def left_s(self, cursor: CursorFacts) -> float | None:
        """Return how long the rest takes at the present speed; None while it is not known, or nothing moves."""
        if cursor.stop is None or len(self._seen) < 2:
            return None
        now_s, _ = self._seen[-1]
        began = next(((at_s, seen[_key(cursor)]) for at_s, seen in self._seen if _key(cursor) in seen), None)
        if began is None or now_s <= began[0] or cursor.position <= began[1]:
            return None
        return (cursor.stop - cursor.position) * (now_s - began[0]) / (cursor.position - began[1])


def _key(cursor: CursorFacts) -> Key:
    return cursor.stream, cursor.kind, cursor.first, cursor.stop
