"""The tree and its proofs against vectors of OpenZeppelin's own package."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from vaultevents.core.merkle import encode_leaf, leaf_hash, tree, verify
from vaultevents.core.units import Address, Hash32, hex_text

pytestmark = pytest.mark.unit

VECTORS = json.loads(Path(__file__).parents[1].joinpath("data/report/merkle-vectors.json").read_text())["trees"]


def row(index: int) -> tuple[Address, list[int]]:
    """Row `index` of the vectors: their note says how it is made."""
    address = hashlib.sha256(f"vault {index}".encode()).digest()[12:]
    numbers = [hashlib.sha256(f"vault {index} number {turn}".encode()).digest() for turn in range(1, 6)]
    return Address(address), [int.from_bytes(number) for number in numbers]


def leaves(count: int) -> list[Hash32]:
    return [leaf_hash(*row(index)) for index in range(count)]


@pytest.mark.parametrize("vector", VECTORS, ids=[f"{vector['vaults']} vaults" for vector in VECTORS])
def test_roots_and_proofs_are_those_of_openzeppelin(vector: dict[str, Any]) -> None:
    ours = leaves(vector["vaults"])
    made = tree(ours)
    assert hex_text(made.root) == vector["root"]
    assert vector["proofs"]
    for index, proof in vector["proofs"].items():
        assert [hex_text(sibling) for sibling in made.proof(ours[int(index)])] == proof


def test_the_order_of_the_leaves_does_not_matter() -> None:
    assert tree(leaves(7)[::-1]) == tree(leaves(7))


def test_a_leaf_has_one_vault_and_five_numbers() -> None:
    vault, numbers = row(0)
    assert len(encode_leaf(vault, numbers)) == 192
    with pytest.raises(ValueError, match="5 numbers"):
        encode_leaf(vault, numbers[:4])
    with pytest.raises(ValueError, match="20 bytes"):
        encode_leaf(Address(vault[1:]), numbers)


@pytest.mark.parametrize("number", [-1, 2**256])
def test_a_number_that_is_no_uint256_is_refused(number: int) -> None:
    with pytest.raises(OverflowError):
        leaf_hash(row(0)[0], [0, 0, number, 0, 0])


@pytest.mark.parametrize("count", [1, 2, 3, 6, 33])
def test_every_proof_leads_to_the_root_and_no_altered_one_does(count: int) -> None:
    ours = leaves(count)
    made = tree(ours)
    stranger = leaf_hash(*row(count))
    for leaf in ours:
        proof = made.proof(leaf)
        assert verify(made.root, leaf, proof)
        assert not verify(made.root, stranger, proof)
        assert not verify(stranger, leaf, proof)
        assert not verify(made.root, leaf, (*proof, stranger))
        for at in range(len(proof)):
            assert not verify(made.root, leaf, proof[:at] + proof[at + 1 :])
            assert not verify(made.root, leaf, (*proof[:at], stranger, *proof[at + 1 :]))


def test_one_leaf_is_its_own_root_with_an_empty_proof() -> None:
    (leaf,) = leaves(1)
    assert tree([leaf]).root == leaf
    assert tree([leaf]).proof(leaf) == ()


def test_without_leaves_there_is_no_tree_and_without_membership_no_proof() -> None:
    with pytest.raises(ValueError, match="at least one leaf"):
        tree([])
    with pytest.raises(KeyError):
        tree(leaves(3)).proof(leaf_hash(*row(3)))
