"""What is known of public networks beforehand, so that a node of another one is recognised at first contact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vaultevents.core.units import Hash32


@dataclass(frozen=True, slots=True)
class Network:
    """A network as the configuration names it; what is not known of it is None.

    `is_public`: blocks come all the time, so the age of a head says something.
    """

    name: str
    chain_id: int
    is_public: bool = False
    genesis_hash: Hash32 | None = None
    genesis_validators_root: Hash32 | None = None


def _hash(text: str) -> Hash32:
    return Hash32(bytes.fromhex(text))


PUBLIC_NETWORKS: Final = (
    Network(
        "hoodi",
        560048,
        True,
        _hash("bbe312868b376a3001692a646dd2d7d1e4406380dfd86b98aa8a34d1557c971b"),
        _hash("212f13fc4df078b6cb7db228f1c8307566dcecf900867401a92023d7ba99cb5f"),
    ),
    Network(
        "mainnet",
        1,
        True,
        _hash("d4e56740f876aef8c010b86a40d5f56745a118d0906a34e69aec8c0db1cb8fa3"),
        _hash("4b363db94e286120d76eb905340fdd4e54bfe9f06bf33ff6cf5ad27f511bfe95"),
    ),
)


def network_named(name: str, chain_id: int) -> Network:
    """Return the public network of this name, or a private one with the chain id."""
    return next((network for network in PUBLIC_NETWORKS if network.name == name), Network(name, chain_id))
