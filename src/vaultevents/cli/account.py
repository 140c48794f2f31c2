"""account: who owns vaults and webhooks."""

from __future__ import annotations

from typing import Annotated

import typer

from vaultevents.cli.options import AccountArgument, ConfigOption, JsonOption
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_table, say
from vaultevents.core.errors import InputError
from vaultevents.core.registry import check_id
from vaultevents.store import accounts
from vaultevents.wiring.database import open_store

account = typer.Typer(help="Add and list accounts, which own vaults and webhooks.", no_args_is_help=True)


@account.command("add")
def account_add(
    account_id: AccountArgument,
    name: Annotated[str | None, typer.Option(help="A name for people (default: the id).")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add an account.

    Its id is part of the id of every event of it, and never changes.
    """
    settings = settings_of(config)
    check_id(account_id, "an account id")
    shown = name or account_id
    if not shown.isprintable():
        raise InputError("--name holds characters that cannot be printed: leave them out")

    async def work() -> accounts.Account:
        async with open_store(settings) as store:
            return await accounts.add_account(store.database, account_id, shown)

    added = complete(work())
    if as_json:
        put_json({"id": added.id, "name": added.name})
    else:
        say(f"Added account {added.id}.")


@account.command("list")
def account_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List all accounts."""
    settings = settings_of(config)

    async def work() -> list[accounts.Account]:
        async with open_store(settings) as store:
            return await accounts.accounts(store.database)

    found = complete(work())
    if as_json:
        put_json(
            {"accounts": [{"id": listed.id, "name": listed.name, "createdAt": listed.created_at} for listed in found]}
        )
    else:
        rows = [(listed.id, listed.name, listed.created_at.isoformat(timespec="seconds")) for listed in found]
        put_table(("id", "name", "created"), rows, "no accounts yet: 'vaultevents account add ACCOUNT'")
