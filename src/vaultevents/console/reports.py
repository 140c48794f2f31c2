"""Reports: the newest oracle reports, and what became of their files."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from vaultevents.console.context import ConsoleContext
from vaultevents.console.live import LivePage
from vaultevents.store.reports import find_reports

STATES: Final = {
    "pending": ("warn", "waits for its file"),
    "resolved": ("good", "verified"),
    "empty": ("faint", "without vaults"),
    "given_up": ("bad", "given up"),
}


def page(context: ConsoleContext) -> LivePage:
    """Return the page `/reports`."""

    async def read() -> Mapping[str, Any]:
        reports = [
            (report, datetime.fromtimestamp(report.log.block_time_ms / 1000, UTC), *STATES[report.state])
            for report in await find_reports(context.database)
        ]
        return {"reports": reports, "watched": bool(context.settings.watched_oracles)}

    return LivePage("/reports", "Reports", "reports.html", read)
