"""Check everything that the settings name: which probes there are, and what is off by choice."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from functools import partial

from vaultevents.config import Settings
from vaultevents.core.errors import VaulteventsError
from vaultevents.core.findings import Finding, failed, passed
from vaultevents.core.networks import Network, network_named
from vaultevents.probes.beacon import beacon_probes
from vaultevents.probes.contracts import contract_probes
from vaultevents.probes.database import database_probes
from vaultevents.probes.delivery import delivery_probes
from vaultevents.probes.execution import execution_probes
from vaultevents.probes.gateways import gateway_probes
from vaultevents.probes.host import host_probes
from vaultevents.probes.probe import Probe, run_probes
from vaultevents.probes.shared import Shared
from vaultevents.wiring.sources import AUDIT_OFF, guarantee_of, switched_off


async def check_all(
    settings: Settings,
    advanced: Callable[[int, int], None],
    *,
    network: Network | None = None,
    clock: Callable[[], float] = time.time,
) -> list[Finding]:
    """Run every probe for these settings at the same time and return what they find, by subject.

    `network` is what is known of the network beforehand; by default that of the settings. `clock` gives the time in s,
    by which the age of blocks is judged.
    """
    network = network or network_named(settings.network, settings.chain_id)
    async with Shared(settings, network, clock) as shared:
        probes = [
            *database_probes(shared),
            *execution_probes(shared),
            *(contract_probes(shared) if settings.execution.urls else ()),
            *beacon_probes(shared),
            *gateway_probes(shared),
            *delivery_probes(shared),
            *host_probes(settings),
            *(Probe(setting, partial(_unusable, setting, error)) for setting, error in shared.unusable.items()),
            Probe("trust", partial(_choices, settings)),
        ]
        return await run_probes(probes, advanced)


async def _unusable(setting: str, error: VaulteventsError) -> AsyncIterator[Finding]:
    yield failed(setting, str(error), f"Correct {setting} in the configuration")


async def _choices(settings: Settings) -> AsyncIterator[Finding]:
    """State what the settings guarantee, and what is off."""
    yield passed("trust", guarantee_of(settings))
    if not settings.execution.audit_blocks_per_s:
        yield passed("off", AUDIT_OFF)
    for setting, never in switched_off(settings).items():
        yield passed("off", f"{setting} is empty, so {', '.join(never)} will never come")
    if settings.api.serve == "off":
        yield passed("off", 'api.serve is "off", so this process answers no customer')
    if settings.operator.webhook_url is None:
        yield passed("off", "operator.webhook_url is empty, so notices for the operator are only in the log")
