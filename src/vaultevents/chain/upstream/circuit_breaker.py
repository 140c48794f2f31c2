"""Whether one node is in use, by its answers alone. Pure; times are seconds of one clock that only goes forward.

closed ──fails──▶ open ──its pause is over──▶ trial ──answers──▶ closed
                   ▲                            └──fails: twice the pause──▶ open
"""

from __future__ import annotations

from typing import Final

from vaultevents.core.nodes import CircuitState

LONGEST_PAUSE_S: Final = 240.0


class CircuitBreaker:
    """`closed`: the node is asked. `open`: it is left alone for a while. `trial`: one question at a time finds out.

    `problem` is why it is not closed; `since` when it was closed or first opened.
    """

    __slots__ = ("_first_pause_s", "_on_trial", "_opened_at", "_pause_s", "_until", "problem", "since")

    def __init__(self, pause_s: float, now: float) -> None:
        self._first_pause_s = self._pause_s = pause_s
        self._opened_at = self._until = float("-inf")
        self._on_trial = False
        self.problem: str | None = None
        self.since = now

    def state(self, now: float) -> CircuitState:
        if self.problem is None:
            return "closed"
        return "open" if now < self._until else "trial"

    def is_usable(self, now: float) -> bool:
        """Whether a question may go there without need: not during the pause, and one at a time after it."""
        return self.problem is None or (now >= self._until and not self._on_trial)

    @property
    def until(self) -> float:
        """The end of the pause."""
        return self._until

    def begin(self, now: float) -> bool:
        """A question goes there now. Whether it is the one that finds out; if so, `end` follows whatever happens."""
        finds_out = self.state(now) == "trial" and not self._on_trial
        self._on_trial |= finds_out
        return finds_out

    def end(self) -> None:
        """The question that was to find out is over, perhaps without having found out."""
        self._on_trial = False

    def answered(self, begun_at: float, now: float) -> None:
        """A question that was begun at `begun_at` was answered well; what was begun before a failure proves nothing."""
        if self.problem is not None and begun_at >= self._opened_at:
            self.problem, self.since = None, now
            self._pause_s = self._first_pause_s

    def failed(self, problem: str, now: float, *, on_trial: bool) -> None:
        """The pause grows when the node failed its first question back, not when it was asked for want of others."""
        state = self.state(now)
        if state == "closed":
            self.since = now
            self._pause(self._first_pause_s, now)
        elif on_trial:
            self._pause(min(2 * self._pause_s, max(LONGEST_PAUSE_S, self._first_pause_s)), now)
        self.problem = problem

    def hold(self, problem: str, pause_s: float, now: float) -> None:
        """The node itself has asked for this pause; it teaches nothing about the next one."""
        if self.problem is None:
            self.since = now
        self._opened_at = now
        self._until = max(self._until, now + pause_s)
        self.problem = problem

    def _pause(self, pause_s: float, now: float) -> None:
        self._opened_at = now
        self._pause_s = pause_s
        self._until = now + pause_s
