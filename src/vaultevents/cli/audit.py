"""audit: proofs over what is stored, for operators and their auditors."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from pydantic import SecretStr

from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.progress import RowProgress
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_table, say
from vaultevents.config import Settings
from vaultevents.core.errors import InputError
from vaultevents.core.spans import Span
from vaultevents.core.units import hex_text
from vaultevents.store import delivery_reconciliation
from vaultevents.store.delivery_reconciliation import Audit
from vaultevents.watch.range_proof import KINDS, GapProof, Tally, prove
from vaultevents.wiring.database import open_store
from vaultevents.wiring.sources import open_chain, with_node_alone

audit = typer.Typer(help="Proofs over what is stored.", no_args_is_help=True)


@audit.command("deliveries")
def audit_deliveries(
    account: Annotated[
        str | None, typer.Option("--account", help="Only this account; all without it.", metavar="ACCOUNT")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that every event has exactly the deliveries that it should have, in states that its attempts explain.

    The digest of an account is the same wherever its deliveries are the same. Exit code 1 when a rule is broken.
    """
    settings = settings_of(config)
    found = complete(_audited(settings, account))
    if as_json:
        put_json({"ok": not found.broken, **asdict(found)})
    else:
        _print_audit(found)
    if found.broken:
        raise typer.Exit(1)


@audit.command("chain")
def audit_chain(
    from_block: Annotated[int, typer.Option(min=0, help="First block.", metavar="BLOCK")],
    to_block: Annotated[int, typer.Option(min=0, help="Last block; it must be final.", metavar="BLOCK")],
    second_node: Annotated[
        str | None,
        typer.Option("--second-node", help="Ask only this node, whatever is configured.", metavar="URL"),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that no event of a final range of blocks is missing, invented or altered.

    They are derived again from the headers of all blocks and from receipts, never from a range of eth_getLogs, and
    compared with what is stored; nothing is changed. Two operators can compare the digest of the facts, which
    does not depend on their registrations. Exit code 1 when something is missing, extra or different.
    """
    if to_block < from_block:
        raise InputError(f"--to-block {to_block} lies before --from-block {from_block}: exchange them")
    settings = settings_of(config)
    found = complete(_proven(settings, Span(from_block, to_block), second_node))
    if as_json:
        put_json(_proof(found))
    else:
        _print_proof(found)
    if not found.is_whole:
        raise typer.Exit(1)


async def _proven(settings: Settings, span: Span, second_node: str | None) -> GapProof:
    if second_node is not None:
        settings = with_node_alone(settings, SecretStr(second_node))
    async with open_store(settings) as store, open_chain(settings, store.database) as chain:
        with RowProgress("audit_chain", "blocks", "blocks") as progress:
            progress.advanced(0, len(span))
            return await prove(chain, store.database, span, settings.watched_oracles, progress.advanced)


def _proof(found: GapProof) -> dict[str, Any]:
    return {
        "ok": found.is_whole,
        "first_block": found.span.first,
        "last_block": found.span.last,
        "last_hash": hex_text(found.last.hash),
        "events": _tally(found.events),
        "reports": None if found.reports is None else _tally(found.reports),
        "facts": found.facts,
        "undecodable": found.undecodable,
        "facts_digest": found.facts_digest,
        "events_digest": found.events_digest,
        "hashes_rebuilt": found.hashes_rebuilt,
        "blocks_read": found.blocks_read,
        "roots_rebuilt": found.roots_rebuilt,
    }


def _tally(tally: Tally) -> dict[str, Any]:
    return {"same": tally.same, **tally.counts, "ids": tally.shown}


def _print_proof(found: GapProof) -> None:
    say(f"blocks      {found.span}, the last one is {hex_text(found.last.hash)}")
    say(f"headers     {len(found.span)} linked, {found.hashes_rebuilt} of them by a hash that was made again")
    if unproven := len(found.span) - found.hashes_rebuilt:
        say(f"UNPROVEN    {unproven} headers: the node gives false ones, or the network has a fork unknown here")
    say(f"receipts    {found.blocks_read} blocks read, {found.roots_rebuilt} of them by a root that was made again")
    for name, tally in (("events", found.events), ("reports", found.reports)):
        if tally is None:
            say(f"{name:<11} not compared: they are not watched")
            continue
        say(f"{name:<11} {tally.same} same, {', '.join(f'{tally.counts[kind]} {kind}' for kind in KINDS)}")
        for kind in KINDS:
            for event_id in tally.shown[kind]:
                say(f"{kind.upper():<11} {event_id}")
            if (more := tally.counts[kind] - len(tally.shown[kind])) > 0:
                say(f"            and {more} more")
    if found.undecodable:
        say(f"UNDECODABLE {found.undecodable} logs: no event was made of them, see 'vaultevents quarantine list'")
    say(f"facts       {found.facts} logs of the contracts, registered or not: {found.facts_digest}")
    say(f"events      digest of what is stored: {found.events_digest}")
    if not found.is_whole:
        say("            what is missing comes back by 'vaultevents replay' over these blocks, once the first node of")
        say("            execution.urls is one that has it; find out who changed the rest")


async def _audited(settings: Settings, account_id: str | None) -> Audit:
    async with open_store(settings) as store, store.database.transaction() as connection:
        with RowProgress() as progress:
            return await delivery_reconciliation.audit(connection, account_id, progress.advanced)


def _print_audit(found: Audit) -> None:
    say(f"deliveries  {_counts(found.states)}{f' ({found.pruned} of them pruned)' if found.pruned else ''}")
    for breach in found.breaches:
        event = breach.event_id or "an unknown event"
        say(f"BREACH      {event} × {breach.webhook_id} ({breach.account_id or 'no account'}): {breach.problem}")
    if found.broken:
        say(f"            {found.broken} in all; send nothing again by hand before it is known why")
    else:
        say("ledger      it adds up: no breach")
    put_table(
        ("account", "digest", "deliveries"),
        [(account.account_id, account.digest, _counts(account.states)) for account in found.accounts],
        "no accounts yet: 'vaultevents account add ACCOUNT'",
    )


def _counts(states: dict[str, int]) -> str:
    return ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none"
