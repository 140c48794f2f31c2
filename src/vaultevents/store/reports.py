"""Published oracle reports: pending until their file is verified, kept for vaults registered later (rule C6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from vaultevents.core.actor import acting
from vaultevents.core.errors import DatabaseUnavailable, InputError
from vaultevents.core.reports import FailureKind, ReportLog
from vaultevents.core.spans import Span
from vaultevents.core.units import Address, Hash32
from vaultevents.store.audit_log import record
from vaultevents.store.pool import Connection, Database

State = Literal["pending", "resolved", "empty", "given_up"]


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A published report and what became of it.

    `vaults` counts the leaves of its tree once that is verified; `failure` and `problem` are those of the last attempt.
    """

    id: int
    log: ReportLog
    state: State
    vaults: int | None
    attempts: int
    next_attempt_at: datetime | None
    problem: str | None
    failure: FailureKind | None = None


async def add_reports(connection: Connection, logs: Sequence[ReportLog]) -> int:
    """Store published reports as pending, one without a file as done; return how many were not stored yet."""
    added = 0
    for log in logs:
        done = await connection.execute(
            "insert into reports (block_number, block_time_s, tx_hash, log_index, oracle, report_timestamp, ref_slot,"
            " root, cid, state, next_attempt_at) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10,"
            " case when $10 = 'pending' then db_now() end) on conflict (block_number, log_index) do nothing",
            log.block_number,
            log.block_time_ms // 1000,
            log.tx_hash,
            log.log_index,
            log.address,
            log.timestamp,
            log.ref_slot,
            log.root,
            log.cid,
            "empty" if log.is_empty else "pending",
        )
        added += done == "INSERT 0 1"
    return added


async def reopen_reports(connection: Connection, first_block: int, last_block: int | None = None) -> None:
    """Make resolved reports pending again, so that their files are fetched again; no event is stored twice."""
    await connection.execute(
        "update reports set state = 'pending', attempts = 0, next_attempt_at = db_now()"
        " where state = 'resolved' and block_number >= $1 and ($2::bigint is null or block_number <= $2)",
        first_block,
        last_block,
    )


async def due_reports(database: Database, limit: int) -> list[StoredReport]:
    """Pending reports whose next attempt is due, oldest first."""
    async with database.transaction() as connection:
        rows = await connection.fetch(
            "select * from reports where state = 'pending' and next_attempt_at <= db_now()"
            " order by next_attempt_at, block_number limit $1",
            limit,
        )
    return [_report(row) for row in rows]


async def reports_in(database: Database, blocks: Span) -> list[StoredReport]:
    """All reports that were published in these blocks, in chain order."""
    async with database.transaction() as connection:
        rows = await connection.fetch(
            "select * from reports where block_number between $1 and $2 order by block_number, log_index",
            blocks.first,
            blocks.last,
        )
    return [_report(row) for row in rows]


async def find_reports(database: Database, name: str | None = None) -> list[StoredReport]:
    """The newest reports, or those with this CID or timestamp."""
    async with database.transaction() as connection:
        rows = await connection.fetch(
            "select * from reports where $1::text is null or cid = $1 or report_timestamp::text = $1"
            " order by block_number desc, log_index desc limit 50",
            name,
        )
    return [_report(row) for row in rows]


async def postpone_report(
    database: Database, report_id: int, failure: FailureKind, problem: str, after_s: float
) -> None:
    """Another attempt later; a report is never given up by itself."""
    async with database.transaction() as connection:
        await connection.execute(
            "update reports set attempts = attempts + 1, failure = $2, problem = $3,"
            " next_attempt_at = db_now() + make_interval(secs => $4) where id = $1 and state = 'pending'",
            report_id,
            failure,
            problem,
            after_s,
        )


async def give_up_report(database: Database, name: str) -> list[StoredReport]:
    """An operator's word that the file of a pending report will never be had. Raises `InputError` without one."""
    async with database.transaction() as connection:
        rows = await connection.fetch(
            "update reports set state = 'given_up', next_attempt_at = null"
            " where state = 'pending' and (cid = $1 or report_timestamp::text = $1) returning *",
            name,
        )
        if not rows:
            raise InputError(f"no report with the CID or timestamp '{name}' is pending: see 'vaultevents report show'")
        for row in rows:
            before, after = {"state": "pending"}, {"state": "given_up"}
            subject = str(row["report_timestamp"])
            await record(connection, acting(), "report.give_up", subject, before=before, after=after)
        return [_report(row) for row in rows]


async def lock_report(connection: Connection, report_id: int) -> StoredReport | None:
    """Return a report, which nobody else changes until the transaction ends; None where there is none."""
    row = await connection.fetchrow("select * from reports where id = $1 for update", report_id)
    return None if row is None else _report(row)


async def mark_resolved(connection: Connection, report_id: int, vaults: int, log: ReportLog | None = None) -> None:
    """Marks a report, which is still the one of `log`: an older copy of the database may give its id to another.

    Raises `DatabaseUnavailable` where it is not.
    """
    marked = await connection.execute(
        "update reports set state = 'resolved', vaults = $2, failure = null, problem = null, next_attempt_at = null,"
        " resolved_at = db_now() where id = $1 and ($3::bigint is null or (block_number, log_index, root, cid)"
        " = ($3, $4::integer, $5::bytea, $6::text))",
        report_id,
        vaults,
        *((None,) * 4 if log is None else (log.block_number, log.log_index, log.root, log.cid)),
    )
    if marked == "UPDATE 0":
        raise DatabaseUnavailable("an older copy of the database took over while a report was read: read it again")


def _report(row: object) -> StoredReport:
    columns = dict(row)  # type: ignore[call-overload]
    log = ReportLog(
        timestamp=int(columns["report_timestamp"]),
        ref_slot=int(columns["ref_slot"]),
        root=Hash32(columns["root"]),
        cid=columns["cid"],
        block_number=columns["block_number"],
        block_time_ms=columns["block_time_s"] * 1000,
        tx_hash=Hash32(columns["tx_hash"]),
        log_index=columns["log_index"],
        address=Address(columns["oracle"]),
    )
    return StoredReport(
        columns["id"],
        log,
        columns["state"],
        columns["vaults"],
        columns["attempts"],
        columns["next_attempt_at"],
        columns["problem"],
        columns["failure"],
    )
