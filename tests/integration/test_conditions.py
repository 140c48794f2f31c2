"""Each condition is raised by what really causes it, and clears when that is over.

Some are in the tests of their subject, where their cause exists already: reports, quarantine, reorgs, clocks, tokens,
step-up, finality, findings of the audit, and a full disk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from dispatch_factories import dispatching, subscribe, until
from fault_injection import OPTIONS, beacon_of, followed, simulation_of
from lying_node import Lie, LyingServer
from raised_conditions import forget_counts, let_counts_pass, raised, raised_by_process
from simulation_fixtures import open_at, read_to_head, reading, register
from store_factories import (
    LEASE_S,
    carry_out,
    change,
    commit,
    funding,
    live,
    settlement,
    shift_clock,
    simple_simulation,
    some_deliveries,
    take,
    webhook,
)
from timeouts import until_true
from vaultevents.core.verdict import RULES, conditions
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.blocks import FULL_BLOCK_LOGS
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.receivers import Receivers
from vaultevents.store import verdict_facts
from vaultevents.store.deliveries import settle
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.webhooks import disable_webhook, switch_on
from vaultevents.watch import watcher
from vaultevents.watch.prefetch import Prefetcher

pytestmark = pytest.mark.integration

BLOCKS = 100
NEARLY_ALL = 90
CLOCK_OFF = "VaulteventsClockOff"
"""Raised wherever a test moves the clock of the database."""


@pytest.fixture(autouse=True)
def at_the_start_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_counts(monkeypatch)
    monkeypatch.setattr(watcher, "BACKOFF_S", (0.02,))


@asynccontextmanager
async def receiving(directory: Path) -> AsyncIterator[Receivers]:
    made = Receivers(directory)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def until_raised(database: Database, name: str) -> None:
    async def is_raised() -> bool:
        return name in await raised(database)

    await until_true(is_raised)


async def until_cleared(database: Database, name: str) -> None:
    async def is_cleared() -> bool:
        return name not in await raised(database)

    await until_true(is_cleared)


async def test_a_stream_far_from_the_head_is_behind_until_it_has_caught_up(database: Database) -> None:
    made = simulation_of(81, BLOCKS)
    await register(database, made)
    await open_at(database, made, 5)
    outbox = Outbox(database)
    async with reading(ExecutionServer(made.chain), options=OPTIONS) as source:
        with closing(Prefetcher(source, 10)) as reader:
            await watcher.advance(reader, outbox, await live(outbox))
        assert await raised(database) == {"VaulteventsBehind"}
        await read_to_head(source, outbox)
        assert await raised(database) == set()


async def test_a_node_that_fails_holds_its_stream_up_until_it_is_back(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = simulation_of(82, BLOCKS)
    node = ExecutionServer(made.chain)
    async with followed(database, made, node, begun=NEARLY_ALL, options=replace(OPTIONS, attempts=1)) as scenario:
        assert (await scenario.ending()).is_right
        assert await raised(database) == set()
        node.faults.rates = {Fault.ERROR: 1.0}
        await until_raised(database, "VaulteventsNodeUnavailable")
        await shift_clock(database, 901)
        assert await raised(database) >= {"VaulteventsStandsStill", "VaulteventsStreamHeldUp"}
        node.faults.stop()
        await scenario.grow(5)
        await until_cleared(database, "VaulteventsStandsStill")
        await until_cleared(database, "VaulteventsStreamHeldUp")
        assert "VaulteventsNodeUnavailable" in raised_by_process()
        let_counts_pass(monkeypatch)
        assert raised_by_process() == set()


@pytest.mark.parametrize(
    ("lie", "name"),
    [(Lie.INVENT, "VaulteventsNodeContradicts"), (Lie.EARLY_FORK, "VaulteventsChainDisagreement")],
)
async def test_a_node_that_lies_is_a_condition_until_it_is_honest(
    database: Database, monkeypatch: pytest.MonkeyPatch, lie: Lie, name: str
) -> None:
    made = simulation_of(83, BLOCKS)
    liar = LyingServer(made, lie)
    async with followed(database, made, liar, ExecutionServer(made.chain), begun=NEARLY_ALL) as scenario:
        await until_raised(database, name)
        liar.be_honest()
        assert (await scenario.ending()).is_right
        let_counts_pass(monkeypatch)
        await until_cleared(database, name)


async def test_a_beacon_chain_that_is_silent_is_a_condition(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = simulation_of(84, BLOCKS)
    beacon = BeaconServer(made.beacon)
    async with (
        beacon_of(made, beacon) as anchor,
        followed(database, made, ExecutionServer(made.chain), begun=NEARLY_ALL, anchor=anchor) as scenario,
    ):
        assert (await scenario.ending()).is_right
        assert raised_by_process() == set()
        await beacon.stop()

        async def is_silent() -> bool:
            made.step()
            return "VaulteventsAnchorSilent" in raised_by_process()

        await until_true(is_silent)
        await beacon.start()
        let_counts_pass(monkeypatch)
        assert "VaulteventsAnchorSilent" not in raised_by_process()


async def test_blocks_of_an_unknown_form_need_an_upgrade_until_one_of_a_known_form_is_committed(
    database: Database,
) -> None:
    made = simulation_of(85, BLOCKS)
    made.chain.schedule_fork("future", BLOCKS + 5)
    async with followed(database, made, ExecutionServer(made.chain), begun=NEARLY_ALL) as scenario:
        await scenario.grow(20)
        assert (await scenario.ending()).is_right
        assert await raised(database) == {"VaulteventsUpgradeNeeded"}
    await commit(Outbox(database))  # as a version does that knows the form
    assert await raised(database) == set()


async def test_full_blooms_beyond_the_budget_are_a_condition(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(87)
    chain.filler_logs = FULL_BLOCK_LOGS
    made = simulation_of(87, 12, chain)
    await register(database, made)
    await open_at(database, made, 1)
    async with reading(ExecutionServer(chain), options=replace(OPTIONS, blooms_per_day=0)) as source:
        await read_to_head(source, Outbox(database))
    assert await raised(database) == {"VaulteventsBloomsUnsettled"}
    let_counts_pass(monkeypatch)
    assert await raised(database) == set()


async def test_deliveries_that_nobody_sends_wait_until_they_are_sent(database: Database, tmp_path: Path) -> None:
    async with receiving(tmp_path) as receivers:
        outbox = await simple_simulation(database)
        await subscribe(database, receivers, "one")
        await commit(outbox, *(funding(number) for number in range(6)))
        await shift_clock(database, 601)
        assert await raised(database) == {"VaulteventsDeliveriesWait", CLOCK_OFF}
        async with dispatching(database, receivers.ca_path):
            await until(database, {"delivered": 6})
        assert await raised(database) == {CLOCK_OFF}


@pytest.mark.parametrize(("name", "limit"), [("VaulteventsBacklog", 5), ("VaulteventsOutboxLarge", 11)])
async def test_a_number_of_rows_is_a_condition(database: Database, name: str, limit: int) -> None:
    """With the limit of a very small service."""
    (rule,) = (rule for rule in RULES if rule.name == name)
    await some_deliveries(database, 6)
    facts = await verdict_facts.read(database)
    assert conditions(facts) == ()
    assert rule.find(facts, (limit,)) is not None
    await change(database, "delete from queue where ctid = (select min(ctid) from queue)")
    await change(database, "delete from deliveries where id = (select min(id) from deliveries)")
    assert rule.find(await verdict_facts.read(database), (limit,)) is None


async def test_flags_that_deliveries_do_not_follow_are_a_condition_until_they_do(database: Database) -> None:
    _, made = await some_deliveries(database, 3)
    async with database.transaction() as connection:
        await disable_webhook(connection, made.id, "failing")
    await shift_clock(database, 901)
    assert "VaulteventsFlagChangesWait" in await raised(database)
    await carry_out(database)
    assert "VaulteventsFlagChangesWait" not in await raised(database)


async def test_the_leases_of_a_dead_dispatcher_are_a_condition(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving(tmp_path) as receivers:
        outbox = await simple_simulation(database)
        await subscribe(database, receivers, "one")
        await commit(outbox, *(funding(number) for number in range(3)))
        assert len((await take(database)).deliveries) == 3  # by a dispatcher that settles none of them
        assert await raised(database) == set()
        await shift_clock(database, LEASE_S + 1)
        async with dispatching(database, receivers.ca_path):
            await until(database, {"delivered": 3})
        assert await raised(database) == {"VaulteventsLeasesEnd", CLOCK_OFF}
    let_counts_pass(monkeypatch)
    assert await raised(database) == {CLOCK_OFF}


async def test_failures_park_a_webhook_until_a_delivery_is_accepted(database: Database) -> None:
    await some_deliveries(database, 6)
    *failed, last = (await take(database)).deliveries
    await settle(database, [settlement(delivery, "scheduled", 503, after_s=60.0) for delivery in failed])
    assert await raised(database) == {"VaulteventsWebhookParked"}
    await settle(database, [settlement(last)])
    assert await raised(database) == set()


async def test_a_webhook_that_is_gone_is_disabled_until_it_is_switched_on(database: Database) -> None:
    _, made = await some_deliveries(database, 1)
    await webhook(database)
    (delivery,) = (await take(database)).deliveries
    await settle(database, [settlement(delivery, "parked", 410, gone=True)])
    assert await raised(database) == {"VaulteventsWebhookDisabled", "VaulteventsWebhookFails"}
    await switch_on(database, made.id)
    await carry_out(database)
    assert await raised(database) == {"VaulteventsWebhookFails"}  # it was disabled a moment ago
    await shift_clock(database, 901)
    assert not {"VaulteventsWebhookFails", "VaulteventsWebhookDisabled"} & await raised(database)


async def test_a_database_that_is_away_is_a_condition(database: Database) -> None:
    (condition,) = conditions(None)
    assert condition.name == "VaulteventsNotThere"
    assert condition.name not in await raised(database)
