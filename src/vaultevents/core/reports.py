"""Oracle reports: the log that publishes one, the file that holds its vaults, and the calldata that applies it.

The event's root is what counts, wherever the bytes of the file came from (rule C6): nothing is made of a file
before its CID and the root rebuilt from its values equal those of the event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from vaultevents.core import merkle
from vaultevents.core.cid import Cid, CidUnsupported, matches, parse_cid
from vaultevents.core.errors import NodeFault, SourceUnavailable, VaulteventsError
from vaultevents.core.events import Observation, ReportUpdateAvailable
from vaultevents.core.keccak import keccak
from vaultevents.core.logs import REPORT_UPDATED, Log, UndecodableLog
from vaultevents.core.units import Address, BlockNumber, Hash32, Wei, checksum, hex_text

MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_FILE_ITEMS = 2_000_000
"""Commas and opening brackets; the largest file of real vaults has fewer, and memory is bounded by it."""

LEAF_ENCODING = ["address", "uint256", "uint256", "uint256", "uint256", "uint256"]
_UPDATE_TYPES = (*LEAF_ENCODING, "bytes32[]")
UPDATE_VAULT_DATA = keccak(f"updateVaultData({','.join(_UPDATE_TYPES)})".encode())[:4]

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}")
_DECIMAL = re.compile(r"[0-9]{1,78}")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,64}")
_CID_TEXT = re.compile(rb"[!-~]*")


class ReportInvalid(VaulteventsError):
    """Nothing can be made of the bytes for this report. The text never quotes the file."""


class NotTheFile(ReportInvalid):
    """The bytes are not those that the event's CID names: the gateway that sent them is faulty."""


class ReportUndecodable(ReportInvalid):
    """The published file, or its CID, is of no known form, or has another root: the fault of the report itself."""


FailureKind = Literal["unavailable", "mismatch", "undecodable"]
"""Why a report gives no events: no gateway has its file, one gives other bytes, or the published file is unreadable."""

ADVICE: Final[Mapping[FailureKind, str]] = {
    "unavailable": "name more gateways in reports.gateways, or supply the file with 'vaultevents report import FILE'",
    "mismatch": "a gateway gives bytes that are not the published file: replace it in reports.gateways, or supply the "
    "file with 'vaultevents report import FILE'",
    "undecodable": "the fault is in the published report, not in a gateway: install a version of vaultevents that "
    "reads it (the report is tried again by itself), or end the attempts with 'vaultevents report give-up REPORT'",
}
"""What an operator can do about each kind of failure."""


def failure_kind(error: SourceUnavailable | ReportInvalid) -> FailureKind:
    """Classify the error with which a report was not resolved; a gateway that gives other bytes raises `NodeFault`."""
    if isinstance(error, NodeFault | NotTheFile):
        return "mismatch"
    return "undecodable" if isinstance(error, ReportInvalid) else "unavailable"


@dataclass(frozen=True, slots=True)
class ReportLog:
    """One `VaultsReportDataUpdated` of the contract LazyOracle; `timestamp` in seconds, `cid` as the event has it."""

    timestamp: int
    ref_slot: int
    root: Hash32
    cid: str
    block_number: BlockNumber
    block_time_ms: int
    tx_hash: Hash32
    log_index: int
    address: Address

    @property
    def is_empty(self) -> bool:
        """No vault was connected at the reference slot: there is no file and nothing to tell."""
        return not any(self.root) and not self.cid


def decode(log: Log, time_s: int) -> ReportLog | UndecodableLog:
    """Decode the report that a log publishes, if it has the known form; `time_s` is the time of its block (rule C8)."""
    if len(log.topics) != 4 or log.topics[0] != REPORT_UPDATED:
        return UndecodableLog(log, f"it has {len(log.topics)} topics, or not the first one of a published report")
    cid = _cid_text(log.data)
    if cid is None:
        return UndecodableLog(log, f"it has {len(log.data)} bytes that are not one ABI string of printable ASCII")
    _, timestamp, ref_slot, root = log.topics
    return ReportLog(
        timestamp=int.from_bytes(timestamp),
        ref_slot=int.from_bytes(ref_slot),
        root=root,
        cid=cid,
        block_number=BlockNumber(log.block_number),
        block_time_ms=time_s * 1000,
        tx_hash=log.tx_hash,
        log_index=log.log_index,
        address=log.address,
    )


def decode_all(logs: Iterable[Log], times_s: Mapping[int, int]) -> tuple[list[ReportLog], list[UndecodableLog]]:
    """Decode the reports of a span; `times_s` maps its blocks to their times."""
    decoded = [decode(log, times_s[log.block_number]) for log in logs]
    return (
        [report for report in decoded if isinstance(report, ReportLog)],
        [entry for entry in decoded if isinstance(entry, UndecodableLog)],
    )


def latest_report(timestamp: int, ref_slot: int, root: Hash32, cid: str, oracle: Address) -> ReportLog | None:
    """Return the report of what `latestReportData()` of an oracle returns; None where its CID is no printable ASCII.

    It has no block: the result serves to fetch and verify the report's file, not to derive events.
    """
    if not cid.isascii() or not _CID_TEXT.fullmatch(cid.encode()):
        return None
    return ReportLog(timestamp, ref_slot, root, cid, BlockNumber(0), timestamp * 1000, Hash32(bytes(32)), 0, oracle)


def _cid_text(data: bytes) -> str | None:
    """The one ABI string of the data: offset 0x20, length, printable ASCII, zeros up to a whole word."""
    size = int.from_bytes(data[32:64])
    text, rest = data[64 : 64 + size], data[64 + size :]
    sound = len(data) >= 64 and int.from_bytes(data[:32]) == 32 and len(text) == size
    if not sound or len(rest) > 31 or any(rest) or not _CID_TEXT.fullmatch(text):
        return None
    return text.decode("ascii")


@dataclass(frozen=True, slots=True)
class VaultLeaf:
    """What a report says of one vault, in the order of the leaf; `cumulative_fee_wei` are Lido's fees so far."""

    vault: Address
    total_value_wei: Wei
    cumulative_fee_wei: Wei
    liability_shares: int
    max_liability_shares: int
    slashing_reserve_wei: Wei

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        return (
            self.total_value_wei,
            self.cumulative_fee_wei,
            self.liability_shares,
            self.max_liability_shares,
            self.slashing_reserve_wei,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A file that passed every check of `read_report`: `root` is the event's, `leaves` in the order of the file."""

    root: Hash32
    leaves: Mapping[Address, VaultLeaf]
    tree: merkle.Tree

    @property
    def vaults(self) -> tuple[Address, ...]:
        return tuple(self.leaves)

    def leaf(self, vault: Address) -> VaultLeaf | None:
        """None for a vault that is not in the report, which is normal."""
        return self.leaves.get(vault)

    def calldata(self, vault: Address) -> bytes:
        """The input of `updateVaultData` for a vault of the report: 4 + 32 * (8 + proof elements) bytes.

        Its proof was followed to the event's root. Raises `KeyError` for a vault that is not in the report, and
        `ReportUndecodable` should the proof lead elsewhere.
        """
        from eth_abi.abi import encode  # 0.2 s to import

        leaf = self.leaves[vault]
        hashed = merkle.leaf_hash(vault, leaf.numbers)
        proof = self.tree.proof(hashed)
        if not merkle.verify(self.root, hashed, proof):
            raise ReportUndecodable(f"the proof of vault {checksum(vault)} does not lead to the root of the event")
        return UPDATE_VAULT_DATA + encode(_UPDATE_TYPES, (vault, *leaf.numbers, proof))


def read_report(content: bytes, log: ReportLog) -> Report:
    """The report that `log` announces, from the bytes of its file: CID, form, tree and root are checked (rule C6).

    Raises `NotTheFile` or `ReportUndecodable` with one sentence. The CID is compared before the bytes are parsed, so
    bytes that the oracle did not publish cost a hash and nothing more.
    """
    if len(content) > MAX_FILE_BYTES:
        raise ReportUndecodable(
            f"the file has {len(content)} bytes, more than the {MAX_FILE_BYTES} that a report may have"
        )
    check_file(content, log)
    leaves = _leaves(_parse(content))
    tree = merkle.tree([merkle.leaf_hash(leaf.vault, leaf.numbers) for leaf in leaves.values()])
    if tree.root != log.root:
        raise ReportUndecodable(
            f"the vaults of the file have the root {hex_text(tree.root)}, the event has {hex_text(log.root)}"
        )
    return Report(log.root, leaves, tree)


def observe(report: Report, log: ReportLog, addresses: Iterable[Address]) -> list[Observation]:
    """One observation for each of the addresses that is in the report, in the order of the file (rules C6 and E13).

    It stands at the publishing block and its time (rule E2), whether or not a newer report has superseded this one.
    """
    wanted = frozenset(addresses)
    return [
        Observation(
            vault, log.block_number, log.block_time_ms, ReportUpdateAvailable(report.calldata(vault), log.timestamp)
        )
        for vault in report.leaves
        if vault in wanted
    ]


def announced_cid(log: ReportLog) -> Cid:
    """Return the CID of the event; raises `ReportUndecodable` for one that no file can be compared with."""
    try:
        return parse_cid(log.cid)
    except CidUnsupported as unsupported:
        raise ReportUndecodable(
            f"the file cannot be compared with the CID of the event: {unsupported}"
        ) from unsupported


def check_file(content: bytes, log: ReportLog) -> None:
    """Raise `NotTheFile` for bytes that have another CID than the event, `ReportUndecodable` as `announced_cid`."""
    cid = announced_cid(log)
    if not matches(cid, content):
        raise NotTheFile(f"the {len(content)} bytes are not the file with the CID {cid} of the event")


def _parse(content: bytes) -> dict[str, Any]:
    """Exact JSON: each key once, no NaN or Infinity."""
    if sum(map(content.count, (b"[", b"{", b","))) > MAX_FILE_ITEMS:
        raise ReportUndecodable(f"the file has more than {MAX_FILE_ITEMS} items")
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_object, parse_constant=_not_a_number)
    except UnicodeDecodeError:
        raise ReportUndecodable("the file is not UTF-8 text") from None
    except RecursionError:
        raise ReportUndecodable("the file is nested too deeply") from None
    except ValueError:  # also a number of too many digits
        raise ReportUndecodable("the file is not valid JSON") from None
    if not isinstance(found, dict):
        raise ReportUndecodable("the file is not a JSON object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ReportUndecodable("the file has the same key twice in one object")
    return found


def _not_a_number(_: str) -> NoReturn:
    raise ReportUndecodable("the file has a number that JSON does not know (NaN or Infinity)")


def _leaves(file: dict[str, Any]) -> dict[Address, VaultLeaf]:
    if file.get("leafEncoding") != LEAF_ENCODING:
        raise ReportUndecodable(
            "the leafEncoding of the file is not the known six types, so updateVaultData may have changed: "
            "install a version of vaultevents that knows it"
        )
    values = file.get("values")
    if not isinstance(values, list) or not values:
        raise ReportUndecodable("the file has no list of values")
    leaves: dict[Address, VaultLeaf] = {}
    for position, entry in enumerate(values):
        leaf = _leaf(entry, position)
        if leaves.setdefault(leaf.vault, leaf) is not leaf:
            raise ReportUndecodable(f"the file has the vault {checksum(leaf.vault)} twice")
    return leaves


def _leaf(entry: object, position: int) -> VaultLeaf:
    value = entry.get("value") if isinstance(entry, dict) else None
    if not isinstance(value, list) or len(value) != len(LEAF_ENCODING):
        raise ReportUndecodable(f"entry {position} of the values is not an address and five numbers")
    vault, *numbers = value
    if not isinstance(vault, str) or not _ADDRESS.fullmatch(vault):
        raise ReportUndecodable(f"entry {position} of the values does not begin with an address")
    total, fee, shares, most_shares, reserve = [_uint256(number, position) for number in numbers]
    return VaultLeaf(Address(bytes.fromhex(vault[2:])), Wei(total), Wei(fee), shares, most_shares, Wei(reserve))


def _uint256(value: object, position: int) -> int:
    """A JSON integer, or decimal or 0x-hex digits in a string; never by way of a float."""
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        number = int(value)
    elif isinstance(value, str) and _HEX.fullmatch(value):
        number = int(value, 16)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        raise ReportUndecodable(f"entry {position} of the values has something other than a whole number")
    if not 0 <= number < 2**256:
        raise ReportUndecodable(f"entry {position} of the values has a number that is not a uint256")
    return number
