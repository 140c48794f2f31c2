"""The client on recorded answers: a real Lodestar 1.5.1, and states made by the executable specification."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from vaultevents.chain.beacon import wire
from vaultevents.chain.beacon.client import BeaconChain, BeaconIdentity, BeaconOptions, Finality, Payload
from vaultevents.chain.beacon.scan_json import ListScan
from vaultevents.chain.beacon.scan_ssz import StateScan
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.units import Address, Hash32
from vaultevents.core.validators import FAR_FUTURE_EPOCH, vault_of
from vaultevents.devnet.loopback import LoopbackServer

pytestmark = pytest.mark.integration

DATA = Path(__file__).parents[2] / "data" / "beacon"
LODESTAR = DATA / "lodestar-1.5.1-capella"
FULU = DATA / "pyspec-fulu"
VAULT = Address(bytes.fromhex("1111aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa2222"))
TIME = ChainTime(genesis_s=1_795_220_907, slot_ms=2_000, slots_per_epoch=8)
HEAD_S = TIME.genesis_s + 182 * 2
FINAL = Hash32(bytes.fromhex("02e4b5b2d64621b9ad9afc1622d416ef130147d1572e1c102221fb1dfbc4f268"))
VALIDATORS = "/eth/v1/beacon/states/finalized/validators"


def recording(name: str) -> Any:
    return json.loads((LODESTAR / f"{name}.json").read_text())


class Replay:
    """Answers each request with its recording, byte for byte as JSON; `instead` maps one to another."""

    def __init__(self, **instead: str) -> None:
        found = [recording(file.stem) for file in sorted(LODESTAR.glob("*.json"))]
        self.answers = {
            (item["request"]["method"], item["request"]["path"]): item for item in found if "path" in item["request"]
        }
        self.instead = instead
        self.seen: list[tuple[str, str]] = []
        self._server = LoopbackServer(self._answer)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append((request.method, request.path_qs))
        name = self.instead.get(request.method + request.path.rpartition("/")[2])
        reported = recording(name) if name else self.answers[request.method, request.path_qs]
        return web.Response(
            status=reported["status"],
            body=json.dumps(reported["body"], separators=(",", ":")).encode(),
            headers={"content-type": reported["content_type"]},
        )

    @asynccontextmanager
    async def chain(self, options: BeaconOptions | None = None) -> AsyncIterator[BeaconChain]:
        try:
            async with BeaconChain([await self._server.start()], options, clock=lambda: HEAD_S) as chain:
                yield chain
        finally:
            await self._server.stop()


async def test_a_real_node_from_its_genesis_to_its_validators() -> None:
    replay = Replay()
    async with replay.chain() as chain:
        identity = await chain.identity()
        root = recording("genesis")["body"]["data"]["genesis_validators_root"]
        assert identity == BeaconIdentity(Hash32(bytes.fromhex(root[2:])), TIME)
        chain.expect(identity)
        assert await chain.finality() == Finality(20, FINAL, 160)
        first, second, third = await chain.validators([6, 0, 1])
        assert [one.index for one in (first, second, third)] == [0, 1, 6]
        assert {vault_of(one.credentials) for one in (first, second, third)} == {VAULT}
        assert (first.activation_epoch, first.exit_epoch) == (0, FAR_FUTURE_EPOCH)
        assert (second.activation_epoch, second.exit_epoch) == (0, 10)
        assert third.activation_epoch == 8
        assert first.pubkey.hex().startswith("a99a76ed7796f7be")
        assert chain.counters.posts_refused == 1


async def test_a_client_without_post_is_asked_by_get_and_by_get_alone_afterwards() -> None:
    replay = Replay(POSTvalidators="validators_post")
    async with replay.chain() as chain:
        await chain.validators([0, 1, 6])
        await chain.validators([0, 1, 6])
    assert replay.seen == [
        ("GET", "/eth/v1/node/syncing"),
        ("POST", VALIDATORS),
        ("GET", f"{VALIDATORS}?id=0&id=1&id=6"),
        ("GET", "/eth/v1/node/syncing"),
        ("GET", f"{VALIDATORS}?id=0&id=1&id=6"),
    ]


async def test_the_empty_list_that_this_client_gives_for_comma_ids_is_never_taken_for_the_truth() -> None:
    assert recording("validators_get_comma_ids")["body"]["data"] == []
    async with Replay(GETvalidators="validators_get_comma_ids").chain() as chain:
        with pytest.raises(NodeFault, match="gives 0 of 3 validators; 0 is missing"):
            await chain.validators([0, 1, 6])


async def test_ids_that_do_not_exist_yet_are_no_fault_in_the_tail() -> None:
    async with Replay().chain(BeaconOptions(tail=1)) as chain:
        assert await chain.tail(999_999) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("state_old_slot", r"HTTP status 404 \(No state found for id '9'\)"),
        ("state_future_slot", r"HTTP status 404 \(No state found for id '1182'\)"),
        ("state_bad_id", r"HTTP status 400 \(Invalid state id 'nonsense'\)"),
        ("validator_bad_id", r"HTTP status 400 \(Invalid validator index\)"),
        ("validators_post", r"HTTP status 404 \(Route POST:.* not found\)"),
    ],
)
async def test_its_real_error_bodies_are_reported(name: str, words: str) -> None:
    async with Replay(GETvalidators=name, POSTvalidators=name).chain() as chain:
        for ask in (chain.validators([0]), chain.tail(0), chain.scan(frozenset({VAULT}))):
            with pytest.raises(SourceUnavailable, match=words):
                await ask


async def test_a_missed_slot_in_place_of_the_finalized_block_is_an_error() -> None:
    async with Replay(GETfinalized="header_missed_slot").chain() as chain:
        with pytest.raises(SourceUnavailable, match=r"HTTP status 404 \(No block found for id '178'\)"):
            await chain.finality()


async def test_the_header_of_the_head_is_not_taken_for_that_of_the_checkpoint() -> None:
    async with Replay(GETfinalized="header_head").chain() as chain:
        with pytest.raises(SourceUnavailable):
            await chain.finality()


async def test_a_node_without_blinded_blocks_gives_the_payload_of_the_full_one() -> None:
    """The hash is that of the execution client behind the recorded node, asked for block 0x6c."""
    block_hash = Hash32(bytes.fromhex("90db03814c211c0d3074d560ad376f1c31b92b9a21a614bce4b5dd34f7425fef"))
    replay = Replay()
    async with replay.chain() as chain:
        assert await chain.payload(108) == await chain.payload(108) == Payload(108, block_hash, 108)
        assert await chain.payload(178) is None
        with pytest.raises(SourceUnavailable, match="has not reached slot 1182: its head is slot 182"):
            await chain.payload(1182)
    assert [path for _, path in replay.seen if "blocks" in path] == [
        "/eth/v1/beacon/blinded_blocks/108",
        "/eth/v2/beacon/blocks/108",
        "/eth/v2/beacon/blocks/108",
        "/eth/v2/beacon/blocks/178",
    ]


@pytest.mark.parametrize("slot", [1, 80, 95])
def test_payloads_of_the_specification(slot: int) -> None:
    content = (FULU / f"block_{slot}.json").read_bytes()
    payload = json.loads(content)["data"]["message"]["body"]["execution_payload"]
    found = wire.payload("node", content, final=True)
    assert found == Payload(int(payload["block_number"]), Hash32(bytes.fromhex(payload["block_hash"][2:])), slot)


def test_answers_of_the_specification() -> None:
    checkpoint = wire.finalized_checkpoint("node", (FULU / "api_finality_head.json").read_bytes())
    assert (checkpoint.epoch, checkpoint.root.hex()[:8]) == (11, "620e6262")
    records = wire.validators("node", (FULU / "api_validators_finalized.json").read_bytes())
    assert [(record.index, record.credentials[0], record.exit_epoch) for record in records] == [
        (0, 1, FAR_FUTURE_EPOCH),
        (1, 1, 9),
        (2, 1, 9),
        (4, 2, FAR_FUTURE_EPOCH),
        (5, 2, FAR_FUTURE_EPOCH),
        (6, 2, FAR_FUTURE_EPOCH),
    ]


def test_a_scan_of_a_list_as_it_was_recorded() -> None:
    scan = ListScan("node", frozenset({VAULT}))
    scan.feed((FULU / "validators_vault.json").read_bytes())
    found = scan.finish()
    assert (found.count, [record.index for record in found.records]) == (9, list(range(8)))
    listed = wire.validators("node", (FULU / "validators_vault.json").read_bytes())
    assert found.records == listed[:8]


def test_a_list_of_one_status_is_no_list_of_all() -> None:
    scan = ListScan("node", frozenset({VAULT}))
    scan.feed(json.dumps(recording("validators_get_status")["body"]).encode())
    with pytest.raises(NodeFault, match="not gapless"):
        scan.finish()


@pytest.mark.parametrize("fork", ["electra", "fulu"])
@pytest.mark.parametrize("size", [1, 500, 10**6])
def test_a_state_serialised_by_the_specification(fork: str, size: int) -> None:
    """64 validators; every fifth is of the vault, active from the epoch of its own number, out 1000 epochs later."""
    body = (DATA / f"pyspec-{fork}" / "state.ssz").read_bytes()
    scan = StateScan("node", frozenset({VAULT}), roots=64, root=None, least_slot=88)
    for at in range(0, len(body), size):
        if not scan.is_done:
            scan.feed(body[at : at + size])
    found = scan.finish()
    assert found.count == 64
    assert [
        (record.index, record.activation_epoch, record.exit_epoch, record.credentials[0]) for record in found.records
    ] == [(index, index, 1000 + index, 2 if index % 2 else 1) for index in range(0, 64, 5)]
    listed = wire.validators("node", (FULU / "validators_vault.json").read_bytes())
    assert [record.pubkey for record in found.records[:2]] == [listed[0].pubkey, listed[5].pubkey]  # the same test keys
