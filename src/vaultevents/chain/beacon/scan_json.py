"""All validators of a state out of a body that is far larger than memory should be.

    {"execution_optimistic":false,"data":[ {record},{record}, … {record} ],"finalized":true}
    └──────────── head ──────────────────┘ └─ parts of whole records ──┘ └───── tail ────┘

A part is cut where `},{` stands, with any white space, and read as a list of its own. Only a cut between two records
gives such a list, so a cut in a wrong place (in a nested list, in a text, behind the list) cannot pass: it is found
again by counting brackets. The order of keys and the white space of the body do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

import msgspec

from vaultevents.chain.beacon import wire
from vaultevents.chain.beacon.wire import BeaconResponse, WireRecord, decoded, refuse_unproven
from vaultevents.core.errors import NodeFault
from vaultevents.core.units import Address
from vaultevents.core.validators import ValidatorRecord, vault_of

_BETWEEN_RECORDS = re.compile(rb"\}\s*,\s*\{")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]"]', re.DOTALL)
_LIST_BEGINS = re.compile(rb"\s*:\s*\[")
_COMMA = re.compile(rb"\s*,")
_WINDOW_BYTES = 4096  # several records, in which a place between two is looked for
_FRAME_BYTES = 65536  # more than any head, tail or single record
_CREDENTIALS_CHARS = 66


@dataclass(frozen=True, slots=True)
class Scan:
    """The records that pay one of the vaults, by index, and the number of all validators: indices 0 to `count` - 1."""

    records: list[ValidatorRecord]
    count: int


class _Credentials(msgspec.Struct, gc=False):
    withdrawal_credentials: str


class _Glance(msgspec.Struct, gc=False):
    index: int
    validator: _Credentials


_GLANCES = msgspec.json.Decoder(list[_Glance], strict=False)  # not strict: integers out of text
_RECORDS = msgspec.json.Decoder(list[WireRecord])
_ENVELOPE = msgspec.json.Decoder(BeaconResponse[list[msgspec.Raw]])


class ListScan:
    """Takes the body of `states/finalized/validators` in pieces of any size; keeps the records of `vaults` only.

    One call of `feed` does work in proportion to its piece, which is what bounds a step of the event loop.
    """

    is_done = False
    """Only the end of the body decides."""

    def __init__(self, node: str, vaults: frozenset[Address]) -> None:
        self._node = node
        self._vaults = vaults
        self._addresses = frozenset(vault.hex() for vault in vaults)
        self._head: bytes | None = None
        self._rest = b""
        self._tail: bytes | None = None
        self._counts_brackets = False
        self._count = 0
        self._found: list[ValidatorRecord] = []

    def feed(self, piece: bytes) -> None:
        """Raises `NodeFault` for what is not such a body, and `SourceUnavailable` for one that may not be used."""
        if self._tail is not None:
            self._tail += piece
            self._bounded(self._tail, "is followed by too much")
            return
        self._rest += piece
        if self._head is None and not self._take_head():
            return
        if not self._counts_brackets and self._take_quickly():
            return
        self._counts_brackets = True
        self._take_by_brackets()

    def finish(self) -> Scan:
        """The result, once the whole body was fed. A body that ends before its list does is a fault."""
        if self._head is not None and self._tail is None:
            self._take_by_brackets()
        if self._head is None or self._tail is None:
            raise self._fault(f"breaks off after {self._count} validators")
        self._check_frame(self._head + b"]" + self._tail)
        return Scan(self._found, self._count)

    def _take_head(self) -> bool:
        start = self._rest.lstrip()
        if start and not start.startswith(b"{"):
            raise self._fault(f"is not the JSON of a beacon node (it begins with {start[:20]!r})")
        end = _end_of_head(self._rest)
        if end is None:
            self._bounded(self._rest, "does not begin with a list of validators")
            return False
        self._head, self._rest = self._rest[:end], self._rest[end:]
        self._check_frame(self._head + b"]}", whole=False)
        return True

    def _take_quickly(self) -> bool:
        """All but the last record, if the place before it is where it is expected; False when it is not."""
        buffer = self._rest
        if len(buffer) < _WINDOW_BYTES:
            return True
        places = list(_BETWEEN_RECORDS.finditer(buffer, len(buffer) - _WINDOW_BYTES))
        if not places:
            return False
        between = places[-1]
        try:
            glances = _GLANCES.decode(b"[%b]" % buffer[: between.start() + 1])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        self._take(glances, buffer[: between.start() + 1])
        self._rest = buffer[between.end() - 1 :]
        return True

    def _take_by_brackets(self) -> None:
        """All records that are followed by a comma, or by the end of the list."""
        end, is_last = _end_of_records(self._rest)
        part = self._rest[:end]
        if end:
            self._take(decoded(self._node, "its list of validators", _GLANCES, b"[%b]" % part), part)
        if is_last:
            self._tail, self._rest = self._rest[end + 1 :], b""
            self._bounded(self._tail, "is followed by too much")
            return
        comma = _COMMA.match(self._rest, end) if end else None
        self._rest = self._rest[comma.end() if comma else end :]
        self._bounded(self._rest, f"has no end of a record after {self._count} validators")

    def _take(self, glances: list[_Glance], part: bytes) -> None:
        first, after = self._count, self._count + len(glances)
        if [glance.index for glance in glances] != list(range(first, after)):
            raise self._fault(f"is not gapless: after {first} validators one is missing, there twice or out of order")
        credentials = [glance.validator.withdrawal_credentials for glance in glances]
        if glances and set(map(len, credentials)) != {_CREDENTIALS_CHARS}:
            raise self._fault(f"has withdrawal_credentials that are not 32 bytes after {first} validators")
        text = "".join(credentials)
        if text != text.lower():
            credentials = [credential.lower() for credential in credentials]
        if not self._addresses.isdisjoint([credential[-40:] for credential in credentials]):
            self._keep(part)
        self._count = after

    def _keep(self, part: bytes) -> None:
        for found in decoded(self._node, "its list of validators", _RECORDS, b"[%b]" % part):
            if found.validator.withdrawal_credentials[-40:].lower() in self._addresses:
                record = wire.record(self._node, found)
                if vault_of(record.credentials) in self._vaults:
                    self._found.append(record)

    def _check_frame(self, frame: bytes, whole: bool = True) -> None:
        """The body without its records; with `whole` False only its head, which may be no JSON by itself."""
        try:
            answer = _ENVELOPE.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if not whole:
                return
            problem = f"is not closed as it should be ({str(error)[:80]})"
        else:
            refuse_unproven(self._node, "its finalized state", answer.execution_optimistic, answer.finalized)
            if not answer.data:
                return
            problem = "is there twice"
        raise self._fault(problem)

    def _bounded(self, kept: bytes, problem: str) -> None:
        if len(kept) > _FRAME_BYTES:
            raise self._fault(problem)

    def _fault(self, problem: str) -> NodeFault:
        return NodeFault(self._node, f"its list of all validators {problem}")


def _tokens(buffer: bytes) -> Iterator[re.Match[bytes]]:
    """Texts and brackets, up to a text that is not closed yet."""
    return takewhile(lambda token: token[0] != b'"', _TOKEN.finditer(buffer))


def _end_of_head(buffer: bytes) -> int | None:
    """Where the records begin: behind the bracket of the outermost object's `data`."""
    depth = 0
    for token in _tokens(buffer):
        if token[0] in b"{[":
            depth += 1
        elif token[0] in b"}]":
            depth -= 1
        elif depth == 1 and token[0] == b'"data"' and (begins := _LIST_BEGINS.match(buffer, token.end())):
            return begins.end()
    return None


def _end_of_records(buffer: bytes) -> tuple[int, bool]:
    """Where the last record ends that something follows; or where the list is closed, and True."""
    depth = end = 0
    for token in _tokens(buffer):
        if token[0] in b"{[":
            depth += 1
        elif token[0] in b"}]":
            depth -= 1
            if depth < 0:
                return token.start(), True
            if depth == 0 and _COMMA.match(buffer, token.end()):
                end = token.end()
    return end, False
