"""Replay a range and backfill a vault: the watcher reads blocks or epochs again, after an estimate (decision 0063)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from vaultevents.console import fields
from vaultevents.console.access import form_of
from vaultevents.console.context import ConsoleContext, in_time
from vaultevents.console.links import vault_url, with_query
from vaultevents.console.rendering import render
from vaultevents.core.errors import InputError, SourceUnavailable
from vaultevents.core.spans import Span
from vaultevents.store import cursors, vault_overview
from vaultevents.store.cursors import StreamState, Unit
from vaultevents.store.vault_overview import VaultRow
from vaultevents.wiring.replay_range import (
    Estimates,
    Range,
    estimate_streams,
    positions,
    refuse_unfinished,
    whole_range,
)
from vaultevents.wiring.sources import Sources

ASKED_WITHIN_S: Final = 20.0
"""Nodes that take longer to say where a range lies do not answer."""

SAMPLED_WITHIN_S: Final = 8.0
"""So long samples are read for an estimate; a stream without one by then is named."""

UNITS: Final[tuple[Unit, ...]] = ("block", "epoch")
RANGE: Final = ("unit", "first", "last")

Fields = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be read again: a span of each chosen stream, whether or not it was ever read."""

    subject: str
    spans: Mapping[str, Span]
    states: Sequence[StreamState]

    def reads(self) -> list[tuple[StreamState, Span]]:
        """Return what of the spans the live cursors have passed. Raises `InputError` for nothing."""
        found = [
            (state, span) for state in self.states if (span := state.read_of(self.spans[state.stream])) is not None
        ]
        if not found:
            raise InputError(f"nothing was read yet in {self.subject}: choose another range")
        return found


def routes(context: ConsoleContext) -> list[Route]:
    """Return the routes of `/replay`, and of the backfill of each vault."""
    database = context.database

    async def show(request: Request) -> Response:
        found = await in_time(_states(context))
        units = sorted({state.unit for state in found})
        return render(request, "replay.html", streams=found, units=units, done=request.query_params.get("done") == "1")

    async def estimate_replay(request: Request) -> Response:
        given = request.query_params
        wanted, chosen = _range(given), _chosen(given, await in_time(_states(context)))
        async with _nodes(context) as sources:
            plan = await plan_replay(sources, wanted, chosen)
            estimates = await _estimates(context, sources, plan)
        return _estimated(request, plan, estimates, given, action="/replay", button="Replay")

    async def replay(request: Request) -> Response:
        given = form_of(request)
        wanted, chosen = _range(given), _chosen(given, await in_time(_states(context)))
        async with _nodes(context) as sources:
            plan = await plan_replay(sources, wanted, chosen)
        await in_time(cursors.read_again(database, plan.spans, plan.subject))
        return RedirectResponse("/replay?done=1", 303)

    async def estimate_backfill(request: Request) -> Response:
        given, vault = request.query_params, await _vault(context, request)
        first, chosen = _first_block(given, vault), _chosen(given, await in_time(_states(context)))
        async with _nodes(context) as sources:
            plan = await plan_backfill(sources, vault, first, chosen)
            estimates = await _estimates(context, sources, plan)
        action = vault_url(vault.account_id, vault.id, "backfill")
        return _estimated(request, plan, estimates, given, action=action, button="Backfill")

    async def backfill(request: Request) -> Response:
        given, vault = form_of(request), await _vault(context, request)
        first, chosen = _first_block(given, vault), _chosen(given, await in_time(_states(context)))
        async with _nodes(context) as sources:
            plan = await plan_backfill(sources, vault, first, chosen)
        await in_time(cursors.backfill_again(database, vault.account_id, vault.id, plan.spans))
        return RedirectResponse(with_query(vault_url(vault.account_id, vault.id), {"done": "backfill"}), 303)

    of_vault = "/vaults/{account_id}/{vault_id}/backfill"
    return [
        Route("/replay", show, methods=["GET"]),
        Route("/replay", replay, methods=["POST"]),
        Route("/replay/estimate", estimate_replay, methods=["GET"]),
        Route(of_vault, estimate_backfill, methods=["GET"]),
        Route(of_vault, backfill, methods=["POST"]),
    ]


async def plan_replay(sources: Sources, wanted: Range, chosen: Sequence[StreamState]) -> Plan:
    """Return what a range of blocks or epochs is in each stream. Raises `InputError` where it is not final."""
    await refuse_unfinished(sources, wanted)
    return await _plan(sources, str(wanted), wanted, chosen)


async def plan_backfill(sources: Sources, vault: VaultRow, first: int, chosen: Sequence[StreamState]) -> Plan:
    """Return the blocks for which a vault is registered, from `first` on, in each stream."""
    final = (await sources.chain.final_head()).number
    last = min([final, *(span.last for span in vault.spans[-1:] if span.last is not None)])
    subject = f"vault '{vault.id}'"
    if first > last:
        raise InputError(f"block {first} is later than {last}, the last one to read for {subject}: choose another")
    return await _plan(sources, subject, Range("block", Span(first, last)), chosen)


async def _plan(sources: Sources, subject: str, wanted: Range, chosen: Sequence[StreamState]) -> Plan:
    spans = {unit: await positions(sources, unit, wanted) for unit in sorted({state.unit for state in chosen})}
    return Plan(subject, {state.stream: spans[state.unit] for state in chosen}, chosen)


def _range(given: Fields) -> Range:
    """Return the range that a form asks for."""
    unit = fields.choice(given, "unit", UNITS)
    if unit is None:
        raise InputError("'unit' is missing: choose blocks or epochs")
    first, last = fields.required_number(given, "first"), fields.required_number(given, "last")
    return whole_range(unit, first, last)


def _first_block(given: Fields, vault: VaultRow) -> int:
    """Return from which block on a form asks for the events of a vault, which is registered for it."""
    if not vault.spans:
        raise InputError(f"vault '{vault.id}' is registered for no block: nothing is read for it")
    registered = min(span.first for span in vault.spans)
    first = fields.number(given, "first")
    if first is not None and first < registered:
        raise InputError(
            f"vault '{vault.id}' is registered for blocks from {registered} on: register an earlier one with "
            "'vaultevents vault add', which reads from there"
        )
    return registered if first is None else first


def _chosen(given: Fields, states: Sequence[StreamState]) -> list[StreamState]:
    """Return the streams that a form chooses, all of them where it chooses none."""
    if not states:
        raise InputError("no stream was read yet: start 'vaultevents run'")
    names = fields.chosen(given, "stream", [state.stream for state in states])
    return [state for state in states if state.stream in names]


async def _estimates(context: ConsoleContext, sources: Sources, plan: Plan) -> Estimates:
    spans = {state.stream: span for state, span in plan.reads()}
    return await estimate_streams(sources, context.database, spans, SAMPLED_WITHIN_S)


def _estimated(
    request: Request, plan: Plan, estimates: Estimates, given: Fields, *, action: str, button: str
) -> Response:
    """Show what will be read and what it asks of the nodes, with the form that begins it."""
    return render(
        request,
        "estimate.html",
        plan=plan,
        estimates=estimates,
        by_stream={estimated.stream: estimated for estimated in estimates.streams},
        given={name: value for name, value in given.items() if name in RANGE or name.startswith("stream.")},
        action=action,
        button=button,
    )


async def _states(context: ConsoleContext) -> list[StreamState]:
    async with context.database.transaction() as connection:
        return await cursors.states(connection)


async def _vault(context: ConsoleContext, request: Request) -> VaultRow:
    """Return the vault of the path. Raises the error of a page that is not there."""
    account_id, vault_id = (fields.path_text(request, name) for name in ("account_id", "vault_id"))
    found = await in_time(_read_vault(context, account_id, vault_id))
    if found is None:
        raise HTTPException(404)
    return found


async def _read_vault(context: ConsoleContext, account_id: str, vault_id: str) -> VaultRow | None:
    async with context.database.transaction() as connection:
        return await vault_overview.vault(connection, account_id, vault_id)


@asynccontextmanager
async def _nodes(context: ConsoleContext) -> AsyncIterator[Sources]:
    """Open the nodes. Raises `SourceUnavailable` when they do not answer in time."""
    try:
        async with asyncio.timeout(ASKED_WITHIN_S), context.sources() as sources:
            yield sources
    except TimeoutError:
        raise SourceUnavailable("the nodes", f"no answer within {ASKED_WITHIN_S:g} s") from None
