"""Several URLs of one kind of upstream: which one is asked next, and for how long one that fails is not.

question ─▶ the first node in use ─┬─ answers in time ──────────────────────────────▶ its answer
            (lines.py: when)       ├─ is late, and the question is cheap: the next one, too; the first answer wins
                                   └─ fails (circuits.py: for how long) ─▶ the next node, those set aside last
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import structlog

from vaultevents import metrics
from vaultevents.chain.upstream.node import (
    MAX_RETRY_AFTER_S,
    Counters,
    DataUnavailable,
    NodeClient,
    Throttled,
    UpstreamTimeout,
)
from vaultevents.chain.upstream.node_lag import HeadLags
from vaultevents.core.errors import InputError, NodeFault, SourceUnavailable, WrongNetwork
from vaultevents.core.nodes import NodeState

_log = structlog.get_logger()

LATE_IN_A_ROW = 3
"""So many late answers, with none in time between them, are a failure."""

T = TypeVar("T")


class Node(Protocol):
    """Anything that can be asked; `name` is its redacted name."""

    @property
    def name(self) -> str: ...
    @property
    def client(self) -> NodeClient: ...


N = TypeVar("N", bound=Node)


class NodePool(Generic[N]):
    """The nodes of one upstream, the first one preferred.

    A node that fails is set aside, for longer each time that it fails its first question back, and the next is asked;
    those set aside come last, so that a question fails only when every node has failed it. `admit` is called before a
    node's first use and again when it returns; it raises `WrongNetwork` for a node that must not be used (rule E10).
    """

    def __init__(self, nodes: Sequence[N], admit: Callable[[N], Awaitable[None]]) -> None:
        if not nodes:
            raise InputError("no node URL is configured: name at least one")
        self.nodes = tuple(nodes)
        self._admit = admit
        self._admitted: set[str] = set()
        self._head_lags = HeadLags()
        for node in nodes:
            node.client.is_alone = partial(self.is_alone, node)

    async def ask(self, question: Callable[[N], Awaitable[T]], *, hedge: bool = False, only: str | None = None) -> T:
        """Return the first answer; raises the last error, with all nodes named, when there is none.

        With `hedge`, for questions that are cheap to repeat, the next node in use is asked too when the first one is
        late. With `only` no other node than this one is asked. Every answer is of one node alone.
        """
        if hedge and len(self.nodes) > 1:
            return await self._ask_hedged(question)
        errors: list[SourceUnavailable | WrongNetwork] = []
        tried: list[N] = []
        if only is not None:
            tried = [node for node in self.nodes if node.name != only]
        while (node := self._next(tried)) is not None:
            tried.append(node)
            try:
                return await self._put(question, node)
            except (SourceUnavailable, WrongNetwork) as error:
                errors.append(error)
        raise _all_failed(errors)

    async def _ask_hedged(self, question: Callable[[N], Awaitable[T]]) -> T:
        errors: list[SourceUnavailable | WrongNetwork] = []
        tried: list[N] = []
        running: dict[asyncio.Task[T], N] = {}
        late: N | None = None
        try:
            while True:
                if not running:
                    node = self._next(tried)
                    if node is None:
                        raise _all_failed(errors)
                    running[self._begin(question, node, tried)] = node
                first = next(iter(running.values()))
                other = None if late is not None else self._next_in_use(tried)
                timeout_s = None if other is None else first.client.lateness.late_s
                done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done and other is not None:
                    late = first
                    late.client.counters.hedges += 1
                    running[self._begin(question, other, tried)] = other
                for task in done:
                    node = running.pop(task)
                    try:
                        answer = task.result()
                    except (SourceUnavailable, WrongNetwork) as error:
                        errors.append(error)
                        continue
                    self._note_lateness(late, node)
                    return answer
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _begin(self, question: Callable[[N], Awaitable[T]], node: N, tried: list[N]) -> asyncio.Task[T]:
        tried.append(node)
        on_trial = node.client.circuit.begin(
            node.client.clock()
        )  # now: the task itself begins after others have chosen
        task = asyncio.ensure_future(self._timed(question, node, on_trial))
        if on_trial:
            task.add_done_callback(lambda _: node.client.circuit.end())
        return task

    async def _timed(self, question: Callable[[N], Awaitable[T]], node: N, on_trial: bool) -> T:
        """Also of a late answer that is given up something is learned: that it takes longer."""
        client, begun_at = node.client, node.client.clock()
        try:
            answer = await self._judged(question, node, on_trial)
        except asyncio.CancelledError:
            if client.clock() - begun_at >= client.lateness.late_s:
                client.lateness.answered(client.clock() - begun_at)
            raise
        client.lateness.answered(client.clock() - begun_at)
        return answer

    def _note_lateness(self, late: N | None, winner: N) -> None:
        """A request that was given up is no failure of its node, but a node that is always late is no help."""
        winner.client.late_in_a_row = 0
        if late is None:
            return
        metrics.hedge("first" if winner is late else "second")
        if winner is not late:
            self._note_late(late)

    def _note_late(self, node: N) -> None:
        """Count a late answer; a node that is always late is set aside."""
        node.client.late_in_a_row += 1
        if node.client.late_in_a_row >= LATE_IN_A_ROW:
            node.client.late_in_a_row = 0
            self._set_aside(node, UpstreamTimeout(node.name, f"was late {LATE_IN_A_ROW} times in a row"), on_trial=True)

    async def ask_each(
        self, question: Callable[[N], Awaitable[T]], *, most: int | None = None, only: str | None = None, urgent: bool
    ) -> list[tuple[N, T]]:
        """Ask every node in use at once (at most the first `most`); return the answers in the order of the nodes.

        With `urgent`, once there is an answer, a node is waited for no longer than is usual for it. A node whose pause
        has just ended never delays the others. `only`: ask this node alone, in use or not. Raises the errors of all
        nodes where none answers.
        """
        if only is not None:
            asked = [node for node in self.nodes if node.name == only]
        else:
            asked = [node for node in self.nodes if self._is_in_use(node)][:most] or [*self.nodes][:most]
        begun_at = {node.name: node.client.clock() for node in asked}
        patient = {
            node.name for node in asked if not urgent and node.client.circuit.state(begun_at[node.name]) == "closed"
        }
        running = {self._begin(question, node, []): node for node in asked}
        answers: dict[str, T] = {}
        errors: list[SourceUnavailable | WrongNetwork] = []
        try:
            while running:
                timeout_s = None
                if answers and not any(node.name in patient for node in running.values()):
                    left = [
                        begun_at[node.name] + node.client.lateness.late_s - node.client.clock()
                        for node in running.values()
                    ]
                    timeout_s = max(0.0, *left)
                done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    for node in running.values():
                        self._note_late(node)
                    break
                for task in done:
                    node = running.pop(task)
                    try:
                        answers[node.name] = task.result()
                        node.client.late_in_a_row = 0
                    except (SourceUnavailable, WrongNetwork) as error:
                        errors.append(error)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if not answers:
            raise _all_failed(errors)
        return [(node, answers[node.name]) for node in asked if node.name in answers]

    def accuse(self, node: N, problem: str) -> None:
        """Set a node aside whose answer was proven false by what others gave."""
        self._set_aside(node, NodeFault(node.name, problem), on_trial=False)

    def is_alone(self, node: N) -> bool:
        """Whether no other node is in use beside this one."""
        return not self._others(node)

    async def ask_another(self, than: N, question: Callable[[N], Awaitable[T]]) -> T | None:
        """The answer of the first other node in use; None when there is none or none can answer.

        An error that names `than` is the answer about that node, and is raised.
        """
        for node in self._others(than):
            try:
                return await self._put(question, node, than)
            except (SourceUnavailable, WrongNetwork) as error:
                if _accuses(error, than):
                    raise
        return None

    def forget_admissions(self) -> None:
        """Every node must show itself again before its next use."""
        self._admitted.clear()

    def node_states(self) -> list[NodeState]:
        """What is known of each node now, the preferred one first."""
        return [
            replace(node.client.memory(), lag=self._head_lags.of(node.name, node.client.clock())) for node in self.nodes
        ]

    def note_head(self, kind: str, node: N, number: int, *, ahead: int = 0) -> None:
        """Note the head that a node has shown; it is compared with those of the same kind (`HeadLags.shown`)."""
        self._head_lags.shown(kind, node.name, number, node.client.clock(), ahead=ahead)

    def note_lacking(self, kind: str, node: N, number: int) -> None:
        """Note that a node does not have the head `number` of another one."""
        self._head_lags.lacking(kind, node.name, number, node.client.clock())

    def load_state(self, node_states: Iterable[NodeState]) -> None:
        """What was learned of these nodes before the last start."""
        known = {memory.name: memory for memory in node_states}
        for node in self.nodes:
            if node.name in known:
                node.client.load_state(known[node.name])

    def _others(self, than: N) -> list[N]:
        return [node for node in self.nodes if node.name != than.name and self._is_in_use(node)]

    def _is_in_use(self, node: N) -> bool:
        return node.client.circuit.is_usable(node.client.clock())

    def _next_in_use(self, tried: Sequence[N]) -> N | None:
        return next((node for node in self.nodes if node not in tried and self._is_in_use(node)), None)

    def _next(self, tried: Sequence[N]) -> N | None:
        """Return the next node in use, else the one whose pause ends first.

        A faulty one only where no other is left: the head of a node on another fork, up to which no other node can
        read, would hold up the stream.
        """
        left = [node for node in self.nodes if node not in tried]
        in_turn = min(left, key=lambda node: (node.client.at_fault, node.client.circuit.until), default=None)
        return self._next_in_use(tried) or in_turn

    async def _put(self, question: Callable[[N], Awaitable[T]], node: N, about: N | None = None) -> T:
        circuit = node.client.circuit
        on_trial = circuit.begin(node.client.clock())
        try:
            return await self._judged(question, node, on_trial, about)
        finally:
            if on_trial:
                circuit.end()

    async def _judged(
        self, question: Callable[[N], Awaitable[T]], node: N, on_trial: bool, about: N | None = None
    ) -> T:
        """The answer of one node; whether there is one decides whether the node stays in use.

        An error that names the node `about` which is asked is an answer.
        """
        begun_at = node.client.clock()
        try:
            await self._let_in(node)
            answer = await question(node)
        except DataUnavailable:
            if node.client.circuit.state(begun_at) != "open":  # what it lacks does not end the pause of a faulty node
                node.client.circuit.answered(begun_at, node.client.clock())
            raise
        except (SourceUnavailable, WrongNetwork) as error:
            if about is None or not _accuses(error, about):
                self._set_aside(node, error, on_trial=on_trial)
            raise
        node.client.circuit.answered(begun_at, node.client.clock())
        return answer

    async def _let_in(self, node: N) -> None:
        if node.name not in self._admitted:
            await self._admit(node)
            self._admitted.add(node.name)

    def _set_aside(self, node: N, error: SourceUnavailable | WrongNetwork, *, on_trial: bool) -> None:
        client = node.client
        client.at_fault = isinstance(error, NodeFault)
        problem = error.problem if isinstance(error, SourceUnavailable) else str(error)
        if isinstance(error, Throttled):
            client.circuit.hold(problem, error.pause_s, client.clock())
            if error.pause_s <= MAX_RETRY_AFTER_S:
                _log.info("node_held", node=node.name, problem=problem)
                return
        else:
            client.circuit.failed(problem, client.clock(), on_trial=on_trial)
        event = _count(client.counters, error)
        metrics.node_failure(event)
        alone = len(self.nodes) == 1
        if not alone:
            self._admitted.discard(node.name)
        set_aside_s = 0.0 if alone else max(0.0, client.circuit.until - client.clock())
        _log.warning(event, node=node.name, problem=problem, set_aside_s=round(set_aside_s, 1))


def _accuses(error: SourceUnavailable | WrongNetwork, node: Node) -> bool:
    return isinstance(error, SourceUnavailable) and error.node == node.name


def _count(counters: Counters, error: SourceUnavailable | WrongNetwork) -> str:
    match error:
        case NodeFault():
            counters.node_faults += 1
            return "node_fault"
        case WrongNetwork():
            counters.wrong_network += 1
            return "node_of_wrong_network"
        case _:
            counters.unavailable += 1
            return "node_unavailable"


def _all_failed(errors: Sequence[SourceUnavailable | WrongNetwork]) -> SourceUnavailable | WrongNetwork:
    if len(errors) == 1:
        return errors[0]
    named = "; ".join(str(error) for error in errors)
    unavailable = [error for error in errors if isinstance(error, SourceUnavailable)]
    if not unavailable:
        return WrongNetwork(f"no node can be used: {named}")
    kind = SourceUnavailable if isinstance(unavailable[-1], Throttled) else type(unavailable[-1])
    return kind(f"all {len(errors)} nodes", f"none could answer: {named}")
