"""From the log and the file of an oracle report to calldata, and all that is refused on the way.

The sample is in the oracle's exact format; its calldata was accepted by the compiled LazyOracle contract.
"""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from vaultevents.core import merkle, reports
from vaultevents.core.cid import file_cid
from vaultevents.core.events import Event, Observation, ReportUpdateAvailable, encode
from vaultevents.core.logs import REPORT_UPDATED, Log, UndecodableLog
from vaultevents.core.registry import Owner
from vaultevents.core.reports import (
    ReportInvalid,
    ReportLog,
    decode,
    decode_all,
    latest_report,
    observe,
    read_report,
)
from vaultevents.core.units import Address, BlockNumber, Hash32, checksum, eth_text, hex_text, parse_address

pytestmark = pytest.mark.unit

DATA = Path(__file__).parents[1] / "data/report"
SAMPLE = DATA.joinpath("sample-report.json").read_bytes()
META = json.loads(DATA.joinpath("sample-report.meta.json").read_text())
CALLDATA = {parse_address(vault): bytes.fromhex(text[2:]) for vault, text in META["calldata_by_vault"].items()}
LAZY_ORACLE = Address(b"\x05" * 20)
ROOT = Hash32(bytes.fromhex(META["event"]["root"][2:]))
PUBLISHED = ReportLog(
    timestamp=META["event"]["timestamp"],
    ref_slot=META["event"]["refSlot"],
    root=ROOT,
    cid=META["event"]["cid"],
    block_number=BlockNumber(4_000),
    block_time_ms=1_790_127_202_000,
    tx_hash=Hash32(b"\x09" * 32),
    log_index=3,
    address=LAZY_ORACLE,
)
FIRST = parse_address("0xCe85503De9399D4dECa3c0b2bb3e9e7CFCBf9C6B")


def word(number: int) -> bytes:
    return number.to_bytes(32)


def abi_string(text: bytes) -> bytes:
    return word(32) + word(len(text)) + text + bytes(-len(text) % 32)


def published(data: bytes, **changes: Any) -> Log:
    topics = (REPORT_UPDATED, Hash32(word(PUBLISHED.timestamp)), Hash32(word(PUBLISHED.ref_slot)), ROOT)
    log = Log(LAZY_ORACLE, topics, data, 4_000, Hash32(b"\x08" * 32), Hash32(b"\x09" * 32), 3)
    return replace(log, **changes)


def file_of(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The sample after a change, written as the oracle writes."""
    file = json.loads(SAMPLE)
    change(file)
    return json.dumps(file).encode()


def naming(content: bytes, root: Hash32 = ROOT) -> ReportLog:
    """The event of an oracle that published just these bytes."""
    return replace(PUBLISHED, cid=str(file_cid(content)), root=root)


def refusal(content: bytes, log: ReportLog | None = None) -> str:
    """Why the file is refused although its CID is right (or in the light of `log`): quickly and with little memory."""
    log = log or naming(content)
    tracemalloc.start()
    begin = process_time()  # other processes may be busy
    with pytest.raises(ReportInvalid) as refused:
        read_report(content, log)
    took, (_, peak) = process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 5
    assert peak < 64 * 2**20
    return str(refused.value)


# --- the log ---


def test_the_topic_and_the_selector_are_those_of_the_contracts() -> None:
    assert hex_text(REPORT_UPDATED) == "0x8ee99bf86aab7170a7b0555be6f155333456f93d7feece62b37859ba75e70f06"
    assert hex_text(reports.UPDATE_VAULT_DATA) == "0x4c11a509"


def test_a_published_report_is_decoded() -> None:
    assert decode(published(abi_string(PUBLISHED.cid.encode())), 1_790_127_202) == PUBLISHED


def test_a_report_of_no_vault_is_empty_and_one_with_half_of_that_is_not() -> None:
    nothing = decode(published(abi_string(b""), topics=(*published(b"").topics[:3], Hash32(bytes(32)))), 1)
    assert isinstance(nothing, ReportLog)
    assert nothing.is_empty
    assert not replace(nothing, root=ROOT).is_empty
    assert not replace(nothing, cid=PUBLISHED.cid).is_empty
    assert not PUBLISHED.is_empty


def test_the_latest_report_of_an_oracle_has_no_block() -> None:
    returned = PUBLISHED.timestamp, PUBLISHED.ref_slot, PUBLISHED.root
    found = latest_report(*returned, PUBLISHED.cid, PUBLISHED.address)
    assert found is not None
    same = replace(PUBLISHED, block_number=found.block_number, block_time_ms=found.block_time_ms)
    assert found == replace(same, tx_hash=found.tx_hash, log_index=found.log_index)
    assert read_report(SAMPLE, found).root == ROOT
    for cid in ("with space", "Qm\n", "Qm\u00e9", "Qm\x00"):
        assert latest_report(*returned, cid, PUBLISHED.address) is None


CID = PUBLISHED.cid.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        word(32),
        CID,
        word(64) + word(46) + CID + bytes(18),  # another offset
        word(32) + word(47) + CID,  # longer than what is there
        word(32) + word(2**256 - 1) + CID + bytes(18),
        word(32) + word(45) + CID + bytes(18),  # a character in the padding
        abi_string(CID) + bytes(32),  # a word too many
        abi_string(CID)[:-1] + b"\x01",
        abi_string("Qm\u00e9".encode()),
        abi_string(b"Qm\x00"),
        abi_string(b"Qm\n"),
    ],
)
def test_data_of_another_form_is_withheld(data: bytes) -> None:
    log = published(data)
    reason = f"it has {len(data)} bytes that are not one ABI string of printable ASCII"
    assert decode(log, 1) == UndecodableLog(log, reason)


@pytest.mark.parametrize("topics", [(), (REPORT_UPDATED,), (ROOT,) * 4, (REPORT_UPDATED, ROOT, ROOT, ROOT, ROOT)])
def test_topics_of_another_form_are_withheld(topics: tuple[Hash32, ...]) -> None:
    log = published(abi_string(CID), topics=topics)
    assert isinstance(decode(log, 1), UndecodableLog)
    good = published(abi_string(CID))
    assert decode_all([log, good], {good.block_number: 1}) == ([decode(good, 1)], [decode(log, 1)])


# --- the good file ---


def test_the_sample_gives_the_calldata_that_the_contract_accepted() -> None:
    report = read_report(SAMPLE, PUBLISHED)
    assert len(CALLDATA) == 6
    assert {vault: report.calldata(vault) for vault in report.vaults} == CALLDATA


def test_the_cid_of_the_event_may_be_of_version_1() -> None:
    data = b"\x01\x70\x12\x20" + file_cid(SAMPLE).digest
    version_1 = "b" + base64.b32encode(data).decode().rstrip("=").lower()
    assert read_report(SAMPLE, replace(PUBLISHED, cid=version_1)).root == ROOT


def test_a_report_shows_the_numbers_of_a_vault() -> None:
    leaf = read_report(SAMPLE, PUBLISHED).leaf(FIRST)
    assert leaf is not None
    assert (eth_text(leaf.total_value_wei), eth_text(leaf.cumulative_fee_wei)) == ("1", "0.0003")
    assert (leaf.liability_shares, leaf.max_liability_shares, leaf.slashing_reserve_wei) == (0, 0, 0)


def test_each_number_has_its_own_place() -> None:
    """In the sample most are 0: here they differ, so that a swap would show."""
    file = json.loads(SAMPLE)
    file["values"] = [{"value": [checksum(FIRST), "11", "22", "33", "44", "55"], "treeIndex": 0}]
    content = json.dumps(file).encode()
    leaf_hash = merkle.leaf_hash(FIRST, (11, 22, 33, 44, 55))
    report = read_report(content, naming(content, leaf_hash))
    assert report.leaf(FIRST) == reports.VaultLeaf(
        vault=FIRST,
        total_value_wei=11,  # type: ignore[arg-type]
        cumulative_fee_wei=22,  # type: ignore[arg-type]
        liability_shares=33,
        max_liability_shares=44,
        slashing_reserve_wei=55,  # type: ignore[arg-type]
    )
    words = b"".join(map(word, [int.from_bytes(FIRST), 11, 22, 33, 44, 55, 0xE0, 0]))
    assert report.calldata(FIRST) == bytes.fromhex("4c11a509") + words


@pytest.mark.parametrize(
    "write",
    [int, hex, lambda number: f"0x{int(number):064X}", lambda number: f"{int(number):078d}"],
    ids=["JSON integers", "hex strings", "hex words", "leading zeros"],
)
def test_numbers_may_be_written_otherwise(write: Callable[[Any], Any]) -> None:
    def rewrite(file: dict[str, Any]) -> None:
        for entry in file["values"]:
            entry["value"][1:] = [write(int(number)) for number in entry["value"][1:]]
            entry["value"][0] = entry["value"][0].lower()

    content = file_of(rewrite)
    assert content != SAMPLE
    report = read_report(content, naming(content))
    assert {vault: report.calldata(vault) for vault in report.vaults} == CALLDATA


def test_the_tree_in_the_file_is_not_used() -> None:
    content = file_of(lambda file: file.update(tree=["0x" + "00" * 32], format="anything", timestamp="yesterday"))
    assert read_report(content, naming(content)).calldata(FIRST) == CALLDATA[FIRST]


def test_each_wanted_vault_of_the_report_is_observed_once() -> None:
    stranger, *two = Address(b"\x07" * 20), FIRST, list(CALLDATA)[4]
    seen = observe(read_report(SAMPLE, PUBLISHED), PUBLISHED, [stranger, *two[::-1], FIRST])
    assert seen == [
        Observation(vault, 4_000, 1_790_127_202_000, ReportUpdateAvailable(CALLDATA[vault], 1_790_123_602))
        for vault in two
    ]


def test_the_event_carries_the_calldata_and_the_timestamp_of_the_event() -> None:
    (seen,) = observe(read_report(SAMPLE, PUBLISHED), PUBLISHED, [FIRST])
    event = Event(Owner("acme", "v-1"), seen)
    body = json.loads(encode(event))
    assert event.id == "report_update_available_acme_v-1_1790123602"
    assert body["payload"] == {
        "calldata": META["calldata_by_vault"][checksum(FIRST)],
        "report_timestamp": "1790123602",
    }
    assert body["created_at"] == 1_790_127_202_000


def test_a_vault_outside_the_report_has_no_leaf_and_no_calldata() -> None:
    report = read_report(SAMPLE, PUBLISHED)
    assert report.leaf(Address(b"\x07" * 20)) is None
    with pytest.raises(KeyError):
        report.calldata(Address(b"\x07" * 20))


def test_no_calldata_leaves_with_a_proof_that_leads_elsewhere() -> None:
    report = read_report(SAMPLE, PUBLISHED)
    with pytest.raises(ReportInvalid, match="does not lead to the root"):
        replace(report, root=Hash32(bytes(32))).calldata(FIRST)


# --- the bad file ---


def test_a_wrong_root_is_refused() -> None:
    assert "the event has 0x0101" in refusal(SAMPLE, replace(PUBLISHED, root=Hash32(b"\x01" * 32)))


def test_right_values_with_altered_extra_values_are_refused() -> None:
    content = SAMPLE.replace(b'"prevFee": "0"', b'"prevFee": "1"', 1)
    assert len(content) == len(SAMPLE)
    assert "not the file with the CID" in refusal(content, PUBLISHED)


@pytest.mark.parametrize(
    "content",
    [b"", SAMPLE[:-1], SAMPLE[:1500], SAMPLE + b"\n", b"<!DOCTYPE html><html>Not found</html>", b"[" * 100_000],
    ids=["nothing", "without its end", "half", "a byte more", "HTML", "depth"],
)
def test_other_bytes_are_refused_before_they_are_parsed(content: bytes) -> None:
    assert "not the file with the CID" in refusal(content, PUBLISHED)


def test_32_mebibytes_of_json_from_a_gateway_cost_only_their_hash() -> None:
    content = b"[" + b"[]," * (reports.MAX_FILE_BYTES // 3 - 2) + b"[]]"
    assert "not the file with the CID" in refusal(content, PUBLISHED)
    assert f"more than {reports.MAX_FILE_ITEMS} items" in refusal(content)


def test_a_file_that_is_too_large_is_refused_unread() -> None:
    content = SAMPLE.ljust(reports.MAX_FILE_BYTES + 1)
    assert "more than the 33554432" in refusal(content, naming(b""))
    longest = content[:-1]
    assert read_report(longest, naming(longest)).root == ROOT


def test_a_cid_that_cannot_be_checked_is_an_error() -> None:
    raw = "bafkreibyqyrkx66boqbutl5oktknecxgnl43cipcls3knonfmi727rdtnu"
    assert "cannot be compared with the CID" in refusal(SAMPLE, replace(PUBLISHED, cid=raw))
    assert "cannot be compared with the CID" in refusal(SAMPLE, replace(PUBLISHED, cid=""))


NOT_JSON = "not valid JSON"
ENTRY = b'{"value": ["0x' + b"11" * 20 + b'", %s, 0, 0, 0, 0]}'
ENCODING = json.dumps(reports.LEAF_ENCODING).encode()


def of_values(values: bytes) -> bytes:
    return b'{"leafEncoding": ' + ENCODING + b', "values": ' + values + b"}"


def of_number(number: bytes) -> bytes:
    return of_values(b"[" + ENTRY % number + b"]")


WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", NOT_JSON),
    "HTML": (b"<!DOCTYPE html><html>Not found</html>", NOT_JSON),
    "cut off": (SAMPLE[:1500], NOT_JSON),
    "something after it": (SAMPLE + b"{}", NOT_JSON),
    "not UTF-8": (SAMPLE.replace(b"standard-v1", b"standard-v\xff"), "not UTF-8"),
    "UTF-16": (SAMPLE.decode().encode("utf-16"), "not UTF-8"),
    "a byte order mark": (b"\xef\xbb\xbf" + SAMPLE, NOT_JSON),
    "lists in depth": (b"[" * 100_000, "nested too deeply"),
    "objects in depth": (b'{"a":' * 100_000, "nested too deeply"),
    "depth in a right file": (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"," + SAMPLE[1:], "nested too deeply"),
    "a list": (b"[]", "not a JSON object"),
    "a number": (b"7", "not a JSON object"),
    "NaN": (of_number(b"NaN"), "NaN or Infinity"),
    "-Infinity outside the values": (b'{"x": -Infinity, ' + SAMPLE[1:], "NaN or Infinity"),
    "values twice": (b'{"values": [], ' + SAMPLE[1:], "same key twice"),
    "value twice": (of_values(b'[{"value": [], ' + ENTRY[1:] % b"0" + b"]"), "same key twice"),
    "a key twice by an escape": (b'{"v\\u0061lues": [], ' + SAMPLE[1:], "same key twice"),
    "no encoding": (b'{"values": [' + ENTRY % b"0" + b"]}", "leafEncoding"),
    "five fields": (
        file_of(lambda f: f.update(leafEncoding=reports.LEAF_ENCODING[:5], values=f["values"])),
        "install a version",
    ),
    "seven fields": (file_of(lambda f: f["leafEncoding"].append("uint256")), "leafEncoding"),
    "another type": (SAMPLE.replace(b'"uint256"]', b'"uint128"]'), "leafEncoding"),
    "encoding as text": (file_of(lambda f: f.update(leafEncoding=str(reports.LEAF_ENCODING))), "leafEncoding"),
    "no values": (file_of(lambda f: f.pop("values")), "no list of values"),
    "empty values": (of_values(b"[]"), "no list of values"),
    "values as object": (of_values(b'{"0": 1}'), "no list of values"),
    "an entry as list": (of_values(b"[[]]"), "entry 0"),
    "an entry of nothing": (file_of(lambda f: f["values"].append({})), "entry 6"),
    "a value too few": (file_of(lambda f: f["values"][2]["value"].pop()), "entry 2"),
    "a value too many": (file_of(lambda f: f["values"][2]["value"].append("0")), "entry 2"),
    "a short address": (of_number(b"0").replace(b"0x11", b"0x"), "does not begin with an address"),
    "an address without 0x": (of_number(b"0").replace(b"0x11", b"1111"), "does not begin with an address"),
    "an address as number": (of_values(b'[{"value": [1, 0, 0, 0, 0, 0]}]'), "does not begin with an address"),
    "the same vault twice": (file_of(lambda f: f["values"].append(f["values"][0])), "twice"),
    "the same vault in two notations": (
        file_of(lambda f: f["values"].append({"value": [checksum(FIRST).lower(), *f["values"][0]["value"][1:]]})),
        f"{checksum(FIRST)} twice",
    ),
    "a vault less": (file_of(lambda f: f["values"].pop()), "have the root"),
    "another amount": (SAMPLE.replace(b'"1000000000000000000"', b'"1000000000000000001"', 1), "have the root"),
    **{
        f"the number {number.decode()[:20]}": (of_number(number), "entry 0 of the values has")
        for number in (
            *(b"1e30", b"1.0", b"1E0", b"-1", b"true", b"null", b"[]", b'""', b'"1e30"', b'"1.0"', b'"-1"', b'"+1"'),
            *(
                b'" 1"',
                b'"1_0"',
                b'"0x"',
                b'"0b1"',
                b'"0xg"',
                b'"\\u0661"',
                b'"NaN"',
                b"115792089237316195423570985e51",
            ),
            *(str(2**256).encode(), f'"{2**256}"'.encode(), f'"0x1{"0" * 64}"'.encode(), b'"' + b"0" * 79 + b'"'),
        )
    },
    "an endless integer": (of_number(b"9" * 100_000), NOT_JSON),
    "an endless numeral": (of_number(b'"' + b"9" * 100_000 + b'"'), "entry 0 of the values has"),
}


@pytest.mark.parametrize(("content", "why"), WRONG.values(), ids=WRONG.keys())
def test_a_file_of_another_form_is_refused_even_with_its_own_cid(content: bytes, why: str) -> None:
    reported = refusal(content)
    assert why in reported
    assert len(reported) < 250
