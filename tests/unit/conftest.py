"""A unit test opens no socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_sockets() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a unit test opened a socket: move it to tests/integration")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "bind", refuse)
        yield
