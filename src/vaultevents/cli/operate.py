"""init, run."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from vaultevents.cli.console import (
    ConfigOption,
    JsonOption,
    complete,
    one_of,
    put_json,
    say,
    settings_of,
    stop_at_end_of,
    stopping,
)
from vaultevents.cli.dispatchers import dispatchers, tell_counts
from vaultevents.cli.progress import SpanProgress
from vaultevents.cli.totals import Totals
from vaultevents.config import DEFAULT_FILE, NETWORKS, chosen_file
from vaultevents.core.errors import ConfigError, InputError
from vaultevents.daemon import ROLES, Role, serve
from vaultevents.watch.watcher import Advanced


def add_to(app: typer.Typer) -> None:
    app.command("init")(init)
    app.command("run")(run_daemon)


def init(
    network: Annotated[
        str, typer.Option(help=f"The network to watch: {', '.join(NETWORKS)}.", metavar="NETWORK")
    ] = "hoodi",
    config: ConfigOption = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a configuration file that explains every setting."""
    one_of(NETWORKS, network, "--network")
    path = chosen_file(config)
    if path.exists() and not force:
        raise InputError(
            f"{path} is already there: edit it, name another file with --config, or write over it (--force)"
        )
    _write_whole(path, _template(network))
    if as_json:
        put_json({"path": str(path), "network": network})
        return
    option = "" if path == DEFAULT_FILE else f" --config {path}"
    say(f"Wrote {path} for {network}. {_FIRST[network]} Next{f', each with{option}' if option else ''}:")
    say("  vaultevents check                                    does everything answer?")
    say("  vaultevents account add ACCOUNT                      an account, such as 'acme'")
    say("  vaultevents vault add ACCOUNT VAULT ADDRESS          a vault of it (--queue, --start-block)")
    say("  vaultevents webhook add ACCOUNT URL                  where its events go; shows the secret once")
    say("  vaultevents run                                      watch and deliver")


_FIRST = {
    "devnet": "It expects a node at http://127.0.0.1:8545 with chain id 31337.",
    "hoodi": "It names public nodes, so it works as it is.",
    "mainnet": "Name your node in it (execution.urls).",
}


def _write_whole(path: Path, text: str) -> None:
    """Whole or not at all: a full disk must not cost the file that was there."""
    target = path.resolve()
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): mend that, or name another file") from None


def _template(network: str) -> str:
    repository = Path(__file__).parents[3] / "config"
    for place in (resources.files("vaultevents").joinpath("networks"), repository):
        example = place.joinpath(f"{network}.toml")
        if example.is_file():
            return example.read_text(encoding="utf-8")
    raise ConfigError(f"this installation comes without its examples: copy config/{network}.toml from the repository")


def run_daemon(
    config: ConfigOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this part of the work: {' or '.join(ROLES)}. May be repeated.", metavar="ROLE"),
    ] = None,
    number: Annotated[
        int, typer.Option("--dispatchers", min=1, max=64, help="Processes that deliver, this one among them.")
    ] = 1,
    while_stdin: Annotated[bool, typer.Option("--while-stdin", hidden=True)] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch the chain and deliver webhooks until SIGTERM or Ctrl-C.

    Attempts that are under way then are finished first; a second signal ends it at once, and they are made again
    later. With --json it says at the end what it read.
    """
    for role in only or ():
        one_of(ROLES, role, "--only")
    settings = settings_of(config)
    roles: list[Role] = [role for role in ROLES if not only or role in only]
    if number > 1 and "dispatch" not in roles:
        raise typer.BadParameter("there is nothing to deliver without the role dispatch", param_hint="--dispatchers")
    totals = Totals()

    async def work() -> None:
        stop = asyncio.Event()
        if while_stdin:
            stop_at_end_of(sys.stdin, stop)
        with stopping(stop), SpanProgress() as progress:

            def advanced(step: Advanced) -> None:
                totals.count(step)
                progress.advanced(step)

            telling = asyncio.create_task(tell_counts()) if while_stdin else None
            async with dispatchers(number - 1, config, stop):
                await serve(settings, stop, only=roles, on_advance=advanced, observed=not while_stdin)
            if telling is not None:
                telling.cancel()

    complete(work())
    if as_json:
        put_json(totals.as_dict())
