"""Who is logged in: random secrets for links and cookies, and the sessions that this process read a moment ago."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from vaultevents.console.context import in_time
from vaultevents.core.actor import acting
from vaultevents.store import console_sessions
from vaultevents.store.console_sessions import ConsoleSession
from vaultevents.store.pool import Database

KNOWN_FOR_S: Final = 5.0
"""For so long a session is not read again; a logout in another process counts after it."""

MOST_KNOWN: Final = 1000


def new_secret() -> str:
    """Return 256 random bits as text for a link or a cookie."""
    return secrets.token_urlsafe(32)


def digest(secret: str) -> bytes:
    """Return what is stored of the secret of a link or a cookie."""
    return hashlib.sha256(secret.encode()).digest()


def csrf_token(session_secret: str) -> str:
    """Return what the forms of a session carry; it does not disclose the cookie."""
    return hmac.new(session_secret.encode(), b"vaultevents console form", hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Link:
    """A URL that logs one browser in, until a time."""

    url: str
    valid_until: datetime


async def new_link(database: Database, origin: str) -> Link:
    """Make a link to the console at `origin`."""
    code = new_secret()
    return Link(f"{origin}/login#{code}", await console_sessions.add_link(database, digest(code), acting()))


class Sessions:
    """The sessions of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[bytes, tuple[ConsoleSession, float]] = {}

    async def find(self, secret: str) -> ConsoleSession | None:
        """Return the session of a cookie. Raises `DatabaseUnavailable`."""
        key, now_s = digest(secret), time.monotonic()
        known = self._known.get(key)
        if known is not None and now_s - known[1] < min(KNOWN_FOR_S, known[0].valid_for_s):
            return known[0]
        session = await in_time(console_sessions.find_session(self._database, key))
        self._known.pop(key, None)
        if session is not None:
            if len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = (session, now_s)
        return session

    async def begin(self, code: str) -> str | None:
        """Exchange the code of a link for the secret of a new session; None when it is unknown, used or too old."""
        secret = new_secret()
        session_id = f"cs-{secrets.token_hex(8)}"
        begun = await in_time(console_sessions.use_link(self._database, digest(code), session_id, digest(secret)))
        return None if begun is None else secret

    async def end(self, secret: str) -> None:
        """Log out."""
        self._known.pop(digest(secret), None)
        await in_time(console_sessions.end_session(self._database, digest(secret)))
