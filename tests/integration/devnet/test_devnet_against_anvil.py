"""The devnet speaks like a real node: one scenario on both, the same questions, answers of the same shape.

Values differ (hashes, gas); keys and forms must not, so that the devnet is not its own oracle.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import rlp
from eth_hash.auto import keccak

import evm
from block_hashes import root_of, transactions_root
from vaultevents.core.logs import ETHER_FUNDED, WITHDRAWAL_CLAIMED
from vaultevents.devnet import chain as devnet
from vaultevents.devnet.blocks import Log
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.header import bloom_of

pytestmark = [pytest.mark.integration, pytest.mark.anvil]

DEPLOYED, REQUESTED, FUNDED, CLAIMED, EMPTY = 1, 3, 4, 5, 6
"""Blocks of the scenario, the same on both chains."""

MISSING = "0x" + "99" * 32

# Keys that anvil adds and other clients do not -> a key that identifies the object in which they stand.
ANVILS_OWN = {
    "totalDifficulty": "parentHash",  # left the execution API after the merge
    "blobGasPrice": "effectiveGasPrice",  # elsewhere only in receipts of blob transactions
    "blockTimestamp": "from",  # elsewhere only in logs
}

_QUANTITY = re.compile(r"0x(?:0|[1-9a-f][0-9a-f]*)")
_DATA = re.compile(r"0x(?:[0-9a-f]{2})*")
_WIDTHS = (8, 20, 32, 256)


@dataclass(frozen=True, slots=True)
class ScriptedNode:
    """A node with the chain of the scenario; `hashes` are those of the transactions, by block."""

    node: evm.Chain
    hashes: dict[int, str]


def forms(value: Any) -> set[str]:
    """What a leaf of an answer can be; short hex may be read in two ways."""
    if not isinstance(value, str):
        return {type(value).__name__}
    width = len(value) // 2 - 1
    if _DATA.fullmatch(value) and width in _WIDTHS:
        return {f"{width} bytes"}
    found = {name for name, form in (("quantity", _QUANTITY), ("data", _DATA)) if form.fullmatch(value)}
    return found or {"text"}


def differences(real: Any, ours: Any, path: str = "") -> list[str]:
    """Where two answers differ in keys, lengths of lists, or forms of values."""
    match real, ours:
        case dict(), dict():
            excused = {key for key, sign in ANVILS_OWN.items() if sign in real}
            missing = [f"{path}.{key} is missing" for key in real.keys() - ours.keys() - excused]
            invented = [f"{path}.{key} is invented" for key in ours.keys() - real.keys()]
            both = [key for key in real if key in ours]
            deeper = [found for key in both for found in differences(real[key], ours[key], f"{path}.{key}")]
            return [*missing, *invented, *deeper]
        case list(), list() if len(real) == len(ours):
            return [
                found
                for at, (a, b) in enumerate(zip(real, ours, strict=True))
                for found in differences(a, b, f"{path}[{at}]")
            ]
        case (list(), _) | (_, list()) | (dict(), _) | (_, dict()):
            return [f"{path}: {real} is not like {ours}"]
    return [] if forms(real) & forms(ours) else [f"{path}: {real} is not like {ours}"]


def script_anvil(node: evm.Chain) -> ScriptedNode:
    vault, queue, owner = node.deploy("StakingVault"), node.deploy("WithdrawalQueue"), node.accounts[1]
    request_id = node.request_withdrawal(queue, owner, 7)
    node.fund(vault, 5)
    node.claim(queue, owner, node.accounts[2], request_id)
    node.mine()
    return ScriptedNode(node, {number: node.block(number)["transactions"][0] for number in range(DEPLOYED, EMPTY)})


def scripted_devnet() -> tuple[devnet.Chain, dict[int, str]]:
    chain = devnet.Chain(seed=1, chain_id=31337)
    chain.safe, chain.finalized = devnet.Lag(evm.SLOTS_IN_AN_EPOCH), devnet.Lag(evm.FINALIZED_DEPTH)
    vault, queue, owner = b"\x11" * 20, b"\x22" * 20, b"\x33" * 20
    funded = Log(vault, (ETHER_FUNDED,), (5).to_bytes(32))
    words = ((1).to_bytes(32), owner.rjust(32, b"\0"), owner.rjust(32, b"\0"))
    claimed = Log(queue, (WITHDRAWAL_CLAIMED, *words), (7).to_bytes(32))
    transactions = [
        chain.transaction([], creates=[vault]),
        chain.transaction([], creates=[queue]),
        chain.transaction([]),
        chain.transaction([funded]),
        chain.transaction([claimed]),
    ]
    for transaction in transactions:
        chain.mine([transaction])
    chain.mine()
    return chain, {number: "0x" + transaction.hash.hex() for number, transaction in enumerate(transactions, DEPLOYED)}


@asynccontextmanager
async def both(directory: Path) -> AsyncIterator[tuple[ScriptedNode, ScriptedNode]]:
    """anvil and the devnet after the same scenario."""
    chain, hashes = scripted_devnet()
    server = ExecutionServer(chain)
    port = urlsplit(await server.start()).port
    assert port is not None
    try:
        with evm.running(directory) as node:
            yield script_anvil(node), ScriptedNode(evm.Chain(port, ()), hashes)
    finally:
        await server.stop()


async def answer(scripted: ScriptedNode, method: str, *params: Any) -> Any:
    """The result of a call, or the error's code."""
    try:
        return await asyncio.to_thread(scripted.node.rpc, method, *params)
    except evm.RpcError as refusal:
        return {"refused": refusal.error["code"]}


FUNDINGS, CLAIMS = "0x" + ETHER_FUNDED.hex(), "0x" + WITHDRAWAL_CLAIMED.hex()

QUESTIONS: dict[str, tuple[Any, ...]] = {
    "the genesis block": ("eth_getBlockByNumber", "0x0", False),
    "an empty block": ("eth_getBlockByNumber", hex(EMPTY), False),
    "a block with a log": ("eth_getBlockByNumber", hex(FUNDED), False),
    "a block with its transactions": ("eth_getBlockByNumber", hex(FUNDED), True),
    "the latest block": ("eth_getBlockByNumber", "latest", False),
    "the safe block": ("eth_getBlockByNumber", "safe", False),
    "the final block": ("eth_getBlockByNumber", "finalized", False),
    "a block to come": ("eth_getBlockByNumber", "0x63", False),
    "a block nobody knows": ("eth_getBlockByHash", MISSING, False),
    "all logs": ("eth_getLogs", {"fromBlock": "0x0", "toBlock": hex(EMPTY)}),
    "the logs of a topic": ("eth_getLogs", {"fromBlock": "0x0", "toBlock": "latest", "topics": [FUNDINGS]}),
    "the logs of two topics": (
        "eth_getLogs",
        {"fromBlock": "0x0", "toBlock": "latest", "topics": [[FUNDINGS, CLAIMS]]},
    ),
    "the logs of an empty block": ("eth_getLogs", {"fromBlock": hex(EMPTY), "toBlock": hex(EMPTY)}),
    "the chain": ("eth_chainId",),
    "the chain in decimal": ("net_version",),
    "the head": ("eth_blockNumber",),
    "whether it syncs": ("eth_syncing",),
    "the code of no contract": ("eth_getCode", "0x" + "77" * 20, "latest"),
    "the receipt of nothing": ("eth_getTransactionReceipt", MISSING),
    "the receipts of a block": ("eth_getBlockReceipts", hex(CLAIMED)),
    "the receipts of an empty block": ("eth_getBlockReceipts", hex(EMPTY)),
    "a method nobody has": ("eth_noSuchMethod",),
}


async def test_the_same_questions_get_answers_of_the_same_shape(tmp_path: Path) -> None:
    found: list[str] = []
    async with both(tmp_path) as nodes:
        for name, question in QUESTIONS.items():
            answers = [await answer(scripted, *question) for scripted in nodes]
            found += [f"{name}: {difference}" for difference in differences(*answers)]
    assert found == []


@pytest.mark.parametrize("block", [DEPLOYED, REQUESTED, FUNDED, CLAIMED])
async def test_receipts_have_the_same_shape(tmp_path: Path, block: int) -> None:
    async with both(tmp_path) as nodes:
        receipts = [await answer(scripted, "eth_getTransactionReceipt", scripted.hashes[block]) for scripted in nodes]
    assert [receipt["blockNumber"] for receipt in receipts] == [hex(block)] * 2
    assert differences(*receipts) == []


async def test_a_block_asked_by_hash_is_the_block_asked_by_number(tmp_path: Path) -> None:
    async with both(tmp_path) as nodes:
        for scripted in nodes:
            by_number = await answer(scripted, "eth_getBlockByNumber", hex(FUNDED), False)
            assert await answer(scripted, "eth_getBlockByHash", by_number["hash"], False) == by_number


@pytest.mark.parametrize("block", [DEPLOYED, REQUESTED, FUNDED, CLAIMED, EMPTY])
async def test_both_commit_to_their_transactions_and_receipts_by_the_same_rule(tmp_path: Path, block: int) -> None:
    async with both(tmp_path) as nodes:
        for scripted in nodes:
            shown = await answer(scripted, "eth_getBlockByNumber", hex(block), True)
            assert transactions_root(shown) == shown["transactionsRoot"]
            assert root_of(await answer(scripted, "eth_getBlockReceipts", shown["hash"])) == shown["receiptsRoot"]


async def test_both_hash_their_headers_by_the_same_rule(tmp_path: Path) -> None:
    fields = list(scripted_devnet()[0].head.header.fields())
    async with both(tmp_path) as nodes:
        for scripted in nodes:
            for number in range(EMPTY + 1):
                block = await answer(scripted, "eth_getBlockByNumber", hex(number), False)
                items = [rlp_item(name, block[name]) for name in fields]
                assert "0x" + keccak(rlp.encode(items)).hex() == block["hash"], (scripted.node.url, number)


NUMBERS = {
    *("difficulty", "number", "gasLimit", "gasUsed", "timestamp"),
    *("baseFeePerGas", "blobGasUsed", "excessBlobGas"),
}


def rlp_item(name: str, value: str) -> bytes:
    """A header field as RLP takes it: numbers without leading zeros."""
    if name not in NUMBERS:
        return bytes.fromhex(value[2:])
    number = int(value, 16)
    return number.to_bytes((number.bit_length() + 7) // 8)


async def test_the_devnet_makes_the_bloom_that_a_real_node_makes(tmp_path: Path) -> None:
    async with both(tmp_path) as (real, _):
        block = await answer(real, "eth_getBlockByNumber", hex(CLAIMED), False)
        logs = await answer(real, "eth_getLogs", {"blockHash": block["hash"]})
        values = [bytes.fromhex(text[2:]) for log in logs for text in (log["address"], *log["topics"])]
        assert len(values) == 5
        assert bloom_of(values) == int(block["logsBloom"], 16)


@pytest.mark.parametrize(
    ("real", "ours", "where"),
    [
        ({"a": "0x1", "b": "0x2"}, {"a": "0x1"}, ".b is missing"),
        ({"a": "0x1"}, {"a": "0x1", "b": "0x2"}, ".b is invented"),
        ({"logIndex": "0x0", "blockTimestamp": "0x1"}, {"logIndex": "0x0"}, ".blockTimestamp is missing"),
        ({"a": "0x1"}, {"a": 1}, ".a: "),
        ({"a": "0x1"}, {"a": "0x01"}, ".a: "),
        ({"a": "0x1"}, {"a": "1"}, ".a: "),
        ({"a": "0x" + "0" * 64}, {"a": "0x0"}, ".a: "),
        ({"a": "0x" + "ab" * 32}, {"a": "0x" + "ab" * 20}, ".a: "),
        ({"a": "0x" + "ab" * 32}, {"a": "0x" + "AB" * 32}, ".a: "),
        ({"a": None}, {"a": "0x"}, ".a: "),
        ({"a": False}, {"a": None}, ".a: "),
        ([{"a": "0x1"}], [{"a": "0x1"}, {"a": "0x1"}], ": "),
        ([{"a": []}], [{"a": None}], "[0].a: "),
        ({"refused": -32601}, "0x1", ": "),
    ],
)
def test_a_difference_is_seen(real: Any, ours: Any, where: str) -> None:
    (found,) = differences(real, ours)
    assert found.startswith(where)
    assert differences(real, real) == differences(ours, ours) == []
