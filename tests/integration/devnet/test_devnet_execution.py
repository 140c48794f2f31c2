"""The devnet's execution node over real HTTP: methods, tags, limits, and every fault of the script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from eth_bloom.bloom import BloomFilter

from vaultevents.devnet.blocks import FULL_BLOCK_LOGS
from vaultevents.devnet.chain import Absent, At, Chain
from vaultevents.devnet.execution import Balancer, ExecutionServer
from vaultevents.devnet.faults import LOG_FAULTS, WITHDRAWAL_FAULTS, Fault, Faults
from vaultevents.devnet.rpc import block_json
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration


@dataclass
class Client:
    """Asks one node."""

    session: aiohttp.ClientSession
    url: str
    server: ExecutionServer

    async def post(self, body: Any) -> Any:
        async with self.session.post(self.url, json=body) as response:
            assert response.status == 200
            return await response.json()

    async def ask(self, method: str, *params: Any) -> dict[str, Any]:
        answer = await self.post({"jsonrpc": "2.0", "id": 7, "method": method, "params": list(params)})
        assert (answer["jsonrpc"], answer["id"]) == ("2.0", 7)
        return dict(answer)

    async def result(self, method: str, *params: Any) -> Any:
        return (await self.ask(method, *params))["result"]

    async def refusal(self, method: str, *params: Any) -> tuple[int, str]:
        error = (await self.ask(method, *params))["error"]
        return error["code"], error["message"]


@asynccontextmanager
async def serving(chain: Chain, **settings: Any) -> AsyncIterator[Client]:
    server = ExecutionServer(chain, **settings)
    url = await server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            yield Client(session, url, server)
    finally:
        await server.stop()


def small_simulation() -> Simulation:
    simulation = Simulation(21, validators=20)
    simulation.history(40, events=80)
    return simulation


async def test_identity_and_head() -> None:
    chain = small_simulation().chain
    async with serving(chain) as node:
        assert await node.result("eth_chainId") == "0x539"
        assert await node.result("net_version") == "1337"
        assert await node.result("eth_syncing") is False
        assert await node.result("eth_blockNumber") == hex(41)
        assert "devnet" in await node.result("web3_clientVersion")
        assert node.server.calls["eth_blockNumber"] == 1


async def test_blocks_by_number_tag_and_hash() -> None:
    chain = small_simulation().chain
    async with serving(chain) as node:
        numbers = {
            tag: (await node.result("eth_getBlockByNumber", tag, False))["number"]
            for tag in ("earliest", "finalized", "safe", "latest", "0x5")
        }
        assert numbers == {"earliest": "0x0", "finalized": hex(39), "safe": hex(40), "latest": hex(41), "0x5": "0x5"}
        five = await node.result("eth_getBlockByNumber", "0x5", False)
        assert await node.result("eth_getBlockByHash", five["hash"], False) == five
        assert await node.result("eth_getBlockByNumber", hex(42), False) is None
        assert await node.result("eth_getBlockByHash", "0x" + "11" * 32, False) is None
        assert (await node.refusal("eth_getBlockByNumber", "0x05", False))[0] == -32602
        assert (await node.refusal("eth_getBlockByNumber"))[0] == -32602


async def test_finality_that_is_frozen_null_unknown_or_going_back() -> None:
    chain = small_simulation().chain
    async with serving(chain) as node:
        chain.finalized = At(30)
        assert (await node.result("eth_getBlockByNumber", "finalized", False))["number"] == hex(30)
        chain.finalized = At(20)
        assert (await node.result("eth_getBlockByNumber", "finalized", False))["number"] == hex(20)
        chain.finalized = Absent.NULL
        assert await node.result("eth_getBlockByNumber", "finalized", False) is None
        chain.finalized = Absent.UNKNOWN
        assert await node.refusal("eth_getBlockByNumber", "finalized", False) == (-39001, "finalized block not found")
        chain.safe = Absent.NULL
        assert (await node.refusal("eth_getLogs", {"toBlock": "safe"}))[1] == "unknown block"


async def test_a_batch_is_answered_in_order_and_a_broken_request_is_refused() -> None:
    async with serving(small_simulation().chain) as node:
        methods = ["eth_chainId", "eth_nope", "eth_blockNumber"]
        batch = [{"jsonrpc": "2.0", "id": n, "method": method} for n, method in enumerate(methods)]
        answers = await node.post(batch)
        assert [answer["id"] for answer in answers] == [0, 1, 2]
        assert answers[1]["error"]["code"] == -32601
        assert answers[2]["result"] == hex(41)
        assert node.server.exchanges == 1
        assert (await node.post([]))["error"]["code"] == -32600
        assert (await node.post(5))["error"]["code"] == -32600
        async with node.session.post(node.url, data=b"{") as response:
            assert (await response.json())["error"]["code"] == -32700


async def test_logs_by_range_and_by_hash_say_the_same() -> None:
    chain = small_simulation().chain
    async with serving(chain) as node:
        by_range = await node.result("eth_getLogs", {"fromBlock": "0x0", "toBlock": "latest"})
        by_hash = []
        for number in range(42):
            block = await node.result("eth_getBlockByNumber", hex(number), False)
            for log in await node.result("eth_getLogs", {"blockHash": block["hash"]}):
                assert block["transactions"][int(log["transactionIndex"], 16)] == log["transactionHash"]
                assert (log["blockHash"], log["blockTimestamp"]) == (block["hash"], block["timestamp"])
                by_hash.append(log)
        assert by_range == by_hash
        assert len(by_range) > 50
        node.server.node.block_timestamp = False
        assert "blockTimestamp" not in (await node.result("eth_getLogs", {"fromBlock": "0x0"}))[0]


async def test_an_unknown_block_hash_is_an_error_but_a_range_beyond_the_head_a_short_success() -> None:
    chain = small_simulation().chain
    async with serving(chain, behind=10) as node:
        assert await node.result("eth_blockNumber") == hex(31)
        head = chain.head
        assert await node.result("eth_getBlockByHash", "0x" + head.hash.hex(), False) is None
        assert await node.refusal("eth_getLogs", {"blockHash": "0x" + head.hash.hex()}) == (-32000, "unknown block")
        both = {"blockHash": "0x" + head.hash.hex(), "fromBlock": "0x1"}
        assert (await node.refusal("eth_getLogs", both))[0] == -32602
        lagging = await node.result("eth_getLogs", {"fromBlock": "0x0", "toBlock": hex(41)})
        assert await node.result("eth_getLogs", {"fromBlock": hex(35), "toBlock": hex(41)}) == []
        node.server.node.behind = 0
        full = await node.result("eth_getLogs", {"fromBlock": "0x0", "toBlock": hex(41)})
        assert lagging == [log for log in full if int(log["blockNumber"], 16) <= 31]
        assert len(lagging) < len(full)


async def test_a_pruned_node_lacks_old_blocks_or_only_their_logs() -> None:
    chain = small_simulation().chain
    before, whole = {"fromBlock": "0x5", "toBlock": "0x28"}, {"fromBlock": "0x14", "toBlock": "0x28"}
    async with serving(chain) as node:
        kept, five = await node.result("eth_getLogs", whole), await node.result("eth_getBlockByNumber", "0x5", False)
        node.server.node.oldest_logs = 20
        assert await node.result("eth_getLogs", before) == kept
        assert await node.result("eth_getLogs", {"blockHash": five["hash"]}) == []
        node.server.node.oldest = 20
        assert await node.refusal("eth_getLogs", before) == (4444, "pruned history unavailable")
        assert await node.result("eth_getLogs", whole) == kept
        assert await node.result("eth_getBlockByNumber", "0x5", False) is None
        assert await node.refusal("eth_getLogs", {"blockHash": five["hash"]}) == (-32000, "unknown block")
        assert (await node.result("eth_getBlockByNumber", "0x0", False))["number"] == "0x0"


async def test_sockets_receive_each_new_head_until_they_freeze() -> None:
    chain = small_simulation().chain
    async with serving(chain) as node, node.session.ws_connect(node.url) as socket:
        await socket.send_json({"jsonrpc": "2.0", "id": 1, "method": "eth_blockNumber"})
        assert (await socket.receive_json())["result"] == hex(41)
        for sent, code in (("{", -32700), ('{"id": 2, "method": "eth_subscribe", "params": ["logs"]}', -32602)):
            await socket.send_str(sent)
            assert (await socket.receive_json())["error"]["code"] == code
        await socket.send_json({"jsonrpc": "2.0", "id": 3, "method": "eth_subscribe", "params": ["newHeads"]})
        name = (await socket.receive_json())["result"]
        assert node.server.subscriptions == 1
        made = [chain.mine(), *chain.reorg(1, [[], []])]
        reported = [(await socket.receive_json())["params"] for _ in made]
        assert [line["subscription"] for line in reported] == [name] * 3
        assert [(line["result"]["number"], line["result"]["hash"]) for line in reported] == [
            (hex(block.number), "0x" + block.hash.hex()) for block in made
        ]
        node.server.frozen = True
        chain.mine()
        await socket.send_json({"jsonrpc": "2.0", "id": 4, "method": "eth_blockNumber"})
        with pytest.raises(TimeoutError):
            await socket.receive(0.05)


async def test_a_balancer_gives_each_exchange_to_any_of_its_servers() -> None:
    chain = small_simulation().chain
    servers = [ExecutionServer(chain), ExecutionServer(chain, behind=20)]
    balancer = Balancer(1, *servers)
    async with aiohttp.ClientSession() as session:
        client = Client(session, await balancer.start(), servers[0])
        assert {await client.result("eth_blockNumber") for _ in range(20)} == {hex(41), hex(21)}
    await balancer.stop()
    assert sum(server.exchanges for server in servers) == 20


async def test_receipts_and_code() -> None:
    simulation = small_simulation()
    vault = simulation.registrations[0]
    founded = simulation.chain.block(1)
    assert founded is not None
    tx_hash = "0x" + founded.transactions[0].hash.hex()
    async with serving(simulation.chain) as node:
        receipt = await node.result("eth_getTransactionReceipt", tx_hash)
        assert receipt["contractAddress"] == "0x" + vault.address.hex()
        assert receipt["logs"] == [
            log
            for log in await node.result("eth_getLogs", {"fromBlock": "0x1", "toBlock": "0x1"})
            if log["transactionHash"] == tx_hash
        ]
        receipts = await node.result("eth_getBlockReceipts", "0x1")
        assert receipts[0] == receipt
        assert await node.result("eth_getBlockReceipts", "0x" + founded.hash.hex()) == receipts
        assert await node.result("eth_getTransactionReceipt", "0x" + "22" * 32) is None
        assert await node.result("eth_getCode", "0x" + vault.address.hex(), "0x0") == "0x"
        assert await node.result("eth_getCode", "0x" + vault.address.hex(), "0x1") != "0x"


async def test_the_logs_of_a_full_block_asked_by_hash_rebuild_its_bloom() -> None:
    simulation = small_simulation()
    simulation.chain.filler_logs = FULL_BLOCK_LOGS
    simulation.history(3, events=6)
    async with serving(simulation.chain) as node:
        for number in range(42, 45):
            block = await node.result("eth_getBlockByNumber", hex(number), False)
            logs = await node.result("eth_getLogs", {"blockHash": block["hash"]})
            values = [bytes.fromhex(v[2:]) for log in logs for v in (log["address"], *log["topics"])]
            bloom = int(BloomFilter.from_iterable(values))
            assert bloom == int(block["logsBloom"], 16)
            assert bloom.bit_count() >= 0.9 * 2048
            receipts = await node.result("eth_getBlockReceipts", block["hash"])
            assert [log for receipt in receipts for log in receipt["logs"]] == logs
            last = await node.result("eth_getTransactionReceipt", block["transactions"][-1])
            assert last == receipts[-1]


@pytest.mark.parametrize(
    "style, code, message",
    [
        ("infura", -32602, "range 41 exceeds limit of 10"),
        ("ankr", -32000, "block range is too wide"),
        ("reth", -32602, "query exceeds max block range 10"),
        ("alchemy", -32602, "this block range should work: [0x1, 0xa]"),
    ],
)
async def test_a_range_beyond_the_limit_is_refused_in_the_words_of_the_provider(
    style: str, code: int, message: str
) -> None:
    async with serving(small_simulation().chain, max_range=10, limit_style=style) as node:
        refused = await node.refusal("eth_getLogs", {"fromBlock": "0x1", "toBlock": hex(41)})
        assert (refused[0], message in refused[1]) == (code, True)
        assert await node.result("eth_getLogs", {"fromBlock": "0x1", "toBlock": "0xa"})


@pytest.mark.parametrize(
    "style, code, message",
    [
        ("infura", -32005, "query returned more than 25 results. Try with this block range [0x2, "),
        ("ankr", -32005, "query returned more than 25 results"),
        ("reth", -32602, "query exceeds max results 25, retry with the range 2-"),
        ("alchemy", -32602, "cap of 25 logs in the response"),
    ],
)
async def test_too_many_results_are_refused_with_a_range_that_works(style: str, code: int, message: str) -> None:
    async with serving(small_simulation().chain, max_results=25, limit_style=style) as node:
        refused = await node.refusal("eth_getLogs", {"fromBlock": "0x2", "toBlock": hex(41)})
        assert (refused[0], message in refused[1]) == (code, True)
        if style == "infura":
            last = refused[1].split(", ")[1].rstrip("].")
            assert 0 < len(await node.result("eth_getLogs", {"fromBlock": "0x2", "toBlock": last})) <= 25


Check = Callable[[Client], Awaitable[bool]]


async def status_of(node: Client) -> int:
    async with node.session.post(node.url, json={"id": 1, "method": "eth_chainId"}) as response:
        return response.status


async def is_500(node: Client) -> bool:
    return await status_of(node) == 500


async def is_429(node: Client) -> bool:
    return await status_of(node) == 429


async def is_html(node: Client) -> bool:
    async with node.session.post(node.url, json={"id": 1, "method": "eth_chainId"}) as response:
        return (response.status, response.content_type) == (200, "text/html")


async def is_silent(node: Client) -> bool:
    try:
        async with asyncio.timeout(0.1):
            await node.ask("eth_chainId")
    except TimeoutError:
        return True
    return False


async def is_an_error(node: Client) -> bool:
    return (await node.ask("eth_chainId")).get("error") == {"code": -32000, "message": "internal error"}


async def is_another_chain(node: Client) -> bool:
    return bool(await node.result("eth_chainId") != "0x539")


def block_differs(number: int) -> Check:
    async def differs(node: Client) -> bool:
        block = node.server.node.chain.block(number)
        assert block is not None
        shown = await node.result("eth_getBlockByNumber", hex(number), False)
        right = ("0x" + block.hash.hex(), "0x" + block.header.parent_hash.hex())
        return shown is None or (shown["hash"], shown["parentHash"]) != right

    return differs


async def logs_differ(node: Client) -> bool:
    query = {"fromBlock": "0x1", "toBlock": "0x5"}
    right = [node.server.node.log_json(log) for log in node.server.node.logs(query)]
    return bool(await node.result("eth_getLogs", query) != right)


async def withdrawals_differ(node: Client) -> bool:
    block = next(one for one in node.server.node.chain.blocks(1, 99) if len(one.withdrawals) >= 3)
    shown = await node.result("eth_getBlockByNumber", hex(block.number), False)
    return bool(shown.get("withdrawals") != block_json(block)["withdrawals"])


VISIBLE: dict[Fault, Check] = {
    Fault.HTTP_500: is_500,
    Fault.HTTP_429: is_429,
    Fault.HTML: is_html,
    Fault.SLOW: is_silent,
    Fault.HANG: is_silent,
    Fault.ERROR: is_an_error,
    Fault.WRONG_CHAIN_ID: is_another_chain,
    Fault.WRONG_GENESIS: block_differs(0),
    Fault.NULL_BLOCK: block_differs(4),
    Fault.UNLINKED_PARENT: block_differs(4),
    **dict.fromkeys(LOG_FAULTS, logs_differ),
    **dict.fromkeys(WITHDRAWAL_FAULTS, withdrawals_differ),
}


@pytest.mark.parametrize("kind", list(VISIBLE))
async def test_each_fault_is_visible_when_it_fires_and_only_then(kind: Fault) -> None:
    async with serving(small_simulation().chain) as node:
        assert not await VISIBLE[kind](node)
        node.server.faults.once(kind)
        assert await VISIBLE[kind](node)
        assert node.server.faults.fired == {kind: 1}
        assert not await VISIBLE[kind](node)


async def test_a_faulty_node_is_faulty_in_the_same_way_with_the_same_seed() -> None:
    chain = small_simulation().chain

    async def run(seed: int) -> list[int]:
        async with serving(chain, faults=Faults(seed, {Fault.EMPTY_LOGS: 0.3})) as node:
            answers = [
                await node.result("eth_getLogs", {"fromBlock": "0x1", "toBlock": hex(1 + n % 4)}) for n in range(60)
            ]
            return [len(answer) for answer in answers]

    first = await run(1)
    assert first == await run(1)
    assert first != await run(2)
    assert 5 < first.count(0) < 35
