"""The contracts of the protocol on anvil, wired as on a real chain, once per module.

@pytest.fixture(scope="module")
def protocol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protocol]:
    with running_protocol(tmp_path_factory.mktemp("anvil")) as protocol:
        yield protocol
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eth_hash.auto import keccak

import evm
from vaultevents.core.units import Address

DEPOSIT_WEI = 10**18
VAULTS_AT_ONCE = 40
"""So many new vaults fit into one transaction."""
MANY_GAS = 16_000_000


@dataclass(frozen=True, slots=True)
class CreatedVault:
    """A vault with the contracts that were made with it; `queue` and `pool` only of the wrapper's factory."""

    vault: Address
    dashboard: Address
    block: int
    pool: Address | None = None
    queue: Address | None = None


@dataclass(frozen=True, slots=True)
class Protocol:
    """One anvil with every contract; `operator` is the node operator of the vaults that are made without another."""

    chain: evm.Chain
    locator: Address
    hub: Address
    oracle: Address
    factory: Address
    previous_factory: Address
    wrapper_factory: Address
    operator_grid: Address
    guarantee: Address
    beacon: Address
    vault_implementation: Address
    queue_implementation: Address

    @property
    def admin(self) -> Address:
        return Address(self.chain.accounts[0])

    @property
    def operator(self) -> Address:
        return Address(self.chain.accounts[1])

    def create_vault(
        self, *, connected: bool = True, operator: bytes | None = None, factory: bytes | None = None
    ) -> CreatedVault:
        """A vault of the factory, connected to the hub with a first funding of 1 ETH or not connected."""
        name = "createVaultWithDashboard" + ("" if connected else "WithoutConnectingToVaultHub")
        data = evm.call_data(f"{name}(address,address)", self.admin, operator or self.operator)
        return _created(self.chain.send(factory or self.factory, data, DEPOSIT_WEI if connected else 0))

    def create_pool(self, operator: bytes | None = None) -> CreatedVault:
        """A vault with a pool and a withdrawal queue of the wrapper's factory."""
        data = evm.call_data("createPool(address)", operator or self.operator)
        return _created(self.chain.send(self.wrapper_factory, data, DEPOSIT_WEI))

    def create_many(self, count: int, operator: bytes | None = None) -> None:
        """So many connected vaults of 1 wei each, in as few blocks as fit."""
        for begun in range(0, count, VAULTS_AT_ONCE):
            size = min(VAULTS_AT_ONCE, count - begun)
            data = evm.call_data("createMany(uint256,address,address)", size, self.admin, operator or self.operator)
            self.chain.submit(self.factory, data, size, gas=MANY_GAS)
            self.chain.mine()

    def disconnect(self, created: CreatedVault) -> None:
        """Begin to disconnect a vault; `isPendingDisconnect` from then on."""
        self.chain.send(created.dashboard, evm.call_data("voluntaryDisconnect()"))

    def upgrade_vaults(self, implementation: bytes) -> None:
        """Change the code of all vaults that factories made."""
        self.chain.send(self.beacon, evm.call_data("upgradeTo(address)", implementation))

    def upgrade_queue(self, queue: bytes, implementation: bytes) -> None:
        """Change the code of a queue."""
        self.chain.send(queue, evm.call_data("proxy__upgradeTo(address)", implementation))


@contextmanager
def running_protocol(directory: Path, *options: str) -> Iterator[Protocol]:
    """Start anvil and deploy all contracts; everything up to now is final."""
    with evm.running(directory, *options) as chain:
        protocol = deploy_protocol(chain)
        chain.finalize()
        yield protocol


def deploy_protocol(chain: evm.Chain) -> Protocol:
    """Deploy every contract and point the locator at them."""
    nobody = bytes(20)
    locator, oracle = chain.deploy("LidoLocator"), chain.deploy("LazyOracle")
    hub = chain.deploy("VaultHub", locator)
    grid, guarantee = chain.deploy("OperatorGrid"), chain.deploy("PredepositGuarantee")
    vault_implementation = chain.deploy("StakingVault")
    beacon = chain.deploy("UpgradeableBeacon", vault_implementation)
    dashboard = chain.deploy("Dashboard", hub, locator)
    previous = chain.deploy("VaultFactory", locator, beacon, dashboard, nobody)
    factory = chain.deploy("VaultFactory", locator, beacon, dashboard, previous)
    queue_implementation = chain.deploy("WithdrawalQueue")
    wrapper_factory = chain.deploy("WrapperFactory", factory, queue_implementation)
    types = ",".join(["address"] * 7)
    chain.send(
        locator,
        evm.call_data(f"point({types})", oracle, hub, factory, grid, guarantee, chain.accounts[2], chain.accounts[3]),
    )
    chain.send(oracle, evm.call_data("setLocator(address)", locator))
    return Protocol(
        chain,
        locator=Address(locator),
        hub=Address(hub),
        oracle=Address(oracle),
        factory=Address(factory),
        previous_factory=Address(previous),
        wrapper_factory=Address(wrapper_factory),
        operator_grid=Address(grid),
        guarantee=Address(guarantee),
        beacon=Address(beacon),
        vault_implementation=Address(vault_implementation),
        queue_implementation=Address(queue_implementation),
    )


def _created(receipt: dict[str, Any]) -> CreatedVault:
    topics = {
        "dashboard": keccak(b"DashboardCreated(address,address,address)"),
        "pool": keccak(b"PoolCreated(address,address,bytes32,address,address,bytes,address)"),
    }
    (made,) = [log["topics"] for log in receipt["logs"] if log["topics"][0] == "0x" + topics["dashboard"].hex()]
    pools = [log["data"] for log in receipt["logs"] if log["topics"][0] == "0x" + topics["pool"].hex()]
    words = bytes.fromhex(pools[0][2:]) if pools else b""
    return CreatedVault(
        vault=_address(bytes.fromhex(made[2][2:])),
        dashboard=_address(bytes.fromhex(made[1][2:])),
        block=int(receipt["blockNumber"], 16),
        pool=_address(words[32:64]) if pools else None,
        queue=_address(words[64:96]) if pools else None,
    )


def _address(word: bytes) -> Address:
    return Address(word[12:])
