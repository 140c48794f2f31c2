"""Faults fire at their rate, the same for the same seed, whatever the time or the order."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from vaultevents.devnet.faults import BLOCK_FAULTS, LOG_FAULTS, WITHDRAWAL_FAULTS, Fault, Faults, fires
from vaultevents.devnet.tampering import tamper_block, tamper_logs

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("kind", list(Fault))
@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_each_fault_fires_at_its_rate(kind: Fault, rate: float) -> None:
    faults = Faults(11, {kind: rate})
    drawn = [faults.draw(f"request {n % 500}", (kind,)) for n in range(4000)]
    assert drawn.count(kind) == faults.fired[kind]
    assert abs(faults.fired[kind] - rate * 4000) <= 4000 * 0.02


def test_the_same_seed_gives_the_same_faults_in_any_order() -> None:
    keys = [f"k{n}" for n in range(50)] * 4
    shuffled = Random(1).sample(keys, len(keys))

    def struck(order: list[str], seed: int) -> list[tuple[str, int]]:
        faults, seen, hits = Faults(seed, {Fault.EMPTY_LOGS: 0.3}), dict.fromkeys(order, 0), []
        for key in order:
            if faults.draw(key, LOG_FAULTS):
                hits.append((key, seen[key]))
            seen[key] += 1
        return sorted(hits)

    assert struck(keys, 1) == struck(shuffled, 1)
    assert struck(keys, 1) != struck(keys, 2)


def test_a_retry_of_the_same_request_is_another_draw() -> None:
    decisions = {fires(1, Fault.ERROR, "same request", nth, 0.5) for nth in range(20)}
    assert decisions == {True, False}


def test_a_scripted_fault_strikes_so_many_times_and_waits_for_its_kind_of_request() -> None:
    faults = Faults(1)
    faults.once(Fault.NULL_BLOCK, times=2)
    assert faults.draw("logs", LOG_FAULTS) is None
    assert [faults.draw("block", BLOCK_FAULTS) for _ in range(3)] == [Fault.NULL_BLOCK, Fault.NULL_BLOCK, None]


def test_stopped_faults_stay_counted() -> None:
    faults = Faults(1, {Fault.ERROR: 1.0})
    assert faults.draw("x", (Fault.ERROR,)) is Fault.ERROR
    faults.stop()
    assert faults.draw("x", (Fault.ERROR,)) is None
    assert faults.fired == {Fault.ERROR: 1}


@pytest.mark.parametrize("kind", LOG_FAULTS)
def test_every_log_fault_changes_the_answer_and_leaves_the_original_alone(kind: Fault) -> None:
    logs = [{"blockNumber": "0x5", "blockHash": f"0x{n}", "removed": False} for n in range(3)]
    before = [dict(log) for log in logs]
    assert tamper_logs(kind, logs) != logs
    assert tamper_logs(kind, logs[:1]) != logs[:1]
    assert logs == before


@pytest.mark.parametrize("kind", [*BLOCK_FAULTS, *WITHDRAWAL_FAULTS, Fault.WRONG_GENESIS])
def test_every_block_fault_changes_the_block_and_leaves_the_original_alone(kind: Fault) -> None:
    block: dict[str, Any] = {
        "number": "0x0",
        "hash": "0x1",
        "parentHash": "0x2",
        "withdrawals": [{"index": hex(n)} for n in range(3)],
    }
    before = {**block, "withdrawals": list(block["withdrawals"])}
    assert tamper_block(kind, block) != block
    assert block == before


def test_the_faults_of_withdrawals_break_the_index_in_the_middle_of_a_block() -> None:
    def indices(kind: Fault) -> list[int]:
        tampered = tamper_block(kind, {"withdrawals": [{"index": n} for n in (5, 6, 7)]})
        return [withdrawal["index"] for withdrawal in (tampered or {})["withdrawals"]]

    assert indices(Fault.WITHDRAWAL_GAP) == [5, 7]
    assert indices(Fault.WITHDRAWAL_TWICE) == [5, 5, 6, 7]
    assert tamper_block(Fault.NO_WITHDRAWALS, {"number": "0x1", "withdrawals": []}) == {"number": "0x1"}
