"""Probes of the execution nodes: their network, head, finality, logs, receipts, old blocks, agreement, WebSockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from vaultevents.chain.execution.anchoring import disagreement
from vaultevents.chain.execution.capabilities import (
    BLOCKS_WITH_RECEIPTS,
    log_blocks,
    receipt_access,
    sync_progress,
    tagged_header,
)
from vaultevents.chain.execution.client import ExecutionChain
from vaultevents.chain.execution.head_subscription import NewHeads
from vaultevents.core.errors import SourceUnavailable, VaulteventsError
from vaultevents.core.findings import Finding, failed, passed, warned
from vaultevents.core.logs import Header
from vaultevents.core.spans import Span
from vaultevents.core.units import hex_text
from vaultevents.probes.probe import Probe, attempt
from vaultevents.probes.shared import Shared
from vaultevents.store.inspection import first_unread_block
from vaultevents.wiring.sources import socket_heads

ADVICE: Final = "See that the node runs and that execution.urls has its URL, or name another node there"
LOGS_ADVICE: Final = "Name a node in execution.urls that gives logs by eth_getLogs"
RECEIPTS_ADVICE: Final = "Name a node in execution.urls that gives receipts by eth_getBlockReceipts"
SOCKET_ADVICE: Final = "See that the node serves WebSocket there, or correct execution.websocket_urls"
HEAD_AGE_S: Final = 180.0
"""On a public network a block comes each 12 s; so many in a row are never missed."""
FINALITY_AGE_S: Final = 2700.0
"""The finalized block is 13 to 20 minutes old while the chain finalizes."""
AHEAD_S: Final = 60.0
"""So far ahead of the clock a block is refused (rule C2)."""
ANNOUNCED_WITHIN_S: Final = 48.0


def execution_probes(shared: Shared) -> list[Probe]:
    """Return the probes of all that `[execution]` names."""
    settings = shared.settings
    if not settings.execution.urls:
        return [Probe("node", _no_node)]
    probes = [Probe(f"node {node.nodes[0]}", partial(_node, shared, node), advice=ADVICE) for node in shared.nodes]
    if len(shared.nodes) > 1:
        probes.append(Probe("nodes agree", partial(_agreement, shared)))
    probes.append(Probe("start blocks", partial(_start_blocks, shared)))
    return probes + [
        Probe(f"websocket {heads.name}", partial(_socket, shared, heads), advice=SOCKET_ADVICE)
        for heads in socket_heads(settings)
    ]


async def _no_node() -> AsyncIterator[Finding]:
    yield failed(
        "node",
        "execution.urls is empty, so nothing can be watched",
        "Name the URL of your execution node there or in VAULTEVENTS_EXECUTION__URLS",
    )


async def _node(shared: Shared, node: ExecutionChain) -> AsyncIterator[Finding]:
    subject = f"node {node.nodes[0]}"
    identity = await node.identity()
    if (other := _other_network(shared, subject, identity.chain_id)) is not None:
        yield other
        return
    right = await shared.identity()
    if right is not None and right != identity:
        yield failed(
            subject,
            f"it belongs to another network ({identity}) than this service ({right})",
            "Correct its URL in execution.urls, or use the database of that network",
        )
        return
    policy = shared.settings.execution.head
    head = await node.head()
    yield passed(
        subject,
        f"chain {identity.chain_id} with block 0 {hex_text(identity.genesis_hash)[:18]}…, "
        f"its {policy} block is {head.number}",
    )
    yield await attempt(f"{subject} head", partial(_head, shared, subject, node), ADVICE)
    yield await attempt(f"{subject} finality", partial(_finality, shared, subject, node), ADVICE)
    yield await attempt(f"{subject} logs", partial(_logs, shared, subject, node), LOGS_ADVICE)
    yield await attempt(f"{subject} receipts", partial(_receipts, subject, node), RECEIPTS_ADVICE)


def _other_network(shared: Shared, subject: str, chain_id: int) -> Finding | None:
    network = shared.network
    if chain_id == network.chain_id:
        return None
    return failed(
        subject,
        f"it is of chain {chain_id}, and the configuration is for {network.name} (chain {network.chain_id})",
        "Correct execution.urls or the configuration",
    )


async def _head(shared: Shared, subject: str, node: ExecutionChain) -> Finding:
    subject = f"{subject} head"
    progress = await node.ask(sync_progress)
    if progress is not None:
        return failed(
            subject,
            f"it is syncing, at block {progress.current_block} of {progress.highest_block}",
            "Wait until it has caught up",
        )
    header = await node.ask(partial(tagged_header, tag="latest"))
    age_s = shared.clock() - header.timestamp_s
    if not shared.network.is_public:
        return passed(subject, f"its newest block is {header.number}; on a {shared.network.name} its age says nothing")
    if age_s < -AHEAD_S:
        return failed(
            subject,
            f"its newest block {header.number} is {-age_s:.0f} s ahead of the clock of this host",
            "Set the clock of this host (NTP); if it is right, name another node in execution.urls",
        )
    if age_s > HEAD_AGE_S:
        return failed(
            subject,
            f"its newest block {header.number} is {duration(age_s)} old, so it does not follow the chain",
            "See why the node or its consensus client has stopped; if they have not, set the clock of this host (NTP)",
        )
    return passed(subject, f"its newest block {header.number} is {duration(age_s)} old")


async def _finality(shared: Shared, subject: str, node: ExecutionChain) -> Finding:
    subject = f"{subject} finality"
    header = await node.ask(partial(tagged_header, tag="finalized"))
    age_s = shared.clock() - header.timestamp_s
    if not shared.network.is_public:
        return passed(subject, f"block {header.number} is finalized")
    if age_s > FINALITY_AGE_S:
        return failed(
            subject,
            f"its finalized block {header.number} is {duration(age_s)} old, and nothing after it is sent",
            "See whether the network finalizes; if it does, see why the node's consensus client has stopped",
        )
    return passed(subject, f"block {header.number} is finalized, {duration(age_s)} old")


async def _logs(shared: Shared, subject: str, node: ExecutionChain) -> Finding:
    subject, wanted = f"{subject} logs", shared.settings.execution.max_range_blocks
    last = (await node.ask(partial(tagged_header, tag="finalized"))).number
    blocks = await node.ask(partial(log_blocks, last=last, blocks=wanted))
    if blocks < min(wanted, last + 1):
        return warned(
            subject,
            f"eth_getLogs takes {blocks} blocks at once, not the {wanted} of execution.max_range_blocks, so backfills "
            "take more calls",
            "Name a node with a larger limit, or set execution.max_range_blocks to that number",
        )
    return passed(subject, f"eth_getLogs takes {blocks} blocks at once")


async def _receipts(subject: str, node: ExecutionChain) -> Finding:
    subject = f"{subject} receipts"
    last = (await node.ask(partial(tagged_header, tag="finalized"))).number
    numbers = list(range(last, max(-1, last - BLOCKS_WITH_RECEIPTS), -1))
    access = await node.ask(partial(receipt_access, numbers=numbers, options=node.receipt_options))
    proven = f"the receipts of block {access.number} make up its receipts root"
    if not access.whole:
        return warned(
            subject,
            f"eth_getBlockReceipts is not offered; {proven}, read by eth_getTransactionReceipt",
            "It works, with one call for each transaction. Name a node with eth_getBlockReceipts to save calls",
        )
    return passed(subject, f"eth_getBlockReceipts works, {proven}")


async def _agreement(shared: Shared) -> AsyncIterator[Finding]:
    """Compare the block of every node at the height of the lowest finalized one."""
    subject, finals = "nodes agree", list[tuple[ExecutionChain, Header]]()
    right = await shared.identity()
    for node in shared.nodes:
        try:
            if right is None or await node.identity() == right:
                finals.append((node, await node.ask(partial(tagged_header, tag="finalized"))))
        except VaulteventsError:
            continue  # named by the probe of the node
    if len(finals) < 2:
        yield warned(subject, f"{len(finals)} of {len(shared.nodes)} nodes can be compared")
        return
    lowest = min(header.number for _, header in finals)
    sides = [(node.nodes[0], await node.header(lowest)) for node, _ in finals]
    (name, header), *others = sides
    for other, found in others:
        if found.hash != header.hash:
            yield failed(subject, f"they {disagreement(name, header, other, found).problem}")
            return
    yield passed(subject, f"{len(sides)} nodes have the same finalized block {lowest}, {hex_text(header.hash)}")


async def _start_blocks(shared: Shared) -> AsyncIterator[Finding]:
    """Whether some node still has the blocks, logs and receipts that backfills are to read."""
    subject = "start blocks"
    try:
        first = await first_unread_block(await shared.database())
    except VaulteventsError:
        yield warned(subject, "not known, because the database cannot be used")
        return
    if first is None:
        yield passed(subject, "no earlier block is still to be read")
        return
    outcomes = [(node.nodes[0], await _history_problem(node, first)) for node in shared.nodes]
    able = [name for name, problem in outcomes if problem is None]
    for name, problem in outcomes:
        if problem is None:
            yield passed(f"{subject} at {name}", f"it gives block {first}, from which on is to be read")
        elif able:
            advice = f"Nothing has to be done while {able[0]} gives blocks from {first} on"
            yield warned(f"{subject} at {name}", problem, advice)
        else:
            yield failed(
                f"{subject} at {name}",
                problem,
                f"Name a node that keeps blocks from {first} on with their receipts in execution.urls, or register the "
                "vaults from a later --start-block on",
            )


async def _history_problem(node: ExecutionChain, first: int) -> str | None:
    """Return why a node cannot serve the blocks from `first` on; None where it can."""
    try:
        last = (await node.ask(partial(tagged_header, tag="finalized"))).number
        if first > last:
            return None
        await node.ask(partial(log_blocks, last=first, blocks=1))
        numbers = list(range(first, min(last, first + BLOCKS_WITH_RECEIPTS - 1) + 1))
        await node.ask(partial(receipt_access, numbers=numbers, options=node.receipt_options))
    except SourceUnavailable as error:
        return f"{error.problem}{await _oldest(node, first)}"
    except VaulteventsError as error:
        return str(error)
    return None


async def _oldest(node: ExecutionChain, first: int) -> str:
    try:
        last = (await node.ask(partial(tagged_header, tag="finalized"))).number
        oldest = await node.oldest_with_receipts(Span(first, last))
    except VaulteventsError:
        return ""
    return "" if oldest is None else f", and keeps receipts from block {oldest} on"


async def _socket(shared: Shared, heads: NewHeads) -> AsyncIterator[Finding]:
    subject = f"websocket {heads.name}"
    within_s = ANNOUNCED_WITHIN_S if shared.network.is_public else None
    shown = await heads.chain_id(head_within_s=within_s)
    if shown != shared.network.chain_id:
        yield failed(
            subject,
            f"it is of chain {shown}, and the configuration is for {shared.network.name} "
            f"(chain {shared.network.chain_id})",
            "Correct execution.websocket_urls",
        )
    elif within_s is None:
        yield passed(subject, f"chain {shown}, announces new heads")
    else:
        yield passed(subject, f"chain {shown}, announces new heads: one has come")


def duration(seconds: float) -> str:
    """Return a time in words: seconds up to two minutes, minutes up to two hours, then hours."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
