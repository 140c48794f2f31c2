"""Source `reports`, and the resolver that turns published reports into events (rule C6).

The log commits as a pending report with the cursor. A resolver fetches and verifies its file
apart from that, as often as it takes: a dead CID delays its report alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

import structlog

from vaultevents.chain.execution.client import ExecutionChain, Reverted
from vaultevents.chain.execution.contracts import decode_error
from vaultevents.core.errors import DatabaseUnavailable, SourceUnavailable
from vaultevents.core.events import Observation, ReportUpdateAvailable, project
from vaultevents.core.logs import is_watched, owned
from vaultevents.core.registry import Registry, Watched
from vaultevents.core.reports import (
    Report,
    ReportInvalid,
    ReportLog,
    announced_cid,
    check_file,
    decode_all,
    failure_kind,
    observe,
    read_report,
)
from vaultevents.core.reverts import revert_reason
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, checksum, hex_text
from vaultevents.store.outbox import Committed, Cursor, Lost, Outbox
from vaultevents.store.reports import StoredReport, due_reports, postpone_report
from vaultevents.watch.logs import AHEAD, read_watched, remember
from vaultevents.watch.source import Reading

log = structlog.get_logger("reports")

AT_ONCE = 4
WAITS_S = (10, 30, 60, 120, 300, 600)


class ReportsSource:
    """Published reports of the protocol's oracles, always read final (rule C1)."""

    stream = "reports"
    ahead = AHEAD

    def __init__(self, chain: ExecutionChain, oracles: Collection[Address]) -> None:
        self._chain, self._oracles = chain, frozenset(oracles)

    async def head(self) -> int:
        return (await self._chain.final_head()).number

    async def begin(self) -> tuple[int, str | None]:
        head = await self._chain.final_head()
        return head.number, hex_text(head.hash)

    def resume(self, cursor: Cursor) -> None:
        remember(self._chain, cursor)

    async def read(self, span: Span, cursor: Cursor, registry: Registry, also: Collection[int] = ()) -> Reading:
        watched = Watched(oracles=self._oracles if registry.watched(span) else frozenset())
        found = await read_watched(self._chain, span, watched, cursor, also)
        reports, undecodable = decode_all((log for log in found.logs if is_watched(log, watched)), found.times_s)
        return Reading(
            (),
            hex_text(found.last.hash),
            reports,
            found.parent,
            found.seen,
            quarantined=owned(undecodable, registry),
            unverified=found.unverified,
        )


class Files(Protocol):
    """Where the files of reports come from."""

    async def fetch(self, cid: str, check: Callable[[bytes], None]) -> bytes:
        """The bytes for which `check` raises nothing. Raises `SourceUnavailable` when nobody has them."""
        ...


async def read_published(files: Files, log: ReportLog) -> Report:
    """Fetch the file of a report and read it.

    Raises `SourceUnavailable` when no gateway gives the file (`NodeFault` when one gives other bytes), and
    `ReportUndecodable` when the published file cannot be read: then every gateway would give the same.
    """
    announced_cid(log)
    content = await files.fetch(log.cid, lambda found: check_file(found, log))
    return await asyncio.to_thread(read_report, content, log)


class Resolver:
    """Fetches, verifies and resolves pending reports; any number of daemons may do so at once."""

    def __init__(self, outbox: Outbox, files: Files, poll_s: float, simulation: ExecutionChain | None = None) -> None:
        """With `simulation` each calldata is tried at the publishing block; what it says is logged, nothing more."""
        self._outbox, self._files, self._poll_s, self._simulation = outbox, files, poll_s, simulation

    async def run(self) -> None:
        """Works off what is due, for ever; a file that cannot be had is asked for again, for as long as it takes."""
        while True:
            try:
                due = await due_reports(self._outbox.database, AT_ONCE)
                async with asyncio.TaskGroup() as group:
                    for report in due:
                        group.create_task(self._attempt(report))
            except* DatabaseUnavailable as errors:
                log.warning("resolver_waits", problem=str(errors.exceptions[0]), retry_in_s=self._poll_s)
                due = []
            if len(due) < AT_ONCE:
                await asyncio.sleep(self._poll_s)

    async def _attempt(self, report: StoredReport) -> None:
        try:
            committed = await self.resolve(report)
        except (SourceUnavailable, ReportInvalid) as error:
            await self.postpone(report, error)
        else:
            log.info("report_resolved", cid=report.log.cid, timestamp=report.log.timestamp, events=committed.inserted)

    async def postpone(self, report: StoredReport, error: SourceUnavailable | ReportInvalid) -> None:
        """Keep why a pending report was not resolved, and try it again later; an unreadable one after the longest wait.

        A report that is not pending stays as it is.
        """
        kind = failure_kind(error)
        last = len(WAITS_S) - 1
        after_s = WAITS_S[last if kind == "undecodable" else min(report.attempts, last)]
        await postpone_report(self._outbox.database, report.id, kind, str(error), after_s)
        cid, timestamp = report.log.cid, report.log.timestamp
        log.warning("report_waits", cid=cid, timestamp=timestamp, failure=kind, problem=str(error))

    async def resolve(self, stored: StoredReport, *, deliver: bool = True) -> Committed:
        """Commit the events of one report with the mark that it is resolved. Raises what `read_published` raises."""
        report = await read_published(self._files, stored.log)
        while True:
            registry = await self._outbox.registry()
            addresses = registry.vault_addresses()
            seen = await asyncio.to_thread(observe, report, stored.log, addresses)
            events = [event for observation in seen for event in project(observation, registry)]
            if self._simulation is not None:
                await _simulate(self._simulation, stored, {event.observation for event in events})
            outcome = await self._outbox.resolve(
                stored.id, len(report.vaults), events, registry.version, deliver=deliver, log=stored.log
            )
            if not isinstance(outcome, Lost):
                return outcome


async def _simulate(chain: ExecutionChain, stored: StoredReport, seen: Collection[Observation]) -> None:
    """Whether the oracle would take each calldata at the block that published the report; never hides an event."""
    for observation in seen:
        assert isinstance(observation.payload, ReportUpdateAvailable)
        vault = checksum(observation.address)
        try:
            answer = await chain.call(stored.log.address, observation.payload.calldata, stored.log.block_number)
        except SourceUnavailable as error:
            log.info("calldata_not_tried", vault=vault, timestamp=stored.log.timestamp, problem=str(error))
            continue
        if isinstance(answer, Reverted):
            named = await asyncio.to_thread(decode_error, answer)
            why = revert_reason(named.name, named.arguments, named.data)
            log.warning("calldata_reverts", vault=vault, timestamp=stored.log.timestamp, reason=why)
