"""A watcher of the logs that stops inside a commit; see test_frozen_watchers.

Arguments: the DSN, the URL of the node, where to stop and how. Where: `idle` between two statements, `copy` while rows
are copied, `result` while the server sends a large result. How: `freeze` is SIGSTOP, `pause` waits until it is killed.
A last argument `unlimited` leaves out the limits of sessions, as a negative control.
It prints `inside` before it stops, and a line for each outcome.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import structlog

from vaultevents.chain.execution.client import ExecutionChain, HeadPolicy
from vaultevents.store import outbox as outboxes
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import open_database
from vaultevents.store.sessions import Limits
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.watcher import Advanced, run

_stopped = False


def stop(how: str) -> None:
    """Stop this process once."""
    global _stopped
    if _stopped:
        return
    _stopped = True
    print("inside", flush=True)
    if how == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        threading.Event().wait()


def stop_at(where: str, how: str) -> None:
    store = outboxes._store

    async def stop_idle(connection: Any, *arguments: Any, **options: Any) -> Any:
        stop(how)
        return await store(connection, *arguments, **options)

    async def stop_in_copy(connection: Any, *arguments: Any, **options: Any) -> Any:
        connection = _Copying(connection, how)
        return await store(connection, *arguments, **options)

    async def stop_in_result(connection: Any, *arguments: Any, **options: Any) -> Any:
        if not _stopped:
            threading.Timer(0.2, stop, (how,)).start()
            async for _ in connection.cursor(
                "select repeat('x', 100000) from generate_series(1, 100000)", prefetch=9999
            ):
                pass
        return await store(connection, *arguments, **options)

    outboxes._store = {"idle": stop_idle, "copy": stop_in_copy, "result": stop_in_result}[where]
    outboxes.STAGED_FROM = 1


class _Copying:
    """A connection that stops in the middle of the rows that it copies."""

    def __init__(self, connection: Any, how: str) -> None:
        self._connection, self._how = connection, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def copy_records_to_table(self, table: str, *, records: Iterable[Any], **options: Any) -> Any:
        def interrupted() -> Iterator[Any]:
            rows = list(records)
            yield from rows[:1]
            if not _stopped:
                for _ in range(5000):  # so many that some are on their way
                    yield rows[0]
            stop(self._how)
            yield from rows[1:]

        return await self._connection.copy_records_to_table(table, records=interrupted(), **options)


def advanced(step: Advanced) -> None:
    print("advanced", flush=True)


async def watch(dsn: str, url: str) -> None:
    database = await open_database({"dsn": dsn})
    outbox = Outbox(database)
    live = await outbox.live("logs")
    assert live is not None
    async with ExecutionChain([url], head=HeadPolicy()) as chain:
        await run(LogsSource(chain), outbox, live, step=50, poll_s=0.1, on_advance=advanced)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stdout))
    stop_at(sys.argv[3], sys.argv[4])
    if sys.argv[5:] == ["unlimited"]:
        Limits.settings = lambda _: {"lock_timeout": "0"}  # type: ignore[method-assign, assignment]
    asyncio.run(watch(sys.argv[1], sys.argv[2]))
