"""delivery: what became of events at webhooks; list deliveries, show one with its attempts."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any

import typer

from vaultevents.cli.options import BeforeOption, ConfigOption, JsonOption, LimitOption, one_of
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import Fact, Rows, complete, put, put_json, put_page
from vaultevents.core.errors import InputError
from vaultevents.store import webhook_search
from vaultevents.store.history import AttemptFacts
from vaultevents.store.webhook_search import DELIVERY_STATES, DeliveryFilter, DeliveryPage, DeliveryRow
from vaultevents.wiring.database import open_store

delivery = typer.Typer(help="Deliveries of events to webhooks, with their attempts: list, show.", no_args_is_help=True)


@delivery.command("list")
def delivery_list(
    webhook: Annotated[str | None, typer.Option(help="Only to this webhook.", metavar="WEBHOOK")] = None,
    account: Annotated[str | None, typer.Option(help="Only of this account.", metavar="ACCOUNT")] = None,
    state: Annotated[str | None, typer.Option(help=f"Only {', '.join(DELIVERY_STATES)}.", metavar="STATE")] = None,
    limit: LimitOption = 50,
    before: BeforeOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List deliveries, newest first."""
    wanted = DeliveryFilter(account, webhook, None if state is None else one_of(DELIVERY_STATES, state, "--state"))
    settings = settings_of(config)

    async def work() -> DeliveryPage:
        async with open_store(settings) as store, store.database.statement() as connection:
            return await webhook_search.deliveries(connection, wanted, before, limit)

    page = complete(work())
    if as_json:
        rows = [delivery_json(row) for row in page.rows]
        put_json({"deliveries": rows, "next": page.next_before, "scanned": page.scanned})
        return
    put_page(
        ("delivery", "created", "state", "attempts", "next attempt", "webhook", "event"),
        [
            (row.id, _at(row.created_at), row.state, row.attempts, _next(row), row.webhook_id, row.event_id)
            for row in page.rows
        ],
        page.next_before,
        "no delivery matches" if page.scanned is None else f"none of the {page.scanned:,} deliveries looked at matches",
    )


@delivery.command("show")
def delivery_show(
    delivery_id: Annotated[
        int, typer.Argument(help="A number, as 'delivery list' shows it.", metavar="DELIVERY", min=1)
    ],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one delivery with every attempt: when, how long, and what the receiver answered."""
    settings = settings_of(config)

    async def work() -> tuple[DeliveryRow, list[AttemptFacts]]:
        async with open_store(settings) as store, store.database.statement() as connection:
            row = await webhook_search.delivery(connection, delivery_id)
            if row is None:
                raise InputError(f"there is no delivery {delivery_id}: 'vaultevents delivery list' shows them")
            return row, (await webhook_search.attempts_of(connection, [row])).get(row.id, [])

    row, attempts = complete(work())
    if as_json:
        put_json(delivery_json(row, attempts))
        return
    put(
        [
            Fact("delivery", str(row.id)),
            Fact("event", row.event_id),
            Fact("webhook", f"{row.webhook_id} of account {row.account_id}"),
            Fact("state", f"{row.state}{', recovered' if row.recovered else ''}"),
            Fact("created", _at(row.created_at) or "-"),
            Fact("next", _next(row) or "-"),
            Fact("finished", _at(row.finished_at) or "-"),
            attempts_table(attempts),
        ]
    )


def attempts_table(attempts: Iterable[AttemptFacts]) -> Rows:
    """Make the table of attempts, with the phases of each in milliseconds."""
    return Rows.of(
        ("attempt", "started", "ms", "dns", "connect", "tls", "first byte", "address", "outcome"),
        [
            (
                "resend" if attempt.resend else attempt.number,
                _at(attempt.started_at),
                attempt.duration_ms,
                *(attempt.timing.dns_ms, attempt.timing.connect_ms, attempt.timing.tls_ms),
                attempt.timing.first_byte_ms,
                attempt.address,
                outcome(attempt),
            )
            for attempt in attempts
        ],
        "no attempt was made yet, or they were pruned",
    )


def outcome(attempt: AttemptFacts) -> str:
    """What the receiver answered, or why there was no answer."""
    if attempt.error is not None:
        return f"failed: {attempt.error}"
    accepted = attempt.status is not None and 200 <= attempt.status < 300
    said = f": {attempt.excerpt}" if attempt.excerpt else ""
    return f"{'accepted' if accepted else 'failed'}, status {attempt.status}{said}"


def delivery_json(row: DeliveryRow, attempts: Iterable[AttemptFacts] | None = None) -> dict[str, Any]:
    """The object of one delivery, with its attempts where they are given."""
    facts: dict[str, Any] = {
        "id": row.id,
        "accountId": row.account_id,
        "webhookId": row.webhook_id,
        "eventId": row.event_id,
        "eventType": row.event_type,
        "state": row.state,
        "inFlight": row.in_flight,
        "attempts": row.attempts,
        "createdAt": row.created_at,
        "nextAttemptAt": row.next_attempt_at,
        "finishedAt": row.finished_at,
        "recovered": row.recovered,
    }
    return facts if attempts is None else {**facts, "attempted": [attempt_json(attempt) for attempt in attempts]}


def attempt_json(attempt: AttemptFacts) -> dict[str, Any]:
    """The object of one attempt; its times are in milliseconds."""
    return {
        "number": attempt.number,
        "resend": attempt.resend,
        "startedAt": attempt.started_at,
        "durationMs": attempt.duration_ms,
        "status": attempt.status,
        "error": attempt.error,
        "excerpt": attempt.excerpt,
        "address": attempt.address,
        "dnsMs": attempt.timing.dns_ms,
        "connectMs": attempt.timing.connect_ms,
        "tlsMs": attempt.timing.tls_ms,
        "firstByteMs": attempt.timing.first_byte_ms,
    }


def _next(row: DeliveryRow) -> str | None:
    return "under way" if row.in_flight else _at(row.next_attempt_at)


def _at(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds")
