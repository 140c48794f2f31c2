"""Contracts on a real EVM, the service as a process of its own, verified webhooks at the end."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eth_utils.address import to_checksum_address

import evm
import newer_form
from command_line import CommandLine, Running, delivered
from timeouts import until
from vaultevents.devnet.receivers import Hook, Receivers

pytestmark = [pytest.mark.e2e, pytest.mark.anvil]

CONFIG = Path(__file__).resolve().parents[2] / "config" / "devnet.toml"
ETH = 10**18


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[evm.Chain]:
    with evm.running(tmp_path) as chain:
        yield chain


class Operator:
    """The service over a chain, with the shipped configuration; only node, authority and port of the API are set."""

    def __init__(self, home: Path, chain: evm.Chain, receivers: Receivers) -> None:
        text = CONFIG.read_text().replace("http://127.0.0.1:8545", chain.url)
        assert chain.url in text
        assert receivers.ca_path == home / "ca.pem"
        (home / "vaultevents.toml").write_text(
            text.replace('# ca_file = "ca.pem"', 'ca_file = "ca.pem"').replace(
                '# data_dir = "/var/lib/vaultevents"', 'data_dir = "data"'
            )
        )
        self.shell = CommandLine.of(home, VAULTEVENTS_API__PORT="0", VAULTEVENTS_METRICS__PORT="0")
        self.receivers = receivers

    async def does(self, *arguments: str) -> Any:
        return (await self.shell.run(*arguments, "--json")).ok().json

    async def hook(self, account_id: str) -> Hook:
        hook = self.receivers.hook(account_id)
        hook.secret = (await self.does("webhook", "add", account_id, hook.url))["secretToken"]
        return hook

    async def run(self) -> Running:
        running = await self.shell.start("run")
        await running.said('"started"')
        return running


def hex_of(address: bytes) -> str:
    return "0x" + address.hex()


def funding(account_id: str, receipt: dict[str, Any], amount_wei: int, suffix: str = "") -> tuple[str, str]:
    """Id and amount of a funding event, as a receiver would write it down."""
    return f"funding_received_{account_id}_{receipt['transactionHash'].upper()}{suffix}", str(amount_wei)


def claim(account_id: str, queue: bytes, request_id: int, amount_eth: str) -> tuple[str, str]:
    return f"withdrawal_claimed_{account_id}_{to_checksum_address(queue)}_{request_id}", amount_eth


def booked(hook: Hook) -> set[tuple[str, str]]:
    """What a receiver has booked: id and amount of all that verified."""
    assert hook.bad_signatures == 0
    found = set()
    for request in hook.accepted:
        body = json.loads(request.body)
        assert body["id"] == request.webhook_id
        amount = body["payload"].get("amount_wei") or body["payload"].get("amount_eth")
        found.add((request.webhook_id, amount))
    return found


async def test_from_a_real_evm_to_verified_webhooks(tmp_path: Path, chain: evm.Chain) -> None:
    receivers = Receivers(tmp_path)
    await receivers.start()
    operator = Operator(tmp_path, chain, receivers)
    first, second, third = (chain.deploy("StakingVault") for _ in range(3))
    queue, multicall = chain.deploy("WithdrawalQueue"), chain.deploy("Multicall")
    owner, recipient = chain.accounts[1:3]
    early = chain.fund(first, 1 * ETH)
    chain.finalize()
    try:
        await operator.does("account", "add", "acme")
        await operator.does("account", "add", "zeta")
        creation = ("--start-block", "creation")
        await operator.does("vault", "add", "acme", "one", hex_of(first), "--queue", hex_of(queue), *creation)
        await operator.does("vault", "add", "acme", "two", hex_of(second), *creation)
        await operator.does("vault", "add", "zeta", "three", hex_of(third), *creation)
        acme, zeta = await operator.hook("acme"), await operator.hook("zeta")

        running = await operator.run()
        expected = {funding("acme", early, 1 * ETH)}
        await until(lambda: booked(acme) == expected)

        twice = chain.multicall(
            multicall, [evm.Inner(first, 2 * ETH, evm.FUND), evm.Inner(first, 3 * ETH + 7, evm.FUND)]
        )
        await asyncio.sleep(0.7)
        assert booked(acme) == expected, "what is not final is sent to nobody"
        chain.finalize()
        expected |= {funding("acme", twice, 5 * ETH + 7)}
        await until(lambda: booked(acme) == expected)

        running.send_signal(signal.SIGKILL)
        await running.end(None)
        three = chain.multicall(
            multicall, [evm.Inner(vault, n, evm.FUND) for n, vault in enumerate((second, third, first), 1)]
        )
        requests = [chain.request_withdrawal(queue, owner, ETH // 1000), chain.request_withdrawal(queue, owner, 0)]
        chain.claim(queue, owner, recipient, *requests)
        chain.finalize()
        running = await operator.run()
        expected |= {
            funding("acme", three, 1),
            funding("acme", three, 3, "_3"),
            claim("acme", queue, requests[0], "0.001"),
            claim("acme", queue, requests[1], "0"),
        }
        await until(lambda: booked(acme) >= expected and bool(zeta.ledger))
        (await running.end()).ok()

        assert booked(acme) == expected
        assert booked(zeta) == {funding("zeta", three, 2, "_2")}
        assert set(delivered(acme).values()) == {1}
        head = str(chain.number("finalized"))
        replayed = await operator.does("replay", "--from-block", "0", "--to-block", head)
        same = {"derived": 7, "identical": 7, "inserted": 0, "different": 0, "near_head": 0}
        assert replayed == {**same, "failures": []}
    finally:
        await operator.shell.kill_all()
        await receivers.stop()


async def test_a_queue_whose_owner_changes_its_events_on_a_real_evm(tmp_path: Path, chain: evm.Chain) -> None:
    receivers = Receivers(tmp_path)
    await receivers.start()
    operator = Operator(tmp_path, chain, receivers)
    vaults, queue = [chain.deploy("StakingVault") for _ in range(2)], chain.deploy("UnindexedWithdrawalQueue")
    chain.finalize()
    try:
        for account, vault in zip(("acme", "zeta"), vaults, strict=True):
            await operator.does("account", "add", account)
            queued = ("--queue", hex_of(queue)) if account == "acme" else ()
            await operator.does("vault", "add", account, "one", hex_of(vault), *queued, "--start-block", "creation")
        acme, zeta = await operator.hook("acme"), await operator.hook("zeta")
        running = await operator.run()
        odd = chain.send(queue, evm.call_data("claim(uint256,address,uint256)", 7, chain.accounts[1], ETH // 4))
        funded = [chain.fund(vault, n * ETH) for n, vault in enumerate(vaults, 1)]
        chain.finalize()
        expected = {funding("acme", funded[0], 1 * ETH)}
        await until(lambda: booked(acme) == expected and booked(zeta) == {funding("zeta", funded[1], 2 * ETH)})
        await running.said('"log_quarantined"')
        (await running.end()).ok()
        (entry,) = (await operator.does("quarantine", "list"))["logs"]
        assert (entry["txHash"], entry["accounts"]) == (odd["transactionHash"], ["acme"])
        operator.shell = replace(operator.shell, program=(str(Path(newer_form.__file__)),))
        assert (await operator.does("quarantine", "retry", "--all"))["inserted"] == 1
        running = await operator.run()
        expected |= {claim("acme", queue, 7, "0.25")}
        await until(lambda: booked(acme) == expected)
        (await running.end()).ok()
        assert set(delivered(acme).values()) == {1}
        assert booked(zeta) == {funding("zeta", funded[1], 2 * ETH)}
    finally:
        await operator.shell.kill_all()
        await receivers.stop()


async def test_a_reorganisation_on_a_real_evm_takes_back_what_vanished_and_keeps_what_stands(
    tmp_path: Path, chain: evm.Chain
) -> None:
    receivers = Receivers(tmp_path)
    await receivers.start()
    operator = Operator(tmp_path, chain, receivers)
    config = tmp_path / "vaultevents.toml"
    config.write_text(config.read_text().replace('# head = "finalized"', 'head = "latest-0"  #'))
    assert 'head = "latest-0"' in config.read_text()
    vault = chain.deploy("StakingVault")
    chain.finalize()
    try:
        await operator.does("account", "add", "acme")
        await operator.does("vault", "add", "acme", "one", hex_of(vault), "--start-block", "creation")
        acme = await operator.hook("acme")
        running = await operator.run()
        stays, vanishes = (chain.fund(vault, n * ETH, sender=chain.accounts[n]) for n in (1, 2))
        both = {funding("acme", stays, 1 * ETH), funding("acme", vanishes, 2 * ETH)}
        await until(lambda: booked(acme) == both)

        raw = chain.rpc("eth_getRawTransactionByHash", stays["transactionHash"])
        chain.rpc("anvil_reorg", 2, [[raw, 1]])
        later = chain.fund(vault, 3 * ETH, sender=chain.accounts[3])
        assert chain.receipt(stays["transactionHash"])["blockHash"] != stays["blockHash"]
        await until(lambda: booked(acme) == {*both, funding("acme", later, 3 * ETH)})
        status = await operator.does("status")
        assert (status["rewinds"], status["orphaned_events"]) == (1, 1)
        (orphan,) = status["orphaned"]
        assert (orphan["event_id"], orphan["delivered"]) == (funding("acme", vanishes, 0)[0], 1)

        chain.finalize()
        head = str(chain.number("finalized"))
        replayed = await operator.does("replay", "--from-block", "0", "--to-block", head)
        assert (replayed["derived"], replayed["inserted"], replayed["different"]) == (2, 0, 0)
        (await running.end()).ok()
    finally:
        await operator.shell.kill_all()
        await receivers.stop()
