"""The master key where the operator put it, or in the file that is made beside the embedded database (rule D2)."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from vaultevents.config import Settings
from vaultevents.core.errors import ConfigError
from vaultevents.core.sealing import KEY_BYTES, MasterKey, parse_master_key
from vaultevents.store.postgres.layout import sync_folder

log = structlog.get_logger("daemon")


def given_key(settings: Settings, *, make: bool) -> MasterKey:
    """From the environment or a file; the embedded database gets a key file of its own, if allowed (rule D2)."""
    if settings.master_key is not None:
        return _after(_previous_key(settings), partial(parse_master_key, settings.master_key.get_secret_value()))
    path = settings.master_key_file
    if path is None:
        if settings.database_url is not None:
            raise ConfigError(
                "database_url needs a master key, with which webhook secrets are sealed: set VAULTEVENTS_MASTER_KEY "
                "or master_key_file to 32 bytes in base64 ('openssl rand -base64 32'), and keep a copy"
            )
        path = own_file(settings)
        if make and not path.exists():
            _write_key(path, os.link)
    advice = "make one with 'openssl rand -base64 32', mode 0600" if make else "restore it from its copy"
    return _after(_previous_key(settings), partial(read_key_file, path, advice=advice))


def _after(previous: MasterKey | None, parse: Callable[[MasterKey | None], MasterKey]) -> MasterKey:
    """The key that knows its previous one; nothing precedes itself."""
    key = parse(previous)
    return parse(None) if previous is not None and previous.id == key.id else key


def _previous_key(settings: Settings) -> MasterKey | None:
    """The former key, while keys are rotated."""
    if settings.master_key_previous is not None:
        return parse_master_key(settings.master_key_previous.get_secret_value())
    path = settings.master_key_previous_file
    if path is None and is_replaced(settings):
        path = former_file(settings)
    return None if path is None else read_key_file(path, advice="remove the setting that names it, or restore it")


def is_own_file(settings: Settings) -> bool:
    """Whether the key is in a file that this service made beside the embedded database."""
    return all(given is None for given in (settings.master_key, settings.master_key_file, settings.database_url))


def own_file(settings: Settings) -> Path:
    return settings.directory / "master.key"


def former_file(settings: Settings) -> Path:
    return settings.directory / "master.key.old"


def is_replaced(settings: Settings) -> bool:
    """Whether that key file is being replaced."""
    return is_own_file(settings) and former_file(settings).exists()


def read_key_file(path: Path, previous: MasterKey | None = None, *, advice: str) -> MasterKey:
    """The master key in a file; `advice` is what to do where there is none. Raises `ConfigError`, which quotes none."""
    try:
        return parse_master_key(path.read_text(encoding="ascii"), previous)
    except FileNotFoundError:
        raise ConfigError(f"the master key file {path} is missing: {advice}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the master key file {path} ({error.strerror}): make it readable") from None
    except (ConfigError, UnicodeDecodeError):
        raise ConfigError(f"{path} holds no master key: restore it from its copy") from None


def renew_key(path: Path) -> None:
    """Another key in the place of this one, which is kept as `.old`: there is no moment without both of them."""
    former = path.with_name(f"{path.name}.old")
    try:
        with contextlib.suppress(FileExistsError):  # the same key: this was ended here before
            os.link(path, former)
        sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot keep the former key as {former} ({error.strerror}): fix that first") from None
    _write_key(path, os.replace)


def put_away_former_key(path: Path) -> Path:
    """Name the file of a key that seals nothing any longer by its id: only backups still need it (rule D2)."""
    kept = path.with_suffix(f".{read_key_file(path, advice='it is put away already').id}")
    try:
        path.replace(kept)
        sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"all is sealed with the new key, but {path} stays ({error.strerror}): move it") from None
    return kept


def _write_key(path: Path, put: Callable[[str, Path], None]) -> None:
    """A new key, whole or not at all, on the disk before anything is sealed with it.

    `put` brings the written file to its place: `os.link` never over one that was just written, `os.replace` always.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                put(name, path)
                log.info("master_key_made", path=str(path))
        finally:
            Path(name).unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(
            f"cannot write the master key file {path} ({error.strerror}): fix that, or choose another data_dir"
        ) from None
