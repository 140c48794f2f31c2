"""The pages of the console, in the order of the navigation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Page:
    """An entry of the navigation; pages below its path belong to it."""

    path: str
    title: str

    def holds(self, path: str) -> bool:
        """Whether the page with this path is it, or one below it."""
        return path == self.path or (self.path != "/" and path.startswith(f"{self.path}/"))


PAGES: Final = (
    Page("/", "Overview"),
    Page("/events", "Events"),
    Page("/webhooks", "Webhooks"),
    Page("/vaults", "Vaults and accounts"),
    Page("/replay", "Replay"),
    Page("/streams", "Streams"),
    Page("/nodes", "Nodes"),
    Page("/reports", "Reports"),
    Page("/audit", "Audit"),
    Page("/configuration", "Configuration"),
)
