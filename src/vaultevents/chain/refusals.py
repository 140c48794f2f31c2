"""What a JSON-RPC error means for the next question; providers word it each in their own way.

The forms are those that Alchemy, Ankr, besu, Blast, BlockPI, Chainstack, Cloudflare, Coinbase, dRPC, erigon, geth,
Infura, LlamaRPC, nethermind, PublicNode, QuickNode, reth and Thirdweb send or have sent for eth_getLogs and batches.
"""

from __future__ import annotations

import re
from enum import Enum

LIMIT_EXCEEDED = -32005  # EIP-1474; Infura, besu and others send it for log limits and for rates alike


class Refusal(Enum):
    """`RATE`: ask later. `BATCH`: fewer calls at once. `SIZE`: a smaller range or answer. `OTHER`: anything else."""

    RATE = "rate"
    BATCH = "batch"
    SIZE = "size"
    OTHER = "other"


_BEYOND_HEAD = re.compile(r"beyond|current head|latest block|invalid (block )?range", re.IGNORECASE)
_RATE = re.compile(
    r"rate[ -]?limit|too many requests|request (count|rate|limit)|requests? (per|limit)|rate exceeded|throughput"
    r"|compute unit|\bcredits?\b|quota|\bcapacity exceeded for\b|daily limit|monthly",
    re.IGNORECASE,
)
_BATCH = re.compile(r"\bbatch", re.IGNORECASE)
_SIZE = re.compile(
    r"more than [\d,.]+k? (results|logs)|max(imum)? (results|logs|response)|too many (blocks|logs|results|block)"
    r"|block ?range|blocks? distance|number of requested blocks|\bmax(imum)? range|\branges? (over|too|limit)"
    r"|\brange\b.{0,40}\b(limit|exceed|too|max|allowed|wide|large|big)|\b(limit|exceed|max|too)\w*\b.{0,40}\brange"
    r"|logs matched by query exceed|(response|result)( size)?( is)? (too|exceed|should not)|response too large"
    r"|(query|request|execution) (timeout|timed out)|must be smaller than size|limit the query"
    r"|(content|entity|payload|request) too large|memory capacity",
    re.IGNORECASE,
)
_HEX_RANGE = re.compile(r"\[\s*0x([0-9a-f]{1,16})\s*,\s*0x([0-9a-f]{1,16})\s*\]", re.IGNORECASE)
_DECIMAL_RANGE = re.compile(r"range (\d{1,15})\s?-\s?(\d{1,15})", re.IGNORECASE)
_LIMIT = re.compile(
    r"(?:limit(?:ed)? (?:of|to)|up to|ranges? over|max(?:imum)?\b|at most|greater than|exceeds?\b|smaller than size"
    r"|distance)[^\d\[]{0,40}?(\d[\d,.]{0,14})\s?(k\b)?",
    re.IGNORECASE,
)


def classify(code: int, message: str) -> Refusal:
    """What kind of refusal an error answer is."""
    if code == 429 or _RATE.search(message):
        return Refusal.RATE
    if _BATCH.search(message):
        return Refusal.BATCH
    if _BEYOND_HEAD.search(message):
        return Refusal.OTHER
    if code == LIMIT_EXCEEDED or _SIZE.search(message):
        return Refusal.SIZE
    return Refusal.OTHER


def allowed_blocks(message: str) -> int | None:
    """The number of blocks that an error about a range says would work, where it says one."""
    for pattern, base in ((_HEX_RANGE, 16), (_DECIMAL_RANGE, 10)):
        if suggested := pattern.search(message):
            first, last = (int(digits, base) for digits in suggested.groups())
            return last - first + 1 if last >= first else None
    numbers = [int(re.sub(r"[,.]", "", n)) * (1000 if k else 1) for n, k in _LIMIT.findall(message)]
    return min((number for number in numbers if number > 0), default=None)


class RangeSize:
    """How many blocks one eth_getLogs may span at one node: learned from its refusals, tried larger after successes."""

    __slots__ = ("_largest", "_successes", "blocks")

    _SUCCESSES_TO_GROW = 5

    def __init__(self, start: int, largest: int) -> None:
        self.blocks = min(start, largest)
        self._largest = largest
        self._successes = 0

    def refused(self, asked: int, allowed: int | None = None) -> None:
        """`asked` blocks were too many; take what the node says it allows when that is smaller, else half."""
        smaller = allowed if allowed is not None and 0 < allowed < asked else asked // 2
        self.blocks = max(1, min(self.blocks, smaller))
        self._successes = 0

    def served(self, asked: int) -> None:
        """`asked` blocks were read; half as many again are tried after five full ranges in a row."""
        if asked < self.blocks:
            return
        self._successes += 1
        if self._successes >= self._SUCCESSES_TO_GROW:
            self.blocks = min(self._largest, self.blocks + (self.blocks + 1) // 2)
            self._successes = 0
