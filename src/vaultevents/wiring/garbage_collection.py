"""Set up the garbage collector of a process that keeps most of its objects for good."""

from __future__ import annotations

import gc


def collect_less() -> None:
    """Exempt the present objects from garbage collection, and collect less often: it would take a tenth of the CPU."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
