"""Which conditions are raised, and how those of a process pass."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Final

import pytest

from vaultevents import metrics
from vaultevents.core.verdict import RECENT_S, conditions
from vaultevents.store import verdict_facts
from vaultevents.store.pool import Database

NOTHING: Final = MappingProxyType[str, Path]({})


async def raised(database: Database, disks: Mapping[str, Path] = NOTHING) -> set[str]:
    """The names of the conditions that the database and this process show now."""
    return {condition.name for condition in conditions(await verdict_facts.read(database, disks=disks))}


def raised_by_process() -> set[str]:
    """Likewise, of what this process knows by itself."""
    return {condition.name for condition in conditions(verdict_facts.counted())}


def forget_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just started."""
    monkeypatch.setattr(metrics, "_recent", {})
    monkeypatch.setattr(metrics, "_heads", {})


def let_counts_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the clock of this process is so far ahead that what was counted is not recent."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + RECENT_S + 1)
    monkeypatch.setattr(metrics, "time", clock)
