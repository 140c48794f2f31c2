"""Validators found by deposits, where the beacon node refuses the list of all: the same events as by the list."""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest

from simulation_fixtures import Rows, StakingSources, add_accounts, add_vault, read_to_head, register, rows
from staking_fixtures import due, staking_of, staking_simulation
from vaultevents.core.deposits import DEPOSIT_EVENT, decode_deposit
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.units import Address
from vaultevents.core.validators import vault_of
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.blocks import Log, PlacedLog
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault, Faults
from vaultevents.devnet.node import Node
from vaultevents.devnet.simulation import Simulation
from vaultevents.store import status
from vaultevents.store.deposits import deposit_searches
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.validators import known, read_discovery

pytestmark = pytest.mark.integration


class LeavingOutDeposits(Node):
    """An execution node that leaves the deposits with these indices out of its logs, and of nothing else."""

    __slots__ = ("left_out",)

    def __init__(self, chain: Chain, left_out: Collection[int]) -> None:
        super().__init__(chain)
        self.left_out = left_out

    def logs(self, query: object) -> list[PlacedLog]:
        return [placed for placed in Node.logs(self, query) if not self._is_left_out(placed.log)]

    def _is_left_out(self, log: Log) -> bool:
        found = decode_deposit(log.data) if log.topics[0] == DEPOSIT_EVENT else None
        return found is not None and found.index in self.left_out


def leaving_out(made: Simulation, left_out: Collection[int]) -> ExecutionServer:
    server = ExecutionServer(made.chain)
    server.node = LeavingOutDeposits(made.chain, left_out)
    return server


def own_deposits(made: Simulation) -> list[int]:
    """The deposits that pay a vault, by index; nobody tops up, so that they are the indices of the validators."""
    vaults = {Address(entry.address) for entry in made.registrations}
    validators = made.beacon.registry.validators
    return [validator.index for validator in validators if vault_of(validator.credentials[0][1]) in vaults]


def last_own_deposits(made: Simulation) -> list[int]:
    """All deposits from that block on which has the last one for a vault, of those that have been final for long."""
    indices: dict[int, list[int]] = {}
    for placed in made.chain.logs(0, made.chain.head.number - 20, [DEPOSIT_EVENT]):
        deposit = decode_deposit(placed.log.data)
        assert deposit is not None
        indices.setdefault(placed.block.number, []).append(deposit.index)
    block = max(number for number, found in indices.items() if set(found) & set(own_deposits(made)))
    return sorted(index for number, found in indices.items() if number >= block for index in found)


def without_changed(made: Simulation, events: Rows) -> Rows:
    """Without the events of validators whose credentials have changed to those of a vault: no deposit names these."""
    validators = made.beacon.registry.validators
    changed = {str(validator.index) for validator in validators if validator.credentials[0][1][0] == 0}
    return {key: body for key, body in events.items() if not changed & set(key[1].split("_")[3:])}


async def follow_to_the_end(sources: StakingSources, made: Simulation, database: Database) -> None:
    """All of a history, then live blocks."""
    await sources.open(database)
    outbox = Outbox(database)
    await sources.follow(outbox)
    for _ in range(10):
        made.history(8)
        await sources.follow(outbox)
    await sources.follow(outbox)


@pytest.mark.parametrize("refusal", [403, 404, 405, 413, 501])
async def test_each_refusal_is_recognised(database: Database, refusal: int) -> None:
    made = staking_simulation(24)
    await register(database, made)
    async with staking_of(database, made, beacon_nodes=[BeaconServer(made.beacon, list_refusal=refusal)]) as sources:
        await sources.discovery.step()
    facts = await status.read(database)
    assert facts.validators_from == "deposits"
    assert re.search(rf"with HTTP status {refusal} ", facts.validator_list_refused or "")


async def test_deposits_give_the_same_bytes_as_the_list(database: Database) -> None:
    made = staking_simulation(120)
    await register(database, made)
    beacon_node = BeaconServer(made.beacon, list_refusal=403)
    async with staking_of(database, made, beacon_nodes=[beacon_node], deposit_step=50) as sources:
        await follow_to_the_end(sources, made, database)
    # `due` is what the list way gives, byte for byte (test_staking.py)
    assert await rows(database) == due(made)
    facts = await status.read(database)
    assert (facts.validators_from, facts.deposits_through) == ("deposits", made.chain.finalized_number)
    assert beacon_node.calls["all validators"] == 2  # it is not asked at each step
    assert len(await deposit_searches(database)) == 1


async def test_a_deposit_that_is_left_out_loses_events(database: Database) -> None:
    """The negative control. From some block on all are left out, so that no later one can show that one is missing."""
    made = staking_simulation(160, withdrawals_per_block=0)
    await register(database, made)
    beacon_node = BeaconServer(made.beacon, list_refusal=403)
    hidden = last_own_deposits(made)
    node = leaving_out(made, range(hidden[0], 10**6))
    async with staking_of(database, made, [node], [beacon_node]) as sources:
        await sources.open(database)
        found = {record.index for record in await known(database)}
        assert set(hidden) & set(own_deposits(made)) and not found & set(hidden)
        made.history(80)
        await sources.follow(Outbox(database))
        lost = without_changed(made, due(made)).keys() - (await rows(database)).keys()
        assert lost
        node.node = Node(made.chain)
        made.history(40)
        with pytest.raises(SourceUnavailable, match="leave out deposits before"):
            await sources.discovery.step()
        await sources.discovery.step()  # it has gone back, and finds them
        assert {record.index for record in await known(database)} >= set(hidden) & set(own_deposits(made))
        for _ in range(2):
            await sources.follow(Outbox(database))
        assert without_changed(made, await rows(database)) == without_changed(made, due(made))


async def test_a_gap_is_the_fault_of_its_node_and_of_no_other(database: Database) -> None:
    made = staking_simulation(120)
    await register(database, made)
    hidden = own_deposits(made)[3]
    for nodes in ([leaving_out(made, [hidden])], [leaving_out(made, [hidden]), ExecutionServer(made.chain)]):
        async with staking_of(
            database, made, nodes, [BeaconServer(made.beacon, list_refusal=403)], set_aside_s=9.0
        ) as sources:
            if len(nodes) == 1:
                with pytest.raises(SourceUnavailable, match="its deposits have a gap"):
                    await sources.discovery.step()
                assert (await read_discovery(database)).known_through is None
            else:
                await follow_to_the_end(sources, made, database)
    assert await rows(database) == due(made)


async def test_what_is_left_out_at_the_end_by_one_node_is_claimed_by_another(database: Database) -> None:
    made = staking_simulation(120)
    await register(database, made)
    last = range(len(made.beacon.registry.validators) - 4, 10**6)
    nodes = [leaving_out(made, last), ExecutionServer(made.chain)]
    async with staking_of(database, made, nodes, [BeaconServer(made.beacon, list_refusal=403)]) as sources:
        await follow_to_the_end(sources, made, database)
    assert await rows(database) == due(made)


async def test_a_search_goes_on_where_it_was_and_takes_up_vaults_that_are_added(database: Database) -> None:
    made = staking_simulation(100)
    await add_accounts(database, made.registrations)
    first, *later = made.registrations[:3]
    await add_vault(database, first)
    outbox = Outbox(database)
    for number, registration in enumerate([None, *later]):
        async with staking_of(
            database,
            made,
            beacon_nodes=[BeaconServer(made.beacon, list_refusal=403)],
            find_by="deposits",
            deposit_step=30,
        ) as sources:
            if registration is None:
                await sources.open(database)
            else:
                await add_vault(database, registration)
                assert not await sources.discovery.step(0.0)  # the new one is not complete, those before it are
                assert len(await deposit_searches(database)) == (1 if registration.address == first.address else 2)
            await sources.follow(outbox)
            found, wanted = await rows(database), due(made, [first, *later[:number]])
            assert without_changed(made, found) == without_changed(made, wanted)
            made.history(8)


async def test_the_list_is_used_again_when_it_is_given(database: Database) -> None:
    made = staking_simulation(80)
    await register(database, made)
    beacon_node = BeaconServer(made.beacon, list_refusal=404)
    outbox = Outbox(database)
    async with staking_of(database, made, beacon_nodes=[beacon_node]) as sources:
        await sources.open(database)
        await sources.follow(outbox)
        assert (await read_discovery(database)).source == "deposits"
    beacon_node = BeaconServer(made.beacon)
    made.history(40)
    async with staking_of(database, made, beacon_nodes=[beacon_node]) as sources:
        await sources.follow(outbox)
        assert (await read_discovery(database)).source == "list"
        assert (await status.read(database)).validator_list_refused is None
        made.history(40)
        await sources.follow(outbox)
    beacon_node = BeaconServer(made.beacon, list_refusal=403)
    async with staking_of(database, made, beacon_nodes=[beacon_node], find_by="list") as sources:
        async with database.transaction() as connection:
            await connection.execute("update discovery set scanned_at = scanned_at - interval '1 day'")
        with pytest.raises(SourceUnavailable, match=r"status 403 .*; set beacon\.validators = "):
            await sources.discovery.step()
    assert await rows(database) == due(made)


async def test_a_state_that_is_missing_for_a_moment_is_no_refusal(database: Database) -> None:
    made = staking_simulation(80)
    await register(database, made)
    faults = Faults(1)
    async with staking_of(database, made, beacon_nodes=[BeaconServer(made.beacon, faults=faults)]) as sources:
        faults.rates = {Fault.NOT_FOUND: 1.0}
        with pytest.raises(SourceUnavailable):
            await sources.discovery.step()
        faults.stop()
        await sources.discovery.step()
        assert (await read_discovery(database)).source == "list"


async def test_nodes_without_post_are_asked_by_get(database: Database) -> None:
    made = staking_simulation(80)
    await register(database, made)
    beacon_node = BeaconServer(made.beacon, list_refusal=405, post=False)
    async with staking_of(database, made, beacon_nodes=[beacon_node]) as sources:
        await sources.open(database)
        await sources.follow(Outbox(database))
    assert await rows(database) == due(made)
    assert beacon_node.calls["GET validators"] and not beacon_node.calls["POST validators"]


async def test_a_validator_with_changed_credentials_is_found_by_its_first_withdrawal(database: Database) -> None:
    """No deposit names it, so that its activation is late; once it is paid, nothing of it is missing."""
    made = staking_simulation(200)
    vaults = {Address(entry.address) for entry in made.registrations}
    await register(database, made)
    async with staking_of(database, made, beacon_nodes=[BeaconServer(made.beacon, list_refusal=403)]) as sources:
        await sources.open(database)
        for source in (sources.validators, sources.withdrawals):
            await read_to_head(source, Outbox(database))
        changed = {
            validator.index
            for validator in made.beacon.registry.validators
            if len(validator.credentials) > 1 and validator.credentials[0][1][0] == 0
            if vault_of(validator.credentials[-1][1]) in vaults
        }
        assert changed and not changed <= set(own_deposits(made))
        await sources.follow(Outbox(database))
        await sources.follow(Outbox(database))
        assert await rows(database) == due(made)
