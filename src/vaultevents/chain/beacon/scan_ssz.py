"""The validators inside a whole SSZ state, read as a stream: a quarter of the bytes of JSON and a tenth of the work.

    ┌ genesis_time 8 ┬ genesis_validators_root 32 ┬ slot 8 ┬ fork 16 ┬ latest_block_header 112 ┬ …
    ├ block_roots 32 × H ┬ state_roots 32 × H ┬ historical_roots → ┬ eth1_data 72 ┬ eth1_data_votes → ┬
    ├ eth1_deposit_index 8 ┬ validators → ┬ balances → ┬ …                 → is a 4-byte offset from the start
    └ … ┴ validators: 121 bytes each ┴ balances …                            H is SLOTS_PER_HISTORICAL_ROOT

The fields up to `balances` are the same from phase 0 to Fulu (consensus-specs `BeaconState`).
"""

from __future__ import annotations

import struct

from vaultevents.chain.beacon.scan_json import Scan
from vaultevents.core.errors import NodeFault
from vaultevents.core.units import Address, Hash32, Pubkey, ValidatorIndex
from vaultevents.core.validators import ValidatorRecord, vault_of

KNOWN_FORKS = frozenset({"electra", "fulu"})
"""The forks, as in the header Eth-Consensus-Version, whose state is read here."""

_ROOT_AT = 8
_SLOT_AT = 40
_BEFORE_ROOTS = 176
_FROM_ROOTS_TO_VALIDATORS = 4 + 72 + 4 + 8
_OFFSETS = struct.Struct("<II")  # validators, balances
_ADDRESSES = struct.Struct("<60x20s41x")
_VALIDATOR = struct.Struct("<48s32s8x1x8xQQ8x")  # pubkey, credentials, activation_epoch, exit_epoch


class StateScan:
    """Takes the bytes of a state in pieces of any size; keeps the records of `vaults` only.

    `root` is the genesis_validators_root that the state must have, and `least_slot` the slot it must have reached.
    """

    def __init__(self, node: str, vaults: frozenset[Address], roots: int, root: Hash32 | None, least_slot: int) -> None:
        self._node = node
        self._vaults = vaults
        self._offsets_at = _BEFORE_ROOTS + 64 * roots + _FROM_ROOTS_TO_VALIDATORS
        self._root = root
        self._least_slot = least_slot
        self._start: int | None = None
        self._rest = b""
        self._to_skip = 0
        self._to_read = 0
        self._count = 0
        self._found: list[ValidatorRecord] = []

    @property
    def is_done(self) -> bool:
        """Whether the last validator was read: what follows need not be."""
        return self._start is not None and self._to_skip == self._to_read == 0

    def feed(self, piece: bytes) -> None:
        """Raises `NodeFault` for what cannot be such a state."""
        self._rest += piece
        if self._start is None and not self._take_head():
            return
        skipped = min(self._to_skip, len(self._rest))
        self._to_skip -= skipped
        size = min(self._to_read, len(self._rest) - skipped) // _VALIDATOR.size * _VALIDATOR.size
        part = memoryview(self._rest)[skipped : skipped + size]
        self._rest = self._rest[skipped + size :]
        self._to_read -= size
        self._take(part)

    def finish(self) -> Scan:
        """The result. A state that ends before its last validator is a fault."""
        if not self.is_done:
            raise NodeFault(self._node, f"its state breaks off after {self._count} validators")
        return Scan(self._found, self._count)

    def _take_head(self) -> bool:
        head_size = self._offsets_at + _OFFSETS.size
        if len(self._rest) < head_size:
            return False
        start, end = _OFFSETS.unpack_from(self._rest, self._offsets_at)
        if start < head_size or end < start or (end - start) % _VALIDATOR.size:
            raise NodeFault(self._node, f"its state does not have the known form (validators at {start} to {end})")
        if self._root is not None and self._rest[_ROOT_AT:_SLOT_AT] != self._root:
            raise NodeFault(self._node, "its state is not of this network, or does not have the known form")
        (slot,) = struct.unpack_from("<Q", self._rest, _SLOT_AT)
        if slot < self._least_slot:
            raise NodeFault(self._node, f"its finalized state is of slot {slot}, before slot {self._least_slot}")
        self._start, self._to_skip, self._to_read = start, start, end - start
        return True

    def _take(self, part: memoryview) -> None:
        addresses = [address for (address,) in _ADDRESSES.iter_unpack(part)]
        if not self._vaults.isdisjoint(addresses):
            for at, (pubkey, credentials, activation, exit_epoch) in enumerate(_VALIDATOR.iter_unpack(part)):
                if vault_of(credentials) in self._vaults:
                    index = ValidatorIndex(self._count + at)
                    record = ValidatorRecord(index, Pubkey(pubkey), Hash32(credentials), activation, exit_epoch)
                    self._found.append(record)
        self._count += len(addresses)
