"""Limits of every session with PostgreSQL, so that a frozen or unreachable process keeps no lock for long (rule P10).

Idle time in a transaction, waits for locks and single statements are bounded on the server; a silent network is noticed
on both ends. Statements that may take longer raise their own limit with `allow`.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import asyncpg
import structlog

from vaultevents.core.errors import DatabaseUnusable
from vaultevents.store.sqlstates import reason

log = structlog.get_logger("store")

Connection: TypeAlias = asyncpg.Connection

APPLICATION: Final = "vaultevents"
CONNECT_TIMEOUT_S: Final = 10.0
COMMAND_TIMEOUT_S: Final = 35.0
"""How long this side waits for a statement: a little longer than the server works on it."""
IDLE_IN_TRANSACTION_S: Final = 5.0
LOCK_WAIT_S: Final = 8.0
"""Longer than a frozen process keeps a lock, so that a session that waits gets it as soon as it is free."""
STATEMENT_S: Final = 30.0
SILENCE_S: Final = 8
"""A peer that acknowledges nothing for this long is gone."""
KEEPALIVE_IDLE_S: Final = 4
KEEPALIVE_INTERVAL_S: Final = 2
KEEPALIVE_COUNT: Final = 2
CLIENT_CHECK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one session in seconds; None leaves the server's own."""

    idle_in_transaction_s: float = IDLE_IN_TRANSACTION_S
    lock_wait_s: float = LOCK_WAIT_S
    statement_s: float = STATEMENT_S
    idle_s: float | None = None

    def settings(self) -> dict[str, str]:
        """Return the parameters of the session, as PostgreSQL names them."""
        found = {
            "idle_in_transaction_session_timeout": _milliseconds(self.idle_in_transaction_s),
            "lock_timeout": _milliseconds(self.lock_wait_s),
            "statement_timeout": _milliseconds(self.statement_s),
            "tcp_user_timeout": _milliseconds(SILENCE_S),
            "tcp_keepalives_idle": str(KEEPALIVE_IDLE_S),
            "tcp_keepalives_interval": str(KEEPALIVE_INTERVAL_S),
            "tcp_keepalives_count": str(KEEPALIVE_COUNT),
            "client_connection_check_interval": _milliseconds(CLIENT_CHECK_S),
        }
        return found if self.idle_s is None else found | {"idle_session_timeout": _milliseconds(self.idle_s)}


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


def connect_options(target: Mapping[str, Any], **settings: str) -> dict[str, Any]:
    """Return what `asyncpg.connect` takes for `target` with the time limits of this side and these parameters."""
    return {
        **target,
        "timeout": CONNECT_TIMEOUT_S,
        "command_timeout": COMMAND_TIMEOUT_S,
        "server_settings": {"application_name": APPLICATION, **settings},
    }


@dataclass(slots=True)
class Sessions:
    """Prepares each new connection; what a server refuses is logged once."""

    limits: Limits = field(default_factory=Limits)
    refused: set[str] = field(default_factory=set)

    async def open(self, options: Mapping[str, Any]) -> Connection:
        """Return a prepared connection of its own. Raises what the driver raises, and `DatabaseUnusable`."""
        connection = await connect(**options)
        try:
            await self.prepare(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def prepare(self, connection: Connection) -> None:
        """Set the limits of a new connection on both ends.

        They are set after the start of the session, since a pooler refuses a session for a parameter it does not know.
        """
        _watch_silence(connection)
        settings = self.limits.settings()
        try:
            await connection.execute("; ".join(f"set {name} = {value}" for name, value in settings.items()))
        except asyncpg.PostgresError as error:
            if connection.is_closed():
                raise
            for name, value in settings.items():
                await self._set(connection, name, value)
            log.debug("limits_set_one_by_one", problem=reason(error))

    async def _set(self, connection: Connection, name: str, value: str) -> None:
        try:
            await connection.execute(f"set {name} = {value}")
        except asyncpg.PostgresError as error:
            if connection.is_closed():
                raise
            if name not in self.refused:
                self.refused.add(name)
                log.warning("session_limit_refused", setting=name, problem=reason(error))


async def connect(*arguments: Any, **options: Any) -> Connection:
    """Do what `asyncpg.connect` does; the refusal of a parameter becomes the sentence that says what to do."""
    try:
        return await asyncpg.connect(*arguments, **options)
    except (asyncpg.ProtocolViolationError, asyncpg.InvalidParameterValueError) as error:
        raise DatabaseUnusable(
            f"the server, or a pooler before it, refuses a parameter of the connection ({reason(error)}): let "
            "database_url lead to PostgreSQL itself, or let the pooler pass search_path, role and timezone in session "
            "mode"
        ) from error


async def allow(connection: Connection, seconds: float) -> None:
    """Let the statements of this transaction take this long, and a reader of many rows pause between them."""
    await connection.execute(
        "select set_config('statement_timeout', $1, true), set_config('idle_in_transaction_session_timeout', $2, true)",
        _milliseconds(seconds),
        _milliseconds(60.0),
    )


@contextlib.asynccontextmanager
async def in_index_order(connection: Connection) -> AsyncIterator[None]:
    """Let statements of this transaction that want the first rows of an index read these rows and no others.

    For thousands of rows the planner may prefer to collect all rows of a range, however many, and to sort them.
    """
    await connection.execute("set local enable_bitmapscan = off; set local enable_seqscan = off")
    yield
    await connection.execute("set local enable_bitmapscan = default; set local enable_seqscan = default")


def _watch_silence(connection: Connection) -> None:
    """Let the kernel end a TCP connection whose other side is silent; a Unix socket needs nothing."""
    transport = getattr(connection, "_transport", None)  # the driver has no public name for it
    link = None if transport is None else transport.get_extra_info("socket")
    if link is None or link.family not in (socket.AF_INET, socket.AF_INET6):
        return
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", SILENCE_S * 1000),
    ):
        if hasattr(socket, name):  # not every platform has them all
            with contextlib.suppress(OSError):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
