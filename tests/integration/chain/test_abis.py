"""The ABIs of the package: known hashes, what the compiler says of our contracts, and packaging."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from eth_hash.auto import keccak

import evm
from vaultevents.chain.execution import contracts
from vaultevents.chain.execution.contract_calls import Reverted
from vaultevents.chain.execution.contracts import CONTRACTS, Abi, read_abi
from vaultevents.core.logs import ETHER_FUNDED, REPORT_UPDATED, WITHDRAWAL_CLAIMED, Log
from vaultevents.core.reports import LEAF_ENCODING, UPDATE_VAULT_DATA
from vaultevents.core.reverts import MEANINGS, revert_reason
from vaultevents.core.units import Address, Hash32

pytestmark = pytest.mark.integration

HASHES: dict[str, dict[str, dict[str, str]]] = json.loads(
    (Path(__file__).parents[2] / "data" / "abi" / "hashes.json").read_text()
)
"""Contract -> kind -> signature -> topic or selector, computed from the sources of the deployed contracts."""

KINDS = {"functions": "function", "events": "event", "errors": "error"}
COMPILED_AS = {"StakingVault": ("StakingVault", "BeaconProxy")}
"""A vault is a proxy, so what it emits is in two contracts."""


def kind_of(parameter: dict[str, Any]) -> str:
    """The type of a parameter, a tuple as the types of its fields."""
    kind: str = parameter["type"]
    if not kind.startswith("tuple"):
        return kind
    return f"({','.join(map(kind_of, parameter['components']))}){kind.removeprefix('tuple')}"


def signature(entry: dict[str, Any]) -> str:
    return f"{entry['name']}({','.join(map(kind_of, entry['inputs']))})"


def described(entry: dict[str, Any]) -> str:
    """The signature as in the file of hashes: of an event with what is indexed."""
    if entry["type"] != "event":
        return signature(entry)
    inputs = (kind_of(field) + " indexed" * field["indexed"] for field in entry["inputs"])
    return f"{entry['name']}({', '.join(inputs)})"


def hashed(abi: Abi, kind: str) -> dict[str, str]:
    """Signature -> topic or selector of all entries of a kind."""
    size = 32 if kind == "event" else 4
    return {
        described(entry): "0x" + keccak(signature(entry).encode())[:size].hex()
        for entry in abi
        if entry["type"] == kind
    }


def essence(value: Any) -> Any:
    """An entry without the names of types in the source."""
    if isinstance(value, dict):
        return {key: essence(item) for key, item in value.items() if key != "internalType"}
    return [essence(item) for item in value] if isinstance(value, list) else value


def unlike(ours: Abi, compiled: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The entries of an ABI that the compiled contract does not have in exactly this form."""
    known = [essence(entry) for entry in compiled]
    for entry in ours:
        if essence(entry) not in known:
            yield signature(entry)


def compiled_abi(contract: str) -> Abi:
    return [entry for name in COMPILED_AS.get(contract, (contract,)) for entry in evm.compiled()[name]["abi"]]


def test_every_known_hash_comes_out_of_the_abis() -> None:
    counted = 0
    for contract, kinds in HASHES.items():
        abi = read_abi(contract)  # type: ignore[arg-type]
        for name, known in kinds.items():
            found = hashed(abi, KINDS[name])
            assert {text: found.get(text) for text in known} == known, contract
            counted += len(known)
    assert counted > 80


def test_every_event_has_a_known_hash() -> None:
    for contract in CONTRACTS:
        assert hashed(read_abi(contract), "event") == HASHES.get(contract, {}).get("events", {}), contract


def test_the_topics_of_the_streams_are_those_of_the_abis() -> None:
    assert contracts.event_topic("StakingVault", "EtherFunded") == ETHER_FUNDED
    assert contracts.event_topic("WithdrawalQueue", "WithdrawalClaimed") == WITHDRAWAL_CLAIMED
    assert contracts.event_topic("LazyOracle", "VaultsReportDataUpdated") == REPORT_UPDATED


def test_topics_and_selectors_of_web3_are_the_known_ones() -> None:
    for contract, kinds in HASHES.items():
        for text, topic in kinds.get("events", {}).items():
            found = contracts.event_topic(contract, text.split("(")[0])  # type: ignore[arg-type]
            assert "0x" + found.hex() == topic
    for contract in ("LidoLocator", "StvPool"):
        for text, selector in HASHES[contract]["functions"].items():
            assert "0x" + contracts.encode(contract, text.split("(")[0]).hex() == selector  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("contract", "text", "selector"),
    [(contract, *known) for contract, kinds in HASHES.items() for known in kinds.get("errors", {}).items()],
)
def test_each_error_is_found_by_its_selector(contract: str, text: str, selector: str) -> None:
    name, types = text[:-1].split("(")
    data = bytes.fromhex(selector[2:]) + bytes(32 * len(types.split(","))) * bool(types)
    named = contracts.decode_error(Reverted(data))
    assert named.name == name
    assert len(named.arguments) == len(types.split(",")) * bool(types)
    assert revert_reason(named.name, named.arguments, data) == f"{name}: {MEANINGS[name]}"


def test_every_error_with_a_meaning_has_a_selector() -> None:
    assert MEANINGS.keys() == {text.split("(")[0] for kinds in HASHES.values() for text in kinds.get("errors", {})}


def test_the_calldata_of_reports_is_that_of_the_abi() -> None:
    selector = HASHES["LazyOracle"]["functions"]
    assert "0x" + UPDATE_VAULT_DATA.hex() == selector[f"updateVaultData({','.join(LEAF_ENCODING)},bytes32[])"]
    update = next(entry for entry in read_abi("LazyOracle") if entry["name"] == "updateVaultData")
    assert [field["type"] for field in update["inputs"]] == [*LEAF_ENCODING, "bytes32[]"]


def test_each_file_is_a_known_contract() -> None:
    folder = Path(contracts.__file__).parent / "abi"
    assert sorted(file.stem for file in folder.iterdir()) == sorted(CONTRACTS)


@pytest.mark.anvil
@pytest.mark.parametrize("contract", CONTRACTS)
def test_each_entry_is_as_the_compiler_has_it(contract: contracts.ContractName) -> None:
    assert list(unlike(read_abi(contract), compiled_abi(contract))) == []


@pytest.mark.anvil
def test_a_changed_entry_is_named() -> None:
    compiled = compiled_abi("VaultHub")
    for name, change in (
        ("VaultConnected", {"indexed": False}),
        ("vaultConnection", {"type": "bytes20"}),
        ("NotConnectedToHub", {"name": "hub"}),
    ):
        abi = deepcopy(read_abi("VaultHub"))
        entry = next(entry for entry in abi if entry["name"] == name)
        entry["inputs"][0] |= change
        assert list(unlike(abi, compiled)) == [signature(entry)]
    abi = deepcopy(read_abi("VaultHub"))
    connection = next(entry for entry in abi if entry["name"] == "vaultConnection")
    connection["outputs"][0]["components"][1]["type"] = "uint128"
    assert list(unlike(abi, compiled)) == ["vaultConnection(address)"]


def test_a_string_that_is_cut_or_has_another_offset_is_of_no_abi() -> None:
    event, word = "VaultsReportDataUpdated", bytes(31) + b"\1"
    topics = (contracts.event_topic("LazyOracle", event), *[Hash32(word)] * 3)
    whole = (32).to_bytes(32) + (2).to_bytes(32) + b"Qm".ljust(32, b"\0")

    def decoded(data: bytes) -> dict[str, object]:
        log = Log(Address(bytes(20)), topics, data, 1, Hash32(word), Hash32(word), 0)
        return contracts.decode_log("LazyOracle", event, log)

    assert decoded(whole)["cid"] == "Qm"
    for data in (b"", whole[:-32], whole[:70], (64).to_bytes(32) + whole[32:], whole + bytes(32)):
        with pytest.raises(contracts.ContractMismatch, match=event):
            decoded(data)
