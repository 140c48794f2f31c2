"""Run the checks of `vaultevents check` beside the service, one run at a time, and keep the last result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeAlias

import structlog

from vaultevents.config import Settings
from vaultevents.core.errors import VaulteventsError
from vaultevents.core.findings import Finding, failed, verdict

log = structlog.get_logger("console")

CHECKED_WITHIN_S: Final = 150.0
"""Probes have deadlines of their own, of two minutes at most."""

Check: TypeAlias = Callable[[Settings, Callable[[int, int], None]], Awaitable[Sequence[Finding]]]
"""Return the findings; the callback gets the number of probes that are done, and of all."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a run has found, and when it was begun."""

    begun_at: datetime
    took_s: float
    findings: Sequence[Finding]

    @property
    def verdict(self) -> str:
        return verdict(self.findings)

    @property
    def failures(self) -> int:
        return sum(finding.result == "failed" for finding in self.findings)


class CheckRunner:
    """The runs of one process. `progress`: probes that are done, and all of them, while a run is under way."""

    def __init__(
        self, check: Check, settings: Settings, now_s: Callable[[], float], within_s: float = CHECKED_WITHIN_S
    ) -> None:
        self._check = check
        self._settings = settings
        self._now_s = now_s
        self._within_s = within_s
        self._task: asyncio.Task[None] | None = None
        self.progress: tuple[int, int] | None = None
        self.result: CheckResult | None = None

    def start(self) -> None:
        """Begin a run unless one is under way."""
        if self.progress is None:
            self.progress = (0, 0)
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Cancel the run that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        begun_at, begun_s = datetime.fromtimestamp(self._now_s(), UTC), time.monotonic()
        try:
            findings = await self._findings()
            self.result = CheckResult(begun_at, time.monotonic() - begun_s, findings)
        finally:
            self.progress = None

    async def _findings(self) -> Sequence[Finding]:
        try:
            async with asyncio.timeout(self._within_s):
                return await self._check(self._settings, self._advanced)
        except TimeoutError:
            advice = "Run 'vaultevents check' in a terminal"
            return [failed("check", f"it did not end within {self._within_s:g} s", advice)]
        except (VaulteventsError, OSError) as error:
            return [failed("check", str(error))]
        except Exception:  # a bug in a probe must not end the service
            log.exception("check_broke_off")
            return [failed("check", "it broke off because of a bug", "See the log of this process")]

    def _advanced(self, done: int, number: int) -> None:
        self.progress = (done, number)
