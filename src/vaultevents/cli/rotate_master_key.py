"""rotate-master-key: seals everything with another master key (rule D2)."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.progress import RowProgress
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, say
from vaultevents.config import Settings
from vaultevents.core.environment import NEW_KEY_VARIABLE
from vaultevents.core.errors import InputError
from vaultevents.core.sealing import NONCE_BYTES, MasterKey, parse_master_key
from vaultevents.store.rotation import reseal
from vaultevents.wiring.database import open_rotation
from vaultevents.wiring.key_files import put_away_former_key, read_key_file


def rotate_master_key(
    new_key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"The file with the new master key, if it is not in {NEW_KEY_VARIABLE}. The embedded database needs "
            "neither: its key file is replaced.",
            metavar="FILE",
        ),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Seal every secret with another master key.

    It may be ended at any point and started again. A daemon may run meanwhile if it was started with the new key and,
    as the previous one, the former key.
    """
    settings = settings_of(config)
    text = os.environ.get(NEW_KEY_VARIABLE)
    if text and new_key_file is not None:
        raise InputError(f"--new-key-file and {NEW_KEY_VARIABLE} both name a new master key: give one of them")
    key, rows, kept = complete(_rotated(settings, text or None, new_key_file))
    if as_json:
        put_json({"keyId": key.id, "resealed": rows, "formerKeyFile": str(kept) if kept else None})
        return
    say(f"Everything is sealed with the master key {key.id} now; {rows} rows were not before.")
    if text or new_key_file is not None:
        say("Make it the master key of the configuration; keep the former one only for backups from before.")
    elif kept is not None:
        say(f"The former one is {kept}: copy the new key, and remove the former one with the last backup from before.")


async def _rotated(settings: Settings, text: str | None, file: Path | None) -> tuple[MasterKey, int, Path | None]:
    def new_key(previous: MasterKey) -> MasterKey:
        if file is None:
            return parse_master_key(text or "", previous)
        return read_key_file(file, previous, advice="make one with 'openssl rand -base64 32', mode 0600")

    async with open_rotation(settings, new_key if text or file else None) as rotation:
        with RowProgress("rotation", "secrets") as progress:
            rows = await reseal(
                rotation.database, rotation.key, lambda: secrets.token_bytes(NONCE_BYTES), progress.advanced
            )
    return rotation.key, rows, None if rotation.former is None else put_away_former_key(rotation.former)
