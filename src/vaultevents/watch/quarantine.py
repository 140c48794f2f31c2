"""Read the blocks of quarantined logs again by the one path: what can be decoded now is stored and delivered."""

from __future__ import annotations

from dataclasses import dataclass

from vaultevents.core.errors import InputError, SourceUnavailable
from vaultevents.core.spans import Span
from vaultevents.store import quarantine
from vaultevents.store.outbox import Committed, Outbox
from vaultevents.store.quarantine import QuarantinedLog
from vaultevents.store.reports import reports_in
from vaultevents.watch.reports import Resolver
from vaultevents.watch.streams import Stream
from vaultevents.watch.watcher import Advanced, run

PATIENCE = 5


@dataclass(frozen=True, slots=True)
class Retried:
    """What reading a block again came to.

    `resolved` are the rows that it resolved, `left` those of the block that are still open or dismissed. Of the events
    of the block, `inserted` were stored now, `identical` were stored already, and `different` are stored otherwise.
    `problem` says why the block could not be read, or why its events are not complete yet.
    """

    stream: str
    block: int
    resolved: tuple[QuarantinedLog, ...] = ()
    left: tuple[QuarantinedLog, ...] = ()
    inserted: int = 0
    identical: int = 0
    different: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing of the block is open, and all of its events are stored as the chain gives them."""
        return self.problem is None and not self.different and all(row.state != "open" for row in self.left)


async def read_again(stream: Stream, outbox: Outbox, block: int, resolver: Resolver | None) -> Retried:
    """Read one block of a stream again on a replay cursor, and commit what is found, deliveries included.

    Raises `InputError` for a block that is not final, `SourceUnavailable` when no node answers.
    """
    name, source = stream.source.stream, stream.source
    head = await source.head()
    if block > head:
        raise InputError(f"block {block} is not final yet (the last final block is {head}): retry later")
    before = await quarantine.of_block(outbox.database, name, block)
    commits: list[Committed] = []

    def advanced(step: Advanced) -> None:
        commits.append(step.committed)

    cursor = await outbox.begin_replay(name, Span(block, block))
    try:
        await run(source, outbox, cursor, step=1, poll_s=stream.poll_s, patience=PATIENCE, on_advance=advanced)
    finally:
        await outbox.end_replay(cursor)
    problem = None
    if name == "reports":
        resolved, problem = await _resolve_reports(outbox, block, resolver)
        commits += resolved
    after = await quarantine.of_block(outbox.database, name, block)
    pending = {row.id for row in before if row.state != "resolved"}
    return Retried(
        name,
        block,
        resolved=tuple(row for row in after if row.state == "resolved" and row.id in pending),
        left=tuple(row for row in after if row.state != "resolved"),
        inserted=sum(commit.inserted for commit in commits),
        identical=sum(commit.identical for commit in commits),
        different=tuple(event_id for commit in commits for event_id in commit.different),
        problem=problem,
    )


async def _resolve_reports(outbox: Outbox, block: int, resolver: Resolver | None) -> tuple[list[Committed], str | None]:
    """The events of the pending reports of a block, and why those of one are not there: the daemon goes on asking."""
    commits: list[Committed] = []
    problem = None
    for report in await reports_in(outbox.database, Span(block, block)):
        if report.state == "pending" and resolver is not None:
            try:
                commits.append(await resolver.resolve(report))
            except (SourceUnavailable, InputError) as error:
                problem = f"report {report.log.timestamp} waits for its file ({error})"
    return commits, problem
