"""Webhooks: find them by their state, and see of one why it fails and what has to be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vaultevents.console import fields
from vaultevents.console.context import ConsoleContext, in_time
from vaultevents.console.rendering import number_text, render
from vaultevents.core.errors import InputError
from vaultevents.core.failure_advice import Advice, explain
from vaultevents.store import resends, webhook_search
from vaultevents.store.history import DeliveryState
from vaultevents.store.resends import TestResult
from vaultevents.store.webhook_search import (
    DELIVERY_STATES,
    WEBHOOK_STATES,
    DeliveryFilter,
    DeliveryPage,
    FailedAttempt,
    RecentAttempts,
    SecretFacts,
    WebhookFilter,
    WebhookPage,
    WebhookRow,
)

ROWS: Final = 50
FAILURES: Final = 10
DELIVERIES: Final = 20
EMPTY: Final = WebhookPage((), None)
WAITING_REFRESH_S: Final = 2
"""How often the page loads itself again while a test is under way."""

_DONE: Final[Mapping[str, str]] = {
    "enable": "The webhook is on: its failures are forgotten, and what was kept for it is being sent.",
    "pause": "The webhook is paused: events are kept for it and sent afterwards.",
    "resend": "One more attempt was asked for. Its result is on the page of the event.",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """Failures of one kind among the last ones, and what to do about them."""

    answer: str
    number: int
    advice: Advice
    newest: FailedAttempt


@dataclass(frozen=True, slots=True)
class WebhookView:
    """What the page of one webhook shows."""

    row: WebhookRow
    counts: Mapping[DeliveryState, int]
    recent: RecentAttempts
    failures: list[FailedAttempt]
    secrets: list[SecretFacts]
    deliveries: DeliveryPage
    test: TestResult | None
    now: datetime


def routes(context: ConsoleContext) -> list[Route]:
    """Return the routes of `/webhooks` and of each webhook below it."""

    async def search(request: Request) -> Response:
        query = request.query_params
        problem, page, counts = None, EMPTY, dict[str, int]()
        try:
            wanted = WebhookFilter(
                fields.text(query, "account"),
                fields.choice(query, "state", WEBHOOK_STATES),
                fields.text(query, "text"),
            )
            page, counts = await in_time(_search(context, wanted, fields.text(query, "before")))
        except InputError as error:
            problem = f"{error}."
        given = fields.shown(query, ("account", "state", "text"))
        return render(
            request,
            "webhooks.html",
            400 if problem else 200,
            page=page,
            counts=counts,
            given=given,
            filtered=any(given.values()),
            problem=problem,
            states=WEBHOOK_STATES,
            pending_counted=webhook_search.PENDING_COUNTED,
        )

    async def show(request: Request) -> Response:
        webhook_id = fields.path_text(request, "webhook_id")
        query = request.query_params
        state = fields.choice(query, "state", DELIVERY_STATES)
        test_id = fields.text(query, "test")
        wanted = DeliveryFilter(webhook_id=webhook_id, state=state)
        view = await in_time(_read(context, webhook_id, wanted, fields.number(query, "before"), test_id))
        if view is None:
            raise HTTPException(404)
        return render(
            request,
            "webhook.html",
            view=view,
            hook=view.row.webhook,
            sentence=_sentence(view.row),
            causes=causes(view.failures) if view.row.state not in ("on", "deleted") else [],
            explain=explain,
            state=state or "",
            states=DELIVERY_STATES,
            test_id=test_id,
            done=_done(query),
            refresh_s=WAITING_REFRESH_S if test_id is not None and view.test is None else None,
            pending_counted=webhook_search.PENDING_COUNTED,
        )

    return [Route("/webhooks", search), Route("/webhooks/{webhook_id}", show)]


async def _search(
    context: ConsoleContext, wanted: WebhookFilter, before: str | None
) -> tuple[WebhookPage, dict[str, int]]:
    async with context.database.transaction() as connection:
        page = await webhook_search.search(connection, wanted, before, ROWS)
        return page, dict(await webhook_search.count_states(connection))


async def _read(
    context: ConsoleContext, webhook_id: str, wanted: DeliveryFilter, before: int | None, test_id: str | None
) -> WebhookView | None:
    now = await context.database.now()
    async with context.database.transaction() as connection:
        row = await webhook_search.webhook(connection, webhook_id)
        if row is None:
            return None
        return WebhookView(
            row,
            await webhook_search.delivery_counts(connection, webhook_id),
            await webhook_search.recent_attempts(connection, webhook_id),
            await webhook_search.last_failures(connection, webhook_id, FAILURES),
            await webhook_search.secrets_of(connection, webhook_id),
            await webhook_search.deliveries(connection, wanted, before, DELIVERIES),
            None if test_id is None else await resends.test_result(connection, webhook_id, test_id),
            now,
        )


def causes(failures: Sequence[FailedAttempt]) -> list[Cause]:
    """Group the last failures by their answer, those of the newest first."""
    found: dict[str, list[FailedAttempt]] = {}
    for failure in failures:
        answer = failure.attempt.error if failure.attempt.status is None else str(failure.attempt.status)
        found.setdefault(answer or "unknown", []).append(failure)
    return [
        Cause(answer, len(same), explain(same[0].attempt.status, same[0].attempt.error), same[0])
        for answer, same in found.items()
    ]


def _sentence(row: WebhookRow) -> str:
    """Say in what state the webhook is, and what follows from it."""
    match row.state:
        case "deleted":
            return "It is deleted; its history is kept."
        case "off" if row.disabled_reason == "gone":
            return "Its receiver answered 410 (gone), so it was switched off. What is pending is kept; nothing is sent."
        case "off" if row.disabled_reason == "failing":
            return "It was switched off because it failed for days. What is pending is kept; nothing is sent."
        case "off":
            return "Its account switched it off. What is pending is kept; nothing is sent."
        case "paused" if row.is_paused_for_good:
            return "It is paused until somebody switches it on. Events are kept and sent afterwards."
        case "paused":
            return "It is paused, as its receiver or an operator asked. Events are kept and sent afterwards."
        case "parked":
            return "It rests after failures in a row. Afterwards one delivery at a time is tried."
        case "failing":
            return "Its last attempts failed, and are repeated by the schedule."
        case _:
            return "It is on, and its last attempt was accepted."


def _done(query: Mapping[str, Any]) -> str | None:
    """Return what an action that led here did."""
    done = query.get("done", "")
    if done != "recover":
        return _DONE.get(done)
    count, rest = fields.number(query, "count") or 0, fields.moment(query, "rest")
    more = "" if rest is None else f" There is more: recover again from {rest.isoformat()} on."
    return f"{number_text(count)} attempts were asked for, of events that were neither delivered nor pending.{more}"
