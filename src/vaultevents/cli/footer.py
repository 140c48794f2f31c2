"""What `run` shows below its log on a terminal: the verdict, streams, rates, what waits, and URLs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vaultevents import metrics
from vaultevents.cli.terminal import SEVERITY_STYLES
from vaultevents.config import Settings
from vaultevents.core.errors import VaulteventsError
from vaultevents.core.verdict import Facts, conditions, duration, verdict
from vaultevents.store import verdict_facts
from vaultevents.wiring.database import disks

if TYPE_CHECKING:
    from vaultevents.daemon import Role, Running
    from vaultevents.watch.watcher import Advanced

READ_EVERY_S: Final = 2.0
RATE_SAMPLES: Final = 6
"""Rates are those of the last 10 s."""
NO_URLS: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Sample:
    """What was counted since the start of the process."""

    at_s: float
    events: int
    deliveries: int


class Footer:
    """The last lines of the terminal. The database is read every `READ_EVERY_S`, whatever else is drawn."""

    def __init__(self, settings: Settings, roles: Collection[Role]) -> None:
        self._settings = settings
        self._roles = roles
        self._events = 0
        self._samples = deque[Sample](maxlen=RATE_SAMPLES)
        self._urls = NO_URLS
        self._facts: Facts | None = None
        self._begun = False

    def advanced(self, step: Advanced) -> None:
        """Count the events of one committed span."""
        self._events += step.committed.inserted

    async def follow(self, running: Running) -> None:
        """Read what is shown until cancelled; a database that is away is shown, too."""
        self._urls = running.urls
        while True:
            try:
                self._facts = await verdict_facts.read(running.database, disks=disks(self._settings))
            except VaulteventsError:
                self._facts = None
            self._samples.append(Sample(time.monotonic(), self._events, metrics.total(metrics.ATTEMPTS, "2xx")))
            self._begun = True
            await asyncio.sleep(READ_EVERY_S)

    def render(self) -> RenderableType:
        """Return the lines as they are now; each is cut to the width of the terminal."""
        return Group(*self._lines()) if self._begun else Text("")

    def _lines(self) -> Iterator[RenderableType]:
        facts = self._facts
        found = verdict(conditions(facts))
        yield _line(found.sentence, SEVERITY_STYLES[found.severity])
        if facts is not None:
            yield _streams(facts)
            yield _line(" · ".join((*self._rates(), _waiting(facts))))
        if self._urls:
            yield _line(" · ".join(f"{name} {url}" for name, url in self._urls.items()), "dim")

    def _rates(self) -> list[str]:
        first, last = self._samples[0], self._samples[-1]
        passed_s = last.at_s - first.at_s
        rates = (
            ("events", "watch", last.events - first.events),
            ("deliveries", "dispatch", last.deliveries - first.deliveries),
        )
        return [
            f"{number / passed_s if passed_s else 0.0:,.1f} {name}/s"
            for name, role, number in rates
            if role in self._roles
        ]


def _streams(facts: Facts) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)
    for stream, state in sorted(facts.streams.items()):
        behind = "" if state.lag is None else f"{state.lag:,} behind"
        position = "-" if state.position is None else f"{state.position:,}"
        style = "red" if state.stuck_s or state.unverified else ""
        moved = f"moved {duration(state.age_s)} ago"
        table.add_row(Text(stream, style), Text(position), Text(behind), Text(moved, "dim"))
    return table


def _waiting(facts: Facts) -> str:
    parked, disabled = facts.webhooks.get("parked", 0), facts.webhooks.get("disabled", 0)
    failing = ", ".join(f"{n} {state}" for n, state in ((parked, "parked"), (disabled, "disabled")) if n)
    return f"{facts.pending:,} pending · failing webhooks: {failing or 'none'}"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
