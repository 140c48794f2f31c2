"""Accounts and vaults: what is registered, for which blocks, and the backfills that this needs (rules C9 and E12)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from vaultevents.core.actor import acting
from vaultevents.core.errors import InputError
from vaultevents.core.registry import Vault, check_id
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, checksum
from vaultevents.store.audit_log import record
from vaultevents.store.cursors import EPOCH_STREAMS, backfill
from vaultevents.store.pool import Connection, Database
from vaultevents.store.registry import load_vaults, lock_registry
from vaultevents.store.reports import reopen_reports
from vaultevents.store.versions import change_version


@dataclass(frozen=True, slots=True)
class Account:
    id: str
    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Registered:
    """What a registration changed: the vault as it is now, and the blocks that will be read again for it."""

    vault: Vault
    backfills: tuple[Span, ...]


async def add_account(database: Database, account_id: str, name: str) -> Account:
    check_id(account_id, "an account id")
    async with database.transaction() as connection:
        await lock_registry(connection)
        row = await connection.fetchrow(
            "insert into accounts (id, name) values ($1, $2) on conflict do nothing returning *", account_id, name
        )
        if row is None:
            raise InputError(f"there is already an account '{account_id}': ids never change, so choose another one")
        added = Account(**row)
        await record(connection, acting(), "account.add", account_id, account_id=account_id, after=added)
        return added


async def accounts(database: Database) -> list[Account]:
    async with database.transaction() as connection:
        return [Account(**row) for row in await connection.fetch("select * from accounts order by id")]


async def require_account(connection: Connection, account_id: str) -> None:
    if not await connection.fetchval("select 1 from accounts where id = $1", account_id):
        raise _no_account(account_id)


def _no_account(account_id: str) -> InputError:
    return InputError(f"there is no account '{account_id}': add it with 'vaultevents account add {account_id}'")


async def account_facts(connection: Connection, account_id: str) -> tuple[Account, bool]:
    """An account, and whether it has a second factor. Raises `InputError` when there is none."""
    row = await connection.fetchrow(
        "select *, exists (select from mfa_factors f where f.account_id = a.id) as enrolled from accounts a"
        " where id = $1",
        account_id,
    )
    if row is None:
        raise _no_account(account_id)
    return Account(row["id"], row["name"], row["created_at"]), row["enrolled"]


async def vaults_of(connection: Connection, account_id: str) -> list[Vault]:
    """The vaults of an account that are registered now, in the order in which Python compares their ids."""
    found = await load_vaults(connection, account_id)
    # a vault without a span was registered between the two queries
    present = [vault for vault in found if vault.spans and vault.spans[-1].last is None]
    return sorted(present, key=lambda vault: vault.id)


async def check_account(database: Database, account_id: str) -> None:
    """Raise `InputError` where there is no such account."""
    async with database.transaction() as connection:
        await require_account(connection, account_id)


async def check_addresses(
    database: Database, account_id: str, vault_id: str, address: Address, queue: Address | None
) -> None:
    """Raise the `InputError` of `add_vault` where an id or an address belongs to another vault of the account."""
    async with database.transaction() as connection:
        await require_account(connection, account_id)
        _check_addresses(vault_id, address, queue, await load_vaults(connection, account_id))


async def add_vault(
    database: Database,
    account_id: str,
    vault_id: str,
    address: Address,
    queue: Address | None,
    first_block: int,
    *,
    deliver: bool = True,
) -> Registered:
    """Registers a vault from `first_block` on, or amends one: an earlier start, or a queue it did not have.

    What lies between its start and the live cursor of a stream is read by a backfill, written in this transaction.
    With `deliver=False` the events of that part are stored and sent to nobody (rule D13).
    Raises `InputError`, also where one part of a span would have to be delivered and another not.
    """
    check_id(vault_id, "a vault id")
    async with database.transaction() as connection:
        await lock_registry(connection)
        await require_account(connection, account_id)
        before = {vault.id: vault for vault in await load_vaults(connection, account_id)}
        _check_addresses(vault_id, address, queue, before.values())
        old = before.get(vault_id)
        deliver_from = 0 if deliver else await _live_start(connection)
        if old is None:
            await connection.execute(
                "insert into vaults (account_id, id, address, queue) values ($1, $2, $3, $4)",
                account_id,
                vault_id,
                address,
                queue,
            )
        gains_queue = old is not None and queue is not None and old.queue is None
        if old is not None and deliver:
            _refuse_hushed(old, first_block, gains_queue=gains_queue)
        elif old is not None and gains_queue:
            await _refuse_hushing(connection, old)
        if gains_queue:
            await connection.execute(
                "update vaults set queue = $3 where account_id = $1 and id = $2", account_id, vault_id, queue
            )
            await connection.execute(
                "update vault_spans set deliver_from = greatest(deliver_from, $3), quiet_time_s = null"
                " where account_id = $1 and vault_id = $2",
                account_id,
                vault_id,
                deliver_from,
            )
        gains_blocks = await _open_span(connection, account_id, vault_id, old, first_block, deliver_from)
        if not (gains_queue or gains_blocks):
            raise InputError(f"vault '{vault_id}' of account '{account_id}' is already registered like this")
        await change_version(connection, "registry")
        vault = next(vault for vault in await load_vaults(connection, account_id) if vault.id == vault_id)
        begin = min(span.first for span in vault.spans) if gains_queue else first_block
        await backfill(connection, "reports", begin)
        await reopen_reports(connection, begin)
        backfills = tuple(await backfill(connection, "logs", begin))
        await record(connection, acting(), "vault.add", vault_id, account_id=account_id, before=old, after=vault)
        return Registered(vault, backfills)


@dataclass(frozen=True, slots=True)
class NewVault:
    """A vault to register from `first_block` on."""

    id: str
    address: Address
    queue: Address | None
    first_block: int


async def add_vaults(database: Database, account_id: str, wanted: Sequence[NewVault]) -> list[Span]:
    """Register in one transaction those vaults whose addresses the account never had.

    Return the blocks that will be read again for them. Raises `InputError` where an id or a queue is another vault's.
    """
    async with database.transaction() as connection:
        await lock_registry(connection)
        await require_account(connection, account_id)
        present = await load_vaults(connection, account_id)
        known = {vault.address for vault in present}
        new = [vault for vault in wanted if vault.address not in known]
        if not new:
            return []
        _check_new(new, present)
        await connection.executemany(
            "insert into vaults (account_id, id, address, queue) values ($1, $2, $3, $4)",
            [(account_id, vault.id, vault.address, vault.queue) for vault in new],
        )
        await connection.executemany(
            "insert into vault_spans (account_id, vault_id, ordinal, first_block, deliver_from)"
            " values ($1, $2, 1, $3, 0)",
            [(account_id, vault.id, vault.first_block) for vault in new],
        )
        await change_version(connection, "registry")
        begin = min(vault.first_block for vault in new)
        await backfill(connection, "reports", begin)
        await reopen_reports(connection, begin)
        backfills = await backfill(connection, "logs", begin)
        added = {vault.id: vault for vault in await load_vaults(connection, account_id)}
        for vault_id in sorted(vault.id for vault in new):
            await record(connection, acting(), "vault.add", vault_id, account_id=account_id, after=added[vault_id])
        return backfills


def _check_new(new: Sequence[NewVault], present: Iterable[Vault]) -> None:
    """Within one account an id, a vault address and a queue address each occur once (rule E9)."""
    ids: dict[str, Address] = {}
    queues: dict[Address, str] = {}
    every: list[Vault | NewVault] = [*present, *new]
    for vault in every:
        if ids.setdefault(vault.id, vault.address) != vault.address:
            raise InputError(
                f"vault '{vault.id}' has the address {checksum(ids[vault.id])}, which never changes: register "
                f"{checksum(vault.address)} with 'vaultevents vault add' under another id"
            )
        if vault.queue is not None and queues.setdefault(vault.queue, vault.id) != vault.id:
            raise InputError(
                f"{checksum(vault.queue)} is already the withdrawal queue of vault '{queues[vault.queue]}'"
            )


async def remove_vault(database: Database, account_id: str, vault_id: str, last_block: int) -> Vault:
    """Closes the open span at `last_block`, or at the live cursor where that is further; deletes nothing (rule E12)."""
    async with database.transaction() as connection:
        await lock_registry(connection)
        before = {vault.id: vault for vault in await load_vaults(connection, account_id)}
        live = await connection.fetchval("select max(position) from cursors where kind = 'live' and stream = 'logs'")
        done = await connection.execute(
            "update vault_spans set last_block = greatest($3::bigint, $4, first_block - 1)"
            " where account_id = $1 and vault_id = $2 and last_block is null",
            account_id,
            vault_id,
            last_block,
            live,
        )
        if done == "UPDATE 0":
            raise InputError(f"account '{account_id}' has no vault '{vault_id}' that is registered now")
        await change_version(connection, "registry")
        removed = next(vault for vault in await load_vaults(connection, account_id) if vault.id == vault_id)
        old = before[vault_id]
        await record(connection, acting(), "vault.remove", vault_id, account_id=account_id, before=old, after=removed)
        return removed


def _check_addresses(vault_id: str, address: Address, queue: Address | None, vaults: Iterable[Vault]) -> None:
    """Within one account an id, a vault address and a queue address each occur once and never change (rule E9)."""
    for vault in vaults:
        same = vault.id == vault_id
        if same and vault.address != address:
            raise InputError(
                f"vault '{vault_id}' has the address {checksum(vault.address)}, which never changes: "
                "register the other address under another id"
            )
        if same and queue is not None and vault.queue not in (None, queue):
            raise InputError(
                f"vault '{vault_id}' has the withdrawal queue {checksum(vault.queue)}, which never changes"
            )
        if not same and vault.address == address:
            raise InputError(f"{checksum(address)} is already registered in this account, as vault '{vault.id}'")
        if not same and queue is not None and vault.queue == queue:
            raise InputError(f"{checksum(queue)} is already the withdrawal queue of vault '{vault.id}'")


async def _live_start(connection: Connection) -> int:
    position = await connection.fetchval("select max(position) from cursors where kind = 'live' and stream = 'logs'")
    if position is None:
        raise InputError("nothing has been read yet, so nothing can be left undelivered: start 'vaultevents run' first")
    return int(position) + 1


def _refuse_hushed(vault: Vault, first_block: int, *, gains_queue: bool) -> None:
    """A span has one `deliver_from`: what is to be delivered cannot be added below it."""
    for span in vault.spans:
        begin = first_block if span.last is None else span.first
        if span.deliver_from > min(begin, span.first) and (gains_queue or begin < span.first):
            raise InputError(
                f"the events of vault '{vault.id}' before block {span.deliver_from} are kept undelivered, and what is "
                "added to it now would be, too: add it with --no-deliver"
            )


async def _refuse_hushing(connection: Connection, vault: Vault) -> None:
    """Nor can a queue go undelivered where the vault's own events are still to be read and delivered."""
    begin = min(max(span.first, span.deliver_from) for span in vault.spans)
    pending = await connection.fetchrow(
        "select position + 1 as first, stop from cursors"
        " where stream = 'logs' and kind = 'backfill' and position < stop and stop >= $1",
        begin,
    )
    if pending is not None:
        raise InputError(
            f"a backfill still reads the blocks {pending['first']}..{pending['stop']} for vault '{vault.id}', and "
            "--no-deliver would silence all it finds there: wait until 'vaultevents status' no longer shows it"
        )
    if await connection.fetchval("select 1 from cursors where stream = any($1) limit 1", EPOCH_STREAMS):
        raise InputError(
            f"the streams of the beacon chain are behind the one of the logs, and --no-deliver would silence what they "
            f"are about to find for vault '{vault.id}': add the queue without it"
        )


async def _open_span(
    connection: Connection, account_id: str, vault_id: str, old: Vault | None, first_block: int, deliver_from: int
) -> bool:
    """Opens a span, or moves the start of the open one back; False when there is nothing to change."""
    open_span = next((span for span in old.spans if span.last is None), None) if old else None
    if open_span is None:
        await connection.execute(
            "insert into vault_spans (account_id, vault_id, ordinal, first_block, deliver_from)"
            " values ($1, $2, $3, $4, $5)",
            account_id,
            vault_id,
            len(old.spans) + 1 if old else 1,
            first_block,
            deliver_from,
        )
        return True
    if first_block >= open_span.first:
        return False
    await connection.execute(
        "update vault_spans set first_block = $3, deliver_from = greatest(deliver_from, $4),"
        " first_time_s = null, quiet_time_s = null"
        " where account_id = $1 and vault_id = $2 and last_block is null",
        account_id,
        vault_id,
        first_block,
        min(open_span.first, deliver_from),
    )
    return True
