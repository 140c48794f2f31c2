"""Run probes at the same time, each with a deadline of its own, and keep what each has found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from vaultevents.core.errors import LocalFault, SourceUnavailable, VaulteventsError
from vaultevents.core.findings import Finding, failed

AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Probe:
    """Questions about one subject. `advice` is what to do where an error says nothing about that."""

    subject: str
    findings: Callable[[], AsyncIterator[Finding]]
    within_s: float = 60.0
    advice: str = ""


async def run_probes(probes: Sequence[Probe], advanced: Callable[[int, int], None]) -> list[Finding]:
    """Run all probes, a bounded number at once; return their findings in the order of the probes.

    `advanced` is called with the number of probes that are done, and of all.
    """
    slots, done = asyncio.Semaphore(AT_ONCE), 0
    advanced(0, len(probes))

    async def run(probe: Probe) -> list[Finding]:
        nonlocal done
        async with slots:
            found = await _run(probe)
        done += 1
        advanced(done, len(probes))
        return found

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(probe)) for probe in probes]
    return [finding for task in tasks for finding in task.result()]


async def _run(probe: Probe) -> list[Finding]:
    """Collect what a probe finds; an error or its deadline ends it, and what it found before stays."""
    found: list[Finding] = []
    try:
        async with asyncio.timeout(probe.within_s):
            async for finding in probe.findings():
                found.append(finding)  # noqa: PERF401 (what came before an error stays)
    except (VaulteventsError, OSError) as error:
        found.append(failed_by(probe.subject, error, probe.advice, probe.within_s))
    return found


async def attempt(subject: str, work: Callable[[], Awaitable[Finding]], advice: str = "") -> Finding:
    """Return the finding of `work`, or the failure that ended it, so that the next question is put all the same."""
    try:
        return await work()
    except (VaulteventsError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise  # the deadline of the probe
        return failed_by(subject, error, advice)


def failed_by(subject: str, error: Exception, advice: str = "", within_s: float | None = None) -> Finding:
    """Make the finding for an error."""
    if isinstance(error, TimeoutError):
        return failed(subject, f"does not answer within {within_s or 0:g} s", advice)
    if isinstance(error, SourceUnavailable | LocalFault):
        return failed(subject, error.problem, advice)
    return failed(subject, str(error), advice)
