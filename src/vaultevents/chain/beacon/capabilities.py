"""What one beacon node can do: find out before it is relied on. Nothing that is read here becomes an event."""

from __future__ import annotations

from dataclasses import dataclass, field

from vaultevents.chain.beacon import wire
from vaultevents.chain.beacon.node import SSZ, BeaconNode, Refused
from vaultevents.chain.beacon.routes import CONFIG, HEADERS, STATE, SYNCING
from vaultevents.chain.beacon.validators_by_id import VALIDATORS
from vaultevents.chain.upstream.http import JSON
from vaultevents.core.errors import NodeFault
from vaultevents.core.units import Hash32, Pubkey, hex_text

REFUSALS = frozenset({400, 401, 403, 404, 405, 406, 410, 413, 414, 415, 501})
"""Of a node that does not offer a route, or not to this user."""
LIST_REFUSALS = frozenset({403, 404, 405, 413, 501})
"""Of a node that does not give the list of all validators; validators are then asked by public key."""
_ENOUGH_BYTES = 256


async def deposit_chain_id(node: BeaconNode) -> int | None:
    """Return the chain id of the execution chain that the node's network belongs to; None where it names none."""
    found = wire.config(node.name, await node.get(CONFIG)).get("DEPOSIT_CHAIN_ID")
    return None if found is None else wire.uint64(node.name, "its DEPOSIT_CHAIN_ID", found)


async def head_slot(node: BeaconNode) -> int:
    """Return the slot of the node's head."""
    return wire.syncing(node.name, await node.get(SYNCING)).head_slot


async def slot_of_root(node: BeaconNode, root: Hash32) -> int:
    """Return the slot of the block with this root. Raises `NodeFault` for an answer about another block."""
    found = wire.header(node.name, await node.get(HEADERS + hex_text(root)))
    if found.root != root:
        raise NodeFault(node.name, f"asked for the block {hex_text(root)}, it gives {hex_text(found.root)}")
    return found.slot


async def public_key_of(node: BeaconNode, index: int) -> Pubkey | None:
    """Return the public key of a validator in the finalized state, asked by GET; None where it does not exist."""
    records = wire.validators(node.name, await node.get(VALIDATORS, [index]))
    return next((record.pubkey for record in records if record.index == index), None)


async def posted_ids(node: BeaconNode, ids: list[str]) -> Refused | list[Pubkey]:
    """Ask for validators by POST, by index or public key; return their public keys, or how the node refuses."""
    content = await node.post(VALIDATORS, {"ids": ids}, REFUSALS)
    if isinstance(content, Refused):
        return content
    return [record.pubkey for record in wire.validators(node.name, content)]


@dataclass(slots=True)
class _Beginning:
    """The first bytes of a body; the rest is of no interest."""

    content: bytearray = field(default_factory=bytearray)

    @property
    def is_done(self) -> bool:
        return len(self.content) >= _ENOUGH_BYTES

    def feed(self, piece: bytes) -> None:
        self.content += piece[:_ENOUGH_BYTES]


async def refusal_of_list(node: BeaconNode, *, ssz: bool) -> Refused | None:
    """Begin to read the list of all validators, or with `ssz` the whole state; return how the node refuses it.

    None where it gives the list. The answer is cut off after its first bytes.
    """
    path, accept, refusals = (STATE, SSZ, REFUSALS) if ssz else (VALIDATORS, JSON, LIST_REFUSALS)
    found = await node.stream(path, accept, lambda _: _Beginning(), refusals)
    if isinstance(found, Refused):
        return found
    content = bytes(found.content) if found is not None else b""
    if not content or (not ssz and b'"data"' not in content):
        return Refused(f"answers {path} with something other than a list ({content[:20]!r})")
    return None
