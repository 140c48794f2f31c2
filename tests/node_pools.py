"""Several servers of the devnet behind one chain, each with its moods, and a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.core.nodes import CircuitState, LogLimit, NodeState
from vaultevents.devnet.execution import ExecutionServer

QUICK = ExecutionOptions(retry_wait_s=0.01, set_aside_s=0.1)


class Moody(ExecutionServer):
    """Answers what `mood` says instead of itself, where it says anything; `given_up` counts clients that left."""

    mood: Callable[[], web.StreamResponse | None] = staticmethod(lambda: None)
    hangs = False
    given_up = 0

    def was_given_up(self, times: int) -> bool:
        return self.given_up == times

    async def _exchange(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        answer = self.mood()
        if answer is not None:
            self.exchanges += 1
            return answer
        return await super()._exchange(request)


@asynccontextmanager
async def started(*servers: ExecutionServer) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        urls = []
        for server in servers:
            urls.append(await server.start())
            stack.push_async_callback(server.stop)
        yield urls


def chain_of(urls: list[str], options: ExecutionOptions = QUICK) -> ExecutionChain:
    return ExecutionChain(urls, head=HeadPolicy(), options=options)


class Clock:
    """A clock that the lines of all nodes of a chain go by."""

    def __init__(self, chain: ExecutionChain) -> None:
        self.now_s = 0.0
        for node in chain._open.nodes:
            node.client.clock = self

    def __call__(self) -> float:
        return self.now_s


def known(
    name: str, state: CircuitState = "closed", logs: LogLimit | None = None, requests_per_s: float | None = None
) -> NodeState:
    return NodeState(name, state, None if state == "closed" else "cannot be reached", 5.0, requests_per_s, logs)
