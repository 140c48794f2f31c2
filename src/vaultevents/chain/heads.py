"""Which node is behind: one that does not have what another one showed a while ago. Pure."""

from __future__ import annotations

from typing import Final

BEHIND_S: Final = 30.0
"""Nodes hear of a block within seconds of each other; one that lacks it after this time does not keep up."""


class Heads:
    """The highest heads that were seen, of any node, by the time that has passed since."""

    __slots__ = ("_before", "_highest", "_since", "due")

    def __init__(self) -> None:
        self._since = float("-inf")
        self._highest = self._before = self.due = -1

    def seen(self, number: int, now: float) -> bool:
        """Notes a head. Whether it is time to look at another node's, too; `due` is what every node should have now."""
        begins = now - self._since >= BEHIND_S
        if begins:
            self.due, self._before, self._since = self._before, self._highest, now
        self._highest = max(self._highest, number)
        return begins

    def forget(self) -> None:
        """Nobody has what was seen."""
        self._highest = self._before = self.due = -1
