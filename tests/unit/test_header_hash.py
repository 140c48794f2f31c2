"""Header hashes of real blocks of several forks, and that every field counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from block_hashes import AMSTERDAM, header_hash
from vaultevents.chain.execution import wire
from vaultevents.chain.execution.header_hash import HeaderFields, compute_hash, unknown_fields
from vaultevents.core.errors import NodeFault

pytestmark = pytest.mark.unit

HEADERS = Path(__file__).resolve().parent.parent / "data" / "headers"
EMPTY_ROOT = "0x56e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421"
NO_UNCLES = "0x1dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347"

FRONTIER_FIELDS = AMSTERDAM.index("baseFeePerGas")
FRONTIER = {
    "sha3Uncles": NO_UNCLES,
    "transactionsRoot": EMPTY_ROOT,
    "receiptsRoot": EMPTY_ROOT,
    "logsBloom": "0x" + "00" * 256,
    "gasLimit": "0x1388",
    "gasUsed": "0x0",
}
MAINNET_0 = FRONTIER | {
    "hash": "0xd4e56740f876aef8c010b86a40d5f56745a118d0906a34e69aec8c0db1cb8fa3",
    "parentHash": "0x" + "00" * 32,
    "miner": "0x" + "00" * 20,
    "stateRoot": "0xd7f8974fb5ac78d9ac099b9ad5018bedc2ce0a72dad1827a1709da30580f0544",
    "difficulty": "0x400000000",
    "number": "0x0",
    "timestamp": "0x0",
    "extraData": "0x11bbe8db4e347b4e8c937c1c8370e4b5ed33adb3db69cbdb7a38e1e50b1b82fa",
    "mixHash": "0x" + "00" * 32,
    "nonce": "0x0000000000000042",
}
MAINNET_1 = FRONTIER | {
    "hash": "0x88e96d4537bea4d9c05d12549907b32561d3bf31f45aae734cdc119f13406cb6",
    "parentHash": MAINNET_0["hash"],
    "miner": "0x05a56e2d52c817161883f50c441c3228cfe54d9f",
    "stateRoot": "0xd67e4d450343046425ae4271474353857ab860dbc0a1dde64b41b5cd3a532bf3",
    "difficulty": "0x3ff800000",
    "number": "0x1",
    "timestamp": "0x55ba4224",
    "extraData": "0x476574682f76312e302e302f6c696e75782f676f312e342e32",
    "mixHash": "0x969b900de27b6ac6a67742365dd65f55a0526c41fd18e1b16f1a1215c2e66f59",
    "nonce": "0x539bd4979fef1ec4",
}
REAL = {
    "mainnet 0 (Frontier)": MAINNET_0,
    "mainnet 1 (Frontier)": MAINNET_1,
} | {path.stem: json.loads(path.read_text()) for path in sorted(HEADERS.glob("*.json"))}
SEPOLIA = REAL["sepolia-11856337"]
"""A block of Amsterdam."""


def raw(block: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(block))


def computed(block: dict[str, Any]) -> str | None:
    found = compute_hash(msgspec.json.decode(raw(block), type=HeaderFields))
    return None if found is None else "0x" + found.hex()


@pytest.mark.parametrize("block", REAL.values(), ids=REAL.keys())
def test_real_headers_hash_to_their_blocks(block: dict[str, Any]) -> None:
    assert computed(block) == block["hash"]
    found = wire.block("node", raw(block), number=int(block["number"], 16))
    assert found is not None and found.header.unknown_fields == ()


@pytest.mark.parametrize("block", REAL.values(), ids=REAL.keys())
def test_every_field_counts(block: dict[str, Any]) -> None:
    named = {name: text for name, text in block.items() if name in AMSTERDAM}
    for name, text in named.items():
        digit = "1" if text[-1] != "1" else "2"
        assert computed(block | {name: text[:-1] + digit}) != computed(block), name
    for name in set(named) - set(MAINNET_0):
        shorter = {other: text for other, text in block.items() if other != name}
        assert computed(shorter) != computed(block), name


def test_headers_of_each_fork_have_the_hash_that_another_implementation_makes() -> None:
    assert computed(SEPOLIA) == header_hash(SEPOLIA, AMSTERDAM)
    for count in range(FRONTIER_FIELDS, len(AMSTERDAM) + 1):
        fields = AMSTERDAM[:count]
        block = {name: text for name, text in SEPOLIA.items() if name in fields}
        sealed = block | {"hash": header_hash(block, fields)}
        assert computed(sealed) == sealed["hash"], fields[-1]
        found = wire.block("node", raw(sealed), number=None)
        assert found is not None and found.header.unknown_fields == ()


def test_numbers_may_have_leading_zeros_and_data_any_case() -> None:
    assert computed(SEPOLIA | {"number": "0x00" + SEPOLIA["number"][2:]}) == SEPOLIA["hash"]
    upper = {name: "0x" + text[2:].upper() for name, text in SEPOLIA.items() if isinstance(text, str)}
    assert computed(SEPOLIA | upper) == SEPOLIA["hash"]


@pytest.mark.parametrize("text", ["0xzz", "0x123", "", "hash", "0x" + "ff" * 31 + "é"])
def test_what_is_not_hexadecimal_has_no_hash(text: str) -> None:
    assert computed(SEPOLIA | {"stateRoot": text}) != SEPOLIA["hash"]
    with pytest.raises(NodeFault):
        wire.block("node", raw(SEPOLIA | {"stateRoot": text}), number=None)


@pytest.mark.parametrize("text", ["-0x1", "0x", "ten", "0x1_0", " 0x1"])
def test_a_number_of_another_form_does_not_pass(text: str) -> None:
    with pytest.raises(NodeFault):
        wire.block("node", raw(SEPOLIA | {"gasUsed": text}), number=None)


def test_a_block_with_a_field_that_is_not_known_is_taken_with_its_name() -> None:
    later = SEPOLIA | {"inclusionListRoot": "0x" + "12" * 32, "hash": "0x" + "34" * 32}
    found = wire.block("node", raw(later), number=None)
    assert found is not None and found.header.unknown_fields == ("inclusionListRoot",)
    assert unknown_fields(raw(later | {"somethingElse": {}, "totalDifficulty": "0x0"})) == ("inclusionListRoot",)


def test_a_field_in_excess_of_a_header_that_hashes_means_nothing() -> None:
    found = wire.block("node", raw(SEPOLIA | {"inclusionListRoot": "0x" + "12" * 32}), number=None)
    assert found is not None and found.header.unknown_fields == ()


def test_an_altered_field_without_an_unknown_one_is_a_fault() -> None:
    with pytest.raises(NodeFault, match="does not hash to the hash given for it"):
        wire.block("node", raw(SEPOLIA | {"receiptsRoot": EMPTY_ROOT}), number=None)
