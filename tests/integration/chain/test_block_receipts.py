"""Receipts of every type make up the root of their block, and blocks of any size are read in bounded memory."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from block_hashes import Encodable, rlp
from sealed_blocks import sealed
from simulation_fixtures import connected
from vaultevents.chain.execution.block_proofs import ProvenRange
from vaultevents.chain.execution.client import ExecutionOptions
from vaultevents.chain.execution.receipts import KNOWN_TYPES, ReceiptsUnavailable
from vaultevents.core.errors import NodeFault
from vaultevents.core.logs import ETHER_FUNDED
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, hex_text
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.floods import UNREGISTERED, mine_flood
from vaultevents.devnet.node import Node
from vaultevents.devnet.trie import ordered_root

pytestmark = pytest.mark.integration

Json = dict[str, Any]
VAULT = Address(b"\x11" * 20)
QUICK = ExecutionOptions(retry_wait_s=0.01)
FIRST = Span(1, 1)


def log(*topics: bytes, data: bytes = b"") -> Json:
    listed = [hex_text(topic) for topic in topics]
    return {"address": hex_text(VAULT), "topics": listed, "data": hex_text(data)}


def receipt(at: int, *logs: Json, **fields: str) -> Json:
    """A receipt as nodes give it; `fields` are those by which types and forks differ."""
    return {
        "transactionHash": "0x" + (at + 1).to_bytes(32).hex(),
        "cumulativeGasUsed": hex(21_000 * (at + 1)),
        "logsBloom": "0x" + bytes([at + 1]).hex() * 256,
        "logs": list(logs),
        **(fields or {"type": "0x2", "status": "0x1"}),
    }


def encoded(given: Json) -> bytes:
    """As the Yellow Paper and EIPs 658 and 2718 say, by another encoder than the service's."""
    outcome: Encodable = bytes.fromhex(given["root"][2:]) if "root" in given else int(given["status"], 16)
    logs: list[Encodable] = [
        [
            bytes.fromhex(entry["address"][2:]),
            [bytes.fromhex(topic[2:]) for topic in entry["topics"]],
            bytes.fromhex(entry["data"][2:]),
        ]
        for entry in given["logs"]
    ]
    bloom = bytes.fromhex(given["logsBloom"][2:])
    kind = int(given.get("type", "0x0"), 16)
    return bytes([kind] if kind else []) + rlp([outcome, int(given["cumulativeGasUsed"], 16), bloom, logs])


class OneBlock(Node):
    """Has one block, number 1, with these receipts."""

    def __init__(self, receipts: list[Json], *, of_whole_blocks: bool = True) -> None:
        chain = Chain(1)
        chain.mine()
        super().__init__(chain)
        self.receipts = receipts
        self.of_whole_blocks = of_whole_blocks
        self.block = sealed(
            Node.call(self, "eth_getBlockByNumber", ["0x1", False]),
            receiptsRoot=hex_text(ordered_root(list(map(encoded, receipts)))),
            logsBloom="0x" + "ff" * 256,
            transactions=[given["transactionHash"] for given in receipts],
        )

    def call(self, method: str, params: list[Any]) -> Any:
        match method:
            case "eth_getBlockByNumber":
                return self.block
            case "eth_getBlockReceipts":
                return self.receipts if self.of_whole_blocks else None
            case "eth_getTransactionReceipt":
                return next(given for given in self.receipts if given["transactionHash"] == params[0])
        return super().call(method, params)


async def read(node: Node, span: Span = FIRST, options: ExecutionOptions = QUICK) -> ProvenRange:
    server = ExecutionServer(node.chain)
    server.node = node
    async with connected(server, options=options) as chain:
        return await chain.prove_range(span, None, set())


TOPIC = bytes.fromhex(hex_text(ETHER_FUNDED)[2:])
SHAPES: tuple[list[Json], ...] = (
    [],
    [log(TOPIC, data=b"\x01" * 32)],
    [log(), log(TOPIC, b"\x02" * 32), log(TOPIC, *[b"\x03" * 32] * 3, data=b"\x80")],
    [log(TOPIC, data=bytes(size)) for size in (0, 1, 31, 32, 55, 56, 255, 256, 65_536)],
)
FORMS = {
    "before Byzantium": {"root": "0x" + "ab" * 32},
    "legacy": {"status": "0x1"},
    "legacy, with its type": {"type": "0x0", "status": "0x1"},
    "failed": {"type": "0x2", "status": "0x0"},
    **{f"type {kind}": {"type": hex(kind), "status": "0x1"} for kind in KNOWN_TYPES},
}


@pytest.mark.parametrize("of_whole_blocks", [True, False])
@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS.keys())
async def test_receipts_of_every_type_make_up_the_root(fields: dict[str, str], of_whole_blocks: bool) -> None:
    receipts = [receipt(at, *logs, **fields) for at, logs in enumerate(SHAPES)]
    found = await read(OneBlock(receipts, of_whole_blocks=of_whole_blocks))
    assert (found.blocks_read, found.roots_rebuilt, found.hashes_rebuilt) == (1, 1, 1)
    kept = [entry for given in receipts for entry in given["logs"] if entry["topics"]]
    assert [hex_text(found_log.data) for found_log in found.logs] == [entry["data"] for entry in kept]
    assert [found_log.log_index for found_log in found.logs] == [0, *range(2, 13)]
    assert {found_log.tx_hash[-1] for found_log in found.logs} == {2, 3, 4}


@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 300])
async def test_blocks_with_any_number_of_mixed_receipts(count: int) -> None:
    forms = list(FORMS.values())
    receipts = [receipt(at % 200, *SHAPES[at % 3], **forms[at % len(forms)]) for at in range(count)]
    receipts = [given | {"transactionHash": "0x" + at.to_bytes(32).hex()} for at, given in enumerate(receipts)]
    for of_whole_blocks in (True, False):
        found = await read(OneBlock(receipts, of_whole_blocks=of_whole_blocks))
        assert found.roots_rebuilt == found.blocks_read == 1
        assert len(found.logs) == sum(bool(entry["topics"]) for given in receipts for entry in given["logs"])


@pytest.mark.parametrize(
    "changed",
    [
        {"status": "0x0"},
        {"type": "0x1"},
        {"cumulativeGasUsed": "0x5209"},
        {"logsBloom": "0x" + "00" * 256},
        {"logs": []},
    ],
    ids=lambda changed: next(iter(changed)),
)
async def test_each_field_of_a_receipt_is_proven(changed: Json) -> None:
    node = OneBlock([receipt(at, *logs) for at, logs in enumerate(SHAPES)])
    node.receipts[2] |= changed
    with pytest.raises(NodeFault, match="the 4 receipts that it gives for block 1 do not make up the block's receipts"):
        await read(node)


async def test_a_receipt_with_a_state_root_cannot_be_given_a_status() -> None:
    node = OneBlock([receipt(0, *SHAPES[1], root="0x" + "ab" * 32)])
    node.receipts[0] = receipt(0, *SHAPES[1], status="0x1")
    with pytest.raises(NodeFault, match="do not make up the block's receipts root"):
        await read(node)


async def test_receipts_of_a_later_type_are_given_but_not_proven() -> None:
    node = OneBlock([receipt(0, *SHAPES[1]), receipt(1, *SHAPES[2], type="0x6", status="0x1")])
    assert (await read(node)).roots_rebuilt == 1, "a type that changes nothing else is proven all the same"
    node.block = sealed(node.block, receiptsRoot="0x" + "12" * 32)
    found = await read(node)
    assert (found.blocks_read, found.roots_rebuilt, len(found.logs)) == (1, 0, 3)


async def test_a_receipt_larger_than_an_answer_is_read_up_to_a_limit_of_its_own() -> None:
    chain = Chain(4)
    block = mine_flood(chain, 4_001)
    node, span = Node(chain), Span(block.number, block.number)
    small = ExecutionOptions(retry_wait_s=0.01, answer_limit_bytes=200_000)
    found = await read(node, span, small)
    assert len(found.logs) == 4_001
    assert {found_log.address for found_log in found.logs} == {UNREGISTERED}
    assert found.roots_rebuilt == found.blocks_read == 1
    limited = ExecutionOptions(retry_wait_s=0.01, answer_limit_bytes=200_000, receipt_limit_bytes=2**19)
    with pytest.raises(ReceiptsUnavailable, match=r"raise execution\.max_receipt_mb"):
        await read(node, span, limited)


LOGS = 100_000
SERVED = """
import asyncio, msgspec, sys
from vaultevents.devnet.acts import Funding, log_of
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.floods import flood
from vaultevents.devnet.node import Node
class Prepared(Node):
    def prepare(self, block):
        receipts = self._receipts(block)
        self.given = {made["transactionHash"]: msgspec.Raw(msgspec.json.encode(made)) for made in receipts}
    def call(self, method, params):
        if method == "eth_getBlockReceipts":
            return list(self.given.values())
        return self.given[params[0]] if method == "eth_getTransactionReceipt" else super().call(method, params)
async def main():
    chain = Chain(6)
    paid = chain.transaction([log_of(Funding(bytes.fromhex(sys.argv[1]), 10**18))])
    block = chain.mine([*flood(chain, int(sys.argv[2])), paid])
    server = ExecutionServer(chain)
    server.node = Prepared(chain, max_results=10_000)
    server.node.prepare(block)
    print(await server.start(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""


READ = """
import asyncio, re, sys
from pathlib import Path
from vaultevents.chain.execution.client import ExecutionChain, HeadPolicy
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
def peak_kib():
    return int(re.search(r"VmHWM:\\s*([0-9]+)", Path("/proc/self/status").read_text())[1])
async def main():
    vault = bytes.fromhex(sys.argv[2])
    async with ExecutionChain([sys.argv[1]], head=HeadPolicy()) as chain:
        before = peak_kib()
        found = await chain.read_logs(Span(1, 1), Watched(frozenset({vault})), None, every=False)
    print(len(found.logs), *(log.log_index for log in found.logs if log.address == vault), peak_kib() - before)
asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured as Linux shows it")
async def test_a_block_of_100_000_logs_of_a_watched_topic_takes_bounded_memory() -> None:
    """Its receipts are more than one answer may have, and its logs are more than the node gives at once."""
    pipe = asyncio.subprocess.PIPE
    run = asyncio.create_subprocess_exec
    node = await run(*(sys.executable, "-c", SERVED, VAULT.hex(), str(LOGS)), stdin=pipe, stdout=pipe)
    try:
        assert node.stdout is not None
        url = (await node.stdout.readline()).decode().strip()
        reader = await run(*(sys.executable, "-c", READ, url, VAULT.hex()), stdout=pipe)
        printed, _ = await reader.communicate()
    finally:
        node.kill()
        await node.communicate()
    *counts, grown_kib = map(int, printed.split()[-3:])
    assert counts == [LOGS + 1, LOGS]
    print(f"{LOGS} logs: {grown_kib / 2**10:.0f} MiB more than before")
    assert grown_kib < 256 * 2**10
