"""Probes of the contracts that the settings name: they have code, and the protocol publishes through them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from vaultevents.core.findings import Finding, failed, passed
from vaultevents.core.units import Address, checksum
from vaultevents.probes.probe import Probe
from vaultevents.probes.shared import Shared
from vaultevents.wiring.sources import locator_problem

ADVICE: Final = "See that an execution node in execution.urls answers"


def contract_probes(shared: Shared) -> list[Probe]:
    """Return a probe for each contract, and one that asks the locator for the present oracle."""
    contracts = shared.settings.contracts
    named = [
        ("lido_locator", contracts.lido_locator),
        *(("lazy_oracles", address) for address in contracts.lazy_oracles),
        ("wrapper_factory", contracts.wrapper_factory),
        ("core_withdrawal_queue", contracts.core_withdrawal_queue),
    ]
    probes = [
        Probe(f"contracts.{name}", partial(_code, shared, f"contracts.{name}", address), advice=ADVICE)
        for name, address in named
        if address is not None
    ]
    if contracts.lido_locator is not None and contracts.lazy_oracles:
        probes.append(Probe("present oracle", partial(_present_oracle, shared), advice=ADVICE))
    return probes


async def _code(shared: Shared, subject: str, address: Address) -> AsyncIterator[Finding]:
    if await (await shared.chain()).has_code(address):
        yield passed(subject, f"{checksum(address)} is a contract")
    else:
        yield failed(subject, f"{checksum(address)} has no code on this chain", "Correct the address")


async def _present_oracle(shared: Shared) -> AsyncIterator[Finding]:
    problem = await locator_problem(shared.settings, await shared.chain())
    if problem is None:
        yield passed("present oracle", "the LidoLocator names one of contracts.lazy_oracles")
    else:
        yield failed("present oracle", problem, "Correct contracts.lido_locator and contracts.lazy_oracles")
