"""The database server that the commands of one module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(data_dir: Path) -> Iterator[ServerAddress]:
    """Keeps the server of `data_dir` up between the commands, as a running daemon would."""
    with EmbeddedPostgres(data_dir / "postgres") as address:
        yield address
