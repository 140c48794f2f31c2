"""What follows from an error of PostgreSQL or of the connection: try again, a sentence for the operator, or a bug.

https://www.postgresql.org/docs/current/errcodes-appendix.html lists the codes; the first two characters are the class.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import asyncpg

from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable

Verdict: TypeAlias = Literal["retry", "bug"] | str
"""`retry`, `bug`, or for anything else the sentence that says what a person has to do."""

LOST: Final = (OSError, TimeoutError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)
"""The connection is gone, or the server did not answer in time."""

_LOGIN: Final = "correct the user and password in database_url, or allow them in pg_hba.conf"
_DATABASE: Final = "correct the database in database_url, or create it"
_GRANT: Final = "let the user of database_url own the schema, or grant it the missing privilege, and start again"
_SCHEMA: Final = (
    "a part of the schema was dropped, or an older copy of the database took over: start again, which brings an older "
    "schema up to date, or restore a backup"
)
_POOLER: Final = "a pooler in transaction mode does not keep sessions: connect to the server, or use session mode"

VERDICTS: Final[dict[str, Verdict]] = {
    "08": "retry",  # connection exception
    "0A": "retry",  # a cached plan, after another version has migrated; see `_is_cached_plan`
    "25006": "retry",  # read-only: a standby that is not promoted yet
    "25P03": "retry",  # idle in transaction for too long
    "25P04": "retry",  # transaction timeout
    "26": _POOLER,  # unknown prepared statement
    "28": _LOGIN,
    "3D": _DATABASE,
    "3F": _SCHEMA,
    "40": "retry",  # deadlock, serialization failure
    "42501": _GRANT,
    "42703": _SCHEMA,  # undefined column
    "42883": _SCHEMA,  # undefined function
    "42P01": _SCHEMA,  # undefined table
    "42P05": _POOLER,  # duplicate prepared statement
    "53": "retry",  # too many connections, disk full, out of memory
    "55000": "retry",  # not in the prerequisite state: in recovery
    "55006": "retry",  # object in use
    "55P03": "retry",  # lock not available
    "57": "retry",  # canceled, shut down, not accepting sessions yet
    "58": "retry",  # system error: input and output
    "72": "retry",  # snapshot too old
    "F0": "retry",  # configuration file error
    "XX": "retry",  # internal error, corrupted data or index
}
"""By SQLSTATE or its class. What is not listed is a mistake in a statement of ours."""


def verdict(sqlstate: str) -> Verdict:
    """Return what follows from an SQLSTATE; the entry of the code goes before that of its class."""
    return VERDICTS.get(sqlstate, VERDICTS.get(sqlstate[:2], "bug"))


def translated(error: BaseException) -> DatabaseUnavailable | DatabaseUnusable | None:
    """Return the error of ours that an exception of the driver means; None for a bug, and for any other exception."""
    if isinstance(error, asyncpg.PostgresError):
        found = verdict(error.sqlstate or "")
        if found == "bug" or (error.sqlstate == "0A000" and not _is_cached_plan(error)):
            return None
        if found != "retry":
            return DatabaseUnusable(f"the database refuses this ({reason(error)}): {found}")
        if not isinstance(error, asyncpg.PostgresConnectionError | asyncpg.OperatorInterventionError):
            return DatabaseUnavailable(f"the database could not finish this: {reason(error)}")
    elif not isinstance(error, (*LOST, asyncpg.InternalClientError)):
        return None
    return DatabaseUnavailable(f"lost the database: {reason(error)}")


def _is_cached_plan(error: asyncpg.PostgresError) -> bool:
    return isinstance(error, asyncpg.InvalidCachedStatementError)


def reason(error: BaseException) -> str:
    """Return what went wrong in one line; it may name the address and the user, never the password."""
    first = str(error).strip().splitlines()
    return first[0] if first else type(error).__name__
