"""A Fulu chain made by the executable consensus specification, as plain data, and the events that it holds.

`built_once` has it made by specbuild.py, whose description says what happens on it; `expected` reads the events off the
specification's own states and payloads, with nothing of ours.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

GENESIS_S = 1_767_225_600
VAULT = bytes.fromhex("1111" + "aa" * 16 + "2222")
OTHER_VAULT = b"\xee" * 20
EPOCHS_AHEAD = 4
"""MAX_SEED_LOOKAHEAD: activations and exits are assigned later than this many epochs ahead."""

_BUILDER = Path(__file__).with_name("specbuild.py")


class Validator(msgspec.Struct, frozen=True):
    """A record of a state, with its balance."""

    pubkey: bytes
    credentials: bytes
    effective_balance_gwei: int
    balance_gwei: int
    slashed: bool
    activation_eligibility_epoch: int
    activation_epoch: int
    exit_epoch: int
    withdrawable_epoch: int


class Withdrawal(msgspec.Struct, frozen=True):
    """An entry of a payload's `withdrawals`."""

    index: int
    validator_index: int
    address: bytes
    amount_gwei: int


class Checkpoint(msgspec.Struct, frozen=True):
    epoch: int
    root: bytes


class Block(msgspec.Struct, frozen=True):
    """A beacon block with its payload and the state after it; genesis is the one of slot 0.

    `execution_header` is what a JSON-RPC node gives of the execution block, without the lists.
    """

    slot: int
    root: bytes
    proposer_index: int
    parent_root: bytes
    state_root: bytes
    body_root: bytes
    execution_number: int
    execution_hash: bytes
    execution_time_s: int
    execution_header: dict[str, str]
    withdrawals: tuple[Withdrawal, ...]
    validators: tuple[Validator, ...]
    previous_justified: Checkpoint
    current_justified: Checkpoint
    finalized: Checkpoint


class SpecChain(msgspec.Struct, frozen=True):
    """All blocks by rising slot. `states` are the SSZ of the states, by slot, that are ever the finalized one."""

    config: dict[str, Any]
    genesis_validators_root: bytes
    blocks: tuple[Block, ...]
    states: dict[int, bytes]

    def __repr__(self) -> str:
        return f"SpecChain of {len(self.blocks)} blocks"

    @property
    def chain_id(self) -> int:
        return int(self.config["DEPOSIT_CHAIN_ID"])

    @property
    def slot_ms(self) -> int:
        return int(self.config["SLOT_DURATION_MS"])

    @property
    def slots_per_epoch(self) -> int:
        return int(self.config["SLOTS_PER_EPOCH"])

    @property
    def last_slot(self) -> int:
        return self.blocks[-1].slot

    def time_s(self, slot: int) -> int:
        """When a slot begins."""
        return GENESIS_S + slot * self.slot_ms // 1000

    def head(self, slot: int) -> Block:
        """The newest block while the chain has come up to `slot`."""
        return next(block for block in reversed(self.blocks) if block.slot <= slot)

    def block_of(self, checkpoint: Checkpoint) -> Block:
        """The block of a checkpoint: the last one up to the first slot of its epoch."""
        return self.head(checkpoint.epoch * self.slots_per_epoch)


class Expected(NamedTuple):
    """An event that is due; `amount_gwei` None where it has no amount."""

    event_type: str
    validator_index: int
    epoch: int
    amount_gwei: int | None
    created_at_ms: int


def expected(chain: SpecChain, vault: bytes, head_slot: int, current_epoch: int | None = None) -> list[Expected]:
    """All events of a vault while the head of the chain is at `head_slot`, by time; none before the first finality.

    Activations and exits: the epochs in the records of the chain's very last state, up to the current epoch and at
    most four epochs after that of the finalized block. Withdrawals: of the payloads in epochs before that of the
    finalized block, summed by validator and epoch. By default the current epoch is that of `head_slot`.
    """
    checkpoint = chain.head(head_slot).finalized
    if checkpoint.epoch == 0:
        return []
    final = chain.block_of(checkpoint)
    final_epoch = final.slot // chain.slots_per_epoch
    current_epoch = head_slot // chain.slots_per_epoch if current_epoch is None else current_epoch
    through = min(current_epoch, final_epoch + EPOCHS_AHEAD)
    due = [event for event in _turns(chain, vault) if event.epoch <= through]
    due += [event for event in _payments(chain, vault) if event.epoch < final_epoch]
    return sorted(due, key=lambda event: (event.created_at_ms, event[:3]))


def _turns(chain: SpecChain, vault: bytes) -> Iterator[Expected]:
    for index, one in enumerate(chain.blocks[-1].validators):
        if one.credentials in (b"\x01" + bytes(11) + vault, b"\x02" + bytes(11) + vault):
            for event_type, epoch in (
                ("validator_activated", one.activation_epoch),
                ("validator_exited", one.exit_epoch),
            ):
                starts_ms = GENESIS_S * 1000 + epoch * chain.slots_per_epoch * chain.slot_ms
                yield Expected(event_type, index, epoch, None, starts_ms)


def _payments(chain: SpecChain, vault: bytes) -> Iterator[Expected]:
    sums: dict[tuple[int, int], tuple[int, int]] = {}
    for block in chain.blocks:
        for paid in block.withdrawals:
            if paid.address == vault:
                key = paid.validator_index, block.slot // chain.slots_per_epoch
                before, _ = sums.get(key, (0, 0))
                sums[key] = before + paid.amount_gwei, chain.time_s(block.slot) * 1000
    for (index, epoch), (amount_gwei, last_ms) in sums.items():
        yield Expected("validator_withdrawal_completed", index, epoch, amount_gwei, last_ms)


def built_once(factory: pytest.TempPathFactory, worker: str) -> SpecChain:
    """The chain, built by whichever worker of this test session asks first; the others wait for it.

    Skips the test where the package is missing.
    """
    if find_spec("eth_consensus_specs") is None:
        pytest.skip("the package eth-consensus-specs is not installed (it is in requirements-test.lock)")
    shared = factory.getbasetemp() if worker == "master" else factory.getbasetemp().parent
    made = shared / "specchain.msgpack"
    with (shared / "specchain.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            subprocess.run([sys.executable, str(_BUILDER), str(made)], check=True, timeout=240)
        return msgspec.msgpack.decode(made.read_bytes(), type=SpecChain)
