"""Whether all who can say agree on the chain: every execution node at one height, and the beacon chain (rule C2).

A witness that does not answer stalls nothing; one that answers otherwise stops the stream with both sides named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import structlog

from vaultevents import metrics
from vaultevents.chain.beacon.client import BeaconChain
from vaultevents.chain.beacon.wire import Payload
from vaultevents.chain.execution import wire
from vaultevents.chain.execution.blocks import header_call, read_header
from vaultevents.chain.execution.jsonrpc import RpcFailure, RpcNode
from vaultevents.chain.upstream.batches import together
from vaultevents.chain.upstream.node_lag import HeadPolicy
from vaultevents.chain.upstream.pool import NodePool
from vaultevents.core.chaintime import ChainTime
from vaultevents.core.errors import ChainDisagreement, SourceUnavailable, WrongNetwork
from vaultevents.core.logs import Header
from vaultevents.core.units import Hash32, hex_text

_log = structlog.get_logger()

IN_USE = "the execution nodes in use"
_AT_ONCE = 4


MOST_NAMED = 1024
LATER_SLOTS = 32
"""Within so many slots a beacon block names the payload of an earlier one (Gloas)."""


class Anchor(Protocol):
    """A witness of the chain beside the execution nodes: the beacon chain."""

    name: str

    async def payload_at(self, header: Header) -> Payload | None:
        """Return the execution payload in the slot of a header; None where the witness has none there."""
        ...

    async def final_payload(self) -> Payload | None:
        """Return the execution payload of the finalized block; None where it cannot be named."""
        ...


class BeaconAnchor:
    """The beacon chain as a witness of execution blocks. Which of them it has named is kept, and not asked again."""

    name = "the beacon chain"

    def __init__(self, beacon: BeaconChain, time: ChainTime) -> None:
        self._beacon, self._time = beacon, time
        self._named: dict[Hash32, Payload] = {}

    async def payload_at(self, header: Header) -> Payload | None:
        named = self._named.get(header.hash)
        if named is not None:
            return named
        payload = await self._payload_at(header)
        if payload is not None and (payload.number, payload.hash) == (header.number, header.hash):
            self._named[header.hash] = payload
            if len(self._named) > MOST_NAMED:
                del self._named[next(iter(self._named))]
        return payload

    async def _payload_at(self, header: Header) -> Payload | None:
        if header.timestamp_s <= self._time.genesis_s:
            return None
        slot = self._time.slot_at(header.timestamp_s)
        payload = await self._beacon.payload(slot)
        if payload is None or payload.number is not None:
            return payload
        for later in range(slot + 1, slot + 1 + LATER_SLOTS):  # since Gloas a block names the payload before it
            payload = await self._beacon.payload(later)
            if payload is not None:
                return replace(payload, number=header.number)
        return None

    async def final_payload(self) -> Payload | None:
        payload = await self._beacon.payload("finalized")
        return payload if payload is not None and payload.number is not None else None


def disagreement(node: str, header: Header, other: str, others: Header) -> ChainDisagreement:
    """Make the error that names both sides."""
    return ChainDisagreement(
        IN_USE,
        f"give two blocks {header.number}: {hex_text(header.hash)} at {node} and {hex_text(others.hash)} at {other}; "
        "nothing is sent until they agree: find out which one follows the chain, and name only that one",
    )


async def confirm(nodes: NodePool[RpcNode], anchor: Anchor | None, found: Header) -> Header:
    """Return the newest block, up to a finalized one that was `found`, on which all that answer agree.

    Raises `ChainDisagreement` where they do not.
    """
    if len(nodes.nodes) > 1:
        found = await _agreed(nodes, found)
    return found if anchor is None else await _anchored(nodes, anchor, found)


async def _agreed(nodes: NodePool[RpcNode], found: Header) -> Header:
    """The block at the height of `found`, of which all nodes that have one there have the same."""
    given = await nodes.ask_each(partial(_blocks, numbers=(found.number,)), urgent=True)
    for node, (header,) in given:
        if header is None:
            nodes.note_lacking(str(HeadPolicy()), node, found.number)
        else:
            nodes.note_head(str(HeadPolicy()), node, found.number)
    hashes = [header.hash for _, (header,) in given if header is not None]
    if len(hashes) > 1 and set(hashes) == {found.hash}:
        return found
    given = await nodes.ask_each(partial(_blocks, numbers=(found.number, found.number + 1)), urgent=True)
    sides: dict[Hash32, tuple[str, Header]] = {}
    for node, (header, following) in given:
        if header is not None and following is not None and following.parent_hash != header.hash:
            nodes.accuse(node, f"its block {following.number} is not linked to its block {header.number}")
        elif header is not None:
            sides.setdefault(header.hash, (node.name, header))
    if len(sides) > 1:
        (name, header), (other, others), *_ = sides.values()
        raise disagreement(name, header, other, others)
    return next((header for _, header in sides.values()), found)


async def _blocks(node: RpcNode, numbers: Sequence[int]) -> list[Header | None]:
    """A node that does not have a block is no witness of it, and not faulty; nor is there always a next one."""
    answers = await node.ask([header_call(number) for number in numbers])
    blocks = [
        None if isinstance(answer, RpcFailure) else wire.block(node.name, answer, number=number)
        for number, answer in zip(numbers, answers, strict=True)
    ]
    return [None if block is None else block.header for block in blocks]


async def _anchored(nodes: NodePool[RpcNode], anchor: Anchor, found: Header) -> Header:
    """`found` where the beacon chain has it, else the beacon chain's finalized block where that is older."""
    try:
        payload = await anchor.payload_at(found)
        final = await anchor.final_payload() if payload is None else None
    except (SourceUnavailable, WrongNetwork) as error:
        metrics.node_failure("anchor_silent")
        _log.warning("anchor_silent", node=anchor.name, block=found.number, problem=str(error))
        return found
    if final is not None and final.number is not None and final.number < found.number:
        payload, found = final, await nodes.ask(partial(read_header, number=final.number))
    if payload is not None:
        _compare(nodes, anchor, found, payload)
    return found


async def check_blocks(nodes: NodePool[RpcNode], anchor: Anchor, headers: Iterable[Header]) -> None:
    """Hold blocks against the beacon chain; raises `ChainDisagreement`. Where it is silent, nothing is said."""

    async def check(header: Header) -> None:
        try:
            payload = await anchor.payload_at(header)
        except (SourceUnavailable, WrongNetwork):
            return  # logged when the finalized block was to be confirmed
        if payload is not None:
            _compare(nodes, anchor, header, payload)

    await together((partial(check, header) for header in headers), _AT_ONCE)


def _compare(nodes: NodePool[RpcNode], anchor: Anchor, header: Header, payload: Payload) -> None:
    if (payload.number, payload.hash) != (header.number, header.hash):
        names = ", ".join(node.name for node in nodes.nodes)
        raise ChainDisagreement(
            f"the execution nodes in use ({names})",
            f"give block {header.number} as {hex_text(header.hash)}, and {anchor.name} has block {payload.number}, "
            f"{hex_text(payload.hash)}, in that place; nothing is sent until they agree: find out which of them "
            "follows the chain",
        )
