"""More dispatcher processes beside this one, where one core is not enough (`run --dispatchers N`).

Each is `run --only dispatch` in a session of its own, so that Ctrl-C reaches this process alone, and works as long as
the pipe on its stdin is open: it drains when this process drains, and also when this process is killed. On its stdout
it reports what it counts, since only this process is asked for metrics.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import structlog

from vaultevents import metrics
from vaultevents.core.errors import OperatorError

log = structlog.get_logger("dispatchers")

ENDS_WITHIN_S = 90.0
REPORT_S = 1.0


@asynccontextmanager
async def dispatchers(number: int, config: Path | None, stop: asyncio.Event) -> AsyncIterator[None]:
    """Run `number` of them until the block ends. One that ends by itself sets `stop`, and is an `OperatorError`."""
    arguments = ["run", "--only", "dispatch", "--while-stdin"]
    if config is not None:
        arguments += ["--config", str(config)]
    async with AsyncExitStack() as stack:
        group = [await stack.enter_async_context(_process(arguments)) for _ in range(number)]
        watching = [asyncio.create_task(_watch(process, stop)) for process in group]
        watching += [asyncio.create_task(_count_in(process)) for process in group]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            ended = [process.returncode for process in group if process.returncode is not None]
            for process in group:
                assert process.stdin is not None
                process.stdin.close()
    if ended:
        raise OperatorError(f"a dispatcher process ended by itself with code {ended[0]}: see its last lines above")


@asynccontextmanager
async def _process(arguments: list[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "vaultevents",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        try:
            await asyncio.wait_for(process.wait(), ENDS_WITHIN_S)
        except TimeoutError:
            log.error("dispatcher_killed", pid=process.pid, waited_s=ENDS_WITHIN_S)
            process.kill()
            await process.wait()


async def report_counts() -> None:
    """Report on stdout what this process counts, for the process that started it; never end and never wait for it."""
    pipe, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, sys.stdout)
    while True:
        await asyncio.sleep(REPORT_S)
        if not pipe.get_write_buffer_size() and (counts := metrics.taken()):
            pipe.write(json.dumps(counts).encode() + b"\n")


async def _count_in(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        if line.endswith(b"\n"):  # one that is killed may leave half a line
            metrics.add(json.loads(line))


async def _watch(process: asyncio.subprocess.Process, stop: asyncio.Event) -> None:
    code = await process.wait()
    if not stop.is_set():
        log.error("dispatcher_ended", pid=process.pid, code=code)
        stop.set()
