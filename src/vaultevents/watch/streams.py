"""The streams of the daemon and of a replay: a source, how its first live cursor begins, and its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from vaultevents.chain.beacon.client import BeaconChain
from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.core.units import Address
from vaultevents.store.cursors import open_stream
from vaultevents.store.outbox import Cursor, Outbox
from vaultevents.store.pool import Connection, Database
from vaultevents.store.registry import first_block
from vaultevents.store.validators import earliest_epoch
from vaultevents.watch.background_audit import AuditSource, follow_audit
from vaultevents.watch.discovery import Discovery
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.reports import ReportsSource
from vaultevents.watch.source import LogSource, Source
from vaultevents.watch.validators import ValidatorsSource
from vaultevents.watch.wakeup import Wakeup
from vaultevents.watch.watcher import Advanced, begun, run, run_backfills
from vaultevents.watch.withdrawals import WithdrawalsSource

VALIDATORS_STEP_EPOCHS = 10_000
WITHDRAWALS_STEP_EPOCHS = 8


@dataclass(frozen=True, slots=True)
class Audit:
    """What of a stream is read again, at each of `nodes` alone: all up to the `final` block, by `at_once` blocks."""

    source: LogSource
    nodes: Sequence[str]
    final: Callable[[], Awaitable[int]]
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class Stream:
    """One source; its positions are blocks or epochs, `step` of which are committed at once.

    Those that are read with fewer questions, of a backfill or a replay, may be `backfill_step` at once. A stream
    without an `audit` needs none, since it is read with every proof.
    """

    source: Source
    unit: Literal["block", "epoch"]
    earliest: Callable[[Connection], Awaitable[int | None]]
    step: int
    poll_s: float
    backfill_step: int
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """Of the streams of blocks: how many are committed at once, live and in a backfill, and how often one looks.

    The audit follows by `audit_step` blocks.
    """

    step: int
    backfill_step: int
    poll_s: float
    audit_step: int = 1


def logs_stream(chain: ExecutionChain, steps: Steps) -> Stream:
    """The two contract events."""
    source = LogsSource(chain)
    audit = Audit(source, chain.nodes, partial(_final_block, chain), steps.audit_step)
    return Stream(source, "block", first_block, steps.step, steps.poll_s, steps.backfill_step, audit)


def reports_stream(chain: ExecutionChain, oracles: Collection[Address], steps: Steps) -> Stream:
    """Published oracle reports; a `Resolver` must run beside it."""
    source = ReportsSource(chain, oracles)
    audit = Audit(source, chain.nodes, partial(_final_block, chain), steps.audit_step)
    return Stream(source, "block", first_block, steps.step, steps.poll_s, steps.backfill_step, audit)


async def _final_block(chain: ExecutionChain) -> int:
    return (await chain.final_head()).number


def staking_streams(
    chain: ExecutionChain,
    beacon: BeaconChain,
    database: Database,
    discovery: Discovery,
    time: ChainTime,
    now_s: Callable[[], int],
    *,
    poll_s: float,
) -> list[Stream]:
    """Activations and exits, and withdrawals; `discovery` must run beside them."""
    earliest = partial(earliest_epoch, time=time)
    validators = ValidatorsSource(database, time, now_s)
    withdrawals = WithdrawalsSource(chain, beacon, database, time, discovery.meet)
    return [
        Stream(validators, "epoch", earliest, VALIDATORS_STEP_EPOCHS, poll_s, VALIDATORS_STEP_EPOCHS),
        Stream(withdrawals, "epoch", earliest, WITHDRAWALS_STEP_EPOCHS, poll_s, WITHDRAWALS_STEP_EPOCHS),
    ]


async def follow(
    stream: Stream,
    outbox: Outbox,
    on_advance: Callable[[Advanced], None],
    wakeup: Wakeup,
    *,
    audit_per_s: float = 0.0,
) -> None:
    """Reads a stream live, its backfills beside it, and all of it again behind them, at most so fast; never ends.

    Live it looks for more as soon as `wakeup` says that there may be something new.
    """
    source, poll_s = stream.source, stream.poll_s
    cursor = await begun(source.stream, partial(begin, stream, outbox))
    if stream.audit is not None:
        stream.audit.source.resume(cursor)
    async with asyncio.TaskGroup() as group:
        group.create_task(_follow_live(stream, outbox, cursor, on_advance, wakeup))
        group.create_task(
            run_backfills(source, outbox, step=stream.backfill_step, poll_s=poll_s, on_advance=on_advance)
        )
        if stream.audit is not None and audit_per_s:
            audit = AuditSource(stream.audit.source, outbox, stream.audit.final, stream.audit.at_once)
            nodes = stream.audit.nodes
            group.create_task(
                follow_audit(audit, outbox, nodes, step=stream.step, poll_s=poll_s, blocks_per_s=audit_per_s)
            )


async def _follow_live(
    stream: Stream, outbox: Outbox, cursor: Cursor, on_advance: Callable[[Advanced], None], wakeup: Wakeup
) -> None:
    """Reads live from `cursor` on, and from the one that is begun anew where the database no longer has it."""
    while True:
        await run(
            stream.source, outbox, cursor, step=stream.step, poll_s=stream.poll_s, on_advance=on_advance, wakeup=wakeup
        )
        cursor = await begun(stream.source.stream, partial(begin, stream, outbox))


async def begin(stream: Stream, outbox: Outbox) -> Cursor:
    """Where the stream goes on; at the very first start its head, with a backfill for what lies before it (rule C9)."""
    name = stream.source.stream
    live = await outbox.live(name)
    if live is None:
        position, anchor = await stream.source.begin()
        await open_stream(outbox.database, name, position, anchor, stream.earliest)
        live = await outbox.live(name)
    if live is None:
        raise DatabaseUnavailable(f"an older copy of the database took over while the stream '{name}' began")
    return live
