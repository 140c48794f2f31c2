"""Who acts: named where a piece of work begins, and recorded in the audit log by what it changes (rule T22)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

SERVICE: Final = "service"
"""The actor of what the service does by itself."""

_actor: ContextVar[str] = ContextVar("actor", default=SERVICE)


@contextmanager
def acting_as(actor: str) -> Iterator[None]:
    """Name who acts in this block, in the tasks that it starts, too: `cli:`, `api:` or `console:` and an id."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


def acting() -> str:
    """Return who acts now."""
    return _actor.get()
