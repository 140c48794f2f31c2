"""Load and lock the registry: the vaults of all accounts for which events are derived (rule C9).

A registration locks it; a commit of events shares it, and names the version that its events were derived with.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from vaultevents.core.registry import Registry, Vault, VaultSpan
from vaultevents.core.units import Address
from vaultevents.store.pool import Connection, Database


@dataclass(frozen=True, slots=True)
class RegistryState:
    """What changes with each registration, and with each change of a webhook's filter."""

    version: int
    filter_revision: int


async def lock_registry(connection: Connection) -> None:
    """Lock the registry for a change until the transaction ends (rules C9 and D9).

    Waits until no commit of events is under way, and keeps new ones out.
    """
    await connection.execute("select 1 from registry for update")


async def share_registry(connection: Connection) -> RegistryState:
    """Return the state of the registry, and keep changes out until the transaction ends; others may share it."""
    row = await connection.fetchrow("select version, filter_revision from registry for share")
    assert row is not None
    return RegistryState(row["version"], row["filter_revision"])


async def registry_version(connection: Connection) -> int:
    """Return the version of the registry as it is now; a commit names the one it was derived with (rule C9)."""
    version: int = await connection.fetchval("select version from registry")
    return version


async def current_registry(database: Database) -> Registry:
    """Load the registry as it is now, in one snapshot: no registration falls between its version and its vaults."""
    async with database.transaction() as connection:
        await connection.execute("set transaction isolation level repeatable read")
        return Registry(await registry_version(connection), await load_vaults(connection))


async def load_vaults(connection: Connection, account_id: str | None = None) -> list[Vault]:
    """Load the vaults of an account or of all with their spans, by account and id."""
    spans = defaultdict(list)
    for row in await connection.fetch(
        "select * from vault_spans where account_id = $1 or $1 is null order by account_id, vault_id, ordinal",
        account_id,
    ):
        span = VaultSpan(
            row["first_block"],
            row["last_block"],
            row["deliver_from"],
            row["first_time_s"],
            row["last_time_s"],
            row["quiet_time_s"],
        )
        spans[row["account_id"], row["vault_id"]].append(span)
    rows = await connection.fetch(
        "select account_id, id, address, queue from vaults where account_id = $1 or $1 is null order by account_id, id",
        account_id,
    )
    return [
        Vault(
            row["account_id"],
            row["id"],
            Address(row["address"]),
            Address(row["queue"]) if row["queue"] is not None else None,
            tuple(spans[row["account_id"], row["id"]]),
        )
        for row in rows
    ]


async def first_block(connection: Connection) -> int | None:
    """Return the earliest block for which anything is registered."""
    found: int | None = await connection.fetchval("select min(first_block) from vault_spans")
    return found
