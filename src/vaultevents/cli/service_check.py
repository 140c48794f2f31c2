"""Run the checks of `vaultevents check` inside the service, for the console."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType

from vaultevents import metrics
from vaultevents.config import Settings
from vaultevents.core.findings import Finding


async def check_beside_service(settings: Settings, advanced: Callable[[int, int], None]) -> list[Finding]:
    """Run every probe. What its requests meet is in the findings and the log, and not in the metrics of the service."""
    plan = await asyncio.to_thread(_probes, with_contracts=bool(settings.contracts.lazy_oracles))
    with metrics.uncounted():
        found: list[Finding] = await plan.check_all(settings, advanced)
    return found


def _probes(*, with_contracts: bool) -> ModuleType:
    """Import the probes, and what calls contracts: seconds, so in a thread while the service goes on."""
    from vaultevents.chain.execution import contracts
    from vaultevents.probes import plan

    if with_contracts:
        contracts.load()
    return plan
