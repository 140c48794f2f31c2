"""The command line: one module per group of commands. Errors of the operator are one sentence and exit code 1."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import typer

from vaultevents.core.errors import DatabaseUnavailable, InputError, SourceUnavailable, VaulteventsError
from vaultevents.telemetry import redact

COMMANDS = {
    "init": "operate",
    "run": "operate",
    "replay": "replay",
    "check": "inspect",
    "status": "inspect",
    "demo": "demo",
    "listen": "listen",
    "call": "call",
    "rotate-master-key": "keys",
    "prune": "prune",
    "account": "register",
    "vault": "register",
    "webhook": "register",
    "key": "access",
    "mfa": "access",
    "report": "report",
    "audit": "audit",
    "quarantine": "quarantine",
}
"""The module of each command, in the order of the help."""


def build(command: str | None) -> typer.Typer:
    """The command line, of which only the module of `command` is imported: all together they take a second.

    For whatever is no command, which may want the help or a suggestion, all of them.
    """
    app = typer.Typer(
        name="vaultevents",
        help="Final Ethereum staking-vault events as signed webhooks, at least once.",
        epilog="Begin with 'demo', or with 'init', which tells what comes next.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    wanted = [COMMANDS[command]] if command in COMMANDS else COMMANDS.values()
    for module in dict.fromkeys(wanted):
        import_module(f"vaultevents.cli.{module}").add_to(app)
    app.callback()(_group)  # with one command alone typer would leave out its name
    return app


def _group() -> None:
    pass


def main() -> None:
    """Runs one command.

    Exit codes: 0 done, 1 a problem that is told in one sentence, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.
    """
    try:
        _check_arguments(sys.argv)
        build(sys.argv[1] if len(sys.argv) > 1 else None)(prog_name="vaultevents")
    except (Exception, BaseExceptionGroup) as error:
        if problems := _problems(error):
            print(f"error: {_sentence(problems[0])}", file=sys.stderr)  # noqa: T201
        else:  # a bug: its traceback may quote a URL
            sys.stderr.write(redact("".join(traceback.format_exception(error))))
        sys.exit(1)


def _check_arguments(arguments: Sequence[str]) -> None:
    """Bytes that are no text come as lone surrogates, which no database and no message can hold."""
    for argument in arguments:
        if not argument.isascii() and argument.encode(errors="replace").decode() != argument:
            raise InputError(f"the argument {argument[:80]!a} is not UTF-8: write it in this encoding")


def _problems(error: BaseException) -> list[VaulteventsError]:
    """The problems that an operator can mend, or none if there is also something else, which is a bug."""
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
