"""Vaults that factories made, and addresses that are no vault, recognised on a real EVM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from contracts_fixtures import CreatedVault, Protocol, running_protocol
from evm import call_data
from vaultevents import config
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy
from vaultevents.config import Settings
from vaultevents.core.errors import InputError
from vaultevents.core.units import Address, checksum
from vaultevents.wiring.vault_recognition import Discovered, Recognised, discover, recognise

pytestmark = [pytest.mark.integration, pytest.mark.anvil]

OPTIONS = ExecutionOptions(retry_wait_s=0.01, set_aside_s=0.1, log_range_max=9)
MANY = 5000


@dataclass(frozen=True, slots=True)
class Made:
    """The vaults of the module: of each factory, with and without a pool or a connection."""

    protocol: Protocol
    connected: CreatedVault
    alone: CreatedVault
    former: CreatedVault
    pool: CreatedVault

    def settings(self, **contracts: Any) -> Settings:
        named = {
            "lido_locator": text(self.protocol.locator),
            "wrapper_factory": text(self.protocol.wrapper_factory),
            **contracts,
        }
        return config.given({"network": "devnet", "chain_id": 31337, "contracts": named}, "test")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    with running_protocol(tmp_path_factory.mktemp("anvil")) as protocol:
        alone = protocol.create_vault(connected=False)
        former = protocol.create_vault(factory=protocol.previous_factory)
        connected, pool = protocol.create_vault(operator=protocol.chain.accounts[5]), protocol.create_pool()
        protocol.chain.mine(20)
        protocol.chain.finalize()
        yield Made(protocol, connected, alone, former, pool)


@pytest.fixture
async def chain(made: Made) -> AsyncIterator[ExecutionChain]:
    async with over(made.protocol.chain.url) as opened:
        yield opened


def over(*urls: str) -> ExecutionChain:
    return ExecutionChain(urls, head=HeadPolicy(), options=OPTIONS)


def text(address: bytes) -> str:
    return f"0x{address.hex()}"


def quiet(_what: str, _done: int, _of: int) -> None:
    """Show nothing."""


async def recognised(made: Made, chain: ExecutionChain, vault: Address, queue: Address | None = None) -> Recognised:
    return await recognise(made.settings(), chain, vault, queue, quiet)


async def discovered(made: Made, chain: ExecutionChain, **contracts: Any) -> Discovered:
    return await discover(made.settings(**contracts), chain, None, None, quiet)


Change = Callable[[dict[str, Any], Any], Any]
"""Takes a call and its result, and returns what the node says instead; raises `Refused` for an error."""


class Refused(Exception):
    """An error answer."""


@asynccontextmanager
async def altered(url: str, change: Change) -> AsyncIterator[str]:
    """A node that answers as the one at `url` does, except for what `change` replaces."""

    async def answer(request: web.Request) -> web.Response:
        calls = await request.json()
        async with aiohttp.ClientSession() as session, session.post(url, json=calls) as response:
            replies = await response.json()
        for call, reply in zip(calls, replies, strict=True) if isinstance(calls, list) else [(calls, replies)]:
            try:
                if "result" in reply:
                    reply["result"] = change(call, reply["result"])
            except Refused as refused:
                del reply["result"]
                reply["error"] = {"code": 4444, "message": str(refused)}
        return web.json_response(replies)

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


def pruned_before(block: int) -> Change:
    """Keep no receipts of the blocks before `block`."""

    def change(call: dict[str, Any], result: Any) -> Any:
        if call["method"] == "eth_getBlockReceipts" and len(call["params"][0]) < 66:
            return result if int(call["params"][0], 16) >= block else None
        if call["method"] == "eth_getLogs" and int(call["params"][0]["fromBlock"], 16) < block:
            raise Refused("pruned history unavailable")
        return result

    return change


def hiding(_call: dict[str, Any], result: Any) -> Any:
    """Claim that there are no logs."""
    return [] if _call["method"] == "eth_getLogs" else result


def inventing(vault: bytes) -> Change:
    """Name another vault in each log of a factory."""

    def change(call: dict[str, Any], result: Any) -> Any:
        if call["method"] == "eth_getLogs":
            for log in result:
                log["topics"][1:] = ["0x" + "00" * 12 + vault.hex()] * len(log["topics"][1:])
        return result

    return change


async def test_a_vault_with_a_pool_is_known_by_logs_alone(made: Made, chain: ExecutionChain) -> None:
    found = await recognised(made, chain, made.pool.vault)
    assert found.created is not None and found.pool is not None and found.state is not None
    assert found.creation_block(made.pool.vault) == made.pool.block
    assert (found.created.factory, found.pool.queue) == (made.protocol.factory, made.pool.queue)
    assert (found.state.owner, found.state.connected) == (made.pool.dashboard, True)
    assert (found.state.node_operator, found.notes) == (made.protocol.operator, ())


async def test_a_vault_of_a_former_factory_without_a_pool(made: Made, chain: ExecutionChain) -> None:
    found = await recognised(made, chain, made.former.vault)
    assert found.created is not None
    assert (found.created.factory, found.created.block) == (made.protocol.previous_factory, made.former.block)
    assert found.pool is None


async def test_the_owner_of_a_vault_that_is_not_connected_is_its_own(made: Made, chain: ExecutionChain) -> None:
    found = await recognised(made, chain, made.alone.vault)
    assert found.state is not None
    assert (found.state.owner, found.state.connected) == (made.alone.dashboard, False)


async def test_what_is_no_vault_is_refused_with_what_it_is(made: Made, chain: ExecutionChain) -> None:
    protocol, pool = made.protocol, made.pool
    assert pool.pool is not None and pool.queue is not None
    token = Address(protocol.chain.deploy("ERC20", "stETH"))
    impostor = Address(protocol.chain.deploy("StakingVault"))
    protocol.chain.finalize()
    of = f"of vault {checksum(pool.vault)}"
    for address, sentence in (
        (Address(protocol.chain.accounts[7]), "has no code at the finalized block"),
        (pool.dashboard, f"is a Dashboard {of}: give that address"),
        (pool.queue, f"is the withdrawal queue {of}: give that address"),
        (pool.pool, f"is a pool {of}, with the withdrawal queue {checksum(pool.queue)}"),
        (protocol.hub, "is the VaultHub, not a vault"),
        (protocol.locator, "is the LidoLocator, not a vault"),
        (protocol.factory, "is the vault factory, not a vault"),
        (protocol.previous_factory, "is the vault factory, not a vault"),
        (protocol.wrapper_factory, "is the factory of pools, not a vault"),
        (protocol.oracle, "is the LazyOracle, not a vault"),
        (token, "is the token 'stETH', not a vault"),
        (impostor, "answers as a staking vault, but none of the known factories"),
        (protocol.beacon, "is a contract, but not a vault"),
    ):
        with pytest.raises(InputError) as refused:
            await recognised(made, chain, address)
        assert f"{checksum(address)} {sentence}" in str(refused.value)


async def test_the_queue_of_another_vault_is_refused(made: Made, chain: ExecutionChain) -> None:
    queue = made.pool.queue
    assert queue is not None
    other = f"is the withdrawal queue of vault {checksum(made.pool.vault)}, not of {checksum(made.connected.vault)}"
    with pytest.raises(InputError, match=other):
        await recognised(made, chain, made.connected.vault, queue)
    with pytest.raises(InputError, match=r"does not name its vault \(VAULT\(\)\)"):
        await recognised(made, chain, made.connected.vault, made.protocol.hub)
    assert (await recognised(made, chain, made.pool.vault, queue)).notes == ()


async def test_without_a_locator_only_the_code_is_checked(made: Made, chain: ExecutionChain) -> None:
    settings = config.given({"network": "devnet", "chain_id": 31337}, "test")
    found = await recognise(settings, chain, made.protocol.hub, None, quiet)
    assert "it is only known that there is a contract" in found.notes[0]
    with pytest.raises(InputError, match="has no code"):
        await recognise(settings, chain, Address(made.protocol.chain.accounts[7]), None, quiet)


async def test_all_vaults_of_the_factories_are_discovered(made: Made, chain: ExecutionChain) -> None:
    found = await discovered(made, chain)
    vaults = [(created.address, created.block) for created in found.creations.vaults]
    expected = (made.alone, made.former, made.connected, made.pool)
    assert vaults == [(created.vault, created.block) for created in expected]
    assert [found.states[vault].owner for vault, _ in vaults] == [created.dashboard for created in expected]
    assert [found.states[vault].connected for vault, _ in vaults] == [False, True, True, True]
    pools = [created.pool and created.pool.queue for created in found.creations.vaults]
    assert (pools, found.notes) == ([None, None, None, made.pool.queue], ())


async def test_a_factory_that_is_none(made: Made, chain: ExecutionChain) -> None:
    for address in (made.protocol.hub, Address(made.protocol.chain.accounts[7])):
        with pytest.raises(InputError, match=f"{checksum(address)} is not a vault factory"):
            await discover(made.settings(), chain, address, None, quiet)
    with pytest.raises(InputError, match="names no vault factory: correct the address"):
        await discovered(made, chain, lido_locator=text(made.protocol.hub))


async def test_a_factory_alone_leads_to_the_hub(made: Made, chain: ExecutionChain) -> None:
    settings = config.given({"network": "devnet", "chain_id": 31337}, "test")
    found = await discover(settings, chain, made.protocol.previous_factory, None, quiet)
    (created,) = found.creations.vaults
    assert (created.address, found.states[created.address].owner) == (made.former.vault, made.former.dashboard)


async def test_an_upgraded_hub_is_named_and_the_rest_is_shown(made: Made, chain: ExecutionChain) -> None:
    protocol = made.protocol
    locator, other = protocol.chain.deploy("LidoLocator"), protocol.chain.deploy("ERC20", "hub")
    named = (protocol.oracle, other, protocol.factory, *[bytes(20)] * 4)
    protocol.chain.send(locator, call_data(f"point({','.join(['address'] * 7)})", *named))
    protocol.chain.finalize()
    found = await discovered(made, chain, lido_locator=text(locator))
    assert len(found.creations.vaults) == 4
    assert {note.split("()")[0] for note in found.notes} == {"VaultHub.isVaultConnected", "VaultHub.vaultConnection"}
    state = found.states[made.connected.vault]
    assert (state.owner, state.connected, state.node_operator) == (None, None, Address(protocol.chain.accounts[5]))


async def test_a_node_without_old_receipts_says_from_where_it_can_know(made: Made) -> None:
    oldest = made.pool.block
    async with altered(made.protocol.chain.url, pruned_before(oldest)) as url, over(url) as chain:
        with pytest.raises(InputError, match=f"give --from-block {oldest} for those created since"):
            await discovered(made, chain)
        since = await discover(made.settings(), chain, None, oldest, quiet)
        assert [created.address for created in since.creations.vaults] == [made.pool.vault]
        assert (await recognised(made, chain, made.pool.vault)).creation_block(made.pool.vault) == oldest
        found = await recognised(made, chain, made.former.vault)
        assert "of which the nodes keep no receipts; if it has a pool, name its queue" in found.notes[0]
        with pytest.raises(InputError, match=f"was created before block {oldest}.* give --start-block {oldest}"):
            found.creation_block(made.former.vault)


async def test_logs_that_a_node_invents_register_nothing(made: Made) -> None:
    invented = Address(b"\x99" * 20)
    async with altered(made.protocol.chain.url, inventing(invented)) as url, over(url) as chain:
        found = await discovered(made, chain)
        assert invented not in found.states
        assert chain.counters.claims_disproved > 0
    async with altered(made.protocol.chain.url, inventing(made.former.vault)) as url, over(url) as chain:
        created = (await recognised(made, chain, made.former.vault)).created
        assert created is not None and created.block == made.former.block


async def test_logs_that_one_node_hides_are_found_by_another(made: Made) -> None:
    async with altered(made.protocol.chain.url, hiding) as url:
        async with over(url) as chain:
            found = await recognised(made, chain, made.former.vault)
            assert found.notes[0].startswith("no node gives the log of its creation")
            with pytest.raises(InputError, match="give its block with --start-block"):
                found.creation_block(made.former.vault)
        async with over(url, made.protocol.chain.url) as chain:
            assert (await recognised(made, chain, made.former.vault)).created is not None
            assert len((await discovered(made, chain)).creations.vaults) == 4


async def test_replaced_implementations_are_shown(made: Made, chain: ExecutionChain) -> None:
    protocol = made.protocol
    pool = protocol.create_pool()
    assert pool.queue is not None
    queue = Address(protocol.chain.deploy("UnindexedWithdrawalQueue"))
    protocol.upgrade_queue(pool.queue, queue)
    at = protocol.chain.number()
    protocol.chain.finalize()
    (note,) = (await recognised(made, chain, pool.vault)).notes
    assert note.startswith(f"the implementation of its queue was replaced in block {at}, and is now {checksum(queue)}")
    vault = Address(protocol.chain.deploy("UpgradedStakingVault"))
    protocol.upgrade_vaults(vault)
    protocol.chain.finalize()
    found = await recognised(made, chain, made.connected.vault)
    assert any("the vaults of its factory was replaced" in note and checksum(vault) in note for note in found.notes)
    assert any(
        "StakingVault.nodeOperator()" in note and note.endswith("is refused; what it shows is left out")
        for note in found.notes
    )
    assert found.state is not None and found.state.owner == made.connected.dashboard  # that of the hub
    alone = await recognised(made, chain, made.alone.vault)
    assert any(note.startswith(f"StakingVault.owner() of {checksum(made.alone.vault)}") for note in alone.notes)
    assert alone.state is not None and alone.state.owner is None
    protocol.upgrade_vaults(protocol.vault_implementation)


async def test_five_thousand_vaults_are_discovered(made: Made) -> None:
    evm = made.protocol.chain
    made.protocol.create_many(MANY)
    while int(evm.rpc("txpool_status")["pending"], 16):
        evm.mine()
    evm.finalize()
    first = made.pool.block + 1
    options = ExecutionOptions(retry_wait_s=0.01, set_aside_s=0.1)
    async with ExecutionChain([evm.url], head=HeadPolicy(), options=options) as chain:
        found = await discover(made.settings(), chain, None, first, quiet)
        assert len(found.states) >= MANY
        assert sum(state.connected is True for state in found.states.values()) >= MANY
        assert chain.counters.requests < 200
