"""check and status: does everything answer, and how far is it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import typer
from pydantic import SecretStr

from vaultevents.chain.execution import ExecutionChain
from vaultevents.chain.newheads import NewHeads
from vaultevents.chain.urls import node_name
from vaultevents.cli.console import ConfigOption, JsonOption, complete, put_json, put_table, say, settings_of
from vaultevents.config import Settings
from vaultevents.core.errors import ConfigError, LocalFault, SourceUnavailable, VaulteventsError
from vaultevents.core.proxies import Proxy
from vaultevents.core.units import Address, checksum
from vaultevents.opening.database import open_store, service_clock
from vaultevents.opening.delivery import check_authority, proxy, reach_proxy
from vaultevents.opening.sources import (
    AUDIT_OFF,
    guarantee_of,
    locator_problem,
    open_beacon,
    open_chain,
    socket_heads,
    switched_off,
    with_node_alone,
)
from vaultevents.store import status as overview
from vaultevents.store.pool import Database

HEAD_WITHIN_S = 5.0
FOLLOWS_WITHIN = 128
"""Blocks: what becomes final at once, twice over, and what a head before finality has ahead of it."""


def add_to(app: typer.Typer) -> None:
    app.command("check")(check)
    app.command("status")(status)


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
    ok = all(one.ok for one in findings)
    if as_json:
        put_json({"ok": ok, "checks": [asdict(one) for one in findings]})
    else:
        for one in findings:
            say(f"{'ok  ' if one.ok else 'FAIL'}  {one.what}: {one.detail}")
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


def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show how far the streams are and what is still to be delivered."""
    settings = settings_of(config)
    facts, head = complete(_status(settings))
    number, problem = (head, None) if isinstance(head, int) else (None, head)
    if as_json:
        heads = {"head": number, "head_problem": problem, "guarantee": guarantee_of(settings)}
        put_json({"network": settings.network, **facts.as_dict(), **heads})
        return
    say(f"network     {settings.network} (chain {settings.chain_id})")
    say(f"head        {f'unknown: {problem}' if number is None else f'block {number} ({settings.execution.head})'}")
    say(f"trust       {guarantee_of(settings)}")
    say(f"registered  {facts.accounts} accounts, {facts.vaults} vaults, {facts.webhooks} webhooks")
    say(f"events      {facts.events}")
    say(f"deliveries  {', '.join(f'{n} {state}' for state, n in sorted(facts.deliveries.items())) or 'none'}")
    if facts.oldest_pending_s is not None:
        say(f"            the oldest one that is not delivered yet has waited {facts.oldest_pending_s:.0f} s")
    if facts.flag_changes:
        say(
            f"            those of {facts.flag_changes} webhooks are being parked, resumed or cancelled, "
            f"for {facts.oldest_flag_change_s or 0.0:.0f} s now"
        )
    put_table(
        ("stream", "kind", "position", "until", "behind", "moved"),
        [
            (c.stream, c.kind, c.position, c.stop, _behind(c, number), c.updated_at.isoformat(timespec="seconds"))
            for c in facts.cursors
        ],
        "no stream has been read yet: start 'vaultevents run'",
    )
    if facts.nodes:
        put_table(
            ("node", "of", "circuit", "since", "blocks at once", "requests/s"),
            [
                (
                    n.name,
                    n.upstream,
                    n.state,
                    n.since.isoformat(timespec="seconds"),
                    n.log_range,
                    None if n.requests_per_s is None else f"{n.requests_per_s:.1f}",
                )
                for n in facts.nodes
            ],
            "",
        )
    for n in facts.nodes:
        if n.problem is not None:
            say(f"node        {n.name} since {n.since.isoformat(timespec='seconds')}: {n.problem}")
    for c in facts.audits:
        say(f"audit       {audit_line(c, facts.cursors, settings.execution.audit_blocks_per_s)}")
    for c in (*facts.cursors, *facts.audits):
        if c.problem is not None:
            since = "" if c.problem_since is None else f" since {c.problem_since.isoformat(timespec='seconds')}"
            of_node = "" if c.node is None else f" of {c.node}"
            say(f"stalled     {c.stream} ({c.kind}{of_node}){since}: {c.problem}")
        if c.unverified_from is not None:
            say(f"UPGRADE     {c.stream} ({c.kind}): the form of blocks from {c.unverified_from} on is not known here")
    if facts.discovery_problem is not None:
        say(f"stalled     validators, withdrawals (not begun yet): {facts.discovery_problem}")
    if facts.rewound_at is not None:
        at = facts.rewound_at.isoformat(timespec="seconds")
        say(f"rewinds     {facts.rewinds}, the last one at {at}; {facts.orphaned_events} events are orphaned now")
    for orphan in facts.orphaned:
        sent = f"delivered to {orphan.delivered} webhooks"
        since = orphan.orphaned_at.isoformat(timespec="seconds")
        say(f"orphaned    {orphan.event_id} ({orphan.account_id}) since {since}, {sent}")
    for setting, never in switched_off(settings).items():
        say(f"off         {', '.join(never)}: {setting} is empty")
    if facts.pending_reports:
        say(f"reports     {facts.pending_reports} wait for their files: see 'vaultevents report show'")
    if facts.quarantine_open:
        say(f"quarantine  {facts.quarantine_open} logs cannot be decoded: see 'vaultevents quarantine list'")
    if facts.notices_waiting:
        say(f"notices     {facts.notices_waiting} wait to be told: see 'Notices' in docs/operations.md")


async def _status(settings: Settings) -> tuple[overview.Overview, int | str]:
    async with open_store(settings) as store:
        facts = await overview.read(store.database)
        try:
            async with asyncio.timeout(HEAD_WITHIN_S), open_chain(settings, store.database) as chain:
                return facts, (await chain.head()).number
        except TimeoutError:
            return facts, f"no node has answered within {HEAD_WITHIN_S:g} s"
        except VaulteventsError as problem:
            return facts, str(problem)


def audit_line(audit: overview.CursorFacts, cursors: Iterable[overview.CursorFacts], blocks_per_s: float) -> str:
    """How far what was read is read again."""
    live = next((c.position for c in cursors if (c.stream, c.kind) == (audit.stream, "live")), audit.position)
    left = live - audit.position
    begun = audit.position >= audit.first
    read = f"blocks {audit.first} to {audit.position} were" if begun else "nothing was"
    told = f"{audit.stream} at {audit.node}: {read} asked for again"
    if not blocks_per_s:
        return f"{told}, {left} blocks were not: it is off (execution.audit_blocks_per_s)"
    if begun and left <= FOLLOWS_WITHIN:
        return f"{told}: whole, and follows the finalized block"
    return f"{told}, {left} are left (at most {blocks_per_s:g} a second: {left / blocks_per_s / 3600:.1f} h)"


def _behind(cursor: overview.CursorFacts, head: int | None) -> int | None:
    end = cursor.stop if cursor.stop is not None else head if cursor.stream in ("logs", "reports") else None
    return None if end is None else max(0, end - cursor.position)
