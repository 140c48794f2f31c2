"""The one network that a database belongs to, pinned at first contact (decisions E10)."""

from __future__ import annotations

from vaultevents.core.errors import WrongNetwork
from vaultevents.core.units import Hash32, hex_text
from vaultevents.store.pool import Database


async def pinned(database: Database) -> tuple[int, Hash32] | None:
    """Chain id and hash of block 0, or None before the first contact."""
    async with database.transaction() as connection:
        row = await connection.fetchrow("select chain_id, genesis_hash from network")
    return (int(row["chain_id"]), Hash32(row["genesis_hash"])) if row else None


async def pin(database: Database, chain_id: int, genesis_hash: Hash32) -> None:
    """Pins the network, or compares it with the pinned one; raises `WrongNetwork`."""
    async with database.transaction() as connection:
        await connection.execute(
            "insert into network (chain_id, genesis_hash) values ($1, $2) on conflict do nothing",
            chain_id,
            genesis_hash,
        )
        row = await connection.fetchrow("select chain_id, genesis_hash from network")
    if (int(row["chain_id"]), row["genesis_hash"]) != (chain_id, genesis_hash):
        raise WrongNetwork(
            f"the execution node is of chain {chain_id} (block 0 {hex_text(genesis_hash)}), but this database belongs "
            f"to chain {int(row['chain_id'])} (block 0 {hex_text(row['genesis_hash'])}): "
            "point execution.urls at a node of that chain, or use another database (or data_dir) for this one"
        )
