"""Validators, discovery and the times of spans in the database: what is written once, and which backfills follow."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import StreamStopped
from vaultevents.core.units import Address, Hash32, Pubkey, ValidatorIndex
from vaultevents.core.validators import FAR_FUTURE_EPOCH, ValidatorRecord
from vaultevents.store import accounts
from vaultevents.store.cursors import open_stream
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.registry import current_registry
from vaultevents.store.validators import earliest_epoch, epoch_at, known, read_discovery, record, set_span_times

pytestmark = pytest.mark.integration

VAULT, OTHER = Address(b"\x11" * 20), Address(b"\x22" * 20)
TIME = ChainTime(genesis_s=1_000, slot_ms=12_000, slots_per_epoch=32)
EPOCH_S = 384


def one(index: int, activation: int = FAR_FUTURE_EPOCH, leaves: int = FAR_FUTURE_EPOCH) -> ValidatorRecord:
    pubkey, credentials = bytes([index + 1]) * 48, b"\x01" + bytes(11) + VAULT
    return ValidatorRecord(ValidatorIndex(index), Pubkey(pubkey), Hash32(credentials), activation, leaves)


async def version(database: Database) -> int:
    async with database.transaction() as connection:
        found: int = await connection.fetchval("select version from registry")
    return found


async def backfills(database: Database, stream: str) -> list[tuple[int, int | None]]:
    return [(cursor.first, cursor.stop) for cursor in await Outbox(database).backfills(stream)]


async def live_at(database: Database, epoch: int, *streams: str) -> None:
    for stream in streams or ("validators", "withdrawals"):
        await open_stream(database, stream, epoch, None)


async def test_records_are_stored_by_index_and_given_back_as_they_were(any_database: Database) -> None:
    records = [one(3, 5, 9), one(1), one(2, 0)]
    done = await record(any_database, records, size=10, known_through=7, scanned=[VAULT, OTHER])
    assert (done.new, done.changed) == (3, 0)
    assert await known(any_database) == sorted(records, key=lambda each: each.index)
    state = await read_discovery(any_database)
    assert (state.size, state.known_through, state.scanned_vaults) == (10, 7, frozenset({VAULT, OTHER}))
    assert state.scan_age is not None and timedelta(0) <= state.scan_age < timedelta(minutes=1)


async def test_discovery_only_grows_and_a_refresh_leaves_the_scan_alone(any_database: Database) -> None:
    await record(any_database, [], size=10, known_through=7, scanned=[VAULT])
    first = await read_discovery(any_database)
    await record(any_database, [], size=9, known_through=6)
    await record(any_database, [])
    second = await read_discovery(any_database)
    assert (second.size, second.known_through, second.scanned_vaults) == (10, 7, frozenset({VAULT}))
    assert first.scan_age is not None and second.scan_age is not None and second.scan_age >= first.scan_age
    await record(any_database, [], scanned=[])
    assert (await read_discovery(any_database)).scanned_vaults == frozenset()


async def test_the_registry_gets_a_new_version_when_a_record_is_new_or_changed_and_only_then(
    any_database: Database,
) -> None:
    before = await version(any_database)
    await record(any_database, [one(1, 5)], size=2)
    new = await version(any_database)
    assert new != before
    done = await record(any_database, [one(1, 5)], size=3, known_through=4)
    assert (done.new, done.changed) == (0, 0)
    assert await version(any_database) == new
    done = await record(any_database, [one(1, 5, 20), one(2)])
    assert (done.new, done.changed) == (1, 1)
    assert await version(any_database) not in (before, new)


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        (replace(one(1, 5, 20), pubkey=Pubkey(b"\xee" * 48)), "validator 1 had the pubkey 0x0202.* and has 0xeeee"),
        (one(1, 6, 20), "the activation epoch of validator 1 was 5 .* is 6 now"),
        (one(1, 5, 21), "the exit epoch of validator 1 was 20 .* is 21 now"),
        (one(1, 5, 19), "the exit epoch of validator 1 was 20 .* is 19 now"),
    ],
)
async def test_what_is_written_once_stops_all_when_it_changes_and_nothing_of_that_call_is_kept(
    any_database: Database, now: ValidatorRecord, problem: str
) -> None:
    await record(any_database, [one(1, 5, 20)], size=2, known_through=3)
    before = await version(any_database), await read_discovery(any_database)
    with pytest.raises(StreamStopped, match=problem):
        await record(any_database, [one(0, 4), now], size=9, known_through=8)
    assert await known(any_database) == [one(1, 5, 20)]
    after = await read_discovery(any_database)
    assert (await version(any_database), after.size, after.known_through) == (before[0], 2, 3)


async def test_an_older_view_takes_nothing_back(any_database: Database) -> None:
    """Two daemons, or two nodes, may be an epoch apart; who comes last with less is not a contradiction."""
    newest = one(1, 5, 20)
    await record(any_database, [newest])
    before = await version(any_database)
    for older in (one(1, 5), one(1)):
        done = await record(any_database, [older])
        assert (done.new, done.changed) == (0, 0)
    assert await known(any_database) == [newest]
    assert await version(any_database) == before
    with pytest.raises(StreamStopped):
        await record(any_database, [one(1, 6)])


async def test_epochs_learned_late_are_backfilled_and_later_ones_are_left_to_the_live_cursor(
    any_database: Database,
) -> None:
    await live_at(any_database, 50)
    await record(any_database, [one(1, 51, 60), one(2)])
    assert await backfills(any_database, "validators") == []
    await record(any_database, [one(1, 51, 60), one(2, 40), one(3, 45, 70)])
    assert await backfills(any_database, "validators") == [(40, 45)]
    await record(any_database, [one(1, 51, 60), one(2, 40, 50), one(3, 45, 70)])
    assert await backfills(any_database, "validators") == [(40, 45), (50, 50)]
    assert await backfills(any_database, "withdrawals") == []


async def test_without_a_live_cursor_there_is_nothing_to_fill(any_database: Database) -> None:
    await record(any_database, [one(1, 5, 20)])
    await live_at(any_database, 50)
    assert await backfills(any_database, "validators") == []


async def test_a_known_validator_that_comes_to_pay_by_other_credentials_is_read_again(any_database: Database) -> None:
    await live_at(any_database, 50)
    bls = replace(one(1, 10, 20), credentials=Hash32(bytes(32)))
    await record(any_database, [bls])
    async with any_database.transaction() as connection:
        await connection.execute("update cursors set position = stop where kind = 'backfill'")
    await record(any_database, [one(1, 10, 20)])
    assert await backfills(any_database, "validators") == [(10, 20)]


async def spans(database: Database) -> list[tuple[int | None, int | None, int | None]]:
    vaults = (await current_registry(database)).vaults
    return [(span.first_time_s, span.last_time_s, span.quiet_time_s) for vault in vaults for span in vault.spans]


async def test_the_time_of_a_first_block_begins_a_backfill_of_both_epoch_streams(any_database: Database) -> None:
    await accounts.add_account(any_database, "acme", "acme")
    await accounts.add_vault(any_database, "acme", "a", VAULT, None, 100)
    await live_at(any_database, 50)
    before = await version(any_database)
    await set_span_times(any_database, {99: 1_000 + 9 * EPOCH_S, 200: 1_000 + 40 * EPOCH_S}, TIME)
    assert await spans(any_database) == [(None, None, None)]
    assert await version(any_database) == before
    first_time_s = 1_000 + 10 * EPOCH_S + 5
    await set_span_times(any_database, {100: first_time_s}, TIME)
    assert await spans(any_database) == [(first_time_s, None, None)]
    placed = await version(any_database)
    assert placed != before
    for stream in ("validators", "withdrawals"):
        assert await backfills(any_database, stream) == [(10, 50)]
    async with any_database.transaction() as connection:
        assert await earliest_epoch(connection, TIME) == 10
    await set_span_times(any_database, {100: first_time_s}, TIME)
    assert await version(any_database) == placed


async def test_a_closed_span_gets_the_time_of_its_end_and_a_hushed_one_that_of_its_last_quiet_block(
    any_database: Database,
) -> None:
    await accounts.add_account(any_database, "acme", "acme")
    await open_stream(any_database, "logs", 150, None)
    await accounts.add_vault(any_database, "acme", "a", VAULT, None, 100, deliver=False)
    await accounts.add_vault(any_database, "acme", "b", OTHER, None, 120)
    await accounts.remove_vault(any_database, "acme", "b", 300)
    registry = await current_registry(any_database)
    assert registry.blocks_without_time() == {100, 120, 150, 300}
    times_s = {block: 1_000 + 12 * block for block in registry.blocks_without_time()}
    await set_span_times(any_database, times_s, TIME)
    assert await spans(any_database) == [(2_200, None, 2_800), (2_440, 4_600, None)]
    assert not (await current_registry(any_database)).blocks_without_time()
    assert epoch_at(TIME, 5) == 0


async def test_a_span_is_not_placed_before_it_is_known_which_of_its_events_are_quiet(any_database: Database) -> None:
    """Near the head the last quiet block may not be final yet; what is live meanwhile must not be taken for quiet."""
    await accounts.add_account(any_database, "acme", "acme")
    await open_stream(any_database, "logs", 150, None)
    await accounts.add_vault(any_database, "acme", "a", VAULT, None, 100, deliver=False)
    await accounts.add_vault(any_database, "acme", "b", OTHER, None, 100)
    await live_at(any_database, 50)
    await set_span_times(any_database, {100: 2_200}, TIME)
    assert await spans(any_database) == [(None, None, None), (2_200, None, None)]
    assert (await current_registry(any_database)).blocks_without_time() == {100, 150}
    await set_span_times(any_database, {100: 2_200, 150: 2_800}, TIME)
    assert await spans(any_database) == [(2_200, None, 2_800), (2_200, None, None)]
    assert await backfills(any_database, "validators") == [(3, 50)]


async def test_an_empty_table_has_no_earliest_epoch(database: Database) -> None:
    async with database.transaction() as connection:
        assert await earliest_epoch(connection, TIME) is None
    await set_span_times(database, {}, TIME)
