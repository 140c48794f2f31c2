"""The second factor of an account, as operators enrol and reset it (rule A15)."""

from __future__ import annotations

from typing import Final

from vaultevents.core.actor import acting
from vaultevents.core.errors import InputError
from vaultevents.core.sealing import MasterKey, Secret, seal
from vaultevents.store.accounts import require_account
from vaultevents.store.audit_log import record
from vaultevents.store.pool import Database


def seed_aad(account_id: str) -> str:
    """What binds a sealed seed to its row."""
    return f"mfa {account_id}"


async def enroll(database: Database, account_id: str, seed: Secret, key: MasterKey, nonce: bytes) -> None:
    """Gives an account its factor. Raises `InputError` where there is one already."""
    async with database.transaction() as connection:
        await require_account(connection, account_id)
        done = await connection.execute(
            "insert into mfa_factors (account_id, key_id, sealed) values ($1, $2, $3) on conflict do nothing",
            account_id,
            key.id,
            seal(key, seed, seed_aad(account_id), nonce),
        )
        if done == "INSERT 0 0":
            raise InputError(
                f"account '{account_id}' has a second factor already: 'vaultevents mfa reset {account_id}' removes it"
            )
        await record(connection, acting(), "mfa.enroll", account_id, account_id=account_id, after=_ENROLLED)


async def reset(database: Database, account_id: str) -> None:
    """Removes the factor and its lock; the account cannot change webhooks until it is enrolled again."""
    async with database.transaction() as connection:
        await require_account(connection, account_id)
        done = await connection.execute("delete from mfa_factors where account_id = $1", account_id)
        if done == "DELETE 0":
            raise InputError(f"account '{account_id}' has no second factor: make one with 'vaultevents mfa enroll'")
        await record(connection, acting(), "mfa.reset", account_id, account_id=account_id, before=_ENROLLED)


_ENROLLED: Final = {"enrolled": True}
"""The state of an account with a factor, as the audit log digests it."""
