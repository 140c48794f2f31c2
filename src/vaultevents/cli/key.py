"""key: who may call the HTTP API for an account (rule A14)."""

from __future__ import annotations

import re
import secrets
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, cast, get_args

import typer

from vaultevents.cli.options import ConfigOption, JsonOption, one_of, overlap_of, read_key
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_table, say
from vaultevents.core.errors import InputError
from vaultevents.core.registry import check_id
from vaultevents.core.rsakeys import fingerprint, parse_public_key
from vaultevents.core.sealing import Secret, keyed_hash
from vaultevents.core.webhooks import parse_network
from vaultevents.store import apikeys
from vaultevents.store.apikeys import ApiKey, PublicKey, Role
from vaultevents.store.key_uses import last_uses
from vaultevents.wiring.database import open_hash_key, open_store

key = typer.Typer(help="Add, list, rotate and revoke the keys of the HTTP API.", no_args_is_help=True)

ROLES: Final[tuple[Role, ...]] = get_args(Role)
API_KEY_BYTES: Final = 32

_KEY_ID = re.compile(r"key-[0-9a-f]{16}")

KeyArgument = Annotated[str, typer.Argument(help="The key's id, as 'key list' shows it.", metavar="KEY_ID")]
PublicKeyOption = Annotated[
    Path, typer.Option(help="The customer's RSA public key in PEM, 2048 bits or more.", metavar="FILE")
]


@key.command("add")
def key_add(
    account: Annotated[str, typer.Option(help="The account that it is for.", metavar="ACCOUNT")],
    public_key: PublicKeyOption,
    role: Annotated[str, typer.Option(help="'read', or 'manage', which may also change webhooks.", metavar="ROLE")] = (
        "read"
    ),
    allow_ip: Annotated[
        list[str] | None,
        typer.Option(help="Take requests only from this address or network; may be repeated.", metavar="CIDR"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="A name for people (default: the key's id).")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add an API key and show it, once.

    Its requests are signed with the private key that belongs to the public key; that one stays with the customer.
    """
    one_of(ROLES, role, "--role")
    settings = settings_of(config)
    check_id(account, "an account id")
    if name is not None and not name.isprintable():
        raise InputError("--name holds characters that cannot be printed: leave them out")
    der = read_key(public_key, "--public-key", parse_public_key)
    allowed = tuple(dict.fromkeys(str(parse_network(text)) for text in allow_ip)) if allow_ip else None
    key_id, api_key = f"key-{secrets.token_hex(8)}", Secret(f"vek_{secrets.token_urlsafe(API_KEY_BYTES)}")

    async def work() -> ApiKey:
        async with open_store(settings) as store:
            hashed = keyed_hash(await open_hash_key(store), api_key.reveal())
            return await apikeys.add_key(
                store.database,
                key_id,
                account,
                name or key_id,
                cast(Role, role),
                hashed,
                allowed,
                der,
                fingerprint(der),
            )

    added = complete(work())
    if as_json:
        put_json({**_key_json(added), "apiKey": api_key.reveal()})
    else:
        say(f"Added key {key_id} ({role}) for account {account}. The API key is shown only now; keep it secret:")
        say(api_key.reveal())


@key.command("list")
def key_list(
    account: Annotated[str | None, typer.Argument(help="Only those of this account.", metavar="[ACCOUNT]")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the API keys of one account or of all, the revoked ones, too.

    When a key was last used is known to the minute.
    """
    settings = settings_of(config)
    if account is not None:
        check_id(account, "an account id")

    async def work() -> tuple[list[ApiKey], dict[str, datetime]]:
        async with open_store(settings) as store:
            return await apikeys.list_keys(store.database, account), await last_uses(store.database, account)

    found, used = complete(work())
    if as_json:
        put_json({"keys": [{**_key_json(listed), "lastUsedAt": used.get(listed.id)} for listed in found]})
        return
    rows = [
        (
            listed.id,
            listed.account_id,
            listed.name,
            listed.role if listed.revoked_at is None else "revoked",
            "anywhere" if listed.allowed is None else ", ".join(listed.allowed),
            used[listed.id].isoformat(timespec="minutes") if listed.id in used else "never",
            ", ".join(map(_public_key_text, listed.public_keys)),
        )
        for listed in found
    ]
    columns = ("key", "account", "name", "role", "from", "last used", "public keys")
    put_table(columns, rows, "no API keys yet: 'vaultevents key add'")


@key.command("revoke")
def key_revoke(key_id: KeyArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Revoke an API key for good."""
    settings = settings_of(config)
    _check_key_id(key_id)

    async def work() -> ApiKey:
        async with open_store(settings) as store:
            return await apikeys.revoke_key(store.database, key_id)

    revoked = complete(work())
    if as_json:
        put_json(_key_json(revoked))
    else:
        say(f"Revoked key {key_id} of account {revoked.account_id}: within a second its requests are refused.")


@key.command("rotate")
def key_rotate(
    key_id: KeyArgument,
    public_key: PublicKeyOption,
    overlap: Annotated[
        str,
        typer.Option(
            help="How long the earlier public keys stay valid, such as 30m or 24h; 0 after a disclosure.",
            metavar="TIME",
        ),
    ] = "24h",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give an API key another public key, valid at once; the API key itself stays."""
    settings = settings_of(config)
    _check_key_id(key_id)
    der, overlap_s = read_key(public_key, "--public-key", parse_public_key), overlap_of(overlap, most_days=30)

    async def work() -> ApiKey:
        async with open_store(settings) as store:
            return await apikeys.rotate_public_key(store.database, key_id, der, fingerprint(der), overlap_s)

    rotated = complete(work())
    if as_json:
        put_json(_key_json(rotated))
    else:
        say(f"Key {key_id} has the public key {fingerprint(der)}, valid from now on.")
        say(f"Its other public keys: {f'valid for {overlap} more at most' if overlap_s else 'not valid any longer'}.")


def _check_key_id(text: str) -> None:
    if not _KEY_ID.fullmatch(text):
        raise InputError("a key id is 'key-' and 16 hexadecimal digits: take one that 'vaultevents key list' shows")


def _public_key_text(stored: PublicKey) -> str:
    end = "" if stored.valid_until is None else f" until {stored.valid_until.isoformat(timespec='seconds')}"
    return f"{stored.fingerprint}{end}"


def _key_json(stored: ApiKey) -> dict[str, object]:
    return {
        "id": stored.id,
        "accountId": stored.account_id,
        "name": stored.name,
        "role": stored.role,
        "allowedNetworks": stored.allowed,
        "createdAt": stored.created_at,
        "revokedAt": stored.revoked_at,
        "publicKeys": [
            {"fingerprint": public.fingerprint, "createdAt": public.created_at, "validUntil": public.valid_until}
            for public in stored.public_keys
        ],
    }
