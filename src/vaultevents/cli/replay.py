"""replay: restore and compare the events of a range, stream by stream and report by report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Annotated

import structlog
import typer

from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.progress import SpanProgress
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, put_table, say
from vaultevents.cli.totals import Totals
from vaultevents.config import Settings
from vaultevents.core.errors import (
    DatabaseUnavailable,
    InputError,
    OperatorError,
    SourceUnavailable,
    VaulteventsError,
)
from vaultevents.core.reports import ADVICE, FailureKind, ReportInvalid, failure_kind
from vaultevents.core.spans import Span
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Database
from vaultevents.store.reports import StoredReport, reports_in
from vaultevents.watch.reports import Resolver
from vaultevents.watch.streams import Stream
from vaultevents.watch.watcher import Advanced, pauses, run
from vaultevents.wiring.database import open_store, service_clock
from vaultevents.wiring.node_state import keeping_learned_limits
from vaultevents.wiring.process_memory import tune_memory
from vaultevents.wiring.replay_range import Estimates, Range, estimate_streams, positions, refuse_unfinished
from vaultevents.wiring.sources import Sources, open_sources, setting_of

log = structlog.get_logger("cli")

PATIENCE = 5
SHOWN_IDS = 3
SHOWN_FAILURES = 5


def replay(
    from_block: Annotated[int | None, typer.Option(min=0, help="First block.", metavar="BLOCK")] = None,
    to_block: Annotated[int | None, typer.Option(min=0, help="Last block; it must be final.", metavar="BLOCK")] = None,
    from_epoch: Annotated[int | None, typer.Option(min=0, help="First epoch.", metavar="EPOCH")] = None,
    to_epoch: Annotated[
        int | None, typer.Option(min=0, help="Last epoch; it must be final and over.", metavar="EPOCH")
    ] = None,
    deliver: Annotated[
        bool, typer.Option("--deliver/--no-deliver", help="Deliver the events that were missing.")
    ] = True,
    only_estimate: Annotated[
        bool, typer.Option("--estimate", help="Only say how much it would ask and about how long it would take.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore and compare the events of a range of blocks or of epochs.

    They are derived again from the chain: those that are missing are stored and delivered, those that are stored are
    compared. One that differs is named and left as it is. A stream or a report that fails is named at the end with the
    reason, and everything else is done. In both cases the exit code is 1. One that differs since it was first seen near
    the head is only counted (near_head). May run beside the daemon.
    """
    settings = settings_of(config)
    wanted = _range(from_block, to_block, from_epoch, to_epoch)
    if only_estimate:
        _put_estimate(complete(_estimate(settings, wanted)), as_json=as_json)
        return
    totals, failures = complete(_replay(settings, wanted, deliver=deliver))
    counts = totals.as_dict()
    if as_json:
        put_json({**counts, "failures": [asdict(failure) for failure in failures]})
    else:
        say(", ".join(f"{count} {name}" for name, count in counts.items()))
        for failure in failures:
            say(f"FAILED      {failure}")
    if problems := [*_differences(totals.different), *_incomplete(failures)]:
        raise OperatorError("; ".join(problems))


@dataclass(frozen=True, slots=True)
class Failure:
    """A stream that was not replayed, or one report of it, by its timestamp, its CID and the kind of the failure."""

    stream: str
    problem: str
    advice: str | None
    report: str | None = None
    cid: str | None = None
    kind: FailureKind | None = None

    def __str__(self) -> str:
        parts = [self.stream, *([] if self.report is None else [f"report {self.report} ({self.cid})"]), self.problem]
        return ": ".join(parts if self.advice is None else [*parts, self.advice])


def _differences(ids: Sequence[str]) -> list[str]:
    if not ids:
        return []
    more = len(ids) - SHOWN_IDS
    return [
        f"{len(ids)} stored events are not what the chain gives, and were left as they are "
        f"({', '.join(ids[:SHOWN_IDS])}{f' and {more} more' if more > 0 else ''}): find out who changed them"
    ]


def _incomplete(failures: Sequence[Failure]) -> list[str]:
    if not failures:
        return []
    more = len(failures) - SHOWN_FAILURES
    shown = "; ".join(map(str, failures[:SHOWN_FAILURES]))
    return [f"not all of the range was replayed: {shown}{f'; and {more} more' if more > 0 else ''}"]


def _range(from_block: int | None, to_block: int | None, from_epoch: int | None, to_epoch: int | None) -> Range:
    for unit, first, last, others in (
        ("block", from_block, to_block, (from_epoch, to_epoch)),
        ("epoch", from_epoch, to_epoch, (from_block, to_block)),
    ):
        if first is not None and last is not None and others == (None, None):
            if last < first:
                raise InputError(f"--to-{unit} {last} lies before --from-{unit} {first}: exchange them")
            return Range("block" if unit == "block" else "epoch", Span(first, last))
    raise typer.BadParameter("give --from-block and --to-block, or --from-epoch and --to-epoch")


async def _estimate(settings: Settings, wanted: Range) -> Estimates:
    async with open_store(settings) as store:
        clock = await service_clock(store.database)
        async with open_sources(settings, store.database, clock, without_beacon=True) as sources:
            await refuse_unfinished(sources, wanted)
            spans, unknown = dict[str, Span](), dict[str, str]()
            for stream in sources.streams:
                try:
                    span = _up_to(await positions(sources, stream.unit, wanted), await stream.source.head())
                    if span is not None:
                        spans[stream.source.stream] = span
                except SourceUnavailable as error:
                    unknown[stream.source.stream] = str(error)
            found = await estimate_streams(sources, store.database, spans)
            return replace(found, unknown={**found.unknown, **unknown})


def _put_estimate(found: Estimates, *, as_json: bool) -> None:
    total = {"requests": found.requests, "calls": found.calls, "seconds": found.seconds}
    if as_json:
        unknown = [{"stream": name, "problem": problem} for name, problem in found.unknown.items()]
        streams = [asdict(estimated) for estimated in found.streams]
        put_json({**total, "streams": streams, "not_estimated": unknown, "log_range_blocks": found.log_range_blocks})
        return
    put_table(
        ("stream", "positions", "requests", "calls", "seconds"),
        [
            (
                estimated.stream,
                f"{estimated.positions} {estimated.unit}s",
                estimated.requests,
                estimated.calls,
                estimated.seconds,
            )
            for estimated in found.streams
        ],
        "no stream has anything in this range",
    )
    say(f"in all      {total['requests']} requests with {total['calls']} calls, about {total['seconds']:.0f} s")
    for name, problem in found.unknown.items():
        say(f"unknown     {name}: {problem}")
    samples = ", ".join(f"{estimated.sampled} {estimated.unit}s of {estimated.stream}" for estimated in found.streams)
    say(f"based on    {samples or 'nothing'}; logs of up to {found.log_range_blocks} blocks at once")


async def _replay(settings: Settings, wanted: Range, *, deliver: bool) -> tuple[Totals, list[Failure]]:
    async with open_store(settings) as store:
        clock = await service_clock(store.database)
        async with (
            open_sources(settings, store.database, clock, without_beacon=True) as sources,
            keeping_learned_limits(store.database, sources.pools),
        ):
            await refuse_unfinished(sources, wanted)
            tune_memory()
            with SpanProgress() as progress:
                work = _Replay(settings, store.database, sources, wanted, progress.advanced, deliver=deliver)
                await work.run()
    return work.totals, work.failures


class _Replay:
    """One range, stream by stream and report by report: what fails is kept in `failures`, and the rest goes on."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        sources: Sources,
        wanted: Range,
        on_advance: Callable[[Advanced], None],
        *,
        deliver: bool,
    ) -> None:
        self.totals = Totals()
        self.failures: list[Failure] = []
        self._settings, self._database, self._sources = settings, database, sources
        self._outbox = Outbox(database)
        self._wanted, self._on_advance, self._deliver = wanted, on_advance, deliver

    async def run(self) -> None:
        """Replay every stream; `validators` last, since the withdrawals may bring validators that are not known yet."""
        streams = {stream.source.stream: stream for stream in self._sources.streams}
        for name in sorted([*streams, *self._sources.unopened], key=lambda name: name == "validators"):
            try:
                if name in self._sources.unopened:
                    raise self._sources.unopened[name]
                await self._stream(streams[name])
            except VaulteventsError as error:
                self._failed(name, error)

    async def _stream(self, stream: Stream) -> None:
        name = stream.source.stream
        wanted = await positions(self._sources, stream.unit, self._wanted)
        if stream.unit == "epoch":
            await self._discover(wanted.last, required=name == "validators")
        head = await stream.source.head()
        span = _up_to(wanted, head)
        if span is not None and name == "reports" and self._sources.resolver is not None:
            await self._reports(stream, span, self._sources.resolver)
        elif span is not None:
            await self._read(stream, span)
        if name == "validators" and wanted.last > head:
            raise SourceUnavailable(
                "the beacon node in use",
                f"activations and exits are known up to epoch {head} and not to {wanted.last}: wait until the node "
                "has finalized more, and replay again",
            )

    async def _read(self, stream: Stream, span: Span) -> None:
        """Read a span of a stream again, on a cursor of its own."""
        cursor = await self._outbox.begin_replay(stream.source.stream, span)
        try:
            await run(
                stream.source,
                self._outbox,
                cursor,
                step=stream.backfill_step,
                poll_s=stream.poll_s,
                deliver=self._deliver,
                patience=PATIENCE,
                on_advance=self._advanced,
            )
        finally:
            await self._outbox.end_replay(cursor)

    async def _reports(self, stream: Stream, span: Span, resolver: Resolver) -> None:
        """Read the published reports of a span, and resolve each that is known, also where reading them failed."""
        if not self._deliver:
            await self._refuse_silencing(stream.source.stream, span)
        try:
            await self._read(stream, span)
        except VaulteventsError as error:
            self._failed(stream.source.stream, error)
        for report in await reports_in(self._database, span):
            if report.state in ("pending", "resolved"):
                await self._resolve(report, resolver)

    async def _resolve(self, report: StoredReport, resolver: Resolver) -> None:
        try:
            self.totals.add(await resolver.resolve(report, deliver=self._deliver))
        except VaulteventsError as error:
            self._failed("reports", error, report)
            if isinstance(error, SourceUnavailable | ReportInvalid):
                with contextlib.suppress(DatabaseUnavailable):
                    await resolver.postpone(report, error)

    async def _refuse_silencing(self, name: str, span: Span) -> None:
        """Refuse to store events undelivered of blocks that the live stream is still to read and deliver (rule D13)."""
        live = await self._outbox.live(name)
        if live is None or span.last > live.position:
            begun = "has not begun" if live is None else f"is at block {live.position}"
            raise InputError(
                f"the stream {begun}, so later reports are still to be read live, and replaying them undelivered would "
                "silence their events: end the range there, or replay without --no-deliver"
            )

    async def _discover(self, epoch: int, *, required: bool) -> None:
        """Bring the records of validators up to the present finality, as the daemon does.

        When an upstream does not answer, the stored records are used if they suffice up to `epoch`. If they do not and
        are `required`, the upstream is tried again for a while.
        """
        discovery = self._sources.discovery
        assert discovery is not None, "the streams of epochs come with it"
        for pause_s in (*islice(pauses(), PATIENCE), None):
            try:
                await discovery.step()
                break
            except (SourceUnavailable, DatabaseUnavailable) as error:
                if not required or await discovery.covers(epoch):
                    log.info("discovery_passed_over", problem=str(error))
                    break
                if pause_s is None:
                    raise
                log.warning("discovery_waits", problem=str(error), retry_in_s=pause_s)
                await asyncio.sleep(pause_s)

    def _advanced(self, step: Advanced) -> None:
        self.totals.count(step)
        self._on_advance(step)

    def _failed(self, stream: str, error: VaulteventsError, report: StoredReport | None = None) -> None:
        """Keep why a stream or one of its reports failed, and what to do about it."""
        advice = kind = None
        if report is not None and isinstance(error, SourceUnavailable | ReportInvalid):
            kind = failure_kind(error)
            advice = ADVICE[kind]
        elif isinstance(error, SourceUnavailable) and (setting := setting_of(self._settings, error)) is not None:
            advice = f"see that the node runs, or name another one in {setting}"
        elif isinstance(error, DatabaseUnavailable):
            advice = "replay again when the database is back"
        timestamp, cid = (None, None) if report is None else (str(report.log.timestamp), report.log.cid)
        failure = Failure(stream, " ".join(str(error).split()), advice, timestamp, cid, kind)
        self.failures.append(failure)
        log.warning("replay_failed", stream=stream, report=timestamp, problem=failure.problem)


def _up_to(wanted: Span, head: int) -> Span | None:
    """Cut off what lies beyond the head; None where nothing is left."""
    return Span(wanted.first, min(wanted.last, head)) if wanted.first <= head else None
