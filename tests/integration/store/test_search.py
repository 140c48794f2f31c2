"""Searches of an operator: what they find, where they go on, and that no statement reads a large table sequentially."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio

from search_fixtures import LOUD, QUIET, PlanCheckingConnection, many_events
from store_factories import (
    account,
    address,
    claimed,
    commit,
    funding,
    own_database,
    simple_simulation,
    tx_hash,
    webhook,
)
from vaultevents.core.errors import InputError
from vaultevents.core.units import Hash32, Pubkey, ValidatorIndex, hex_text
from vaultevents.core.validators import FAR_FUTURE_EPOCH as FAR
from vaultevents.core.validators import ValidatorRecord
from vaultevents.store import event_search, vault_overview, webhook_search
from vaultevents.store.event_search import END, EventFilter, EventPage
from vaultevents.store.history import DeliveryState
from vaultevents.store.pool import Database
from vaultevents.store.postgres.embedded import ServerAddress
from vaultevents.store.validators import record
from vaultevents.store.webhook_search import DELIVERY_STATES, WEBHOOK_STATES, DeliveryFilter, WebhookFilter

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

Connection = Any
NOW = datetime(1970, 1, 1, 9, tzinfo=UTC)


def second(number: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=number)


@pytest.fixture(scope="module", autouse=True)
def few_rows() -> Iterator[None]:
    """Look at a share of the rows that is as small as in a database of millions."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (event_search, webhook_search, vault_overview):
            patch.setattr(module, "LOOKED_AT", 1000)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def many(postgres18: ServerAddress) -> AsyncIterator[Database]:
    async with many_events(postgres18) as database:
        yield database


async def blocks(database: Database, wanted: EventFilter, before: int | None = None, limit: int = 3) -> EventPage:
    async with database.transaction() as connection:
        return await event_search.search(connection, wanted, before, limit)


async def every_page(database: Database, wanted: EventFilter, limit: int = 7) -> tuple[list[int | None], int]:
    """The blocks of all pages, and the number of pages."""
    found: list[int | None] = []
    before, pages = None, 0
    while True:
        page = await blocks(database, wanted, before, limit)
        found += [row.block_number for row in page.rows]
        before, pages = page.next_before, pages + 1
        if before is None:
            return found, pages


async def test_pages_follow_each_other_from_the_newest_on(many: Database) -> None:
    first = await blocks(many, EventFilter())
    assert [row.block_number for row in first.rows] == [LOUD, LOUD - 1, LOUD - 2]
    assert first.rows[0].account_id == "loud"
    assert first.rows[0].created_at == second(LOUD)
    assert first.scanned is None
    second_page = await blocks(many, EventFilter(), first.next_before)
    assert [row.block_number for row in second_page.rows] == [LOUD - 3, LOUD - 4, LOUD - 5]


async def test_the_events_of_an_account_are_paged_to_the_last(many: Database) -> None:
    found, pages = await every_page(many, EventFilter(account_id="quiet"), limit=100)
    assert (found, pages) == (list(range(QUIET, 0, -1)), QUIET // 100)


async def test_a_condition_without_an_index_looks_at_a_number_of_rows_and_goes_on(many: Database) -> None:
    page = await blocks(many, EventFilter(event_type="validator_exited"))
    assert (page.rows, page.scanned) == ((), event_search.LOOKED_AT)
    found, pages = await every_page(many, EventFilter(event_type="validator_exited"))
    assert (found, pages) == ([], (LOUD + QUIET) // event_search.LOOKED_AT + 1)


async def test_a_type_of_an_account_is_found_in_the_order_of_time(many: Database) -> None:
    found, _ = await every_page(many, EventFilter(account_id="quiet", event_type="withdrawal_claimed"))
    assert found == list(range(QUIET, 0, -10))


async def test_a_vault_is_looked_for_in_the_accounts_that_have_it(many: Database) -> None:
    found, _ = await every_page(many, EventFilter(vault_id="v2", until=second(20)))
    assert found == [n for n in range(19, 0, -1) if n % 2 for _ in (1, 2)]
    assert (await blocks(many, EventFilter(vault_id="v3"))).rows == ()


async def test_a_range_of_time_is_found_wherever_it_lies(many: Database) -> None:
    found, _ = await every_page(many, EventFilter(since=second(10), until=second(12)))
    assert found == [11, 11, 10, 10]
    found, _ = await every_page(many, EventFilter(account_id="loud", since=second(10), until=second(12)))
    assert found == [11, 10]


async def test_shares_of_accounts_leave_nothing_out(many: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_search, "LOOKED_AT", 40)
    wanted = EventFilter(event_type="withdrawal_claimed", since=second(1), until=second(200))
    found, pages = await every_page(many, wanted, limit=3)
    assert sorted(block for block in found if block is not None) == sorted([*range(10, 200, 10)] * 2)
    assert pages > 12


@pytest.mark.parametrize("account_id", ["loud", "quiet"])
async def test_an_id_is_found_at_once_and_a_beginning_by_looking(many: Database, account_id: str) -> None:
    event_id = f"funding_received_{account_id}_13"
    (row,) = (await blocks(many, EventFilter(id=event_id))).rows
    assert (row.id, row.account_id) == (event_id, account_id)
    assert (await blocks(many, EventFilter(id=event_id, event_type="withdrawal_claimed"))).rows == ()
    found, _ = await every_page(many, EventFilter(id=f"withdrawal_claimed_{account_id}_39"))
    assert [block for block in found if block is not None and block < 1000] == [390]
    assert (await every_page(many, EventFilter(id="<script>")))[0] == []


async def rows_read(connection: Connection, statement: str, *arguments: str) -> float:
    """The most rows that a node of the plan for any arguments reads, executed with these."""
    await connection.execute(f"prepare wanted as {statement}; set local plan_cache_mode = force_generic_plan")
    (top,) = json.loads(
        await connection.fetchval(f"explain (analyze, format json) execute wanted ({', '.join(arguments)})")
    )
    await connection.execute("deallocate wanted")
    plans, most = [top["Plan"]], 0.0
    while plans:
        plan = plans.pop()
        most = max(most, plan["Actual Rows"] * plan["Actual Loops"])
        plans += plan.get("Plans", ())
    return most


async def test_a_block_is_found_by_its_index_alone(many: Database) -> None:
    """The server comes to use one plan for all arguments, which must not read the whole index by time besides."""
    arguments = ("null", "null", "null", str(-END), str(END), "null", "77", str(END), "51")
    both = f"select * from events e where e.block_number = $7 and e.seq < $8 and {event_search._MATCHES} limit $9"
    async with many.transaction() as connection:
        assert await rows_read(connection, event_search._OF_BLOCK, *arguments) < LOUD / 2
        await connection.execute("set local enable_seqscan = off; set local enable_indexscan = off")
        assert await rows_read(connection, both, *arguments) >= LOUD, "a plan that reads both indexes is caught"


async def test_a_block_is_found_by_its_index(many: Database) -> None:
    found, _ = await every_page(many, EventFilter(block=77))
    assert found == [77, 77]
    with pytest.raises(InputError, match="block"):
        await blocks(many, EventFilter(block=2**64))


async def test_what_is_no_hash_is_refused(many: Database) -> None:
    with pytest.raises(InputError, match="64 hexadecimal"):
        await blocks(many, EventFilter(tx_hash="0x12"))


async def test_a_transaction_is_found_by_the_ids_and_the_bodies_of_its_events(postgres18: ServerAddress) -> None:
    async with own_database(postgres18) as database:
        outbox = await simple_simulation(database)
        await commit(outbox, funding(3), claimed(1, amount_wei=3))  # the claim is in the same transaction
        await commit(outbox, *(funding(number) for number in range(20, 40)))
        page = await blocks(database, EventFilter(tx_hash=hex_text(tx_hash(3)).upper().replace("X", "x", 1)))
        assert sorted(row.event_type for row in page.rows) == ["funding_received", "withdrawal_claimed"]
        assert page.next_before is None


async def test_an_event_comes_with_its_bytes(many: Database) -> None:
    async with many.transaction() as connection:
        stored = await event_search.event(connection, "loud", "funding_received_loud_13")
        assert stored is not None
        assert stored.body == b'{"payload":{"amount_wei":"5","amount_eth":"0.25","tx_hash":"0x13"}}'
        assert await event_search.event_by_id(connection, "funding_received_loud_13") == stored
        assert await event_search.event(connection, "quiet", "funding_received_loud_13") is None
        assert await event_search.event_by_id(connection, "nothing") is None


async def test_deliveries_of_each_state_are_paged(many: Database) -> None:
    async with many.transaction() as connection:
        numbers: dict[DeliveryState, int] = {"exhausted": LOUD * 3 // 200, "scheduled": LOUD // 2, "parked": 0}
        for state, number in numbers.items():
            for wanted in (DeliveryFilter("loud", None, state), DeliveryFilter(None, None, state)):
                page = await webhook_search.deliveries(connection, wanted, None, 500)
                ids = [row.id for row in page.rows]
                assert ids == sorted(ids, reverse=True)
                assert {row.state for row in page.rows} <= {state}
                assert len(ids) == min(number, 500)
        found: list[int] = []
        before = None
        wanted = DeliveryFilter(webhook_id="wh-000001", state="exhausted")
        while True:
            page = await webhook_search.deliveries(connection, wanted, before, 100)
            found += [row.id for row in page.rows]
            if (before := page.next_before) is None:
                break
        assert len(found) == len(set(found)) == LOUD // 100
        newest = await webhook_search.deliveries(connection, DeliveryFilter(state="delivered"), None, 5)
        assert (newest.rows, newest.scanned) != ((), None)
        assert (await webhook_search.deliveries(connection, DeliveryFilter("quiet"))).rows == ()


async def test_the_deliveries_of_an_event_have_their_attempts(many: Database) -> None:
    async with many.transaction() as connection:
        stored = await event_search.event(connection, "loud", "withdrawal_claimed_loud_100")
        assert stored is not None
        found = await webhook_search.deliveries_of(connection, stored.row.seq)
        assert [(row.webhook_id, row.state) for row in found] == [
            ("wh-000001", "exhausted"),
            ("wh-000002", "exhausted"),
        ]
        attempts = await webhook_search.attempts_of(connection, found)
        assert [attempt.status for row in found for attempt in attempts[row.id]] == [500, 500]
        assert await webhook_search.delivery(connection, found[0].id) == found[0]


async def test_the_figures_of_a_webhook(many: Database) -> None:
    async with many.transaction() as connection:
        recent = await webhook_search.recent_attempts(connection, "wh-000001")
        assert (recent.attempts, recent.success_rate) == (1000, 0.99)
        assert recent.p50_ms is not None and recent.p95_ms is not None and recent.p50_ms < recent.p95_ms < 100
        behind = await webhook_search.recent_attempts(connection, "wh-000002")
        assert behind.accepted == 990  # what lies before what is pending
        failures = await webhook_search.last_failures(connection, "wh-000001", 3)
        assert [failure.attempt.status for failure in failures] == [500, 500, 500]
        empty = await webhook_search.recent_attempts(connection, "unknown")
        assert (empty.attempts, empty.success_rate, empty.p95_ms) == (0, None, None)


async def test_webhooks_are_found_by_state_and_text(many: Database) -> None:
    async with many.transaction() as connection:
        page = await webhook_search.search(connection, WebhookFilter(), None, 1)
        assert [row.webhook.id for row in page.rows] == ["wh-000002"]
        assert page.rows[0].pending == webhook_search.PENDING_COUNTED
        rest = await webhook_search.search(connection, WebhookFilter(), page.next_before, 1)
        assert [row.webhook.id for row in rest.rows] == ["wh-000001"] and rest.next_before is None
        found = await webhook_search.search(connection, WebhookFilter(text="A.EXAMPLE/wh-000001"))
        assert [row.webhook.id for row in found.rows] == ["wh-000001"]
        assert not (await webhook_search.search(connection, WebhookFilter(state="failing"))).rows


STATES: dict[str, str] = {
    "on": "failures = 0",
    "failing": "failures = 1",
    "parked": "failures = 5, parked_until = db_now() + interval '1 h'",
    "paused": "failures = 5, paused_until = 'infinity'::timestamptz - interval '1 h'",
    "off": "active = false",
    "deleted": "active = false, deleted_at = db_now()",
}


async def test_each_state_of_a_webhook_is_found(postgres18: ServerAddress) -> None:
    async with own_database(postgres18) as database:
        await account(database)
        subscription = await webhook(database)
        for state, change_to in STATES.items():
            async with database.transaction() as connection:
                await connection.execute(f"update webhooks set {change_to}")
                found = [
                    wanted
                    for wanted in WEBHOOK_STATES
                    if (await webhook_search.search(connection, WebhookFilter(state=wanted))).rows
                ]
                shown = await webhook_search.webhook(connection, subscription.id)
            assert found == [state]
            assert shown is not None
            assert shown.state == state


Read = Callable[[Connection], Awaitable[object]]


def events(wanted: EventFilter) -> Read:
    return lambda connection: event_search.search(connection, wanted)


def deliveries(wanted: DeliveryFilter) -> Read:
    return lambda connection: webhook_search.deliveries(connection, wanted)


READS: dict[str, Read] = {
    **{
        name: events(wanted)
        for name, wanted in {
            "newest": EventFilter(),
            "type": EventFilter(event_type="validator_exited"),
            "account": EventFilter(account_id="loud"),
            "type of an account": EventFilter(account_id="loud", event_type="validator_exited"),
            "vault": EventFilter(vault_id="v1"),
            "vault and type": EventFilter(vault_id="v1", event_type="validator_exited"),
            "time": EventFilter(since=second(100), until=second(300)),
            "time and type": EventFilter(since=second(100), until=second(300), event_type="validator_exited"),
            "id": EventFilter(id="funding_received_loud_13"),
            "beginning of an id": EventFilter(id="funding_received_loud_13000"),
            "text": EventFilter(id="<script>"),
            "block": EventFilter(block=500),
            "transaction": EventFilter(tx_hash=hex_text(tx_hash(1))),
        }.items()
    },
    "page": lambda connection: event_search.search(connection, EventFilter(), 12_000),
    "page by time": lambda connection: event_search.search(connection, EventFilter(account_id="loud"), 12_000),
    "event": lambda connection: event_search.event(connection, "loud", "funding_received_loud_13"),
    **{
        f"deliveries {state} {account_id} {webhook_id}": deliveries(DeliveryFilter(account_id, webhook_id, state))
        for state in (None, *DELIVERY_STATES)
        for account_id in (None, "loud")
        for webhook_id in (None, "wh-000002")
    },
    "deliveries of an event": lambda connection: webhook_search.deliveries_of(connection, 500),
    "delivery": lambda connection: webhook_search.delivery(connection, 500),
    "webhooks": lambda connection: webhook_search.search(connection, WebhookFilter()),
    "webhook": lambda connection: webhook_search.webhook(connection, "wh-000002"),
    "secrets": lambda connection: webhook_search.secrets_of(connection, "wh-000002"),
    "counts": lambda connection: webhook_search.delivery_counts(connection, "wh-000002"),
    "figures": lambda connection: webhook_search.recent_attempts(connection, "wh-000001"),
    "failures": lambda connection: webhook_search.last_failures(connection, "wh-000001"),
    "accounts": lambda connection: vault_overview.accounts(connection),
    "vaults": lambda connection: vault_overview.vaults(connection),
    "vault row": lambda connection: vault_overview.vault(connection, "loud", "v1"),
    "amounts": lambda connection: vault_overview.daily(connection, "loud", "v1", NOW),
    "last report": lambda connection: vault_overview.last_report(connection, "loud", "v1"),
}


@pytest.mark.parametrize("name", READS)
async def test_no_large_table_is_read_sequentially(many: Database, name: str) -> None:
    async with many.transaction() as connection:
        checking = PlanCheckingConnection(connection)
        await READS[name](checking)
    assert checking.statements
    assert checking.sequential == []
    assert checking.sorted == []


async def test_a_sequential_scan_is_noticed(many: Database) -> None:
    async with many.transaction() as connection:
        checking = PlanCheckingConnection(connection)
        await checking.fetch("select from events where body = $1", b"")
        deliveries = await webhook_search.deliveries_of(checking, 1000)
        await webhook_search.attempts_of(checking, deliveries)
        assert checking.sorted == []
        await checking.fetch("select seq from events where account_id = 'loud' order by created_at_ms, seq offset 9999")
    assert [found.split(": ")[1] for found in checking.sequential][:2] == ["events", "events"]
    assert checking.sorted


async def test_amounts_of_a_vault_by_day(many: Database) -> None:
    async with many.transaction() as connection:
        found = await vault_overview.daily(connection, "quiet", "v1", NOW, 2)
        (before, today) = found.days
        assert (before.fundings, before.claims) == (0, 0)
        assert (today.fundings, today.funded_wei) == (QUIET // 2 - QUIET // 10, (QUIET // 2 - QUIET // 10) * 5)
        assert (today.claims, today.claimed_wei) == (QUIET // 10, QUIET // 10 * 10**18 // 4)
        assert found.since is None
        loud = await vault_overview.daily(connection, "loud", "v1", NOW, 2)
        assert loud.since == second(LOUD - vault_overview.LOOKED_AT + 1)


async def test_accounts_and_vaults_are_paged(many: Database) -> None:
    async with many.transaction() as connection:
        first = await vault_overview.accounts(connection, limit=1)
        assert [(row.id, row.vaults, row.webhooks, row.keys) for row in first.rows] == [("loud", 2, 2, 0)]
        rest = await vault_overview.accounts(connection, first.next_after or "")
        assert [row.id for row in rest.rows] == ["quiet"] and rest.next_after is None
        page = await vault_overview.vaults(connection, None, limit=3)
        assert [(row.account_id, row.id) for row in page.rows] == [("loud", "v1"), ("loud", "v2"), ("quiet", "v1")]
        assert page.next_after == ("quiet", "v1")
        assert all(row.registered and not row.validators.total for row in page.rows)
        assert len((await vault_overview.vaults(connection, "quiet")).rows) == 2
        assert await vault_overview.vault(connection, "quiet", "v3") is None


async def test_validators_are_counted_by_state(postgres18: ServerAddress) -> None:
    async with own_database(postgres18) as database:
        outbox = await simple_simulation(database)
        credentials = b"\x01" + bytes(11) + address("v1")
        await record(
            database,
            [
                ValidatorRecord(ValidatorIndex(n), Pubkey(n.to_bytes(48)), Hash32(credentials), activation, leaving)
                for n, (activation, leaving) in enumerate([(1, 5), (1, FAR), (3, 90), (90, FAR), (FAR, FAR)])
            ],
            known_through=10,
        )
        await commit(outbox, funding(1))
        async with database.transaction() as connection:
            shown = await vault_overview.vault(connection, "acme", "v1")
            assert shown is not None
            assert shown.validators == vault_overview.ValidatorCounts(pending=2, active=2, exited=1)
            assert await vault_overview.last_report(connection, "acme", "v1") is None
            await connection.execute(_REPORT)
            await connection.execute("update events set id = 'report_update_available_acme_v1_1760000000'")
            report = await vault_overview.last_report(connection, "acme", "v1")
        assert report is not None
        assert (report.timestamp, report.block_number) == (1_760_000_000, 9)
        assert report.event_id == "report_update_available_acme_v1_1760000000"


_REPORT = """
insert into reports (block_number, block_time_s, tx_hash, log_index, oracle, report_timestamp, ref_slot, root, cid,
    state) values (9, 9, decode(repeat('00', 32), 'hex'), 0, decode(repeat('00', 20), 'hex'), 1760000000, 1,
    decode(repeat('00', 32), 'hex'), 'cid', 'resolved')
"""
