"""The cost of one oracle report: `python3 dev.py bench report --json`.

A report of 5,000 vaults, 1,000 of them registered, from the bytes of its file to encoded event bodies: CID, JSON, tree,
proofs, calldata, events. The floor hashes the 5,000 leaves and nothing else. Fresh processes take turns at both;
seconds are the best of the rounds, the peak of memory is that of the whole process. The last line is the result;
without `--json` a table stands before it.
"""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

VAULTS = 5_000
REGISTERED_EVERY = 5
ROUNDS = 3
GOAL = {"seconds": 1.5, "peak_mb": 150.0}
TIMESTAMP = 1_790_123_602

Row = tuple[bytes, tuple[int, ...]]


def row(index: int) -> Row:
    """Amounts of the size that mainnet has: some thousand ETH, fees and shares of some of it."""
    seed = hashlib.sha256(f"vault {index}".encode()).digest()
    value = 32 * 10**18 * (1 + seed[0]) + int.from_bytes(seed[1:8])
    return seed[12:], (value, value // 900, value // 3, value // 2, 0)


def file_of(rows: list[Row], nodes: list[str]) -> bytes:
    """As the oracle writes it (its keys, in its order); the CID and the root are made by the code that is measured."""
    from vaultevents.core.reports import LEAF_ENCODING
    from vaultevents.core.units import checksum

    extra = ("inOutDelta", "prevFee", "infraFee", "liquidityFee", "reservationFee")
    file = {
        "format": "standard-v1",
        "leafEncoding": LEAF_ENCODING,
        "tree": nodes,
        "values": [
            {"value": [checksum(vault), *map(str, numbers)], "treeIndex": index}
            for index, (vault, numbers) in enumerate(rows)
        ],
        "refSlot": 107_200,
        "blockHash": "0x" + "ab" * 32,
        "blockNumber": 107_000,
        "timestamp": TIMESTAMP,
        "extraValues": {checksum(vault): dict.fromkeys(extra, str(numbers[1])) for vault, numbers in rows},
        "prevTreeCID": "",
        "leafIndexToData": {"vaultAddress": 0, "totalValueWei": 1, "fee": 2},
    }
    return json.dumps(file).encode()


def write(folder: Path) -> None:
    """The file and what its event says."""
    from vaultevents.core import merkle
    from vaultevents.core.cid import file_cid
    from vaultevents.core.units import Address

    rows = [row(index) for index in range(VAULTS)]
    tree = merkle.tree([merkle.leaf_hash(Address(vault), numbers) for vault, numbers in rows])
    content = file_of(rows, ["0x" + node.hex() for node in tree.nodes])
    folder.joinpath("report.json").write_bytes(content)
    folder.joinpath("event.json").write_text(json.dumps({"root": tree.root.hex(), "cid": str(file_cid(content))}))


def read(folder: Path) -> float:
    from vaultevents.core.events import Event, encode
    from vaultevents.core.registry import Owner
    from vaultevents.core.reports import ReportLog, observe, read_report
    from vaultevents.core.units import Address, BlockNumber, Hash32, hex_text

    told = json.loads(folder.joinpath("event.json").read_text())
    root = Hash32(bytes.fromhex(told["root"]))
    log = ReportLog(
        *(TIMESTAMP, 107_200, root, told["cid"], BlockNumber(1), 1000, Hash32(bytes(32)), 0, Address(bytes(20)))
    )
    registered = {Address(row(index)[0]): Owner("acme", f"v-{index}") for index in range(0, VAULTS, REGISTERED_EVERY)}
    content = folder.joinpath("report.json").read_bytes()

    begin = time.perf_counter()
    report = read_report(content, log)
    seen = observe(report, log, registered)
    bodies = [encode(Event(registered[one.address], one)) for one in seen]
    seconds = time.perf_counter() - begin

    assert len(report.vaults) == VAULTS
    assert len(bodies) == len(registered)
    assert all(f'"calldata":"{hex_text(report.calldata(seen[at].address))}"'.encode() in bodies[at] for at in (0, -1))
    return seconds


def hash_leaves() -> float:
    from eth_hash.auto import keccak

    leaves = [
        bytes(12) + vault + b"".join(number.to_bytes(32) for number in numbers)
        for vault, numbers in (row(index) for index in range(VAULTS))
    ]
    begin = time.perf_counter()
    for leaf in leaves:
        keccak(keccak(leaf))
    return time.perf_counter() - begin


def measure(what: str, folder: str) -> None:
    """What a measuring process does: one turn, told as JSON."""
    seconds = read(Path(folder)) if what == "read" else hash_leaves()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_mb": peak_mb}))


def turn(what: str, folder: str) -> dict[str, float]:
    """One turn in a fresh process."""
    done = subprocess.run([sys.executable, __file__, what, folder], check=True, capture_output=True, text=True)
    told: dict[str, float] = json.loads(done.stdout)
    return told


def best(turns: list[dict[str, float]]) -> dict[str, float]:
    return {"seconds": min(one["seconds"] for one in turns), "peak_mb": max(one["peak_mb"] for one in turns)}


def compare(folder: str) -> dict[str, Any]:
    rounds = [(turn("read", folder), turn("floor", folder)) for _ in range(ROUNDS)]
    ours, floor = best([one for one, _ in rounds]), best([one for _, one in rounds])
    size = Path(folder, "report.json").stat().st_size
    figures = {"vaults": VAULTS, "registered": VAULTS // REGISTERED_EVERY, "file_mb": size / 1e6, **ours}
    ratio = {"time_x": ours["seconds"] / floor["seconds"]}
    rounded = [{key: round(value, 3) for key, value in part.items()} for part in (figures, floor, ratio)]
    told = dict(zip(("figures", "floor", "ratio"), rounded, strict=True))
    return {"bench": "report", **told, "goal": GOAL, "ok": all(ours[key] <= most for key, most in GOAL.items())}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["write"]:
        write(Path(arguments[1]))
        return 0
    if arguments[:1] in (["read"], ["floor"]):
        measure(*arguments)
        return 0
    with TemporaryDirectory() as folder:
        # apart from this process, whose peak of memory Linux would count as that of every process it starts
        subprocess.run([sys.executable, __file__, "write", folder], check=True)
        result = compare(folder)
    if "--json" not in arguments:
        for part in ("figures", "floor", "ratio", "goal"):
            print(f"{part:8}", "  ".join(f"{key} {value}" for key, value in result[part].items()))
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
