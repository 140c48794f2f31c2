"""Worlds whose oracle publishes reports: which they are, what each of them gives, and files that nobody can read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from simulation_fixtures import Rows
from vaultevents.core.logs import Log
from vaultevents.core.reports import ReportLog, decode
from vaultevents.core.units import Address, Hash32
from vaultevents.devnet import oracle
from vaultevents.devnet.acts import REPORT_TOPIC
from vaultevents.devnet.reportfile import report_file
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.unixfs import cid_of

Change = Callable[[dict[str, Any]], object]


def five_values(file: dict[str, Any]) -> None:
    """The leaves of an older generation of the contracts."""
    file["leafEncoding"] = file["leafEncoding"][:-1]


def other_values(file: dict[str, Any]) -> None:
    """Values whose root is not the one that the event names."""
    file["values"][0]["value"][1] = "1"


@dataclass(slots=True)
class Spoiled:
    """`cid` is that of the changed file, which the oracle published; empty until it has."""

    cid: str = ""


def spoil(monkeypatch: pytest.MonkeyPatch, number: int, change: Change, cid: str | None = None) -> Spoiled:
    """Let every oracle write its file `number` (from 1) after a change, and publish its CID, or `cid` instead."""
    found, written, content = Spoiled(), 0, b""

    def changed(*arguments: Any) -> bytes:
        nonlocal written, content
        good, written = report_file(*arguments), written + 1
        if written != number:
            return good
        file = json.loads(good)
        change(file)
        content = json.dumps(file).encode("ascii")
        found.cid = cid or cid_of(content)
        return content

    monkeypatch.setattr(oracle, "report_file", changed)
    monkeypatch.setattr(oracle, "cid_of", lambda file: found.cid if file == content else cid_of(file))
    return found


def final_reports(made: Simulation) -> dict[str, ReportLog]:
    """The reports with files that the simulation's oracle published in final blocks, by CID."""
    found = {}
    for placed in made.chain.logs(0, made.chain.finalized_number or 0, [REPORT_TOPIC]):
        one = placed.log
        if one.address != made.lazy_oracle:
            continue
        log = Log(
            Address(one.address),
            tuple(map(Hash32, one.topics)),
            one.data,
            placed.block.number,
            Hash32(placed.block.hash),
            Hash32(placed.tx_hash),
            placed.log_index,
        )
        report = decode(log, placed.block.timestamp_s)
        assert isinstance(report, ReportLog)
        if not report.is_empty:
            found[report.cid] = report
    return found


def without(events: Rows, report: ReportLog) -> Rows:
    """The events of all other reports, and of everything else."""

    def is_of_it(event_id: str, body: bytes) -> bool:
        if not event_id.startswith("report_update_available_"):
            return False
        return bool(json.loads(body)["payload"]["report_timestamp"] == str(report.timestamp))

    return {key: body for key, body in events.items() if not is_of_it(key[1], body)}
