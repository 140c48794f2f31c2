"""Source `validators`: activations and exits by epoch (rules C4 and C5).

Discovery keeps the records; this source only cuts them into epochs, so a replay needs no node and no old state.
"""

from __future__ import annotations

from collections.abc import Callable

from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.registry import Registry
from vaultevents.core.spans import Span
from vaultevents.core.validators import observe, validators_head
from vaultevents.store.outbox import Cursor
from vaultevents.store.pool import Database
from vaultevents.store.validators import known, read_discovery
from vaultevents.watch.source import Reading


class ValidatorsSource:
    """What the records of the finalized state say about a span of epochs; there is nothing to link to."""

    stream = "validators"
    ahead = 0

    def __init__(self, database: Database, time: ChainTime, now_s: Callable[[], int]) -> None:
        """`now_s` is the service clock, which decides the current epoch (rule D15)."""
        self._database, self._time, self._now_s = database, time, now_s

    async def head(self) -> int:
        discovery = await read_discovery(self._database)
        if discovery.known_through is None:
            raise SourceUnavailable("discovery", "has not read the validators yet")
        return validators_head(self._time.epoch_at(self._now_s()), discovery.known_through)

    async def begin(self) -> tuple[int, str | None]:
        return await self.head(), None

    async def read(self, span: Span, cursor: Cursor, registry: Registry) -> Reading:
        # after the registry: a validator adopted since then makes the commit start over (rule C9)
        return Reading(observe(await known(self._database), span, self._time), None)
