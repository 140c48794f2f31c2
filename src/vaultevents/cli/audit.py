"""audit: proofs over what is stored, for operators and their auditors."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Any

import typer
from pydantic import SecretStr

from vaultevents.cli.options import ConfigOption, JsonOption, time_of
from vaultevents.cli.progress import RowProgress
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_page, put_table, say
from vaultevents.config import Settings
from vaultevents.core.audit_chain import AuditEntry, time_text
from vaultevents.core.errors import InputError, OperatorError
from vaultevents.core.spans import Span
from vaultevents.core.units import hex_text
from vaultevents.store import audit_log, delivery_reconciliation
from vaultevents.store.audit_log import Verified
from vaultevents.store.delivery_reconciliation import Audit
from vaultevents.watch.range_proof import KINDS, GapProof, Tally, prove
from vaultevents.wiring.database import open_store
from vaultevents.wiring.sources import open_chain, with_node_alone

audit = typer.Typer(help="Proofs over what is stored, and the log of who changed what.", no_args_is_help=True)


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


@audit.command("log")
def audit_log_entries(
    verify: Annotated[
        bool, typer.Option("--verify", help="Compute the chain of hashes again; exit code 1 when it is broken.")
    ] = False,
    since_hash: Annotated[
        str | None,
        typer.Option(
            help="Verify, and find this hash, which an earlier '--verify' showed, in the chain.", metavar="HASH"
        ),
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", help="Only what is about this account.", metavar="ACCOUNT")
    ] = None,
    action: Annotated[
        str | None, typer.Option(help="Only this action, such as webhook.enable, or webhook for all of them.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only what is not older, such as 24h, or 2026-01-31T12:00:00Z.", metavar="TIME")
    ] = None,
    before: Annotated[
        int | None, typer.Option(min=1, help="Only entries with a lower number: the next page.", metavar="NUMBER")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.", metavar="N")] = 50,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List who changed what and when, newest first, or verify that nothing of it was altered.

    Each entry has the hash of the one before it. Note the hash that '--verify' shows somewhere else: with
    '--since-hash' it proves later that no entry up to then was removed or replaced.
    """
    settings = settings_of(config)
    if verify or since_hash is not None:
        if (account, action, since, before) != (None, None, None, None):
            raise typer.BadParameter("the whole log is verified: leave out the options that choose entries")
        _put_verified(complete(_verified(settings, since_hash)), since_hash, as_json=as_json)
        return
    found = complete(_entries(settings, account, action, since, before, limit + 1))
    following = found[limit - 1].seq if len(found) > limit else None
    if as_json:
        put_json({"entries": [_entry(entry) for entry in found[:limit]], "next": following})
        return
    put_page(
        ("number", "time", "actor", "action", "subject", "account"),
        [
            (entry.seq, time_text(entry.at), entry.actor, entry.action, entry.subject, entry.account_id)
            for entry in found[:limit]
        ],
        following,
        "no entry",
    )


async def _entries(
    settings: Settings, account: str | None, action: str | None, since: str | None, before: int | None, limit: int
) -> list[AuditEntry]:
    async with open_store(settings) as store:
        start = None if since is None else time_of(since, "--since", await store.database.now())
        async with store.database.transaction() as connection:
            return await audit_log.entries(
                connection, account_id=account, action=action, since=start, before=before, limit=limit
            )


def _entry(entry: AuditEntry) -> dict[str, Any]:
    return {
        "seq": entry.seq,
        "at": time_text(entry.at),
        "actor": entry.actor,
        "action": entry.action,
        "subject": entry.subject,
        "account_id": entry.account_id,
        "before_digest": None if entry.before_digest is None else entry.before_digest.hex(),
        "after_digest": None if entry.after_digest is None else entry.after_digest.hex(),
        "hash": entry.hash.hex(),
    }


async def _verified(settings: Settings, since_hash: str | None) -> Verified:
    noted_hash = None if since_hash is None else _hash(since_hash)
    async with open_store(settings) as store, store.database.transaction() as connection:
        return await audit_log.verify(connection, noted_hash)


def _hash(text: str) -> bytes:
    if re.fullmatch("[0-9a-fA-F]{64}", text) is None:
        raise InputError(f"--since-hash '{text[:80]}' is not a hash: give the 64 hexadecimal digits that were noted")
    return bytes.fromhex(text)


def _put_verified(found: Verified, since_hash: str | None, *, as_json: bool) -> None:
    """Show what a verification found; exit code 1 when the chain is broken or lacks the noted hash."""
    is_whole = found.first_bad is None and (since_hash is None or found.noted_seq is not None)
    if as_json:
        shown = {"rows": found.rows, "head_hash": found.head_hash.hex(), "noted_seq": found.noted_seq}
        put_json({"ok": is_whole, **shown, "first_bad": found.first_bad and asdict(found.first_bad)})
    else:
        say(f"entries     {found.rows} hold")
        say(f"head        {found.head_hash.hex()}")
        if found.noted_seq is not None:
            say(f"noted       it is the hash of entry {found.noted_seq}")
    if found.first_bad is not None:
        raise OperatorError(
            f"the audit log is broken at entry {found.first_bad.seq}: {found.first_bad.problem}. Somebody with the "
            "rights of the database's owner changed it: compare it with a backup from before"
        )
    if not is_whole:
        raise OperatorError(
            f"the audit log has no entry with the hash {since_hash}: entries were removed or replaced since it was "
            "noted, or a backup from before was restored"
        )


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
