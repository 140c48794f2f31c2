"""Nodes that lie, break and babble: never a wrong result, always the node's name, never its URL (rule T14)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from sealed_blocks import sealed
from simulation_fixtures import log_facts, truth, watched
from vaultevents.chain.execution import block_proofs, receipts, verification, wire
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy, LogRange
from vaultevents.chain.execution.receipts import BlockLogs, ReceiptsUnavailable
from vaultevents.core.errors import ChainDisagreement, InputError, NodeFault, SourceUnavailable
from vaultevents.core.nodes import LogLimit
from vaultevents.core.registry import Watched
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.loopback import LoopbackServer
from vaultevents.devnet.node import Node
from vaultevents.devnet.rpc import RpcError
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration

SECRET = "k3y-that-must-not-show"
QUICK = ExecutionOptions(retry_wait_s=0.01, log_range_start=25)
SPAN = Span(1, 58)
MEDDLED = 22
"""A block with logs."""
OTHER_HASH = "0x" + "ab" * 32
NO_BLOOM = "0x" + "00" * 256

Json = dict[str, Any]
Meddle = Callable[[str, Any], Any]


@pytest.fixture(scope="module")
def made() -> Simulation:
    simulation = Simulation(11)
    simulation.history(60)
    return simulation


class Hostile:
    """A devnet node whose results are meddled with, call by call, or whose whole answers are replaced."""

    def __init__(
        self,
        simulation: Simulation,
        meddle: Meddle | None = None,
        answer: Callable[[list[Json]], Any] | None = None,
        whole: Callable[[bytes], web.StreamResponse | None] | None = None,
    ) -> None:
        self.node = Node(simulation.chain)
        self.exchanges = 0
        self.batches: list[int] = []
        self._meddle = meddle or (lambda _method, result: result)
        self._answer = answer or (lambda replies: replies)
        self._whole = whole
        self._server = LoopbackServer(self._exchange)

    async def start(self) -> str:
        return await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        self.exchanges += 1
        sent = msgspec.json.decode(await request.read())
        calls = sent if isinstance(sent, list) else [sent]
        self.batches.append(len(calls))
        replies = self._answer([self._reply(call) for call in calls])
        if not isinstance(sent, list) and isinstance(replies, list) and len(replies) == 1:
            replies = replies[0]
        body = msgspec.json.encode(replies)
        replaced = self._whole(body) if self._whole else None
        return replaced or web.Response(body=body, content_type="application/json")

    def _reply(self, call: Json) -> Json:
        method, params = call["method"], call["params"]
        try:
            if method == "eth_getLogs":
                result: Any = [self.node.log_json(placed) for placed in self.node.logs(params[0])]
            else:
                result = self.node.call(method, params)
            return {"jsonrpc": "2.0", "id": call["id"], "result": self._meddle(method, result)}
        except RpcError as error:
            return {"jsonrpc": "2.0", "id": call["id"], "error": error.to_json()}


@asynccontextmanager
async def reading(
    *servers: Hostile | ExecutionServer, options: ExecutionOptions = QUICK
) -> AsyncIterator[ExecutionChain]:
    urls = [f"{await server.start()}/v2/{SECRET}?key={SECRET}" for server in servers]
    try:
        async with ExecutionChain(urls, head=HeadPolicy(), options=options) as chain:
            yield chain
    finally:
        for server in servers:
            await server.stop()


def with_log(change: Callable[[Json], Json]) -> Meddle:
    """The last log of every answer changed."""
    return lambda method, result: [*result[:-1], change(result[-1])] if method == "eth_getLogs" and result else result


def with_block(change: Callable[[Json], Json | None], number: int = MEDDLED) -> Meddle:
    """One block changed."""

    def meddle(method: str, result: Any) -> Any:
        return change(result) if method == "eth_getBlockByNumber" and result["number"] == hex(number) else result

    return meddle


def with_watched_log(change: Callable[[Json], Json]) -> Meddle:
    """Change the first log of every answer; those of the simulation's first block are of watched contracts."""
    return lambda method, result: [change(result[0]), *result[1:]] if method == "eth_getLogs" and result else result


def with_first_block(**changes: str) -> Meddle:
    """All logs of the first block changed."""

    def meddle(method: str, result: Any) -> Any:
        if method != "eth_getLogs":
            return result
        return [{**log, **changes} if log["blockNumber"] == "0x1" else log for log in result]

    return meddle


def with_receipts(change: Callable[[Json], Json | None]) -> Meddle:
    """The first log of every block changed or left out in its receipts."""

    def meddle(method: str, result: Any) -> Any:
        at = next((at for at, receipt in enumerate(result) if receipt["logs"]), None) if is_list(method) else None
        if at is None:
            return result
        first, *rest = result[at]["logs"]
        changed = change(first)
        logs = rest if changed is None else [changed, *rest]
        return [*result[:at], {**result[at], "logs": logs}, *result[at + 1 :]]

    def is_list(method: str) -> bool:
        return method == "eth_getBlockReceipts"

    return meddle


def swap(replies: list[Json]) -> list[Json]:
    """The first two answers of a batch under each other's id."""
    if len(replies) < 2:
        return replies
    first, second, *rest = replies
    return [{**first, "id": second["id"]}, {**second, "id": first["id"]}, *rest]


REFUSED: dict[str, Callable[[Simulation], Hostile]] = {
    "other topic": lambda w: Hostile(w, with_log(lambda log: {**log, "topics": [OTHER_HASH, *log["topics"][1:]]})),
    "no topic": lambda w: Hostile(w, with_log(lambda log: {**log, "topics": []})),
    "out of range": lambda w: Hostile(w, with_log(lambda log: {**log, "blockNumber": "0x7fffffff"})),
    "removed": lambda w: Hostile(w, with_log(lambda log: {**log, "removed": True})),
    "pending": lambda w: Hostile(w, with_log(lambda log: {**log, "blockNumber": None})),
    "100-digit quantity": lambda w: Hostile(w, with_log(lambda log: {**log, "logIndex": "0x" + "9" * 100})),
    "negative": lambda w: Hostile(w, with_log(lambda log: {**log, "logIndex": "-0x1"})),
    "a number": lambda w: Hostile(w, with_log(lambda log: {**log, "logIndex": 1})),
    "missing field": lambda w: Hostile(w, with_log(lambda log: {k: v for k, v in log.items() if k != "address"})),
    "logs is null": lambda w: Hostile(w, lambda m, r: None if m == "eth_getLogs" else r),
    "null block": lambda w: Hostile(w, with_block(lambda _: None)),
    "other parent": lambda w: Hostile(w, with_block(lambda block: {**block, "parentHash": OTHER_HASH})),
    "parent not linked": lambda w: Hostile(w, with_block(lambda block: sealed(block, parentHash=OTHER_HASH))),
    "other hash": lambda w: Hostile(w, with_block(lambda block: {**block, "hash": OTHER_HASH})),
    "another block": lambda w: Hostile(w, with_block(lambda block: {**block, "number": "0x13"})),
    "other time": lambda w: Hostile(w, with_block(lambda block: {**block, "timestamp": "0x1"})),
    "time goes back": lambda w: Hostile(w, with_block(lambda block: sealed(block, timestamp="0x1"))),
    "short bloom": lambda w: Hostile(w, with_block(lambda block: {**block, "logsBloom": "0x00"})),
    "empty bloom": lambda w: Hostile(w, with_block(lambda block: {**block, "logsBloom": NO_BLOOM})),
    "empty bloom, hash of its own": lambda w: Hostile(w, with_block(lambda block: sealed(block, logsBloom=NO_BLOOM))),
    "bloom full of ones": lambda w: Hostile(w, with_block(lambda block: {**block, "logsBloom": "0x" + "ff" * 256})),
    "receipts: other data": lambda w: Hostile(w, with_receipts(lambda log: {**log, "data": "0x" + "07" * 32})),
    "receipts: other emitter": lambda w: Hostile(w, with_receipts(lambda log: {**log, "address": "0x" + "5e" * 20})),
    "receipts: other topic": lambda w: Hostile(
        w, with_receipts(lambda log: {**log, "topics": [OTHER_HASH, *log["topics"][1:]]})
    ),
    "receipts: a log is missing": lambda w: Hostile(w, with_receipts(lambda _: None)),
    "receipts: last is missing": lambda w: Hostile(w, lambda m, r: r[:-1] if m == "eth_getBlockReceipts" else r),
    "receipts: none": lambda w: Hostile(w, lambda m, r: [] if m == "eth_getBlockReceipts" else r),
    "receipts: no list": lambda w: Hostile(w, lambda m, r: {} if m == "eth_getBlockReceipts" else r),
    "receipts: numbers": lambda w: Hostile(w, lambda m, r: [1] * len(r) if m == "eth_getBlockReceipts" else r),
    "receipts: swapped": lambda w: Hostile(
        w, lambda m, r: [*r[1:], r[0]] if m == "eth_getBlockReceipts" and len(r) > 1 else r
    ),
    "receipts: other transaction": lambda w: Hostile(
        w,
        lambda m, r: (
            [{**receipt, "transactionHash": OTHER_HASH} for receipt in r] if m == "eth_getBlockReceipts" else r
        ),
    ),
    "swapped ids": lambda w: Hostile(w, answer=swap),
    "an id twice": lambda w: Hostile(w, answer=lambda replies: [replies[0], *replies]),
    "an answer missing": lambda w: Hostile(w, answer=lambda replies: replies[:-1]),
    "foreign ids": lambda w: Hostile(w, answer=lambda replies: [{**reply, "id": 10**6} for reply in replies]),
    "neither result nor error": lambda w: Hostile(w, answer=lambda replies: [{"id": reply["id"]} for reply in replies]),
    "HTML with 200": lambda w: Hostile(w, whole=lambda _: web.Response(text="<html>Sign in</html>")),
    "half a body": lambda w: Hostile(w, whole=lambda body: web.Response(body=body[: len(body) // 2])),
    "nested 100,000 deep": lambda w: Hostile(w, whole=lambda _: web.Response(body=b"[" * 100_000)),
    "not UTF-8": lambda w: Hostile(w, whole=lambda _: web.Response(body=b'{"id":"\xff"}')),
    "redirect": lambda w: Hostile(w, whole=lambda _: web.Response(status=302, headers={"location": "http://[::1]/"})),
    "compressed": lambda w: Hostile(w, whole=lambda b: web.Response(body=b, headers={"content-encoding": "gzip"})),
    "status 500": lambda w: Hostile(w, whole=lambda _: web.Response(status=500, text="oops")),
    "status 401": lambda w: Hostile(w, whole=lambda _: web.Response(status=401, text=SECRET)),
    "status 429 for an hour": lambda w: Hostile(
        w, whole=lambda _: web.Response(status=429, headers={"retry-after": "3600"})
    ),
}
"""What a lone node gives no result for."""


@pytest.mark.parametrize("lie", REFUSED)
async def test_what_contradicts_the_chain_gives_no_result_and_another_node_is_asked(made: Simulation, lie: str) -> None:
    make = REFUSED[lie]
    with capture_logs() as logged:
        async with reading(make(made)) as alone:
            with pytest.raises(SourceUnavailable) as caught:
                await alone.read_logs(SPAN, watched(made), None)
            assert caught.value.node == alone.nodes[0]
            assert caught.value.__context__ is None or SECRET not in repr(caught.value.__context__)
            assert SECRET not in repr(caught.value)
        async with reading(make(made), ExecutionServer(made.chain)) as nodes:
            assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
            assert any(entry.get("node") == nodes.nodes[0] and "problem" in entry for entry in logged)
    assert SECRET not in repr(logged)


DISPROVED: dict[str, Meddle] = {
    "five topics": with_watched_log(lambda log: {**log, "topics": [log["topics"][0]] * 5}),
    "other data": with_watched_log(lambda log: {**log, "data": "0x" + "07" * 32}),
    "no data": with_watched_log(lambda log: {**log, "data": "0x"}),
    "other block hash": with_first_block(blockHash=OTHER_HASH),
    "other index": with_watched_log(lambda log: {**log, "logIndex": "0x63"}),
    "another block": with_first_block(blockHash=OTHER_HASH, blockNumber="0x2"),
    "short address": with_watched_log(lambda log: {**log, "address": "0x1234"}),
    "another emitter": with_watched_log(lambda log: {**log, "address": "0x" + "5e" * 20}),
    "no logs": lambda method, result: [] if method == "eth_getLogs" else result,
    "half of the logs": lambda method, result: result[: len(result) // 2] if method == "eth_getLogs" else result,
}
"""Claims that a block's receipts disprove."""


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("lie", DISPROVED)
async def test_a_claim_is_replaced_by_what_the_receipts_prove_and_its_node_is_named(
    made: Simulation, lie: str, every: bool
) -> None:
    with capture_logs() as logged:
        async with reading(Hostile(made, DISPROVED[lie]), ExecutionServer(made.chain)) as nodes:
            found = await nodes.read_logs(SPAN, watched(made), None, every=every)
            assert log_facts(found.logs) == truth(made, SPAN)
            assert nodes.counters.claims_disproved > 0
            liar, honest = nodes.node_states()
            assert (liar.state, honest.state) == ("open", "closed")
            assert "logs of block" in (liar.problem or "") and "receipts prove" in (liar.problem or "")
            assert any(entry.get("node") == nodes.nodes[0] and "problem" in entry for entry in logged)


@pytest.mark.parametrize("lie", DISPROVED)
async def test_a_lone_node_gives_every_log_that_its_blooms_name_whatever_it_claims(made: Simulation, lie: str) -> None:
    async with reading(Hostile(made, DISPROVED[lie])) as alone:
        assert log_facts((await alone.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
        assert alone.counters.claims_disproved > 0
    async with reading(Hostile(made, DISPROVED[lie])) as edges:
        found = await edges.read_logs(SPAN, watched(made), None, every=False)
        assert set(log_facts(found.logs)) <= set(truth(made, SPAN))


IGNORED: dict[str, Meddle] = {
    "other place in block": with_watched_log(lambda log: {**log, "transactionIndex": "0x63"}),
    "no time": with_watched_log(lambda log: {**log, "blockTimestamp": "0x0"}),
    "twice": lambda method, result: result * 2 if method == "eth_getLogs" else result,
    "last first": lambda method, result: result[::-1] if method == "eth_getLogs" else result,
}


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("oddity", IGNORED)
async def test_what_is_taken_from_blocks_alone_is_not_looked_at_in_logs(
    made: Simulation, oddity: str, every: bool
) -> None:
    async with reading(Hostile(made)) as right:
        wanted = await right.read_logs(SPAN, watched(made), None, every=every)
    async with reading(Hostile(made, IGNORED[oddity])) as nodes:
        found = await nodes.read_logs(SPAN, watched(made), None, every=every)
        assert (found.logs, found.times_s) == (wanted.logs, wanted.times_s)
        assert nodes.counters.claims_disproved == nodes.counters.node_faults == 0


@pytest.mark.parametrize("method", ["eth_getBlockReceipts", "both"])
async def test_receipts_that_a_node_withholds_are_asked_one_by_one_and_then_of_another(
    made: Simulation, method: str
) -> None:
    withheld = ("eth_getBlockReceipts", "eth_getTransactionReceipt") if method == "both" else (method,)

    def withhold(asked: str, result: Any) -> Any:
        return None if asked in withheld else result

    async with reading(Hostile(made, withhold)) as alone:
        if method == "both":
            with pytest.raises(ReceiptsUnavailable, match="gives neither the receipts of block 1 nor that of its tran"):
                await alone.read_logs(SPAN, watched(made), None)
        else:
            assert log_facts((await alone.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
    async with reading(Hostile(made, withhold), ExecutionServer(made.chain)) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
        assert [memory.state for memory in nodes.node_states()] == ["closed", "closed"], (
            "it is fine for everything else"
        )


@pytest.mark.parametrize("liar_first", [True, False])
@pytest.mark.parametrize("altered", [True, False])
async def test_a_false_type_that_nobody_knows_does_not_replace_what_another_node_can_prove(
    made: Simulation, altered: bool, liar_first: bool
) -> None:
    other_data = with_receipts(lambda log: {**log, "data": "0x" + "07" * 32} if altered else log)

    def lie(method: str, result: Any) -> Any:
        changed = other_data(method, result)
        is_receipts = method == "eth_getBlockReceipts"
        return [{**receipt, "type": "0x7e"} for receipt in changed] if is_receipts else changed

    servers: list[Hostile | ExecutionServer] = [Hostile(made, lie), ExecutionServer(made.chain)]
    async with reading(*(servers if liar_first else servers[::-1])) as nodes:
        found = await nodes.read_logs(SPAN, watched(made), None)
        assert log_facts(found.logs) == truth(made, SPAN)
        assert found.unverified is None


OTHER_TRANSACTION = with_watched_log(lambda log: {**log, "transactionHash": OTHER_HASH})


@pytest.mark.parametrize("every", [True, False])
async def test_a_false_transaction_hash_is_disproved_by_the_transactions_of_the_block(
    made: Simulation, every: bool
) -> None:
    for honest in ([], [ExecutionServer(made.chain)]):
        async with reading(Hostile(made, OTHER_TRANSACTION), *honest) as nodes:
            found = await nodes.read_logs(SPAN, watched(made), None, every=every)
            assert log_facts(found.logs) == truth(made, SPAN)
            assert nodes.counters.claims_disproved > 0
            assert "alters logs of block" in (nodes.node_states()[0].problem or "")


async def test_where_transactions_cannot_be_proven_a_contradiction_about_their_hashes_stops_the_stream(
    made: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "list_root", lambda _: bytes(32))
    options = ExecutionOptions(retry_wait_s=0.01, strict=False)  # of a development chain
    for honest in ([], [ExecutionServer(made.chain)]):
        async with reading(Hostile(made, OTHER_TRANSACTION), *honest, options=options) as nodes:
            with pytest.raises(ChainDisagreement, match="different transaction hashes for the same logs"):
                await nodes.read_logs(SPAN, watched(made), None)


def _unchecked(taken: receipts._Receipts, _: object) -> BlockLogs:
    return BlockLogs(taken.header, tuple(taken.logs), tuple(taken.tx_indices))


async def _as_they_are(_: object, blocks: list[BlockLogs], *__: object) -> list[BlockLogs]:
    """The second detector of a block of another hash: no node has its transactions."""
    return blocks


@pytest.mark.parametrize(
    ("detector", "lie"),
    [
        ("root", with_receipts(lambda log: {**log, "data": "0x" + "07" * 32})),
        ("header hash", with_block(lambda block: {**block, "timestamp": "0x7fffffff"}, 58)),
        ("link", with_block(lambda block: sealed(block, logsBloom="0x" + "00" * 256))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_without_its_detector_a_lie_gets_through(
    made: Simulation, detector: str, lie: Meddle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read() -> LogRange:
        async with reading(Hostile(made, lie)) as nodes:
            return await nodes.read_logs(SPAN, watched(made), None)

    with pytest.raises(NodeFault):
        await read()
    match detector:
        case "root":
            monkeypatch.setattr(receipts._Receipts, "proven", _unchecked)
            facts = log_facts((await read()).logs)
            assert facts != truth(made, SPAN) and len(facts) == len(truth(made, SPAN))
        case "header hash":
            monkeypatch.setattr(wire, "compute_hash", lambda fields: bytes.fromhex(fields.hash[2:]))
            assert (await read()).last.timestamp_s == 0x7FFFFFFF
        case "link":
            monkeypatch.setattr(verification, "check_parent", lambda *_: None)
            monkeypatch.setattr(block_proofs, "_with_transactions", _as_they_are)
            block = made.chain.block(MEDDLED)
            assert block is not None and (await read()).headers[MEDDLED].hash != block.hash


async def test_the_times_of_events_are_those_of_headers(made: Simulation) -> None:
    flat = Hostile(made, lambda m, r: [{**log, "blockTimestamp": "0x0"} for log in r] if m == "eth_getLogs" else r)
    async with reading(flat) as nodes:
        times_s = (await nodes.read_logs(SPAN, watched(made), None, every=False)).times_s
    assert times_s == {number: block.timestamp_s for number in times_s if (block := made.chain.block(number))}


async def test_an_answer_that_breaks_off_is_a_passing_fault() -> None:
    asked = 0

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"}")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"jsonrpc": "2.0", ')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with ExecutionChain([f"http://127.0.0.1:{port}"], head=HeadPolicy(), options=QUICK) as nodes:
            with pytest.raises(SourceUnavailable, match="breaks off in the middle"):
                await nodes.header(3)
    assert asked == 3


async def test_unwatched_emitters_pass_through_in_blocks_that_hold_watched_logs(made: Simulation) -> None:
    one = Watched(frozenset(sorted(watched(made).vaults)[:1]), frozenset())
    async with reading(Hostile(made)) as nodes:
        found = await nodes.read_logs(SPAN, one, None)
    ours = {fact[0] for fact in truth(made, SPAN) if fact[3] in one.vaults}
    assert log_facts(found.logs) == [fact for fact in truth(made, SPAN) if fact[0] in ours]
    assert found.times_s.keys() == ours
    assert any(log.address not in one.vaults for log in found.logs)


async def test_the_first_block_must_be_linked_to_the_anchor(made: Simulation) -> None:
    for every in (True, False):
        async with reading(Hostile(made)) as nodes:
            before = made.chain.block(9)
            assert before is not None
            await nodes.read_logs(Span(10, 30), watched(made), Hash32(before.hash), every=every)
            with pytest.raises(NodeFault, match="block 10 is not linked to block 9"):
                await nodes.read_logs(Span(10, 30), watched(made), Hash32(bytes(32)), every=every)


async def test_logs_that_are_more_than_is_read_are_taken_from_receipts(made: Simulation) -> None:
    data = "0x" + "00" * 3_000_000
    options = ExecutionOptions(answer_limit_bytes=2**20, log_range_start=4)
    huge = with_watched_log(lambda log: {**log, "data": data})
    async with reading(Hostile(made, huge), options=options) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
        assert nodes.counters.ranges_refused > 30


@pytest.mark.parametrize("refuse", ["error", "status", "object", "only the first"])
async def test_a_node_that_takes_few_calls_at_once_is_learned(made: Simulation, refuse: str) -> None:
    def answer(replies: list[Json]) -> Any:
        error = {"code": -32600, "message": "batch too large"}
        if len(replies) <= 3 or refuse == "status":
            return replies
        if refuse == "object":
            return {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "invalid request"}}
        return (
            [{"jsonrpc": "2.0", "id": replies[0]["id"], "error": error}]
            if refuse == "only the first"
            else [{"jsonrpc": "2.0", "id": reply["id"], "error": error} for reply in replies]
        )

    def whole(body: bytes) -> web.StreamResponse | None:
        too_many = refuse == "status" and body.startswith(b"[") and body.count(b'"jsonrpc"') > 3
        return web.Response(status=400, text="bad request") if too_many else None

    server = Hostile(made, answer=answer, whole=whole)
    async with reading(server) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
        server.batches.clear()
        assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
        assert max(server.batches) <= 3


async def test_a_node_without_batches_is_asked_one_by_one(made: Simulation) -> None:
    def whole(body: bytes) -> web.StreamResponse | None:
        return web.Response(status=405) if body.startswith(b"[") else None

    server = Hostile(made, whole=whole)
    async with reading(server) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
        server.batches.clear()
        await nodes.read_logs(SPAN, watched(made), None)
        assert set(server.batches) == {1}


async def test_answers_that_are_too_large_together_are_asked_apart(made: Simulation) -> None:
    options = ExecutionOptions(answer_limit_bytes=30_000, batch_size=100, log_range_start=60)
    async with reading(Hostile(made), options=options) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)


PASSING: dict[str, Callable[[bytes], web.StreamResponse]] = {
    "status 500": lambda _: web.Response(status=500),
    "status 503": lambda _: web.Response(status=503),
    "HTML with 200": lambda _: web.Response(text="<html>Bad gateway</html>"),
    "JSON that is cut": lambda body: web.Response(body=body[: len(body) // 2]),
}


@pytest.mark.parametrize("fault", PASSING)
async def test_a_passing_fault_is_waited_out_at_the_same_node(made: Simulation, fault: str) -> None:
    server = Hostile(made, whole=lambda body: None if server.exchanges % 3 == 0 else PASSING[fault](body))
    options = ExecutionOptions(retry_wait_s=0.01, batches_at_once=1)  # so that the third attempt is that of one batch
    async with reading(server, options=options) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
        assert nodes.counters.retries > 0
        assert nodes.counters.unavailable == nodes.counters.node_faults == 0


async def test_retry_after_is_honoured(made: Simulation) -> None:
    first = web.Response(status=429, headers={"retry-after": "1"})
    server = Hostile(made, whole=lambda _: first if server.exchanges == 1 else None)
    async with reading(server) as nodes:
        started = asyncio.get_running_loop().time()
        await nodes.header(3)
        assert asyncio.get_running_loop().time() - started >= 1.0


async def test_a_node_that_never_answers_is_left_within_the_deadline(made: Simulation) -> None:
    server = ExecutionServer(made.chain)
    server.faults.rates = {Fault.HANG: 1.0}
    options = ExecutionOptions(total_timeout_s=2.0)  # enough for the node that answers
    async with reading(server, ExecutionServer(made.chain), options=options) as nodes:
        assert (await nodes.header(3)).number == 3
        assert nodes.counters.requests == 2


async def test_a_node_that_is_gone_is_named_without_its_url(made: Simulation) -> None:
    server = ExecutionServer(made.chain)
    async with reading(server) as nodes:
        await server.stop()
        with pytest.raises(SourceUnavailable, match="cannot be reached") as caught:
            await nodes.header(3)
    assert caught.value.__cause__ is None
    assert SECRET not in repr(caught.value.__context__)


async def test_a_nodes_own_words_do_not_show_the_key(made: Simulation) -> None:
    def answer(replies: list[Json]) -> list[Json]:
        reported = {
            "code": -32000,
            "message": f"error sending request for url (http://127.0.0.1/v2/{SECRET}): {SECRET}",
        }
        return [{"id": reply["id"], "error": reported} for reply in replies]

    async with reading(Hostile(made, answer=answer)) as nodes:
        with pytest.raises(SourceUnavailable, match="error sending request") as caught:
            await nodes.header(3)
    assert SECRET not in str(caught.value)


async def test_the_creation_block_needs_old_state(made: Simulation) -> None:
    class Pruned(Hostile):
        def _reply(self, call: Json) -> Json:
            if call["method"] == "eth_getCode" and int(call["params"][1], 16) < 50:
                return {"id": call["id"], "error": {"code": -32000, "message": "missing trie node b03d68ac (path )"}}
            return super()._reply(call)

    address = Address(made.registrations[0].address)
    async with reading(Pruned(made)) as nodes:
        with pytest.raises(InputError, match=r"keeps old state .*missing trie node.*give a block number instead"):
            await nodes.creation_block(address)
    async with reading(Pruned(made), ExecutionServer(made.chain)) as nodes:
        assert await nodes.creation_block(address) == 1


async def test_a_limit_that_only_the_data_of_an_error_reports_is_learned(made: Simulation) -> None:
    class Terse(Hostile):
        def _reply(self, call: Json) -> Json:
            asked = call["params"][0]
            if call["method"] == "eth_getLogs" and "fromBlock" in asked:
                blocks = int(asked["toBlock"], 16) - int(asked["fromBlock"], 16) + 1
                if blocks > 20:
                    data = {"error_id": "4ed94073-0317", "payload": f"range {blocks} is bigger than range limit 20"}
                    return {"id": call["id"], "error": {"code": -32602, "message": "invalid params", "data": data}}
            return super()._reply(call)

    async with reading(Terse(made)) as nodes:
        assert log_facts((await nodes.read_logs(SPAN, watched(made), None)).logs) == truth(made, SPAN)
        assert nodes.counters.ranges_refused == 1
        (memory,) = nodes.node_states()
        assert memory.logs == LogLimit(20, 21)
