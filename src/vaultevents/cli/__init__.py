"""The command line: one module per group of commands. Errors of the operator are one sentence and exit code 1."""

from __future__ import annotations

import sys

import typer

from vaultevents.cli import demo, listen, operate, register
from vaultevents.core.errors import VaulteventsError

app = typer.Typer(
    name="vaultevents",
    help="Final Ethereum staking-vault events as signed webhooks, at least once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
operate.add_to(app)
demo.add_to(app)
listen.add_to(app)
app.add_typer(register.account, name="account")
app.add_typer(register.vault, name="vault")
app.add_typer(register.webhook, name="webhook")


def main() -> None:
    """Runs one command. Exit codes: 0 done, 1 a problem that is told in one sentence, 2 wrong usage, 130 Ctrl-C."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (VaulteventsError, BaseExceptionGroup) as error:
        problems = _problems(error)
        if not problems:
            raise
        print(f"error: {problems[0]}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _problems(error: BaseException) -> list[VaulteventsError]:
    """The problems that an operator can mend, or none if there is also something else, which is a bug."""
    if isinstance(error, BaseExceptionGroup):
        parts = [_problems(part) for part in error.exceptions]
        return [problem for part in parts for problem in part] if all(parts) else []
    return [error] if isinstance(error, VaulteventsError) else []
