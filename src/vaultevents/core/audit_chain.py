"""The chain of hashes of the audit log: how a state is digested, and how an entry is hashed (rule T22).

    digest = SHA-256(canonical JSON of the state)      keys sorted, no spaces, UTF-8; secrets are left out by the caller
    hash   = SHA-256(field ‖ field ‖ …)                previous_hash, seq, at, actor, action, subject, account_id,
                                                       before_digest, after_digest
    field  = length in 4 bytes, big-endian ‖ bytes     null: ff ff ff ff

Numbers are decimal, texts are UTF-8, `at` is `2026-01-31T12:00:00.000000Z`. The first entry links to 32 zero bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from typing import Any, Final

FIRST_LINK: Final = bytes(32)
"""What the first entry links to."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One administrative act as it is stored; `account_id` is None where it is about no account, or about several."""

    seq: int
    at: datetime
    actor: str
    action: str
    subject: str
    account_id: str | None
    before_digest: bytes | None
    after_digest: bytes | None
    previous_hash: bytes
    hash: bytes


def state_digest(state: object) -> bytes | None:
    """Return the SHA-256 of the canonical JSON of a state; None for None.

    Dataclasses are objects, sets are sorted lists, bytes are hex, times are RFC 3339 in UTC.
    """
    if state is None:
        return None
    text = json.dumps(_plain(state), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def entry_hash(entry: AuditEntry) -> bytes:
    """Return the hash that the entry must have, by all of its other fields."""
    fields = (
        entry.previous_hash,
        str(entry.seq).encode(),
        time_text(entry.at).encode(),
        entry.actor.encode(),
        entry.action.encode(),
        entry.subject.encode(),
        None if entry.account_id is None else entry.account_id.encode(),
        entry.before_digest,
        entry.after_digest,
    )
    return hashlib.sha256(b"".join(map(_field, fields))).digest()


def problem_of(entry: AuditEntry, previous: AuditEntry | None) -> str | None:
    """Return why an entry cannot follow `previous`, or be the first; None for one that can."""
    expected = 1 if previous is None else previous.seq + 1
    if entry.seq != expected:
        return f"entry {expected} is missing"
    if entry.previous_hash != (FIRST_LINK if previous is None else previous.hash):
        return "does not link to the entry before it"
    if entry.hash != entry_hash(entry):
        return "its hash is not that of its content"
    return None


def time_text(at: datetime) -> str:
    """Return a time in RFC 3339, in UTC with microseconds."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _field(content: bytes | None) -> bytes:
    return b"\xff\xff\xff\xff" if content is None else len(content).to_bytes(4) + content


def _plain(value: Any) -> Any:
    """Return what JSON has of a value."""
    match value:
        case datetime():
            return time_text(value)
        case bytes() | bytearray():
            return bytes(value).hex()
        case Mapping():
            return {str(key): _plain(content) for key, content in value.items()}
        case Set():
            return sorted(map(_plain, value))
        case list() | tuple():
            return [_plain(content) for content in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    return value
