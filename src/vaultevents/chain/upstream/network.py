"""The nodes of one upstream, of which only those of the expected network are asked (rule E10)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

import aiohttp

from vaultevents.chain.upstream.http import Deadlines, new_session
from vaultevents.chain.upstream.node import Counters, NodeClient
from vaultevents.chain.upstream.pool import Node, NodePool
from vaultevents.chain.upstream.redaction import node_name
from vaultevents.core.errors import InputError, WrongNetwork
from vaultevents.core.nodes import NodeState, Upstream

C = TypeVar("C", bound=Counters)
N = TypeVar("N", bound=Node)
Identity = TypeVar("Identity")
T = TypeVar("T")


class PinnedNetwork(ABC, Generic[N, Identity, C]):
    """Async context manager over the nodes of one network, the first URL preferred."""

    def __init__(self, upstream: Upstream, urls: Sequence[str], deadlines: Deadlines, counters: C) -> None:
        self.counters = counters
        self.nodes = tuple(node_name(url) for url in urls)
        self._upstream = upstream
        self._urls = tuple(urls)
        self._deadlines = deadlines
        self._expected: Identity | None = None
        self._session: aiohttp.ClientSession | None = None
        self._endpoints: NodePool[N] | None = None
        if len(set(self.nodes)) < len(self.nodes):
            raise InputError(f"the same {upstream} node URL is configured twice: a stand-in needs another node")
        if not urls:
            raise InputError(f"no {upstream} node is configured: name the URL of at least one")

    @abstractmethod
    def _node(self, url: str, session: aiohttp.ClientSession) -> N:
        """Make one node with a line of its own."""

    @abstractmethod
    async def _identify(self, node: N) -> Identity:
        """Ask the node for the identity of its network."""

    def _client(self, url: str, *, attempts: int, wait_s: float, set_aside_s: float) -> NodeClient:
        return NodeClient(
            node_name(url),
            self._upstream,
            self.counters,
            attempts=attempts,
            wait_s=wait_s,
            set_aside_s=set_aside_s,
        )

    async def __aenter__(self) -> Self:
        self._session = new_session(self._deadlines)
        self._endpoints = NodePool([self._node(url, self._session) for url in self._urls], self._admit)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def _open(self) -> NodePool[N]:
        if self._endpoints is None:
            raise RuntimeError(f"use 'async with {type(self).__name__}(...)'")
        return self._endpoints

    async def identity(self) -> Identity:
        """The network of the node in use."""
        return await self._open.ask(self._identify, hedge=self._expected is not None)

    async def ask(self, question: Callable[[N], Awaitable[T]]) -> T:
        """Put a question to the node in use, or to the next one where that cannot answer it."""
        return await self._open.ask(question)

    def expect(self, identity: Identity) -> None:
        """From now on no answer is taken from a node before it has shown this identity."""
        self._expected = identity
        self._open.forget_admissions()

    async def _admit(self, node: N) -> None:
        if self._expected is None:
            return
        shown = await self._identify(node)
        if shown != self._expected:
            raise WrongNetwork(
                f"{node.name} belongs to another network ({shown}) than this database ({self._expected}): "
                "correct its URL, or use the database of that network"
            )

    def node_states(self) -> list[NodeState]:
        """What is known of each node now, the preferred one first."""
        return self._open.node_states()

    def load_state(self, node_states: Iterable[NodeState]) -> None:
        """What was learned of these nodes before the last start; of others nothing is known."""
        self._open.load_state(node_states)
