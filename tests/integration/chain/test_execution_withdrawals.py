"""Withdrawals through nodes that lag, lie and leave out: all of them from one node, or none (rule C3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from sealed_blocks import sealed, without
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.chain.upstream.node import BlockNotFound
from vaultevents.core.errors import ConfigError, NodeFault, SourceUnavailable
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32, hex_text
from vaultevents.core.withdrawals import WithdrawalBlock
from vaultevents.devnet.blocks import Payout, Withdrawal, withdrawals_root
from vaultevents.devnet.chain import Absent, At, Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.faults import WITHDRAWAL_FAULTS, Fault
from vaultevents.devnet.loopback import LoopbackServer
from vaultevents.devnet.node import Node

pytestmark = pytest.mark.integration

SECRET = "k3y-that-must-not-show"
BLOCKS = 60
SPAN = Span(3, 58)
QUICK = ExecutionOptions(batch_size=7, retry_wait_s=0.01)

Json = dict[str, Any]
Meddle = Callable[[Json], Json | None]


def paid_chain(blocks: int = BLOCKS) -> Chain:
    """A chain that pays four in every block but each fifth, with missed slots."""
    chain = Chain(23)
    for number in range(1, blocks + 1):
        payouts = [Payout(number % 9 + at, bytes([number % 3]) * 20, 10**9 * at + 1) for at in range(4)]
        chain.mine(missed_slots=2 if number % 8 == 0 else 0, payouts=payouts if number % 5 else [])
    return chain


class MeddlingNode:
    """A devnet node of which one block, or every one, is meddled with, and whose answers may be replaced as a whole."""

    def __init__(
        self,
        chain: Chain,
        meddle: Meddle | None = None,
        *,
        number: int | None = 21,
        whole: Callable[[list[Json]], web.Response | None] | None = None,
        takes_s: float = 0.0,
    ) -> None:
        self.batches: list[int] = []
        self.in_flight = self.most_in_flight = 0
        self._node, self._number, self._takes_s = Node(chain), number, takes_s
        self._meddle = meddle or (lambda block: block)
        self._whole = whole or (lambda _: None)
        self._server = LoopbackServer(self._exchange)

    async def start(self) -> str:
        return await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            sent = msgspec.json.decode(await request.read())
            calls = sent if isinstance(sent, list) else [sent]
            self.batches.append(len(calls))
            answers = [{"jsonrpc": "2.0", "id": call["id"], "result": self._result(call)} for call in calls]
            body = msgspec.json.encode(answers if isinstance(sent, list) else answers[0])
            await asyncio.sleep(self._takes_s)
            return self._whole(calls) or web.Response(body=body, content_type="application/json")
        finally:
            self.in_flight -= 1

    def _result(self, call: Json) -> Any:
        result = self._node.call(call["method"], call["params"])
        meddles = self._number is None or (result is not None and result["number"] == hex(self._number))
        return self._meddle(result) if meddles else result


@asynccontextmanager
async def reading(
    *servers: ExecutionServer | MeddlingNode, options: ExecutionOptions = QUICK, head: str = "finalized"
) -> AsyncIterator[ExecutionChain]:
    """The chain as seen through these nodes, the first one preferred; their URLs hold a secret."""
    urls = [f"{await server.start()}/v2/{SECRET}?key={SECRET}" for server in servers]
    try:
        async with ExecutionChain(urls, head=HeadPolicy.parse(head), options=options) as chain:
            yield chain
    finally:
        for server in servers:
            await server.stop()


def truth(chain: Chain, span: Span = SPAN) -> list[Any]:
    blocks = [block for number in range(span.first, span.last + 1) if (block := chain.block(number))]
    return [
        (
            block.number,
            block.hash,
            block.header.parent_hash,
            block.timestamp_s,
            [
                (withdrawal.index, withdrawal.validator_index, withdrawal.address, withdrawal.amount_gwei)
                for withdrawal in block.withdrawals
            ],
        )
        for block in blocks
    ]


def plain(blocks: list[WithdrawalBlock]) -> list[Any]:
    return [
        (
            block.number,
            block.hash,
            block.parent_hash,
            block.timestamp_s,
            [
                (withdrawal.index, withdrawal.validator_index, withdrawal.address, withdrawal.amount_gwei)
                for withdrawal in block.withdrawals
            ],
        )
        for block in blocks
    ]


def hash_of(chain: Chain, number: int) -> Hash32:
    block = chain.block(number)
    assert block is not None
    return Hash32(block.hash)


def last_index(chain: Chain, number: int) -> int:
    block = chain.block(number)
    assert block is not None
    return block.next_withdrawal - 1


@pytest.mark.parametrize("batch_size", [1, 7, 100])
@pytest.mark.parametrize("batches_at_once", [1, 3])
async def test_every_block_is_read_with_its_withdrawals(batch_size: int, batches_at_once: int) -> None:
    chain = paid_chain()
    options = ExecutionOptions(batch_size=batch_size, batches_at_once=batches_at_once)
    async with reading(ExecutionServer(chain), options=options) as nodes:
        found = await nodes.read_withdrawals(SPAN, hash_of(chain, 2), last_index(chain, 2))
        assert plain(found) == truth(chain)
        assert sum(len(block.withdrawals) for block in found) > 150
        assert {type(withdrawal.address) for block in found for withdrawal in block.withdrawals} == {bytes}
        assert plain(await nodes.read_withdrawals(Span(0, 0), None, None)) == truth(chain, Span(0, 0))
        assert plain(await nodes.read_withdrawals(Span(1, 58), None, None)) == truth(chain, Span(1, 58))
        assert nodes.counters.node_faults == nodes.counters.unavailable == 0


async def test_a_few_batches_are_under_way_at_a_time() -> None:
    chain = paid_chain()
    node = MeddlingNode(chain, takes_s=0.02)
    async with reading(node, options=ExecutionOptions(batch_size=4, batches_at_once=3)) as nodes:
        assert plain(await nodes.read_withdrawals(SPAN, None, None)) == truth(chain)
    assert node.batches == [4] * 14
    assert node.most_in_flight == 3
    with pytest.raises(ConfigError, match="at least 1"):
        ExecutionOptions(batches_at_once=0)


async def test_two_spans_follow_each_other_by_hash_and_index() -> None:
    chain = paid_chain()
    async with reading(ExecutionServer(chain)) as nodes:
        first = await nodes.read_withdrawals(Span(1, 25), None, None)
        assert first[-1].withdrawals == ()  # the index is carried over a block without any
        second = await nodes.read_withdrawals(Span(26, 58), first[-1].hash, last_index(chain, 25))
        assert plain(first + second) == truth(chain, Span(1, 58))
        for anchor, index, problem in (
            (hash_of(chain, 24), last_index(chain, 25), "block 26 is not linked to block 25"),
            (first[-1].hash, last_index(chain, 25) - 1, "leaves a gap"),
            (first[-1].hash, last_index(chain, 25) + 1, "there twice"),
        ):
            with pytest.raises(NodeFault, match=problem):
                await nodes.read_withdrawals(Span(26, 58), anchor, index)


def entries(change: Callable[[list[Json]], Any]) -> Meddle:
    """The withdrawals of the block changed."""
    return lambda block: {**block, "withdrawals": change(block["withdrawals"])}


def entry(**fields: Any) -> Meddle:
    """The block's second withdrawal changed."""
    return entries(lambda all_: [all_[0], {**all_[1], **fields}, *all_[2:]])


def left_out(*names: str) -> Meddle:
    return lambda block: without(block, *names)


def with_root(change: Callable[[list[Json]], list[Json]]) -> Callable[[Json], Json]:
    """The withdrawals of the block changed, and their root in the header with them."""

    def meddle(block: Json) -> Json:
        listed = change(block["withdrawals"])
        return {**block, "withdrawals": listed, "withdrawalsRoot": root_of(listed)}

    return meddle


def root_of(listed: list[Json]) -> str:
    paid = (
        Withdrawal(
            int(entry["index"], 16),
            int(entry["validatorIndex"], 16),
            bytes.fromhex(entry["address"][2:]),
            int(entry["amount"], 16),
        )
        for entry in listed
    )
    return hex_text(withdrawals_root(tuple(paid)))


NOT_HASHED = "the header of block 21 does not hash to the hash given for it"
OTHER_ROOT = "withdrawals of block 21 do not make up the root in its header"

LIES: dict[str, tuple[Meddle, type[SourceUnavailable], str]] = {
    "one is missing": (entries(lambda all_: [all_[0], *all_[2:]]), NodeFault, f"the 3 {OTHER_ROOT}"),
    "the last is missing": (entries(lambda all_: all_[:-1]), NodeFault, f"the 3 {OTHER_ROOT}"),
    "one is there twice": (entries(lambda all_: [all_[0], *all_]), NodeFault, f"the 5 {OTHER_ROOT}"),
    "out of order": (entries(lambda all_: [all_[0], all_[2], all_[1], all_[3]]), NodeFault, f"the 4 {OTHER_ROOT}"),
    "all are missing": (entries(lambda _: []), NodeFault, f"the 0 {OTHER_ROOT}"),
    "another amount": (entry(amount="0x7"), NodeFault, f"the 4 {OTHER_ROOT}"),
    "another receiver": (entry(address="0x" + "ab" * 20), NodeFault, f"the 4 {OTHER_ROOT}"),
    "missing, with a root of its own": (with_root(lambda all_: all_[:-1]), NodeFault, NOT_HASHED),
    "missing, with a hash of its own": (
        lambda block: sealed(with_root(lambda all_: all_[:-1])(block)),
        NodeFault,
        "22 is not linked to block 21",
    ),
    "null": (entries(lambda _: None), NodeFault, "has only one of the two"),
    "no such field": (left_out("withdrawals"), NodeFault, "has only one of the two"),
    "before Capella": (left_out("withdrawals", "withdrawalsRoot"), NodeFault, NOT_HASHED),
    "before Capella, with a hash of its own": (
        lambda block: sealed(without(block, "withdrawals", "withdrawalsRoot")),
        SourceUnavailable,
        "before the Capella",
    ),
    "no block": (lambda _: None, BlockNotFound, "does not have block 21: it lags behind, or has pruned it"),
    "another block": (lambda block: {**block, "number": "0x16"}, NodeFault, "answered with block 22"),
    "other parent": (lambda block: {**block, "parentHash": "0x" + "ab" * 32}, NodeFault, NOT_HASHED),
    "other parent, with a hash of its own": (
        lambda block: sealed(block, parentHash="0x" + "ab" * 32),
        NodeFault,
        "21 is not linked to block 20",
    ),
    "other hash": (lambda block: {**block, "hash": "0x" + "ab" * 32}, NodeFault, NOT_HASHED),
    "other time": (lambda block: {**block, "timestamp": "0x1"}, NodeFault, NOT_HASHED),
    "time goes back, with a hash of its own": (
        lambda block: sealed(block, timestamp="0x1"),
        NodeFault,
        "the time of block 21 is not after",
    ),
    "no time": (left_out("timestamp"), NodeFault, "block 21 does not have the known form"),
    "more than 64 bits": (entry(amount="0x1" + "0" * 16), NodeFault, "at most 64 bits"),
    "a number": (entry(amount=5), NodeFault, "block 21 does not have the known form"),
    "short address": (entry(address="0x1234"), NodeFault, "not 20 hexadecimal bytes"),
    "no validator": (entry(validatorIndex=None), NodeFault, "block 21 does not have the known form"),
}


@pytest.mark.parametrize(("meddle", "kind", "problem"), LIES.values(), ids=LIES.keys())
async def test_a_lie_is_found_named_and_read_elsewhere(
    meddle: Meddle, kind: type[SourceUnavailable], problem: str
) -> None:
    chain = paid_chain()
    anchor, index = hash_of(chain, 2), last_index(chain, 2)
    async with reading(MeddlingNode(chain, meddle)) as nodes:
        with pytest.raises(SourceUnavailable, match=problem) as caught, capture_logs() as logged:
            await nodes.read_withdrawals(SPAN, anchor, index)
        assert type(caught.value) is kind
        assert caught.value.node == nodes.nodes[0]
        assert SECRET not in f"{caught.value!r} {logged}"
    async with reading(MeddlingNode(chain, meddle), ExecutionServer(chain)) as nodes:
        assert plain(await nodes.read_withdrawals(SPAN, anchor, index)) == truth(chain)
        counts = nodes.counters.node_faults, nodes.counters.unavailable
        assert counts == ((1, 0) if kind is NodeFault else (0, 1))


@pytest.mark.parametrize("fault", [*WITHDRAWAL_FAULTS, Fault.NULL_BLOCK, Fault.UNLINKED_PARENT])
async def test_a_node_of_the_devnet_that_lies_always_is_left_for_another(fault: Fault) -> None:
    chain = paid_chain()
    liar, right = ExecutionServer(chain), ExecutionServer(chain)
    liar.faults.rates = {fault: 1.0}
    async with reading(liar, right) as nodes:
        assert plain(await nodes.read_withdrawals(SPAN, hash_of(chain, 2), last_index(chain, 2))) == truth(chain)
    assert liar.faults.fired[fault] > 0


async def test_a_node_that_lags_is_left_for_another_and_waited_for_alone() -> None:
    chain = paid_chain()
    behind = ExecutionServer(chain, behind=20)
    async with reading(behind, ExecutionServer(chain)) as nodes:
        assert plain(await nodes.read_withdrawals(SPAN, None, None)) == truth(chain)
    behind = ExecutionServer(chain, behind=20)
    async with reading(behind) as nodes:
        with pytest.raises(SourceUnavailable, match=r"does not have block 4[0-9]: it lags behind"):
            await nodes.read_withdrawals(SPAN, None, None)
        behind.node.behind = 0
        assert plain(await nodes.read_withdrawals(SPAN, None, None)) == truth(chain)


async def test_a_node_that_refuses_batches_is_asked_one_by_one() -> None:
    chain = paid_chain()

    def refuse(calls: list[Json]) -> web.Response | None:
        error = {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "batch requests are not supported"}}
        return web.json_response(error, status=400) if len(calls) > 1 else None

    node = MeddlingNode(chain, whole=refuse)
    async with reading(node) as nodes:
        assert plain(await nodes.read_withdrawals(SPAN, None, None)) == truth(chain)
    assert node.batches[-20:] == [1] * 20


async def test_when_one_batch_fails_the_others_are_called_off() -> None:
    chain = paid_chain()
    node = MeddlingNode(chain, lambda _: None, number=3)
    async with reading(node, options=ExecutionOptions(batch_size=1, batches_at_once=2)) as nodes:
        with pytest.raises(SourceUnavailable, match="does not have block 3"):
            await nodes.read_withdrawals(SPAN, None, None)
        await asyncio.sleep(0.1)
        assert len(node.batches) < 10  # of 56


async def test_the_first_block_of_a_moment_is_found_in_few_questions() -> None:
    chain = paid_chain(blocks=1000)
    server = ExecutionServer(chain)
    async with reading(server) as nodes:
        blocks = [block for number in range(999) if (block := chain.block(number))]
        assert await nodes.first_block_at(0) == 0
        for before, after in [*pairwise(blocks)][::37]:
            exchanges = server.exchanges
            assert await nodes.first_block_at(before.timestamp_s + 1) == after.number
            assert await nodes.first_block_at(after.timestamp_s) == after.number
            assert server.exchanges - exchanges <= 2 * 8
        last = blocks[-1]
        assert await nodes.first_block_at(last.timestamp_s) == last.number == 998
        with pytest.raises(SourceUnavailable, match="none at or after") as caught:
            await nodes.first_block_at(last.timestamp_s + 1)
        assert caught.value.node == nodes.nodes[0]


async def test_it_is_found_also_when_the_chain_had_stood_still_for_long() -> None:
    chain = Chain(3)
    for number in range(1, 301):
        chain.mine(missed_slots=100_000 if number == 7 else 0)
    resumed = chain.block(7)
    assert resumed is not None
    server = ExecutionServer(chain)
    async with reading(server) as nodes:
        assert await nodes.first_block_at(resumed.timestamp_s - 12) == 7
        assert await nodes.first_block_at(resumed.timestamp_s + 1) == 8
        assert server.exchanges <= 2 * 12


async def test_a_node_without_old_blocks_answers_for_what_it_has() -> None:
    chain = paid_chain(blocks=500)
    final = chain.finalized_number

    def pruned(block: Json) -> Json | None:
        return None if 0 < int(block["number"], 16) < 400 else block

    def time_of(number: int) -> int:
        block = chain.block(number)
        assert block is not None
        return block.timestamp_s

    async with reading(MeddlingNode(chain, pruned, number=None)) as nodes:
        for number in (401, 402, 450, final or 0):
            assert await nodes.first_block_at(time_of(number)) == number
        for number in (1, 250, 399, 400):  # 400 is there, but it cannot be shown to be the first
            with pytest.raises(SourceUnavailable, match="does not give block 399 before it"):
                await nodes.first_block_at(time_of(number))
    async with reading(MeddlingNode(chain, pruned, number=None), ExecutionServer(chain)) as nodes:
        assert await nodes.first_block_at(time_of(250)) == 250


@pytest.mark.parametrize("head", ["finalized", "latest-0"])
async def test_a_moment_that_is_not_final_yet_is_not_looked_up(head: str) -> None:
    chain = paid_chain(blocks=20)
    chain.finalized = At(12)
    async with reading(ExecutionServer(chain), head=head) as nodes:
        newer = chain.block(13)
        assert newer is not None
        with pytest.raises(SourceUnavailable, match="its block 12 of time"):
            await nodes.first_block_at(newer.timestamp_s)
        chain.finalized = Absent.NULL
        with pytest.raises(SourceUnavailable, match="does not know its finalized block"):
            await nodes.first_block_at(0)


async def test_times_that_do_not_rise_are_a_fault_of_the_node() -> None:
    chain = paid_chain()
    middle = chain.block(29)
    assert middle is not None

    def timeless(block: Json) -> Json:
        return {**block, "timestamp": "0x1"}

    async with reading(MeddlingNode(chain, timeless, number=29), ExecutionServer(chain)) as nodes:
        assert await nodes.first_block_at(middle.timestamp_s) == 29
        assert nodes.counters.node_faults == 1


async def test_an_address_is_20_bytes_and_an_amount_is_in_gwei() -> None:
    chain = Chain(1)
    chain.mine(payouts=[Payout(5, b"\x11" * 20, 32 * 10**9)])
    chain.finalized = At(1)
    async with reading(ExecutionServer(chain)) as nodes:
        ((paid,),) = [block.withdrawals for block in await nodes.read_withdrawals(Span(1, 1), None, None)]
        assert (paid.index, paid.validator_index, paid.address, paid.amount_gwei) == (
            0,
            5,
            Address(b"\x11" * 20),
            32 * 10**9,
        )
