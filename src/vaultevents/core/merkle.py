"""The Merkle tree of an oracle report: OpenZeppelin's StandardMerkleTree, format `standard-v1`.

A leaf is `keccak(keccak(abi.encode(address, uint256 x 5)))`, which is also how the contract LazyOracle hashes the
arguments of `updateVaultData`. Pairs are hashed in sorted order, so a proof needs no left and right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vaultevents.core.keccak import keccak
from vaultevents.core.units import Address, Hash32

LEAF_NUMBERS = 5


def encode_leaf(vault: Address, numbers: Sequence[int]) -> bytes:
    """The ABI encoding of one vault's five numbers: 192 bytes, six words.

    Raises `ValueError` for other lengths and `OverflowError` for a number that is not a uint256.
    """
    if len(vault) != 20 or len(numbers) != LEAF_NUMBERS:
        raise ValueError(f"a leaf has a vault of 20 bytes and 5 numbers, not {len(vault)} and {len(numbers)}")
    return bytes(12) + vault + b"".join([number.to_bytes(32) for number in numbers])


def leaf_hash(vault: Address, numbers: Sequence[int]) -> Hash32:
    """Hashed twice, so that no inner node can pass for a leaf."""
    return Hash32(keccak(keccak(encode_leaf(vault, numbers))))


def _pair(one: bytes, other: bytes) -> Hash32:
    return Hash32(keccak(one + other if one < other else other + one))


@dataclass(frozen=True, slots=True)
class Tree:
    """All 2n - 1 nodes: 0 is the root, the children of node i are 2i + 1 and 2i + 2."""

    nodes: tuple[Hash32, ...]
    positions: Mapping[Hash32, int]

    @property
    def root(self) -> Hash32:
        return self.nodes[0]

    def proof(self, leaf: Hash32) -> tuple[Hash32, ...]:
        """The siblings from the leaf up to the root, none for a single leaf; `KeyError` for a leaf of another tree."""
        at = self.positions[leaf]
        siblings = []
        while at:
            siblings.append(self.nodes[at + 1 if at % 2 else at - 1])
            at = (at - 1) // 2
        return tuple(siblings)


def tree(leaves: Sequence[Hash32]) -> Tree:
    """The tree of these leaf hashes, in whatever order they come; `ValueError` without any."""
    if not leaves:
        raise ValueError("a Merkle tree needs at least one leaf")
    # the smallest leaf stands last
    nodes = [Hash32(b"")] * (len(leaves) - 1) + sorted(leaves, reverse=True)
    for at in range(len(leaves) - 2, -1, -1):
        nodes[at] = _pair(nodes[2 * at + 1], nodes[2 * at + 2])
    return Tree(tuple(nodes), {nodes[at]: at for at in range(len(leaves) - 1, len(nodes))})


def verify(root: Hash32, leaf: Hash32, proof: Sequence[Hash32]) -> bool:
    """Whether the proof leads from the leaf to the root: OpenZeppelin's `MerkleProof.verify`."""
    node = leaf
    for sibling in proof:
        node = _pair(node, sibling)
    return node == root
