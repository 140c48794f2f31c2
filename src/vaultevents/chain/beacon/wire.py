"""From a beacon node's JSON to checked records (Beacon API 2 to 4). Everything malformed raises `NodeFault`.

Integers are decimal strings and byte strings are `0x` hex; fields that are not known here are ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from vaultevents.chain.upstream import hex_values
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import NodeFault, SourceUnavailable
from vaultevents.core.units import Address, Hash32, Pubkey, ValidatorIndex
from vaultevents.core.validators import ValidatorRecord

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,19}")

T = TypeVar("T")


class BeaconResponse(msgspec.Struct, Generic[T]):
    """What every answer about a state or a block looks like; a missing flag says nothing."""

    data: T
    execution_optimistic: bool | None = None
    finalized: bool | None = None


class WireValidator(msgspec.Struct):
    pubkey: str
    withdrawal_credentials: str
    activation_epoch: str
    exit_epoch: str


class WireRecord(msgspec.Struct):
    index: str
    validator: WireValidator


class _Genesis(msgspec.Struct):
    genesis_time: str
    genesis_validators_root: str


class _Syncing(msgspec.Struct):
    head_slot: str
    sync_distance: str = "0"
    is_syncing: bool = False
    is_optimistic: bool = False
    el_offline: bool = False


class _Checkpoint(msgspec.Struct):
    epoch: str
    root: str


class _Checkpoints(msgspec.Struct):
    finalized: _Checkpoint


class _Message(msgspec.Struct):
    slot: str


class _SignedHeader(msgspec.Struct):
    message: _Message


class _Header(msgspec.Struct):
    root: str
    header: _SignedHeader
    canonical: bool = True


class _Payload(msgspec.Struct):
    block_number: str
    block_hash: str


class _Bid(msgspec.Struct):
    parent_block_hash: str


class _SignedBid(msgspec.Struct):
    message: _Bid


class _BlockBody(msgspec.Struct):
    execution_payload: _Payload | None = None
    execution_payload_header: _Payload | None = None
    signed_execution_payload_bid: _SignedBid | None = None


class _BlockMessage(msgspec.Struct):
    slot: str
    body: _BlockBody


class _SignedBlock(msgspec.Struct):
    message: _BlockMessage


@dataclass(frozen=True, slots=True)
class Syncing:
    """How a node sees itself; the flags that an older client does not send are false."""

    head_slot: int
    sync_distance: int
    is_syncing: bool
    is_optimistic: bool
    el_offline: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    epoch: int
    root: Hash32


@dataclass(frozen=True, slots=True)
class BlockHeader:
    root: Hash32
    slot: int
    canonical: bool


@dataclass(frozen=True, slots=True)
class Payload:
    """An execution block that the beacon chain contains, as the beacon block of `slot` names it.

    `number` is None for a block of Gloas: its bid names, by the hash alone, the last payload before that block.
    """

    number: int | None
    hash: Hash32
    slot: int


_GENESIS = msgspec.json.Decoder(BeaconResponse[_Genesis])
_SPEC = msgspec.json.Decoder(BeaconResponse[dict[str, Any]])
_SYNCING = msgspec.json.Decoder(BeaconResponse[_Syncing])
_CHECKPOINTS = msgspec.json.Decoder(BeaconResponse[_Checkpoints])
_HEADER = msgspec.json.Decoder(BeaconResponse[_Header])
_BLOCK = msgspec.json.Decoder(BeaconResponse[_SignedBlock])
_RECORDS = msgspec.json.Decoder(BeaconResponse[list[WireRecord]])


def decoded(node: str, what: str, decoder: msgspec.json.Decoder[T], content: bytes | bytearray) -> T:
    """The content in the decoder's form. What is no JSON at all, such as a page of a proxy, is called so."""
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        known = isinstance(error, msgspec.ValidationError)
        form = "does not have the known form" if known else f"is not JSON (it begins with {bytes(content[:20])!r})"
        problem = f"{what} {form}: {str(error)[:120]}"
    raise NodeFault(node, problem)


def uint64(node: str, what: str, text: object) -> int:
    """A decimal integer of at most 64 bits, as the Beacon API writes every integer."""
    if isinstance(text, str) and _DECIMAL.fullmatch(text) and (value := int(text)) < 2**64:
        return value
    raise NodeFault(node, f"{what} is {str(text)[:40]!r}, not a decimal integer of at most 64 bits")


def genesis(node: str, content: bytes) -> tuple[Hash32, int]:
    """`genesis_validators_root` and `genesis_time`."""
    found = decoded(node, "its genesis", _GENESIS, content).data
    root = Hash32(hex_values.data(node, "its genesis_validators_root", found.genesis_validators_root, 32))
    return root, uint64(node, "its genesis_time", found.genesis_time)


def config(node: str, content: bytes) -> dict[str, Any]:
    """The configuration of its network: mostly text, but lists and objects occur."""
    return decoded(node, "its configuration", _SPEC, content).data


def deposit_contract(node: str, settings: dict[str, Any]) -> Address:
    """DEPOSIT_CONTRACT_ADDRESS of the configuration."""
    text = str(settings.get("DEPOSIT_CONTRACT_ADDRESS"))
    return Address(hex_values.data(node, "its DEPOSIT_CONTRACT_ADDRESS", text, 20))


def chain_time(node: str, genesis_s: int, settings: dict[str, Any]) -> ChainTime:
    """From SLOTS_PER_EPOCH and the length of a slot, which newer networks give in ms and older ones in s."""
    lengths_ms = {
        uint64(node, f"its {key}", settings[key]) * unit_ms
        for key, unit_ms in (("SLOT_DURATION_MS", 1), ("SECONDS_PER_SLOT", 1000))
        if key in settings
    }
    if len(lengths_ms) != 1 or "SLOTS_PER_EPOCH" not in settings:
        raise NodeFault(node, "its configuration does not tell the length of a slot and of an epoch (config/spec)")
    slots = uint64(node, "its SLOTS_PER_EPOCH", settings["SLOTS_PER_EPOCH"])
    try:
        return ChainTime(genesis_s, lengths_ms.pop(), slots)
    except ValueError as error:
        problem = str(error)
    raise NodeFault(node, problem)


def syncing(node: str, content: bytes) -> Syncing:
    found = decoded(node, "its sync state", _SYNCING, content).data
    return Syncing(
        uint64(node, "its head_slot", found.head_slot),
        uint64(node, "its sync_distance", found.sync_distance),
        found.is_syncing,
        found.is_optimistic,
        found.el_offline,
    )


def finalized_checkpoint(node: str, content: bytes) -> Checkpoint:
    answer = decoded(node, "its finality checkpoints", _CHECKPOINTS, content)
    refuse_unproven(node, "its head state", answer.execution_optimistic)
    found = answer.data.finalized
    return Checkpoint(
        uint64(node, "the finalized epoch", found.epoch),
        Hash32(hex_values.data(node, "the finalized root", found.root, 32)),
    )


def header(node: str, content: bytes) -> BlockHeader:
    answer = decoded(node, "a block header", _HEADER, content)
    refuse_unproven(node, "a finalized block", answer.execution_optimistic)
    return BlockHeader(
        Hash32(hex_values.data(node, "the root of a block", answer.data.root, 32)),
        uint64(node, "the slot of a block", answer.data.header.message.slot),
        answer.data.canonical,
    )


def payload(node: str, content: bytes, *, final: bool) -> Payload | None:
    """Return what a signed block, full or blinded, says of the execution layer; None for one from before the merge.

    A bid (Gloas, EIP-7732) proves the parent's payload only: the payload that it promises may never be revealed.
    """
    answer = decoded(node, "a block", _BLOCK, content)
    refuse_unproven(node, "a block", answer.execution_optimistic, answer.finalized if final else None)
    message = answer.data.message
    body, slot = message.body, uint64(node, "the slot of a block", message.slot)
    number: int | None = None
    if found := body.execution_payload or body.execution_payload_header:
        number = uint64(node, f"the execution block number of slot {slot}", found.block_number)
        text = found.block_hash
    elif body.signed_execution_payload_bid is not None:
        text = body.signed_execution_payload_bid.message.parent_block_hash
    else:
        return None
    block_hash = Hash32(hex_values.data(node, f"the execution block hash of slot {slot}", text, 32))
    return Payload(number, block_hash, slot) if any(block_hash) else None


def validators(node: str, content: bytes | bytearray) -> list[ValidatorRecord]:
    """The records of an answer about the finalized state, as they come."""
    answer = decoded(node, "its list of validators", _RECORDS, content)
    refuse_unproven(node, "its finalized state", answer.execution_optimistic, answer.finalized)
    return [record(node, found) for found in answer.data]


def record(node: str, found: WireRecord) -> ValidatorRecord:
    index = uint64(node, "the index of a validator", found.index)
    what, validator = f"of validator {index}", found.validator
    return ValidatorRecord(
        index=ValidatorIndex(index),
        pubkey=Pubkey(hex_values.data(node, f"the pubkey {what}", validator.pubkey, 48)),
        credentials=Hash32(
            hex_values.data(node, f"the withdrawal_credentials {what}", validator.withdrawal_credentials, 32)
        ),
        activation_epoch=uint64(node, f"the activation_epoch {what}", validator.activation_epoch),
        exit_epoch=uint64(node, f"the exit_epoch {what}", validator.exit_epoch),
    )


def refuse_unproven(node: str, what: str, optimistic: bool | None, finalized: bool | None = None) -> None:
    """Nothing is taken from a state whose execution was not checked, nor from one that calls itself not final."""
    if optimistic:
        raise SourceUnavailable(node, f"{what} is optimistic: its execution client has not checked it yet")
    if finalized is False:
        raise SourceUnavailable(node, f"{what} is marked as not finalized")
