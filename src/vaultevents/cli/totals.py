"""What became of the events that a run or a replay derived."""

from __future__ import annotations

from dataclasses import dataclass

from vaultevents.store.outbox import Committed
from vaultevents.watch.watcher import Advanced


@dataclass(slots=True)
class Totals:
    """Counts of derived events; of those that differ from what is stored also the ids."""

    inserted: int = 0
    identical: int = 0
    different: tuple[str, ...] = ()
    near_head: int = 0

    def count(self, step: Advanced) -> None:
        self.add(step.committed)

    def add(self, committed: Committed) -> None:
        self.inserted += committed.inserted
        self.identical += committed.identical
        self.different += committed.different
        self.near_head += committed.near_head

    def as_dict(self) -> dict[str, int]:
        different = len(self.different)
        counts = {
            "identical": self.identical,
            "inserted": self.inserted,
            "different": different,
            "near_head": self.near_head,
        }
        return {"derived": sum(counts.values()), **counts}
