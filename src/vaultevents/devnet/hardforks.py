"""Header fields that forks after Prague append: those of Amsterdam, and those of a fork that nobody knows yet."""

from __future__ import annotations

from typing import Literal, get_args

from eth_hash.auto import keccak

HardFork = Literal["amsterdam", "future"]
"""`amsterdam`: EIP-7928 and EIP-7843, in the order of go-ethereum's `Header`. `future`: invented, on top of it."""

HARD_FORKS: tuple[HardFork, ...] = get_args(HardFork)

HeaderField = tuple[str, bytes | int]
"""A field's JSON-RPC name and value."""


def later_fields(fork: HardFork | None, seed: int, number: int, slot: int) -> tuple[HeaderField, ...]:
    """Return what the header of a block has after `requestsHash`, in the order in which it is hashed."""
    if fork is None:
        return ()
    access_list_hash = keccak(f"{seed}/block access list/{number}".encode())
    amsterdam = (("blockAccessListHash", access_list_hash), ("slotNumber", slot))
    if fork == "amsterdam":
        return amsterdam
    return (*amsterdam, ("inclusionListRoot", keccak(f"{seed}/inclusion list/{number}".encode())))
