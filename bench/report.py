"""The cost of one oracle report: `python3 dev.py bench report --json`.

A report of 5,000 vaults, 1,000 of them registered, from the bytes of its file to committed events: CID, JSON, tree,
proofs, calldata, events, PostgreSQL. The floor hashes the 5,000 leaves and nothing else. Fresh processes take turns at
both; seconds are the best of the rounds, the peak of memory is that of the whole process. The last line is the result;
without `--json` a table stands before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _machine import peak_mb
from _result import print_result

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


async def read(folder: Path) -> float:
    """What the resolver does with a file that is in hand, on a schema of its own."""
    from vaultevents.core.reports import ReportLog
    from vaultevents.core.units import Address, BlockNumber, Hash32
    from vaultevents.store import accounts
    from vaultevents.store.cursors import open_stream
    from vaultevents.store.outbox import Outbox
    from vaultevents.store.pool import open_database
    from vaultevents.store.postgres.embedded import EmbeddedPostgres
    from vaultevents.store.reports import due_reports
    from vaultevents.watch.reports import Resolver

    reported = json.loads(folder.joinpath("event.json").read_text())
    content = folder.joinpath("report.json").read_bytes()
    log = ReportLog(
        timestamp=TIMESTAMP,
        ref_slot=107_200,
        root=Hash32(bytes.fromhex(reported["root"])),
        cid=reported["cid"],
        block_number=BlockNumber(1),
        block_time_ms=1000,
        tx_hash=Hash32(bytes(32)),
        log_index=0,
        address=Address(bytes(20)),
    )

    class InHand:
        async def fetch(self, cid: str, check: Callable[[bytes], None]) -> bytes:
            check(content)
            return content

    with EmbeddedPostgres(folder / "postgres") as address:
        database = await open_database(address.connect_kwargs(), schema=f"b_{os.getpid()}")
        try:
            await accounts.add_account(database, "acme", "acme")
            for index in range(0, VAULTS, REGISTERED_EVERY):
                await accounts.add_vault(database, "acme", f"v-{index}", Address(row(index)[0]), None, 0)
            outbox = Outbox(database)
            await open_stream(database, "reports", 0, None)
            live = await outbox.live("reports")
            assert live is not None
            registry = await outbox.registry()
            await outbox.commit(live, live.moved(1, None), (), registry.version, reports=[log])
            (pending,) = await due_reports(database, 2)

            begin = time.perf_counter()
            committed = await Resolver(outbox, InHand(), 1.0).resolve(pending)
            seconds = time.perf_counter() - begin
        finally:
            await database.close()
    assert committed.inserted == VAULTS // REGISTERED_EVERY
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
    """What a measuring process does: one turn, printed as JSON."""
    seconds = asyncio.run(read(Path(folder))) if what == "read" else hash_leaves()
    print(json.dumps({"seconds": seconds, "peak_mb": peak_mb()}))


def turn(what: str, folder: str) -> dict[str, float]:
    """One turn in a fresh process."""
    done = subprocess.run([sys.executable, __file__, what, folder], check=True, capture_output=True, text=True)
    reported: dict[str, float] = json.loads(done.stdout)
    return reported


def best(turns: list[dict[str, float]]) -> dict[str, float]:
    return {"seconds": min(one["seconds"] for one in turns), "peak_mb": max(one["peak_mb"] for one in turns)}


def compare(folder: str) -> dict[str, Any]:
    rounds = [(turn("read", folder), turn("floor", folder)) for _ in range(ROUNDS)]
    ours, floor = best([one for one, _ in rounds]), best([one for _, one in rounds])
    size = Path(folder, "report.json").stat().st_size
    figures = {"vaults": VAULTS, "registered": VAULTS // REGISTERED_EVERY, "file_mb": size / 1e6, **ours}
    ratio = {"time_x": ours["seconds"] / floor["seconds"]}
    rounded = [{key: round(value, 3) for key, value in part.items()} for part in (figures, floor, ratio)]
    reported = dict(zip(("figures", "floor", "ratio"), rounded, strict=True))
    return {"bench": "report", **reported, "goal": GOAL, "ok": all(ours[key] <= most for key, most in GOAL.items())}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["write"]:
        write(Path(arguments[1]))
        return 0
    if arguments[:1] in (["read"], ["floor"]):
        measure(*arguments)
        return 0
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # apart from this process, whose peak of memory Linux would count as that of every process it starts
        subprocess.run([sys.executable, __file__, "write", folder], check=True)
        result = compare(folder)
    return print_result(result, as_json="--json" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
