"""status: how far the streams are, what is still to be delivered, and whether anything needs an operator."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import (
    SEVERITY_STYLES,
    Fact,
    Rows,
    complete,
    console,
    plain_lines,
    put,
    put_json,
    say,
    stopping,
    styled,
)
from vaultevents.config import Settings
from vaultevents.core.errors import DatabaseUnavailable, VaulteventsError
from vaultevents.core.verdict import Condition, Verdict, conditions, verdict
from vaultevents.store import status as overview
from vaultevents.store import verdict_facts
from vaultevents.store.nodes import NodeFacts
from vaultevents.store.pool import Database
from vaultevents.wiring.database import disks, open_store
from vaultevents.wiring.sources import guarantee_of, open_chain, switched_off

HEAD_WITHIN_S = 5.0
HEAD_EVERY_S: Final = 12.0
WATCH_EVERY_S: Final = 2.0
NOT_HEALTHY: Final = 3
FOLLOWS_WITHIN = 640
"""Blocks: what the audit waits for, what becomes final at once, and what a head before finality has ahead of it."""
BLOCK_STREAMS: Final = ("logs", "reports")
"""Streams whose end is the head of the execution chain."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What `status` shows. `head` is a block number, or why it is not known."""

    facts: overview.Overview
    head: int | str
    found: tuple[Condition, ...]

    @property
    def verdict(self) -> Verdict:
        return verdict(self.found)

    @property
    def number(self) -> int | None:
        return self.head if isinstance(self.head, int) else None


def status(
    config: ConfigOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every 2 seconds until Ctrl-C.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help=f"End with {NOT_HEALTHY} when the service is not healthy.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how far the streams are and what is still to be delivered.

    The first line is the verdict, by the limits of the alerts: healthy, or what needs an operator. With --watch and
    --json it writes one object on a line every 2 seconds.
    """
    if watch and exit_code:
        raise typer.BadParameter("an exit code needs one answer: leave out --watch", param_hint="--exit-code")
    settings = settings_of(config)
    if watch:
        complete(_watch(settings, as_json=as_json))
        return
    found = complete(_once(settings))
    if as_json:
        put_json(_json(settings, found))
    else:
        put(_parts(settings, found))
    if exit_code and not found.verdict.healthy:
        raise typer.Exit(NOT_HEALTHY)


async def _once(settings: Settings) -> Snapshot:
    async with open_store(settings) as store:
        return await _read(settings, store.database, await _head(settings, store.database))


async def _watch(settings: Settings, *, as_json: bool) -> None:
    """Show the status anew until a signal ends it; a database that is away is shown, too."""
    stop, asked_at_s = asyncio.Event(), float("-inf")
    head: int | str = ""
    async with open_store(settings) as store:
        with stopping(stop), _display(settings, as_json=as_json) as show:
            while not stop.is_set():
                if time.monotonic() - asked_at_s >= HEAD_EVERY_S:
                    asked_at_s, head = time.monotonic(), await _head(settings, store.database)
                try:
                    show(await _read(settings, store.database, head))
                except DatabaseUnavailable as problem:
                    show(problem)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), WATCH_EVERY_S)


@contextmanager
def _display(settings: Settings, *, as_json: bool) -> Iterator[Callable[[Snapshot | DatabaseUnavailable], None]]:
    """Show in place on a terminal, one after the other in a pipe."""

    def parts(found: Snapshot | DatabaseUnavailable) -> list[Fact | Rows]:
        if isinstance(found, Snapshot):
            return list(_parts(settings, found))
        return [Fact("verdict", f"{verdict(conditions(None)).sentence} {found}", SEVERITY_STYLES["critical"])]

    def put_next(found: Snapshot | DatabaseUnavailable) -> None:
        if as_json:
            put_json(_json(settings, found))
            return
        for part in parts(found):
            for line in plain_lines(part):
                say(line)
        say("")

    if as_json or not sys.stdout.isatty():
        yield put_next
        return
    from rich.console import Group
    from rich.live import Live

    screen = console(live=True)
    with Live(console=screen, auto_refresh=False) as live:
        yield lambda found: live.update(Group(*(styled(part, screen.width) for part in parts(found))), refresh=True)


async def _read(settings: Settings, database: Database, head: int | str) -> Snapshot:
    heads = dict.fromkeys(BLOCK_STREAMS, head) if isinstance(head, int) else {}
    known = await verdict_facts.read(database, disks=disks(settings), heads=heads)
    return Snapshot(await overview.read(database), head, conditions(known))


async def _head(settings: Settings, database: Database) -> int | str:
    try:
        async with asyncio.timeout(HEAD_WITHIN_S), open_chain(settings, database) as chain:
            return (await chain.head()).number
    except TimeoutError:
        return f"no node has answered within {HEAD_WITHIN_S:g} s"
    except VaulteventsError as problem:
        return str(problem)


def _json(settings: Settings, found: Snapshot | DatabaseUnavailable) -> dict[str, Any]:
    if isinstance(found, DatabaseUnavailable):
        away = conditions(None)
        return {"network": settings.network, "verdict": _verdict_json(away), "database_problem": str(found)}
    problem = found.head if isinstance(found.head, str) else None
    return {
        "network": settings.network,
        "verdict": _verdict_json(found.found),
        **found.facts.as_dict(),
        "head": found.number,
        "head_problem": problem,
        "guarantee": guarantee_of(settings),
    }


def _verdict_json(found: Iterable[Condition]) -> dict[str, Any]:
    known = tuple(found)
    return {**asdict(verdict(known)), "conditions": [asdict(condition) for condition in known]}


def _parts(settings: Settings, found: Snapshot) -> Iterator[Fact | Rows]:
    """Yield what is shown, the verdict first."""
    facts, number, known = found.facts, found.number, found.verdict
    yield Fact("verdict", known.sentence, SEVERITY_STYLES[known.severity])
    for condition in found.found:
        yield Fact("", f"{condition.name}: {condition.sentence}", SEVERITY_STYLES[condition.severity])
    yield Fact("network", f"{settings.network} (chain {settings.chain_id})")
    yield Fact("head", f"unknown: {found.head}" if number is None else f"block {number} ({settings.execution.head})")
    yield Fact("trust", guarantee_of(settings))
    yield Fact("registered", f"{facts.accounts} accounts, {facts.vaults} vaults, {facts.webhooks} webhooks")
    yield Fact("events", str(facts.events))
    yield Fact("deliveries", ", ".join(f"{n} {state}" for state, n in sorted(facts.deliveries.items())) or "none")
    if facts.oldest_pending_s is not None:
        yield Fact("", f"the oldest one that is not delivered yet has waited {facts.oldest_pending_s:.0f} s")
    if facts.flag_changes:
        yield Fact(
            "",
            f"those of {facts.flag_changes} webhooks are being parked, resumed or cancelled, "
            f"for {facts.oldest_flag_change_s or 0.0:.0f} s now",
        )
    yield Rows.of(
        ("stream", "kind", "position", "until", "behind", "moved"),
        [(c.stream, c.kind, c.position, c.stop, _behind(c, number), _at(c.updated_at)) for c in facts.cursors],
        "no stream has been read yet: start 'vaultevents run'",
    )
    if facts.nodes:
        yield Rows.of(
            ("node", "of", "circuit", "since", "behind", "p50/p95", "range", "requests/s"),
            [
                (
                    n.name,
                    n.upstream,
                    n.state,
                    _at(n.since),
                    n.behind,
                    _latency(n),
                    n.log_range,
                    None if n.requests_per_s is None else f"{n.requests_per_s:.1f}",
                )
                for n in facts.nodes
            ],
            "",
        )
    yield from _problems(settings, facts)
    yield from _orphans(facts)
    for setting, never in switched_off(settings).items():
        yield Fact("off", f"{', '.join(never)}: {setting} is empty")
    if facts.pending_reports:
        yield Fact("reports", f"{facts.pending_reports} wait for their files: see 'vaultevents report show'")
    if facts.quarantine_open:
        logs = f"{facts.quarantine_open} logs cannot be decoded: see 'vaultevents quarantine list'"
        yield Fact("quarantine", logs, "red")
    if facts.notices_waiting:
        yield Fact("notices", f"{facts.notices_waiting} wait to be sent: see 'Notices' in docs/operations.md")


def _problems(settings: Settings, facts: overview.Overview) -> Iterator[Fact]:
    """Yield what holds up streams, and how far the audit is."""
    for n in facts.nodes:
        if n.problem is not None:
            yield Fact("node", f"{n.name} since {_at(n.since)}: {n.problem}", "yellow")
    for c in facts.audits:
        yield Fact("audit", audit_line(c, facts.cursors, settings.execution.audit_blocks_per_s))
    for c in (*facts.cursors, *facts.audits):
        if c.problem is not None:
            since = "" if c.problem_since is None else f" since {_at(c.problem_since)}"
            of_node = "" if c.node is None else f" of {c.node}"
            yield Fact("stalled", f"{c.stream} ({c.kind}{of_node}){since}: {c.problem}", "red")
        if c.unverified_from is not None:
            unknown = f"{c.stream} ({c.kind}): the form of blocks from {c.unverified_from} on is not known here"
            yield Fact("UPGRADE", unknown, "bold red")
    if facts.discovery_problem is not None:
        yield Fact("stalled", f"validators, withdrawals (not begun yet): {facts.discovery_problem}", "red")
    if settings.beacon.urls and facts.validators_from == "deposits":
        why = facts.validator_list_refused or f'beacon.validators is "{settings.beacon.validators}"'
        read = "none read yet" if facts.deposits_through is None else f"read up to block {facts.deposits_through}"
        yield Fact("validators", f"found by their deposits ({read}), not in the list of all: {why}")


def _orphans(facts: overview.Overview) -> Iterator[Fact]:
    if facts.rewound_at is not None:
        at = _at(facts.rewound_at)
        orphaned = f"{facts.orphaned_events} events are orphaned now"
        yield Fact("rewinds", f"{facts.rewinds}, the last one at {at}; {orphaned}")
    for orphan in facts.orphaned:
        sent = f"delivered to {orphan.delivered} webhooks"
        yield Fact("orphaned", f"{orphan.event_id} ({orphan.account_id}) since {_at(orphan.orphaned_at)}, {sent}")


def _latency(node: NodeFacts) -> str | None:
    if node.latency_p50_s is None or node.latency_p95_s is None:
        return None
    return f"{node.latency_p50_s * 1000:.0f}/{node.latency_p95_s * 1000:.0f} ms"


def _at(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


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
    end = cursor.stop if cursor.stop is not None else head if cursor.stream in BLOCK_STREAMS else None
    return None if end is None else max(0, end - cursor.position)
