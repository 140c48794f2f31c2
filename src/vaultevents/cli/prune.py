"""prune: what became of old deliveries is removed, and the ledger still adds up."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.progress import RowProgress
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, say
from vaultevents.config import Settings
from vaultevents.core.errors import InputError
from vaultevents.store import retention
from vaultevents.store.retention import Pruned
from vaultevents.wiring.database import open_store

KEPT_DAYS = 90
_DAYS = re.compile(r"(\d{1,5})d")
PAUSE_S = 0.02


def prune(
    older_than: Annotated[
        str | None,
        typer.Option(
            help=f"What was finished longer ago, as in 30d (default: retention.keep_days, else {KEPT_DAYS}d).",
            metavar="DAYS",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count, or estimate where there are many, and remove nothing.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove deliveries that were delivered or cancelled long ago, with their attempts.

    Events stay, and so does what is pending or exhausted; the ledger still adds up. May run beside the daemon, and may
    be stopped and started again.
    """
    settings = settings_of(config)
    age = timedelta(days=settings.retention.keep_days or KEPT_DAYS) if older_than is None else _age(older_than)
    pruned = complete(_pruned(settings, age, dry_run=dry_run))
    if as_json:
        numbers = asdict(pruned)
        if not dry_run:
            del numbers["estimated"]
        put_json({"dry_run": dry_run, **numbers})
    else:
        counts = f"{pruned.deliveries} deliveries, {pruned.attempts} attempts, {pruned.resends} resends"
        verb = "removed" if not dry_run else "would remove about" if pruned.estimated else "would remove"
        say(f"{verb} {counts}{' (estimated from samples)' if pruned.estimated else ''}")


def _age(text: str) -> timedelta:
    if (days := _DAYS.fullmatch(text)) is None:
        raise InputError(f"--older-than '{text}' is not a number of days: write it as in {KEPT_DAYS}d")
    return timedelta(days=int(days[1]))


async def _pruned(settings: Settings, age: timedelta, *, dry_run: bool) -> Pruned:
    async with open_store(settings) as store:
        with RowProgress("prune") as progress:
            return await retention.prune(
                store.database, age, pause_s=PAUSE_S, dry_run=dry_run, progress=progress.advanced
            )
