"""The number of the safe block, which is read only while it is wanted, and never more often than once in a while."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node_pools import QUICK
from simulation_fixtures import connected
from timeouts import until
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.node import UNKNOWN_BLOCK, Node
from vaultevents.devnet.rpc import RpcError
from vaultevents.wiring.safe_block import KNOWN_S, SafeBlock

pytestmark = pytest.mark.integration


class WithoutSafe(Node):
    """A node that does not know the tag."""

    def call(self, method: str, params: list[Any]) -> Any:
        if params[:1] == ["safe"]:
            raise RpcError(UNKNOWN_BLOCK, "safe block not found")
        return super().call(method, params)


def chain_of_ten() -> Chain:
    chain = Chain(1)
    for _ in range(10):
        chain.mine()
    return chain


async def test_a_node_that_does_not_know_the_tag_stays_in_use() -> None:
    server = ExecutionServer(chain_of_ten())
    async with connected(server, options=QUICK) as nodes:
        assert await nodes.safe_block() == 9
        server.node = WithoutSafe(server.node.chain)
        assert await nodes.safe_block() is None
        assert [state.state for state in nodes.node_states()] == ["closed"]


async def test_it_is_read_only_while_it_is_wanted() -> None:
    server, now_s = ExecutionServer(chain_of_ten()), 0.0
    safe = SafeBlock(every_s=0.05, clock=lambda: now_s)
    async with connected(server, options=QUICK) as nodes:
        following = asyncio.create_task(safe.follow(nodes))
        asked = server.exchanges
        await asyncio.sleep(0.2)
        assert server.exchanges == asked, "no page is open"
        assert safe.number() is None
        await until(lambda: server.exchanges == asked + 1)
        await asyncio.sleep(0.2)
        assert server.exchanges == asked + 1, "the page was closed"
        assert safe.number() == 9
        await until(lambda: server.exchanges == asked + 2)
        now_s = KNOWN_S + 1
        await asyncio.sleep(0.2)
        assert safe.number() is None, "what is old is not shown"
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
