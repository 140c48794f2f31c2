"""The audit log: every administrative act, in the transaction of its change and in a chain of hashes (rule T22).

The store function that makes a change records it, as the last thing that it does: the log is locked from then until
the transaction ends. Who acts is named once, where the work begins (`core/actor.py`):

    with acting_as("cli:alice"):
        await switch_on(database, webhook_id)        # records ('cli:alice', 'webhook.enable', webhook_id, …)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from vaultevents.core.audit_chain import FIRST_LINK, AuditEntry, problem_of, state_digest
from vaultevents.store.pool import Connection
from vaultevents.store.sessions import allow

ROWS_AT_ONCE: Final = 2_000
VERIFY_S: Final = 600.0


async def record(
    connection: Connection,
    actor: str,
    action: str,
    subject: str,
    *,
    account_id: str | None = None,
    before: object = None,
    after: object = None,
) -> None:
    """Append an entry inside the caller's transaction; call it last, since the log stays locked until the commit.

    Of the states before and after only digests are stored; they hold no secret all the same. An act that left the state
    as it was is not recorded.
    """
    before_digest, after_digest = state_digest(before), state_digest(after)
    if before_digest is not None and before_digest == after_digest:
        return
    await connection.execute(_APPEND, actor, action, subject, account_id, before_digest, after_digest)


_APPEND = "select append_audit_entry($1, $2, $3, $4, $5, $6)"


async def entries(
    connection: Connection,
    *,
    account_id: str | None = None,
    action: str | None = None,
    since: datetime | None = None,
    before: int | None = None,
    limit: int = 50,
) -> list[AuditEntry]:
    """Return up to `limit` entries, newest first: those with a number below `before`.

    `action` is the name of an action or the part of it before the point, as `webhook`.
    """
    rows = await connection.fetch(_NEWEST, account_id, action, since, before, limit)
    return [AuditEntry(**row) for row in rows]


_NEWEST = """
select * from audit_log
where ($1::text is null or account_id = $1) and ($2::text is null or action = $2 or starts_with(action, $2 || '.'))
    and ($3::timestamptz is null or at >= $3) and ($4::bigint is null or seq < $4)
order by seq desc limit $5
"""


@dataclass(frozen=True, slots=True)
class BadEntry:
    """The first entry that breaks the chain, and how."""

    seq: int
    problem: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verification found: how many rows hold, and the hash of the last of them.

    `noted_seq` is the entry that has the hash that was noted earlier; None where none has it, or none was given.
    """

    rows: int
    head_hash: bytes
    first_bad: BadEntry | None
    noted_seq: int | None = None


async def verify(connection: Connection, noted_hash: bytes | None = None) -> Verified:
    """Compute the chain again, from the first entry to the last, or to the first that breaks it.

    `noted_hash` is the hash of the last entry at an earlier time: no later change can hide that entries after or before
    it were removed, as long as it is noted elsewhere.
    """
    await allow(connection, VERIFY_S)
    last: AuditEntry | None = None
    found = Verified(0, FIRST_LINK, None, 0 if noted_hash == FIRST_LINK else None)
    while page := await connection.fetch(_PAGE, found.rows + 1 if found.rows else _LOWEST, ROWS_AT_ONCE):
        for row in page:
            entry = AuditEntry(**row)
            if (problem := problem_of(entry, last)) is not None:
                return replace(found, first_bad=BadEntry(entry.seq, problem))
            noted_seq = entry.seq if entry.hash == noted_hash else found.noted_seq
            found, last = Verified(entry.seq, entry.hash, None, noted_seq), entry
    return found


_LOWEST: Final = -(2**63)
_PAGE = "select * from audit_log where seq >= $1 order by seq limit $2"
