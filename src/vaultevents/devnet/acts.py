"""What contracts do in a transaction, and the logs it leaves: vaults, queues, the oracle."""

from __future__ import annotations

from dataclasses import dataclass

from eth_hash.auto import keccak

from vaultevents.devnet.blocks import Log

ETHER_FUNDED_TOPIC = keccak(b"EtherFunded(uint256)")
WITHDRAWAL_CLAIMED_TOPIC = keccak(b"WithdrawalClaimed(uint256,address,address,uint256)")
REPORT_TOPIC = keccak(b"VaultsReportDataUpdated(uint256,uint256,bytes32,string)")


@dataclass(frozen=True, slots=True)
class Funding:
    """`EtherFunded(amount)` emitted by a vault, or by a foreign contract that has the same event."""

    vault: bytes
    amount_wei: int


@dataclass(frozen=True, slots=True)
class Claim:
    """`WithdrawalClaimed(requestId, owner, recipient, amountOfETH)` of a withdrawal queue."""

    queue: bytes
    request_id: int
    owner: bytes
    recipient: bytes
    amount_wei: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """A foreign contract's log with the first topic of `EtherFunded` and another layout."""

    emitter: bytes


@dataclass(frozen=True, slots=True)
class Publication:
    """`VaultsReportDataUpdated(timestamp, refSlot, root, cid)` of the LazyOracle, or of a foreign contract.

    `calldata` is what updates each vault of the simulation that is in the report, by vault.
    """

    emitter: bytes
    timestamp_s: int
    ref_slot: int
    root: bytes
    cid: str
    calldata: tuple[tuple[bytes, bytes], ...]


Act = Funding | Claim | Malformed | Publication


def log_of(act: Act) -> Log:
    """The log of an act, ABI-encoded as the contracts do."""
    match act:
        case Funding(vault, amount_wei):
            return Log(vault, (ETHER_FUNDED_TOPIC,), amount_wei.to_bytes(32))
        case Claim(queue, request_id, owner, recipient, amount_wei):
            indexed = (request_id.to_bytes(32), owner.rjust(32, b"\0"), recipient.rjust(32, b"\0"))
            return Log(queue, (WITHDRAWAL_CLAIMED_TOPIC, *indexed), amount_wei.to_bytes(32))
        case Malformed(emitter):
            return Log(emitter, (ETHER_FUNDED_TOPIC, emitter.rjust(32, b"\0")), b"")
        case Publication(emitter, timestamp_s, ref_slot, root, cid):
            indexed = (timestamp_s.to_bytes(32), ref_slot.to_bytes(32), root)
            text = cid.encode("ascii")
            padded = text.ljust(-(-len(text) // 32) * 32, b"\0")
            return Log(emitter, (REPORT_TOPIC, *indexed), (32).to_bytes(32) + len(text).to_bytes(32) + padded)
