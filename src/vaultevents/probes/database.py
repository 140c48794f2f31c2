"""Probes of the database: version, rights, writing, clock; and of the master key with which its secrets are sealed."""

from __future__ import annotations

import stat
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final

from vaultevents.core.errors import VaulteventsError
from vaultevents.core.findings import Finding, failed, passed, warned
from vaultevents.core.sealing import MasterKey
from vaultevents.probes.probe import Probe, attempt
from vaultevents.probes.shared import Shared
from vaultevents.store.health import write_probe
from vaultevents.store.inspection import count_events, inspect, open_secrets, try_api_role
from vaultevents.store.pool import Database
from vaultevents.store.rotation import sealed_key_ids, sealing_with
from vaultevents.wiring import key_files
from vaultevents.wiring.database import check_key

CLOCK_WARNS_S: Final = 2.0
CLOCK_FAILS_S: Final = 10.0
"""Tokens of the API count for 30 s, and notices of delays begin with seconds."""


def database_probes(shared: Shared) -> list[Probe]:
    """Return the probes of the database and of the master key."""
    return [
        Probe("database", partial(_database, shared), within_s=120.0),
        Probe("master key", partial(_master_key, shared), within_s=120.0),
    ]


async def _database(shared: Shared) -> AsyncIterator[Finding]:
    opened = await shared.opened()
    database, facts = opened.database, await inspect(opened.database)
    if facts.is_standby:
        yield failed(
            "database",
            f"PostgreSQL {facts.version} is a standby, which cannot be written to",
            "Let database_url lead to the primary",
        )
        return
    if facts.encoding != "UTF8":
        yield failed(
            "database",
            f"its encoding is {facts.encoding}, which cannot hold every text",
            "Create a database with encoding UTF8 and name it in database_url",
        )
    if facts.missing:
        yield failed(
            "database",
            f"the user {facts.user} lacks {', '.join(facts.missing)}",
            f"Let it own the schema {shared.settings.database_schema}, or grant it what is missing",
        )
        return
    place = "embedded" if opened.embedded is not None else "its own server"
    yield passed(
        "database",
        f"PostgreSQL {facts.version} ({place}), {await count_events(database)} events, encoding {facts.encoding}, "
        f"schema {shared.settings.database_schema} at {facts.migration.removesuffix('.sql')}; no extension is needed",
    )
    yield await attempt("database role", partial(_role, database, facts.user))
    yield await attempt("database writes", partial(_writes, database), "See whether its disk is full")
    yield await attempt("database clock", partial(_clock, database))


async def _role(database: Database, user: str) -> Finding:
    await try_api_role(database)
    return passed("database role", f"{user} has every right that is needed, and the role of the API works")


async def _writes(database: Database) -> Finding:
    await write_probe(database)
    return passed("database writes", "a row was written and space was claimed")


async def _clock(database: Database) -> Finding:
    before_s = time.time()
    there_s = (await database.now()).timestamp()
    skew_s = there_s - (before_s + time.time()) / 2
    ahead = "ahead of" if skew_s > 0 else "behind"
    text = f"the clock of the database is {abs(skew_s):.1f} s {ahead} that of this host"
    if abs(skew_s) > CLOCK_FAILS_S:
        return failed("database clock", text, "Set both clocks (NTP)")
    if abs(skew_s) > CLOCK_WARNS_S:
        return warned("database clock", text, "Set both clocks (NTP)")
    return passed("database clock", text)


async def _master_key(shared: Shared) -> AsyncIterator[Finding]:
    subject, settings = "master key", shared.settings
    try:
        opened = await shared.opened()
    except VaulteventsError:
        key = key_files.given_key(settings, make=False)
        yield warned(subject, f"{key.id} can be read; not compared, because the database cannot be used")
        return
    in_use = await sealed_key_ids(opened.database)
    key = key_files.given_key(settings, make=not in_use)
    check_key(key, in_use)
    async with sealing_with(opened.target, settings.database_schema, key.id):
        secrets = await open_secrets(opened.database, key)
    yield passed(subject, f"{key.id} opens the stored secrets ({secrets} were tried)")
    yield _key_file(_file_of_key(shared), key)


def _file_of_key(shared: Shared) -> Path | None:
    """Return the file that holds the master key; None where the environment holds it."""
    settings = shared.settings
    if settings.master_key is not None:
        return None
    return settings.master_key_file or key_files.own_file(settings)


def _key_file(path: Path | None, key: MasterKey) -> Finding:
    subject = "master key file"
    if path is None:
        return passed(subject, "none: the key is in the environment")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return warned(subject, f"{path} has mode {mode:04o}, so other users can read {key.id}", f"Run chmod 600 {path}")
    return passed(subject, f"{path} has mode {mode:04o}")
