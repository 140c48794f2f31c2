"""Rules that hold for every test: each is marked, and a unit test opens no socket."""

from __future__ import annotations

import socket
from typing import Any

import pytest

KINDS = {"unit", "property", "integration", "fault", "e2e"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unmarked = [item.nodeid for item in items if not KINDS & {mark.name for mark in item.iter_markers()}]
    if unmarked:
        raise pytest.UsageError(f"mark these tests with one of {sorted(KINDS)}: {unmarked[:5]}")


@pytest.fixture(autouse=True)
def _no_sockets_in_unit_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("unit") is None:
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a unit test opened a socket: move it to tests/integration")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
