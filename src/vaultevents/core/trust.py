"""What a configuration guarantees about the events of contracts, in one sentence (rule C2; docs/trust.md)."""

from __future__ import annotations

from typing import Literal


def guarantee(
    nodes: int, *, anchored: bool, completeness: Literal["union", "receipts"], every_header: bool, final: bool
) -> str:
    """Say what the streams of logs rest on.

    `nodes`: how many execution nodes are configured. `anchored`: whether a beacon node is. `every_header`: whether
    backfills link each header. `final`: whether only finalized blocks are read.
    """
    if nodes == 0:
        return "nothing is read: no execution node is configured"
    witness = " and the beacon chain" if anchored else ""
    if nodes > 1:
        true = f"nothing wrong is sent while one of the {nodes} execution nodes{witness} is honest: blocks are proven"
        true += " by their hashes, and a disagreement about the chain stops the stream"
        lost = "nothing is lost while one of the nodes is honest: what any of them finds is proven and taken"
    elif anchored:
        past = "" if every_header else ", in backfills as far as the beacon node keeps blocks"
        true = f"nothing wrong is sent while the execution node or the beacon node is honest{past}"
        lost = _alone(completeness)
    else:
        true = "every event is proven to be on the chain that the execution node shows, which no other node confirms"
        lost = _alone(completeness)
    near = "" if final else "; above the finalized block a reorg can still make an event untrue"
    return f"{true}; {lost}{near}"


def _alone(completeness: Literal["union", "receipts"]) -> str:
    if completeness == "receipts":
        return "nothing is lost: each block that may hold an event is read by its receipts"
    return "what the node leaves out is found by the blooms of blocks, within execution.blooms_per_day"
