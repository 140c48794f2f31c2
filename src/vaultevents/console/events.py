"""Events: search them, and see one with its bytes, its source and what each webhook answered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from vaultevents.console import fields
from vaultevents.console.charts import swatch, timing_bar
from vaultevents.console.context import ConsoleContext, in_time
from vaultevents.console.links import event_url
from vaultevents.console.rendering import render
from vaultevents.console.timings import PHASES, phases, scale_ms
from vaultevents.core.errors import InputError
from vaultevents.core.events import EVENT_TYPES, ReportUpdateAvailable, type_and_account
from vaultevents.core.failure_advice import Advice, explain
from vaultevents.core.units import hex_text
from vaultevents.store import event_search, webhook_search
from vaultevents.store.event_search import EventFilter, EventPage, StoredEvent
from vaultevents.store.history import AttemptFacts
from vaultevents.store.reports import StoredReport, find_reports
from vaultevents.store.webhook_search import DeliveryRow

ROWS: Final = 50
WEBHOOKS: Final = 20
"""Webhooks of one event on one page: each comes with all its attempts."""

FIELDS: Final = ("type", "account", "vault", "since", "until", "id", "block", "tx")
EMPTY: Final = EventPage((), None)

# Names in the payload -> what the page calls them; those that say where on the chain the event comes from.
_SOURCES: Final[Mapping[str, str]] = {
    "tx_hash": "Transaction",
    "staking_vault_address": "Vault contract",
    "withdrawal_queue_address": "Withdrawal queue contract",
    "request_id": "Withdrawal request",
    "epoch": "Epoch",
    "validator_index": "Validator",
    "validator_pubkey": "Public key of the validator",
    "report_timestamp": "Timestamp of the report",
}


@dataclass(frozen=True, slots=True)
class AttemptView:
    """An attempt, what it means if it failed, and its phases as a bar."""

    facts: AttemptFacts
    accepted: bool
    advice: Advice | None
    bar: Markup


@dataclass(frozen=True, slots=True)
class DeliveryView:
    """A delivery of the event with its attempts."""

    facts: DeliveryRow
    attempts: list[AttemptView]


def routes(context: ConsoleContext) -> list[Route]:
    """Return the routes of `/events` and of each event below it."""

    async def search(request: Request) -> Response:
        query = request.query_params
        problem, page = None, EMPTY
        try:
            wanted, before = _filter(query), fields.number(query, "before")
            page = await in_time(_search(context, wanted, before))
        except InputError as error:
            problem = f"{error}."
        given = fields.shown(query, FIELDS)
        return render(
            request,
            "events.html",
            400 if problem else 200,
            page=page,
            given=given,
            filtered=any(given.values()),
            problem=problem,
            types=EVENT_TYPES,
        )

    async def by_id(request: Request) -> Response:
        event_id = fields.path_text(request, "event_id")
        named = type_and_account(event_id)
        if named is None:
            raise HTTPException(404)
        return RedirectResponse(event_url(named[1], event_id), 303)

    async def show(request: Request) -> Response:
        account_id, event_id = (fields.path_text(request, name) for name in ("account_id", "event_id"))
        after = fields.text(request.query_params, "after") or ""
        found = await in_time(_read(context, account_id, event_id, after))
        if found is None:
            raise HTTPException(404)
        event, deliveries, attempts = found
        more = len(deliveries) > WEBHOOKS
        shown = deliveries[:WEBHOOKS]
        full_ms = scale_ms([attempt for delivery in shown for attempt in attempts.get(delivery.id, [])])
        views = [DeliveryView(row, [_view(facts, full_ms) for facts in attempts.get(row.id, [])]) for row in shown]
        return render(
            request,
            "event.html",
            event=event.row,
            body=event.body.decode(errors="backslashreplace"),
            pretty=_pretty(event.body),
            body_bytes=len(event.body),
            sha256=hashlib.sha256(event.body).hexdigest(),
            encoding=event.encoding,
            filter_revision=event.filter_revision,
            source=_source(event),
            report=await in_time(_report(context, event)),
            hex_text=hex_text,
            deliveries=views,
            after=after,
            next_after=shown[-1].webhook_id if more else None,
            phases=PHASES,
            swatch=swatch,
            full_ms=full_ms,
            done=_done(request),
        )

    return [
        Route("/events", search),
        Route("/events/{event_id}", by_id),
        Route("/events/{account_id}/{event_id:path}", show),
    ]


def _done(request: Request) -> str | None:
    """Return what an action that led here did."""
    if request.query_params.get("done") != "resend":
        return None
    return "One more attempt was asked for. It appears below when it is over: load the page again."


def _filter(query: Mapping[str, str]) -> EventFilter:
    """Read the filter of a query. Raises `InputError`."""
    return EventFilter(
        event_type=fields.choice(query, "type", EVENT_TYPES),
        account_id=fields.text(query, "account"),
        vault_id=fields.text(query, "vault"),
        since=fields.moment(query, "since"),
        until=fields.moment(query, "until"),
        id=fields.text(query, "id"),
        block=fields.number(query, "block"),
        tx_hash=fields.text(query, "tx"),
    )


async def _search(context: ConsoleContext, wanted: EventFilter, before: int | None) -> EventPage:
    async with context.database.transaction() as connection:
        return await event_search.search(connection, wanted, before, ROWS)


async def _read(
    context: ConsoleContext, account_id: str, event_id: str, after: str
) -> tuple[StoredEvent, list[DeliveryRow], Mapping[int, list[AttemptFacts]]] | None:
    async with context.database.transaction() as connection:
        event = await event_search.event(connection, account_id, event_id)
        if event is None:
            return None
        deliveries = await webhook_search.deliveries_of(connection, event.row.seq, after, WEBHOOKS + 1)
        return event, deliveries, await webhook_search.attempts_of(connection, deliveries[:WEBHOOKS])


async def _report(context: ConsoleContext, event: StoredEvent) -> StoredReport | None:
    """Return the published report of an event that comes from one, with the root that proves it."""
    if event.row.event_type != ReportUpdateAvailable.event_type:
        return None
    timestamp = event.row.id.rpartition("_")[2]
    found = await find_reports(context.database, timestamp)
    return found[0] if found else None


def _pretty(body: bytes) -> str | None:
    """Return the body with a line for each value; None for what is no JSON."""
    try:
        return msgspec.json.format(body, indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _source(event: StoredEvent) -> list[tuple[str, str]]:
    """Return where on the chain the event comes from: its block, and what its payload says of it."""
    found = [] if event.row.block_number is None else [("Block", str(event.row.block_number))]
    try:
        payload = msgspec.json.decode(event.body)["payload"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return found
    if not isinstance(payload, dict):
        return found
    return found + [(title, str(payload[name])) for name, title in _SOURCES.items() if name in payload]


def _view(facts: AttemptFacts, full_ms: int) -> AttemptView:
    bar = timing_bar(phases(facts), full_ms, f"{facts.duration_ms} ms")
    accepted = facts.status is not None and 200 <= facts.status < 300
    return AttemptView(facts, accepted, None if accepted else explain(facts.status, facts.error), bar)
