"""API keys and the public keys that their requests are signed with (rule A14).

Operators add, rotate and revoke them; the API finds them in a `KeyRing`, which it keeps in memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from vaultevents.core.actor import acting
from vaultevents.core.errors import InputError
from vaultevents.core.sealing import HashKey, MasterKey, Secret, open_sealed, seal
from vaultevents.store.accounts import require_account
from vaultevents.store.audit_log import record
from vaultevents.store.key_uses import KeyUses
from vaultevents.store.pool import Connection, Database
from vaultevents.store.versions import change_version

Role = Literal["read", "manage"]

HASH_KEY_AAD: Final = "hash key"
MAX_AGE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class PublicKey:
    """One public key of an API key; `valid_until` is set once another one takes over."""

    fingerprint: str
    der: bytes
    created_at: datetime
    valid_until: datetime | None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key without its secret; `allowed` are networks in CIDR notation, None: from anywhere."""

    id: str
    account_id: str
    name: str
    role: Role
    allowed: tuple[str, ...] | None
    created_at: datetime
    revoked_at: datetime | None
    public_keys: tuple[PublicKey, ...]


async def hash_key(database: Database, key: MasterKey, fresh: bytes, nonce: bytes) -> HashKey:
    """The key under which API keys are hashed; `fresh` becomes it where there is none yet."""
    async with database.transaction() as connection:
        await connection.execute(
            "insert into hash_key (key_id, sealed) values ($1, $2) on conflict do nothing",
            key.id,
            seal(key, Secret(fresh.hex()), HASH_KEY_AAD, nonce),
        )
        sealed = await connection.fetchval("select sealed from hash_key")
    return HashKey(bytes.fromhex(open_sealed(key, sealed, HASH_KEY_AAD).reveal()))


async def add_key(
    database: Database,
    key_id: str,
    account_id: str,
    name: str,
    role: Role,
    hashed: bytes,
    allowed: tuple[str, ...] | None,
    der: bytes,
    fingerprint: str,
) -> ApiKey:
    """Stores a key whose secret only its owner has. Raises `InputError` for an unknown account."""
    async with database.transaction() as connection:
        await require_account(connection, account_id)
        await connection.execute(
            "insert into api_keys (id, account_id, name, role, hash, allowed) values ($1, $2, $3, $4, $5, $6)",
            key_id,
            account_id,
            name,
            role,
            hashed,
            allowed,
        )
        await _add_public_key(connection, key_id, der, fingerprint)
        added = await _key(connection, key_id)
        await record(connection, acting(), "key.add", key_id, account_id=account_id, after=added)
        return added


async def list_keys(database: Database, account_id: str | None) -> list[ApiKey]:
    """All keys, or those of one account, oldest first; the revoked ones, too."""
    async with database.transaction() as connection:
        return [key for _, key in await _keys(connection, account_id=account_id)]


async def revoke_key(database: Database, key_id: str) -> ApiKey:
    """No request passes with it any longer, at once here and within a second elsewhere."""
    async with database.transaction() as connection:
        before = await _valid_key(connection, key_id)
        await connection.execute("update api_keys set revoked_at = db_now() where id = $1", key_id)
        await change_version(connection, "key_ring")
        revoked = await _key(connection, key_id)
        account_id = revoked.account_id
        await record(connection, acting(), "key.revoke", key_id, account_id=account_id, before=before, after=revoked)
        return revoked


async def rotate_public_key(database: Database, key_id: str, der: bytes, fingerprint: str, overlap_s: float) -> ApiKey:
    """Adds a public key, valid at once; the others of this API key are valid for `overlap_s` more at most."""
    async with database.transaction() as connection:
        before = await _valid_key(connection, key_id)
        if await connection.fetchval(
            "select 1 from api_public_keys where api_key_id = $1 and fingerprint = $2", key_id, fingerprint
        ):
            raise InputError(f"'{key_id}' has the public key {fingerprint} already: make a new pair")
        await connection.execute(
            "update api_public_keys set valid_until = least(valid_until, db_now() + make_interval(secs => $2))"
            " where api_key_id = $1",
            key_id,
            overlap_s,
        )
        await _add_public_key(connection, key_id, der, fingerprint)
        rotated = await _key(connection, key_id)
        account_id = rotated.account_id
        await record(connection, acting(), "key.rotate", key_id, account_id=account_id, before=before, after=rotated)
        return rotated


async def _valid_key(connection: Connection, key_id: str) -> ApiKey:
    """Lock an API key for a change and return it. Raises `InputError` for one that is revoked or unknown."""
    if not await connection.fetchval("select 1 from api_keys where id = $1 and revoked_at is null for update", key_id):
        raise InputError(f"there is no API key '{key_id}' that is not revoked: 'vaultevents key list' shows them")
    return await _key(connection, key_id)


async def _key(connection: Connection, key_id: str) -> ApiKey:
    ((_, key),) = await _keys(connection, key_id=key_id)
    return key


async def _add_public_key(connection: Connection, key_id: str, der: bytes, fingerprint: str) -> None:
    await connection.execute(
        "insert into api_public_keys (api_key_id, fingerprint, der) values ($1, $2, $3)", key_id, fingerprint, der
    )
    await change_version(connection, "key_ring")


async def _keys(
    connection: Connection, *, account_id: str | None = None, key_id: str | None = None
) -> list[tuple[bytes, ApiKey]]:
    """Keys with their hashes."""
    public: defaultdict[str, list[PublicKey]] = defaultdict(list)
    for row in await connection.fetch(
        "select p.* from api_public_keys p join api_keys k on k.id = p.api_key_id"
        " where (k.account_id = $1 or $1 is null) and (k.id = $2 or $2 is null) order by p.created_at, p.fingerprint",
        account_id,
        key_id,
    ):
        public[row["api_key_id"]].append(
            PublicKey(row["fingerprint"], row["der"], row["created_at"], row["valid_until"])
        )
    rows = await connection.fetch(
        "select * from api_keys where (account_id = $1 or $1 is null) and (id = $2 or $2 is null)"
        " order by created_at, id",
        account_id,
        key_id,
    )
    return [
        (
            row["hash"],
            ApiKey(
                row["id"],
                row["account_id"],
                row["name"],
                row["role"],
                None if row["allowed"] is None else tuple(row["allowed"]),
                row["created_at"],
                row["revoked_at"],
                tuple(public[row["id"]]),
            ),
        )
        for row in rows
    ]


class KeyRing:
    """Every key that is not revoked, by its hash: never older than half a second when it is asked.

    One cheap query reports whether anything changed, for all requests that wait for it. `uses` has when keys were used.
    """

    def __init__(
        self, database: Database, max_age_s: float = MAX_AGE_S, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.uses = KeyUses(database)
        self._database = database
        self._max_age_s = max_age_s
        self._monotonic = monotonic
        self._checking: asyncio.Task[None] | None = None
        self._version: int | None = None
        self._losses = database.losses
        self._checked_at_s = float("-inf")
        self._keys: dict[bytes, ApiKey] = {}

    async def fresh(self) -> None:
        """Makes sure that the ring is fresh. Raises `DatabaseUnavailable`: a key may have been revoked meanwhile."""
        if self._is_fresh():
            return
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        await asyncio.shield(self._checking)  # one answer for all who wait, also when there is none

    def find(self, hashed: bytes) -> ApiKey | None:
        return self._keys.get(hashed)

    def _is_fresh(self) -> bool:
        return self._monotonic() - self._checked_at_s < self._max_age_s

    async def _check(self) -> None:
        begun_s, losses = self._monotonic(), self._database.losses
        async with self._database.transaction() as connection:
            version = await connection.fetchval("select version from key_ring")
            if version != self._version or losses != self._losses:
                self._keys = {hashed: key for hashed, key in await _keys(connection) if key.revoked_at is None}
                self._version, self._losses = version, losses
        self._checked_at_s = begun_s
