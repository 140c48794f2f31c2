"""init, run, replay."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer

from vaultevents.cli.console import (
    ConfigOption,
    JsonOption,
    complete,
    one_of,
    put_json,
    put_table,
    say,
    settings_of,
    stop_at_end_of,
    stopping,
)
from vaultevents.cli.dispatchers import dispatchers, tell_counts
from vaultevents.cli.estimate import Estimate, estimate
from vaultevents.cli.progress import SpanProgress
from vaultevents.config import DEFAULT_FILE, NETWORKS, Settings, chosen_file
from vaultevents.core.errors import ConfigError, InputError, OperatorError
from vaultevents.core.spans import Span
from vaultevents.daemon import ROLES, Role, collect_less, serve
from vaultevents.opening.database import open_store, service_clock
from vaultevents.opening.memory import keeping_limits
from vaultevents.opening.sources import Sources, open_sources
from vaultevents.store.outbox import Committed, Outbox
from vaultevents.store.reports import reports_in
from vaultevents.store.validators import epoch_at
from vaultevents.watch.streams import Stream
from vaultevents.watch.watcher import Advanced, run

REPLAY_PATIENCE = 5
SHOWN_IDS = 3


def add_to(app: typer.Typer) -> None:
    app.command("init")(init)
    app.command("run")(run_daemon)
    app.command("replay")(replay)


def init(
    network: Annotated[
        str, typer.Option(help=f"The network to watch: {', '.join(NETWORKS)}.", metavar="NETWORK")
    ] = "hoodi",
    config: ConfigOption = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a configuration file that explains every setting."""
    one_of(NETWORKS, network, "--network")
    path = chosen_file(config)
    if path.exists() and not force:
        raise InputError(
            f"{path} is already there: edit it, name another file with --config, or write over it (--force)"
        )
    _write_whole(path, _template(network))
    if as_json:
        put_json({"path": str(path), "network": network})
        return
    option = "" if path == DEFAULT_FILE else f" --config {path}"
    say(f"Wrote {path} for {network}. {_FIRST[network]} Next{f', each with{option}' if option else ''}:")
    say("  vaultevents check                                    does everything answer?")
    say("  vaultevents account add ACCOUNT                      an account, such as 'acme'")
    say("  vaultevents vault add ACCOUNT VAULT ADDRESS          a vault of it (--queue, --start-block)")
    say("  vaultevents webhook add ACCOUNT URL                  where its events go; shows the secret once")
    say("  vaultevents run                                      watch and deliver")


_FIRST = {
    "devnet": "It expects a node at http://127.0.0.1:8545 with chain id 31337.",
    "hoodi": "It names public nodes, so it works as it is.",
    "mainnet": "Name your node in it (execution.urls).",
}


def _write_whole(path: Path, text: str) -> None:
    """Whole or not at all: a full disk must not cost the file that was there."""
    target = path.resolve()
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): mend that, or name another file") from None


def _template(network: str) -> str:
    repository = Path(__file__).parents[3] / "config"
    for place in (resources.files("vaultevents").joinpath("networks"), repository):
        example = place.joinpath(f"{network}.toml")
        if example.is_file():
            return example.read_text(encoding="utf-8")
    raise ConfigError(f"this installation comes without its examples: copy config/{network}.toml from the repository")


def run_daemon(
    config: ConfigOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this part of the work: {' or '.join(ROLES)}. May be repeated.", metavar="ROLE"),
    ] = None,
    number: Annotated[
        int, typer.Option("--dispatchers", min=1, max=64, help="Processes that deliver, this one among them.")
    ] = 1,
    while_stdin: Annotated[bool, typer.Option("--while-stdin", hidden=True)] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch the chain and deliver webhooks until SIGTERM or Ctrl-C.

    Attempts that are under way then are finished first; a second signal ends it at once, and they are made again
    later. With --json it says at the end what it read.
    """
    for role in only or ():
        one_of(ROLES, role, "--only")
    settings = settings_of(config)
    roles: list[Role] = [role for role in ROLES if not only or role in only]
    if number > 1 and "dispatch" not in roles:
        raise typer.BadParameter("there is nothing to deliver without the role dispatch", param_hint="--dispatchers")
    totals = Totals()

    async def work() -> None:
        stop = asyncio.Event()
        if while_stdin:
            stop_at_end_of(sys.stdin, stop)
        with stopping(stop), SpanProgress() as progress:

            def advanced(step: Advanced) -> None:
                totals.count(step)
                progress.advanced(step)

            telling = asyncio.create_task(tell_counts()) if while_stdin else None
            async with dispatchers(number - 1, config, stop):
                await serve(settings, stop, only=roles, on_advance=advanced, observed=not while_stdin)
            if telling is not None:
                telling.cancel()

    complete(work())
    if as_json:
        put_json(totals.as_dict())


@dataclass(slots=True)
class Totals:
    """What became of the events that were derived."""

    inserted: int = 0
    identical: int = 0
    different: tuple[str, ...] = ()
    near_head: int = 0

    def count(self, step: Advanced) -> None:
        self.add(step.committed)

    def add(self, committed: Committed) -> None:
        self.inserted += committed.inserted
        self.identical += committed.identical
        self.different += committed.different
        self.near_head += committed.near_head

    def as_dict(self) -> dict[str, int]:
        different = len(self.different)
        counts = {
            "identical": self.identical,
            "inserted": self.inserted,
            "different": different,
            "near_head": self.near_head,
        }
        return {"derived": sum(counts.values()), **counts}


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
    compared. One that differs is named and left as it is; then the exit code is 1. One that differs since it was first
    seen near the head is only counted (near_head). May run beside the daemon.
    """
    settings = settings_of(config)
    wanted = _range(from_block, to_block, from_epoch, to_epoch)
    if only_estimate:
        _tell_estimate(*complete(_estimate(settings, wanted)), as_json=as_json)
        return
    totals = complete(_replay(settings, wanted, deliver=deliver))
    counts = totals.as_dict()
    if as_json:
        put_json(counts)
    else:
        say(", ".join(f"{count} {name}" for name, count in counts.items()))
    if totals.different:
        more = len(totals.different) - SHOWN_IDS
        raise OperatorError(
            f"{counts['different']} stored events are not what the chain gives, and were left as they are "
            f"({', '.join(totals.different[:SHOWN_IDS])}{f' and {more} more' if more > 0 else ''}): "
            "find out who changed them"
        )


@dataclass(frozen=True, slots=True)
class Range:
    """What to replay, in blocks or in epochs."""

    unit: Literal["block", "epoch"]
    span: Span


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


async def _estimate(settings: Settings, wanted: Range) -> tuple[list[Estimate], int]:
    async with open_store(settings) as store:
        clock = await service_clock(store.database)
        async with open_sources(settings, store.database, clock) as sources:
            spans = [(stream, await _span(stream, sources, wanted)) for stream in sources.streams]
            outbox = Outbox(store.database)
            found = [await estimate(stream, sources.chain, outbox, span) for stream, span in spans if span is not None]
            return found, sources.chain.log_range_blocks


def _tell_estimate(found: list[Estimate], log_range_blocks: int, *, as_json: bool) -> None:
    total = {
        "requests": sum(one.requests for one in found),
        "calls": sum(one.calls for one in found),
        "seconds": round(sum(one.seconds for one in found), 1),
    }
    if as_json:
        put_json({**total, "streams": [asdict(one) for one in found], "log_range_blocks": log_range_blocks})
        return
    put_table(
        ("stream", "positions", "requests", "calls", "seconds"),
        [(one.stream, f"{one.positions} {one.unit}s", one.requests, one.calls, one.seconds) for one in found],
        "no stream has anything in this range",
    )
    say(f"in all      {total['requests']} requests with {total['calls']} calls, about {total['seconds']:.0f} s")
    samples = ", ".join(f"{one.sampled} {one.unit}s of {one.stream}" for one in found)
    say(f"based on    {samples or 'nothing'}; logs of up to {log_range_blocks} blocks at once")


async def _replay(settings: Settings, wanted: Range, *, deliver: bool) -> Totals:
    totals = Totals()
    async with open_store(settings) as store:
        clock = await service_clock(store.database)
        async with (
            open_sources(settings, store.database, clock) as sources,
            keeping_limits(store.database, sources.pools),
        ):
            spans = [(stream, await _span(stream, sources, wanted)) for stream in sources.streams]
            collect_less()
            with SpanProgress() as progress:

                def advanced(step: Advanced) -> None:
                    totals.count(step)
                    progress.advanced(step)

                for stream, span in spans:
                    if span is not None:
                        await _replay_stream(stream, Outbox(store.database), span, advanced, deliver=deliver)
                    if span is not None and stream.source.stream == "reports" and sources.resolver is not None:
                        for report in await reports_in(store.database, span):
                            if report.state in ("pending", "resolved"):
                                totals.add(await sources.resolver.resolve(report, deliver=deliver))
    return totals


async def _replay_stream(
    stream: Stream, outbox: Outbox, span: Span, on_advance: Callable[[Advanced], None], *, deliver: bool
) -> None:
    cursor = await outbox.begin_replay(stream.source.stream, span)
    try:
        await run(
            stream.source,
            outbox,
            cursor,
            step=stream.backfill_step,
            poll_s=stream.poll_s,
            deliver=deliver,
            patience=REPLAY_PATIENCE,
            on_advance=on_advance,
        )
    finally:
        await outbox.end_replay(cursor)


async def _span(stream: Stream, sources: Sources, wanted: Range) -> Span | None:
    """The positions of one stream that belong to the range; None where it has none there yet.

    The range must be final in its own unit. Of the other unit's streams it takes what is complete.
    """
    head = await stream.source.head()
    span = wanted.span
    if stream.unit == wanted.unit:
        if span.last > head and stream.source.stream in ("logs", "withdrawals"):
            raise InputError(f"{wanted.unit} {span.last} is not final and complete yet: replay up to {head}")
    elif sources.time is None:
        raise InputError("epochs are those of the beacon chain: name a node in beacon.urls, or give a range of blocks")
    elif stream.unit == "block":
        first = await sources.chain.first_block_at(sources.time.epoch_start_s(span.first))
        span = Span(first, await sources.chain.first_block_at(sources.time.epoch_start_s(span.last + 1)) - 1)
    else:
        ends = [(await sources.chain.header(block)).timestamp_s for block in (span.first, span.last)]
        span = Span(*(epoch_at(sources.time, seconds) for seconds in ends))
    return Span(span.first, min(span.last, head)) if span.first <= head else None
