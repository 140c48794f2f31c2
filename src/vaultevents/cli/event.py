"""event: the events that are stored; list and show them, follow new ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from vaultevents.cli.delivery import attempts_table, delivery_json
from vaultevents.cli.options import BeforeOption, ConfigOption, JsonOption, LimitOption, one_of, time_of
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import (
    Fact,
    complete,
    printable,
    put,
    put_bytes,
    put_json,
    put_page,
    put_table,
    say,
    stopping,
)
from vaultevents.config import Settings
from vaultevents.core.errors import DatabaseUnavailable, InputError
from vaultevents.core.events import EVENT_TYPES
from vaultevents.store import event_search, webhook_search
from vaultevents.store.event_search import EventFilter, EventPage, EventRow, StoredEvent
from vaultevents.store.history import AttemptFacts
from vaultevents.store.pool import Database
from vaultevents.store.webhook_search import DeliveryRow
from vaultevents.wiring.database import open_store

event = typer.Typer(help="Stored events: list, show, follow.", no_args_is_help=True)

TAIL_EVERY_S: Final = 1.0
PAGE: Final = 200
GAP_S: Final = 60.0
"""A number that is missing for so long belongs to nothing: its transaction was rolled back."""
WEBHOOKS_SHOWN: Final = 500

TypeOption = Annotated[
    str | None, typer.Option("--type", help="Only this type, such as funding_received.", metavar="TYPE")
]
AccountOption = Annotated[str | None, typer.Option("--account", help="Only this account.", metavar="ACCOUNT")]
VaultOption = Annotated[str | None, typer.Option("--vault", help="Only this vault.", metavar="VAULT")]


@event.command("list")
def event_list(
    event_type: TypeOption = None,
    account: AccountOption = None,
    vault: VaultOption = None,
    since: Annotated[
        str | None, typer.Option(help="From this time on: RFC 3339, or 24h for a day ago.", metavar="TIME")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Before this time, likewise.", metavar="TIME")] = None,
    event_id: Annotated[str | None, typer.Option("--id", help="An id, or the beginning of one.", metavar="ID")] = None,
    block: Annotated[int | None, typer.Option(min=0, help="Only of this block.", metavar="BLOCK")] = None,
    tx: Annotated[str | None, typer.Option(help="Only of this transaction.", metavar="HASH")] = None,
    limit: LimitOption = 50,
    before: BeforeOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List stored events, newest first.

    A page looks at a limited number of rows. Where it says so, go on with --before, also if it shows none.
    """
    _check_type(event_type)
    settings, now = settings_of(config), datetime.now(UTC)
    wanted = EventFilter(
        event_type,
        account,
        vault,
        None if since is None else time_of(since, "--since", now),
        None if until is None else time_of(until, "--until", now),
        event_id,
        block,
        tx,
    )

    async def work() -> EventPage:
        async with open_store(settings) as store, store.database.statement() as connection:
            return await event_search.search(connection, wanted, before, limit)

    page = complete(work())
    if as_json:
        rows = [_row_json(row) for row in page.rows]
        put_json({"events": rows, "next": page.next_before, "scanned": page.scanned})
        return
    put_page(
        ("time", "type", "account", "vault", "block", "state", "id"),
        [
            (_at(row), row.event_type, row.account_id, row.vault_id, row.block_number, _state(row), row.id)
            for row in page.rows
        ],
        page.next_before,
        "no stored event matches" if page.scanned is None else f"none of the {page.scanned:,} events looked at matches",
    )


@event.command("show")
def event_show(
    event_id: Annotated[str, typer.Argument(help="The event's id.", metavar="EVENT")],
    body: Annotated[
        bool, typer.Option("--body", help="Write only the body, byte for byte as it is POSTed: to a file or a pipe.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one event with its body, and what became of it at each webhook."""
    settings = settings_of(config)
    found, deliveries, attempts = complete(_find(settings, event_id, with_deliveries=not body))
    if body:
        put_bytes(found.body)
        return
    if as_json:
        put_json(
            {
                **_row_json(found.row),
                "body": found.body.decode(),
                "encoding": found.encoding,
                "filterRevision": found.filter_revision,
                "deliveries": [delivery_json(row, attempts.get(row.id, ())) for row in deliveries],
            }
        )
        return
    row = found.row
    put(
        [
            Fact("event", row.id),
            Fact("type", row.event_type),
            Fact("account", row.account_id),
            Fact("vault", row.vault_id),
            Fact("block", "-" if row.block_number is None else str(row.block_number)),
            Fact("time", _at(row)),
            Fact("stored", row.stored_at.isoformat(timespec="seconds")),
            Fact("state", _state(row) or "final"),
            Fact("body", found.body.decode()),
        ]
    )
    put_table(
        ("delivery", "webhook", "state", "attempts", "next attempt"),
        [
            (
                *(delivery.id, delivery.webhook_id, delivery.state, delivery.attempts),
                delivery.next_attempt_at and delivery.next_attempt_at.isoformat(timespec="seconds"),
            )
            for delivery in deliveries
        ],
        "no webhook matched this event when it was stored",
    )
    for delivery in deliveries:
        if made := attempts.get(delivery.id):
            say("")
            put([Fact("attempts", f"to {delivery.webhook_id}"), attempts_table(made)])


async def _find(
    settings: Settings, event_id: str, *, with_deliveries: bool
) -> tuple[StoredEvent, list[DeliveryRow], dict[int, list[AttemptFacts]]]:
    async with open_store(settings) as store, store.database.statement() as connection:
        found = await event_search.event_by_id(connection, event_id)
        if found is None:
            raise InputError(
                f"no event '{event_id}' is stored: 'vaultevents event list --id' finds one by its beginning"
            )
        if not with_deliveries:
            return found, [], {}
        deliveries = await webhook_search.deliveries_of(connection, found.row.seq, limit=WEBHOOKS_SHOWN)
        return found, deliveries, dict(await webhook_search.attempts_of(connection, deliveries))


@event.command("tail")
def event_tail(
    event_type: TypeOption = None,
    account: AccountOption = None,
    vault: VaultOption = None,
    lines: Annotated[int, typer.Option(min=0, max=PAGE, help="How many stored ones first.", metavar="N")] = 10,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on a line for each event.")] = False,
) -> None:
    """Follow new events until Ctrl-C or SIGTERM, after the newest that are stored."""
    _check_type(event_type)
    wanted = EventFilter(event_type, account, vault)
    complete(_tail(settings_of(config), wanted, lines, _put_row_json if as_json else _say_row))


class NewEvents:
    """Recognise rows that were not seen yet, by their numbers.

    A number may become visible after higher ones, when its transaction commits later. All numbers up to `floor` are
    seen, or were missing for `GAP_S`: those were never stored.
    """

    def __init__(self, numbers: Iterable[int], now_s: float) -> None:
        self._seen = set(numbers)
        self.floor = min(self._seen, default=1) - 1
        self._since_s = now_s
        self._advance(now_s)

    def take(self, rows: Iterable[EventRow], now_s: float) -> list[EventRow]:
        """Return the rows that are new, in the order of their numbers."""
        unseen = {row.seq: row for row in rows if row.seq > self.floor and row.seq not in self._seen}
        self._seen |= unseen.keys()
        self._advance(now_s)
        return [row for _, row in sorted(unseen.items())]

    def _advance(self, now_s: float) -> None:
        if self._seen and now_s - self._since_s >= GAP_S:
            self.floor = max(self.floor, min(self._seen) - 1)
        while self.floor + 1 in self._seen:
            self.floor += 1
            self._since_s = now_s
            self._seen.remove(self.floor)


async def _tail(settings: Settings, wanted: EventFilter, lines: int, show: Callable[[EventRow], None]) -> None:
    stop = asyncio.Event()
    async with open_store(settings) as store:
        with stopping(stop):
            async with store.database.transaction() as connection:
                await connection.execute("set transaction isolation level repeatable read, read only")
                newest = await event_search.search(connection, EventFilter(), None, PAGE)
                first = await event_search.search(connection, wanted, None, lines) if lines else EventPage((), None)
            new = NewEvents((row.seq for row in newest.rows), time.monotonic())
            for row in sorted(first.rows, key=lambda row: row.seq):
                show(row)
            while not stop.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), TAIL_EVERY_S)
                with suppress(DatabaseUnavailable):  # asked again: nothing is missed
                    for row in new.take(await _above(store.database, new.floor), time.monotonic()):
                        if _matches(wanted, row):
                            show(row)


async def _above(database: Database, floor: int) -> list[EventRow]:
    """Return all events with higher numbers than `floor`."""
    found: list[EventRow] = []
    before = None
    async with database.statement() as connection:
        while True:
            page = await event_search.search(connection, EventFilter(), before, PAGE)
            found += [row for row in page.rows if row.seq > floor]
            before = page.next_before
            if before is None or before <= floor:
                return found


def _matches(wanted: EventFilter, row: EventRow) -> bool:
    pairs = (
        (wanted.event_type, row.event_type),
        (wanted.account_id, row.account_id),
        (wanted.vault_id, row.vault_id),
    )
    return all(value is None or value == found for value, found in pairs)


def _say_row(row: EventRow) -> None:
    block = "-" if row.block_number is None else row.block_number
    say(printable(f"{_at(row)}  {row.event_type:<24}  {row.account_id}/{row.vault_id}  {block}  {row.id}"))


def _put_row_json(row: EventRow) -> None:
    put_json(_row_json(row))


def _row_json(row: EventRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "seq": row.seq,
        "accountId": row.account_id,
        "stakingVaultId": row.vault_id,
        "eventType": row.event_type,
        "blockNumber": row.block_number,
        "createdAt": row.created_at,
        "storedAt": row.stored_at,
        "suppressed": row.suppressed,
        "nearHead": row.near_head,
        "orphanedAt": row.orphaned_at,
    }


def _state(row: EventRow) -> str | None:
    """What is special about an event."""
    if row.orphaned_at is not None:
        return "orphaned"
    return "suppressed" if row.suppressed else "near head" if row.near_head else None


def _at(row: EventRow) -> str:
    return row.created_at.isoformat(timespec="seconds")


def _check_type(event_type: str | None) -> None:
    if event_type is not None:
        one_of(tuple(EVENT_TYPES), event_type, "--type")
