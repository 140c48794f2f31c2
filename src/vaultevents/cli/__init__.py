"""The command line: one module per group of commands. Errors of the operator are one sentence and exit code 1."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import typer

from vaultevents.cli import access, audit, call, demo, inspect, keys, listen, operate, prune, register, report
from vaultevents.core.errors import DatabaseUnavailable, InputError, SourceUnavailable, VaulteventsError
from vaultevents.telemetry import redact

app = typer.Typer(
    name="vaultevents",
    help="Final Ethereum staking-vault events as signed webhooks, at least once.",
    epilog="Begin with 'demo', or with 'init', which tells what comes next.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
operate.add_to(app)
inspect.add_to(app)
demo.add_to(app)
listen.add_to(app)
call.add_to(app)
keys.add_to(app)
prune.add_to(app)
app.add_typer(register.account, name="account")
app.add_typer(register.vault, name="vault")
app.add_typer(register.webhook, name="webhook")
app.add_typer(access.key, name="key")
app.add_typer(access.mfa, name="mfa")
app.add_typer(report.report, name="report")
app.add_typer(audit.audit, name="audit")


def main() -> None:
    """Runs one command.

    Exit codes: 0 done, 1 a problem that is told in one sentence, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.
    """
    try:
        _check_arguments(sys.argv)
        app(prog_name="vaultevents")
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
    if isinstance(problem, DatabaseUnavailable) and text.startswith("lost"):
        return f"{text}; nothing is half done: start this again when the database is back"
    return text
