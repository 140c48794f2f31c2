"""Findings of a check: their lines, the split of an error's sentence, and the verdict."""

from __future__ import annotations

import pytest

from vaultevents.config import CHAIN_IDS
from vaultevents.core.findings import ASCII_MARKS, Finding, failed, passed, verdict, warned
from vaultevents.core.networks import PUBLIC_NETWORKS, network_named

pytestmark = pytest.mark.unit


def test_a_line_has_a_mark_the_subject_and_what_to_do() -> None:
    assert passed("node a", "chain 1").line() == "✓ node a: chain 1"
    assert warned("disk", "1 MiB is free", "clear it").line() == "! disk: 1 MiB is free. Clear it."
    assert failed("api", "the port is taken", "Name another.").line() == "✗ api: the port is taken. Name another."
    assert failed("api", "the port is taken").line(ASCII_MARKS) == "FAIL api: the port is taken"
    assert passed("api", "free").line(ASCII_MARKS).isascii()


@pytest.mark.parametrize(
    ("sentence", "detail", "advice"),
    [
        ("is syncing, 5 slots behind: wait until it is done", "is syncing, 5 slots behind", "Wait until it is done"),
        ("a: b; nothing is read: see why, or name\nanother", "a: b; nothing is read", "See why, or name another"),
        ("error -32000 'x: y'; 5 calls", "error -32000 'x: y'; 5 calls", "Look"),
        ("refused: setup failed", "refused: setup failed", "Look"),
    ],
)
def test_the_advice_of_an_error_goes_before_the_general_one(sentence: str, detail: str, advice: str) -> None:
    assert failed("x", sentence, "look") == Finding("x", "failed", detail, advice)


def test_the_verdict_counts_failures_and_not_warnings() -> None:
    good, doubtful, bad = passed("a", "b"), warned("c", "d"), failed("e", "f")
    assert verdict([good]) == "Everything that is configured works."
    assert verdict([good, doubtful]) == "Everything that is configured works. 1 warning."
    assert verdict([good, bad, doubtful, bad]) == "2 of 4 checks failed: e. 1 warning."
    assert verdict([good, bad, failed("g", "h")]) == "2 of 3 checks failed: e, g."


def test_json_has_the_result_beside_the_flag() -> None:
    assert warned("a", "b", "c").payload() == {
        "what": "a",
        "ok": True,
        "detail": "b",
        "result": "warning",
        "advice": "C",
    }
    assert failed("a", "b").payload()["ok"] is False


def test_public_networks_are_those_of_the_settings() -> None:
    assert {network.name: network.chain_id for network in PUBLIC_NETWORKS} == CHAIN_IDS
    assert network_named("mainnet", 1).genesis_hash is not None
    private = network_named("devnet", 7)
    assert (private.chain_id, private.is_public, private.genesis_hash) == (7, False, None)
