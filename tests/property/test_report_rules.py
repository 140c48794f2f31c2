"""Altered reports never give other calldata, proofs of any tree hold, and CIDs hold beyond one level of links."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from eth_abi.abi import encode
from hypothesis import given
from hypothesis import strategies as st

from vaultevents.core import merkle
from vaultevents.core.cid import CidUnsupported, file_cid, parse_cid
from vaultevents.core.reports import LEAF_ENCODING, Report, ReportInvalid, ReportLog, VaultLeaf, read_report
from vaultevents.core.units import Address, BlockNumber, Hash32, parse_address

pytestmark = pytest.mark.property

DATA = Path(__file__).parents[1] / "data/report"
SAMPLE = DATA.joinpath("sample-report.json").read_bytes()
META = json.loads(DATA.joinpath("sample-report.meta.json").read_text())
CALLDATA = {parse_address(vault): bytes.fromhex(text[2:]) for vault, text in META["calldata_by_vault"].items()}
EVENT = ReportLog(
    timestamp=META["event"]["timestamp"],
    ref_slot=META["event"]["refSlot"],
    root=Hash32(bytes.fromhex(META["event"]["root"][2:])),
    cid=META["event"]["cid"],
    block_number=BlockNumber(1),
    block_time_ms=0,
    tx_hash=Hash32(bytes(32)),
    log_index=0,
    address=Address(bytes(20)),
)
LARGE = [
    (file["bytes"], file["cid"])
    for file in json.loads(DATA.joinpath("cid-vectors.json").read_text())["files"]
    if file["bytes"] > 2_500_000
]

uint256 = st.integers(0, 2**256 - 1)
rows = st.dictionaries(
    st.binary(min_size=20, max_size=20).map(Address), st.tuples(*[uint256] * 5), min_size=1, max_size=40
)


def altered(at: int, flip: int) -> bytes:
    content = bytearray(SAMPLE)
    content[at] ^= flip
    return bytes(content)


def refused(content: bytes, log: ReportLog) -> bool:
    try:
        read_report(content, log)
    except ReportInvalid:
        return True
    return False


def test_a_change_of_any_one_byte_is_refused() -> None:
    assert not refused(SAMPLE, EVENT)
    assert [at for at in range(len(SAMPLE)) if not refused(altered(at, 1 + at % 255), EVENT)] == []


@given(st.integers(0, len(SAMPLE) - 1), st.integers(1, 255))
def test_with_its_own_cid_a_changed_file_is_refused_or_gives_the_same_calldata(at: int, flip: int) -> None:
    """The root check alone: the CID is made to fit, as if the oracle had published the changed bytes."""
    content = altered(at, flip)
    try:
        report = read_report(content, replace(EVENT, cid=str(file_cid(content))))
    except ReportInvalid:
        return
    assert {vault: report.calldata(vault) for vault in report.vaults} == CALLDATA


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_any_bytes_at_all_are_refused_in_words(content: bytes) -> None:
    assert refused(content, EVENT)
    assert refused(content, replace(EVENT, cid=str(file_cid(content))))


@given(rows)
def test_any_report_reads_back_and_every_calldata_proves_itself(vaults: dict[Address, tuple[int, ...]]) -> None:
    """Reads leaf and proof back from the calldata alone, as the contract does."""
    values = [{"value": ["0x" + vault.hex(), *map(str, numbers)]} for vault, numbers in vaults.items()]
    content = json.dumps({"leafEncoding": ["address"] + ["uint256"] * 5, "values": values}).encode()
    root = merkle.tree([merkle.leaf_hash(vault, numbers) for vault, numbers in vaults.items()]).root
    report = read_report(content, replace(EVENT, cid=str(file_cid(content)), root=root))
    assert report.vaults == tuple(vaults)
    for vault, numbers in vaults.items():
        words = report.calldata(vault)[4:]
        head, *proof = [words[at : at + 32] for at in range(0, len(words), 32)][7:]
        assert int.from_bytes(words[192:224]) == 224
        assert int.from_bytes(head) == len(proof)
        assert words[:192] == bytes(12) + vault + b"".join(number.to_bytes(32) for number in numbers)
        assert merkle.verify(root, merkle.leaf_hash(vault, numbers), [Hash32(sibling) for sibling in proof])


@given(st.text(max_size=70) | st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", max_size=50))
def test_a_text_is_a_cid_that_reads_back_or_refused(text: str) -> None:
    for one in (text, "Qm" + text, "b" + text, "z" + text):
        try:
            cid = parse_cid(one)
        except CidUnsupported:
            continue
        assert one.isascii()
        assert one.isalnum()
        assert parse_cid(str(cid)) == cid


def test_a_cid_with_one_character_changed_is_another_or_none() -> None:
    for at in range(2, 46):
        text = EVENT.cid[:at] + ("2" if EVENT.cid[at] != "2" else "3") + EVENT.cid[at + 1 :]
        assert refused(SAMPLE, replace(EVENT, cid=text))


@pytest.mark.parametrize(("size", "cid"), LARGE)
def test_a_file_of_more_than_one_level_of_links_has_the_cid_that_ipfs_gives_it(size: int, cid: str) -> None:
    assert str(file_cid((bytes(range(251)) * (size // 251 + 1))[:size])) == cid


def test_the_large_files_stand_on_both_sides_of_174_links() -> None:
    assert [size for size, _ in LARGE] == [174 * 262_144, 174 * 262_144 + 1, 52_000_000]


@given(rows)
def test_raw_leaves_and_the_calldata_are_what_eth_abi_encodes(vaults: dict[Address, tuple[int, ...]]) -> None:
    """Leaves are encoded without the library, which takes 30 times as long for each."""
    for vault, numbers in vaults.items():
        assert merkle.encode_leaf(vault, numbers) == encode(LEAF_ENCODING, (vault, *numbers))
    made = merkle.tree([merkle.leaf_hash(vault, numbers) for vault, numbers in vaults.items()])
    report = Report(made.root, {vault: VaultLeaf(vault, *numbers) for vault, numbers in vaults.items()}, made)  # type: ignore[arg-type]
    for vault, numbers in vaults.items():
        proof = made.proof(merkle.leaf_hash(vault, numbers))
        words = [merkle.encode_leaf(vault, numbers), (0xE0).to_bytes(32), len(proof).to_bytes(32), *proof]
        assert report.calldata(vault) == bytes.fromhex("4c11a509") + b"".join(words)
