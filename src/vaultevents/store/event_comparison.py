"""What is stored of a span of blocks, held against what the chain gives for it: for `audit chain` and the audit pass.

Rows first seen near the head are counted apart: such a row may keep the bytes of a block that is gone (rule C1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vaultevents.core.events import Event, FundingReceived, WithdrawalClaimed
from vaultevents.core.reports import ReportLog
from vaultevents.core.spans import Span
from vaultevents.store.pool import Connection
from vaultevents.store.sessions import allow

EVENT_TYPES: Final = (FundingReceived.event_type, WithdrawalClaimed.event_type)
"""Those of the stream `logs`."""
ROWS_AT_ONCE: Final = 2_000
SORTED_WITHIN_S: Final = 86_400.0  # the server sorts first, and answers nothing until then

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many rows are what the chain gives, and the ids of those that are not there, are there without a log, or
    differ; `near_head` are those without a log or different that were first seen near the head.
    """

    same: int = 0
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    near_head: tuple[str, ...] = ()


async def compare_events(connection: Connection, span: Span, events: Sequence[Event]) -> Comparison:
    """The rows of the two contract events in `span`, against `events`: all that the chain has for the registry.

    A row is the same when all derived parts are: body by its encoding's version (rule E16), vault, type and block.
    """
    derived: dict[_Key, Event] = {}
    for event in events:
        derived.setdefault(event.key, event)  # a queue may emit one claim twice: first wins
    stored = {_key(row): row for row in await connection.fetch(_IN_SPAN, EVENT_TYPES, *_ends(span))}
    elsewhere = derived.keys() - stored.keys()  # a row in another block is no missing one, but a different one
    if elsewhere:
        accounts, ids = zip(*elsewhere, strict=True)
        stored |= {_key(row): row for row in await connection.fetch(_OF_KEYS, accounts, ids)}
    near = {key for key, row in stored.items() if row["near_head"]}
    extra = stored.keys() - derived.keys()
    different = {key for key, row in stored.items() if key in derived and not _is_same(row, derived[key])}
    return Comparison(
        len(stored) - len(extra) - len(different),
        _ids(derived.keys() - stored.keys()),
        _ids(extra - near),
        _ids(different - near),
        _ids((extra | different) & near),
    )


async def compare_reports(
    connection: Connection, span: Span, logs: Sequence[ReportLog], others: Collection[ReportLog] = ()
) -> Comparison:
    """The published reports that are kept of `span`, against `logs`; those of `others` may be kept, too.

    One without a log is extra where somebody is registered for its block: elsewhere nobody asked for logs.
    """
    rows = await connection.fetch(
        "select exists (select from vault_spans s where s.first_block <= r.block_number"
        "  and (s.last_block is null or r.block_number <= s.last_block)) as is_due,"
        " block_number, log_index, report_timestamp::text, ref_slot::text, root, cid, tx_hash, oracle, block_time_s"
        " from reports r where block_number between $1 and $2",
        *_ends(span),
    )
    stored = {(row["block_number"], row["log_index"]): tuple(row)[3:] for row in rows}
    due = {(row["block_number"], row["log_index"]) for row in rows if row["is_due"]}
    derived = {(log.block_number, log.log_index): _content(log) for log in logs}
    allowed = {(log.block_number, log.log_index): _content(log) for log in others} | derived
    both = stored.keys() & allowed.keys()
    different = [key for key in both if stored[key] != allowed[key]]
    return Comparison(
        len(both) - len(different),
        _places(derived.keys() - stored.keys()),
        _places(due - allowed.keys()),
        _places(different),
    )


def place_of_report(block_number: int, log_index: int) -> str:
    """Name a report in a `Comparison`."""
    return f"report in block {block_number}, log {log_index}"


async def body_digest(connection: Connection, span: Span) -> str:
    """SHA-256, in hex, over what is stored of the two contract events in `span`.

    A line `account_id id body` with a line feed for each, sorted by the bytes of account id, then id: the same wherever
    the same accounts and vaults are registered. Must run in a transaction; memory does not grow with the rows.
    """
    lines = hashlib.sha256()
    await allow(connection, SORTED_WITHIN_S)
    rows = connection.cursor(
        _SORTED,
        EVENT_TYPES,
        *_ends(span),
        prefetch=ROWS_AT_ONCE,
        timeout=SORTED_WITHIN_S,
    )
    async for account_id, event_id, body in rows:
        lines.update(b"%b %b %b\n" % (account_id.encode(), event_id.encode(), body))
    return lines.hexdigest()


async def stored_blocks(connection: Connection, stream: str, span: Span) -> list[int]:
    """List the blocks of `span` of which something is stored that came from a log of the stream."""
    rows = await connection.fetch(
        "select block_number from quarantined_logs where stream = $1 and block_number between $2 and $3 union"
        " select block_number from reports where $1 = 'reports' and block_number between $2 and $3 union"
        " select block_number from events"
        " where $1 = 'logs' and event_type = any($4) and block_number between $2 and $3",
        stream,
        *_ends(span),
        EVENT_TYPES,
    )
    return [row["block_number"] for row in rows]


_IN_SPAN = """
select account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, near_head
from events where event_type = any($1) and block_number between $2 and $3
"""
_OF_KEYS = """
select account_id, id, vault_id, event_type, block_number, created_at_ms, encoding, body, near_head
from events join unnest($1::text[], $2::text[]) as k (account_id, id) using (account_id, id)
"""
_SORTED = """
select account_id, id, body from events where event_type = any($1) and block_number between $2 and $3
order by account_id collate "C", id collate "C"
"""


def _key(row: Any) -> _Key:
    return row["account_id"], row["id"]


def _ends(span: Span) -> tuple[int, int]:
    return span.first, span.last


def _ids(keys: Collection[_Key]) -> tuple[str, ...]:
    return tuple(event_id for _, event_id in sorted(keys))


def _places(keys: Collection[tuple[int, int]]) -> tuple[str, ...]:
    return tuple(place_of_report(number, index) for number, index in sorted(keys))


def _is_same(row: Any, event: Event) -> bool:
    seen = event.observation
    columns = (event.owner.vault_id, event.event_type, seen.block, seen.at_ms)
    stored = (row["vault_id"], row["event_type"], row["block_number"], row["created_at_ms"])
    return columns == stored and event.body_in(row["encoding"]) == row["body"]


def _content(log: ReportLog) -> tuple[Any, ...]:
    return (
        *(str(log.timestamp), str(log.ref_slot), log.root, log.cid, log.tx_hash, log.address),
        log.block_time_ms // 1000,
    )
