"""What a JSON-RPC error means for the next question; providers word it each in their own way.

The forms are those that 1RPC, Alchemy, Ankr, avalanchego, besu, Blast, BlockPI, Chainstack, Cloudflare, Coinbase, dRPC,
erigon, ethermint, geth, Harmony, HyperRPC, Infura, LlamaRPC, Merkle, moonbeam, morph, nethermind, Optimism, PublicNode,
QuickNode, reth, Scroll, Sei, Somnia, Tenderly and Thirdweb send or have sent for eth_getLogs and batches.
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
    r"rate[ -]?limit|too many requests?\b|\brps\b|too much load"
    r"|request (count|rate|limit)|requests? (per|limit)|rate exceeded|throughput"
    r"|compute unit|\bcredits?\b|quota|\bcapacity exceeded for\b|daily limit|monthly",
    re.IGNORECASE,
)
_BATCH = re.compile(r"\bbatch", re.IGNORECASE)
_SIZE = re.compile(
    r"(more than|exceeds?) [\d,.]+k? (results|logs)|limited to (a )?[\d,.]+k? ?block"
    r"|max(imum)? (results|logs|response)|too many (blocks|logs|results|block)"
    r"|block ?range|blocks? distance|number of requested blocks|\bmax(imum)? range|\branges? (over|too|limit)"
    r"|\brange\b.{0,40}\b(limit|exceed|too|max|allowed|wide|large|big)|\b(limit|exceed|max|too)\w*\b.{0,40}\brange"
    r"|logs matched by query exceed|(response|result)( size)?( is)? (too|exceed|should not)|response too large"
    r"|(query|request|execution) (timeout|timed out)|deadline exceeded|must be smaller than size|limit the query"
    r"|(content|entity|payload|request) too large|memory capacity",
    re.IGNORECASE,
)
_OF_BLOCKS = re.compile(r"\bblocks?\b|\bblock ?range|range", re.IGNORECASE)
_OF_RESULTS = re.compile(r"\b(results?|logs|response|returned|size|memory)\b|time(d )?out|deadline", re.IGNORECASE)
_HEX_RANGE = re.compile(r"\[\s*0x([0-9a-f]{1,16})\s*,\s*0x([0-9a-f]{1,16})\s*\]", re.IGNORECASE)
_DECIMAL_RANGE = re.compile(r"range (\d{1,15})\s?-\s?(\d{1,15})", re.IGNORECASE)
_COMPARED = re.compile(r"\((\d{1,15}) > (\d{1,15})\)")
_LIMIT = re.compile(
    r"(?:limit(?:ed)? (?:of|to)(?: 0 -)?|range limit|up to|ranges? over|max(?:imum)?\b|at most|greater than|exceeds?\b"
    r"|smaller than size|distance)[^\d\[]{0,40}?(\d[\d,.]{0,14})\s?(k\b)?",
    re.IGNORECASE,
)
_PAUSE_WITHIN_BYTES = 4096
_PAUSE = re.compile(rb'"backoff_seconds"\s*:\s*(\d{1,6}(?:\.\d{1,6})?)')


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
    if compared := _COMPARED.search(message):
        return int(compared[2])
    numbers = [int(re.sub(r"[,.]", "", n)) * (1000 if k else 1) for n, k in _LIMIT.findall(message)]
    return min((number for number in numbers if number > 0), default=None)


def backoff_s(answer: bytes) -> float:
    """Return the pause that the body of a rate limit asks for, in s; 0 where it names none (Infura names one)."""
    named = _PAUSE.search(answer[:_PAUSE_WITHIN_BYTES])
    return float(named[1]) if named else 0.0


def limits_blocks(message: str) -> bool:
    """Whether a refusal is about the number of blocks, wherever they are; else it is about what is in them."""
    return _OF_BLOCKS.search(message) is not None and _OF_RESULTS.search(message) is None
