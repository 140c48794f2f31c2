"""What providers say when they refuse, in their own words, and what is learned from it."""

from __future__ import annotations

import pytest

from vaultevents.chain.execution.rpc_errors import (
    Refusal,
    allowed_blocks,
    backoff_s,
    classify,
    limits_blocks,
)
from vaultevents.chain.upstream.learned_range import LearnedRange

pytestmark = pytest.mark.integration

SIZE_WORDS = [
    (-32005, "query returned more than 10000 results. Try with this block range [0xBDE5F8, 0xBDF9DF].", 5096),
    (-32602, "range 1000000 exceeds limit of 10000", 10_000),
    (
        -32602,
        "Log response size exceeded. You can make eth_getLogs requests with up to a 2K block range and no limit on "
        "the response size, or you can request any block range with a cap of 10K logs in the response. Based on your "
        "parameters and the response size limit, this block range should work: [0x0, 0x63]",
        100,
    ),
    (
        -32600,
        "You can make eth_getLogs requests with up to a 500 block range. Based on your parameters, this block range "
        "should work: [0x123c9b2, 0x123cba5]",
        500,
    ),
    (-32602, "eth_getLogs is limited to a 10,000 range", 10_000),
    (-32600, "block range is too wide", None),
    (-32000, "exceed maximum block range: 50000", 50_000),
    (35, "ranges over 10000 blocks are not supported on free tier", 10_000),
    (-32602, "query exceeds max block range 100000", 100_000),
    (-32602, "query exceeds max results 20000, retry with the range 24383075-24383096", 22),
    (-32005, "Requested range exceeds maximum range limit", None),
    (-32005, "Too many logs requested. Max logs per response is 20000.", None),
    (-32047, "Invalid eth_getLogs request. 'fromBlock'-'toBlock' range too large. Max range: 800", 800),
    (-32000, "Block range limit exceeded. See more details in the documentation.", None),
    (-32614, "eth_getLogs is limited to 1024 block range", 1_024),
    (-32000, "logs matched by query exceeds limit of 10000", None),
    (-32020, "backend response too large", None),
    (-32003, "response too large", None),
    (-32000, "please limit the query to at most 1000 blocks", 1_000),
    (-32602, "block range greater than 2000 max", 2_000),
    (0, "Maximum allowed number of requested blocks is 3500", None),
    (-32000, "query timeout exceeded. Consider reducing your block range.", None),
    (-32005, "limit exceeded", None),
    (
        -32600,
        "Under the Free tier plan, you can make eth_getLogs requests with up to a 10 block range. Based on your "
        "parameters, this block range should work: [0x1180fca, 0x1180fd3]. Upgrade to PAYG for expanded block range.",
        10,
    ),
    (-32602, "Log response size exceeded. Please reduce query block range.", None),
    (-32000, "requested too many blocks from 0 to 5000000, maximum is set to 2048", 2_048),
    (-32000, "eth_getLogs request exceeds the range allowed for your plan (5000 > 1024)", 1_024),
    (-32000, "block range too large (2000), maximum allowed is 1000 blocks", 1_000),
    (-32000, "block range is larger than max block range, block range = 5120, max block range = 5000", 5_000),
    (-32000, "block range is bigger than maxBlockRange", None),
    (-32600, "block range too high", None),
    (-32000, "block range is too wide (maximum 1024)", 1_024),
    (-32000, "block range exceeds 1000", 1_000),
    (-32000, "maximum [from, to] blocks distance: 1000", 1_000),
    (-32000, "eth_getLogs range is too large, max is 10k blocks", 10_000),
    (-32614, "eth_getLogs and eth_newFilter are limited to a 10,000 blocks range", 10_000),
    (-32000, "eth_getLogs is limited to 1024 block", 1_024),
    (-32602, "invalid params: range 9009594 is bigger than range limit 2000", 2_000),
    (-32000, "query must be smaller than size 1024", 1_024),
    (-32000, "response size should not greater than 10000000 bytes", None),
    (-32000, "More than 50000 logs returned", None),
    (-32000, "context deadline exceeded", None),
    (-32603, "upstream request timeout", None),
    (-32602, "eth_getLogs is limited to 0 - 10000 blocks range", 10_000),
    (-32012, "Range too large; max block range 1000", 1_000),
    (-32701, "maximum block range: 50,000", 50_000),
]
OF_BLOCKS = {
    "range 1000000 exceeds limit of 10000",
    "block range is too wide",
    "eth_getLogs is limited to a 10,000 range",
    "You can make eth_getLogs requests with up to a 500 block range. Based on your parameters, this block range "
    "should work: [0x123c9b2, 0x123cba5]",
    "query exceeds max block range 100000",
    "Requested range exceeds maximum range limit",
    "please limit the query to at most 1000 blocks",
    "requested too many blocks from 0 to 5000000, maximum is set to 2048",
    "eth_getLogs request exceeds the range allowed for your plan (5000 > 1024)",
    "Block range limit exceeded. See more details in the documentation.",
}
OF_RESULTS = {
    "query returned more than 10000 results. Try with this block range [0xBDE5F8, 0xBDF9DF].",
    "query exceeds max results 20000, retry with the range 24383075-24383096",
    "Too many logs requested. Max logs per response is 20000.",
    "Log response size exceeded. Please reduce query block range.",
    "query timeout exceeded. Consider reducing your block range.",
    "More than 50000 logs returned",
    "limit exceeded",
}
OTHER_WORDS = [
    (-32602, "block range extends beyond current head block", Refusal.OTHER),
    (-32000, "invalid block range params", Refusal.OTHER),
    (-32000, "unknown block", Refusal.OTHER),
    (-32000, "internal error", Refusal.OTHER),
    (-39001, "finalized block not found", Refusal.OTHER),
    (-32000, "missing trie node b03d68ac (path )", Refusal.OTHER),
    (-32005, "daily request count exceeded, request rate limited", Refusal.RATE),
    (429, "Your app has exceeded its compute units per second capacity.", Refusal.RATE),
    (-32029, "Too Many Requests", Refusal.RATE),
    (-32007, "50/second request limit reached", Refusal.RATE),
    (-32005, "You've exceeded the RPS limit available on the current plan.", Refusal.RATE),
    (-32005, "project ID request rate exceeded", Refusal.RATE),
    (-32005, "exceeded project rate limit", Refusal.RATE),
    (15, "Too many request, try again later", Refusal.RATE),
    (-32000, "Application has exceeded its throughput limit", Refusal.RATE),
    (-32000, "You have reached the quota of your plan", Refusal.RATE),
    (-32016, "over rate limit", Refusal.RATE),
    (429, "Monthly capacity limit exceeded.", Refusal.RATE),
    (-32000, "pruned history unavailable", Refusal.OTHER),
    (-32000, "height is not available (requested height: 138913957, base height: 155251499)", Refusal.OTHER),
    (-32701, "Archive requests require a personal token.", Refusal.OTHER),
    (-32000, "no backend is currently healthy to serve traffic", Refusal.OTHER),
    (-32600, "batch too large", Refusal.BATCH),
    (-32005, "Batch size limit exceeded", Refusal.BATCH),
    (-32600, "batching is not allowed on your plan", Refusal.BATCH),
]


@pytest.mark.parametrize(("code", "message", "blocks"), SIZE_WORDS)
def test_a_limit_on_logs_is_known_by_its_words(code: int, message: str, blocks: int | None) -> None:
    assert classify(code, message) is Refusal.SIZE
    if blocks is not None:
        assert allowed_blocks(message) == blocks


@pytest.mark.parametrize(("code", "message", "kind"), OTHER_WORDS)
def test_what_is_not_a_limit_on_logs_is_not_taken_for_one(code: int, message: str, kind: Refusal) -> None:
    assert classify(code, message) is kind


@pytest.mark.parametrize(
    ("answer", "pause_s"),
    [
        (b'{"error":{"code":-32005,"data":{"rate":{"allowed_rps":50,"backoff_seconds":30,"current_rps":52.3}}}}', 30.0),
        (b'{"error":{"code":-32005,"data":{"current_rps": 13.333, "backoff_seconds": 2.5}}}', 2.5),
        (b'{"error":{"data":{"rate":{"allowed_rps":50,"backoff_seconds":0}}}}', 0.0),
        (b'{"error":{"data":{"backoff_seconds":-5}}}', 0.0),
        (b'{"error":{"data":{"backoff_seconds":"soon"}}}', 0.0),
        (b"x" * 5000 + b'"backoff_seconds":30', 0.0),
        (b"too many requests", 0.0),
    ],
)
def test_the_pause_that_an_answer_asks_for_in_its_own_words(answer: bytes, pause_s: float) -> None:
    assert backoff_s(answer) == pause_s


def test_a_limit_on_blocks_is_distinguished_from_one_on_what_is_in_them() -> None:
    assert {words for words in OF_BLOCKS | OF_RESULTS if limits_blocks(words)} == OF_BLOCKS
    known = {words for _, words, _ in SIZE_WORDS}
    assert known >= OF_BLOCKS | OF_RESULTS


def test_a_range_is_halved_down_to_one_block_and_never_below() -> None:
    size = LearnedRange(1000, 10_000)
    seen = []
    for _ in range(12):
        size.refused(size.blocks)
        seen.append(size.blocks)
    assert seen == [500, 250, 125, 62, 31, 15, 7, 3, 1, 1, 1, 1]


def test_a_hint_is_taken_only_when_it_is_smaller() -> None:
    size = LearnedRange(1000, 10_000)
    size.refused(1000, allowed=800)
    assert size.blocks == 800
    size.refused(800, allowed=5000)
    assert size.blocks == 400


def test_a_refused_short_span_shrinks_what_is_asked_next() -> None:
    size = LearnedRange(1000, 10_000)
    size.refused(10)
    assert size.blocks == 5


def test_a_range_grows_again_up_to_the_largest_and_only_on_full_ranges() -> None:
    size = LearnedRange(100, 300)
    for _ in range(50):
        size.served(99)
    assert size.blocks == 100
    seen = []
    for _ in range(15):
        size.served(size.blocks)
        seen.append(size.blocks)
    assert seen[4] == 150 and seen[9] == 225 and seen[14] == 300
    for _ in range(5):
        size.served(300)
    assert size.blocks == 300


def test_from_one_block_it_grows_too() -> None:
    size = LearnedRange(1, 10)
    for _ in range(5):
        size.served(1)
    assert size.blocks == 2
