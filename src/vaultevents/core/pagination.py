"""Cursors of pages (rule A2): opaque, and good for one account and one list only (rule T8)."""

from __future__ import annotations

import base64
import hmac
from typing import Final

from vaultevents.core.errors import InputError
from vaultevents.core.sealing import HashKey, keyed_hash

MAC_BYTES: Final = 16


class CursorUnknown(InputError):
    """A cursor that this service did not make for this account and this list, or that means nothing any longer."""

    def __init__(self) -> None:
        super().__init__("the cursor is not known: take it from the Link header of a page, or begin without one")


def encode_cursor(key: HashKey, account_id: str, kind: str, position: str) -> str:
    """`position` in the list `kind` of an account, as clients send it back: URL-safe base64 without padding."""
    mac = keyed_hash(key, f"cursor\0{kind}\0{account_id}\0{position}")[:MAC_BYTES]
    return base64.urlsafe_b64encode(mac + position.encode()).decode().rstrip("=")


def decode_cursor(key: HashKey, account_id: str, kind: str, cursor: str) -> str:
    """The position; raises `CursorUnknown` alike for malformed, altered, foreign cursors and those of other lists."""
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        position = raw[MAC_BYTES:].decode()
    except ValueError:
        raise CursorUnknown from None
    # the whole text, not only its MAC: base64 writes the same bytes in several ways
    if not hmac.compare_digest(encode_cursor(key, account_id, kind, position), cursor):
        raise CursorUnknown
    return position
