"""mfa: the second factor of an account (rule A15)."""

from __future__ import annotations

import io
import secrets
import sys
from typing import Annotated

import segno
import typer

from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, say
from vaultevents.core.registry import check_id
from vaultevents.core.sealing import NONCE_BYTES
from vaultevents.core.totp import SEED_BYTES, new_seed, otpauth_uri
from vaultevents.store import mfa as factors
from vaultevents.wiring.database import open_store

mfa = typer.Typer(
    help="Enrol and reset the second factor with which an account changes its webhooks.", no_args_is_help=True
)

AccountArgument = Annotated[str, typer.Argument(help="The account's id.", metavar="ACCOUNT")]


@mfa.command("enroll")
def mfa_enroll(account: AccountArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Give an account its second factor and show it, once, for an authenticator app.

    From then on each change of a webhook needs a code of it.
    """
    settings = settings_of(config)
    check_id(account, "an account id")
    seed = new_seed(secrets.token_bytes(SEED_BYTES))

    async def work() -> None:
        async with open_store(settings) as store:
            nonce = secrets.token_bytes(NONCE_BYTES)
            await factors.enroll(store.database, account, seed, store.key, nonce)

    complete(work())
    uri = otpauth_uri(seed, account).reveal()
    if as_json:
        put_json({"accountId": account, "otpauthUri": uri})
        return
    say(f"Account {account} has a second factor. It is shown only now; keep it secret:")
    say(uri)
    if _shows_blocks():
        say(_qr_code(uri))


@mfa.command("reset")
def mfa_reset(account: AccountArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Remove an account's second factor, and its lock: for one that was lost, disclosed or locked.

    Webhooks cannot be changed through the API until another one is enrolled.
    """
    settings = settings_of(config)
    check_id(account, "an account id")

    async def work() -> None:
        async with open_store(settings) as store:
            await factors.reset(store.database, account)

    complete(work())
    if as_json:
        put_json({"accountId": account, "reset": True})
    else:
        say(f"Account {account} has no second factor any longer: 'vaultevents mfa enroll {account}' makes another one.")


def _shows_blocks() -> bool:
    """Whether stdout is a terminal that can show a QR code."""
    return sys.stdout.isatty() and (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")


def _qr_code(text: str) -> str:
    drawn = io.StringIO()
    segno.make_qr(text).terminal(drawn, compact=True)
    return drawn.getvalue().rstrip("\n")
