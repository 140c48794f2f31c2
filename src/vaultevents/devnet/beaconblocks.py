"""Beacon blocks with their execution payload, in JSON values (`SignedBeaconBlock` of Fulu and Gloas).

What the watchers do not read is empty, so the root of a block cannot be rebuilt from its JSON.
"""

from __future__ import annotations

from typing import Any

from vaultevents.devnet.blocks import Block
from vaultevents.devnet.header import hex_data

_PAYLOAD_FIELDS = {
    "parent_hash": "parentHash",
    "fee_recipient": "miner",
    "state_root": "stateRoot",
    "receipts_root": "receiptsRoot",
    "logs_bloom": "logsBloom",
    "prev_randao": "mixHash",
    "block_number": "number",
    "gas_limit": "gasLimit",
    "gas_used": "gasUsed",
    "timestamp": "timestamp",
    "extra_data": "extraData",
    "base_fee_per_gas": "baseFeePerGas",
    "blob_gas_used": "blobGasUsed",
    "excess_blob_gas": "excessBlobGas",
}
"""The fields of a payload and of its header, with their names in an execution block."""

_SIGNATURE = "0x" + "00" * 96


def has_bid(block: Block) -> bool:
    """Whether the beacon block of an execution block is of Gloas: it carries a bid and no payload (EIP-7732)."""
    return bool(block.header.later_fields)


def version(block: Block) -> str:
    """Return the name of the fork that the beacon block belongs to."""
    return "gloas" if has_bid(block) else "fulu"


def signed_block(block: Block, message: dict[str, Any], parent_root: bytes, *, blinded: bool) -> dict[str, Any]:
    """Return the block with `message` as the fields of its header; `blinded` puts the payload's header in its place."""
    body: dict[str, Any] = {
        "randao_reveal": _SIGNATURE,
        "eth1_data": {"deposit_root": hex_data(bytes(32)), "deposit_count": "0", "block_hash": hex_data(bytes(32))},
        "graffiti": hex_data(b"devnet".ljust(32, b"\0")),
        "proposer_slashings": [],
        "attester_slashings": [],
        "attestations": [],
        "deposits": [],
        "voluntary_exits": [],
        "sync_aggregate": {"sync_committee_bits": "0x00000000", "sync_committee_signature": _SIGNATURE},
        "bls_to_execution_changes": [],
    }
    if has_bid(block):
        body["signed_execution_payload_bid"] = {"message": _bid(block, parent_root), "signature": _SIGNATURE}
        body["payload_attestations"] = []
    else:
        name = "execution_payload_header" if blinded else "execution_payload"
        body[name] = _payload_header(block) if blinded else payload(block)
        body["blob_kzg_commitments"] = []
        body["execution_requests"] = {"deposits": [], "withdrawals": [], "consolidations": []}
    known = {name: value for name, value in message.items() if name != "body_root"}
    return {"message": {**known, "body": body}, "signature": _SIGNATURE}


def payload(block: Block) -> dict[str, Any]:
    """Return the execution payload."""
    return _common(block) | {
        "transactions": [hex_data(envelope.encoded()) for envelope in block.envelopes],
        "withdrawals": [
            {
                "index": str(withdrawal.index),
                "validator_index": str(withdrawal.validator_index),
                "address": hex_data(withdrawal.address),
                "amount": str(withdrawal.amount_gwei),
            }
            for withdrawal in block.withdrawals
        ],
    }


def _payload_header(block: Block) -> dict[str, Any]:
    fields = block.header.fields()
    roots = {"transactions_root": "transactionsRoot", "withdrawals_root": "withdrawalsRoot"}
    return _common(block) | {name: _text(fields[theirs]) for name, theirs in roots.items()}


def _common(block: Block) -> dict[str, Any]:
    """The beacon block of genesis has a payload of zeros, as on real networks."""
    fields = block.header.fields()
    found = {name: fields[theirs] for name, theirs in _PAYLOAD_FIELDS.items()} | {"block_hash": block.hash}
    if block.number == 0:
        found = {name: bytes(len(value)) if isinstance(value, bytes) else 0 for name, value in found.items()}
    return {name: _text(value) for name, value in found.items()}


def _bid(block: Block, parent_root: bytes) -> dict[str, Any]:
    """`block_hash` is what the builder promises; only `parent_block_hash` is a payload that the chain has accepted."""
    return {
        "parent_block_hash": hex_data(block.header.parent_hash),
        "parent_block_root": hex_data(parent_root),
        "block_hash": hex_data(block.hash),
        "prev_randao": hex_data(block.header.prev_randao),
        "fee_recipient": _text(block.header.fields()["miner"]),
        "gas_limit": _text(block.header.fields()["gasLimit"]),
        "builder_index": "0",
        "slot": str(block.slot),
        "value": "0",
        "execution_payment": "0",
        "blob_kzg_commitments": [],
        "execution_requests_root": hex_data(bytes(32)),
    }


def _text(value: bytes | int) -> str:
    return hex_data(value) if isinstance(value, bytes) else str(value)
