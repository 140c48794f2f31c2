"""What nodes do wrong: it is named, nothing wrong is stored, nothing is lost, and a second node keeps all going."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from typing import Any, Self

import pytest

from simulation_fixtures import StakingSources, drive, register, rows
from staking_fixtures import LeavingOut, due, problems, staking_of, staking_simulation
from timeouts import WAIT_TIMEOUT_S, until_true
from vaultevents.chain.beacon.client import BeaconIdentity
from vaultevents.chain.execution import wire
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import NodeFault, SourceUnavailable, StreamStopped, WrongNetwork
from vaultevents.core.spans import Span
from vaultevents.core.units import Hash32
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.beaconnode import BeaconNode, Json
from vaultevents.devnet.blocks import Payout
from vaultevents.devnet.chain import At
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.node import Node
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.validators import paying
from vaultevents.store import status
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.store.pool import Database
from vaultevents.store.validators import known
from vaultevents.watch import withdrawals
from vaultevents.watch.prefetch import Prefetcher
from vaultevents.watch.watcher import advance, run, run_backfills

pytestmark = pytest.mark.integration

FRESH = Cursor(0, "withdrawals", "live", 0, 0, None, None)
"""Of a stream that has read nothing yet."""

Drop = Callable[[dict[str, Any]], list[Any]]


def dropping_last_of(number: int) -> Drop:
    return lambda block: block["withdrawals"][:-1] if block["number"] == hex(number) else block["withdrawals"]


def dropping_first_of(number: int) -> Drop:
    return lambda block: block["withdrawals"][1:] if block["number"] == hex(number) else block["withdrawals"]


def last_paying_block(made: Simulation, epoch: int) -> int:
    """The last block of an epoch that pays somebody, if it pays several and one of ours last."""
    paying = [block for block in made.chain.blocks(0, made.chain.head.number) if block.withdrawals]
    inside = [block for block in paying if made.beacon.epoch_of(block.slot) == epoch]
    return inside[-1].number if inside else 0


def epochs_that_end_with_ours(made: Simulation, last_epoch: int) -> list[int]:
    """The epochs whose last paying block pays several, of which the last goes to a vault."""
    vaults = {registration.address for registration in made.registrations}
    found = []
    for epoch in range(2, last_epoch):
        block = made.chain.block(last_paying_block(made, epoch))
        if block and len(block.withdrawals) > 1 and block.withdrawals[-1].address in vaults:
            found.append(epoch)
    return found


@pytest.fixture
def no_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes withdrawals that do not make up the root in their header, so that only their indices show a gap."""
    monkeypatch.setattr(wire, "_check_withdrawals", lambda *_: None)


@pytest.mark.usefixtures("no_roots")
async def test_a_withdrawal_left_out_at_the_end_of_a_span_is_noticed_before_it_counts(database: Database) -> None:
    made = staking_simulation(400)
    await register(database, made)
    outbox = Outbox(database)
    node = ExecutionServer(made.chain)
    async with staking_of(database, made, [node]) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        everything = await rows(database)
        assert everything == due(made)
        async with database.transaction() as connection:
            await connection.execute("delete from events")
        epochs = epochs_that_end_with_ours(made, await sources.withdrawals.head())
        assert len(epochs) >= 5
        whole = node.node
        for epoch in epochs:
            number = last_paying_block(made, epoch)
            node.node = LeavingOut(made.chain, dropping_last_of(number))
            cursor = await outbox.begin_replay("withdrawals", Span(epoch, epoch))
            with pytest.raises(NodeFault, match=r"127\.0\.0\.1.*leaves a gap"):
                await advance(Prefetcher(sources.withdrawals, 1), outbox, cursor)
            assert await outbox.stored(cursor) == cursor
            assert not await rows(database)
            node.node = whole
            await drive(sources.withdrawals, outbox, cursor, 1)
            stored = await rows(database)
            assert stored and stored.items() <= everything.items()
            async with database.transaction() as connection:
                await connection.execute("delete from events")


@pytest.mark.usefixtures("no_roots")
async def test_without_reading_on_the_wrong_sum_would_be_stored(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: where the next block pays nobody, the span alone has no gap."""
    made = staking_simulation(400)
    await register(database, made)
    outbox = Outbox(database)
    node = ExecutionServer(made.chain)
    async with staking_of(database, made, [node]) as sources:
        await sources.open(database)
        blocks = made.chain.blocks(0, made.chain.head.number)
        next_blocks = {
            epoch: next(one for one in blocks if made.beacon.epoch_of(one.slot) > epoch)
            for epoch in epochs_that_end_with_ours(made, await sources.withdrawals.head())
        }
        epoch = next(epoch for epoch, block in next_blocks.items() if not block.withdrawals)
        node.node = LeavingOut(made.chain, dropping_last_of(last_paying_block(made, epoch)))
        cursor = await outbox.begin_replay("withdrawals", Span(epoch, epoch))
        monkeypatch.setattr(withdrawals, "_pays", lambda _: False)
        await advance(Prefetcher(sources.withdrawals, 1), outbox, cursor)
        assert not (await rows(database)).items() <= due(made).items()


@pytest.mark.usefixtures("no_roots")
async def test_where_withdrawals_are_rare_what_follows_is_searched_as_far_as_needed(database: Database) -> None:
    made = Simulation(5)
    vault = made.registrations[0]
    made.beacon.registry.append(0, b"\x05" * 48, paying(1, vault.address), active=True)
    for number in range(made.chain.head.number + 1, 900):
        pays = number in (100, 101, 600)
        made.chain.mine(payouts=[Payout(0, vault.address, number), Payout(0, vault.address, 1)] if pays else ())
    await register(database, made)
    outbox = Outbox(database)
    node = ExecutionServer(made.chain)
    async with staking_of(database, made, [node]) as sources:
        await sources.open(database)
        whole, node.node = node.node, LeavingOut(made.chain, dropping_last_of(101))
        with pytest.raises(NodeFault, match="withdrawal 4 in block 600 leaves a gap after 2"):
            await sources.follow(outbox)
        assert not [key for key in await rows(database) if "_withdrawal_" in key[1]]
        node.node = whole
        await sources.follow(outbox)
        assert await rows(database) == due(made)
        node.calls.clear()
        cursor = await outbox.begin_replay("withdrawals", Span(0, await sources.withdrawals.head()))
        await drive(sources.withdrawals, outbox, cursor, 8)
        assert node.calls["eth_getBlockByNumber"] < 5_000


@pytest.mark.usefixtures("no_roots")
async def test_a_withdrawal_left_out_at_the_beginning_of_an_unlinked_span_is_noticed_too(database: Database) -> None:
    made = staking_simulation(200)
    await register(database, made)
    outbox = Outbox(database)
    first = next(
        block
        for block in made.chain.blocks(20, 150)
        if block.slot % 8 == 0 and len(block.withdrawals) > 1
    )  # fmt: skip
    epoch = made.beacon.epoch_of(first.slot)
    node = ExecutionServer(made.chain)
    async with staking_of(database, made, [node]) as sources:
        await sources.open(database)
        node.node = LeavingOut(made.chain, dropping_first_of(first.number))
        cursor = await outbox.begin_replay("withdrawals", Span(epoch, epoch))
        with pytest.raises(NodeFault, match="leaves a gap"):
            await advance(Prefetcher(sources.withdrawals, 1), outbox, cursor)


async def test_an_epoch_that_is_no_longer_final_when_it_is_read_is_not_taken_for_complete(database: Database) -> None:
    made = staking_simulation(200)
    await register(database, made)
    outbox = Outbox(database)
    async with staking_of(database, made) as sources:
        await sources.open(database)
        head = await sources.withdrawals.head()
        registry = await outbox.registry()
        inside = [block.number for block in made.chain.blocks(0, 400) if made.beacon.epoch_of(block.slot) == head]
        made.chain.finalized = At(inside[len(inside) // 2])
        with pytest.raises(SourceUnavailable, match="final"):
            await sources.withdrawals.read(Span(head, head), FRESH, registry)


class OtherFinalBlock(Node):
    """An execution node that calls another block final than its chain has at that height."""

    def call(self, method: str, params: list[Any]) -> Any:
        answer = super().call(method, params)
        return {**answer, "hash": "0x" + "ab" * 32} if params[:1] == ["finalized"] else answer


async def test_blocks_that_do_not_end_in_the_finalized_one_are_not_taken(database: Database) -> None:
    made = staking_simulation(200)
    await register(database, made)
    outbox = Outbox(database)
    node = ExecutionServer(made.chain)
    async with staking_of(database, made, [node]) as sources:
        await sources.open(database)
        head = await sources.withdrawals.head()
        inside = [block.number for block in made.chain.blocks(0, 400) if made.beacon.epoch_of(block.slot) <= head]
        made.chain.finalized = At(inside[-1] + 1)
        node.node = OtherFinalBlock(made.chain)
        with pytest.raises(SourceUnavailable, match=f"block {inside[-1] + 1} does not hash"):
            await sources.withdrawals.read(Span(head, head), FRESH, await outbox.registry())


async def test_a_second_node_reads_on_where_the_first_leaves_out_the_end(database: Database) -> None:
    made = staking_simulation(400)
    await register(database, made)
    outbox = Outbox(database)
    ends = {last_paying_block(made, epoch) for epoch in range(200)} - {0}

    def drop(block: dict[str, Any]) -> list[Any]:
        entries: list[Any] = block["withdrawals"]
        return entries[:-1] if len(entries) > 1 and int(block["number"], 16) in ends else entries

    bad, good = ExecutionServer(made.chain), ExecutionServer(made.chain)
    bad.node = LeavingOut(made.chain, drop)
    async with staking_of(database, made, [bad, good]) as sources:
        await sources.open(database)
        await sources.follow(outbox, step=1)
        assert await rows(database) == due(made)
        for _ in range(12):
            for _ in range(8):
                made.step()
            await sources.follow(outbox, step=1)
        assert await rows(database) == due(made)


class Stream:
    """Runs what a daemon runs of a simulation's validators, in the background."""

    def __init__(self, sources: StakingSources, outbox: Outbox) -> None:
        self._sources, self._outbox = sources, outbox
        self._tasks: list[asyncio.Task[object]] = []

    async def __aenter__(self) -> Self:
        sources = self._sources
        self._tasks.append(asyncio.create_task(sources.discovery.run()))
        for source in (sources.validators, sources.withdrawals):
            live = await self._outbox.live(source.stream)
            assert live is not None
            self._tasks += [
                asyncio.create_task(run(source, self._outbox, live, step=4, poll_s=0.01)),
                asyncio.create_task(run_backfills(source, self._outbox, step=8, poll_s=0.01)),
            ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def positions(database: Database) -> dict[str, int]:
    return {cursor.stream: cursor.position for cursor in (await status.read(database)).cursors if cursor.kind == "live"}


BEACON_FAULTS = {
    Fault.SYNCING: r"is syncing, \d+ slots behind",
    Fault.OPTIMISTIC: "is optimistic",
    Fault.NOT_FOUND: "HTTP status 404",
    Fault.BAD_REQUEST: "HTTP status 400",
    Fault.HTTP_500: "HTTP status 500",
    Fault.HTML: "known form|not JSON",
    Fault.HALF_BODY: "breaks off in the middle of an answer",
    Fault.HANG: "gives no whole answer within",
    Fault.SHORT_ANSWER: r"gives \d+ of \d+ validators; \d+ is missing",
    Fault.FINALITY_BACK: "is behind: its finalized epoch is|block is not that of",
}


@pytest.mark.parametrize("kind", BEACON_FAULTS, ids=str)
async def test_a_faulty_beacon_node_is_named_and_a_second_one_keeps_all_going(database: Database, kind: Fault) -> None:
    made = staking_simulation(80)
    await register(database, made)
    outbox = Outbox(database)
    bad, good = BeaconServer(made.beacon), BeaconServer(made.beacon)
    async with staking_of(database, made, (), [bad, good], timeout_s=1.5 if kind is Fault.HANG else 10.0) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        good.faults.rates[Fault.HTTP_500] = 1.0
        bad.faults.rates[kind] = 1.0
        made.history(8 if kind is Fault.FINALITY_BACK else 40)  # two epochs back is then behind
        before, stored = await positions(database), await rows(database)
        async with Stream(sources, outbox):

            async def reported() -> bool:
                problem = (await problems(database))["validators"]
                return problem is not None and re.search(BEACON_FAULTS[kind], problem) is not None

            await until_true(reported)
            problem = (await problems(database))["validators"]
            assert problem is not None
            for name in sources.beacon.nodes:
                assert name in problem
            assert (await positions(database))["validators"] <= before["validators"] + 4
            assert (await rows(database)).items() <= due(made).items()
            assert stored.items() <= (await rows(database)).items()
            good.faults.stop()

            async def all_there() -> bool:
                return await rows(database) == due(made) and not any((await problems(database)).values())

            await until_true(all_there)
            assert bad.faults.fired[kind]
            made.history(40)
            await until_true(all_there)
            bad.faults.stop()
            good.faults.rates[Fault.HTTP_500] = 1.0
            made.history(40)
            await until_true(all_there)


@pytest.mark.parametrize("moment", ["first contact", "later"])
async def test_a_beacon_node_of_another_network_is_never_used(database: Database, moment: str) -> None:
    made, other = staking_simulation(120), staking_simulation(120, seed=4)
    await register(database, made)
    outbox = Outbox(database)
    stranger, good = BeaconServer(made.beacon), BeaconServer(made.beacon)
    async with staking_of(database, made, (), [stranger, good]) as sources:
        if moment == "later":
            await sources.open(database)
            await sources.follow(outbox)
        stranger.node = BeaconNode(other.beacon)
        sources.beacon.expect(identity_of(good, made))
        if moment == "first contact":
            await sources.open(database)
        made.history(40)
        stranger.calls.clear()
        await sources.follow(outbox)
        assert await rows(database) == due(made)
        assert set(stranger.calls) <= {"genesis", "spec"}
        good.faults.rates[Fault.NOT_FOUND] = 1.0
        with pytest.raises((WrongNetwork, SourceUnavailable), match="another network") as caught:
            await sources.discovery.step()
        assert all(name in str(caught.value) for name in sources.beacon.nodes)


EXECUTION_FAULTS = {
    Fault.NO_WITHDRAWALS: "has only one of the two",
    Fault.WITHDRAWAL_GAP: "do not make up the root",
    Fault.WITHDRAWAL_TWICE: "do not make up the root",
    Fault.UNLINKED_PARENT: "does not hash to the hash",
    Fault.NULL_BLOCK: "does not (have block|know its finalized block)",
    Fault.HANG: "gives no whole answer within",
    Fault.HTTP_500: "HTTP status 500",
}


@pytest.mark.parametrize("kind", EXECUTION_FAULTS, ids=str)
async def test_a_faulty_execution_node_is_named_and_a_second_one_keeps_all_going(
    database: Database, kind: Fault
) -> None:
    made = staking_simulation(80)
    await register(database, made)
    outbox = Outbox(database)
    bad, good = ExecutionServer(made.chain), ExecutionServer(made.chain)
    async with staking_of(database, made, [bad, good], timeout_s=1.5 if kind is Fault.HANG else 10.0) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        bad.faults.rates[kind] = good.faults.rates[kind] = 1.0
        made.history(40)
        before, stored = await positions(database), await rows(database)
        async with Stream(sources, outbox):

            async def reported() -> bool:
                problem = (await problems(database))["withdrawals"]
                return problem is not None and re.search(EXECUTION_FAULTS[kind], problem) is not None

            await until_true(reported)
            problem = (await problems(database))["withdrawals"]
            assert problem is not None
            assert problem.count("http://127.0.0.1#") == 2
            assert (await positions(database))["withdrawals"] == before["withdrawals"]
            assert {key: body for key, body in (await rows(database)).items() if "withdrawal" in key[1]} == {
                key: body for key, body in stored.items() if "withdrawal" in key[1]
            }
            good.faults.stop()

            async def all_there() -> bool:
                return await rows(database) == due(made) and not any((await problems(database)).values())

            await until_true(all_there)
            made.history(40)
            await until_true(all_there)
            bad.faults.stop()
            good.faults.rates[Fault.HTTP_500] = 1.0
            made.history(40)
            await until_true(all_there)


async def test_another_pubkey_for_an_index_stops_everything(database: Database) -> None:
    made = staking_simulation(80)
    await register(database, made)
    outbox = Outbox(database)
    beacon_node = BeaconServer(made.beacon)
    async with staking_of(database, made, (), [beacon_node], per_post=1) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        before = await rows(database), await positions(database), await known(database)
        made.history(30)
        beacon_node.faults.rates[Fault.OTHER_PUBKEY] = 1.0
        with pytest.raises(StreamStopped, match=r"validator \d+ had the pubkey 0x\w+ and has 0x\w+ now"):
            await asyncio.wait_for(sources.discovery.run(), WAIT_TIMEOUT_S)
        assert (await rows(database), await positions(database), await known(database)) == before


async def test_a_problem_that_an_earlier_run_reported_is_taken_back_by_the_next(database: Database) -> None:
    made = staking_simulation(80)
    await register(database, made)
    outbox = Outbox(database)
    async with staking_of(database, made) as sources:
        await sources.open(database)
        live = await outbox.live("validators")
        assert live is not None
        await outbox.note_problem(live, "the node was down when the daemon was stopped")
        async with Stream(sources, outbox):

            async def cleared() -> bool:
                return (await problems(database))["validators"] is None

            await until_true(cleared)


async def test_what_was_met_in_withdrawals_is_not_forgotten_when_a_node_fails_then(database: Database) -> None:
    made = staking_simulation(200)
    await register(database, made)
    beacon_node = BeaconServer(made.beacon)
    async with staking_of(database, made, (), [beacon_node]) as sources:
        await sources.open(database)
        ours = await known(database)
        async with database.transaction() as connection:
            await connection.execute("delete from validators where index = $1", ours[0].index)
        sources.discovery.meet(ours[:1])
        made.history(16)
        beacon_node.faults.rates[Fault.HTTP_500] = 1.0
        with pytest.raises(SourceUnavailable):
            await sources.discovery.step()
        beacon_node.faults.stop()
        await sources.discovery.step()
        assert ours[0].index in {record.index for record in await known(database)}


def identity_of(server: BeaconServer, made: Simulation) -> BeaconIdentity:
    genesis_s = made.beacon.genesis.timestamp_s
    time = ChainTime(genesis_s, made.chain.seconds_per_slot * 1000, made.beacon.slots_per_epoch)
    return BeaconIdentity(Hash32(server.node.beacon.genesis_validators_root), time)


async def test_a_look_at_finality_is_one_call_and_shows_once_an_epoch_that_a_node_does_not_follow(
    database: Database,
) -> None:
    made = staking_simulation(80)
    await register(database, made)
    beacon_node = BeaconServer(made.beacon)
    async with staking_of(database, made, (), [beacon_node]) as sources:
        await sources.open(database)
        made.chain.freeze_finality()
        await sources.discovery.step()
        beacon_node.calls.clear()
        for _ in range(5):
            await sources.discovery.step()
        assert beacon_node.calls == {"finality_checkpoints": 5}
        beacon_node.faults.rates[Fault.SYNCING] = 1.0
        await sources.discovery.step()  # nothing new is asked for: nothing can be wrong
        made.history(made.beacon.slots_per_epoch)
        for _ in range(2):
            with pytest.raises(SourceUnavailable, match="is syncing"):
                await sources.discovery.step()
        beacon_node.faults.stop()
        assert await sources.beacon.finalized_epoch() == made.beacon.finality(made.chain.finalized_number).epoch


async def test_a_node_that_falls_behind_is_left_for_one_that_does_not(database: Database) -> None:
    made = staking_simulation(80)
    await register(database, made)
    late, good = BeaconServer(made.beacon), BeaconServer(made.beacon)
    async with staking_of(database, made, (), [late, good], set_aside_s=30) as sources:
        await sources.open(database)
        late.node.final_epochs_back = 3
        made.history(8)
        assert await sources.beacon.finalized_epoch() == made.beacon.finality(made.chain.finalized_number).epoch
        assert sources.beacon.counters.unavailable == 1


class Gappy(BeaconNode):
    """A beacon node that does not give one validator."""

    def validators(self, state_id: str, ids: Collection[str], statuses: Collection[str] = ()) -> Json:
        answer = super().validators(state_id, ids, statuses)
        return {**answer, "data": [item for item in answer["data"] if item["index"] != str(GONE)]}


GONE = 30


async def test_a_gap_among_the_newest_validators_is_a_fault_of_the_node(database: Database) -> None:
    made = staking_simulation(80)
    bad, good = BeaconServer(made.beacon), BeaconServer(made.beacon)
    bad.node = Gappy(made.beacon)
    async with staking_of(database, made, (), [bad, good], tail=4, per_post=6) as sources:
        found = await sources.beacon.refresh([1, 4, 22, 31], 20)
        size = made.beacon.registry.count(made.beacon.finality(made.chain.finalized_number).block.slot)
        assert [record.index for record in found.records] == [1, 4, 22, 31]
        assert [record.index for record in found.newest] == list(range(20, size))
        assert sources.beacon.counters.node_faults == 1
        good.faults.rates[Fault.HTTP_500] = 1.0
        with pytest.raises(SourceUnavailable, match="have a gap"):
            await sources.beacon.refresh([1, 4, 22], 29)
        with pytest.raises(SourceUnavailable, match=f"{GONE} is missing, which exists"):
            await sources.beacon.refresh([1, GONE], size)
