"""Call contracts of the protocol and decode their logs by ABI: web3 over the pool of execution nodes (decision 0050).

The ABIs are those of `abi/`: functions, events and errors that the service uses. web3 is imported with the first use;
functions that wait import it in a thread. Addresses are 20 bytes on both sides, structs are dictionaries by the names
of their fields. Logs of the streams are read and decoded without this module (core/logs.py).
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from vaultevents.chain.execution.contract_calls import Reverted
from vaultevents.chain.execution.jsonrpc import Call
from vaultevents.core.errors import OperatorError
from vaultevents.core.logs import Log
from vaultevents.core.units import Address, Hash32, checksum, hex_text

if TYPE_CHECKING:
    from eth_abi.codec import ABICodec
    from web3 import AsyncWeb3

    from vaultevents.chain.execution.client import ExecutionChain

ContractName = Literal[
    "Dashboard",
    "ERC20",
    "LazyOracle",
    "LidoLocator",
    "Multicall",
    "OperatorGrid",
    "OssifiableProxy",
    "PredepositGuarantee",
    "StakingVault",
    "StvPool",
    "UpgradeableBeacon",
    "VaultFactory",
    "VaultHub",
    "WithdrawalQueue",
    "WrapperFactory",
]
"""A contract with an ABI in `abi/`; `WrapperFactory` is the Factory of the vaults-wrapper."""

CONTRACTS: Final[tuple[ContractName, ...]] = get_args(ContractName)

Abi = list[dict[str, Any]]
_IMPORT: Final = threading.Lock()
_BUILT_IN: Final[Abi] = [
    {"type": "error", "name": "Error", "inputs": [{"name": "message", "type": "string"}]},
    {"type": "error", "name": "Panic", "inputs": [{"name": "code", "type": "uint256"}]},
]
"""The errors of Solidity itself: `require` with a text, and `assert`."""


class ContractMismatch(OperatorError):
    """A contract does not answer, or emit, in the form of its ABI: it is another contract, or was upgraded."""


class NoContract(ContractMismatch):
    """There is no code at the address."""


@dataclass(frozen=True, slots=True)
class ContractCall:
    """A call of one function of the contract at `address`, as `contract` has it."""

    contract: ContractName
    address: Address
    function: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.contract}.{self.function}() of {checksum(self.address)}"


Returned = tuple[Any, ...]
"""What a function returns, in the order of its ABI."""


@dataclass(frozen=True, slots=True)
class _Element:
    """A function, or an error: its `outputs` are then what it carries. `types` are those of the arguments."""

    name: str
    selector: bytes
    types: list[str]
    outputs: list[dict[str, Any]]
    output_types: list[str]


@dataclass(frozen=True, slots=True)
class _Event:
    """An event; what is not indexed is in the data of a log."""

    topic: Hash32
    fields: list[dict[str, Any]]
    indexed: list[dict[str, Any]]
    carried: list[dict[str, Any]]
    carried_types: list[str]


@dataclass(frozen=True, slots=True)
class _Abis:
    """All ABIs, ready for use: functions and events by contract and name, errors by selector."""

    codec: ABICodec
    functions: Mapping[tuple[str, str], _Element]
    errors: Mapping[bytes, _Element]
    events: Mapping[tuple[str, str], _Event]


def read_abi(contract: ContractName) -> Abi:
    """Return the ABI of a contract as the package has it."""
    text = files("vaultevents.chain.execution").joinpath("abi", f"{contract}.json").read_text(encoding="utf-8")
    abi: Abi = json.loads(text)
    return abi


async def call(
    chain: ExecutionChain,
    address: Address,
    contract: ContractName,
    function: str,
    *arguments: Any,
    block: int | None = None,
) -> Returned | Reverted:
    """Return what a function returns at a block (default: the finalized one), or its revert with the error's name.

    Raises `ContractMismatch` for an answer that is not of the ABI (`NoContract` where there is no code), and
    `SourceUnavailable` when no node can answer.
    """
    (answer,) = await calls(chain, [ContractCall(contract, address, function, arguments)], block=block)
    if isinstance(answer, ContractMismatch):
        raise answer
    return answer


async def calls(
    chain: ExecutionChain, requests: Sequence[ContractCall], *, block: int | None = None
) -> list[Returned | Reverted | ContractMismatch]:
    """Return the answers to all requests in order, at one block and from one node, asked in JSON-RPC batches.

    Without `block` it is the finalized one: give its number where the answers of several calls belong together. An
    answer that does not decode is a value, so that the others can be used. Raises `SourceUnavailable`.
    """
    abis = await asyncio.to_thread(_abis)
    provider = web3_over(chain).provider
    position = "finalized" if block is None else hex(block)
    encoded = [_encode(abis, request.contract, request.function, request.arguments) for request in requests]
    questions = [
        ("eth_call", [{"to": hex_text(request.address), "data": hex_text(data)}, position])
        for request, data in zip(requests, encoded, strict=True)
    ]
    responses = await provider.make_batch_request(questions)
    answers: list[Returned | Reverted | ContractMismatch] = [
        _decoded(abis, request, response) for request, response in zip(requests, responses, strict=True)
    ]
    silent = [at for at, response in enumerate(responses) if response.get("result") == "0x"]
    codes = await provider.make_batch_request(
        [("eth_getCode", [hex_text(requests[at].address), position]) for at in silent]
    )
    for at, code in zip(silent, codes, strict=True):
        if code.get("result") == "0x":
            answers[at] = _without_code(requests[at], block)
    return answers


def encode(contract: ContractName, function: str, *arguments: Any) -> bytes:
    """Return the calldata of a call."""
    return _encode(_abis(), contract, function, arguments)


def decode_error(reverted: Reverted) -> Reverted:
    """Return the revert with the name and arguments of its error, where an ABI has it (or it is of Solidity itself)."""
    abis = _abis()
    error = abis.errors.get(reverted.data[:4])
    if error is None:
        return reverted
    try:
        arguments = _values(abis.codec, error.outputs, error.output_types, reverted.data[4:])
    except ValueError:
        return reverted
    return Reverted(reverted.data, error.name, arguments)


def event_topic(contract: ContractName, event: str) -> Hash32:
    """Return the first topic of an event."""
    return _abis().events[contract, event].topic


def decode_log(contract: ContractName, event: str, log: Log) -> dict[str, Any]:
    """Return the arguments of an event by name; an indexed one of variable length is its hash.

    The address of the log is not looked at. Raises `ContractMismatch` for a log of another form.
    """
    abis = _abis()
    known = abis.events[contract, event]
    try:
        arguments = _arguments(abis.codec, known, log)
    except ValueError as error:
        raise ContractMismatch(
            f"log {log.log_index} of transaction {hex_text(log.tx_hash)} is not {contract}.{event} as this version "
            f"knows it ({error}): the contract may have been upgraded, install a version that knows it"
        ) from None
    return {field["name"]: arguments[field["name"]] for field in known.fields}


def load() -> None:
    """Import web3 and parse the ABIs, which the first use does otherwise: seconds, so in a thread where others wait."""
    _abis()


def web3_over(chain: ExecutionChain) -> AsyncWeb3[Any]:
    """Return web3 over the nodes of `chain`: its failover, rate limits, deadlines and pinned network hold.

    It can only read: `eth_call` and `eth_getCode`. It follows no URL that a contract names (CCIP), looks up no ENS
    names, and has no middleware.
    """
    web3: AsyncWeb3[Any] = _web3().AsyncWeb3(_provider_class()(chain), middleware=[])
    return web3


@cache
def _web3() -> Any:
    """Import web3, which every function that uses it does first.

    Its dependency py_ecc raises the recursion limit of the process to 100,000. Parsing deeply nested JSON from a
    gateway then overflows the stack and ends the process, so the limit stays as it is.
    """
    with _IMPORT:
        set_limit = sys.setrecursionlimit
        setattr(sys, "setrecursionlimit", lambda limit: None)  # noqa: B010
        try:
            return import_module("web3")
        finally:
            setattr(sys, "setrecursionlimit", set_limit)  # noqa: B010


@cache
def _provider_class() -> Any:
    _web3()
    from web3.providers.async_base import AsyncJSONBaseProvider

    class NodePoolProvider(AsyncJSONBaseProvider):
        """Ask the node pool of an `ExecutionChain`; every error of the pool is raised as it is."""

        global_ccip_read_enabled = False

        def __init__(self, chain: ExecutionChain) -> None:
            super().__init__()
            self._chain = chain

        async def make_request(self, method: str, params: Any) -> Any:
            (response,) = await self.make_batch_request([(method, params)])
            return response

        async def make_batch_request(self, requests: Sequence[tuple[str, Any]]) -> Any:
            if not requests:
                return []
            if other := {method for method, _ in requests} - {"eth_call", "eth_getCode"}:
                raise NotImplementedError(f"web3 may only read the state of contracts here, not ask {', '.join(other)}")
            answers = await self._chain.read_state([Call(method, tuple(params)) for method, params in requests])
            return [_response(at, answer) for at, answer in enumerate(answers)]

    return NodePoolProvider


def _response(at: int, answer: bytes | Reverted) -> dict[str, Any]:
    """The answer as JSON-RPC has it, which is what web3 takes from a provider."""
    if isinstance(answer, Reverted):
        error = {"code": 3, "message": "execution reverted", "data": hex_text(answer.data)}
        return {"jsonrpc": "2.0", "id": at, "error": error}
    return {"jsonrpc": "2.0", "id": at, "result": hex_text(answer)}


@cache
def _abis() -> _Abis:
    web3 = _web3().AsyncWeb3(_provider_class()(None), middleware=[])
    functions: dict[tuple[str, str], _Element] = {}
    errors = {element.selector: element for element in map(_element, _BUILT_IN)}
    events: dict[tuple[str, str], _Event] = {}
    for contract in CONTRACTS:
        for entry in read_abi(contract):
            match entry["type"]:
                case "function":
                    functions[contract, entry["name"]] = _element(entry)
                case "error":
                    element = _element(entry)
                    errors[element.selector] = element
                case _:
                    events[contract, entry["name"]] = _event(entry)
    return _Abis(web3.codec, functions, errors, events)


def _event(entry: dict[str, Any]) -> _Event:
    from eth_utils.abi import collapse_if_tuple, event_abi_to_log_topic

    carried = [field for field in entry["inputs"] if not field["indexed"]]
    return _Event(
        Hash32(event_abi_to_log_topic(cast(Any, entry))),
        entry["inputs"],
        [field for field in entry["inputs"] if field["indexed"]],
        carried,
        list(map(collapse_if_tuple, carried)),
    )


def _element(entry: dict[str, Any]) -> _Element:
    from eth_utils.abi import collapse_if_tuple, function_signature_to_4byte_selector

    types = [collapse_if_tuple(parameter) for parameter in entry["inputs"]]
    outputs = entry.get("outputs", entry["inputs"])
    selector = function_signature_to_4byte_selector(f"{entry['name']}({','.join(types)})")
    return _Element(entry["name"], selector, types, outputs, [collapse_if_tuple(output) for output in outputs])


def _encode(abis: _Abis, contract: ContractName, function: str, arguments: Sequence[Any]) -> bytes:
    element = abis.functions[contract, function]
    return element.selector + abis.codec.encode(element.types, arguments)


def _decoded(abis: _Abis, request: ContractCall, response: dict[str, Any]) -> Returned | Reverted | ContractMismatch:
    if "error" in response:
        return decode_error(Reverted(bytes.fromhex(response["error"]["data"][2:])))
    data = bytes.fromhex(response["result"][2:])
    element = abis.functions[request.contract, request.function]
    try:
        return _values(abis.codec, element.outputs, element.output_types, data)
    except ValueError as error:
        return ContractMismatch(
            f"{request} answers with {len(data)} bytes that are not ({', '.join(element.output_types)}) ({error}): it "
            "is another contract, or was upgraded to a form that this version does not know"
        )


def _without_code(request: ContractCall, block: int | None) -> NoContract:
    where = "the finalized block" if block is None else f"block {block}"
    return NoContract(
        f"{checksum(request.address)} has no code at {where}, so {request.contract}.{request.function}() cannot be "
        "called: it is the address of an account, or of a contract on another chain"
    )


def _values(codec: ABICodec, fields: list[dict[str, Any]], types: list[str], data: bytes) -> Returned:
    """Decode values; raises `ValueError` for bytes that are not exactly these values."""
    try:
        decoded = codec.decode(types, data)
    except _undecodable() as error:
        raise ValueError(type(error).__name__) from None
    if codec.encode(types, decoded) != data:
        raise ValueError("there is more than that")
    return tuple(_plain(field, value) for field, value in zip(fields, decoded, strict=True))


def _arguments(codec: ABICodec, event: _Event, log: Log) -> dict[str, Any]:
    """Decode the arguments of a log by name; raises `ValueError` for a log of another form."""
    first, *topics = log.topics or (b"",)
    if first != event.topic or len(topics) != len(event.indexed):
        raise ValueError(f"it has {len(log.topics)} topics, or another first one")
    arguments: dict[str, Any] = {}
    for field, topic in zip(event.indexed, topics, strict=True):
        kind = field["type"]
        hashed = kind in ("bytes", "string") or kind.endswith("]") or kind == "tuple"
        arguments[field["name"]] = Hash32(topic) if hashed else _values(codec, [field], [kind], topic)[0]
    carried = _values(codec, event.carried, event.carried_types, log.data)
    return arguments | {field["name"]: value for field, value in zip(event.carried, carried, strict=True)}


@cache
def _undecodable() -> tuple[type[Exception], ...]:
    """What is raised for bytes of another form: also for a length of 2^64, and for text that is not UTF-8."""
    from eth_abi.exceptions import DecodingError

    return (DecodingError, OverflowError, ValueError)


def _plain(field: Mapping[str, Any], value: Any) -> Any:
    """Addresses as 20 bytes, structs by the names of their fields, lists for arrays."""
    kind: str = field["type"]
    if kind.endswith("]"):
        item = {**field, "type": kind[: kind.rindex("[")]}
        return [_plain(item, entry) for entry in value]
    if kind == "address":
        return Address(bytes.fromhex(value[2:]))
    if kind == "tuple":
        return {part["name"]: _plain(part, entry) for part, entry in zip(field["components"], value, strict=True)}
    return value
