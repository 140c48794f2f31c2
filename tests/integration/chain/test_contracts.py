"""Calls of contracts and logs by ABI on a real EVM, through the pool of nodes."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

import evm
from contracts_fixtures import DEPOSIT_WEI, CreatedVault, Protocol, running_protocol
from vaultevents.chain.execution.client import ExecutionChain, ExecutionOptions, HeadPolicy, Reverted
from vaultevents.chain.execution.contracts import (
    CONTRACTS,
    ContractCall,
    ContractMismatch,
    NoContract,
    call,
    calls,
    decode_error,
    decode_log,
    encode,
    event_topic,
    read_abi,
    web3_over,
)
from vaultevents.core.errors import SourceUnavailable
from vaultevents.core.merkle import leaf_hash
from vaultevents.core.units import Address, Hash32, checksum

pytestmark = [pytest.mark.integration, pytest.mark.anvil]

QUICK = ExecutionOptions(retry_wait_s=0.01, set_aside_s=0.1)
NOBODY = Address(b"\x77" * 20)


@pytest.fixture(scope="module")
def protocol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protocol]:
    with running_protocol(tmp_path_factory.mktemp("anvil")) as protocol:
        yield protocol


@pytest.fixture(scope="module")
def vault(protocol: Protocol) -> CreatedVault:
    created = protocol.create_vault()
    protocol.chain.finalize()
    return created


@pytest.fixture(scope="module")
def pool(protocol: Protocol) -> CreatedVault:
    created = protocol.create_pool()
    protocol.chain.finalize()
    return created


@pytest.fixture
async def chain(protocol: Protocol) -> AsyncIterator[ExecutionChain]:
    async with ExecutionChain([protocol.chain.url], head=HeadPolicy(), options=QUICK) as chain:
        yield chain


async def test_a_struct_comes_by_the_names_of_its_fields(
    protocol: Protocol, vault: CreatedVault, chain: ExecutionChain
) -> None:
    answer = await call(chain, protocol.hub, "VaultHub", "vaultConnection", vault.vault)
    assert not isinstance(answer, Reverted)
    (connection,) = answer
    assert connection["owner"] == vault.dashboard
    assert connection["disconnectInitiatedTs"] == 2**48 - 1
    assert connection["beaconChainDepositsPauseIntent"] is False


async def test_many_calls_are_one_request_and_each_has_its_own_answer(
    protocol: Protocol, vault: CreatedVault, pool: CreatedVault, chain: ExecutionChain
) -> None:
    await chain.head()
    assert pool.queue is not None and pool.pool is not None
    before = chain.counters.requests
    answers = await calls(
        chain,
        [
            ContractCall("StakingVault", vault.vault, "owner"),
            ContractCall("StakingVault", vault.vault, "nodeOperator"),
            ContractCall("VaultFactory", protocol.factory, "deployedVaults", (vault.vault,)),
            ContractCall("VaultFactory", protocol.factory, "deployedVaults", (NOBODY,)),
            ContractCall("WithdrawalQueue", pool.queue, "VAULT"),
            ContractCall("StvPool", pool.pool, "WITHDRAWAL_QUEUE"),
            ContractCall("Dashboard", vault.dashboard, "stakingVault"),
            ContractCall("LidoLocator", protocol.locator, "lazyOracle"),
            ContractCall("VaultHub", protocol.hub, "vaultByIndex", (10**6,)),
            ContractCall("Dashboard", vault.vault, "stakingVault"),
        ],
    )
    assert chain.counters.requests == before + 1
    assert answers == [
        (protocol.hub,),
        (protocol.operator,),
        (True,),
        (False,),
        (pool.vault,),
        (pool.queue,),
        (vault.vault,),
        (protocol.oracle,),
        Reverted(bytes.fromhex("4e487b71") + (0x32).to_bytes(32), "Panic", (0x32,)),
        Reverted(b""),
    ]


async def test_a_list_of_structs(protocol: Protocol, vault: CreatedVault, chain: ExecutionChain) -> None:
    answer = await call(chain, protocol.oracle, "LazyOracle", "batchVaultsInfo", 0, 100)
    assert not isinstance(answer, Reverted)
    infos = {info["vault"]: info for info in answer[0]}
    assert infos[vault.vault]["withdrawalCredentials"] == b"\x02" + bytes(11) + vault.vault
    assert infos[vault.vault]["aggregatedBalance"] == DEPOSIT_WEI


async def test_a_revert_has_the_name_and_the_arguments_of_its_error(
    protocol: Protocol, vault: CreatedVault, chain: ExecutionChain
) -> None:
    refused = await call(chain, protocol.hub, "VaultHub", "fund", NOBODY)
    assert isinstance(refused, Reverted)
    assert (refused.name, refused.arguments) == ("NotConnectedToHub", (NOBODY,))
    stranger = await call(chain, vault.vault, "StakingVault", "fund")
    assert isinstance(stranger, Reverted)
    assert (stranger.name, stranger.arguments) == ("OwnableUnauthorizedAccount", (Address(bytes(20)),))


async def test_the_error_of_an_inner_contract_is_named(
    protocol: Protocol, vault: CreatedVault, chain: ExecutionChain
) -> None:
    """The hub's refusal reaches the caller of the oracle."""
    root = leaf_hash(NOBODY, (1, 2, 3, 4, 5))
    data = encode("LazyOracle", "updateReportData", 1_770_000_000, 1, root, "")
    protocol.chain.send(protocol.oracle, data)
    protocol.chain.finalize()
    refused = await call(chain, protocol.oracle, "LazyOracle", "updateVaultData", NOBODY, 1, 2, 3, 4, 5, [])
    assert isinstance(refused, Reverted)
    assert (refused.name, refused.arguments) == ("NotConnectedToHub", (NOBODY,))
    wrong = await call(chain, protocol.oracle, "LazyOracle", "updateVaultData", NOBODY, 0, 2, 3, 4, 5, [])
    assert isinstance(wrong, Reverted)
    assert (wrong.name, wrong.arguments) == ("InvalidProof", ())


def test_an_error_is_decoded_only_where_it_is_whole() -> None:
    selector = bytes.fromhex("6787bb7d")
    assert decode_error(Reverted(b"")) == Reverted(b"")
    assert decode_error(Reverted(bytes.fromhex("deadbeef00"))).name is None
    assert decode_error(Reverted(selector + bytes(12) + NOBODY)).arguments == (NOBODY,)
    assert decode_error(Reverted(selector + bytes(20))).name is None
    text = bytes.fromhex("08c379a0") + (32).to_bytes(32) + (2).to_bytes(32) + b"no".ljust(32, b"\0")
    assert decode_error(Reverted(text)).arguments == ("no",)


async def test_an_address_without_code_is_named(protocol: Protocol, chain: ExecutionChain) -> None:
    with pytest.raises(NoContract, match=rf"{checksum(NOBODY)} has no code .*VaultHub\.vaultsCount\(\)"):
        await call(chain, NOBODY, "VaultHub", "vaultsCount")
    (answer,) = await calls(chain, [ContractCall("VaultHub", protocol.hub, "vaultsCount")], block=0)
    assert isinstance(answer, NoContract)
    assert "at block 0," in str(answer)


async def test_a_contract_that_fails_without_a_reason_is_no_fault_of_the_node(
    protocol: Protocol, chain: ExecutionChain
) -> None:
    broken = Address(b"\x78" * 20)
    for code in ("0xfe", "0x5ffd", "0x50", "0x5f56"):  # INVALID, REVERT without data, an empty stack, a bad jump
        protocol.chain.rpc("anvil_setCode", "0x" + broken.hex(), code)
        assert await call(chain, broken, "VaultHub", "vaultsCount", block=protocol.chain.number()) == Reverted(b"")
    with pytest.raises(SourceUnavailable, match=rf"cannot call {checksum(broken)} at block 0x3b9aca00"):
        await call(chain, broken, "VaultHub", "vaultsCount", block=10**9)


async def test_an_upgraded_vault_is_named_and_what_it_still_answers_is_used(
    protocol: Protocol, vault: CreatedVault, chain: ExecutionChain
) -> None:
    functions = ("owner", "withdrawalCredentials", "depositor", "fund")
    requests = [ContractCall("StakingVault", vault.vault, function) for function in functions]
    protocol.upgrade_vaults(protocol.chain.deploy("UpgradedStakingVault"))
    try:
        protocol.chain.finalize()
        owner, credentials, depositor, fund = await calls(chain, requests)
        assert isinstance(owner, ContractMismatch) and not isinstance(owner, NoContract)
        assert f"StakingVault.owner() of {checksum(vault.vault)} answers with 96 bytes" in str(owner)
        assert credentials == (b"\x02" + bytes(11) + vault.vault,)
        assert depositor == Reverted(b"")
        assert isinstance(fund, Reverted) and fund.name is None and len(fund.data) == 36
        with pytest.raises(ContractMismatch, match="owner"):
            await call(chain, vault.vault, "StakingVault", "owner")
        # what a contract says to be at a URL is never asked for
        request = {"to": checksum(vault.vault), "data": encode("StakingVault", "nodeOperator").hex()}
        web3 = web3_over(chain)
        from web3.exceptions import OffchainLookup  # imported first by `web3_over`, which keeps the recursion limit

        with pytest.raises(OffchainLookup):
            await web3.eth.call(request)  # type: ignore[arg-type]
        elsewhere = await call(chain, vault.vault, "StakingVault", "nodeOperator")
        assert isinstance(elsewhere, Reverted) and elsewhere.name is None
    finally:
        protocol.upgrade_vaults(protocol.vault_implementation)
        protocol.chain.finalize()
    assert (await calls(chain, requests[:1])) == [(protocol.hub,)]


async def test_an_upgraded_queue_shows_its_new_code(
    protocol: Protocol, pool: CreatedVault, chain: ExecutionChain
) -> None:
    assert pool.queue is not None
    asked = ContractCall("OssifiableProxy", pool.queue, "proxy__getImplementation")
    assert await calls(chain, [asked]) == [(protocol.queue_implementation,)]
    other = Address(protocol.chain.deploy("UnindexedWithdrawalQueue"))
    before = protocol.chain.number()
    protocol.upgrade_queue(pool.queue, other)
    after = protocol.chain.number()
    (upgraded,) = [log for log in map(evm.as_log, protocol.chain.logs(after, after)) if log.address == pool.queue]
    assert decode_log("OssifiableProxy", "Upgraded", upgraded) == {"implementation": other}
    assert await calls(chain, [asked], block=after) == [(other,)]
    assert await calls(chain, [asked], block=before) == [(protocol.queue_implementation,)]
    protocol.upgrade_queue(pool.queue, protocol.queue_implementation)


async def test_web3_itself_gives_the_same_answers(
    protocol: Protocol, vault: CreatedVault, pool: CreatedVault, chain: ExecutionChain
) -> None:
    """Each function without arguments, through the whole request path of web3."""
    assert pool.queue is not None and pool.pool is not None
    token = Address(protocol.chain.deploy("ERC20", "stETH"))
    protocol.chain.finalize()
    addresses = {
        "Dashboard": vault.dashboard,
        "ERC20": token,
        "LazyOracle": protocol.oracle,
        "LidoLocator": protocol.locator,
        "OssifiableProxy": pool.queue,
        "StakingVault": vault.vault,
        "StvPool": pool.pool,
        "UpgradeableBeacon": protocol.beacon,
        "VaultFactory": protocol.factory,
        "VaultHub": protocol.hub,
        "WithdrawalQueue": pool.queue,
        "WrapperFactory": protocol.wrapper_factory,
    }
    web3, compared = web3_over(chain), 0
    for contract in CONTRACTS:
        for entry in read_abi(contract):
            if entry["type"] != "function" or entry["stateMutability"] != "view" or entry["inputs"]:
                continue
            ours = await call(chain, addresses[contract], contract, entry["name"])
            made = web3.eth.contract(address=checksum(addresses[contract]), abi=read_abi(contract))  # type: ignore[call-overload]
            theirs = await made.functions[entry["name"]]().call(block_identifier="finalized")
            assert not isinstance(ours, Reverted)
            shown = [
                checksum(value) if output["type"] == "address" else value
                for value, output in zip(ours, entry["outputs"], strict=True)
            ]
            assert (shown if len(shown) > 1 else shown[0]) == theirs
            compared += 1
    assert compared > 25


async def test_another_node_answers_for_one_that_is_down(protocol: Protocol, vault: CreatedVault) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}/key-that-is-secret"
        async with ExecutionChain([dead, protocol.chain.url], head=HeadPolicy(), options=QUICK) as chain:
            assert await call(chain, vault.vault, "StakingVault", "owner") == (protocol.hub,)
            assert chain.counters.unavailable >= 1
        async with ExecutionChain([dead], head=HeadPolicy(), options=QUICK) as chain:
            with pytest.raises(SourceUnavailable) as failed:
                await call(chain, vault.vault, "StakingVault", "owner")
    assert "secret" not in str(failed.value)


async def test_web3_cannot_send(protocol: Protocol, chain: ExecutionChain) -> None:
    with pytest.raises(NotImplementedError, match="eth_accounts"):
        await web3_over(chain).eth.accounts


def test_the_logs_of_a_creation_come_in_the_order_of_the_real_factory(protocol: Protocol, pool: CreatedVault) -> None:
    order = {
        event_topic("StakingVault", "EtherFunded"): "EtherFunded",
        event_topic("VaultHub", "VaultConnected"): "VaultConnected",
        event_topic("VaultFactory", "VaultCreated"): "VaultCreated",
        event_topic("VaultFactory", "DashboardCreated"): "DashboardCreated",
        event_topic("WrapperFactory", "PoolCreated"): "PoolCreated",
    }
    logs = [evm.as_log(raw) for raw in protocol.chain.logs(pool.block, pool.block)]
    assert [order[log.topics[0]] for log in logs if log.topics[0] in order] == list(order.values())


def test_a_log_is_decoded_by_the_names_of_its_arguments(protocol: Protocol, pool: CreatedVault) -> None:
    topic = event_topic("WrapperFactory", "PoolCreated")
    logs = [evm.as_log(raw) for raw in protocol.chain.logs(pool.block, pool.block, [topic])]
    (made,) = [decode_log("WrapperFactory", "PoolCreated", log) for log in logs]
    assert (made["vault"], made["pool"], made["withdrawalQueue"]) == (pool.vault, pool.pool, pool.queue)
    started = [
        decode_log("WrapperFactory", "PoolCreationStarted", evm.as_log(raw))
        for raw in protocol.chain.logs(pool.block, pool.block, [event_topic("WrapperFactory", "PoolCreationStarted")])
    ]
    assert started[0]["intermediate"]["dashboard"] == pool.dashboard
    assert started[0]["commonPoolConfig"]["symbol"] == "STV"


def test_a_log_of_another_form_is_refused(protocol: Protocol, pool: CreatedVault) -> None:
    topic = event_topic("WrapperFactory", "PoolCreated")
    (log,) = [evm.as_log(raw) for raw in protocol.chain.logs(pool.block, pool.block, [topic])]
    for broken in (
        replace(log, data=log.data[:-64]),
        replace(log, data=b"\xff" * len(log.data)),
        replace(log, topics=log.topics[:2]),
        replace(log, topics=(Hash32(bytes(32)), *log.topics[1:])),
    ):
        with pytest.raises(ContractMismatch, match=r"is not WrapperFactory\.PoolCreated"):
            decode_log("WrapperFactory", "PoolCreated", broken)
