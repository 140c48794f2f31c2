"""Probes of this host: disk space, the ports of the API and the metrics, the certificate of the API."""

from __future__ import annotations

import asyncio
import http.client
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509

from vaultevents.api.server import ServerOptions, bind
from vaultevents.config import Settings
from vaultevents.core.errors import ConfigError
from vaultevents.core.findings import Finding, failed, passed, warned
from vaultevents.daemon import console_options, metrics_options, server_options
from vaultevents.probes.probe import Probe

MIB: Final = 2**20
EMBEDDED_FAILS_BYTES: Final = 512 * MIB
FAILS_BYTES: Final = 64 * MIB
"""Without the embedded database only files of reports are kept: 2.5 MB a day on mainnet."""
WARNS_BYTES: Final = 2048 * MIB
EXPIRES_SOON: Final = timedelta(days=14)
ASKED_WITHIN_S: Final = 3.0


def host_probes(settings: Settings) -> list[Probe]:
    """Return the probes of this host."""
    probes = [Probe("disk", partial(_disk, settings))]
    if settings.api.serve == "on":
        probes.append(Probe("api", partial(_api, settings)))
    if settings.console.serve == "on":
        probes.append(Probe("console", partial(_console, settings)))
    if settings.metrics.serve == "on":
        probes.append(Probe("metrics", partial(_metrics, settings)))
    return probes


async def _disk(settings: Settings) -> AsyncIterator[Finding]:
    directory = settings.directory
    place = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(place).free
    least = EMBEDDED_FAILS_BYTES if settings.database_url is None else FAILS_BYTES
    what = "the embedded database" if settings.database_url is None else "the files of reports"
    text = f"{free / MIB:,.0f} MiB are free at {place} for {what}"
    if not os.access(place, os.W_OK | os.X_OK):
        yield failed("disk", f"{place} cannot be written to", "Choose another data_dir, or give this user the right")
    elif free < least:
        yield failed("disk", text, f"Free at least {least / MIB:,.0f} MiB there, or choose another data_dir")
    elif free < WARNS_BYTES and settings.database_url is None:
        yield warned("disk", text, "Give it more space before it is full")
    else:
        yield passed("disk", text)


async def _api(settings: Settings) -> AsyncIterator[Finding]:
    options = server_options(settings, settings.api.max_connections)
    yield await _listener("api", options, "/v1/openapi.json", b"vaultevents API")
    if options.certificate_file is not None and options.key_file is not None:
        yield await asyncio.to_thread(_certificate, "api", options.certificate_file, options.key_file)
    if (problem := _exposure(settings)) is not None:
        yield problem


async def _metrics(settings: Settings) -> AsyncIterator[Finding]:
    found = await _listener("metrics", metrics_options(settings), "/metrics", b"vaultevents_")
    if found.result == "failed" and not settings.metrics.model_fields_set:
        found = warned("metrics", f"{found.detail}. Without that, `run` serves no metrics", found.advice)
    yield found


async def _console(settings: Settings) -> AsyncIterator[Finding]:
    yield await _listener("console", console_options(settings), "/login", b"vaultevents console")
    console = settings.console
    if console.certificate_file is not None and console.key_file is not None:
        yield await asyncio.to_thread(_certificate, "console", console.certificate_file, console.key_file)


async def _listener(subject: str, options: ServerOptions, path: str, sign: bytes) -> Finding:
    """Bind the port for a moment; a port that is taken is fine where `path` there has the sign of this service."""
    where = f"{options.host} port {options.port}"
    try:
        bind(options).close()
    except ConfigError as error:
        if await asyncio.to_thread(_is_ours, options, path, sign):
            return passed(subject, f"{where} is served by a vaultevents that runs")
        return failed(subject, str(error))
    return passed(subject, f"{where} is free" if options.port else f"{options.host}, any free port")


def _is_ours(options: ServerOptions, path: str, sign: bytes) -> bool:
    """Test whether what listens there is a vaultevents. Nothing else is taken from it, so TLS is not verified."""
    host = "localhost" if options.host in ("", "0.0.0.0", "::") else options.host  # noqa: S104
    connection = http.client.HTTPConnection(host, options.port, timeout=ASKED_WITHIN_S)
    if options.certificate_file is not None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, options.port, timeout=ASKED_WITHIN_S, context=context)
    try:
        connection.request("GET", path)
        return sign in connection.getresponse().read(4 * MIB)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _certificate(table: str, certificate: Path, key: Path) -> Finding:
    subject = f"{table} certificate"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        leaf = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:  # SSLError is an OSError
        why = getattr(error, "strerror", None) or str(error)
        return failed(
            subject,
            f"{table}.certificate_file and {table}.key_file cannot be used ({why})",
            "Name a PEM certificate chain and its key",
        )
    left = leaf.not_valid_after_utc - datetime.now(UTC)
    text = f"{certificate} is valid until {leaf.not_valid_after_utc:%Y-%m-%d}"
    if left < timedelta(0):
        return failed(subject, f"{certificate} expired on {leaf.not_valid_after_utc:%Y-%m-%d}", "Renew it")
    return warned(subject, text, "Renew it soon") if left < EXPIRES_SOON else passed(subject, text)


def _exposure(settings: Settings) -> Finding | None:
    """Return a warning where requests may pass unprotected, or every client would count as one."""
    api = settings.api
    if api.certificate_file is not None:
        return None
    behind_tls = any(origin.startswith("https://") for origin in api.public_origins)
    if behind_tls and not api.trusted_proxies:
        return warned(
            "api proxy",
            "api.public_origins is https without a certificate here, so a proxy is in front, and api.trusted_proxies "
            "is empty: all clients count as one address",
            "Name the address of the proxy in api.trusted_proxies",
        )
    if not _is_loopback(api.host) and not api.trusted_proxies:
        return warned(
            "api proxy",
            f"the API speaks plain HTTP on {api.host}, so API keys can be read on the way",
            "Set api.certificate_file and api.key_file, or listen on loopback behind a TLS proxy",
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
