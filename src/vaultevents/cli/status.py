"""status: how far the streams are, and what is still to be delivered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_table, say
from vaultevents.config import Settings
from vaultevents.core.errors import VaulteventsError
from vaultevents.store import status as overview
from vaultevents.wiring.database import open_store
from vaultevents.wiring.sources import guarantee_of, open_chain, switched_off

HEAD_WITHIN_S = 5.0
FOLLOWS_WITHIN = 640
"""Blocks: what the audit waits for, what becomes final at once, and what a head before finality has ahead of it."""


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
    if settings.beacon.urls and facts.validators_from == "deposits":
        why = facts.validator_list_refused or f'beacon.validators is "{settings.beacon.validators}"'
        read = "none read yet" if facts.deposits_through is None else f"read up to block {facts.deposits_through}"
        say(f"validators  found by their deposits ({read}), not in the list of all: {why}")
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
        say(f"notices     {facts.notices_waiting} wait to be sent: see 'Notices' in docs/operations.md")


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
    text = f"{audit.stream} at {audit.node}: {read} asked for again"
    if not blocks_per_s:
        return f"{text}, {left} blocks were not: it is off (execution.audit_blocks_per_s)"
    if begun and left <= FOLLOWS_WITHIN:
        return f"{text}: whole, and follows the finalized block"
    return f"{text}, {left} are left (at most {blocks_per_s:g} a second: {left / blocks_per_s / 3600:.1f} h)"


def _behind(cursor: overview.CursorFacts, head: int | None) -> int | None:
    end = cursor.stop if cursor.stop is not None else head if cursor.stream in ("logs", "reports") else None
    return None if end is None else max(0, end - cursor.position)
