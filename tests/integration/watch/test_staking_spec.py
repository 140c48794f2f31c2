"""The whole service on a chain made by the executable consensus specification: rows equal the states of the spec.

Discovery, the two streams and the outbox run on the node's Beacon API and JSON-RPC while its head moves on; the rows
are compared with what the specification's own states and payloads hold.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from simulation_fixtures import StakingSources, drive, rows
from specchain import VAULT, Expected, SpecChain, built_once, expected
from specnode import SpecNode
from vaultevents.chain.beacon.client import BeaconChain, BeaconOptions
from vaultevents.chain.execution.client import ExecutionChain, HeadPolicy
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, eth_text
from vaultevents.store import accounts
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.watch.discovery import Discovery
from vaultevents.watch.validators import ValidatorsSource
from vaultevents.watch.withdrawals import WithdrawalsSource

pytestmark = pytest.mark.integration

HEADS = (33, 40, 41, 48, 57, 64, 72, 79, 80, 88, 97, 104, 112, 120, 128)
START_BLOCK = 1


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> SpecChain:
    return built_once(tmp_path_factory, worker_id)


@pytest.fixture
def node(chain: SpecChain) -> Iterator[SpecNode]:
    with SpecNode(chain) as serving:
        yield serving


@asynccontextmanager
async def service(database: Database, node: SpecNode) -> AsyncIterator[StakingSources]:
    async with (
        ExecutionChain([node.url], head=HeadPolicy()) as execution,
        BeaconChain([node.url], BeaconOptions(), clock=lambda: node.now_s) as beacon,
    ):
        identity = await beacon.identity()
        beacon.expect(identity)
        discovery = Discovery(beacon, execution, database, identity.time, poll_s=0.05)
        validators = ValidatorsSource(database, identity.time, lambda: node.now_s)
        withdrawals = WithdrawalsSource(execution, beacon, database, identity.time, discovery.meet)
        yield StakingSources(discovery, validators, withdrawals, beacon, identity.time)


def test_no_checkpoint_is_final_before_the_second_epoch_after_it(chain: SpecChain) -> None:
    """By the specification: until then no node need be asked for the finalized block (`ChainTime.may_finalize`)."""
    per_epoch = chain.slots_per_epoch
    assert any(block.finalized.epoch for block in chain.blocks)
    assert all(block.finalized.epoch <= max(0, block.slot // per_epoch - 2) for block in chain.blocks)


def due(chain: SpecChain, node: SpecNode) -> dict[str, dict[str, object]]:
    """Event id → what its body must say, from the specification. Genesis is before the vault's first block."""
    found = expected(chain, VAULT, node.head_slot)
    return {_id(item): _says(item) for item in found if item.created_at_ms >= chain.time_s(START_BLOCK) * 1000}


def _id(one: Expected) -> str:
    suffix = f"_{one.epoch}" if one.event_type == "validator_withdrawal_completed" else ""
    return f"{one.event_type}_acme_{one.validator_index}{suffix}"


def _says(one: Expected) -> dict[str, object]:
    said: dict[str, object] = {"epoch": one.epoch, "created_at": one.created_at_ms}
    if one.amount_gwei is not None:
        said["amount_eth"] = eth_text(one.amount_gwei * 10**9)
    return said


async def stored(database: Database) -> dict[str, dict[str, object]]:
    found = {}
    for (_, event_id), body in (await rows(database)).items():
        envelope = json.loads(body)
        said = {"epoch": envelope["payload"]["epoch"], "created_at": envelope["created_at"]}
        if "amount_eth" in envelope["payload"]:
            said["amount_eth"] = envelope["payload"]["amount_eth"]
        found[event_id] = said
    return found


async def test_live_over_the_whole_chain_gives_the_events_of_the_specification(
    database: Database, chain: SpecChain, node: SpecNode
) -> None:
    await accounts.add_account(database, "acme", "acme")
    await accounts.add_vault(database, "acme", "vault-1", Address(VAULT), None, START_BLOCK)
    outbox = Outbox(database)
    node.head_slot = HEADS[0]
    async with service(database, node) as sources:
        await sources.open(database)
        for head in HEADS:
            node.head_slot = head
            await sources.follow(outbox, step=1)
            assert await stored(database) == due(chain, node), f"at head slot {head}"
        kinds = {event_id.split("_acme_")[0] for event_id in due(chain, node)}
        assert kinds == {"validator_activated", "validator_exited", "validator_withdrawal_completed"}
        before = await rows(database)
        for source in (sources.validators, sources.withdrawals):
            for first in (0, 5):
                cursor = await outbox.begin_replay(source.stream, Span(first, await source.head()))
                done = [one.committed for one in await drive(source, outbox, cursor, 2)]
                await outbox.end_replay(cursor)
                assert not any(outcome.inserted or outcome.different for outcome in done)
        assert await rows(database) == before


async def test_a_late_start_gives_the_same_rows_at_once(database: Database, chain: SpecChain, node: SpecNode) -> None:
    await accounts.add_account(database, "acme", "acme")
    await accounts.add_vault(database, "acme", "vault-1", Address(VAULT), None, START_BLOCK)
    node.head_slot = HEADS[-1]
    async with service(database, node) as sources:
        await sources.open(database)
        await sources.follow(Outbox(database), step=4)
    assert await stored(database) == due(chain, node)
