"""What factories made: staking vaults, and pools with their withdrawal queues."""

from __future__ import annotations

from dataclasses import dataclass

from vaultevents.core.units import Address, hex_text


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of the wrapper factory: the vault behind it and its withdrawal queue."""

    address: Address
    queue: Address
    block: int


@dataclass(frozen=True, slots=True)
class CreatedVault:
    """A vault and the block that holds its factory's log; `pool` where one was made for it."""

    address: Address
    factory: Address
    block: int
    pool: Pool | None


@dataclass(frozen=True, slots=True)
class VaultState:
    """A vault at one block; None for what its contracts do not answer in a known form.

    `owner` is the effective one: that of the hub's connection while the vault is connected.
    """

    owner: Address | None
    node_operator: Address | None
    connected: bool | None


def registration_id(vault: Address) -> str:
    """Return the id under which a discovered vault is registered: its address in lower case, the same every time."""
    return hex_text(vault)
