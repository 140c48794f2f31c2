"""Links and sessions of the console, by the digests of their secrets; every process of a database knows them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from vaultevents.store.audit_log import record
from vaultevents.store.pool import Database

LINK_VALID_S: Final = 600
SESSION_VALID_S: Final = 12 * 3600
LINK_ID_DIGITS: Final = 16
"""The audit log names a link by so many digits of its digest, which do not disclose its code."""


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """A browser that is logged in. `valid_for_s`: how much longer, when it was read."""

    id: str
    made_by: str
    valid_for_s: float


async def add_link(database: Database, digest: bytes, made_by: str) -> datetime:
    """Store a link that can be used once within `LINK_VALID_S`; return until when."""
    async with database.transaction() as connection:
        await connection.execute("delete from console_links where valid_until <= db_now()")
        valid_until: datetime = await connection.fetchval(
            "insert into console_links (digest, made_by, valid_until)"
            " values ($1, $2, db_now() + make_interval(secs => $3)) returning valid_until",
            digest,
            made_by,
            LINK_VALID_S,
        )
        await record(connection, made_by, "console.link", f"cl-{digest.hex()[:LINK_ID_DIGITS]}")
    return valid_until


async def use_link(
    database: Database, link_digest: bytes, session_id: str, session_digest: bytes
) -> ConsoleSession | None:
    """Exchange a link for a session; None when the link is unknown, used or too old."""
    async with database.transaction() as connection:
        made_by = await connection.fetchval(
            "delete from console_links where digest = $1 and valid_until > db_now() returning made_by", link_digest
        )
        if made_by is None:
            return None
        await connection.execute("delete from console_sessions where valid_until <= db_now()")
        await connection.execute(
            "insert into console_sessions (id, digest, made_by, valid_until)"
            " values ($1, $2, $3, db_now() + make_interval(secs => $4))",
            session_id,
            session_digest,
            made_by,
            SESSION_VALID_S,
        )
        await record(connection, made_by, "console.login", session_id)
    return ConsoleSession(session_id, made_by, SESSION_VALID_S)


async def find_session(database: Database, digest: bytes) -> ConsoleSession | None:
    """Return the session with this digest, if it has not ended."""
    async with database.statement() as connection:
        row = await connection.fetchrow(
            "select id, made_by, extract(epoch from valid_until - db_now())::float8 as valid_for_s"
            " from console_sessions where digest = $1 and valid_until > db_now()",
            digest,
        )
    return None if row is None else ConsoleSession(**row)


async def end_session(database: Database, digest: bytes) -> None:
    """End a session in every process."""
    async with database.transaction() as connection:
        session_id = await connection.fetchval("delete from console_sessions where digest = $1 returning id", digest)
        if session_id is not None:
            await record(connection, f"console:{session_id}", "console.logout", session_id)
