"""What several probes need: the open database, each node by itself, all nodes together, the newest report.

Each is opened or asked once, by whichever probe needs it first. An error is an answer, too: every probe that needs the
part gets it, and no other probe is concerned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from vaultevents.chain.execution.client import ExecutionChain, HeadPolicy, Identity
from vaultevents.chain.execution.contracts import ContractCall, calls
from vaultevents.chain.ipfs import IpfsClient
from vaultevents.config import Settings
from vaultevents.core.errors import ConfigError, InputError, VaulteventsError
from vaultevents.core.networks import Network
from vaultevents.core.registry import Watched
from vaultevents.core.reports import ReportLog, decode_all, latest_report
from vaultevents.core.spans import Span
from vaultevents.egress import Guard
from vaultevents.store.network import pinned
from vaultevents.store.pool import Database
from vaultevents.store.reports import find_reports
from vaultevents.wiring.database import OpenedDatabase, opened_database
from vaultevents.wiring.delivery import url_rules
from vaultevents.wiring.sources import head_policy, unpinned_chain

T = TypeVar("T")
PINNED_WITHIN_S = 15.0
"""So long a probe of a node waits for the database, to compare the node with the network that it is pinned to."""


class _Once(Generic[T]):
    """The result of a coroutine that runs once; its error is raised for every caller."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._task: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await asyncio.shield(self._task)

    async def _run(self) -> T:
        return await self._make()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class NewestReport:
    """The newest report that has a file, and where it was found; without one `source` says why."""

    log: ReportLog | None
    source: str


class Shared:
    """The shared parts of one check; an async context manager.

    `nodes` has each execution node by itself, `chain` all of them, with answers only from those of the network. `files`
    has the gateways and no cache; None where none is configured. `unusable` are settings that cannot be used, with the
    error that says why.
    """

    def __init__(self, settings: Settings, network: Network, clock: Callable[[], float]) -> None:
        """`clock` gives the time in s, by which the age of blocks is judged."""
        self.settings = settings
        self.network = network
        self.clock = clock
        self.nodes: list[ExecutionChain] = []
        self.files: IpfsClient | None = None
        self.unusable: dict[str, VaulteventsError] = {}
        self.opened = _Once(self._open_database)
        self.pinned = _Once(self._pinned)
        self.identity = _Once(self._identity)
        self.chain = _Once(self._chain)
        self.newest_report = _Once(self._newest_report)
        self._stack = AsyncExitStack()
        self._all: ExecutionChain | None = None
        self._closing = asyncio.Event()
        self._is_open = False
        self._holding: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Shared:
        for setting, enter in (("execution", self._open_nodes), ("reports.gateways", self._open_gateways)):
            try:
                await enter()
            except (ConfigError, InputError) as error:
                self.unusable[setting] = error
        return self

    async def _open_nodes(self) -> None:
        urls, head = self.settings.execution.urls, head_policy(self.settings)
        for url in urls:
            self.nodes.append(await self._stack.enter_async_context(unpinned_chain(self.settings, [url], head=head)))
        if urls:
            self._all = await self._stack.enter_async_context(unpinned_chain(self.settings, urls, head=HeadPolicy()))

    async def _open_gateways(self) -> None:
        if self.settings.reports.gateways:
            gateways = [url.get_secret_value() for url in self.settings.reports.gateways]
            guard = Guard(url_rules(self.settings))
            self.files = await self._stack.enter_async_context(IpfsClient(gateways, guard=guard))

    async def __aexit__(self, *_: object) -> None:
        for part in (self.newest_report, self.chain, self.identity, self.pinned, self.opened):
            await part.close()
        self._closing.set()
        if self._holding is not None:
            if not self._is_open:  # no probe waits any longer for a server that does not answer
                self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)
        await self._stack.aclose()

    async def database(self) -> Database:
        """Return the open database; raises what kept it from being opened."""
        return (await self.opened()).database

    async def _open_database(self) -> OpenedDatabase:
        ready: asyncio.Future[OpenedDatabase] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(ready))
        return await ready

    async def _hold(self, ready: asyncio.Future[OpenedDatabase]) -> None:
        """Open the database, and close it in the same task when the check is done."""
        try:
            async with opened_database(self.settings) as opened:
                self._is_open = True
                if not ready.done():
                    ready.set_result(opened)
                await self._closing.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _pinned(self) -> Identity | None:
        """Return the network that the database is pinned to; None before the first contact or without the database."""
        with suppress(VaulteventsError, TimeoutError):
            async with asyncio.timeout(PINNED_WITHIN_S):
                known = await pinned(await self.database())
                return None if known is None else Identity(*known)
        return None

    async def _identity(self) -> Identity | None:
        """Return the identity of the right network: the pinned one, a public one, or that of the first such node."""
        if (known := await self.pinned()) is not None:
            return known
        if self.network.genesis_hash is not None:
            return Identity(self.network.chain_id, self.network.genesis_hash)
        for node in self.nodes:
            with suppress(VaulteventsError):
                shown = await node.identity()
                if shown.chain_id == self.network.chain_id:
                    return shown
        return None

    async def _chain(self) -> ExecutionChain:
        if self._all is None:
            raise self.unusable.get("execution", ConfigError("execution.urls is empty: name an execution node there"))
        identity = await self.identity()
        if identity is not None:
            self._all.expect(identity)
        return self._all

    async def _newest_report(self) -> NewestReport:
        """Look for the newest report with a file: in the oracles' state, in recent logs, in the database."""
        problem = "no oracle has published a report yet"
        for look in (self._report_of_state, self._report_of_logs, self._report_of_database):
            try:
                found = await look()
            except VaulteventsError as error:
                problem = str(error)
            else:
                if found.log is not None:
                    return found
        return NewestReport(None, problem)

    async def _report_of_state(self) -> NewestReport:
        chain = await self.chain()
        oracles = sorted(self.settings.watched_oracles)
        answers = await calls(chain, [ContractCall("LazyOracle", oracle, "latestReportData") for oracle in oracles])
        reports = []
        for oracle, answer in zip(oracles, answers, strict=True):
            if isinstance(answer, tuple):
                timestamp, ref_slot, root, cid = answer
                report = latest_report(timestamp, ref_slot, root, cid, oracle)
                if report is not None and not report.is_empty and report.cid:
                    reports.append(report)
        return NewestReport(max(reports, key=lambda log: log.timestamp, default=None), "latestReportData()")

    async def _report_of_logs(self) -> NewestReport:
        chain = await self.chain()
        head = (await chain.final_head()).number
        span = Span(max(1, head - self.settings.execution.max_range_blocks + 1), max(1, head))
        watched = Watched(oracles=frozenset(self.settings.watched_oracles))
        found = await chain.read_logs(span, watched, None, every=False)
        reports = [report for report in decode_all(found.logs, found.times_s)[0] if report.cid]
        return NewestReport(max(reports, key=lambda log: log.timestamp, default=None), "the newest log")

    async def _report_of_database(self) -> NewestReport:
        stored = [report.log for report in await find_reports(await self.database()) if report.log.cid]
        return NewestReport(stored[0] if stored else None, "the database")
