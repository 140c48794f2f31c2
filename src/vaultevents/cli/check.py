"""check: whether everything that is configured answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import typer
from pydantic import SecretStr

from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.chain.execution.head_subscription import NewHeads
from vaultevents.chain.upstream.redaction import node_name
from vaultevents.cli.console import complete, put_json, say
from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.settings import settings_of
from vaultevents.config import Settings
from vaultevents.core.errors import ConfigError, LocalFault, SourceUnavailable, VaulteventsError
from vaultevents.core.proxies import Proxy
from vaultevents.core.units import Address, checksum
from vaultevents.store import status as overview
from vaultevents.store.pool import Database
from vaultevents.wiring.database import open_store, service_clock
from vaultevents.wiring.delivery import check_authority, proxy, reach_proxy
from vaultevents.wiring.sources import (
    AUDIT_OFF,
    guarantee_of,
    locator_problem,
    open_beacon,
    open_chain,
    socket_heads,
    switched_off,
    with_node_alone,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `check` tried: what it is in `detail`, or what to do about it."""

    what: str
    ok: bool
    detail: str


def check(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """See whether everything that is configured answers.

    The database, each node, the contracts: are they there, and the right ones? Exit code 1 when something is wrong.
    """
    settings = settings_of(config)
    findings = complete(_check(settings))
    ok = all(finding.ok for finding in findings)
    if as_json:
        put_json({"ok": ok, "checks": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            say(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}: {finding.detail}")
    if not ok:
        raise typer.Exit(1)


async def _check(settings: Settings) -> list[Finding]:
    findings: list[Finding] = []
    if settings.delivery.ca_file is not None:
        findings.append(_authority(settings))
    if (chosen := proxy(settings)) is not None:
        findings.append(await _proxy(chosen))
    try:
        async with open_store(settings) as store:
            facts = await overview.read(store.database)
            findings.append(Finding("database", True, f"PostgreSQL {facts.server_version}, {facts.events} events"))
            nodes = [await _node(settings, url, store.database) for url in settings.execution.urls or (None,)]
            findings += nodes
            findings += [await _socket(heads, settings.chain_id) for heads in socket_heads(settings)]
            if any(node.ok for node in nodes):
                findings += await _contracts(settings, store.database)
                findings += [await _beacon_node(settings, url, store.database) for url in settings.beacon.urls]
            findings.append(Finding("trust", True, guarantee_of(settings)))
            if not settings.execution.audit_blocks_per_s:
                findings.append(Finding("off", True, AUDIT_OFF))
            findings += [
                Finding("off", True, f"{setting} is empty, so {', '.join(never)} will never come")
                for setting, never in switched_off(settings).items()
            ]
    except VaulteventsError as problem:
        findings.append(Finding("database", False, str(problem)))
    return findings


def _authority(settings: Settings) -> Finding:
    try:
        check_authority(settings)
    except ConfigError as problem:
        return Finding("delivery.ca_file", False, str(problem))
    return Finding("delivery.ca_file", True, f"{settings.delivery.ca_file}")


async def _proxy(chosen: Proxy) -> Finding:
    try:
        await reach_proxy(chosen)
    except LocalFault as fault:
        return Finding("delivery.proxy_url", False, fault.problem)
    return Finding("delivery.proxy_url", True, f"deliveries go through {chosen.name}, which can be reached")


async def _node(settings: Settings, url: SecretStr | None, database: Database) -> Finding:
    what = "node"
    try:
        if url is not None:
            what = f"node {node_name(url.get_secret_value())}"
        async with open_chain(with_node_alone(settings, url), database) as chain:
            head = (await chain.head()).number
        return Finding(what, True, f"chain {settings.chain_id}, its {settings.execution.head} block is {head}")
    except SourceUnavailable as problem:
        return Finding(what, False, problem.problem)
    except VaulteventsError as problem:
        return Finding(what, False, str(problem))


async def _socket(heads: NewHeads, chain_id: int) -> Finding:
    what = f"websocket {heads.name}"
    try:
        shown = await heads.chain_id()
    except SourceUnavailable as problem:
        return Finding(what, False, problem.problem)
    if shown != chain_id:
        return Finding(what, False, f"it is of chain {shown}: correct execution.websocket_urls")
    return Finding(what, True, f"chain {shown}, announces new heads")


async def _beacon_node(settings: Settings, url: SecretStr, database: Database) -> Finding:
    alone = settings.model_copy(update={"beacon": settings.beacon.model_copy(update={"urls": (url,)})})
    what = "beacon node"
    try:
        what = f"beacon node {node_name(url.get_secret_value())}"
        async with open_beacon(alone, database, await service_clock(database)) as (beacon, _):
            finality = await beacon.finality()
        return Finding(what, True, f"its finalized epoch is {finality.epoch}")
    except SourceUnavailable as problem:
        return Finding(what, False, problem.problem)
    except VaulteventsError as problem:
        return Finding(what, False, str(problem))


async def _contracts(settings: Settings, database: Database) -> list[Finding]:
    try:
        async with open_chain(settings, database) as chain:
            findings = [await _contract(chain, *named) for named in _named_contracts(settings)]
            if problem := await locator_problem(settings, chain):
                findings.append(Finding("contracts.lazy_oracles", False, problem))
            return findings
    except VaulteventsError as error:
        return [Finding("contracts", False, str(error))]


def _named_contracts(settings: Settings) -> list[tuple[str, Address]]:
    contracts = settings.contracts
    named = [
        ("lido_locator", contracts.lido_locator),
        *(("lazy_oracles", address) for address in contracts.lazy_oracles),
        ("wrapper_factory", contracts.wrapper_factory),
        ("core_withdrawal_queue", contracts.core_withdrawal_queue),
    ]
    return [(f"contracts.{name}", address) for name, address in named if address is not None]


async def _contract(chain: ExecutionChain, name: str, address: Address) -> Finding:
    if await chain.has_code(address):
        return Finding(name, True, checksum(address))
    return Finding(name, False, f"{checksum(address)} has no code on this chain: correct the address")
