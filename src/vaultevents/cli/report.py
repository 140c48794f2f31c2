"""report: what is in an oracle report, does it verify, the calldata of a vault, and what is pending."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vaultevents.chain.ipfs import write_cache
from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_table, say
from vaultevents.config import Settings
from vaultevents.core.errors import InputError, OperatorError, SourceUnavailable, VaulteventsError
from vaultevents.core.reports import (
    ADVICE,
    MAX_FILE_BYTES,
    FailureKind,
    Report,
    ReportInvalid,
    ReportUndecodable,
    check_file,
    failure_kind,
)
from vaultevents.core.units import checksum, eth_text, hex_text
from vaultevents.store import reports
from vaultevents.store.outbox import Outbox
from vaultevents.store.reports import StoredReport
from vaultevents.watch.reports import Resolver, read_published
from vaultevents.wiring.database import open_store
from vaultevents.wiring.sources import open_files, report_cache

report = typer.Typer(help="Oracle reports: files, proofs, calldata.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="The report's CID or timestamp.", metavar="REPORT")]


@report.command("show")
def report_show(
    name: Annotated[str | None, typer.Argument(help="CID or timestamp; all without it.", metavar="[REPORT]")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the newest reports, or show one with the vaults and the calldata that are in it.

    Where its file cannot be had or read it says why, whose fault that is and what to do; the exit code is then 1.
    """
    settings = settings_of(config)
    if name is None:
        _list(complete(_find(settings, None)), as_json=as_json)
        return
    stored, verified = complete(_verified(settings, name))
    if isinstance(verified, Failed):
        if as_json:
            put_json({**_facts(stored, verified), "vaults": None})
        else:
            _put_facts(_facts(stored, verified))
        raise verified.as_error(stored)
    vaults = [
        {
            "vault": checksum(leaf.vault),
            "total_value_eth": eth_text(leaf.total_value_wei),
            "cumulative_fee_eth": eth_text(leaf.cumulative_fee_wei),
            "liability_shares": str(leaf.liability_shares),
            "slashing_reserve_eth": eth_text(leaf.slashing_reserve_wei),
            "calldata": hex_text(verified.calldata(leaf.vault)),
        }
        for leaf in verified.leaves.values()
    ]
    if as_json:
        put_json({**_facts(stored), "vaults": vaults})
        return
    _put_facts(_facts(stored))
    for vault in vaults:
        say("")
        for key, text in vault.items():
            say(f"  {key:21}{text}")


@report.command("verify")
def report_verify(name: NameArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Fetch a report's file and prove it: its CID, its root, and the proof of every vault."""
    settings = settings_of(config)
    stored, verified = complete(_verified(settings, name))
    if isinstance(verified, Failed):
        raise verified.as_error(stored)
    for vault in verified.vaults:
        verified.calldata(vault)
    if as_json:
        put_json({**_facts(stored), "verified": True, "vaults": len(verified.vaults)})
    else:
        say(f"The file of report {stored.log.timestamp} is the published one; {len(verified.vaults)} proofs hold.")


@report.command("import")
def report_import(
    file: Annotated[Path, typer.Argument(help="A report's file, from wherever.", dir_okay=False)],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Supply the file of a pending report by hand; it is verified like any other."""
    settings = settings_of(config)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{file} is larger than a report can be ({MAX_FILE_BYTES} bytes)")
        content = file.read_bytes()
    except OSError as problem:
        raise InputError(f"cannot read {file}: {problem.strerror}") from None
    done = complete(_import(settings, content))
    if as_json:
        put_json({"resolved": [_facts(resolved) for resolved in done]})
    else:
        say(f"Resolved {len(done)} report: {', '.join(str(resolved.log.timestamp) for resolved in done)}.")


@report.command("give-up")
def report_give_up(name: NameArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Stop asking for the file of a pending report; its events will never come."""
    settings = settings_of(config)

    async def work() -> list[StoredReport]:
        async with open_store(settings) as store:
            return await reports.give_up_report(store.database, name)

    given_up = complete(work())
    if as_json:
        put_json({"givenUp": [_facts(given) for given in given_up]})
    else:
        say(f"Gave up report {', '.join(str(given.log.timestamp) for given in given_up)}.")


def _list(found: list[StoredReport], *, as_json: bool) -> None:
    if as_json:
        put_json({"reports": [_facts(stored) for stored in found]})
        return
    rows = [
        (
            stored.log.timestamp,
            stored.log.block_number,
            stored.log.cid,
            stored.state,
            stored.vaults,
            stored.attempts,
            stored.failure,
            stored.problem,
        )
        for stored in found
    ]
    columns = ("timestamp", "block", "cid", "state", "vaults", "attempts", "failure", "problem")
    put_table(columns, rows, "no report has been seen yet")


@dataclass(frozen=True, slots=True)
class Failed:
    """Why the file of a report cannot be had or read."""

    kind: FailureKind
    problem: str

    def as_error(self, stored: StoredReport) -> OperatorError:
        return OperatorError(f"report {stored.log.timestamp} ({stored.log.cid}): {self.problem}: {ADVICE[self.kind]}")


def _put_facts(facts: dict[str, object]) -> None:
    for key, value in facts.items():
        say(f"{key:12}{'-' if value is None else value}")


def _facts(stored: StoredReport, failed: Failed | None = None) -> dict[str, object]:
    """What is stored of a report; the failure is that of the present attempt, else that of the last stored."""
    kind, problem = (stored.failure, stored.problem) if failed is None else (failed.kind, failed.problem)
    return {
        "timestamp": str(stored.log.timestamp),
        "refSlot": str(stored.log.ref_slot),
        "block": stored.log.block_number,
        "oracle": checksum(stored.log.address),
        "root": hex_text(stored.log.root),
        "cid": stored.log.cid,
        "state": stored.state,
        "failure": kind,
        "problem": problem,
        "advice": None if kind is None else ADVICE[kind],
    }


async def _find(settings: Settings, name: str | None) -> list[StoredReport]:
    async with open_store(settings) as store:
        return await reports.find_reports(store.database, name)


async def _verified(settings: Settings, name: str) -> tuple[StoredReport, Report | Failed]:
    async with open_store(settings) as store, open_files(settings) as files:
        found = await reports.find_reports(store.database, name)
        if not found:
            raise InputError(f"no report with the CID or timestamp '{name}' is known: see 'vaultevents report show'")
        stored = found[0]
        if stored.log.is_empty:
            raise InputError(f"report {stored.log.timestamp} has no file: no vault was connected then")
        try:
            return stored, await read_published(files, stored.log)
        except (SourceUnavailable, ReportInvalid) as error:
            return stored, Failed(failure_kind(error), str(error))


@dataclass(frozen=True, slots=True)
class InHand:
    """A file that is already there."""

    content: bytes

    async def fetch(self, cid: str, check: Callable[[bytes], None]) -> bytes:
        check(self.content)
        return self.content


async def _import(settings: Settings, content: bytes) -> list[StoredReport]:
    async with open_store(settings) as store:
        pending = [
            stored for stored in await reports.find_reports(store.database) if stored.state in ("pending", "given_up")
        ]
        problems: list[VaulteventsError] = []
        undecodable: list[OperatorError] = []
        done = []
        for stored in pending:
            try:
                check_file(content, stored.log)
            except ReportInvalid as problem:
                problems.append(problem)
                continue
            write_cache(report_cache(settings) / stored.log.cid, content)  # a vault that is added later needs it again
            try:
                await Resolver(Outbox(store.database), InHand(content), 1.0).resolve(stored)
            except ReportUndecodable as problem:
                undecodable.append(Failed("undecodable", str(problem)).as_error(stored))
                continue
            done.append(stored)
    if undecodable:
        raise undecodable[0]
    if not done:
        why = f" ({problems[0]})" if len(problems) == 1 else ""
        raise InputError(f"this is not the file of any of the {len(pending)} pending reports{why}")
    return done
