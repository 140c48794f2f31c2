"""What the machine did for a figure: CPU seconds and memory of processes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_TICKS_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / _TICKS_S


def postgres_cpu_s(directory: Path) -> float:
    """CPU seconds so far of the PostgreSQL server whose data lie under `directory`."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if entry.joinpath("cwd").readlink().is_relative_to(directory):
                    total += cpu_s(int(entry.name)) if entry.joinpath("comm").read_text() == "postgres\n" else 0.0
            except OSError:  # it has ended meanwhile
                continue
    return total


def peak_mb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mb(pid: int) -> float:
    """The memory that a process has now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files(pid: int) -> int:
    """How many descriptors a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
