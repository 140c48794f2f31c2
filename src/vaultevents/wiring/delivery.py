"""What the settings say of deliveries: which receivers, whose certificates, and the operator's own webhook."""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

from vaultevents.config import Settings
from vaultevents.core.errors import ConfigError, InputError, LocalFault
from vaultevents.core.proxies import Proxy, parse_proxy
from vaultevents.core.sealing import Secret
from vaultevents.core.signing import check_secret
from vaultevents.core.webhooks import UrlRules, check_url
from vaultevents.egress import Guard, tls_context
from vaultevents.proxy import dial_proxy, open_tunnel
from vaultevents.resolver import SystemLookup

PROXY_WITHIN_S: Final = 5.0


def check_authority(settings: Settings) -> None:
    """Raises `ConfigError` when `delivery.ca_file` is not what receivers' certificates can be verified with."""
    path = settings.delivery.ca_file
    if path is not None:
        try:
            ssl.create_default_context(cafile=path)
        except OSError as error:  # SSLError is one
            why = "it holds no PEM certificate" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(
                f"delivery.ca_file {path} cannot be used ({why}): name the certificate of the receivers' authority"
            ) from None


def url_rules(settings: Settings) -> UrlRules:
    """Which URLs webhooks may have, by the operator's settings (rule D10)."""
    return UrlRules(settings.delivery.ports, settings.delivery.allow, settings.delivery.deny)


def proxy(settings: Settings) -> Proxy | None:
    """Return the forward proxy that deliveries go through, if one is set."""
    url = settings.delivery.proxy_url
    return None if url is None else parse_proxy(url.get_secret_value())


async def reach_proxy(chosen: Proxy) -> None:
    """Connect to the proxy and disconnect; raises `LocalFault`."""
    lookup = SystemLookup()
    try:
        async with asyncio.timeout(PROXY_WITHIN_S):
            (await dial_proxy(chosen, lookup)).close()
    except TimeoutError:
        raise LocalFault("proxy_down", f"the proxy {chosen.name} does not answer") from None
    finally:
        await lookup.close()


async def reach_receiver(settings: Settings, url: str) -> None:
    """Connect to the host of a URL as deliveries do, verify its certificate, and disconnect; nothing is posted.

    Raises `OSError` (an `ssl.SSLError` for its certificate), `TimeoutError`, `EgressRefused`, `ProxyRefused`,
    `LocalFault`.
    """
    guard, chosen = Guard(url_rules(settings)), proxy(settings)
    target = guard.vet(url)
    host, port, lookup = target.host or "", target.port or 443, SystemLookup()
    try:
        async with asyncio.timeout(settings.delivery.connect_timeout_s):
            if chosen is None:
                dialled = await guard.dial(host, await guard.addresses(host, port), settings.delivery.connect_timeout_s)
            else:
                guard.judge_name(host, port)
                dialled = await dial_proxy(chosen, lookup)
                await open_tunnel(dialled, chosen, host, port)
            _, writer = await asyncio.open_connection(
                sock=dialled, ssl=tls_context(settings.delivery.ca_file), server_hostname=host
            )
            writer.transport.abort()
    finally:
        await lookup.close()
        await guard.close()


def operator_webhook(settings: Settings) -> tuple[str, Secret] | None:
    """Where notices are posted, and the secret that signs them; raises `ConfigError` for one without the other."""
    url, path = settings.operator.webhook_url, settings.operator_secret_file
    if url is None:
        return None
    if settings.operator_secret is None and path is None:
        raise ConfigError(
            "operator.webhook_url needs a secret that signs what is posted there: set VAULTEVENTS_OPERATOR_SECRET or "
            "operator_secret_file to whsec_ and 32 random bytes in base64 ('openssl rand -base64 32')"
        )
    try:
        checked = check_url(url.get_secret_value(), url_rules(settings))
    except InputError as error:
        raise ConfigError(f"operator.webhook_url: {error}") from None
    try:
        if settings.operator_secret is not None:
            return checked, Secret(check_secret(settings.operator_secret.get_secret_value()))
        assert path is not None
        return checked, Secret(check_secret(path.read_text(encoding="ascii")))
    except OSError as error:
        raise ConfigError(f"cannot read operator_secret_file {path} ({error.strerror}): make it readable") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} holds no secret: write whsec_ and 32 random bytes in base64 into it") from None
    except ConfigError as problem:
        raise ConfigError(f"the operator's secret is not usable: {problem}") from None
