"""Up to which block is read, and which node is behind: it lacks a block that another node had a while ago. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from vaultevents.core.errors import InputError

BEHIND_S: Final = 30.0
"""Nodes receive a block within seconds of each other; one that lacks it after this time does not keep up."""

_NEAR_HEAD = re.compile(r"latest-([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class HeadPolicy:
    """Up to which block is read: a block tag, and how many blocks before it (rule C1)."""

    tag: Literal["finalized", "safe", "latest"] = "finalized"
    depth: int = 0

    @classmethod
    def parse(cls, text: str) -> HeadPolicy:
        """From `finalized`, `safe` or `latest-N`; raises `InputError` for anything else."""
        if text == "finalized":
            return cls("finalized")
        if text == "safe":
            return cls("safe")
        if near := _NEAR_HEAD.fullmatch(text):
            return cls("latest", int(near[1]))
        raise InputError(f"'{text}' is not a head: write finalized, safe, or latest-N (for example latest-32)")

    def __str__(self) -> str:
        return f"latest-{self.depth}" if self.tag == "latest" else self.tag


class NodeLag:
    """The highest heads that were seen, of any node, by the time that has passed since."""

    __slots__ = ("_before", "_highest", "_since", "due")

    def __init__(self) -> None:
        self._since = float("-inf")
        self._highest = self._before = self.due = -1

    def seen(self, number: int, now: float) -> bool:
        """Note a head; return whether it is time to ask another node, too. `due` is what every node should have now."""
        begins = now - self._since >= BEHIND_S
        if begins:
            self.due, self._before, self._since = self._before, self._highest, now
        self._highest = max(self._highest, number)
        return begins

    def forget(self) -> None:
        """Forget the heads: no node has them."""
        self._highest = self._before = self.due = -1
