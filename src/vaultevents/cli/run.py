"""run: the service, or some of its roles, until a signal ends it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import typer

from vaultevents.cli.dispatchers import dispatchers, report_counts
from vaultevents.cli.footer import Footer
from vaultevents.cli.options import ConfigOption, JsonOption, one_of
from vaultevents.cli.progress import SpanProgress
from vaultevents.cli.service_check import check_beside_service
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, stop_at_end_of, stopping
from vaultevents.cli.totals import Totals
from vaultevents.config import Settings
from vaultevents.daemon import ROLES, Role, serve
from vaultevents.watch.watcher import Advanced


def run(
    config: ConfigOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this part of the work: {' or '.join(ROLES)}. May be repeated.", metavar="ROLE"),
    ] = None,
    number: Annotated[
        int, typer.Option("--dispatchers", min=1, max=64, help="Processes that deliver, this one among them.")
    ] = 1,
    listen: Annotated[
        str | None,
        typer.Option(
            help="Also receive, verify and print the events of this account on this machine, to try things: by a "
            "webhook that exists while this runs.",
            metavar="ACCOUNT",
        ),
    ] = None,
    while_stdin: Annotated[bool, typer.Option("--while-stdin", hidden=True)] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch the chain and deliver webhooks until SIGTERM or Ctrl-C.

    Attempts that are under way then are finished first; a second signal ends it at once, and they are made again
    later. With --json it says at the end what it read. On a terminal the last lines show what it does.
    """
    for role in only or ():
        one_of(ROLES, role, "--only")
    settings = settings_of(config)
    roles: list[Role] = [role for role in ROLES if not only or role in only]
    if number > 1 and "dispatch" not in roles:
        raise typer.BadParameter("there is nothing to deliver without the role dispatch", param_hint="--dispatchers")
    if listen is not None and (number > 1 or "dispatch" not in roles):
        raise typer.BadParameter("it needs the role dispatch in this one process", param_hint="--listen")
    totals = Totals()

    async def work() -> None:
        stop = asyncio.Event()
        if while_stdin:
            stop_at_end_of(sys.stdin, stop)
        footer = Footer(settings, roles) if sys.stderr.isatty() else None
        with stopping(stop), SpanProgress(None if footer is None else footer.render) as progress:

            def advanced(step: Advanced) -> None:
                totals.count(step)
                if footer is not None:
                    footer.advanced(step)
                progress.advanced(step)

            reporting = asyncio.create_task(report_counts()) if while_stdin else None
            async with dispatchers(number - 1, config, stop), _listening(settings, listen) as chosen:
                await serve(
                    chosen,
                    stop,
                    only=roles,
                    on_advance=advanced,
                    observed=not while_stdin,
                    beside=None if footer is None else footer.follow,
                    check=check_beside_service,
                )
            if reporting is not None:
                reporting.cancel()

    complete(work())
    if as_json:
        put_json(totals.as_dict())


@asynccontextmanager
async def _listening(settings: Settings, account_id: str | None) -> AsyncIterator[Settings]:
    """Receive the events of an account, if one is named; the receiver is imported only then."""
    if account_id is None:
        yield settings
        return
    from vaultevents.cli.local_receiver import receiving, show_received

    async with receiving(settings, account_id, show_received) as with_receiver:
        yield with_receiver
