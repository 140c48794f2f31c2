"""The one network that a database belongs to, pinned at first contact (rule E10)."""

from __future__ import annotations

from vaultevents.core.chaintime import ChainTime
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


async def pin_beacon(database: Database, root: Hash32, time: ChainTime) -> None:
    """Pins the beacon chain beside the execution chain, or compares it with the pinned one; raises `WrongNetwork`."""
    async with database.transaction() as connection:
        await connection.execute(
            "update network set genesis_validators_root = $1, genesis_s = $2, slot_ms = $3, slots_per_epoch = $4"
            " where genesis_validators_root is null",
            root,
            time.genesis_s,
            time.slot_ms,
            time.slots_per_epoch,
        )
    known = await pinned_beacon(database)
    if known != (root, time):
        ours = (
            "not known: it must meet its execution node first" if known is None else f"{hex_text(known[0])}, {known[1]}"
        )
        raise WrongNetwork(
            f"the beacon node is of another network (genesis_validators_root {hex_text(root)}, {time}) than this "
            f"database ({ours}): point beacon.urls at a node of that network, or use another database (or data_dir)"
        )


async def pinned_beacon(database: Database) -> tuple[Hash32, ChainTime] | None:
    """genesis_validators_root and time of the beacon chain, or None before the first contact."""
    async with database.transaction() as connection:
        row = await connection.fetchrow(
            "select genesis_validators_root, genesis_s, slot_ms, slots_per_epoch from network"
            " where genesis_validators_root is not null"
        )
    if row is None:
        return None
    return Hash32(row["genesis_validators_root"]), ChainTime(row["genesis_s"], row["slot_ms"], row["slots_per_epoch"])
