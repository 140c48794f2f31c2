"""A scan finds the same validators whatever the layout of the body and wherever the network cuts it."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beacon_fake import GENESIS_ROOT as ROOT
from beacon_fake import ssz_state
from vaultevents.chain.beacon.scan_json import ListScan, Scan
from vaultevents.chain.beacon.scan_ssz import StateScan
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.units import Address, Hash32, Pubkey, ValidatorIndex
from vaultevents.core.validators import FAR_FUTURE_EPOCH, ValidatorRecord

pytestmark = pytest.mark.property

NODE = "http://node#1"
VAULTS = frozenset({Address(b"\x11" * 20), Address(b"\xab\xcd" * 10)})
STRANGERS = (b"\x11" * 19 + b"\x12", b"\x00" * 20, b"\xee" * 20)
PREFIXES = (b"\x01" + bytes(11), b"\x02" + bytes(11), bytes(12), b"\x01" + bytes(10) + b"\x01", b"\xb0" + bytes(11))

Json = dict[str, Any]

randoms = st.integers(0, 2**32).map(random.Random)
epochs = st.one_of(st.integers(0, 500_000), st.just(FAR_FUTURE_EPOCH))
validator_records = st.builds(
    lambda pubkey, prefix, address, activation, exit_epoch: (pubkey, prefix + address, activation, exit_epoch),
    st.binary(min_size=48, max_size=48),
    st.sampled_from(PREFIXES),
    st.sampled_from([*sorted(VAULTS), *STRANGERS]),
    epochs,
    epochs,
)
record_lists = st.lists(validator_records, max_size=40).map(
    lambda found: [
        ValidatorRecord(ValidatorIndex(at), Pubkey(pubkey), Hash32(credentials), activation, exit_epoch)
        for at, (pubkey, credentials, activation, exit_epoch) in enumerate(found)
    ]
)


def to_json(record: ValidatorRecord) -> Json:
    return {
        "index": str(record.index),
        "balance": "32000000000",
        "status": "active_ongoing",
        "validator": {
            "pubkey": "0x" + record.pubkey.hex(),
            "withdrawal_credentials": "0x" + record.credentials.hex(),
            "effective_balance": "32000000000",
            "slashed": False,
            "activation_eligibility_epoch": "0",
            "activation_epoch": str(record.activation_epoch),
            "exit_epoch": str(record.exit_epoch),
            "withdrawable_epoch": str(FAR_FUTURE_EPOCH),
        },
    }


def shuffled(rng: random.Random, value: Any) -> Any:
    """The same JSON with its keys in another order."""
    if isinstance(value, dict):
        return {key: shuffled(rng, value[key]) for key in rng.sample(sorted(value), len(value))}
    return [shuffled(rng, one) for one in value] if isinstance(value, list) else value


def written(rng: random.Random, value: Any) -> str:
    """The same JSON with white space of any kind wherever it may stand."""

    def space() -> str:
        return "".join(rng.choices(" \n\t\r", k=rng.choice((0, 0, 0, 1, 3))))

    def walk(value: Any) -> Iterator[str]:
        yield space()
        if isinstance(value, dict):
            yield "{" + space()
            for at, (key, one) in enumerate(value.items()):
                yield ("," if at else "") + space() + json.dumps(key) + space() + ":"
                yield from walk(one)
            yield "}"
        elif isinstance(value, list):
            yield "["
            for at, one in enumerate(value):
                yield "," if at else ""
                yield from walk(one)
            yield space() + "]"
        else:
            yield json.dumps(value)
        yield space()

    return "".join(walk(value))


def pieces(rng: random.Random, body: bytes, mean: int) -> Iterator[bytes]:
    while body:
        size = rng.randint(1, 2 * mean)
        yield body[:size]
        body = body[size:]


def scanned(body: bytes, rng: random.Random, mean: int) -> Scan:
    scan = ListScan(NODE, VAULTS)
    for piece in pieces(rng, body, mean):
        scan.feed(piece)
    return scan.finish()


def expected(records: list[ValidatorRecord]) -> Scan:
    credentials = {prefix + vault for prefix in PREFIXES[:2] for vault in VAULTS}
    return Scan([record for record in records if record.credentials in credentials], len(records))


FRAMES: list[Json] = [
    {"data": []},
    {"execution_optimistic": False, "finalized": True, "data": []},
    {"data": [], "execution_optimistic": False},
    {"version": "fulu", "meta": {"data": [{"x": 1}, {}]}, "data": [], "extra": [{"a": "},{"}, {"data": [{}, {}]}]},
]
# What a later version of the API may add to a record.
ADDITIONS: list[Json] = [
    {},
    {},
    {"note": 'a "text" },{ \\ ]}'},
    {"list": [{"index": "7"}, {"index": "8"}], "x": [[1], []]},
]


@given(
    record_lists,
    st.sampled_from(FRAMES),
    st.sampled_from(ADDITIONS),
    st.sampled_from(["compact", "spaced", "indented", "any space"]),
    st.booleans(),
    st.sampled_from([3, 50, 700, 5000, 10**6]),
    randoms,
)
@settings(max_examples=300)
def test_every_layout_and_cut_gives_the_same(
    records: list[ValidatorRecord], frame: Json, addition: Json, style: str, mix: bool, mean: int, rng: random.Random
) -> None:
    listed = [to_json(record) | addition for record in records]
    document = {key: listed if key == "data" else value for key, value in frame.items()}
    if mix:
        document["data"] = [shuffled(rng, item) for item in listed]
    match style:
        case "compact":
            text = json.dumps(document, separators=(",", ":"))
        case "spaced":
            text = json.dumps(document)
        case "indented":
            text = json.dumps(document, indent=4)
        case _:
            text = written(rng, document)
    assert scanned(text.encode(), rng, mean) == expected(records)


@given(record_lists, st.integers(1, 10**6), st.sampled_from([100, 5000, 10**6]), randoms)
@settings(max_examples=150)
def test_a_body_that_ends_early_is_never_taken_for_a_whole_one(
    records: list[ValidatorRecord], lost: int, mean: int, rng: random.Random
) -> None:
    body = json.dumps({"data": [to_json(record) for record in records], "finalized": True}).encode()
    with pytest.raises(NodeFault, match=NODE):
        scanned(body[: -(lost % len(body)) or -1], rng, mean)


@given(record_lists.filter(lambda found: len(found) > 1), st.data(), randoms)
@settings(max_examples=150)
def test_a_record_lost_doubled_or_moved_is_noticed(
    records: list[ValidatorRecord], data: st.DataObject, rng: random.Random
) -> None:
    at = data.draw(st.integers(0, len(records) - 2))
    fault = data.draw(st.sampled_from(["lost", "doubled", "moved"]))
    listed = [to_json(record) for record in records]
    if fault == "lost":
        del listed[at]
    elif fault == "doubled":
        listed.insert(at, listed[at])
    else:
        listed[at], listed[at + 1] = listed[at + 1], listed[at]
    with pytest.raises(NodeFault, match="not gapless"):
        scanned(json.dumps({"data": listed}).encode(), rng, 3000)


@given(record_lists, st.booleans(), st.sampled_from([10, 3000]), randoms)
@settings(max_examples=60)
def test_an_optimistic_or_unfinal_state_is_refused_wherever_it_says_so(
    records: list[ValidatorRecord], before: bool, mean: int, rng: random.Random
) -> None:
    listed = {"data": [to_json(record) for record in records]}
    for flag, words in (({"execution_optimistic": True}, "optimistic"), ({"finalized": False}, "not finalized")):
        document = flag | listed if before else listed | flag
        with pytest.raises(SourceUnavailable, match=words):
            scanned(json.dumps(document).encode(), rng, mean)


@given(record_lists, st.sampled_from([8, 64]), st.sampled_from([7, 300, 10**6]), randoms)
@settings(max_examples=150)
def test_the_ssz_of_a_state_gives_what_its_json_gives(
    records: list[ValidatorRecord], roots: int, mean: int, rng: random.Random
) -> None:
    body = ssz_state(records, roots, rng)
    scan = StateScan(NODE, VAULTS, roots, ROOT, 88)
    for piece in pieces(rng, body, mean):
        if not scan.is_done:
            scan.feed(piece)
    document = json.dumps({"data": [to_json(record) for record in records]}).encode()
    assert scan.finish() == scanned(document, rng, mean) == expected(records)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body[:5000], "breaks off"),
        (lambda body: body[:8] + bytes(32) + body[40:], "not of this network"),
        (lambda body: body[:40] + struct.pack("<Q", 87) + body[48:], "before slot 88"),
        (lambda body: body[:4360] + struct.pack("<II", 5000, 5120) + body[4368:], "does not have the known form"),
        (lambda body: body[:4360] + struct.pack("<II", 9000, 8879) + body[4368:], "does not have the known form"),
        (lambda body: b"<html>" * 2000, "does not have the known form"),
    ],
)
def test_an_ssz_state_of_another_form_is_refused(change: Any, words: str) -> None:
    rng = random.Random(5)
    records = [ValidatorRecord(ValidatorIndex(at), Pubkey(bytes(48)), Hash32(bytes(32)), 0, 9) for at in range(9)]
    body = ssz_state(records, 64, rng)
    whole = StateScan(NODE, VAULTS, 64, ROOT, 88)
    whole.feed(body)
    assert whole.finish().count == 9
    scan = StateScan(NODE, VAULTS, 64, ROOT, 88)
    with pytest.raises(NodeFault, match=words):
        for piece in pieces(rng, change(body), 700):
            scan.feed(piece)
        scan.finish()
