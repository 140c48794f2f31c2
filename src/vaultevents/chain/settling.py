"""Doubtful blocks of a range, asked again until the node agrees with itself, with another node and with the bloom (C2).

Doubtful is a block whose bloom may hold a watched pair, and every block with a watched log. Its logs are asked again
by its hash. Where a positive bloom stays without such a log, another node is asked too, and for a share of these
blocks all logs, which must rebuild the bloom. On full mainnet blocks nearly every bloom is positive by chance, so all
questions go in batches and cost a bounded number of calls per block.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from vaultevents import metrics
from vaultevents.chain import proofs, wire
from vaultevents.chain.endpoints import Endpoints
from vaultevents.chain.jsonrpc import Answer, RpcFailure, RpcNode
from vaultevents.chain.parts import Part, Terms, add_blocks, chunks, full_call, hash_call, range_call, read_logs
from vaultevents.chain.refusals import Refusal
from vaultevents.core.errors import NodeFault, RangeTooLarge, SourceUnavailable
from vaultevents.core.spans import Span

_log = structlog.get_logger()

FULL_BLOCKS_AT_ONCE = 8
"""All logs of a full mainnet block are some 200 KB, of an unusual one many times that."""


async def settle(node: RpcNode, nodes: Endpoints[RpcNode], part: Part, terms: Terms) -> bool:
    """Leave `part` with logs on which every answer agrees; raises `NodeFault` when they do not. Whether any changed.

    With another node at hand one contradiction is enough. A node that is alone is asked the contradictory blocks
    again, up to `terms.rereads` times and then with all of their logs, because the cursor must not move on a lie
    but must not stand still for one either.
    """
    left = _doubtful(part, terms)
    terms.counters.suspicions += len(part.unanswered(left))
    rounds = terms.rereads if nodes.is_alone(node) else 1
    for reread in range(rounds):
        if reread:
            await _read_again(node, part, left, terms)
        problems = await _contradictions(node, part, left, terms, thorough=reread > 0)
        if not problems:
            break
        number, problem = next(iter(problems.items()))
        told = f"block {number}: {problem}" + (f" (and {len(problems) - 1} more blocks)" if len(problems) > 1 else "")
        if reread == rounds - 1:
            raise NodeFault(node.name, told)
        terms.counters.node_faults += 1
        metrics.node_failure("node_fault")
        _log.warning("node_fault", node=node.name, problem=told, blocks_asked_again=len(problems))
        left = list(problems)
    await _ask_another(node, nodes, part, terms)
    return reread > 0


def _doubtful(part: Part, terms: Terms) -> list[int]:
    """Blocks of which to ask again. Where an audit reads every header later, only what contradicts the bloom now."""
    if not terms.every_header:
        return part.unanswered(sorted(part.headers))
    positive = {number for number, held in part.held.items() if held}
    return sorted(positive | set(proofs.watched_blocks(part.blocks, terms.watched)))


async def _read_again(node: RpcNode, part: Part, numbers: Sequence[int], terms: Terms) -> None:
    """The logs of single blocks by their number, and their headers where these are not known: the bloom decides."""
    await add_blocks(node, part, [number for number in numbers if number not in part.headers], terms)
    answers = await node.ask([range_call(Span(number, number), terms.topics) for number in numbers])
    for number, answer in zip(numbers, answers, strict=True):
        part.replace(number, read_logs(node, answer, Span(number, number), terms.topics))


async def _contradictions(
    node: RpcNode, part: Part, numbers: Sequence[int], terms: Terms, *, thorough: bool
) -> dict[int, str]:
    """How the node contradicts itself, by block; `thorough` asks all logs of each block, whatever the share."""
    problems: dict[int, str] = {}
    for chunk in chunks(numbers, terms.batch_size):
        answers = await node.ask([hash_call(part.hashes[number], terms.topics) for number in chunk])
        for number, answer in zip(chunk, answers, strict=True):
            if problem := _hash_problem(node, part, number, answer):
                problems[number] = problem
    chosen = numbers if thorough else _chosen(part, numbers, terms)
    for chunk in chunks([number for number in chosen if number not in problems], FULL_BLOCKS_AT_ONCE):
        problems |= await _full_problems(node, part, chunk, terms)
    return problems


def _chosen(part: Part, numbers: Sequence[int], terms: Terms) -> list[int]:
    return [
        number for number in part.unanswered(numbers) if proofs.is_chosen(part.hashes[number], terms.suspicion_share)
    ]


def _hash_problem(node: RpcNode, part: Part, number: int, answer: Answer) -> str | None:
    if isinstance(answer, RpcFailure):
        return f"its logs cannot be had by the hash that the node itself gave: {answer}"
    return proofs.difference(part.found(number), wire.logs(node.name, answer))


async def _full_problems(node: RpcNode, part: Part, numbers: Sequence[int], terms: Terms) -> dict[int, str]:
    problems: dict[int, str] = {}
    answers = await _full_answers(node, [(number, part) for number in numbers])
    for number, answer in zip(numbers, answers, strict=True):
        if answer is None or (isinstance(answer, RpcFailure) and answer.refusal is Refusal.SIZE):
            # Anyone can fill a block with more logs than a provider gives at once: the stream must not stop at it.
            terms.counters.full_proofs_refused += 1
            _log.warning("full_block_not_given", node=node.name, block=number, problem="too many logs for one answer")
            continue
        terms.counters.full_proofs += 1
        if isinstance(answer, RpcFailure):
            problems[number] = f"all of its logs cannot be had by the hash that the node itself gave: {answer}"
        elif problem := proofs.full_difference(
            part.headers[number], part.found(number), wire.logs(node.name, answer), terms.topics
        ):
            problems[number] = problem
    return problems


async def _full_answers(node: RpcNode, wanted: Sequence[tuple[int, Part]]) -> list[Answer | None]:
    """All logs of each block; None for a block whose logs are more than is read."""
    try:
        return [*await node.ask([full_call(part.hashes[number]) for number, part in wanted])]
    except RangeTooLarge:
        if len(wanted) == 1:
            return [None]
    return [answer for one in wanted for answer in await _full_answers(node, [one])]


async def _ask_another(node: RpcNode, nodes: Endpoints[RpcNode], part: Part, terms: Terms) -> None:
    """Whether another node, where one is in use, knows of no logs either in the blocks that stay suspicious."""
    doubtful = part.unanswered(sorted(part.headers))

    async def compare(other: RpcNode) -> None:
        for chunk in chunks(doubtful, terms.batch_size):
            answers = await other.ask([hash_call(part.hashes[number], terms.topics) for number in chunk])
            for number, answer in zip(chunk, answers, strict=True):
                _compare(node, other, part, number, answer)
            terms.counters.second_opinions += len(chunk)

    if doubtful:
        await nodes.ask_another(node, compare)


def _compare(node: RpcNode, other: RpcNode, part: Part, number: int, answer: Answer) -> None:
    if isinstance(answer, RpcFailure):
        raise SourceUnavailable(other.name, f"cannot give the logs of block {number} by its hash: {answer}")
    if problem := proofs.difference(part.found(number), wire.logs(other.name, answer)):
        raise NodeFault(node.name, f"block {number}: {problem}, at {other.name}")
