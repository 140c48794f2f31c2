"""Vaults are added, removed and added again while spans are read; the race is forced at each step (rules C9 and E12).

Whatever happens in between, the outbox equals what the final registrations say of the whole chain.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from itertools import product
from typing import Any

import pytest

from simulation_fixtures import add_accounts, add_vault, open_at, read_to_head, reading, rows, spans
from vaultevents.core.events import Event
from vaultevents.core.registry import Registry
from vaultevents.core.spans import Span
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.devnet.truth import Registration
from vaultevents.store import accounts
from vaultevents.store.outbox import Committed, Cursor, Lost, Outbox
from vaultevents.store.pool import Database
from vaultevents.store.registry import current_registry
from vaultevents.watch.logs import LogsSource
from vaultevents.watch.source import Reading

pytestmark = pytest.mark.fault

MOMENTS = ("head_read", "registry_read", "span_read", "committed")
Script = dict[tuple[str, int], Callable[[], Awaitable[None]]]


class Moments:
    """Runs what a script plans for the n-th time that a moment comes."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._seen = dict.fromkeys(MOMENTS, 0)
        self.ran = 0

    async def now(self, moment: str) -> None:
        self._seen[moment] += 1
        action = self._script.pop((moment, self._seen[moment]), None)
        if action is not None:
            await action()
            self.ran += 1


class WatchedSource:
    """The real source, telling when it has read."""

    stream = LogsSource.stream
    ahead = 0  # a moment is one of the span in turn

    def __init__(self, source: LogsSource, moments: Moments) -> None:
        self._source, self._moments = source, moments

    async def head(self) -> int:
        head = await self._source.head()
        await self._moments.now("head_read")
        return head

    async def begin(self) -> tuple[int, str | None]:
        return await self._source.begin()

    async def read(self, span: Span, cursor: Cursor, registry: Registry) -> Reading:
        reading = await self._source.read(span, cursor, registry)
        await self._moments.now("span_read")
        return reading


class WatchedOutbox(Outbox):
    """The real outbox, telling when it was asked for the registry and when it has committed."""

    def __init__(self, database: Database, moments: Moments) -> None:
        super().__init__(database)
        self._moments = moments

    async def registry(self) -> Registry:
        registry = await super().registry()
        await self._moments.now("registry_read")
        return registry

    async def commit(
        self, old: Cursor, new: Cursor, events: Iterable[Event], registry_version: int, **options: Any
    ) -> Committed | Lost:
        outcome = await super().commit(old, new, events, registry_version, **options)
        await self._moments.now("committed")
        return outcome


class UncheckedOutbox(WatchedOutbox):
    """Negative control: a commit that does not ask whether the registry is still the one the span was read with."""

    async def commit(
        self, old: Cursor, new: Cursor, events: Iterable[Event], registry_version: int, **options: Any
    ) -> Committed | Lost:
        current = await current_registry(self.database)
        return await super().commit(old, new, events, current.version, **options)


async def scenario(
    database: Database, outbox_of: type[WatchedOutbox], moments_at: Iterable[tuple[str, int]], seed: int
) -> bool:
    """Adds, removes and adds vaults at the given moments of a run; whether the outbox is as it should be."""
    made = Simulation(seed, events_per_block=2)
    made.history(60, 120)
    await add_accounts(database, made.registrations)
    steady, coming, going = made.registrations[0], made.registrations[1], made.registrations[-1]
    await add_vault(database, steady)
    await add_vault(database, going)

    def final() -> int:
        assert made.chain.finalized_number is not None
        return made.chain.finalized_number

    async def add_from_the_past() -> None:
        await add_vault(database, coming)

    async def remove(one: Registration) -> None:
        made.step()
        await accounts.remove_vault(database, one.account_id, one.vault_id, final())

    async def add_from_now(one: Registration) -> None:
        made.step()
        made.step()
        await add_vault(database, one._replace(first_block=final() + 1))

    async def remove_going() -> None:
        await remove(going)

    async def back_again() -> None:
        await add_from_now(going)

    async def remove_coming() -> None:
        await remove(coming)

    actions = (add_from_the_past, remove_going, back_again, remove_coming)
    moments = Moments(dict(zip(moments_at, actions, strict=True)))
    async with reading(ExecutionServer(made.chain)) as source:
        await open_at(database, made, 20)
        outbox = outbox_of(database, moments)
        watched = WatchedSource(source, moments)
        await read_to_head(watched, outbox, step=7)
        for _ in range(12):
            made.step()
            await read_to_head(watched, outbox, step=7)
    assert moments.ran == len(actions), "the run was too short for the script"
    assert len(await spans(database)) == 4
    return await rows(database) == made.expected(await spans(database))


ORDERS = [
    *[(moment,) * 4 for moment in MOMENTS],
    ("span_read", "registry_read", "span_read", "head_read"),
    ("registry_read", "span_read", "committed", "span_read"),
]
SCRIPTS = [
    tuple(zip(order, (start, start + 1, start + 3, start + 5), strict=True)) for start in (1, 4) for order in ORDERS
]


@pytest.mark.parametrize(("script", "seed"), list(product(SCRIPTS, (1, 2))))
async def test_the_outbox_is_that_of_a_run_which_knew_all_spans(
    database: Database, script: tuple[tuple[str, int], ...], seed: int
) -> None:
    assert await scenario(database, WatchedOutbox, script, seed)


async def test_without_the_registry_check_something_is_lost(database: Database) -> None:
    """The check must matter: some of the same scenarios go wrong without it."""
    script = tuple(zip(("span_read",) * 4, (1, 2, 4, 6), strict=True))
    assert not await scenario(database, UncheckedOutbox, script, 1)
