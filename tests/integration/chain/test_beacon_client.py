"""The beacon client against nodes that lag, lie, break and babble: never a wrong record, always the node's name."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from beacon_fake import (
    CHECKPOINTS,
    CONFIG,
    GENESIS,
    GENESIS_ROOT,
    GENESIS_S,
    HEADER,
    QUICK,
    SECRET,
    SLOTS_PER_EPOCH,
    STATE,
    SYNCING,
    VALIDATORS,
    VAULT,
    FakeBeacon,
    Meddle,
    Page,
    beacon_chain,
    hang,
    record,
    refuse,
    root,
    ssz_state,
)
from vaultevents.chain.beacon import wire
from vaultevents.chain.beacon.client import BeaconChain, BeaconIdentity, BeaconOptions, Finality
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import ConfigError, InputError, NodeFault, SourceUnavailable, WrongNetwork
from vaultevents.core.units import Address, Hash32

pytestmark = pytest.mark.integration

VAULTS = frozenset({Address(VAULT)})
HERE = BeaconIdentity(GENESIS_ROOT, ChainTime(GENESIS_S, 12_000, SLOTS_PER_EPOCH))

Ask = Callable[[BeaconChain], Awaitable[Any]]


def data(change: Callable[[Any], Any]) -> Meddle:
    return lambda answer: answer | {"data": change(answer["data"])}


def add(**more: Any) -> Meddle:
    return lambda answer: answer | {"data": answer["data"] | more}


def page(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Meddle:
    def meddle(_: Any) -> Any:
        raise Page(status, body, headers)

    return meddle


def in_first(**fields: Any) -> Meddle:
    def change(records: list[Any]) -> list[Any]:
        first = records[0] | {key: value for key, value in fields.items() if key == "index"}
        validator = {key: value for key, value in fields.items() if key != "index"}
        return [first | {"validator": records[0]["validator"] | validator}, *records[1:]]

    return data(change)


async def some(chain: BeaconChain) -> Any:
    return [validator.index for validator in await chain.validators([0, 3, 6])]


async def tail(chain: BeaconChain) -> Any:
    return [one.index for one in await chain.tail(120)]


async def scan(chain: BeaconChain) -> Any:
    found = await chain.scan(VAULTS)
    return found.count, [one.index for one in found.records]


async def finality(chain: BeaconChain) -> Any:
    return (await chain.finality()).epoch


# What the first node does, what is asked, how the error message begins.
HOSTILE: dict[str, tuple[dict[str, Meddle], Ask, str]] = {
    "syncing": ({SYNCING: add(is_syncing=True, sync_distance="900")}, some, "is syncing, 900 slots behind"),
    "optimistic node": ({SYNCING: add(is_optimistic=True)}, some, "is optimistic"),
    "execution client gone": ({SYNCING: add(el_offline=True)}, finality, "has lost its execution client"),
    "calls itself synced, but its peers are ahead": ({SYNCING: add(sync_distance="65")}, scan, "65 slots behind"),
    "head far behind the clock": ({SYNCING: add(head_slot="31")}, some, "65 slots behind"),
    "head slot is no number": ({SYNCING: add(head_slot="0x10")}, some, "its head_slot is '0x10'"),
    "not finalized yet": (
        {CHECKPOINTS: add(finalized={"epoch": "0", "root": "0x" + "00" * 32})},
        finality,
        "has not finalized yet",
    ),
    "epoch of more than 64 bits": (
        {CHECKPOINTS: add(finalized={"epoch": str(2**64), "root": root(1)})},
        finality,
        "the finalized epoch is '18446744073709551616'",
    ),
    "head state is optimistic": (
        {CHECKPOINTS: lambda one: one | {"execution_optimistic": True}},
        finality,
        "optimistic",
    ),
    "finalized block is not that of the checkpoint": (
        {HEADER: add(root=root("else"))},
        finality,
        "its finalized block",
    ),
    "finalized block after its epoch": (
        {HEADER: add(header={"message": {"slot": "81"}})},
        finality,
        "its finalized block 81 is after the start of epoch 10",
    ),
    "finalized block is not canonical": ({HEADER: add(canonical=False)}, finality, "its finalized block is not"),
    "checkpoint without a root": (
        {CHECKPOINTS: add(finalized={"epoch": "10"})},
        finality,
        "does not have the known form",
    ),
    "short answer": ({VALIDATORS: data(lambda found: found[:2])}, some, "gives 2 of 3 validators; 6 is missing"),
    "comma lists taken for none": ({VALIDATORS: data(lambda _: [])}, some, "gives 0 of 3 validators; 0 is missing"),
    "a validator that was not asked": ({VALIDATORS: in_first(index="5")}, some, "it gives another one"),
    "a validator twice": ({VALIDATORS: data(lambda found: found + found[:1])}, some, "one of them twice"),
    "all validators": ({VALIDATORS: data(lambda _: [record(at) for at in range(130)])}, some, "it gives another one"),
    "optimistic state": ({VALIDATORS: lambda one: one | {"execution_optimistic": True}}, some, "optimistic"),
    "state that calls itself not final": ({VALIDATORS: lambda one: one | {"finalized": False}}, tail, "not finalized"),
    "short pubkey": ({VALIDATORS: in_first(pubkey="0x" + "ab" * 47)}, some, "the pubkey of validator 0"),
    "short credentials": ({VALIDATORS: in_first(withdrawal_credentials="0x01")}, some, "the withdrawal_credentials of"),
    "short credentials in a scan": ({VALIDATORS: in_first(withdrawal_credentials="0x01")}, scan, "not 32 bytes"),
    "activation beyond 64 bits": ({VALIDATORS: in_first(activation_epoch=str(2**64))}, some, "the activation_epoch of"),
    "negative exit": ({VALIDATORS: in_first(exit_epoch="-1")}, scan, "the exit_epoch of validator 0 is '-1'"),
    "hole in the tail": ({VALIDATORS: data(lambda found: found[:3] + found[4:])}, tail, "from 120 on have a gap"),
    "tail that begins late": ({VALIDATORS: data(lambda found: found[1:])}, tail, "from 120 on have a gap"),
    "pruned": ({VALIDATORS: refuse(404, "State not found: pruned")}, some, "HTTP status 404 (State not found: pruned)"),
    "scan of a pruned state": ({VALIDATORS: refuse(404, "NOT_FOUND")}, scan, "HTTP status 404 (NOT_FOUND)"),
    "bad request": ({VALIDATORS: refuse(400, "Invalid state id")}, some, "HTTP status 400 (Invalid state id)"),
    "scan not allowed": ({VALIDATORS: refuse(400, "too many validators")}, scan, "HTTP status 400 (too many"),
    "internal error": ({VALIDATORS: refuse(500, "MissingHotStateSummary")}, some, "HTTP status 500 (MissingHot"),
    "internal error in a scan": ({VALIDATORS: refuse(500, "oops")}, scan, "HTTP status 500 (oops)"),
    "too many ids": ({VALIDATORS: refuse(414)}, some, "HTTP status 414"),
    "wrong key": ({SYNCING: refuse(401, f"unknown key {SECRET}")}, some, "is the URL (with its key) right?"),
    "rate limit": ({SYNCING: refuse(429)}, some, "limits the rate of requests"),
    "rate limit for an hour": ({SYNCING: page(b"", 429, {"retry-after": "3600"})}, some, "for 300 s"),
    "web page": ({VALIDATORS: page(b"<html>Welcome</html>")}, some, "is not JSON (it begins with b'<html>"),
    "web page in a scan": ({VALIDATORS: page(b"<html>Welcome</html>")}, scan, "begins with b'<html>"),
    "empty answer": ({SYNCING: page(b"")}, some, "its sync state is not JSON"),
    "empty scan": ({VALIDATORS: page(b"")}, scan, "breaks off after 0 validators"),
    "redirect": ({SYNCING: page(b"", 302, {"location": "http://127.0.0.1:1/"})}, some, "HTTP status 302"),
    "compressed": ({VALIDATORS: page(b"x", 200, {"content-encoding": "gzip"})}, scan, "compresses its answers"),
    "half a list": (
        {VALIDATORS: page(json.dumps({"data": [record(0), record(1)]}).encode()[:-30])},
        scan,
        "JSON|breaks",
    ),
    "list without its end": (
        {VALIDATORS: page(json.dumps({"data": [record(0)]}).encode()[:-2])},
        scan,
        "breaks off after 0 validators",
    ),
    "list that loses one": ({VALIDATORS: data(lambda found: found[:7] + found[8:])}, scan, "not gapless: after"),
    "optimistic scan": ({VALIDATORS: lambda one: one | {"execution_optimistic": True}}, scan, "optimistic"),
    "error in place of a list": ({VALIDATORS: lambda _: {"code": 500, "message": "x"}}, scan, "breaks off after 0"),
}
HONEST: dict[Ask, Any] = {
    some: [0, 3, 6],
    tail: list(range(120, 130)),
    scan: (130, list(range(0, 130, 3))),
    finality: 10,
}


def check_reported(error: BaseException, chain: BeaconChain, words: str) -> None:
    text = "".join(traceback.format_exception(error))
    assert chain.nodes[0] in str(error)
    assert any(one in str(error) for one in words.split("|")), str(error)
    assert SECRET not in text


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_node_is_named_and_another_one_asked(name: str) -> None:
    meddle, ask, words = HOSTILE[name]
    honest = FakeBeacon()
    async with beacon_chain(FakeBeacon(meddle=meddle), honest) as chain:
        chain.expect(HERE)
        assert await ask(chain) == HONEST[ask]
        found_out = chain.counters.unavailable + chain.counters.node_faults
        assert found_out == (name != "rate limit"), "a node that is only asked too often is not at fault"
        asked = len(honest.seen)
        assert asked > 0
    async with beacon_chain(FakeBeacon(meddle=meddle)) as chain:
        chain.expect(HERE)
        with pytest.raises(SourceUnavailable) as caught:
            await ask(chain)
        check_reported(caught.value, chain, words)


async def test_an_honest_node_alone_answers_everything() -> None:
    async with beacon_chain(FakeBeacon()) as chain:
        chain.expect(await chain.identity())
        for ask, answer in HONEST.items():
            assert await ask(chain) == answer
        assert (chain.counters.unavailable, chain.counters.node_faults, chain.counters.scans) == (0, 0, 1)


async def test_identity_in_either_form_of_the_slot_length() -> None:
    node = FakeBeacon(meddle={CONFIG: lambda _: {"data": {"SLOT_DURATION_MS": "12000", "SLOTS_PER_EPOCH": "8"}}})
    async with beacon_chain(FakeBeacon(), node) as chain:
        assert await chain.identity() == HERE
        chain.expect(HERE)
        assert await some(chain) == [0, 3, 6]
    async with beacon_chain(node) as chain:
        assert await chain.identity() == HERE


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"SLOTS_PER_EPOCH": "8"}, "does not tell the length of a slot"),
        ({"SECONDS_PER_SLOT": "12"}, "does not tell the length of a slot"),
        ({"SECONDS_PER_SLOT": "12", "SLOT_DURATION_MS": "6000", "SLOTS_PER_EPOCH": "8"}, "does not tell"),
        ({"SECONDS_PER_SLOT": "12", "SLOTS_PER_EPOCH": ["8"]}, "its SLOTS_PER_EPOCH is"),
        ({"SECONDS_PER_SLOT": "0", "SLOTS_PER_EPOCH": "8"}, "not the time of a chain"),
    ],
)
async def test_a_configuration_without_a_clear_time_is_refused(settings: dict[str, Any], words: str) -> None:
    async with beacon_chain(FakeBeacon(meddle={CONFIG: lambda _: {"data": settings}})) as chain:
        with pytest.raises(NodeFault, match=words):
            await chain.identity()


@pytest.mark.parametrize(
    "meddle",
    [
        {GENESIS: add(genesis_validators_root=root("x"))},
        {GENESIS: add(genesis_time="1")},
        {CONFIG: add(SLOTS_PER_EPOCH="32")},
    ],
)
async def test_a_node_of_another_network_is_never_used(meddle: dict[str, Meddle]) -> None:
    stranger = FakeBeacon(meddle=meddle)
    async with beacon_chain(stranger, FakeBeacon()) as chain:
        chain.expect(HERE)
        assert await some(chain) == [0, 3, 6]
        assert stranger.asked(VALIDATORS) == 0
        assert chain.counters.wrong_network == 1
    async with beacon_chain(stranger) as chain:
        chain.expect(HERE)
        with pytest.raises(WrongNetwork, match="belongs to another network") as caught:
            await some(chain)
        assert chain.nodes[0] in str(caught.value)


async def test_a_node_that_breaks_off_in_the_middle_of_a_scan() -> None:
    async def half(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "99999"})
        await response.prepare(request)
        await response.write(b'{"data":[' + json.dumps(record(0)).encode() + b",")
        assert request.transport is not None
        request.transport.close()
        return response

    broken, honest = FakeBeacon(), FakeBeacon()
    broken.whole = half
    async with beacon_chain(broken, honest) as chain:
        assert await scan(chain) == HONEST[scan]
    async with beacon_chain(broken) as chain:
        with pytest.raises(SourceUnavailable, match="breaks off in the middle of an answer") as caught:
            await scan(chain)
        check_reported(caught.value, chain, "breaks off")


@pytest.mark.parametrize(
    ("ask", "options", "words"),
    [
        (some, replace(QUICK, total_timeout_s=1.5), "no whole answer within 1.5 s"),
        (scan, replace(QUICK, scan_idle_s=1.5), "sends nothing for 1.5 s"),
        (scan, replace(QUICK, scan_total_s=1.5), "no whole answer within 1.5 s"),
    ],
)
async def test_a_node_that_hangs(ask: Ask, options: BeaconOptions, words: str) -> None:
    stuck, honest = FakeBeacon(), FakeBeacon()
    stuck.whole = hang
    async with beacon_chain(stuck, honest, options=options) as chain:
        assert await ask(chain) == HONEST[ask]
    async with beacon_chain(stuck, options=options) as chain:
        with pytest.raises(SourceUnavailable) as caught:
            await ask(chain)
        check_reported(caught.value, chain, words)


async def test_an_answer_of_any_size_is_not_read_into_memory() -> None:
    async with beacon_chain(FakeBeacon(size=9000), options=replace(QUICK, answer_limit_bytes=20_000)) as chain:
        with pytest.raises(SourceUnavailable, match="more than 20000 bytes"):
            await chain.validators(range(200))


async def test_a_passing_fault_is_asked_again() -> None:
    turns = [500, 503, 429]

    def moody(found: Any) -> Any:
        if turns:
            return refuse(turns.pop())(found)
        return found

    async with beacon_chain(FakeBeacon(meddle={SYNCING: moody}), options=replace(QUICK, attempts=4)) as chain:
        assert await some(chain) == [0, 3, 6]
        assert chain.counters.retries == 3


@pytest.mark.parametrize("status", [404, 405, 400, 501])
async def test_post_is_tried_once_and_then_get_in_small_steps(status: int) -> None:
    old = FakeBeacon(meddle={f"POST {VALIDATORS}": refuse(status)})
    async with beacon_chain(old) as chain:
        assert [validator.index for validator in await chain.validators(range(0, 130, 2))] == list(range(0, 130, 2))
        assert await tail(chain) == HONEST[tail]
        asked = [(method, len(ids)) for method, path, ids in old.seen if path == VALIDATORS]
        assert asked == [("POST", 1), ("GET", 20), ("GET", 20), ("GET", 20), ("GET", 5), ("GET", 20)]
        assert chain.counters.posts_refused == 5


async def test_a_refused_post_whose_get_fails_too_says_nothing_about_the_node() -> None:
    node = FakeBeacon(meddle={VALIDATORS: refuse(404, "no such state")})
    async with beacon_chain(node) as chain:
        with pytest.raises(SourceUnavailable, match="no such state"):
            await some(chain)
        node.meddle = {}
        assert await some(chain) == [0, 3, 6]
        assert [method for method, path, _ in node.seen if path == VALIDATORS] == ["POST", "GET", "POST"]


async def test_no_list_without_ids_is_ever_sent() -> None:
    node = FakeBeacon(size=2100)
    async with beacon_chain(node) as chain:
        assert await chain.validators([]) == []
        assert node.seen == []
        assert [validator.index for validator in await chain.validators([*range(2050), 7, 7])] == list(range(2050))
        sizes = [len(sent["ids"]) for method, _, sent in node.seen if method == "POST"]
        assert sizes == [1000, 1000, 50]


async def test_the_tail_is_what_exists_up_to_its_length() -> None:
    async with beacon_chain(FakeBeacon()) as chain:
        assert [one.index for one in await chain.tail(0)] == list(range(64))
        assert [one.index for one in await chain.tail(129)] == [129]
        assert await chain.tail(130) == []


async def test_finality_goes_on_and_never_back() -> None:
    ahead, behind = FakeBeacon(epoch=11), FakeBeacon(epoch=10)
    async with beacon_chain(behind, ahead, options=replace(QUICK, set_aside_s=0.0)) as chain:
        chain.expect(HERE)
        assert await finality(chain) == 10
        behind.meddle = {CHECKPOINTS: refuse(500)}
        assert await finality(chain) == 11
        behind.meddle = {}
        assert await finality(chain) == 11  # the first node is asked again, and is behind
        ahead.meddle = {SYNCING: refuse(500)}
        with pytest.raises(
            SourceUnavailable, match=r"is behind: .* slot 80, but slot 88 \(epoch 11\) was final before"
        ):
            await finality(chain)


async def test_records_of_a_node_behind_the_finality_seen_are_not_taken() -> None:
    ahead, behind = FakeBeacon(epoch=11), FakeBeacon(epoch=11)
    async with beacon_chain(behind, ahead) as chain:
        assert await chain.finality() == Finality(11, Hash32(bytes.fromhex(root("one11")[2:])), 88)
        behind.epoch = 9  # what is behind this name now is another machine
        for ask in (some, tail, scan):
            assert await ask(chain) == HONEST[ask]
        assert behind.asked(VALIDATORS) == 0
        assert ahead.asked(VALIDATORS) == 3


@pytest.mark.parametrize("epoch", [11, 12])
async def test_a_node_on_another_final_chain_is_at_fault(epoch: int) -> None:
    fork = FakeBeacon(epoch=epoch)
    async with beacon_chain(FakeBeacon(epoch=11), fork) as chain:
        assert await finality(chain) == 11
        fork.chain = "two"
        assert await some(chain) == [0, 3, 6]
    async with beacon_chain(node := FakeBeacon(epoch=11)) as chain:
        assert await finality(chain) == 11
        node.chain, node.epoch = "two", epoch
        for ask in (finality, some, scan):
            with pytest.raises(SourceUnavailable, match=r"that was final before|HTTP status 404"):
                await ask(chain)


async def test_finality_moving_between_two_questions_is_no_fault() -> None:
    def older(found: Any) -> Any:
        return found | {"data": {"finalized": {"epoch": "9", "root": root("one9")}}}

    async with beacon_chain(FakeBeacon(meddle={CHECKPOINTS: older})) as chain:
        assert await chain.finality() == Finality(9, Hash32(bytes.fromhex(root("one9")[2:])), 72)


async def test_the_finalized_block_may_be_older_than_its_epoch() -> None:
    missed = {HEADER: add(header={"message": {"slot": "78"}})}
    async with beacon_chain(FakeBeacon(meddle=missed)) as chain:
        chain.expect(HERE)
        assert (await chain.finality()).block_slot == 78


def state_of(node: FakeBeacon) -> bytes:
    records = wire.validators("node", json.dumps({"data": node.records}).encode())
    return ssz_state(records, 64, random.Random(3), slot=(node.epoch + 1) * SLOTS_PER_EPOCH)


SSZ = {"content-type": "application/octet-stream", "eth-consensus-version": "fulu"}


async def test_a_scan_of_the_ssz_state_reads_no_more_than_the_validators() -> None:
    node = FakeBeacon(size=3000)
    node.meddle = {STATE: page(state_of(node) + bytes(5_000_000), 200, SSZ)}
    async with beacon_chain(node, options=replace(QUICK, ssz=True)) as chain:
        chain.expect(HERE)
        assert await scan(chain) == (3000, list(range(0, 3000, 3)))
        from_ssz = await chain.scan(VAULTS)
        assert node.asked(VALIDATORS) == 0
        assert chain.counters.scanned_bytes < 2 * 3000 * 121 + 2_000_000
    async with beacon_chain(node) as chain:
        assert await chain.scan(VAULTS) == from_ssz
        assert node.asked(VALIDATORS) == 1


@pytest.mark.parametrize(
    "offer",
    [
        refuse(404, "debug routes are off"),
        refuse(403),
        refuse(406),
        page(b"{}", 200, {"content-type": "application/json", "eth-consensus-version": "fulu"}),
        page(b"?", 200, {"content-type": "application/octet-stream", "eth-consensus-version": "heze"}),
        page(b"?", 200, {"content-type": "application/octet-stream"}),
    ],
    ids=["404", "403", "406", "JSON", "another fork", "no fork"],
)
async def test_a_node_without_a_known_ssz_state_is_scanned_in_json_from_then_on(offer: Meddle) -> None:
    node = FakeBeacon(meddle={STATE: offer})
    async with beacon_chain(node, options=replace(QUICK, ssz=True)) as chain:
        assert await scan(chain) == HONEST[scan]
        assert await scan(chain) == HONEST[scan]
        assert (node.asked(STATE), node.asked(VALIDATORS)) == (1, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body[:9000], "its state breaks off after"),
        (lambda body: body[:8] + bytes(32) + body[40:], "its state is not of this network"),
        (lambda body: body[:40] + bytes(8) + body[48:], "of slot 0, before slot 80"),
    ],
)
async def test_a_wrong_ssz_state_is_a_fault_and_another_node_is_asked(
    change: Callable[[bytes], bytes], words: str
) -> None:
    broken = FakeBeacon()
    broken.meddle = {STATE: page(change(state_of(broken)), 200, SSZ)}
    for others in ([FakeBeacon()], []):
        async with beacon_chain(broken, *others, options=replace(QUICK, ssz=True)) as chain:
            chain.expect(HERE)
            assert await finality(chain) == 10
            if others:
                assert await scan(chain) == HONEST[scan]
                continue
            with pytest.raises(NodeFault) as caught:
                await scan(chain)
            check_reported(caught.value, chain, words)


async def test_every_node_that_failed_is_named() -> None:
    nodes = [FakeBeacon(meddle={SYNCING: refuse(500)}), FakeBeacon(meddle={SYNCING: add(is_optimistic=True)})]
    async with beacon_chain(*nodes) as chain:
        with pytest.raises(SourceUnavailable) as caught:
            await some(chain)
        assert all(name in str(caught.value) for name in chain.nodes)


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong in ({"ids_per_post": 0}, {"ids_per_post": 1001}, {"tail": 0}, {"scan_idle_s": 0}, {"set_aside_s": -1}):
        with pytest.raises(ConfigError, match="of the beacon chain"):
            BeaconOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no beacon node is configured"):
        BeaconChain([])
    with pytest.raises(InputError, match="configured twice"):
        BeaconChain(["http://a/", "http://a/"])


async def test_how_far_each_node_is_behind_is_known() -> None:
    syncing = FakeBeacon(meddle={SYNCING: add(is_syncing=True, sync_distance="900")})
    first, behind = FakeBeacon(), FakeBeacon()
    behind.lag = 3
    async with beacon_chain(syncing, first, behind) as chain:
        assert [state.lag for state in chain.node_states()] == [None] * 3
        await chain.finality()
        assert [state.lag and state.lag.behind for state in chain.node_states()] == [900, 0, None], "which were asked"
        await first.stop()
        await chain.finality()
        assert [state.lag and state.lag.behind for state in chain.node_states()] == [900, 0, 3]
        assert all(state.latency is not None for state in chain.node_states())
