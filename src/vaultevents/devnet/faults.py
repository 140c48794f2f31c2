"""The fault script: which answers of a devnet server are wrong, and how.

A decision is a function of (seed, kind, request, n-th occurrence of that request), never of time, so a seed replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from hashlib import blake2b


class Fault(StrEnum):
    """One way in which an execution node or a beacon node misbehaves."""

    HTTP_500 = "http_500"
    HTTP_429 = "http_429"
    HTML = "html"  # a web page with status 200
    SLOW = "slow"  # the right answer after `Faults.slow_s`
    HANG = "hang"  # no answer at all
    ERROR = "error"  # JSON-RPC error -32000
    WRONG_CHAIN_ID = "wrong_chain_id"
    WRONG_GENESIS = "wrong_genesis"
    NULL_BLOCK = "null_block"
    UNLINKED_PARENT = "unlinked_parent"
    EMPTY_LOGS = "empty_logs"
    TRUNCATED_LOGS = "truncated_logs"
    WRONG_BLOCK_HASH = "wrong_block_hash"
    REMOVED = "removed"
    OUT_OF_RANGE = "out_of_range"
    DUPLICATE_LOG = "duplicate_log"
    NO_WITHDRAWALS = "no_withdrawals"  # a block without the field
    WITHDRAWAL_GAP = "withdrawal_gap"  # an entry in the middle is missing
    WITHDRAWAL_TWICE = "withdrawal_twice"
    NOT_FOUND = "not_found"
    BAD_REQUEST = "bad_request"
    HALF_BODY = "half_body"  # the connection closes in the middle of the answer
    SYNCING = "syncing"
    OPTIMISTIC = "optimistic"
    OTHER_NETWORK = "other_network"
    FINALITY_BACK = "finality_back"  # everything final is two epochs older than it was
    SHORT_ANSWER = "short_answer"  # the last record is missing
    OTHER_PUBKEY = "other_pubkey"  # of the first record


TRANSPORT_FAULTS = (Fault.HTTP_500, Fault.HTTP_429, Fault.HTML, Fault.SLOW, Fault.HANG)
"""Those of a whole HTTP exchange with an execution node; the rest concern one call."""
LOG_FAULTS = (
    Fault.EMPTY_LOGS,
    Fault.TRUNCATED_LOGS,
    Fault.WRONG_BLOCK_HASH,
    Fault.REMOVED,
    Fault.OUT_OF_RANGE,
    Fault.DUPLICATE_LOG,
)
"""Those of an eth_getLogs answer that has logs."""
BLOCK_FAULTS = (Fault.NULL_BLOCK, Fault.UNLINKED_PARENT)
"""Those of a block that the node has."""
WITHDRAWAL_FAULTS = (Fault.NO_WITHDRAWALS, Fault.WITHDRAWAL_GAP, Fault.WITHDRAWAL_TWICE)
"""Those of a block's withdrawals; the gap needs three or more, the repetition one."""
BEACON_TRANSPORT_FAULTS = (*TRANSPORT_FAULTS, Fault.NOT_FOUND, Fault.BAD_REQUEST, Fault.HALF_BODY)
"""Those of any exchange with a beacon node."""
RECORD_FAULTS = (Fault.SHORT_ANSWER, Fault.OTHER_PUBKEY)
"""Those of an answer that has validator records."""


def fires(seed: int, kind: str, key: str, nth: int, rate: float) -> bool:
    """Whether a fault of `kind` strikes the `nth` request `key`: true for a share `rate` of all requests."""
    digest = blake2b(f"{seed}|{kind}|{key}|{nth}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < rate * 2**64


class Faults:
    """Rates from 0 to 1 by kind, settable at any time, and counts of what fired.

    `rates[kind]` strikes a share of the requests that the kind can strike. `once(kind)` strikes the next of them,
    whatever the rates are. At most one fault strikes a call; kinds are tried in the order of `Fault`.
    """

    def __init__(self, seed: int, rates: dict[Fault, float] | None = None, *, slow_s: float = 0.5) -> None:
        self.seed = seed
        self.rates = dict(rates or {})
        self.slow_s = slow_s
        self.fired: Counter[Fault] = Counter()
        self._scripted: Counter[Fault] = Counter()
        self._seen: Counter[tuple[str, tuple[Fault, ...]]] = Counter()

    def once(self, kind: Fault, times: int = 1) -> None:
        """Let `kind` strike the next `times` requests that it can strike."""
        self._scripted[kind] += times

    def stop(self) -> None:
        """No more faults; the counts stay."""
        self.rates.clear()
        self._scripted.clear()

    def draw(self, key: str, kinds: Iterable[Fault]) -> Fault | None:
        """The fault, if any, among `kinds` that strikes this occurrence of the request `key`."""
        kinds = tuple(kinds)
        if not self.rates and not self._scripted.total():
            return None
        nth = self._seen[key, kinds]
        self._seen[key, kinds] += 1
        for kind in kinds:
            if self._strikes(kind, key, nth):
                self.fired[kind] += 1
                return kind
        return None

    def _strikes(self, kind: Fault, key: str, nth: int) -> bool:
        if self._scripted[kind]:
            self._scripted[kind] -= 1
            return True
        return fires(self.seed, kind, key, nth, self.rates.get(kind, 0.0))
