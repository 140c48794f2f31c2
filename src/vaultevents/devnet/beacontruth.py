"""The events that a right service sends for validators, written from what was decided and not from what is served.

Ids and bodies follow `docs/events.md` and the rules E2, E4, E6, E7, E12, C3 and C4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vaultevents.devnet.beacon import Beacon
from vaultevents.devnet.blocks import Block
from vaultevents.devnet.payments import BUILDER_FLAG
from vaultevents.devnet.truth import Events, Registration, eth, event
from vaultevents.devnet.validators import EPOCHS_AHEAD, Validator, paid_address

_WEI_PER_GWEI = 10**9
_Watch = dict[bytes, list[Registration]]


def expected_of_validators(
    beacon: Beacon, registrations: Iterable[Registration], through: int | None = None, now_s: float | None = None
) -> Events:
    """Every event of a validator once execution block `through` (default: the finalized block) is final.

    Activations and exits exist up to the epoch at `now_s` (default: the time of the chain's head) or, when finality is
    far behind, up to four epochs after that of the finalized checkpoint's block. A withdrawal exists when a later epoch
    has a final block.
    """
    last = beacon.chain.finalized_number if through is None else through
    final = None if last is None else beacon.chain.block(last)
    if final is None:
        return {}
    watch: _Watch = defaultdict(list)
    for registration in registrations:
        watch[registration.address].append(registration)
    now_s = beacon.chain.head.timestamp_s if now_s is None else now_s
    return dict([*_turns(beacon, watch, final, now_s), *_withdrawals(beacon, watch, final)])


def _turns(beacon: Beacon, watch: _Watch, final: Block, now_s: float) -> Iterator[tuple[tuple[str, str], bytes]]:
    """Activations and exits of the validators that pay a watched vault in the finalized state."""
    state_slot = beacon.finality(final.number).block.slot
    last_epoch = beacon.epoch_of(state_slot) + EPOCHS_AHEAD - 1
    for validator in beacon.registry.validators:
        address = paid_address(validator.credentials_at(state_slot) or b"")
        owners = [] if address is None else watch.get(address, [])
        for kind, assigned in ((_ACTIVATED, validator.activation), (_EXITED, validator.exit)):
            if assigned is None or assigned.epoch > last_epoch:
                continue
            start_s = beacon.epoch_start_s(assigned.epoch)
            if start_s > now_s:
                continue
            for owner in owners:
                if _covers_time(beacon, owner, start_s):
                    message = f"Validator {validator.index} of vault {owner.vault_id} {kind.verb} {assigned.epoch}."
                    payload = _payload(validator, assigned.epoch)
                    yield event(
                        owner, kind.event_type, str(validator.index), kind.title, message, payload,
                        created_at_ms=start_s * 1000,
                    )  # fmt: skip


def _withdrawals(beacon: Beacon, watch: _Watch, final: Block) -> Iterator[tuple[tuple[str, str], bytes]]:
    """What each validator paid to a watched vault in each epoch that is over."""
    amounts_gwei: dict[tuple[bytes, int, int], int] = defaultdict(int)
    last_blocks: dict[tuple[bytes, int, int], Block] = {}
    before = beacon.first_slot(beacon.epoch_of(final.slot))
    for block in beacon.chain.blocks(0, final.number):
        for withdrawal in block.withdrawals if block.slot < before else ():
            if withdrawal.address in watch and withdrawal.validator_index < BUILDER_FLAG:
                key = (withdrawal.address, withdrawal.validator_index, beacon.epoch_of(block.slot))
                amounts_gwei[key] += withdrawal.amount_gwei
                last_blocks[key] = block
    for (address, index, epoch), amount_gwei in amounts_gwei.items():
        block = last_blocks[address, index, epoch]
        amount_eth = eth(amount_gwei * _WEI_PER_GWEI)
        payload = {**_payload(beacon.registry.validators[index], epoch), "amount_eth": amount_eth}
        for owner in watch[address]:
            if owner.covers(block.number):
                message = f"{amount_eth} ETH moved from validator {index} to vault {owner.vault_id} in epoch {epoch}."
                yield event(
                    owner, "validator_withdrawal_completed", f"{index}_{epoch}", "Validator withdrawal completed",
                    message, payload, created_at_ms=block.timestamp_s * 1000,
                )  # fmt: skip


class _Kind(NamedTuple):
    event_type: str
    title: str
    verb: str


_ACTIVATED = _Kind("validator_activated", "Validator activated", "became active in epoch")
_EXITED = _Kind("validator_exited", "Validator exited", "exited in epoch")


def _payload(validator: Validator, epoch: int) -> dict[str, Any]:
    return {
        "validator_index": validator.index,
        "validator_pubkey": "0x" + validator.pubkey.hex(),
        "epoch": epoch,
    }


def _covers_time(beacon: Beacon, owner: Registration, time_s: int) -> bool:
    """Whether a moment lies between the times of the first and the last block, of which either may be to come."""
    first = beacon.chain.block(owner.first_block)
    last = None if owner.last_block is None else beacon.chain.block(owner.last_block)
    return first is not None and first.timestamp_s <= time_s and (last is None or time_s <= last.timestamp_s)
