"""Ends sessions of frozen processes that the server's own limits do not reach (rule P10).

A process that stops while rows are copied to the server, or while it is sent a large result, is not idle: its
transaction waits for the client for as long as that is frozen, with all its locks. Any other process may end it.
"""

from __future__ import annotations

import asyncio

import structlog

from vaultevents.core.errors import DatabaseUnavailable
from vaultevents.store.pool import Database
from vaultevents.store.sessions import APPLICATION, IDLE_IN_TRANSACTION_S

log = structlog.get_logger("store")

LOOK_EVERY_S = 1.0
STALLED_S = 4.0
RECONNECT_S = 0.5


async def end_stalled(database: Database) -> None:
    """Look for stalled sessions once a second, on a connection of its own; never ends.

    A session is ended when two looks in a row find it in the same statement, waiting for its client.
    """
    while True:
        try:
            async with database.dedicated() as connection:
                before: set[tuple[object, ...]] = set()
                while True:
                    now = {tuple(row) for row in await connection.fetch(_STALLED, STALLED_S, IDLE_S, APPLICATION)}
                    for pid, _ in now & before:
                        log.warning("stalled_session_ended", pid=pid)
                        await connection.execute("select pg_terminate_backend($1)", pid)
                    before = now
                    await asyncio.sleep(LOOK_EVERY_S)
        except DatabaseUnavailable as error:
            log.debug("stalled_sessions_unknown", problem=str(error))
        await asyncio.sleep(RECONNECT_S)


IDLE_S = IDLE_IN_TRANSACTION_S + 1
"""For sessions whose server does not limit this itself: of an older version, or behind a pooler."""

# Readers without a transaction id hold no lock that anybody waits for.
_STALLED = """
select pid, coalesce(query_start, state_change) as since from pg_stat_activity
where datname = current_database() and usename = session_user and application_name = $3 and pid <> pg_backend_pid()
    and backend_xid is not null
    and (
        (state = 'active' and wait_event_type = 'Client'
            and query_start < clock_timestamp() - make_interval(secs => $1))
        or (state like 'idle in transaction%' and state_change < clock_timestamp() - make_interval(secs => $2))
    )
"""
