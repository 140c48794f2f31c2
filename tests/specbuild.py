"""Makes the chain of specchain.py with the executable consensus specification (PyPI: eth-consensus-specs).

    python specbuild.py FILE      some 12 s of CPU

Every block and state is the result of the specification's own state transition, with real execution block hashes;
only signatures are not checked. The same version gives the same chain.

Minimal preset: 8 slots of 6 s per epoch, at most 4 withdrawals per block, 64 validators of which 0 to 7 pay `VAULT`
(4 to 7 with 0x02 credentials) and 8 to 63 pay `OTHER_VAULT`. What happens:

    slot   1   sweep: 1.5 ETH of validator 0, which began with 33.5 ETH
    slot  13   missed
    slot  17   a deposit for `VAULT`, which becomes validator 64, activated at epoch 12
    slot  33   two partial withdrawals (EIP-7002) of validator 4, paid in one block; a full exit of validator 1;
               a consolidation (EIP-7251) of validator 2 into 5: it exits, and its stake moves without a withdrawal
    slot  40   missed, the first of epoch 5, whose finalized block is therefore that of slot 39; and 41
    epoch  8   validators 6 and 7, which waited since genesis, are activated
    epoch  9   validators 1 and 2 have exited
    always     sweeps of what validators earn above 32 ETH
"""

from __future__ import annotations

import sys
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from specchain import GENESIS_S, OTHER_VAULT, VAULT, Block, Checkpoint, SpecChain, Validator, Withdrawal

EPOCHS = 16
VALIDATORS = 64
MISSED_SLOTS = frozenset({13, 40, 41})
DEPOSIT_SLOT, REQUESTS_SLOT = 17, 33

EXECUTION_GENESIS_S = GENESIS_S - 600
"""As on a real network, execution block 0 is older than the beacon chain."""

GWEI_PER_ETH = 10**9

_PRESETS = ("SLOTS_PER_EPOCH", "SLOTS_PER_HISTORICAL_ROOT", "MAX_WITHDRAWALS_PER_PAYLOAD", "MAX_SEED_LOOKAHEAD")


def build() -> SpecChain:
    """Run the specification: some 12 s of CPU. It changes what it imports, so it has a process of its own."""
    spec = _specification()
    state = _genesis_state(spec)
    root = bytes(state.genesis_validators_root)
    blocks, states = [_genesis_block(spec, state)], {0: state.encode_bytes()}
    for slot in range(1, EPOCHS * int(spec.SLOTS_PER_EPOCH) + 1):
        if slot not in MISSED_SLOTS:
            blocks.append(_next_block(spec, state, slot))
            states[slot] = state.encode_bytes()
    chain = SpecChain(_config(spec), root, tuple(blocks), {})
    ever_final = {chain.block_of(block.finalized).slot for block in blocks}
    return msgspec.structs.replace(chain, states={slot: states[slot] for slot in ever_final})


def _specification() -> Any:
    _cache_layouts()
    keys: Any = _helpers("keys")
    _ = [keys.pubkeys[index] for index in range(VALIDATORS + 1)]  # made lazily, and only with real BLS
    bls: Any = import_module("eth_consensus_specs.utils.bls")
    bls.bls_active = False
    spec: Any = import_module("eth_consensus_specs.fulu.minimal")
    spec.config = spec.config._replace(
        SHARD_COMMITTEE_PERIOD=2,
        MIN_VALIDATOR_WITHDRAWABILITY_DELAY=1,
        MIN_PER_EPOCH_CHURN_LIMIT_ELECTRA=256 * GWEI_PER_ETH,
        MAX_PER_EPOCH_ACTIVATION_EXIT_CHURN_LIMIT=192 * GWEI_PER_ETH,
    )
    return spec


def _cache_layouts() -> None:
    """Derive the layout of an SSZ container once for its class, not at each access to a field: a fifth of the time."""
    container: Any = import_module("remerkleable.complex").Container
    for name in ("fields", "tree_depth", "item_elem_cls"):
        cached: Any = cache(getattr(container, name).__func__)
        setattr(container, name, classmethod(cached))


def _helpers(name: str) -> Any:
    return import_module(f"eth_consensus_specs.test.helpers.{name}")


def _genesis_state(spec: Any) -> Any:
    full = spec.MAX_EFFECTIVE_BALANCE
    state = _helpers("genesis").create_genesis_state(spec, [full] * VALIDATORS, full)
    state.genesis_time = GENESIS_S
    for index, validator in enumerate(state.validators):
        prefix, vault = (2 if 4 <= index < 8 else 1), (VAULT if index < 8 else OTHER_VAULT)
        validator.withdrawal_credentials = spec.Bytes32(bytes([prefix]) + bytes(11) + vault)
    state.balances[0] = 33_500_000_000
    state.balances[4] = 40 * GWEI_PER_ETH
    state.validators[4].effective_balance = 34 * GWEI_PER_ETH
    for index in (6, 7):
        state.validators[index].activation_epoch = spec.FAR_FUTURE_EPOCH
        state.validators[index].activation_eligibility_epoch = spec.FAR_FUTURE_EPOCH
    state.genesis_validators_root = spec.hash_tree_root(state.validators)
    payload = _genesis_payload(spec)
    state.latest_execution_payload_header = _helpers("execution_payload").get_execution_payload_header(spec, payload)
    return state


def _genesis_payload(spec: Any) -> Any:
    payload = spec.ExecutionPayload(gas_limit=30_000_000, base_fee_per_gas=10**9, timestamp=EXECUTION_GENESIS_S)
    hash_of = _helpers("execution_payload").compute_el_block_hash_with_new_fields
    payload.block_hash = hash_of(spec, payload, bytes(32), sha256().digest())
    return payload


def _genesis_block(spec: Any, state: Any) -> Block:
    header = state.latest_block_header.copy()
    header.state_root = spec.hash_tree_root(state)
    return _block(spec, state, header, header.body_root, _genesis_payload(spec), sha256().digest())


def _next_block(spec: Any, state: Any, slot: int) -> Block:
    """Moves `state` on to the block of `slot`; in every slot, also a missed one, everybody attests to the head."""
    previous = int(state.slot)
    spec.process_slots(state, spec.Slot(slot))
    block = _helpers("block").build_empty_block(spec, state, spec.Slot(slot))
    for attested in range(max(1, previous), slot):
        for attestation in _helpers("attestations").get_valid_attestations_at_slot(state, spec, spec.Slot(attested)):
            block.body.attestations.append(attestation)
    block.body.execution_requests = _requests(spec, state, slot)
    payloads = _helpers("execution_payload")
    block.body.execution_payload.block_hash = payloads.compute_el_block_hash_for_block(spec, block)
    spec.process_block(state, block)
    block.state_root = spec.hash_tree_root(state)
    requests = spec.get_execution_requests_list(block.body.execution_requests)
    body_root, requests_hash = spec.hash_tree_root(block.body), payloads.compute_requests_hash(requests)
    return _block(spec, state, block, body_root, block.body.execution_payload, requests_hash)


def _requests(spec: Any, state: Any, slot: int) -> Any:
    """What the execution layer asks for in this slot (EIP-6110, EIP-7002, EIP-7251)."""
    vault = spec.ExecutionAddress(VAULT)

    def withdrawal(index: int, amount_gwei: int) -> Any:  # 0: all, a full exit
        pubkey = state.validators[index].pubkey
        return spec.WithdrawalRequest(source_address=vault, validator_pubkey=pubkey, amount=amount_gwei)

    requests = spec.ExecutionRequests()
    if slot == DEPOSIT_SLOT:
        requests.deposits = [
            spec.DepositRequest(
                pubkey=_helpers("keys").pubkeys[VALIDATORS],
                withdrawal_credentials=spec.Bytes32(b"\x01" + bytes(11) + VAULT),
                amount=32 * GWEI_PER_ETH,
                index=VALIDATORS,
            )
        ]
    if slot == REQUESTS_SLOT:
        pubkeys = [validator.pubkey for validator in state.validators]
        requests.withdrawals = [withdrawal(4, GWEI_PER_ETH), withdrawal(4, 2 * GWEI_PER_ETH), withdrawal(1, 0)]
        requests.consolidations = [
            spec.ConsolidationRequest(source_address=vault, source_pubkey=pubkeys[2], target_pubkey=pubkeys[5])
        ]
    return requests


def _block(spec: Any, state: Any, block: Any, body_root: Any, payload: Any, requests_hash: bytes) -> Block:
    return Block(
        slot=int(block.slot),
        root=bytes(spec.hash_tree_root(block)),
        proposer_index=int(block.proposer_index),
        parent_root=bytes(block.parent_root),
        state_root=bytes(block.state_root),
        body_root=bytes(body_root),
        execution_number=int(payload.block_number),
        execution_hash=bytes(payload.block_hash),
        execution_time_s=int(payload.timestamp),
        execution_header=_execution_header(payload, bytes(block.parent_root), requests_hash),
        withdrawals=tuple(
            Withdrawal(
                int(withdrawal.index),
                int(withdrawal.validator_index),
                bytes(withdrawal.address),
                int(withdrawal.amount),
            )
            for withdrawal in payload.withdrawals
        ),
        validators=tuple(
            Validator(
                bytes(one.pubkey),
                bytes(one.withdrawal_credentials),
                int(one.effective_balance),
                int(balance),
                bool(one.slashed),
                int(one.activation_eligibility_epoch),
                int(one.activation_epoch),
                int(one.exit_epoch),
                int(one.withdrawable_epoch),
            )
            for one, balance in zip(state.validators, state.balances, strict=True)
        ),
        previous_justified=_checkpoint(state.previous_justified_checkpoint),
        current_justified=_checkpoint(state.current_justified_checkpoint),
        finalized=_checkpoint(state.finalized_checkpoint),
    )


def _checkpoint(found: Any) -> Checkpoint:
    return Checkpoint(int(found.epoch), bytes(found.root))


def _execution_header(payload: Any, parent_beacon_root: bytes, requests_hash: bytes) -> dict[str, str]:
    """The fields of a header that are hashed, in their order (EIP-4895, 4844, 4788, 7685), and the hash."""
    roots = _helpers("execution_payload")
    withdrawals_root = roots.compute_trie_root_from_indexed_data(
        [roots.get_withdrawal_rlp(withdrawal) for withdrawal in payload.withdrawals]
    )
    fields: dict[str, bytes | int] = {
        "parentHash": payload.parent_hash,
        "sha3Uncles": bytes.fromhex("1dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347"),
        "miner": payload.fee_recipient,
        "stateRoot": payload.state_root,
        "transactionsRoot": roots.compute_trie_root_from_indexed_data([]),
        "receiptsRoot": payload.receipts_root,
        "logsBloom": payload.logs_bloom,
        "difficulty": 0,
        "number": payload.block_number,
        "gasLimit": payload.gas_limit,
        "gasUsed": payload.gas_used,
        "timestamp": payload.timestamp,
        "extraData": b"",
        "mixHash": payload.prev_randao,
        "nonce": bytes(8),
        "baseFeePerGas": payload.base_fee_per_gas,
        "withdrawalsRoot": withdrawals_root,
        "blobGasUsed": payload.blob_gas_used,
        "excessBlobGas": payload.excess_blob_gas,
        "parentBeaconBlockRoot": parent_beacon_root,
        "requestsHash": requests_hash,
        "hash": payload.block_hash,
    }
    return {name: hex(value) if isinstance(value, int) else "0x" + bytes(value).hex() for name, value in fields.items()}


def _config(spec: Any) -> dict[str, Any]:
    """The configuration and some of the preset as the Beacon API gives them: decimal text, hex, lists and objects."""

    def text(value: Any) -> Any:
        match value:
            case int():
                return str(int(value))
            case bytes():
                return "0x" + value.hex()
            case list() | tuple():
                return [text(one) for one in value]
            case str():
                return str(value)
            case _:
                return {str(name): text(one) for name, one in value.items()}

    presets = {name: getattr(spec, name) for name in _PRESETS}
    return {name: text(value) for name, value in {**spec.config._asdict(), **presets}.items()}


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(build()))
