"""How far the deposits of registered vaults were read, and the public keys that they name (rule C5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from vaultevents.core.units import Address, Hash32, Pubkey
from vaultevents.store.pool import Connection, Database


@dataclass(frozen=True, slots=True)
class DepositSearch:
    """The deposits of `vaults` were read up to block `position`, which has the hash `anchor`.

    `next_deposit` is the index that the next deposit of anyone has, and `last_deposit_block` the block of the last one.
    """

    id: int
    vaults: frozenset[Address]
    position: int
    anchor: Hash32 | None
    next_deposit: int | None
    last_deposit_block: int | None


@dataclass(frozen=True, slots=True)
class StoredDeposit:
    """The first deposit of a public key for a vault."""

    pubkey: Pubkey
    vault: Address
    block_number: int


async def deposit_searches(database: Database) -> list[DepositSearch]:
    """All searches, those that are furthest first."""
    async with database.transaction() as connection:
        rows = await connection.fetch("select * from deposit_searches order by position desc, id")
    return [
        DepositSearch(
            row["id"],
            frozenset(Address(address) for address in row["vaults"]),
            row["position"],
            None if row["anchor"] is None else Hash32(row["anchor"]),
            row["next_deposit"],
            row["last_deposit_block"],
        )
        for row in rows
    ]


async def begin_deposit_search(database: Database, vaults: Collection[Address], first_block: int) -> None:
    """Begin a search for `vaults`. The contract counts from 0, so from block 0 on the first index is known."""
    async with database.transaction() as connection:
        await connection.execute("lock table deposit_searches in share row exclusive mode")
        rows = await connection.fetch("select unnest(vaults) as address from deposit_searches")
        new = set(vaults) - {row["address"] for row in rows}  # another process may have begun
        if new:
            await connection.execute(
                "insert into deposit_searches (vaults, position, next_deposit) values ($1, $2, $3)",
                sorted(new),
                first_block - 1,
                0 if first_block == 0 else None,
            )


async def save_deposit_search(
    database: Database, before: DepositSearch, now: DepositSearch, deposits: Iterable[StoredDeposit] = ()
) -> bool:
    """Store the deposits that were found and how far the search is now; False when another process was faster.

    Searches that are equally far become one.
    """
    async with database.transaction() as connection:
        await connection.execute("lock table deposit_searches in share row exclusive mode")
        moved = await connection.fetchval(
            "update deposit_searches set position = $3, anchor = $4, next_deposit = $5, last_deposit_block = $6"
            " where id = $1 and position = $2 returning id",
            now.id,
            before.position,
            now.position,
            now.anchor,
            now.next_deposit,
            now.last_deposit_block,
        )
        if moved is None:
            return False
        found = list(deposits)
        await connection.execute(
            "insert into deposits (pubkey, vault, block_number)"
            " select * from unnest($1::bytea[], $2::bytea[], $3::bigint[]) on conflict do nothing",
            [deposit.pubkey for deposit in found],
            [deposit.vault for deposit in found],
            [deposit.block_number for deposit in found],
        )
        await _unite(connection, now)
    return True


async def _unite(connection: Connection, search: DepositSearch) -> None:
    """Let a search that is as far as this one look for the vaults of both."""
    rows = await connection.fetch(
        "delete from deposit_searches where position = $1 and anchor = $2 and id <> $3 returning vaults",
        search.position,
        search.anchor,
        search.id,
    )
    if rows:
        vaults = search.vaults.union(*(row["vaults"] for row in rows))
        await connection.execute("update deposit_searches set vaults = $2 where id = $1", search.id, sorted(vaults))


async def undiscovered(database: Database, vaults: Collection[Address]) -> list[Pubkey]:
    """The deposited public keys for `vaults` of which no validator is known yet."""
    async with database.transaction() as connection:
        rows = await connection.fetch(
            "select distinct pubkey from deposits d where vault = any ($1::bytea[])"
            " and not exists (select 1 from validators v where v.pubkey = d.pubkey) order by pubkey",
            sorted(vaults),
        )
    return [Pubkey(row["pubkey"]) for row in rows]
