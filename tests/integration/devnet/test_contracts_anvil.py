"""What a real EVM says about the facts this service relies on, read through `core.logs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from eth_hash.auto import keccak

import evm
from blooms import bloom_of
from vaultevents.core.events import FundingReceived, Observation, WithdrawalClaimed
from vaultevents.core.logs import (
    ETHER_FUNDED,
    REPORT_UPDATED,
    TOPICS,
    WITHDRAWAL_CLAIMED,
    bloom_may_hold,
    fold,
)
from vaultevents.core.registry import Watched
from vaultevents.core.units import Address, Hash32, Wei

pytestmark = [pytest.mark.integration, pytest.mark.anvil]

ETH = 10**18


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[evm.Chain]:
    with evm.running(tmp_path) as chain:
        yield chain


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("0x"))


def observed(chain: evm.Chain, vaults: Sequence[bytes] = (), queues: Sequence[bytes] = ()) -> list[Observation]:
    """All of the chain, asked by topic as the service does, folded for the given watched addresses."""
    watched = Watched(frozenset(map(Address, vaults)), frozenset(map(Address, queues)))
    logs = [evm.as_log(raw) for raw in chain.logs(topics=TOPICS)]
    times_s = {number: int(chain.block(number)["timestamp"], 16) for number in {log.block_number for log in logs}}
    folded = fold(logs, times_s, watched)
    assert folded.undecodable == []
    return folded.observations


def funding(receipt: dict[str, Any], vault: bytes, amount_wei: int, position: int = 1) -> Observation:
    """The observation that a funding transaction must give."""
    block = int(receipt["blockNumber"], 16)
    payload = FundingReceived(Hash32(_bytes(receipt["transactionHash"])), Wei(amount_wei), Address(vault), position)
    return Observation(Address(vault), block, _time_ms(block), payload)


def claim(
    receipt: dict[str, Any], queue: bytes, request_id: int, owner: bytes, recipient: bytes, amount_wei: int
) -> Observation:
    """The observation that a claim must give."""
    block = int(receipt["blockNumber"], 16)
    payload = WithdrawalClaimed(
        tx_hash=Hash32(_bytes(receipt["transactionHash"])),
        request_id=request_id,
        recipient=Address(recipient),
        owner=Address(owner),
        amount_wei=Wei(amount_wei),
        queue=Address(queue),
    )
    return Observation(Address(queue), block, _time_ms(block), payload)


def _time_ms(block: int) -> int:
    return (evm.GENESIS_S + evm.SECONDS_PER_BLOCK * block) * 1000


def test_topics_are_those_of_the_compiled_contracts() -> None:
    names = {"EtherFunded", "WithdrawalClaimed", "VaultsReportDataUpdated"}
    events = {
        (item["name"], f"{item['name']}({','.join(parameter['type'] for parameter in item['inputs'])})")
        for contract in evm.compiled().values()
        for item in contract["abi"]
        if item["type"] == "event" and item["name"] in names
    }
    topics = {name: keccak(signature.encode()) for name, signature in events}
    assert len(events) == len(topics)
    assert topics == {
        "EtherFunded": ETHER_FUNDED,
        "WithdrawalClaimed": WITHDRAWAL_CLAIMED,
        "VaultsReportDataUpdated": REPORT_UPDATED,
    }


def test_fund_gives_one_log_with_the_amount_and_nothing_indexed(chain: evm.Chain) -> None:
    vault = chain.deploy("StakingVault")
    receipt = chain.fund(vault, 32 * ETH + 1)
    (raw,) = chain.logs()
    assert raw["topics"] == ["0x" + ETHER_FUNDED.hex()]
    assert raw["data"] == f"0x{32 * ETH + 1:064x}"
    assert raw["blockHash"] == chain.block(int(raw["blockNumber"], 16))["hash"]
    assert observed(chain, [vault]) == [funding(receipt, vault, 32 * ETH + 1)]


def test_a_log_carries_the_time_of_its_block(chain: evm.Chain) -> None:
    chain.fund(chain.deploy("StakingVault"), 1)
    (log,) = map(evm.as_log, chain.logs())
    assert log.timestamp_s == int(chain.block(log.block_number)["timestamp"], 16)


def test_funding_nothing_reverts_and_gives_no_log(chain: evm.Chain) -> None:
    vault = chain.deploy("StakingVault")
    receipt = chain.send(vault, evm.FUND, 0, reverts=True)
    assert receipt["logs"] == []
    assert chain.logs() == []


def test_a_plain_transfer_raises_the_balance_without_any_log(chain: evm.Chain) -> None:
    vault = chain.deploy("StakingVault")
    chain.send(vault, value_wei=ETH)
    assert chain.balance_wei(vault) == ETH
    assert chain.logs() == []


def test_one_vault_funded_twice_in_one_transaction_is_one_event_with_the_sum(chain: evm.Chain) -> None:
    vault, multicall = chain.deploy("StakingVault"), chain.deploy("Multicall")
    receipt = chain.multicall(multicall, [evm.Inner(vault, 3, evm.FUND), evm.Inner(vault, 4, evm.FUND)])
    assert [int(raw["data"], 16) for raw in chain.logs()] == [3, 4]
    assert observed(chain, [vault]) == [funding(receipt, vault, 7)]


def test_three_vaults_in_one_transaction_are_counted_in_log_order_whoever_watches_them(chain: evm.Chain) -> None:
    foreign, first, second = (chain.deploy("StakingVault") for _ in range(3))
    multicall = chain.deploy("Multicall")
    amounts = [(foreign, 1), (first, 2), (second, 4), (first, 8)]
    receipt = chain.multicall(multicall, [evm.Inner(vault, wei, evm.FUND) for vault, wei in amounts])
    assert observed(chain, [first, second]) == [
        funding(receipt, first, 10, position=2),
        funding(receipt, second, 4, position=3),
    ]
    assert observed(chain, [second]) == [funding(receipt, second, 4, position=3)]


def test_two_transactions_of_one_block_are_two_events_and_each_counts_from_one(chain: evm.Chain) -> None:
    first, second = chain.deploy("StakingVault"), chain.deploy("StakingVault")
    hashes = [chain.submit(first, evm.FUND, 5), chain.submit(second, evm.FUND, 6, sender=chain.accounts[1])]
    chain.mine()
    receipts = [chain.receipt(tx_hash) for tx_hash in hashes]
    assert receipts[0]["blockNumber"] == receipts[1]["blockNumber"]
    assert [raw["logIndex"] for raw in chain.logs()] == ["0x0", "0x1"]  # counted through the block
    expected = [funding(receipts[0], first, 5), funding(receipts[1], second, 6)]
    assert observed(chain, [first, second]) == expected


def test_a_tolerated_inner_revert_takes_its_logs_with_it(chain: evm.Chain) -> None:
    vault, multicall = chain.deploy("StakingVault"), chain.deploy("Multicall")
    nested = evm.multicall_data([evm.Inner(vault, 5, evm.FUND), evm.Inner(vault, 0, evm.FUND)])
    calls = [evm.Inner(multicall, 5, nested), evm.Inner(vault, 9, evm.FUND)]
    receipt = chain.multicall(multicall, calls, tolerant=True)
    assert chain.balance_wei(vault) == 9  # the 5 came back with the failing call
    assert observed(chain, [vault]) == [funding(receipt, vault, 9)]


def test_a_reverted_transaction_has_no_logs(chain: evm.Chain) -> None:
    vault, multicall = chain.deploy("StakingVault"), chain.deploy("Multicall")
    data = evm.multicall_data([evm.Inner(vault, 5, evm.FUND), evm.Inner(vault, 0, evm.FUND)])
    chain.send(multicall, data, 5, reverts=True)
    assert chain.logs() == []


def test_a_claim_names_owner_before_recipient(chain: evm.Chain) -> None:
    queue, owner, recipient = chain.deploy("WithdrawalQueue"), chain.accounts[1], chain.accounts[2]
    request_id = chain.request_withdrawal(queue, owner, ETH)
    before_wei = chain.balance_wei(recipient)
    receipt = chain.claim(queue, owner, recipient, request_id)
    (raw,) = chain.logs()
    assert raw["topics"][2:] == [f"0x{owner.hex():0>64}", f"0x{recipient.hex():0>64}"]
    assert chain.balance_wei(recipient) == before_wei + ETH
    assert observed(chain, queues=[queue]) == [claim(receipt, queue, 1, owner, recipient, ETH)]


def test_a_batch_claim_gives_one_log_for_each_request_and_zero_is_an_amount(chain: evm.Chain) -> None:
    queue, owner, recipient = chain.deploy("WithdrawalQueue"), chain.accounts[1], chain.deploy("StakingVault")
    amounts = [7, 0, 2**64 + 1]
    ids = [chain.request_withdrawal(queue, owner, amount) for amount in amounts]
    receipt = chain.claim(queue, owner, recipient, *ids)
    assert observed(chain, queues=[queue]) == [
        claim(receipt, queue, request_id, owner, recipient, amount)
        for request_id, amount in zip(ids, amounts, strict=True)
    ]


def test_only_the_owner_claims_and_only_once(chain: evm.Chain) -> None:
    queue, owner, stranger = chain.deploy("WithdrawalQueue"), chain.accounts[1], chain.accounts[2]
    data = evm.call_data("claimWithdrawal(address,uint256)", stranger, chain.request_withdrawal(queue, owner, 1))
    chain.send(queue, data, sender=stranger, reverts=True)
    chain.send(queue, data, sender=owner)
    chain.send(queue, data, sender=owner, reverts=True)
    assert len(chain.logs()) == 1


def test_a_claim_at_a_queue_nobody_watches_is_not_seen(chain: evm.Chain) -> None:
    ours, look_alike, owner = chain.deploy("WithdrawalQueue"), chain.deploy("WithdrawalQueue"), chain.accounts[1]
    chain.claim(look_alike, owner, owner, chain.request_withdrawal(look_alike, owner, 1))
    assert len(chain.logs(topics=[WITHDRAWAL_CLAIMED])) == 1
    assert observed(chain, vaults=[look_alike], queues=[ours]) == []


def test_topics_select_logs_as_alternatives(chain: evm.Chain) -> None:
    vault, queue, owner = chain.deploy("StakingVault"), chain.deploy("WithdrawalQueue"), chain.accounts[1]
    chain.fund(vault, 1)
    chain.claim(queue, owner, owner, chain.request_withdrawal(queue, owner, 1))
    assert len(chain.logs(topics=[ETHER_FUNDED])) == 1
    assert len(chain.logs(topics=[WITHDRAWAL_CLAIMED])) == 1
    assert len(chain.logs(topics=TOPICS)) == 2


def test_the_bloom_of_a_header_is_the_bloom_of_its_logs(chain: evm.Chain) -> None:
    vault, queue, multicall = (chain.deploy(name) for name in ("StakingVault", "WithdrawalQueue", "Multicall"))
    owner = chain.accounts[1]
    request_id = chain.request_withdrawal(queue, owner, 1)
    claim_data = evm.call_data("claimWithdrawal(address,uint256)", owner, request_id)
    chain.submit(multicall, evm.multicall_data([evm.Inner(vault, 1, evm.FUND)]), 1)
    chain.submit(queue, claim_data, sender=owner)
    chain.mine()
    number = chain.number()
    bloom = _bytes(chain.block(number)["logsBloom"])
    logs = [evm.as_log(raw) for raw in chain.logs(number, number)]
    assert len(logs) == 2
    assert bloom == bloom_of(logs)
    assert bloom_may_hold(bloom, vault, ETHER_FUNDED)
    assert bloom_may_hold(bloom, queue, WITHDRAWAL_CLAIMED)
    assert not bloom_may_hold(bloom, multicall)  # it called, and emitted nothing


def test_an_empty_block_has_an_empty_bloom(chain: evm.Chain) -> None:
    chain.mine()
    bloom = _bytes(chain.block()["logsBloom"])
    assert bloom == bloom_of([]) == bytes(256)
    assert not bloom_may_hold(bloom, ETHER_FUNDED)


def test_finalized_and_safe_follow_the_head_at_a_fixed_distance(chain: evm.Chain) -> None:
    assert [chain.number(tag) for tag in ("latest", "safe", "finalized")] == [0, 0, 0]
    chain.mine(evm.FINALIZED_DEPTH - 1)
    assert [chain.number(tag) for tag in ("latest", "safe", "finalized")] == [7, 3, 0]
    chain.finalize()
    assert [chain.number(tag) for tag in ("latest", "safe", "finalized")] == [15, 11, 7]


def test_every_block_links_to_its_parent(chain: evm.Chain) -> None:
    chain.fund(chain.deploy("StakingVault"), 1)
    chain.mine(2)
    blocks = [chain.block(number) for number in range(chain.number() + 1)]
    assert [block["parentHash"] for block in blocks[1:]] == [block["hash"] for block in blocks[:-1]]


def test_a_missing_anvil_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(evm, "BUNDLED_ANVIL", tmp_path / "anvil")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="neither in contracts/node_modules nor on PATH"):
        evm.anvil_path()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="npm ci"):
        evm.anvil_path()
