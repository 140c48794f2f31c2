"""A real EVM accepts the calldata of the devnet's reports, and nothing that is near it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from eth_abi.abi import decode
from eth_hash.auto import keccak

import evm
from vaultevents.chain.execution.client import ExecutionChain, HeadPolicy, Reverted
from vaultevents.chain.execution.contracts import decode_error
from vaultevents.core.events import ReportUpdateAvailable
from vaultevents.core.reports import ReportLog, observe, read_report
from vaultevents.core.reverts import revert_reason
from vaultevents.core.units import Address, BlockNumber, Hash32
from vaultevents.devnet.acts import Publication, log_of
from vaultevents.devnet.simulation import Simulation

pytestmark = [pytest.mark.integration, pytest.mark.anvil]

INVALID_PROOF, FRESH_ENOUGH = keccak(b"InvalidProof()")[:4], keccak(b"VaultReportIsFreshEnough()")[:4]
PUBLISH = "updateReportData(uint256,uint256,bytes32,string)"
VALUES_END = 4 + 6 * 32


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[evm.Chain]:
    with evm.running(tmp_path) as chain:
        yield chain


@pytest.fixture
def lazy_oracle(chain: evm.Chain) -> bytes:
    return chain.deploy("LazyOracle")


def publications(seed: int = 5, blocks: int = 60) -> list[Publication]:
    """What the oracle of a devnet world publishes, oldest first."""
    world = Simulation(seed, report_every=4)
    world.history(blocks)
    acts = [act for acts in world.acts.values() for act in acts if isinstance(act, Publication)]
    return [act for act in acts if act.emitter == world.lazy_oracle]


def publish(chain: evm.Chain, lazy_oracle: bytes, one: Publication) -> dict[str, Any]:
    """The log that the contract leaves."""
    data = evm.call_data(PUBLISH, one.timestamp_s, one.ref_slot, one.root, one.cid)
    [log] = chain.send(lazy_oracle, data)["logs"]
    found: dict[str, Any] = log
    return found


def outcome(chain: evm.Chain, to: bytes, data: bytes) -> bytes:
    """What a call gives: nothing, or the revert's four bytes. The state stays as it was."""
    call = {"from": "0x" + chain.accounts[0].hex(), "to": "0x" + to.hex(), "data": "0x" + data.hex()}
    try:
        answer: str = chain.rpc("eth_call", call, "latest")
    except evm.RpcError as refused:
        answer = refused.error["data"]
    return bytes.fromhex(answer[2:])


def test_the_contract_emits_the_log_of_the_devnet(chain: evm.Chain, lazy_oracle: bytes) -> None:
    published = publications()
    assert {bool(one.cid) for one in published} == {True, False}
    for one in published:
        raw, ours = publish(chain, lazy_oracle, one), log_of(one)
        assert raw["topics"] == ["0x" + topic.hex() for topic in ours.topics]
        assert raw["data"] == "0x" + ours.data.hex()
        latest = outcome(chain, lazy_oracle, evm.call_data("latestReportData()"))
        told = decode(["uint256", "uint256", "bytes32", "string"], latest)
        assert told == (one.timestamp_s, one.ref_slot, one.root, one.cid)


def test_every_calldata_is_accepted_once(chain: evm.Chain, lazy_oracle: bytes) -> None:
    applied = 0
    for one in publications():
        publish(chain, lazy_oracle, one)
        for vault, calldata in one.calldata:
            assert outcome(chain, lazy_oracle, calldata) == b""
            chain.send(lazy_oracle, calldata)
            stamped = outcome(chain, lazy_oracle, evm.call_data("appliedTimestamp(address)", vault))
            assert int.from_bytes(stamped) == one.timestamp_s
            assert outcome(chain, lazy_oracle, calldata) == FRESH_ENOUGH
            applied += 1
    assert applied > 50


def test_no_changed_byte_and_no_other_proof_is_accepted(chain: evm.Chain, lazy_oracle: bytes) -> None:
    one = next(one for one in publications() if len(one.calldata) > 1)
    publish(chain, lazy_oracle, one)
    (_, calldata), (_, other) = one.calldata[:2]
    words_of_values = range(4 + 31, VALUES_END, 32)
    proof = range(VALUES_END + 2 * 32 + 31, len(calldata), 32)
    for at in (*words_of_values, *proof):
        changed = calldata[:at] + bytes([calldata[at] ^ 1]) + calldata[at + 1 :]
        assert outcome(chain, lazy_oracle, changed) == INVALID_PROOF
    assert outcome(chain, lazy_oracle, calldata[:VALUES_END] + other[VALUES_END:]) == INVALID_PROOF
    shorter = calldata[: VALUES_END + 32] + (len(proof) - 1).to_bytes(32) + calldata[VALUES_END + 2 * 32 : -32]
    assert outcome(chain, lazy_oracle, shorter) == INVALID_PROOF
    assert outcome(chain, lazy_oracle, calldata) == b""


def test_a_superseded_report_is_refused(chain: evm.Chain, lazy_oracle: bytes) -> None:
    published = publications()
    publish(chain, lazy_oracle, published[0])
    refused = 0
    for old, new in pairwise(published):
        assert all(outcome(chain, lazy_oracle, calldata) == b"" for _, calldata in old.calldata)
        publish(chain, lazy_oracle, new)
        for _, calldata in old.calldata:
            assert outcome(chain, lazy_oracle, calldata) == INVALID_PROOF
            refused += 1
    assert refused > 50


async def test_the_calldata_of_our_events_is_accepted_and_reverts_with_a_reason_once_superseded(
    chain: evm.Chain, lazy_oracle: bytes
) -> None:
    """What a webhook carries: made from the file and the log as the resolver does, called as `simulate` does."""
    world = Simulation(5, report_every=4)
    world.history(60)
    older, newer = [one for one in publications() if one.cid][:2]
    oracle = Address(lazy_oracle)
    async with ExecutionChain([chain.url], head=HeadPolicy()) as node:
        publish(chain, lazy_oracle, older)
        log = report_log(older, oracle)
        report = read_report(world.report_files[older.cid], log)
        seen = observe(report, log, report.vaults)
        theirs = dict(older.calldata)
        assert theirs.keys() <= {one.address for one in seen}
        for one in seen:
            assert isinstance(one.payload, ReportUpdateAvailable)
            assert theirs.get(one.address, one.payload.calldata) == one.payload.calldata
            assert await node.call(oracle, one.payload.calldata, chain.number()) == b""
        first = seen[0].payload
        assert isinstance(first, ReportUpdateAvailable)
        tampered = first.calldata[:-1] + bytes([first.calldata[-1] ^ 1])
        refused = await node.call(oracle, tampered, chain.number())
        assert isinstance(refused, Reverted) and reason_of(refused).startswith("InvalidProof")
        chain.send(lazy_oracle, first.calldata)
        again = await node.call(oracle, first.calldata, chain.number())
        assert isinstance(again, Reverted) and reason_of(again).startswith("VaultReportIsFreshEnough")
        publish(chain, lazy_oracle, newer)
        late = await node.call(oracle, seen[1].payload.calldata, chain.number())  # type: ignore[union-attr]
        assert isinstance(late, Reverted) and "superseded" in reason_of(late)


def reason_of(refused: Reverted) -> str:
    named = decode_error(refused)
    return revert_reason(named.name, named.arguments, named.data)


def report_log(one: Publication, oracle: Address) -> ReportLog:
    tx_hash = Hash32(bytes(32))
    return ReportLog(one.timestamp_s, one.ref_slot, Hash32(one.root), one.cid, BlockNumber(1), 1000, tx_hash, 0, oracle)
