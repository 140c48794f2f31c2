"""The devnet's Beacon API: what a beacon node answers, and the faults that it can have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from beacon_fixtures import blocks_of, simulation_of
from vaultevents.devnet.beacon import beacon_root
from vaultevents.devnet.beaconapi import BeaconServer
from vaultevents.devnet.chain import Absent, At, Lag
from vaultevents.devnet.faults import Fault, Faults
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.validators import FAR_FUTURE_EPOCH

pytestmark = pytest.mark.integration


@dataclass
class Client:
    """Asks one beacon node."""

    session: aiohttp.ClientSession
    url: str
    server: BeaconServer

    async def ask(self, path: str, ids: list[str] | None = None, body: Any = None) -> tuple[int, Any]:
        """GET, or POST where there is a body."""
        method = "GET" if body is None else "POST"
        params = [("id", one) for one in ids or []]
        async with self.session.request(method, self.url + path, params=params, json=body) as response:
            return response.status, await response.json()

    async def data(self, path: str, ids: list[str] | None = None, body: Any = None) -> Any:
        status, answer = await self.ask(path, ids, body)
        assert status == 200, answer
        return answer["data"]

    async def refusal(self, path: str, ids: list[str] | None = None, body: Any = None) -> tuple[int, str]:
        status, answer = await self.ask(path, ids, body)
        assert answer["statusCode"] == status
        return status, answer["message"]


@asynccontextmanager
async def serving(simulation: Simulation, **settings: Any) -> AsyncIterator[Client]:
    server = BeaconServer(simulation.beacon, **settings)
    url = await server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            yield Client(session, url, server)
    finally:
        await server.stop()


FINAL = "/eth/v1/beacon/states/finalized/validators"
CHECKPOINTS = "/eth/v1/beacon/states/head/finality_checkpoints"
HEADER = "/eth/v1/beacon/headers/finalized"


async def test_identity_and_time() -> None:
    simulation = simulation_of(blocks=60)
    async with serving(simulation, slot_fields=("SLOT_DURATION_MS",)) as node:
        assert (await node.data("/eth/v1/node/syncing"))["head_slot"] == str(simulation.chain.head.slot)
        assert "devnet" in (await node.data("/eth/v1/node/version"))["version"]
        genesis = await node.data("/eth/v1/beacon/genesis")
        assert genesis["genesis_time"] == str(simulation.beacon.genesis.timestamp_s)
        assert genesis["genesis_validators_root"] == "0x" + simulation.beacon.genesis_validators_root.hex()
        spec = await node.data("/eth/v1/config/spec")
        assert (spec["SLOT_DURATION_MS"], spec["SLOTS_PER_EPOCH"]) == ("12000", "8")
        assert "SECONDS_PER_SLOT" not in spec
        node.server.node.slot_fields = ("SECONDS_PER_SLOT",)
        spec = await node.data("/eth/v1/config/spec")
        assert (spec["SECONDS_PER_SLOT"], "SLOT_DURATION_MS" in spec) == ("12", False)
        assert node.server.calls == {"syncing": 1, "version": 1, "genesis": 1, "spec": 2}


async def test_headers_link_and_a_missed_slot_has_none() -> None:
    simulation = simulation_of(blocks=60)
    slots = [block.slot for block in blocks_of(simulation)]
    async with serving(simulation) as node:
        parent = "0x" + "00" * 32
        for slot in slots:
            header = await node.data(f"/eth/v1/beacon/headers/{slot}")
            message = header["header"]["message"]
            assert (message["slot"], message["parent_root"]) == (str(slot), parent)
            parent = header["root"]
        head = await node.data("/eth/v1/beacon/headers/head")
        assert (head["root"], head["canonical"]) == (parent, True)
        assert await node.data(f"/eth/v1/beacon/headers/{parent}") == head
        assert (await node.data("/eth/v1/beacon/headers/genesis"))["header"]["message"]["slot"] == "0"
        missed = next(slot for slot in range(slots[-1]) if slot not in slots)
        for absent in (str(missed), str(slots[-1] + 1000), "0x" + "11" * 32):
            refusal = await node.refusal(f"/eth/v1/beacon/headers/{absent}")
            assert refusal == (404, f"No block found for id '{absent}'")
        assert await node.refusal("/eth/v1/beacon/headers/nonsense") == (400, "Invalid block id 'nonsense'")
        assert (await node.refusal("/eth/v1/beacon/nothing"))[0] == 404


async def test_checkpoints_and_the_finalized_header_follow_the_chain() -> None:
    simulation = simulation_of(blocks=60)
    chain, beacon = simulation.chain, simulation.beacon
    async with serving(simulation) as node:

        async def final() -> tuple[int, str, int]:
            checkpoint = (await node.data(CHECKPOINTS))["finalized"]
            header = await node.data(HEADER)
            assert checkpoint["root"] in (header["root"], "0x" + "00" * 32)
            return int(checkpoint["epoch"]), checkpoint["root"], int(header["header"]["message"]["slot"])

        number = chain.finalized_number
        assert number is not None
        expected = beacon.finality(number)
        first = await final()
        assert first == (expected.epoch, "0x" + beacon_root(expected.block).hex(), expected.block.slot)
        chain.freeze_finality()
        for _ in range(30):
            simulation.step()
        assert await final() == first
        syncing = await node.data("/eth/v1/node/syncing")
        assert int(syncing["head_slot"]) == chain.head.slot
        chain.finalized = Lag(2)
        assert (await final())[0] > first[0]
        for unknown in (Absent.NULL, Absent.UNKNOWN, At(0)):
            chain.finalized = unknown
            assert await final() == (0, "0x" + "00" * 32, 0)


async def test_a_node_that_is_behind_knows_neither_the_newest_blocks_nor_their_finality() -> None:
    simulation = simulation_of(blocks=60)
    async with serving(simulation, behind=20) as node:
        known = simulation.chain.block(simulation.chain.head.number - 20)
        assert known is not None
        assert (await node.data("/eth/v1/node/syncing"))["head_slot"] == str(known.slot)
        assert (await node.refusal(f"/eth/v1/beacon/headers/{simulation.chain.head.slot}"))[0] == 404
        behind = int((await node.data(CHECKPOINTS))["finalized"]["epoch"])
        node.server.node.behind = 0
        assert int((await node.data(CHECKPOINTS))["finalized"]["epoch"]) > behind


async def test_a_state_knows_the_checkpoint_of_its_own_time() -> None:
    simulation = simulation_of(blocks=60)
    async with serving(simulation) as node:
        of_head = await node.data(CHECKPOINTS)
        of_final = await node.data(CHECKPOINTS.replace("head", "finalized"))
        assert int(of_final["finalized"]["epoch"]) < int(of_head["finalized"]["epoch"])


async def test_the_finalized_state_shows_the_past() -> None:
    simulation = simulation_of(blocks=120)
    registry = simulation.beacon.registry
    simulation.chain.finalized = At(60)
    slot = simulation.beacon.finality(60).block.slot
    async with serving(simulation) as node:
        shown = {int(item["index"]): item for item in await node.data(FINAL)}
        now = {int(item["index"]): item for item in await node.data(FINAL.replace("finalized", "head"))}
        assert set(shown) == set(range(registry.count(slot)))
        assert len(shown) < len(now) == len(registry.validators)
        assert node.server.calls == {"all validators": 2}
        later = 0
        for index, one in shown.items():
            validator, epochs = registry.validators[index], one["validator"]
            assert epochs["pubkey"] == "0x" + validator.pubkey.hex()
            decisions = [(validator.activation, "activation_epoch"), (validator.exit, "exit_epoch")]
            for decided, name in decisions:
                known = decided is not None and decided.slot <= slot
                assert epochs[name] == str(decided.epoch if decided is not None and known else FAR_FUTURE_EPOCH)
                later += decided is not None and not known
        assert later > 3


async def test_validators_are_asked_by_index_or_key_and_unknown_ids_are_dropped() -> None:
    simulation = simulation_of(blocks=60)
    pubkey = "0x" + simulation.beacon.registry.validators[5].pubkey.hex()
    wanted = ["3", "1", pubkey, "999999", "zzz"]
    async with serving(simulation) as node:
        by_post = await node.data(FINAL, body={"ids": wanted})
        assert [one["index"] for one in by_post] == ["5", "1", "3"]
        assert await node.data(FINAL, ids=wanted) == by_post
        assert await node.data(FINAL, ids=["0,1,3"]) == []
        assert await node.data(f"{FINAL}/3") == await node.data(f"{FINAL}/0x" + by_post[2]["validator"]["pubkey"][2:])
        assert await node.refusal(f"{FINAL}/999999") == (404, "Validator index from future state")
        assert await node.refusal(f"{FINAL}/zzz") == (400, "Invalid validator index")
        assert (await node.refusal(FINAL, ids=[str(n) for n in range(65)]))[0] == 414
        assert (await node.refusal(FINAL, body={"ids": [1]}))[0] == 400
        assert len(await node.data(FINAL, body={"ids": []})) == len(await node.data(FINAL, body={}))
        assert node.server.calls["all validators"] == 2
        ongoing = await node.data(FINAL, body={"statuses": ["active_ongoing"]})
        assert 0 < len(ongoing) < len(await node.data(FINAL, body={"statuses": ["active"]}))
        node.server.post = False
        assert await node.refusal(FINAL, body={"ids": ["1"]}) == (404, f"Route POST:{FINAL} not found")
        assert len(await node.data(FINAL, ids=["1"])) == 1


async def test_states_older_than_the_finalized_one_are_gone() -> None:
    simulation = simulation_of(blocks=60)
    async with serving(simulation) as node:
        final = simulation.beacon.finality(simulation.chain.finalized_number).block
        by_slot = FINAL.replace("finalized", str(final.slot))
        assert await node.data(by_slot, ids=["1"]) == await node.data(FINAL, ids=["1"])
        for gone in ("1", "9999", "0x" + "11" * 32):
            path = FINAL.replace("finalized", gone)
            assert await node.refusal(path, ids=["1"]) == (404, f"No state found for id '{gone}'")
        assert await node.refusal(FINAL.replace("finalized", "last"), ids=["1"]) == (400, "Invalid state id 'last'")


async def test_records_and_checkpoints_have_the_form_of_the_protocol() -> None:
    simulation = simulation_of(blocks=60)
    async with serving(simulation) as node:
        _, answer = await node.ask(f"{FINAL}/1")
        assert (answer["execution_optimistic"], answer["finalized"]) == (False, True)
        assert answer["data"].keys() == {"index", "balance", "status", "validator"}
        record = answer["data"]["validator"]
        assert record.keys() == {
            "pubkey", "withdrawal_credentials", "effective_balance", "slashed", "activation_eligibility_epoch",
            "activation_epoch", "exit_epoch", "withdrawable_epoch",
        }  # fmt: skip
        assert all(isinstance(value, bool if name == "slashed" else str) for name, value in record.items())
        assert (len(record["pubkey"]), len(record["withdrawal_credentials"])) == (98, 66)
        _, answer = await node.ask("/eth/v1/beacon/headers/head")
        assert answer["finalized"] is False
        assert (await node.data(CHECKPOINTS)).keys() == {"previous_justified", "current_justified", "finalized"}


async def test_statuses_are_those_of_the_epochs() -> None:
    simulation = simulation_of(blocks=200)
    async with serving(simulation) as node:
        for item in await node.data(FINAL):
            epoch = simulation.beacon.epoch_of(simulation.beacon.finality(simulation.chain.finalized_number).block.slot)
            activation, exits = int(item["validator"]["activation_epoch"]), int(item["validator"]["exit_epoch"])
            expected = "pending" if epoch < activation else "active" if epoch < exits else ("exited", "withdrawal")
            assert item["status"].startswith(expected)


# Its faults

Check = Callable[[Client], Awaitable[bool]]


def answers(status: int) -> Check:
    async def check(node: Client) -> bool:
        async with node.session.get(node.url + HEADER) as response:
            return response.status == status

    return check


async def is_html(node: Client) -> bool:
    async with node.session.get(node.url + HEADER) as response:
        return (response.status, response.content_type) == (200, "text/html")


async def is_silent(node: Client) -> bool:
    try:
        async with asyncio.timeout(0.2):
            await node.data(HEADER)
    except TimeoutError:
        return True
    return False


def breaks_off(path: str) -> Check:
    async def check(node: Client) -> bool:
        try:
            await node.data(path)
        except aiohttp.ClientPayloadError:
            return True
        return False

    return check


async def is_syncing(node: Client) -> bool:
    syncing = await node.data("/eth/v1/node/syncing")
    return bool(syncing["is_syncing"] and int(syncing["sync_distance"]) > 0)


async def says_optimistic(node: Client) -> bool:
    return bool((await node.data("/eth/v1/node/syncing"))["is_optimistic"])


def is_optimistic(path: str) -> Check:
    async def check(node: Client) -> bool:
        return bool((await node.ask(path))[1]["execution_optimistic"])

    return check


async def is_another_network(node: Client) -> bool:
    genesis = await node.data("/eth/v1/beacon/genesis")
    return bool(genesis["genesis_validators_root"] != "0x" + node.server.node.beacon.genesis_validators_root.hex())


async def checkpoint_goes_back(node: Client) -> bool:
    return int((await node.data(CHECKPOINTS))["finalized"]["epoch"]) < node.server.node.finality().epoch


async def header_goes_back(node: Client) -> bool:
    slot = int((await node.data(HEADER))["header"]["message"]["slot"])
    return slot < node.server.node.finality().block.slot


async def records_are_missing(node: Client) -> bool:
    state = node.server.node.finality().block
    return len(await node.data(FINAL)) < node.server.node.beacon.registry.count(state.slot)


async def is_short(node: Client) -> bool:
    return len(await node.data(FINAL, body={"ids": ["1", "2", "3"]})) == 2


async def has_another_key(node: Client) -> bool:
    validators = node.server.node.beacon.registry.validators
    records = await node.data(FINAL, body={"ids": ["1", "2", "3"]})
    keys = {int(record["index"]): record["validator"]["pubkey"] for record in records}
    wrong = [index for index, key in keys.items() if key != "0x" + validators[index].pubkey.hex()]
    assert all(len(key) == 98 for key in keys.values())
    return len(wrong) == 1


async def one_has_another_key(node: Client) -> bool:
    record = (await node.data(f"{FINAL}/1"))["validator"]
    return bool(record["pubkey"] != "0x" + node.server.node.beacon.registry.validators[1].pubkey.hex())


VISIBLE: list[tuple[Fault, Check]] = [
    (Fault.HTTP_500, answers(500)),
    (Fault.HTTP_429, answers(429)),
    (Fault.NOT_FOUND, answers(404)),
    (Fault.BAD_REQUEST, answers(400)),
    (Fault.HTML, is_html),
    (Fault.SLOW, is_silent),
    (Fault.HANG, is_silent),
    (Fault.HALF_BODY, breaks_off(HEADER)),
    (Fault.HALF_BODY, breaks_off(FINAL)),
    (Fault.SYNCING, is_syncing),
    (Fault.OPTIMISTIC, says_optimistic),
    *((Fault.OPTIMISTIC, is_optimistic(path)) for path in (HEADER, CHECKPOINTS, FINAL, f"{FINAL}/1")),
    (Fault.OTHER_NETWORK, is_another_network),
    (Fault.FINALITY_BACK, checkpoint_goes_back),
    (Fault.FINALITY_BACK, header_goes_back),
    (Fault.FINALITY_BACK, records_are_missing),
    (Fault.SHORT_ANSWER, is_short),
    (Fault.SHORT_ANSWER, records_are_missing),
    (Fault.OTHER_PUBKEY, has_another_key),
    (Fault.OTHER_PUBKEY, one_has_another_key),
]


@pytest.mark.parametrize("kind, check", VISIBLE, ids=[f"{kind}-{at}" for at, (kind, _) in enumerate(VISIBLE)])
async def test_each_fault_is_visible_when_it_fires_and_only_then(kind: Fault, check: Check) -> None:
    async with serving(simulation_of(blocks=100)) as node:
        assert not await check(node)
        node.server.faults.once(kind)
        assert await check(node)
        assert node.server.faults.fired == {kind: 1}
        assert not await check(node)


async def test_a_node_that_is_always_set_back_is_so_in_every_answer() -> None:
    simulation = simulation_of(blocks=100)
    async with serving(simulation, faults=Faults(1, {Fault.FINALITY_BACK: 1.0})) as node:
        epoch = int((await node.data(CHECKPOINTS))["finalized"]["epoch"])
        slot = int((await node.data(HEADER))["header"]["message"]["slot"])
        assert epoch == simulation.beacon.finality(simulation.chain.finalized_number).epoch - 2
        assert slot == simulation.beacon.last_block_at(8 * epoch).slot
        assert len(await node.data(FINAL)) == simulation.beacon.registry.count(slot)
        simulation.chain.finalized = At(0)
        assert (await node.data(CHECKPOINTS))["finalized"]["epoch"] == "0"


async def test_a_big_answer_arrives_whole() -> None:
    simulation = Simulation(1, validators=2000)
    async with serving(simulation) as node:
        assert [int(item["index"]) for item in await node.data(FINAL)] == list(range(2000))
