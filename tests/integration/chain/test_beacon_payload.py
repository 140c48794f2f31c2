"""The execution block that a beacon node calls final: devnet nodes that lag, contradict themselves, or are of Gloas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest

from vaultevents.chain.beacon import wire
from vaultevents.chain.beacon.client import BeaconChain, BeaconIdentity, BeaconOptions, Payload
from vaultevents.core.errors import NodeFault, SourceUnavailable, WrongNetwork
from vaultevents.core.units import Hash32
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.beaconnode import BeaconNode
from vaultevents.devnet.blocks import Block
from vaultevents.devnet.chain import Absent
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration

QUICK = BeaconOptions(retry_wait_s=0.01, set_aside_s=0.05)

Json = dict[str, Any]


def simulation_of(blocks: int = 60) -> Simulation:
    simulation = Simulation(71, missed_slot_share=0.2)
    simulation.history(blocks)
    return simulation


@asynccontextmanager
async def reading(
    simulation: Simulation, *servers: BeaconServer, options: BeaconOptions = QUICK
) -> AsyncIterator[BeaconChain]:
    """The client over these nodes, the first one preferred, with the clock of the chain's head."""
    async with AsyncExitStack() as stack:
        urls = []
        for server in servers:
            urls.append(await server.start())
            stack.push_async_callback(server.stop)
        clock = lambda: float(simulation.chain.head.timestamp_s)  # noqa: E731
        yield await stack.enter_async_context(BeaconChain(urls, options, clock=clock))


def final_block(simulation: Simulation) -> Block:
    return simulation.beacon.finality(simulation.chain.finalized_number).block


def payload_of(block: Block) -> Payload:
    return Payload(block.number, Hash32(block.hash), block.slot)


@pytest.mark.parametrize("blinded", [True, False])
async def test_the_finalized_block_names_the_execution_block_of_the_chain(blinded: bool) -> None:
    simulation = simulation_of()
    server = BeaconServer(simulation.beacon, blinded=blinded)
    async with reading(simulation, server) as chain:
        for _ in range(3):
            await chain.finality()
            assert await chain.payload("finalized") == payload_of(final_block(simulation))
            simulation.history(17)
        slots = {block.slot: block for block in simulation.chain.blocks(1, 60)}
        for slot in range(1, 40):
            block = slots.get(slot)
            assert await chain.payload(slot) == (None if block is None else payload_of(block))
    assert (server.calls["blinded block"] > 40, server.calls["block"] > 40) == (blinded, not blinded)


async def test_a_slot_that_no_block_has_teaches_nothing_about_the_routes_of_a_node() -> None:
    simulation = simulation_of()
    server = BeaconServer(simulation.beacon)
    slots = {block.slot for block in simulation.chain.blocks(0, simulation.chain.head.number)}
    missed = next(slot for slot in range(simulation.chain.head.slot) if slot not in slots)
    async with reading(simulation, server) as chain:
        assert await chain.payload(missed) is None
        assert await chain.payload("finalized") == payload_of(final_block(simulation))
    assert server.calls == {"syncing": 2, "blinded block": 2, "block": 1}


async def test_genesis_has_no_payload() -> None:
    simulation = simulation_of()
    simulation.chain.finalized = Absent.NULL
    async with reading(simulation, BeaconServer(simulation.beacon)) as chain:
        assert await chain.payload("finalized") is None


async def test_a_slot_that_the_node_has_not_reached_is_not_taken_for_an_empty_one() -> None:
    simulation = simulation_of()
    lagging, good = BeaconServer(simulation.beacon, behind=20), BeaconServer(simulation.beacon)
    head = simulation.chain.head
    async with reading(simulation, lagging) as chain:
        with pytest.raises(SourceUnavailable, match=f"has not reached slot {head.slot}"):
            await chain.payload(head.slot)
    lagging = BeaconServer(simulation.beacon, behind=20)
    async with reading(simulation, lagging, good) as chain:
        assert await chain.payload(head.slot) == payload_of(head)


async def test_a_node_whose_finality_goes_back_is_left_for_another() -> None:
    simulation = simulation_of()
    turning, good = BeaconServer(simulation.beacon), BeaconServer(simulation.beacon)
    async with reading(simulation, turning, good) as chain:
        await chain.finality()
        turning.node.final_epochs_back = 2
        assert await chain.payload("finalized") == payload_of(final_block(simulation))
        await good.stop()
        with pytest.raises(SourceUnavailable, match="is behind"):
            await chain.payload("finalized")


@pytest.mark.parametrize("fault", [Fault.HTTP_500, Fault.SYNCING, Fault.OPTIMISTIC, Fault.HTML, Fault.HALF_BODY])
async def test_another_node_is_asked_when_the_first_one_fails(fault: Fault) -> None:
    simulation = simulation_of()
    bad, good = BeaconServer(simulation.beacon), BeaconServer(simulation.beacon)
    async with reading(simulation, bad, good) as chain:
        bad.faults.rates = {fault: 1.0}
        assert await chain.payload("finalized") == payload_of(final_block(simulation))
        await good.stop()
        with pytest.raises(SourceUnavailable):
            await chain.payload("finalized")


async def test_a_node_of_another_network_is_not_believed() -> None:
    simulation, other = simulation_of(), Simulation(72)
    other.history(60)
    async with reading(simulation, BeaconServer(other.beacon)) as chain:
        identity = await chain.identity()
        chain.expect(BeaconIdentity(Hash32(simulation.beacon.genesis_validators_root), identity.time))
        with pytest.raises(WrongNetwork):
            await chain.payload("finalized")


async def test_an_answer_is_read_up_to_its_limit_and_no_further() -> None:
    simulation = simulation_of()
    async with reading(simulation, BeaconServer(simulation.beacon, blinded=False)) as chain:
        assert await chain.payload("finalized") is not None
    small = BeaconOptions(answer_limit_bytes=1024, retry_wait_s=0.01)
    async with reading(simulation, BeaconServer(simulation.beacon), options=small) as chain:
        with pytest.raises(SourceUnavailable, match="blinded_blocks/finalized is more than 1024 bytes"):
            await chain.payload("finalized")


async def test_a_block_of_gloas_proves_the_payload_before_it() -> None:
    simulation = simulation_of(20)
    simulation.chain.schedule_fork("amsterdam", 30)
    simulation.history(40)
    server = BeaconServer(simulation.beacon)
    async with reading(simulation, server) as chain:
        before, first, later = (simulation.chain.blocks(number, number)[0] for number in (29, 30, 31))
        assert await chain.payload(before.slot) == payload_of(before)
        assert await chain.payload(first.slot) == Payload(None, Hash32(before.hash), first.slot)
        assert await chain.payload(later.slot) == Payload(None, Hash32(first.hash), later.slot)
        final = final_block(simulation)
        assert final.number > 31
        assert await chain.payload("finalized") == Payload(None, Hash32(final.header.parent_hash), final.slot)
    assert server.calls["blinded block"] == 2  # of block 29, and once in vain of block 30


async def test_a_gloas_block_is_asked_in_full_after_its_blinded_form_was_refused() -> None:
    simulation = Simulation(73)
    simulation.chain.schedule_fork("amsterdam", 2)
    simulation.history(40)
    server = BeaconServer(simulation.beacon)
    async with reading(simulation, server) as chain:
        for _ in range(3):
            assert (await chain.payload("finalized")) is not None
    assert server.calls["block"] == 3


def test_the_names_of_gloas_are_those_of_the_specification() -> None:
    if find_spec("eth_consensus_specs") is None:
        pytest.skip("the package eth-consensus-specs is not installed (it is in requirements-test.lock)")
    spec: Any = import_module("eth_consensus_specs.gloas.minimal")
    body, bid = set(spec.BeaconBlockBody.fields()), set(spec.ExecutionPayloadBid.fields())
    assert "signed_execution_payload_bid" in body and not body & {"execution_payload", "execution_payload_header"}
    assert "parent_block_hash" in bid and "block_number" not in bid
    simulation = Simulation(74)
    simulation.chain.schedule_fork("amsterdam", 2)
    simulation.history(2)
    block = BeaconNode(simulation.beacon).block("head", blinded=False)["data"]["message"]["body"]
    assert set(block) <= body
    assert set(block["signed_execution_payload_bid"]["message"]) == bid


def answer(**changed: Any) -> bytes:
    payload = {"block_number": "7", "block_hash": "0x" + "ab" * 32} | changed.pop("payload", {})
    message = {"slot": "9", "body": {"execution_payload_header": payload}} | changed.pop("message", {})
    envelope = {"data": {"message": message}, "execution_optimistic": False, "finalized": True}
    return msgspec.json.encode(envelope | changed)


NONE_OF_THE_MERGE: list[Callable[[], bytes]] = [
    lambda: answer(message={"body": {}}),
    lambda: answer(payload={"block_hash": "0x" + "00" * 32}),
]


@pytest.mark.parametrize("content", NONE_OF_THE_MERGE)
def test_a_block_from_before_the_merge_has_no_payload(content: Callable[[], bytes]) -> None:
    assert wire.payload("node", content(), final=True) is None


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"payload": {"block_number": "0x7"}}, "the execution block number of slot 9 is '0x7', not a decimal"),
        ({"payload": {"block_number": 7}}, "does not have the known form"),
        ({"payload": {"block_hash": "0xab"}}, "the execution block hash of slot 9 is '0xab'"),
        ({"message": {"slot": "-1"}}, "the slot of a block is '-1'"),
        ({"message": {"body": None}}, "does not have the known form"),
        ({"message": {"body": {"signed_execution_payload_bid": {"message": {}}}}}, "does not have the known form"),
        ({"execution_optimistic": True}, "a block is optimistic"),
        ({"finalized": False}, "a block is marked as not finalized"),
    ],
)
def test_a_malformed_block_is_refused(changed: Json, problem: str) -> None:
    assert wire.payload("node", answer(), final=True) == Payload(7, Hash32(b"\xab" * 32), 9)
    with pytest.raises(SourceUnavailable, match=problem):
        wire.payload("node", answer(**changed), final=True)


class NextBlock(BeaconNode):
    """Answers with the block after the slot that was asked for."""

    def block(self, block_id: str, *, blinded: bool) -> Json:
        found = BeaconNode.block(self, block_id, blinded=blinded)
        number = self.beacon.last_block_at(int(found["data"]["message"]["slot"])).number + 1
        (following,) = self.beacon.chain.blocks(number, number)
        return BeaconNode.block(self, str(following.slot), blinded=blinded)


async def test_the_block_of_another_slot_is_a_fault() -> None:
    simulation = simulation_of()
    server = BeaconServer(simulation.beacon)
    server.node = NextBlock(simulation.beacon)
    (block,) = simulation.chain.blocks(5, 5)
    async with reading(simulation, server) as chain:
        with pytest.raises(NodeFault, match=f"asked for the block of slot {block.slot}, it answered with that of"):
            await chain.payload(block.slot)
