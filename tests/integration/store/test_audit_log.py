"""The audit log: one chain of hashes, written with each change, that nobody alters unnoticed (rule T22)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import asyncpg
import pytest

from store_factories import (
    KEY,
    account,
    address,
    assert_ledger,
    change,
    commit,
    events_of,
    funding,
    live,
    rows,
    settlement,
    shift_clock,
    simple_simulation,
    some_deliveries,
    take,
    vault,
    webhook,
)
from vaultevents.core.actor import acting_as
from vaultevents.core.audit_chain import state_digest
from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.core.reports import ReportLog
from vaultevents.core.sealing import MasterKey
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, BlockNumber, Hash32
from vaultevents.store import accounts, audit_log, quarantine, reports, retention, rotation, webhooks
from vaultevents.store.audit_log import BadEntry, Verified, entries, record, verify
from vaultevents.store.deliveries import settle
from vaultevents.store.outbox import Lost, Outbox
from vaultevents.store.pool import Connection, Database
from vaultevents.store.registry import current_registry
from vaultevents.store.resends import request_new_test, request_recovery, request_resend
from vaultevents.store.webhook_health import disable_failing

pytestmark = pytest.mark.integration

ALICE = "cli:alice"


def expected_hash(row: dict[str, Any]) -> bytes:
    """The hash of an entry by the documented encoding, without the code of the service."""

    def field(content: bytes | None) -> bytes:
        return b"\xff" * 4 if content is None else struct.pack(">I", len(content)) + content

    def text(value: object) -> bytes | None:
        return None if value is None else str(value).encode("utf-8")

    at = row["at"].astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    plain = (row["seq"], at, row["actor"], row["action"], row["subject"], row["account_id"])
    content = [row["previous_hash"], *map(text, plain), row["before_digest"], row["after_digest"]]
    return hashlib.sha256(b"".join(map(field, content))).digest()


async def stored(database: Database) -> list[dict[str, Any]]:
    return await rows(database, "select * from audit_log order by seq")


async def acts(database: Database) -> list[tuple[str, str, str, str | None]]:
    return [(row["actor"], row["action"], row["subject"], row["account_id"]) for row in await stored(database)]


async def checked(database: Database, noted: bytes | None = None) -> Verified:
    async with database.transaction() as connection:
        return await verify(connection, noted)


async def fill(database: Database, number: int = 6) -> None:
    """So many entries, with texts, accounts and digests of every kind."""
    async with database.transaction() as connection:
        for n in range(number):
            account_id = f"acct-{n}" if n % 2 else None
            before, after = ({"n": n}, {"n": n + 1}) if n % 3 else (None, None)
            subject = f"wh-{n} é\n{'x' * n}"
            await record(connection, ALICE, "webhook.pause", subject, account_id=account_id, before=before, after=after)


async def test_the_chain_is_the_documented_one(any_database: Database) -> None:
    assert await checked(any_database) == Verified(0, bytes(32), None)
    await fill(any_database)
    found = await stored(any_database)
    assert [row["seq"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert found[0]["previous_hash"] == bytes(32)
    assert all(late["previous_hash"] == early["hash"] for early, late in pairwise(found))
    assert [row["hash"] for row in found] == [expected_hash(row) for row in found]
    assert await checked(any_database) == Verified(6, found[-1]["hash"], None)


def test_a_state_is_digested_as_canonical_json() -> None:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    state = {"b": (1, None), "a": {"é": b"\x01\xff"}, "at": at, "set": {"y", "x"}}
    text = '{"a":{"é":"01ff"},"at":"2026-01-31T12:00:00.000000Z","b":[1,null],"set":["x","y"]}'
    assert state_digest(state) == hashlib.sha256(text.encode()).digest()
    assert json.loads(text)["b"] == [1, None]
    assert state_digest(None) is None
    assert state_digest({"n": 1}) != state_digest({"n": 2})


async def rewritten(connection: Connection) -> None:
    """Replace the log by another one, all of whose hashes are right."""
    await connection.execute("delete from audit_log")
    for n in range(9):
        await record(connection, ALICE, "webhook.pause", f"forged {n}")


FORGED = (
    "insert into audit_log (seq, at, actor, action, subject, previous_hash, hash)"
    " select {}, at, actor, action, subject, sha256('a'), sha256('b') from audit_log where seq = 1"
)
RUN_TOGETHER = "update audit_log set actor = 'cli:alicew', action = 'ebhook.pause' where seq = 3"
SWAPPED = """
update audit_log set seq = -seq where seq in (2, 3); update audit_log set seq = 5 + seq where seq in (-2, -3)
"""
TAMPERED: list[tuple[str, str, int, str]] = [
    *(
        (f"another {column}", f"update audit_log set {column} = {value} where seq = 3", 3, "its hash is not that")
        for column, value in {
            "at": "at + interval '1 us'",
            "actor": "'cli:bob'",
            "action": "'webhook.enable'",
            "subject": "'wh-9'",
            "account_id": "'umbra'",
            "before_digest": "sha256('other')",
            "after_digest": "null",
            "hash": "sha256('other')",
        }.items()
    ),
    ("another link", "update audit_log set previous_hash = sha256('other') where seq = 3", 3, "does not link"),
    ("fields run together", RUN_TOGETHER, 3, "its hash is not that"),
    ("a row in the middle is gone", "delete from audit_log where seq = 3", 4, "entry 3 is missing"),
    ("the first row is gone", "delete from audit_log where seq = 1", 2, "entry 1 is missing"),
    ("two rows are swapped", SWAPPED, 2, "does not link"),
    ("a row more at the end", FORGED.format(7), 7, "does not link"),
    ("a row more before the first", FORGED.format(0), 0, "entry 1 is missing"),
    ("a row more far below", FORGED.format(-7), -7, "entry 1 is missing"),
]


async def test_whatever_is_altered_is_found(any_database: Database) -> None:
    await fill(any_database)
    whole = await checked(any_database)
    for name, statements, seq, problem in TAMPERED:
        with pytest.raises(asyncio.CancelledError):  # takes the change back
            async with any_database.transaction() as connection:
                await connection.execute("alter table audit_log disable trigger refuse_change")
                await connection.execute(statements)
                found = await verify(connection)
                assert found.first_bad is not None, name
                assert found.first_bad.seq == seq, name
                assert found.first_bad.problem.startswith(problem), (name, found)
                raise asyncio.CancelledError
    assert await checked(any_database) == whole


@pytest.mark.parametrize("tamper", ["delete from audit_log where seq > 4", "delete from audit_log", rewritten])
async def test_a_head_that_was_noted_shows_that_the_end_is_gone_or_replaced(
    database: Database, tamper: str | Callable[[Connection], Awaitable[None]]
) -> None:
    await fill(database)
    noted = (await checked(database)).head_hash
    await fill(database, 3)
    assert (await checked(database, noted)).noted_seq == 6
    assert (await checked(database, bytes(32))).noted_seq == 0
    async with database.transaction() as connection:
        await connection.execute("alter table audit_log disable trigger refuse_change")
        await (connection.execute(tamper) if isinstance(tamper, str) else tamper(connection))
    found = await checked(database, noted)
    assert (found.first_bad, found.noted_seq) == (None, None)


@pytest.mark.parametrize("verb", ["update audit_log set actor = actor", "delete from audit_log", "truncate audit_log"])
async def test_the_owner_cannot_change_or_remove_entries(database: Database, verb: str) -> None:
    await fill(database, 1)
    before = await stored(database)
    for role in ("origin", "replica"):
        with pytest.raises(asyncpg.RaiseError, match="append-only"):
            async with database.transaction() as connection:
                await connection.execute(f"set local session_replication_role = {role}")
                await connection.execute(verb)
    assert await stored(database) == before


async def test_concurrent_writers_make_one_chain(any_database: Database) -> None:
    async def write(number: int) -> None:
        for n in range(5):
            async with any_database.transaction() as connection:
                await record(connection, f"cli:{number}", "webhook.pause", str(n))

    await asyncio.gather(*(write(number) for number in range(8)))
    found = await stored(any_database)
    assert [row["seq"] for row in found] == list(range(1, 41))
    assert [row["hash"] for row in found] == [expected_hash(row) for row in found]
    assert (await checked(any_database)).rows == 40
    times = [row["at"] for row in found]
    assert times == sorted(times)


async def test_a_transaction_with_an_old_view_of_the_log_appends_no_second_end(database: Database) -> None:
    with pytest.raises((asyncpg.UniqueViolationError, DatabaseUnavailable)):
        async with database.transaction() as late:
            await late.execute("set transaction isolation level repeatable read")
            await late.fetchval("select count(*) from audit_log")
            await fill(database, 1)
            await record(late, ALICE, "webhook.pause", "late")
    assert (await checked(database)).rows == 1


async def test_the_role_of_the_api_appends_and_neither_reads_nor_changes(any_database: Database) -> None:
    async with any_database.of_account("acme") as connection:
        await record(connection, "api:key-1", "webhook.test", "wh-1", account_id="acme")
    for statement in (
        "select * from audit_log",
        "select count(*) from audit_log",
        "delete from audit_log",
        "truncate audit_log",
        "update audit_log set actor = 'x'",
        "insert into audit_log (seq, at, actor, action, subject, previous_hash, hash)"
        " values (2, now(), 'a', 'b', 'c', sha256('a'), sha256('b'))",
        "alter table audit_log disable trigger refuse_change",
        "drop function append_audit_entry",
    ):
        with pytest.raises(DatabaseUnusable):
            async with any_database.of_account("acme") as connection:
                await connection.execute(statement)
    for foreign in ("umbra", None):
        with pytest.raises(asyncpg.RaiseError):
            async with any_database.of_account("acme") as connection:
                await record(connection, "api:key-1", "webhook.test", "wh-1", account_id=foreign)
    assert (await checked(any_database)).rows == 1


async def test_what_is_rolled_back_leaves_no_entry(database: Database) -> None:
    await account(database)
    before = await stored(database)

    async def half_done() -> None:
        async with database.transaction() as connection:
            await record(connection, ALICE, "webhook.pause", "wh-1")
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await half_done()
    async with database.transaction() as connection:
        with pytest.raises(asyncio.CancelledError):
            async with connection.transaction():
                await record(connection, ALICE, "webhook.pause", "wh-1")
                raise asyncio.CancelledError
    with pytest.raises(Exception, match="already an account"):
        await account(database)
    assert await stored(database) == before
    await fill(database, 1)
    assert (await checked(database)).rows == len(before) + 1, "the number of the entry was not used up"


async def test_a_writer_that_is_killed_leaves_neither_change_nor_entry(database: Database) -> None:
    subscription = await _subscribed(database)
    before = await stored(database)
    with pytest.raises(DatabaseUnavailable):
        async with database.transaction() as connection:
            await webhooks.pause_webhook(connection, subscription, None)
            (pid,) = await connection.fetchrow("select pg_backend_pid()")
            await change(database, "select pg_terminate_backend($1)", pid)
            await connection.fetchval("select 1")
    assert await stored(database) == before
    assert await rows(database, "select 1 from webhooks where paused_until is not null") == []
    await webhooks.pause(database, subscription, None)
    (transactions,) = await rows(
        database,
        "select (select xmin::text from webhooks) as changed,"
        " (select xmin::text from audit_log order by seq desc limit 1) as recorded",
    )
    assert transactions["changed"] == transactions["recorded"], "one transaction has both"


async def _subscribed(database: Database) -> str:
    await account(database)
    return (await webhook(database)).id


async def test_what_changes_nothing_leaves_no_entry(database: Database) -> None:
    subscription = await _subscribed(database)
    before = len(await stored(database))
    with acting_as(ALICE):
        await webhooks.switch_on(database, subscription)
        await webhooks.pause(database, subscription, None)
        await webhooks.pause(database, subscription, 60)
        await webhooks.switch_on(database, subscription)
        await webhooks.switch_on(database, subscription)
    assert [row["action"] for row in (await stored(database))[before:]] == ["webhook.pause", "webhook.enable"]


async def test_acts_of_operators_and_of_the_service_differ(database: Database) -> None:
    """What the service switches off by itself is recorded as its act, as is what it prunes."""
    _, subscription = await some_deliveries(database, 2)
    first, second = (await take(database)).deliveries
    await settle(database, [settlement(first)])
    await settle(database, [settlement(second, "parked", 410, gone=True)])
    other = await webhook(database)
    await change(
        database,
        "update webhooks set failures = 100, first_failure_at = db_now() - interval '30 d',"
        " last_failure_at = db_now() where id = $1",
        other.id,
    )
    await disable_failing(database, other.id)
    assert (await acts(database))[-2:] == [
        ("service", "webhook.create", other.id, "acme"),
        ("service", "webhook.disable", other.id, "acme"),
    ]
    assert ("service", "webhook.disable", subscription.id, "acme") in await acts(database)
    await shift_clock(database, 40 * 86_400.0)
    with acting_as(ALICE):
        assert (await retention.prune(database, timedelta(days=30), pause_s=0, looked_at=1)).deliveries == 1
        assert await retention.prune(database, timedelta(days=30), pause_s=0, looked_at=1) == retention.Pruned()
    (actor, action, subject, account_id) = (await acts(database))[-1]
    assert (actor, action, account_id) == (ALICE, "prune", None)
    assert subject.startswith("finished before 20")
    assert [act[1] for act in await acts(database)].count("prune") == 1
    assert (await checked(database)).first_bad is None, "and the log itself is never pruned"


async def test_a_replay_is_recorded_once_and_only_if_it_changes_something(database: Database) -> None:
    outbox = await simple_simulation(database)
    await commit(outbox, funding(1, block=1))
    before = len(await stored(database))

    async def replay(*observed: int) -> None:
        again = Outbox(database)
        cursor = await again.begin_replay("logs", Span(1, 3))
        for block in (1, 2, 3):
            found, version = await events_of(again, (funding(n, block=block) for n in observed if n == block))
            moved = cursor.moved(block, None)
            assert not isinstance(await again.commit(cursor, moved, found, version), Lost)
            cursor = moved
        await again.end_replay(cursor)

    with acting_as(ALICE):
        await replay(1)
        assert len(await stored(database)) == before
        await replay(1, 2, 3)
        await replay(1, 2, 3)
    assert (await acts(database))[before:] == [(ALICE, "replay", "logs 1-3", None)]
    await commit(outbox, funding(7, block=2))
    assert len(await stored(database)) == before + 1, "what the service reads is no administrative act"
    assert (await live(outbox)).position == 2


async def test_a_report_is_recorded_only_if_an_operator_resolves_it(database: Database) -> None:
    outbox = await simple_simulation(database)
    logs = [
        ReportLog(
            1_700_000_000 + n, 1, Hash32(bytes(32)), "bafy", BlockNumber(n), 0, Hash32(bytes(32)), 0, Address(bytes(20))
        )
        for n in (1, 2, 3)
    ]
    async with database.transaction() as connection:
        assert await reports.add_reports(connection, logs) == 3
        assert await reports.add_reports(connection, logs) == 0
    before = len(await stored(database))
    by_timestamp = {found.log.timestamp: found.id for found in await reports.find_reports(database)}
    version = (await outbox.registry()).version
    await outbox.resolve(by_timestamp[1_700_000_001], 1, [], version)
    with acting_as(ALICE):
        await outbox.resolve(by_timestamp[1_700_000_001], 1, [], version)
        await outbox.resolve(by_timestamp[1_700_000_002], 1, [], version)
        await reports.give_up_report(database, "1700000003")
    assert (await acts(database))[before:] == [
        (ALICE, "report.resolve", "1700000002", None),
        (ALICE, "report.give_up", "1700000003", None),
    ]


async def test_requests_and_dismissals_name_what_they_are_about(database: Database) -> None:
    _, subscription = await some_deliveries(database, 1)
    (event,) = await rows(database, "select id, seq from events")
    with acting_as("console:1"):
        async with database.transaction() as connection:
            await request_resend(connection, "acme", subscription.id, event["id"])
            test_id = await request_new_test(connection, subscription.webhook, "ab", 1)
            assert (await request_recovery(connection, "acme", subscription.id, 0, None)).count == 0
        later = await webhook(database)
        async with database.transaction() as connection:
            assert (await request_recovery(connection, "acme", later.id, 0, None)).count == 1
    found = await acts(database)
    assert found[-4:] == [
        ("console:1", "webhook.resend", f"{subscription.id} {event['id']}", "acme"),
        ("console:1", "webhook.test", f"{subscription.id} {test_id}", "acme"),
        ("console:1", "webhook.create", later.id, "acme"),
        ("console:1", "webhook.recover", later.id, "acme"),
    ]
    await assert_ledger(database)
    assert quarantine.ranges_text([4, 5, 6, 9]) == "4-6 9"
    assert quarantine.ranges_text([]) == ""


async def test_entries_are_listed_newest_first_by_what_they_are_about(database: Database) -> None:
    await account(database)
    await vault(database)
    await accounts.add_account(database, "umbra", "Umbra")
    made = await webhook(database)
    await webhooks.pause(database, made.id, None)
    async with database.transaction() as connection:
        newest = await entries(connection)
        assert [entry.action for entry in newest] == [
            *("webhook.pause", "webhook.create", "account.add", "vault.add", "account.add"),
        ]
        assert [entry.seq for entry in await entries(connection, before=newest[1].seq, limit=2)] == [3, 2]
        assert {entry.account_id for entry in await entries(connection, account_id="umbra")} == {"umbra"}
        assert [entry.seq for entry in await entries(connection, action="webhook")] == [5, 4]
        assert [entry.seq for entry in await entries(connection, action="webhook.pause")] == [5]
        assert [entry.seq for entry in await entries(connection, since=newest[0].at)] == [5]
        assert await entries(connection, action="web") == []


async def test_pages_of_a_verification_meet(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "ROWS_AT_ONCE", 2)
    await fill(database, 5)
    assert (await checked(database)).rows == 5
    await change(database, "alter table audit_log disable trigger refuse_change")
    await change(database, "update audit_log set subject = 'x' where seq = 5")
    assert (await checked(database)).first_bad == BadEntry(5, "its hash is not that of its content")


async def test_vaults_that_are_registered_together_are_recorded_one_by_one(database: Database) -> None:
    await account(database)
    wanted = [accounts.NewVault(f"v{n}", address(f"v{n}"), None, n) for n in (2, 1)]
    with acting_as(ALICE):
        await accounts.add_vaults(database, "acme", wanted)
        await accounts.add_vaults(database, "acme", wanted)
    assert (await acts(database))[1:] == [(ALICE, "vault.add", name, "acme") for name in ("v1", "v2")]
    (entry, _) = (await stored(database))[1:]
    (registered,) = [found for found in (await current_registry(database)).vaults if found.id == "v1"]
    assert (entry["before_digest"], entry["after_digest"]) == (None, state_digest(registered))


async def test_a_rotation_of_the_master_key_is_recorded_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "BATCH", 1)
    await account(database)
    for _ in range(3):
        await webhook(database)
    before = len(await stored(database))
    with acting_as(ALICE):
        for resealed in (3, 0):
            successor = MasterKey(bytes(range(1, 33)), KEY)
            assert await rotation.reseal(database, successor, lambda: bytes(12), lambda *_: None) == resealed
    assert (await acts(database))[before:] == [(ALICE, "master_key.rotate", "master key", None)]
