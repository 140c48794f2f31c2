"""Validators that pay to registered vaults, and how far they are known (rules C4, C5 and C9)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import StreamStopped
from vaultevents.core.units import Address, Hash32, Pubkey, ValidatorIndex, hex_text
from vaultevents.core.validators import FAR_FUTURE_EPOCH, ValidatorRecord
from vaultevents.store.cursors import EPOCH_STREAMS, backfill
from vaultevents.store.pool import Connection, Database
from vaultevents.store.registry import lock_registry
from vaultevents.store.versions import change_version

ValidatorSource = Literal["list", "deposits"]


@dataclass(frozen=True, slots=True)
class DiscoveryState:
    """`size`: validators of the network that were looked at; `known_through`: the finalized block's epoch then.

    `source`: where validators are found, and `scanned_vaults`: those for which all were found there.
    """

    size: int
    known_through: int | None
    scan_age: timedelta | None
    scanned_vaults: frozenset[Address]
    source: ValidatorSource


@dataclass(frozen=True, slots=True)
class Recorded:
    """How many validators were new, and how many changed."""

    new: int
    changed: int


async def read_discovery(database: Database) -> DiscoveryState:
    async with database.transaction() as connection:
        row = await connection.fetchrow("select *, db_now() - scanned_at as scan_age from discovery")
    vaults = frozenset(Address(address) for address in row["scanned_vaults"])
    return DiscoveryState(row["registry_size"], row["known_through"], row["scan_age"], vaults, row["source"])


async def use_deposits(database: Database, list_refused: str | None) -> None:
    """Note that validators are found by deposits from now on, since the list of all is refused or not to be asked."""
    async with database.transaction() as connection:
        await connection.execute("update discovery set source = 'deposits', list_refused = $1", list_refused)


async def note_discovery_problem(database: Database, problem: str | None) -> None:
    """Keeps what keeps discovery, for `status`: at a first start there is no cursor yet that could say it."""
    async with database.transaction() as connection:
        await connection.execute("update discovery set problem = $1", problem)


async def known(database: Database) -> list[ValidatorRecord]:
    """All records, by index."""
    async with database.transaction() as connection:
        return await _records(connection)


async def record(
    database: Database,
    records: Sequence[ValidatorRecord],
    *,
    size: int | None = None,
    known_through: int | None = None,
    scanned: Collection[Address] | None = None,
    source: ValidatorSource | None = None,
) -> Recorded:
    """Stores records of the finalized state, and what was done to get them.

    `scanned` are the vaults for which all validators were found in `source`.

    A new validator, or an epoch learned late, brings a backfill of the epochs that the `validators` stream has
    passed. An epoch that is known stays, also when a node that is further behind has not assigned it yet. Raises
    `StreamStopped` when an index has another pubkey than before, or an epoch that is written once has changed: then
    the chain, or the node, is not what it was.
    """
    async with database.transaction() as connection:
        await lock_registry(connection)
        before = {record.index: record for record in await _records(connection)}
        records = [_merged(before.get(record.index), record) for record in records]
        new = [record for record in records if record.index not in before]
        changed = [record for record in records if record.index in before and before[record.index] != record]
        if new or changed:
            await _upsert(connection, [*new, *changed])
            await change_version(connection, "registry")
            await _backfill_late(connection, before, [*new, *changed])
        await connection.execute(
            "update discovery set registry_size = greatest(registry_size, $1),"
            " known_through = greatest(known_through, $2),"
            " scanned_at = case when $3::bytea[] is null then scanned_at else db_now() end,"
            " scanned_vaults = coalesce($3, scanned_vaults), source = coalesce($4, source),"
            " list_refused = case when $4 = 'list' then null else list_refused end",
            size,
            known_through,
            None if scanned is None else sorted(scanned),
            source,
        )
    return Recorded(len(new), len(changed))


async def set_span_times(database: Database, times_s: Mapping[int, int], time: ChainTime) -> None:
    """Gives the ends of spans the times of their blocks; what can be placed now is backfilled in both epoch streams.

    A span has no first time, and so places nothing, before it is known until when it is quiet: otherwise what happens
    meanwhile would never be sent.
    """
    async with database.transaction() as connection:
        await lock_registry(connection)
        blocks, seconds = list(times_s), list(times_s.values())
        touched = set()
        for column, block, ready in (
            ("quiet_time_s", "deliver_from - 1", "true"),
            ("first_time_s", "first_block", "(s.deliver_from = 0 or s.quiet_time_s is not null)"),
            ("last_time_s", "last_block", "true"),
        ):
            rows = await connection.fetch(
                f"update vault_spans s set {column} = t.seconds"  # noqa: S608 - names from the line above
                f" from unnest($1::bigint[], $2::bigint[]) as t (block, seconds) where s.{column} is null"
                f" and s.{block} = t.block and {ready} returning s.account_id, s.vault_id, s.ordinal",
                blocks,
                seconds,
            )
            touched |= {tuple(row) for row in rows}
        if not touched:
            return
        await change_version(connection, "registry")
        first_time_s = await connection.fetchval(
            "select min(s.first_time_s) from vault_spans s"
            " join unnest($1::text[], $2::text[], $3::integer[]) as k (account_id, vault_id, ordinal)"
            " using (account_id, vault_id, ordinal)",
            *(list(column) for column in zip(*sorted(touched), strict=True)),
        )
        if first_time_s is not None:
            for stream in EPOCH_STREAMS:
                await backfill(connection, stream, epoch_at(time, first_time_s))


async def earliest_epoch(connection: Connection, time: ChainTime) -> int | None:
    """The epoch in which the earliest registered block lies whose time is known."""
    seconds = await connection.fetchval("select min(first_time_s) from vault_spans")
    return None if seconds is None else epoch_at(time, seconds)


def epoch_at(time: ChainTime, seconds: int) -> int:
    """The epoch of a block's time; blocks from before the beacon chain count as of its first one."""
    return time.epoch_at(max(seconds, time.genesis_s))


def _merged(before: ValidatorRecord | None, now: ValidatorRecord) -> ValidatorRecord:
    """What is known of a validator after both; two nodes or daemons may be some epochs apart."""
    if before is None:
        return now
    if before.pubkey != now.pubkey:
        raise StreamStopped(
            f"validator {now.index} had the pubkey {hex_text(before.pubkey)} and has {hex_text(now.pubkey)} now: event "
            "ids end in the index, so nothing more is sent until a person has looked at the beacon node"
        )
    for what, old, new in (
        ("activation", before.activation_epoch, now.activation_epoch),
        ("exit", before.exit_epoch, now.exit_epoch),
    ):
        if FAR_FUTURE_EPOCH not in (old, new) and old != new:
            raise StreamStopped(
                f"the {what} epoch of validator {now.index} was {old} in final data and is {new} now: it is written "
                "once, so nothing more is sent until a person has looked at the beacon node"
            )
    return replace(
        now,
        activation_epoch=min(before.activation_epoch, now.activation_epoch),
        exit_epoch=min(before.exit_epoch, now.exit_epoch),
    )


async def _backfill_late(
    connection: Connection, before: Mapping[ValidatorIndex, ValidatorRecord], records: Sequence[ValidatorRecord]
) -> None:
    """The epochs that have just become known; those beyond the live cursor are read live."""
    epochs = set()
    for record in records:
        old = before.get(record.index)
        known_before = (old.activation_epoch, old.exit_epoch) if old and old.credentials == record.credentials else ()
        epochs |= {record.activation_epoch, record.exit_epoch} - set(known_before) - {FAR_FUTURE_EPOCH}
    live = await connection.fetchval("select position from cursors where stream = 'validators' and kind = 'live'")
    late = [epoch for epoch in epochs if live is not None and epoch <= live]
    if late:
        await backfill(connection, "validators", min(late), max(late))


async def _records(connection: Connection) -> list[ValidatorRecord]:
    rows = await connection.fetch(
        "select index, pubkey, credentials, activation_epoch, exit_epoch from validators order by index"
    )
    return [
        ValidatorRecord(
            ValidatorIndex(row["index"]),
            Pubkey(row["pubkey"]),
            Hash32(row["credentials"]),
            FAR_FUTURE_EPOCH if row["activation_epoch"] is None else row["activation_epoch"],
            FAR_FUTURE_EPOCH if row["exit_epoch"] is None else row["exit_epoch"],
        )
        for row in rows
    ]


async def _upsert(connection: Connection, records: Sequence[ValidatorRecord]) -> None:
    await connection.execute(
        "insert into validators (index, pubkey, credentials, activation_epoch, exit_epoch)"
        " select * from unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::bigint[], $5::bigint[])"
        " on conflict (index) do update set credentials = excluded.credentials,"
        " activation_epoch = excluded.activation_epoch, exit_epoch = excluded.exit_epoch",
        [record.index for record in records],
        [record.pubkey for record in records],
        [record.credentials for record in records],
        [_stored(record.activation_epoch) for record in records],
        [_stored(record.exit_epoch) for record in records],
    )


def _stored(epoch: int) -> int | None:
    return None if epoch == FAR_FUTURE_EPOCH else epoch
