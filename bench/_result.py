"""Print the result of a benchmark."""

from __future__ import annotations

import json
from typing import Any


def print_result(result: dict[str, Any], *, as_json: bool) -> int:
    """Prints the result as the last line, without `as_json` after a table of it; the exit code of the command."""
    if not as_json:
        for part in ("figures", "floor", "ratio", "goal"):
            print(f"{part:8}", "  ".join(f"{key} {value}" for key, value in result[part].items()))
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def percentiles(name: str, took_ms: list[float]) -> dict[str, float]:
    """The median and the 99th percentile, as `<name>_p50_ms` and `<name>_p99_ms`."""
    in_order = sorted(took_ms)
    return {f"{name}_p50_ms": in_order[len(in_order) // 2], f"{name}_p99_ms": in_order[len(in_order) * 99 // 100]}
