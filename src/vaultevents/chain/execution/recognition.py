"""Recognise contracts of the protocol: factories, vaults, and what an address is that is no vault."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.chain.execution.contract_calls import Reverted
from vaultevents.chain.execution.contracts import ContractCall, ContractMismatch, ContractName, Returned, calls
from vaultevents.chain.execution.factory_logs import Factories
from vaultevents.chain.upstream.batches import chunks
from vaultevents.core.creations import VaultState
from vaultevents.core.errors import InputError
from vaultevents.core.units import Address, checksum

NOWHERE: Final = Address(bytes(20))
VAULTS_AT_ONCE = 500
MAX_FACTORIES = 16
LOCATED: Final = {
    "vaultFactory": "vault factory",
    "vaultHub": "VaultHub",
    "lazyOracle": "LazyOracle",
    "operatorGrid": "OperatorGrid",
    "predepositGuarantee": "PredepositGuarantee",
    "accountingOracle": "AccountingOracle",
    "withdrawalQueue": "withdrawal queue of stETH",
}
"""What the LidoLocator names, by its function."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """The contracts that show what a vault is, at `block`.

    `beacons` has the beacon of each factory, which names the code of its vaults; `named` says what each contract is.
    """

    block: int
    factories: Factories
    hub: Address | None
    beacons: Mapping[Address, Address]
    named: Mapping[Address, str]


async def read_protocol(
    chain: ExecutionChain,
    block: int,
    *,
    locator: Address | None,
    factory: Address | None,
    former: Sequence[Address],
    wrapper: Address | None,
) -> Protocol:
    """Read the contracts of the protocol: `factory`, or the one that `locator` names and the `former` ones.

    Each factory may name its predecessor. Raises `InputError` where a factory is none.
    """
    if locator is None and factory is not None:
        (named_by,) = await calls(chain, [ContractCall("VaultFactory", factory, "LIDO_LOCATOR")], block=block)
        locator = _single(named_by)
    located = {} if locator is None else await _located(chain, locator, block)
    if factory is None:
        factory = located.get("vaultFactory")
        if factory is None:
            at = "" if locator is None else f" ({checksum(locator)})"
            raise InputError(
                f"the contract at contracts.lido_locator{at} names no vault factory: "
                "correct the address, or name the factory with --factory"
            )
        given = [factory, *former]
    else:
        given = [factory]
    beacons = await _factories(chain, given, block)
    named = {address: what for function, what in LOCATED.items() if (address := located.get(function)) is not None}
    named |= dict.fromkeys(beacons, "vault factory")
    if locator is not None:
        named[locator] = "LidoLocator"
    if wrapper is not None:
        named[wrapper] = "factory of pools"
    factories = Factories(tuple(beacons), wrapper)
    return Protocol(block, factories, located.get("vaultHub"), beacons, named)


async def _located(chain: ExecutionChain, locator: Address, block: int) -> dict[str, Address]:
    requests = [ContractCall("LidoLocator", locator, function) for function in LOCATED]
    answers = await calls(chain, requests, block=block)
    found = {request.function: _single(answer) for request, answer in zip(requests, answers, strict=True)}
    return {function: address for function, address in found.items() if address not in (None, NOWHERE)}


async def _factories(chain: ExecutionChain, given: Sequence[Address], block: int) -> dict[Address, Address]:
    """Return the factories with their beacons, each followed by its predecessors."""
    found: dict[Address, Address] = {}
    left = list(given)
    while left and len(found) < MAX_FACTORIES:
        factory = left.pop(0)
        if factory in found:
            continue
        made, beacon, previous = await calls(
            chain,
            [
                ContractCall("VaultFactory", factory, "deployedVaults", (NOWHERE,)),
                ContractCall("VaultFactory", factory, "BEACON"),
                ContractCall("VaultFactory", factory, "PREVIOUS_FACTORY"),
            ],
            block=block,
        )
        if not isinstance(made, tuple):
            why = f" ({made})" if isinstance(made, ContractMismatch) else ""
            raise InputError(
                f"{checksum(factory)} is not a vault factory, because it does not answer deployedVaults(){why}: give "
                "the contract that the LidoLocator names as vaultFactory()"
            )
        found[factory] = _single(beacon) or NOWHERE
        before = _single(previous)
        if before not in (None, NOWHERE):
            left.insert(0, before)
    return found


async def made_by_factory(chain: ExecutionChain, protocol: Protocol, address: Address) -> bool:
    """Return whether one of the factories made the contract at `address`."""
    requests = [
        ContractCall("VaultFactory", factory, "deployedVaults", (address,)) for factory in protocol.factories.vaults
    ]
    answers = await calls(chain, requests, block=protocol.block)
    for answer in answers:
        if isinstance(answer, ContractMismatch):
            raise answer
    return any(_single(answer) is True for answer in answers)


async def refusal(chain: ExecutionChain, protocol: Protocol, address: Address) -> str:
    """Say what an address is that no factory made as a vault, and what was probably meant."""
    what = checksum(address)
    if name := protocol.named.get(address):
        return f"{what} is the {name}, not a vault: give the address of the vault"
    probes: list[tuple[ContractName, str]] = [
        ("Dashboard", "stakingVault"),
        ("StvPool", "VAULT"),
        ("StvPool", "WITHDRAWAL_QUEUE"),
        ("WithdrawalQueue", "POOL"),
        ("StakingVault", "nodeOperator"),
        ("ERC20", "symbol"),
    ]
    answers = await calls(chain, [ContractCall(name, address, probe) for name, probe in probes], block=protocol.block)
    dashboard_of, vault, queue, pool, operator, symbol = (_single(answer) for answer in answers)
    if dashboard_of is not None:
        return f"{what} is a Dashboard of vault {checksum(dashboard_of)}: give that address"
    if vault is not None and queue is not None:
        return (
            f"{what} is a pool of vault {checksum(vault)}, with the withdrawal queue {checksum(queue)}: give the "
            "address of the vault, its queue is found"
        )
    if vault is not None and pool is not None:
        return f"{what} is the withdrawal queue of vault {checksum(vault)}: give that address, the queue is found"
    if operator is not None:
        made_by = ", ".join(map(checksum, protocol.factories.vaults))
        return (
            f"{what} answers as a staking vault, but none of the known factories ({made_by}) made it: name its factory "
            "in contracts.former_vault_factories, or give --unchecked for a contract of your own"
        )
    if symbol is not None:
        return f"{what} is the token {symbol!r:.40}, not a vault: give the address of the vault"
    return (
        f"{what} is a contract, but not a vault: none of the known factories made it; check the address, or give "
        "--unchecked for a contract of your own"
    )


async def queue_problem(chain: ExecutionChain, queue: Address, vault: Address, block: int) -> str | None:
    """Say why a contract cannot be the withdrawal queue of `vault`; None where it is."""
    answer = await calls(chain, [ContractCall("WithdrawalQueue", queue, "VAULT")], block=block)
    owner = _single(answer[0])
    if owner == vault:
        return None
    if owner is None:
        return (
            f"{checksum(queue)} does not name its vault (VAULT()), so it is not a withdrawal queue of a pool: correct "
            "--queue, or give --unchecked for a contract of your own"
        )
    return f"{checksum(queue)} is the withdrawal queue of vault {checksum(owner)}, not of {checksum(vault)}"


async def implementation_of(chain: ExecutionChain, proxy: Address, block: int, *, is_beacon: bool) -> Address | None:
    """Return the code that a proxy or a beacon names; None where it does not answer."""
    request = (
        ContractCall("UpgradeableBeacon", proxy, "implementation")
        if is_beacon
        else ContractCall("OssifiableProxy", proxy, "proxy__getImplementation")
    )
    (answer,) = await calls(chain, [request], block=block)
    code: Address | None = _single(answer)
    return code


async def read_states(
    chain: ExecutionChain, protocol: Protocol, vaults: Sequence[Address], advanced: Callable[[int, int], None]
) -> tuple[dict[Address, VaultState], list[str]]:
    """Read who owns and operates each vault and whether it is connected, all at the block of `protocol`.

    Also returns a sentence for each function whose answers have another form than that of its ABI.
    """
    states: dict[Address, VaultState] = {}
    problems: dict[str, str] = {}
    for some in chunks(vaults, VAULTS_AT_ONCE):
        asked = _Answers(chain, protocol.block, problems)
        operators = await asked.of("StakingVault", "nodeOperator", {vault: (vault, ()) for vault in some})
        connections: Mapping[Address, Any] = {}
        connected: Mapping[Address, Any] = {}
        if (hub := protocol.hub) is not None:
            connections = await asked.of("VaultHub", "vaultConnection", {vault: (hub, (vault,)) for vault in some})
            undecided = {vault: (hub, (vault,)) for vault in some if connections[vault] is None}
            connected = {vault: bool(found["vaultIndex"]) for vault, found in connections.items() if found is not None}
            connected |= await asked.of("VaultHub", "isVaultConnected", undecided)
        own = {vault: (vault, ()) for vault in some if hub is None or connected[vault] is False}
        owners = await asked.of("StakingVault", "owner", own)
        owners |= {vault: found["owner"] for vault, found in connections.items() if found and connected[vault]}
        for vault in some:
            states[vault] = VaultState(owners.get(vault), operators[vault], connected.get(vault))
        advanced(len(states), len(vaults))
    return states, list(problems.values())


@dataclass(frozen=True, slots=True)
class _Answers:
    """Asks one function for many vaults; `problems` collects a sentence for each function that is not answered."""

    chain: ExecutionChain
    block: int
    problems: dict[str, str]

    async def of(
        self, contract: ContractName, function: str, asked: Mapping[Address, tuple[Address, tuple[Any, ...]]]
    ) -> dict[Address, Any]:
        """Return by vault what the contracts answer, each with its arguments; None where it is in no known form."""
        requests = [ContractCall(contract, address, function, arguments) for address, arguments in asked.values()]
        answers = await calls(self.chain, requests, block=self.block)
        for request, answer in zip(requests, answers, strict=True):
            if not isinstance(answer, tuple):
                why = f"{answer}" if isinstance(answer, ContractMismatch) else f"{request} is refused"
                self.problems.setdefault(f"{contract}.{function}", f"{why}; what it shows is left out")
        return dict(zip(asked, map(_single, answers), strict=True))


def _single(answer: Returned | Reverted | ContractMismatch) -> Any:
    """The only value that a function returned; None where it did not return in the form of its ABI."""
    return answer[0] if isinstance(answer, tuple) else None
