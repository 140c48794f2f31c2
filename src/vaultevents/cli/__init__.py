"""The command line: one module for each command, with the name of the command.

Errors of the operator are one sentence and exit code 1.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from vaultevents import __version__
from vaultevents.core.errors import DatabaseUnavailable, InputError, SourceUnavailable, VaulteventsError

COMMANDS = {
    "init": "Write a configuration file that explains every setting.",
    "run": "Watch the chain and deliver webhooks until SIGTERM or Ctrl-C.",
    "replay": "Restore and compare the events of a range of blocks or of epochs.",
    "check": "See whether everything that is configured works.",
    "status": "Show how far the streams are and what is still to be delivered.",
    "console": "Print a link that logs a browser in to the console, once.",
    "demo": "See it work, on this machine alone.",
    "listen": "Receive, verify and print webhooks on this machine.",
    "call": "Send one signed request to the HTTP API, as a customer would.",
    "rotate-master-key": "Seal every secret with another master key.",
    "prune": "Remove deliveries that were delivered or cancelled long ago, with their attempts.",
    "account": "Add and list accounts, which own vaults and webhooks.",
    "vault": "Discover, add, list and remove the staking vaults that are watched.",
    "webhook": "Add, list, show, pause, enable, test and remove the URLs to which events are delivered.",
    "event": "Stored events: list, show, follow.",
    "delivery": "Deliveries of events to webhooks, with their attempts: list, show.",
    "key": "Add, list, rotate and revoke the keys of the HTTP API.",
    "mfa": "Enrol and reset the second factor with which an account changes its webhooks.",
    "report": "Oracle reports: files, proofs, calldata.",
    "audit": "Proofs over what is stored, and the log of who changed what.",
    "quarantine": "Logs that cannot be decoded: list, retry, dismiss.",
}
"""Every command with the first sentence of its help, in the order of the help."""


class _Commands(TyperGroup):
    """Commands of which only the names and summaries are known until a command is to run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, summary, rest = super().resolve_command(ctx, args)
        return name, summary if name is None else load(name), rest


def build() -> typer.Typer:
    """Build the command line without the modules of its commands, which together take a second to import."""
    app = _app(_Commands, add_completion=True)
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(_unloaded)
    return app


def load(name: str) -> Any:
    """Import the module of a command and return the command: both have its name in Python's spelling."""
    app, spelled = _app(TyperGroup), name.replace("-", "_")
    command = getattr(import_module(f"vaultevents.cli.{spelled}"), spelled)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group.commands[name]


def _app(kind: type[TyperGroup], *, add_completion: bool = False) -> typer.Typer:
    app = typer.Typer(
        name="vaultevents",
        cls=kind,
        help="Final Ethereum staking-vault events as signed webhooks, at least once.",
        epilog="Begin with 'demo', or with 'init', which shows what comes next.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=add_completion,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_no_command)  # with one command alone typer would leave out its name
    return app


def _unloaded() -> None:
    pass


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vaultevents {__version__}")
        raise typer.Exit


def _no_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run one command.

    Exit codes: 0 done, 1 a problem that is reported in one sentence, 2 wrong usage, 3 not healthy, 130 Ctrl-C,
    143 SIGTERM.
    """
    try:
        _check_arguments(sys.argv)
        build()(prog_name="vaultevents")
    except (Exception, BaseExceptionGroup) as error:
        if problems := _problems(error):
            print(f"error: {_sentence(problems[0])}", file=sys.stderr)  # noqa: T201
        else:  # a bug: its traceback may quote a URL
            from vaultevents.telemetry import redact

            sys.stderr.write(redact("".join(traceback.format_exception(error))))
        sys.exit(1)


def _check_arguments(arguments: Sequence[str]) -> None:
    """Bytes that are no text come as lone surrogates, which no database and no message can hold."""
    for argument in arguments:
        if not argument.isascii() and argument.encode(errors="replace").decode() != argument:
            raise InputError(f"the argument {argument[:80]!a} is not UTF-8: write it in this encoding")


def _problems(error: BaseException) -> list[VaulteventsError]:
    """Return the problems that an operator can solve, or none if there is also something else, which is a bug."""
    if isinstance(error, BaseExceptionGroup):
        parts = [_problems(part) for part in error.exceptions]
        return [problem for part in parts for problem in part] if all(parts) else []
    return [error] if isinstance(error, VaulteventsError) else []


def _sentence(problem: VaulteventsError) -> str:
    """What went wrong and what to do, on one line."""
    text = " ".join(str(problem).split())
    if isinstance(problem, SourceUnavailable):
        return f"{text}: see that the node runs, or name another one in execution.urls"
    if isinstance(problem, DatabaseUnavailable) and text.startswith(("lost", "the database could not")):
        return f"{text}; nothing is half done: start this again when the database is back"
    return text
