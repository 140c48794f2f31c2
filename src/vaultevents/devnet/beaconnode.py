"""The answers of a beacon node about its view of a chain (Ethereum Beacon API), in JSON values."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from eth_hash.auto import keccak

from vaultevents.devnet import beaconblocks
from vaultevents.devnet.beacon import Beacon, Finality, beacon_root
from vaultevents.devnet.blocks import Block
from vaultevents.devnet.chain import resolve
from vaultevents.devnet.deposits import DEPOSIT_CONTRACT
from vaultevents.devnet.header import hex_data
from vaultevents.devnet.payments import MAX_WITHDRAWALS_PER_PAYLOAD
from vaultevents.devnet.validators import FAR_FUTURE_EPOCH, STAKE_GWEI, Record

Json = dict[str, Any]

VERSION = "vaultevents-devnet/1"
SLOT_FIELDS = ("SLOT_DURATION_MS", "SECONDS_PER_SLOT")
"""The names under which config/spec may give the length of a slot; networks have one of them, or both."""


class ApiError(Exception):
    """An answer other than 200, in the words of Lodestar 1.5.1."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def to_json(self) -> Json:
        error = {400: "Bad Request", 404: "Not Found", 414: "URI Too Long"}.get(self.status, "Internal Server Error")
        return {"statusCode": self.status, "error": error, "message": str(self)}


@dataclass(slots=True)
class BeaconNode:
    """One node's view of a beacon chain.

    The newest `behind` blocks are not yet known to it. `final_epochs_back` sets back what it calls final. A state is
    that after its block's slot, also where a checkpoint's epoch begins later (as Teku does, teku#7955), and is kept
    from the finalized one on. A missed slot has neither a header nor a state.
    """

    beacon: Beacon
    behind: int = 0
    slot_fields: tuple[str, ...] = SLOT_FIELDS
    final_epochs_back: int = 0

    @property
    def head(self) -> Block:
        return self._block(max(self.beacon.chain.head.number - self.behind, 0))

    def finality(self, head: Block | None = None) -> Finality:
        """The finalized checkpoint of the state of `head` (default: the node's head)."""
        number = resolve(self.beacon.chain.finalized, (head or self.head).number)
        found = self.beacon.finality(number if isinstance(number, int) else None)
        if not self.final_epochs_back:
            return found
        epoch = max(found.epoch - self.final_epochs_back, 0)
        return Finality(epoch, self.beacon.last_block_at(self.beacon.first_slot(epoch)))

    def syncing(self) -> Json:
        return {
            "data": {
                "head_slot": str(self.head.slot),
                "sync_distance": "0",
                "is_syncing": False,
                "is_optimistic": False,
                "el_offline": False,
            }
        }

    def version(self) -> Json:
        return {"data": {"version": VERSION}}

    def spec(self) -> Json:
        seconds = self.beacon.chain.seconds_per_slot
        lengths = {"SLOT_DURATION_MS": str(seconds * 1000), "SECONDS_PER_SLOT": str(seconds)}
        return {
            "data": {
                "PRESET_BASE": "minimal",
                "CONFIG_NAME": "devnet",
                "SLOTS_PER_EPOCH": str(self.beacon.slots_per_epoch),
                **{name: lengths[name] for name in self.slot_fields},
                "MAX_SEED_LOOKAHEAD": "4",
                "MAX_WITHDRAWALS_PER_PAYLOAD": str(MAX_WITHDRAWALS_PER_PAYLOAD),
                "CAPELLA_FORK_EPOCH": "0",
                "ELECTRA_FORK_EPOCH": "0",
                "FULU_FORK_EPOCH": "0",
                "GLOAS_FORK_EPOCH": str(FAR_FUTURE_EPOCH),
                "BLOB_SCHEDULE": [{"EPOCH": "0", "MAX_BLOBS_PER_BLOCK": "9"}],
                "DEPOSIT_CHAIN_ID": str(self.beacon.chain.chain_id),
                "DEPOSIT_CONTRACT_ADDRESS": hex_data(DEPOSIT_CONTRACT),
            }
        }

    def genesis(self) -> Json:
        return {
            "data": {
                "genesis_time": str(self.beacon.genesis.timestamp_s),
                "genesis_validators_root": hex_data(self.beacon.genesis_validators_root),
                "genesis_fork_version": "0x00000001",
            }
        }

    def finality_checkpoints(self, state_id: str) -> Json:
        """Epoch 0 and a root of zeros stand for a checkpoint that does not exist yet. Raises `ApiError`."""
        state = self.state(state_id)
        final = self.finality(state)
        justified = min(final.epoch + 1, self.beacon.epoch_of(state.slot))
        checkpoint = {"epoch": str(final.epoch), "root": _root(final.epoch, final.block)}
        later = self.beacon.last_block_at(self.beacon.first_slot(justified))
        return self._answer(
            {
                "previous_justified": checkpoint,
                "current_justified": {"epoch": str(justified), "root": _root(justified, later)},
                "finalized": checkpoint,
            },
            state,
        )

    def header(self, block_id: str) -> Json:
        """Raises `ApiError`, also for a slot without a block."""
        block = self._known_block(block_id)
        root = hex_data(beacon_root(block))
        shown = {"message": self._message(block), "signature": "0x" + "00" * 96}
        return self._answer({"root": root, "canonical": True, "header": shown}, block)

    def block(self, block_id: str, *, blinded: bool) -> Json:
        """Return a signed block with its payload, or `blinded` with the payload's header. Raises `ApiError`.

        From Gloas on there is no blinded form, and a block carries a bid in place of a payload.
        """
        block = self._known_block(block_id)
        if blinded and beaconblocks.has_bid(block):
            raise ApiError(400, f"Blinded blocks do not exist in {beaconblocks.version(block)}")
        shown = beaconblocks.signed_block(block, self._message(block), self._parent_root(block), blinded=blinded)
        return {"version": beaconblocks.version(block), **self._answer(shown, block)}

    def envelope(self, block_id: str) -> Json:
        """Return the payload that belongs to a block of Gloas. Raises `ApiError`, also for an earlier block."""
        block = self._known_block(block_id)
        if not beaconblocks.has_bid(block):
            raise ApiError(404, f"No execution payload envelope found for id '{block_id}'")
        message = {
            "payload": beaconblocks.payload(block),
            "execution_requests": {"deposits": [], "withdrawals": [], "consolidations": []},
            "builder_index": "0",
            "beacon_block_root": hex_data(beacon_root(block)),
            "parent_beacon_block_root": hex_data(self._parent_root(block)),
        }
        return {
            "version": beaconblocks.version(block),
            **self._answer({"message": message, "signature": "0x" + "00" * 96}, block),
        }

    def _known_block(self, block_id: str) -> Block:
        block = self._find(block_id)
        if block is None:
            known = block_id.isdecimal() or _is_root(block_id)
            raise ApiError(404, f"No block found for id '{block_id}'") if known else _bad("block", block_id)
        return block

    def _message(self, block: Block) -> Json:
        root = beacon_root(block)
        return {
            "slot": str(block.slot),
            "proposer_index": str(block.number % 8),
            "parent_root": hex_data(self._parent_root(block)),
            "state_root": hex_data(keccak(root + b"state")),
            "body_root": hex_data(keccak(root + b"body")),
        }

    def _parent_root(self, block: Block) -> bytes:
        return bytes(32) if block.number == 0 else beacon_root(self._block(block.number - 1))

    def validators(self, state_id: str, ids: Collection[str], statuses: Collection[str] = ()) -> Json:
        """The records of indices and public keys; of all validators when there are no ids. Raises `ApiError`.

        Ids that the state does not know are dropped. Records come in the opposite order of the ids.
        """
        state = self.state(state_id)
        registry = self.beacon.registry
        indices: Iterable[int | None] = range(registry.count(state.slot))
        if ids:
            indices = reversed([self._index(validator_id) for validator_id in dict.fromkeys(ids)])
        found = [registry.record(index, state.slot) for index in indices if index is not None]
        epoch = self.beacon.epoch_of(state.slot)
        records = [record_json(record, epoch) for record in found if record is not None]
        if statuses:
            records = [
                record for record in records if {record["status"], record["status"].split("_")[0]} & set(statuses)
            ]
        return self._answer(records, state)

    def validator(self, state_id: str, validator_id: str) -> Json:
        """Raises `ApiError`."""
        state = self.state(state_id)
        if not validator_id.isdecimal() and not validator_id.startswith("0x"):
            raise ApiError(400, "Invalid validator index")
        index = self._index(validator_id)
        record = None if index is None else self.beacon.registry.record(index, state.slot)
        if record is None:
            raise ApiError(404, "Validator index from future state")
        return self._answer(record_json(record, self.beacon.epoch_of(state.slot)), state)

    def state(self, state_id: str) -> Block:
        """The block after which a state is. Raises `ApiError`."""
        block = self._find(state_id)
        if block is not None and (block.slot >= self.finality().block.slot or state_id == "genesis"):
            return block
        if block is not None or state_id.isdecimal() or _is_root(state_id):
            raise ApiError(404, f"No state found for id '{state_id}'")
        raise _bad("state", state_id)

    def _find(self, name: str) -> Block | None:
        """The canonical block that a block id or a state id names, if the node knows one."""
        match name:
            case "head":
                return self.head
            case "finalized":
                return self.finality().block
            case "genesis":
                return self.beacon.genesis
        if name.isdecimal():
            block = self.beacon.last_block_at(min(int(name), self.head.slot))
            return block if block.slot == int(name) else None
        blocks = self.beacon.chain.blocks(0, self.head.number) if _is_root(name) else []
        return next((block for block in reversed(blocks) if hex_data(beacon_root(block)) == name.lower()), None)

    def _index(self, validator_id: str) -> int | None:
        if validator_id.isdecimal():
            return int(validator_id)
        wanted = validator_id.lower()
        return next(
            (validator.index for validator in self.beacon.registry.validators if hex_data(validator.pubkey) == wanted),
            None,
        )

    def _block(self, number: int) -> Block:
        (block,) = self.beacon.chain.blocks(number, number)
        return block

    def _answer(self, data: object, block: Block) -> Json:
        final = block.slot <= self.finality().block.slot
        return {"execution_optimistic": False, "finalized": final, "data": data}


def record_json(record: Record, epoch: int) -> Json:
    """A validator as the Beacon API shows it in a state of `epoch`."""
    return {
        "index": str(record.index),
        "balance": str(record.balance_gwei),
        "status": _status(record, epoch),
        "validator": {
            "pubkey": hex_data(record.pubkey),
            "withdrawal_credentials": hex_data(record.credentials),
            "effective_balance": str(min(record.balance_gwei, STAKE_GWEI)),
            "slashed": record.slashed,
            "activation_eligibility_epoch": str(record.activation_eligibility_epoch),
            "activation_epoch": str(record.activation_epoch),
            "exit_epoch": str(record.exit_epoch),
            "withdrawable_epoch": str(record.withdrawable_epoch),
        },
    }


def _status(record: Record, epoch: int) -> str:
    """As in the Beacon API: computed at the slot of the state, so it may lag behind the epochs."""
    if epoch < record.activation_epoch:
        return "pending_queued" if epoch >= record.activation_eligibility_epoch else "pending_initialized"
    if epoch < record.exit_epoch:
        if record.exit_epoch == FAR_FUTURE_EPOCH:
            return "active_ongoing"
        return "active_slashed" if record.slashed else "active_exiting"
    if epoch < record.withdrawable_epoch:
        return "exited_slashed" if record.slashed else "exited_unslashed"
    return "withdrawal_possible" if record.balance_gwei else "withdrawal_done"


def _root(epoch: int, block: Block) -> str:
    return hex_data(beacon_root(block) if epoch else bytes(32))


def _is_root(name: str) -> bool:
    return len(name) == 66 and name.startswith("0x")


def _bad(what: str, name: str) -> ApiError:
    return ApiError(400, f"Invalid {what} id '{name}'")
