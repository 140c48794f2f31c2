"""Run a benchmark that lays down millions of rows, or a share of them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _result import print_result

from vaultevents.store.postgres.embedded import EmbeddedPostgres

Measure = Callable[[dict[str, Any], float], Coroutine[Any, Any, dict[str, Any]]]


def run_at_scale(measure: Measure, description: str, rows: str, arguments: list[str]) -> int:
    """Measure on an embedded server of its own, with the share `--scale` of the rows, and print the result."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help=f"this share of the {rows}")
    options = parser.parse_args(arguments)
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        embedded = EmbeddedPostgres(Path(folder) / "postgres")
        try:
            result = asyncio.run(measure(dict(embedded.join().connect_kwargs()), options.scale))
        finally:
            embedded.leave()
    return print_result(result, as_json=options.json)
