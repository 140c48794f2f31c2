"""Up to which block is read, which node lacks a block that another had a while ago, how far each is behind. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from vaultevents.core.errors import InputError
from vaultevents.core.nodes import HeadLag

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


class HeadLags:
    """How far the head of each node was behind the newest one, when the node last showed its head.

    Only heads of the same kind are compared: finalized blocks with finalized blocks. The newest head is the highest of
    those that the nodes have shown last, so that a false one counts no longer than its node claims it.
    """

    __slots__ = ("_heads", "_lags")

    def __init__(self) -> None:
        self._heads: dict[str, dict[str, int]] = {}
        self._lags: dict[str, tuple[int, float]] = {}

    def shown(self, kind: str, node: str, number: int, now: float, *, ahead: int = 0) -> None:
        """Note a head. `ahead`: by how much the chain is ahead of it, as the node itself says."""
        heads = self._heads.setdefault(kind, {})
        heads[node] = number
        self._lags[node] = max(ahead, max(heads.values()) - number), now

    def lacking(self, kind: str, node: str, number: int, now: float) -> None:
        """Note that a node does not have the block `number`, which is the head of another node."""
        heads = self._heads.get(kind, {})
        if (last := heads.get(node)) is not None:
            self._lags[node] = max(1, max(number, *heads.values()) - last), now

    def of(self, node: str, now: float) -> HeadLag | None:
        """Return the lag of a node; None where it has not shown a head."""
        found = self._lags.get(node)
        return None if found is None else HeadLag(found[0], now - found[1])
