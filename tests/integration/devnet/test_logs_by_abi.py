"""Raw decoding and web3 say the same of every log, on the devnet and on anvil."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest

import evm
from contracts_fixtures import Protocol, running_protocol
from vaultevents.chain.execution.contracts import (
    CONTRACTS,
    ContractMismatch,
    ContractName,
    decode_log,
    event_topic,
    read_abi,
    web3_over,
)
from vaultevents.core.events import FundingReceived, WithdrawalClaimed
from vaultevents.core.logs import ETHER_FUNDED, REPORT_UPDATED, WITHDRAWAL_CLAIMED, Log, fold
from vaultevents.core.registry import Watched
from vaultevents.core.reports import ReportLog, decode
from vaultevents.core.units import Address, Hash32, checksum
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.simulation import Simulation

pytestmark = pytest.mark.integration

Arguments = dict[str, object]


def raw_arguments(log: Log) -> Arguments | None:
    """What the service decodes of a log of the streams, by the names of the ABI; None where it cannot."""
    if log.topics[0] == REPORT_UPDATED:
        report = decode(log, 1)
        if not isinstance(report, ReportLog):
            return None
        return {"timestamp": report.timestamp, "refSlot": report.ref_slot, "root": report.root, "cid": report.cid}
    watched = Watched(frozenset([log.address]), frozenset([log.address]))
    folded = fold([log], {log.block_number: 1}, watched)
    if folded.undecodable:
        return None
    match folded.observations[0].payload:
        case FundingReceived() as funding:
            return {"amount": funding.amount_wei}
        case WithdrawalClaimed() as claim:
            return {
                "requestId": claim.request_id,
                "owner": claim.owner,
                "recipient": claim.recipient,
                "amountOfETH": claim.amount_wei,
            }
    raise AssertionError(f"another kind of event: {folded.observations[0].payload}")


STREAMS: dict[Hash32, tuple[ContractName, str]] = {
    ETHER_FUNDED: ("StakingVault", "EtherFunded"),
    WITHDRAWAL_CLAIMED: ("WithdrawalQueue", "WithdrawalClaimed"),
    REPORT_UPDATED: ("LazyOracle", "VaultsReportDataUpdated"),
}


def abi_arguments(log: Log) -> Arguments | None:
    """What is decoded of the same log by its ABI; None where it cannot be."""
    try:
        return decode_log(*STREAMS[log.topics[0]], log)
    except ContractMismatch:
        return None


@cache
def web3_event(contract: ContractName, event: str) -> Any:
    web3 = web3_over(cast(Any, None))  # nothing is asked
    return web3.eth.contract(abi=cast(Any, read_abi(contract))).events[event]()


def web3_arguments(contract: ContractName, event: str, log: Log) -> Arguments:
    """What the event classes of web3 decode."""
    receipt = {
        "address": checksum(log.address),
        "topics": list(log.topics),
        "data": log.data,
        "blockNumber": log.block_number,
        "blockHash": log.block_hash,
        "transactionHash": log.tx_hash,
        "transactionIndex": 0,
        "logIndex": log.log_index,
    }
    return dict(web3_event(contract, event).process_log(receipt)["args"])


def as_web3_shows(value: Any) -> Any:
    """Our values in the form of web3: addresses in their checksum form."""
    match value:
        case dict():
            return {name: as_web3_shows(item) for name, item in value.items()}
        case list():
            return [as_web3_shows(item) for item in value]
        case bytes() if len(value) == 20:
            return checksum(value)
    return value


def compared(logs: Sequence[Log]) -> dict[bool, int]:
    """How many logs were decoded, and how many refused, by both alike."""
    counts = {True: 0, False: 0}
    for log in logs:
        raw, ours = raw_arguments(log), abi_arguments(log)
        assert raw == ours, log
        if raw is not None:
            assert web3_arguments(*STREAMS[log.topics[0]], log) == as_web3_shows(raw)
        counts[raw is not None] += 1
    return counts


def devnet_logs(chain: Chain) -> list[Log]:
    """Every log of a devnet, as the service has it."""
    return [
        Log(
            address=Address(placed.log.address),
            topics=tuple(map(Hash32, placed.log.topics)),
            data=placed.log.data,
            block_number=placed.block.number,
            block_hash=Hash32(placed.block.hash),
            tx_hash=Hash32(placed.tx_hash),
            log_index=placed.log_index,
        )
        for placed in chain.logs(0, chain.head.number)
    ]


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    simulation = Simulation(11, report_every=4)
    simulation.history(150)
    return simulation


def test_every_log_of_the_devnet(simulation: Simulation) -> None:
    logs = [log for log in devnet_logs(simulation.chain) if log.topics and log.topics[0] in STREAMS]
    assert {log.topics[0] for log in logs} == STREAMS.keys()
    counts = compared(logs)
    assert counts[True] > 200
    assert counts[False] > 0  # foreign contracts emit other forms


def changed(log: Log) -> Iterator[Log]:
    """Forms that no contract of the protocol emits."""
    yield replace(log, topics=log.topics[:-1] or log.topics * 2)
    yield replace(log, topics=(*log.topics, Hash32(bytes(32))))
    yield replace(log, data=log.data[:-1])
    yield replace(log, data=log.data + bytes(32))
    yield replace(log, data=b"")
    if log.topics[0] == WITHDRAWAL_CLAIMED:
        yield replace(log, topics=(*log.topics[:3], Hash32(b"\x01" + log.topics[3][1:])))
    if log.topics[0] == REPORT_UPDATED:
        yield replace(log, data=(64).to_bytes(32) + log.data[32:])
        yield replace(log, data=log.data[:32] + (2**255).to_bytes(32) + log.data[64:])
        yield replace(log, data=log.data[:32] + len(log.data).to_bytes(32) + log.data[64:])


def test_changed_logs_are_refused_by_both(simulation: Simulation) -> None:
    samples = {log.topics[0]: log for log in devnet_logs(simulation.chain) if raw_is_known(log)}
    assert len(samples) == 3
    counts = compared([broken for log in samples.values() for broken in changed(log)])
    assert counts == {True: 0, False: 3 * 5 + 1 + 3}


def raw_is_known(log: Log) -> bool:
    return bool(log.topics) and log.topics[0] in STREAMS and raw_arguments(log) is not None


@pytest.fixture(scope="module")
def protocol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protocol]:
    with running_protocol(tmp_path_factory.mktemp("anvil")) as protocol:
        yield protocol


@pytest.mark.anvil
def test_every_log_of_anvil(protocol: Protocol) -> None:
    """All that the contracts emit decodes by their ABIs; the logs of the streams are also decoded raw."""
    chain, owner = protocol.chain, protocol.chain.accounts[5]
    created, pool = protocol.create_vault(), protocol.create_pool()
    assert pool.queue is not None
    chain.send(created.dashboard, value_wei=7)
    requests = [chain.request_withdrawal(pool.queue, owner, amount) for amount in (10**18, 0, 5)]
    chain.claim(pool.queue, owner, chain.accounts[6], *requests)
    for timestamp, cid in ((1_770_000_000, "Qm" + "1" * 44), (1_770_000_012, "")):
        published = evm.call_data(
            "updateReportData(uint256,uint256,bytes32,string)", timestamp, timestamp // 12, b"\x05" * 32, cid
        )
        chain.send(protocol.oracle, published)
    chain.send(protocol.guarantee, evm.call_data("activate(address,bytes)", created.vault, b"\x08" * 48))
    chain.send(protocol.guarantee, evm.call_data("compensate(address,bytes)", created.vault, b"\x08" * 48))
    chain.send(protocol.operator_grid, evm.call_data("changeTier(address,uint256,uint256)", created.vault, 2, 3))
    chain.send(protocol.operator_grid, evm.call_data("setVaultJailStatus(address,bool)", created.vault, True))
    chain.send(created.dashboard, evm.call_data("transferVaultOwnership(address)", chain.accounts[7]))
    protocol.disconnect(pool)

    logs = list(map(evm.as_log, chain.logs()))
    kept = [log for log in logs if log.topics[0] in STREAMS]
    assert compared(kept) == {True: 3 + 3 + 2, False: 0}
    events: dict[Hash32, list[tuple[ContractName, str]]] = {}
    for contract in CONTRACTS:
        for entry in read_abi(contract):
            if entry["type"] == "event":
                events.setdefault(event_topic(contract, entry["name"]), []).append((contract, entry["name"]))
    seen = {event for log in logs for event in events[log.topics[0]]}
    for log in logs:
        for contract, event in events[log.topics[0]]:
            assert as_web3_shows(decode_log(contract, event, log)) == web3_arguments(contract, event, log)
    assert len(seen) > 20
