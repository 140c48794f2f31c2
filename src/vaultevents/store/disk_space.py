"""How much of a disk is free, for metrics and verdict."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path


async def free_shares(disks: Mapping[str, Path]) -> dict[str, float]:
    """Return the free share, 0 to 1, of the disk of each directory that exists."""
    return await asyncio.to_thread(_free_shares, disks)


def _free_shares(disks: Mapping[str, Path]) -> dict[str, float]:
    found = {}
    for name, path in disks.items():
        try:
            usage = shutil.disk_usage(path)
        except OSError:
            continue
        found[name] = usage.free / usage.total if usage.total else 1.0
    return found
