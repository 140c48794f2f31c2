"""Probes of the IPFS gateways: each fetches the file of the newest report by itself, and the file is verified."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from vaultevents.chain.ipfs import IpfsClient
from vaultevents.chain.upstream.redaction import node_name
from vaultevents.core.findings import Finding, failed, passed, warned
from vaultevents.core.reports import ReportUndecodable
from vaultevents.probes.execution import duration
from vaultevents.probes.probe import Probe
from vaultevents.probes.shared import Shared
from vaultevents.watch.reports import read_published

ADVICE: Final = "Name another gateway in reports.gateways"
REACHED_WITHIN_S: Final = 5.0
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def gateway_probes(shared: Shared) -> list[Probe]:
    """Return the probe of each gateway."""
    return [
        Probe(subject, partial(_gateway, shared, subject, url), within_s=90.0, advice=ADVICE)
        for url in (shared.settings.reports.gateways if shared.files is not None else ())
        for subject in [f"gateway {node_name(_plain(url))}"]
    ]


def _plain(url: SecretStr) -> str:
    return url.get_secret_value().removeprefix("kubo+")


async def _gateway(shared: Shared, subject: str, url: SecretStr) -> AsyncIterator[Finding]:
    newest = await shared.newest_report()
    if newest.log is None:
        try:
            await _reach(url)
        except OSError as error:
            yield failed(subject, f"cannot be reached ({error or 'no answer'})", ADVICE)
            return
        yield warned(subject, f"its port answers; not tried with a file, because no report is known ({newest.source})")
        return
    cid = newest.log.cid
    assert shared.files is not None
    try:
        report = await read_published(_Gateway(shared.files, node_name(_plain(url))), newest.log)
    except ReportUndecodable as error:
        yield warned(subject, f"it gives the file {cid} as published, which cannot be read: {error}")
        return
    age = duration(shared.clock() - newest.log.timestamp)
    yield passed(
        subject, f"it gives the file {cid} of the newest report ({len(report.leaves)} vaults, {age} old), verified"
    )


@dataclass(frozen=True, slots=True)
class _Gateway:
    """The files of one gateway alone."""

    files: IpfsClient
    name: str

    async def fetch(self, cid: str, check: Callable[[bytes], None]) -> bytes:
        """Fetch a file from this gateway. Raises `SourceUnavailable`."""
        return await self.files.fetch(cid, check, only=self.name)


async def _reach(url: SecretStr) -> None:
    """Connect to the gateway and disconnect. Raises `OSError`."""
    parts = urlsplit(_plain(url))
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    async with asyncio.timeout(REACHED_WITHIN_S):
        _, writer = await asyncio.open_connection(parts.hostname, port)
        writer.close()
