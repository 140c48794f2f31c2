"""Fixtures for the tests of the API."""

from __future__ import annotations

import pytest

from vaultevents.api import connection


@pytest.fixture
def no_unverified_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve the next request at once after one that did not verify: for files about something else than overload."""
    monkeypatch.setattr(connection, "UNVERIFIED_PAUSE_S", 0.0)
