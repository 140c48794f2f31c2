"""Probes of deliveries: the certificate authority, the forward proxy, the resolver, the operator's webhook."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from functools import partial
from urllib.parse import urlsplit

from vaultevents.config import Settings
from vaultevents.core.errors import VaulteventsError
from vaultevents.core.findings import Finding, failed, passed, warned
from vaultevents.core.proxies import Proxy
from vaultevents.egress import is_address
from vaultevents.probes.probe import Probe
from vaultevents.probes.shared import Shared
from vaultevents.resolver import SystemLookup
from vaultevents.store.inspection import webhooks_by_name
from vaultevents.wiring.delivery import check_authority, operator_webhook, proxy, reach_proxy, reach_receiver


def delivery_probes(shared: Shared) -> list[Probe]:
    """Return the probes of deliveries and notices."""
    settings, probes = shared.settings, list[Probe]()
    if settings.delivery.ca_file is not None:
        probes.append(Probe("delivery.ca_file", partial(_authority, settings)))
    chosen = proxy(settings)
    if chosen is not None:
        probes.append(
            Probe(
                "delivery.proxy_url",
                partial(_proxy, chosen),
                advice="Start the proxy, or correct delivery.proxy_url: nothing is delivered without it",
            )
        )
    else:
        probes.append(Probe("resolver", partial(_resolver, shared)))
    if settings.operator.webhook_url is not None:
        probes.append(Probe("operator webhook", partial(_operator_webhook, settings)))
    return probes


async def _authority(settings: Settings) -> AsyncIterator[Finding]:
    check_authority(settings)
    yield passed("delivery.ca_file", f"{settings.delivery.ca_file}")


async def _proxy(chosen: Proxy) -> AsyncIterator[Finding]:
    await reach_proxy(chosen)
    yield passed("delivery.proxy_url", f"deliveries go through {chosen.name}, which can be reached")


async def _resolver(shared: Shared) -> AsyncIterator[Finding]:
    lookup = SystemLookup()
    try:
        works = await lookup.answers()
    finally:
        await lookup.close()
    if works:
        yield passed("resolver", "the resolver of this host answers")
    elif await _needs_names(shared):
        yield failed(
            "resolver",
            "the resolver of this host does not answer, so receivers cannot be found",
            "Correct its name servers (/etc/resolv.conf)",
        )
    else:
        yield warned(
            "resolver",
            "the resolver of this host does not answer; no webhook that is on needs it yet",
            "Correct its name servers (/etc/resolv.conf)",
        )


async def _needs_names(shared: Shared) -> bool:
    url = shared.settings.operator.webhook_url
    if url is not None and not is_address(urlsplit(url.get_secret_value()).hostname or ""):
        return True
    try:
        return await webhooks_by_name(await shared.database())
    except VaulteventsError:
        return False


async def _operator_webhook(settings: Settings) -> AsyncIterator[Finding]:
    subject, found = "operator webhook", operator_webhook(settings)
    assert found is not None
    try:
        await reach_receiver(settings, found[0])
    except ssl.SSLError as error:
        yield failed(
            subject,
            f"its certificate is not accepted ({error.reason or error})",
            "Renew it, or name its authority in delivery.ca_file",
        )
    except TimeoutError:
        yield failed(subject, "it does not answer in time", "See that the receiver runs")
    except (OSError, VaulteventsError) as error:
        yield failed(
            subject, f"it cannot be reached ({error})", "See that the receiver runs, or correct operator.webhook_url"
        )
    else:
        yield passed(subject, "it can be reached, and the secret that signs notices can be read")
