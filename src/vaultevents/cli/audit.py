"""audit: proofs over what is stored, for operators and for whoever checks on them."""

from __future__ import annotations

import time
from dataclasses import asdict
from types import TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vaultevents.cli.console import (
    PLAIN_EVERY_S,
    ConfigOption,
    JsonOption,
    complete,
    log,
    put_json,
    put_table,
    say,
    settings_of,
)
from vaultevents.config import Settings
from vaultevents.opening import open_store
from vaultevents.store import ledger
from vaultevents.store.ledger import Audit

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
        _tell(found)
    if found.broken:
        raise typer.Exit(1)


async def _audited(settings: Settings, account_id: str | None) -> Audit:
    async with open_store(settings) as store, store.database.transaction() as connection:
        with RowProgress() as progress:
            return await ledger.audit(connection, account_id, progress.advanced)


def _tell(found: Audit) -> None:
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
        [(one.account_id, one.digest, _counts(one.states)) for one in found.accounts],
        "no accounts yet: 'vaultevents account add ACCOUNT'",
    )


def _counts(states: dict[str, int]) -> str:
    return ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none"


class RowProgress:
    """Shows how far a reading of many rows is: a bar with an ETA on a terminal, a log line now and then in a pipe."""

    def __init__(self, kind: str = "audit") -> None:
        self._kind = kind
        self._console = Console(stderr=True)
        self._begin_s = self._said_at_s = time.monotonic()
        self._progress = Progress(
            TextColumn("deliveries"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._bar = self._progress.add_task(kind, total=None)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def advanced(self, read: int, expected: int) -> None:
        """Takes note of `read` rows out of about `expected`; until the first one the server sorts."""
        now_s = time.monotonic()
        if self._console.is_terminal:
            self._progress.update(self._bar, total=expected if read else None, completed=read)
        elif read == 0:
            self._begin_s = self._said_at_s = now_s
            log.info(f"{self._kind}_started", deliveries=expected)
        elif now_s - self._said_at_s >= PLAIN_EVERY_S:
            self._said_at_s = now_s
            left_s = round((expected - read) * (now_s - self._begin_s) / read)
            log.info("progress", kind=self._kind, done_rows=read, of_rows=expected, left_s=left_s)
