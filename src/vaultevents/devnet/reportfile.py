"""The oracle's report file: values of vaults, the Merkle tree over them, and what updates one vault on the chain.

Written from what the oracle and the LazyOracle contract do: keys, order and notation of the file are the oracle's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from eth_hash.auto import keccak
from eth_utils.address import to_checksum_address

_UPDATE_VAULT_DATA = keccak(b"updateVaultData(address,uint256,uint256,uint256,uint256,uint256,bytes32[])")[:4]
_ENCODING = ["address", *["uint256"] * 5]
_POSITIONS = {
    "vaultAddress": 0,
    "totalValueWei": 1,
    "fee": 2,
    "liabilityShares": 3,
    "maxLiabilityShares": 4,
    "slashingReserve": 5,
}


@dataclass(frozen=True, slots=True)
class VaultFees:
    """What makes up a vault's cumulative fee, in wei, and what it got in and out through the hub."""

    in_out_delta_wei: int
    previous_wei: int
    infra_wei: int
    liquidity_wei: int
    reservation_wei: int

    @property
    def cumulative_wei(self) -> int:
        return self.previous_wei + self.infra_wei + self.liquidity_wei + self.reservation_wei


@dataclass(frozen=True, slots=True)
class VaultValues:
    """One leaf: the five numbers that the oracle reports for a vault."""

    vault: bytes
    total_value_wei: int
    fee_wei: int
    liability_shares: int
    max_liability_shares: int
    slashing_reserve_wei: int

    @property
    def words(self) -> bytes:
        """ABI encoding, 192 bytes."""
        vault, *numbers = astuple(self)
        return b"".join((vault.rjust(32, b"\0"), *(number.to_bytes(32) for number in numbers)))

    @property
    def leaf(self) -> bytes:
        return keccak(keccak(self.words))


@dataclass(frozen=True, slots=True)
class Reference:
    """The state that a report is about; `timestamp_s` is that of the reference block, not of the reference slot."""

    slot: int
    block_hash: bytes
    block_number: int
    timestamp_s: int


class Tree:
    """An OpenZeppelin standard Merkle tree over at least one vault; `nodes[0]` is the root."""

    def __init__(self, values: Sequence[VaultValues]) -> None:
        leaves = sorted(value.leaf for value in values)
        self.nodes = [b""] * (len(leaves) - 1) + leaves[::-1]
        for at in reversed(range(len(leaves) - 1)):
            self.nodes[at] = keccak(b"".join(sorted(self.nodes[2 * at + 1 : 2 * at + 3])))
        self._place = {leaf: len(self.nodes) - 1 - rank for rank, leaf in enumerate(leaves)}

    @property
    def root(self) -> bytes:
        return self.nodes[0]

    def place(self, one: VaultValues) -> int:
        """The index of a vault's leaf in `nodes`."""
        return self._place[one.leaf]

    def calldata(self, one: VaultValues) -> bytes:
        """The input of `LazyOracle.updateVaultData` for a vault of the tree."""
        proof, at = [], self.place(one)
        while at:
            proof.append(self.nodes[at + 1 if at % 2 else at - 1])
            at = (at - 1) // 2
        head = one.words + (7 * 32).to_bytes(32) + len(proof).to_bytes(32)
        return _UPDATE_VAULT_DATA + head + b"".join(proof)


def report_file(
    tree: Tree, values: Sequence[VaultValues], fees: Sequence[VaultFees], reference: Reference, previous_cid: str
) -> bytes:
    """The bytes of the file; `fees` are those of `values`, in the same order."""
    content = {
        "format": "standard-v1",
        "leafEncoding": _ENCODING,
        "tree": [_hex(node) for node in tree.nodes],
        "values": [{"value": _texts(value), "treeIndex": tree.place(value)} for value in values],
        "refSlot": reference.slot,
        "blockHash": _hex(reference.block_hash),
        "blockNumber": reference.block_number,
        "timestamp": reference.timestamp_s,
        "extraValues": {to_checksum_address(one.vault): _extra(own) for one, own in zip(values, fees, strict=True)},
        "prevTreeCID": previous_cid,
        "leafIndexToData": _POSITIONS,
    }
    return json.dumps(content).encode("ascii")


def _texts(one: VaultValues) -> list[str]:
    vault, *numbers = astuple(one)
    return [to_checksum_address(vault), *map(str, numbers)]


def _extra(own: VaultFees) -> dict[str, str]:
    return {
        "inOutDelta": str(own.in_out_delta_wei),
        "prevFee": str(own.previous_wei),
        "infraFee": str(own.infra_wei),
        "liquidityFee": str(own.liquidity_wei),
        "reservationFee": str(own.reservation_wei),
    }


def _hex(raw: bytes) -> str:
    return "0x" + raw.hex()
