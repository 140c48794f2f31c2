"""Several URLs of one kind of upstream: how they are shown, how patiently each is asked, and which one is asked next.

A URL may hold a secret in its path, query or user part, so only `node_name` and `scrub` put anything of it into text.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from vaultevents import metrics
from vaultevents.core.errors import InputError, NodeFault, SourceUnavailable, WrongNetwork

_log = structlog.get_logger()

MAX_RETRY_AFTER_S = 5.0
"""A node that asks for a longer pause is not waited for: another one is asked."""
_RECONNECT_S = (0.5, 1.0, 2.0, 5.0, 15.0, 60.0)
_SHORTEST_SECRET = 6
_ANY_URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,15}://\S+", re.IGNORECASE)


@dataclass(slots=True)
class Counters:
    """What happened at the nodes since the start; each number only grows."""

    requests: int = 0  # HTTP exchanges
    retries: int = 0  # asked again after a passing fault
    unavailable: int = 0
    ranges_refused: int = 0  # eth_getLogs over too many blocks
    node_faults: int = 0
    wrong_network: int = 0
    suspicions: int = 0  # blooms that hold a watched pair without such a log
    full_proofs: int = 0  # blocks whose bloom was rebuilt from all of their logs
    full_proofs_refused: int = 0  # blocks whose logs are more than the node gives at once
    second_opinions: int = 0  # blocks for which another node was asked


class Passing(SourceUnavailable):
    """May be over in a moment, so the same node is asked again; `patiently` turns what stays into its parent."""

    def __init__(self, node: str, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(node, problem)
        self.retry_after_s = retry_after_s


class TooSlow(SourceUnavailable):
    """No whole answer within the deadline: what was asked may be too much for the node, or the node is gone."""


class Named(Protocol):
    """Anything that can be asked; `name` is its redacted name."""

    @property
    def name(self) -> str: ...


T = TypeVar("T")
N = TypeVar("N", bound=Named)


def node_name(url: str, schemes: tuple[str, str] = ("http", "https")) -> str:
    """`scheme://host#12345678`: the host and a short hash of the whole URL, which tells two keys apart.

    Raises `InputError` for what is not a URL of one of the `schemes`.
    """
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    parts = _split(url)
    if parts is None or parts.scheme not in schemes or not parts.hostname:
        plain, tls = schemes
        raise InputError(f"the node URL #{digest} is not usable: write {plain}://host:port/path or {tls}://host/path")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}#{digest}"


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for a port that is no number
    except ValueError:
        return None
    return parts


def scrub(text: str, url: str) -> str:
    """A node's own words, fit for a log: one line of at most 200 characters, with no URL and no secret of ours."""
    text = text[:4000]
    for secret in _secrets(url):
        text = text.replace(secret, "…")
    text = _ANY_URL.sub("<url>", text)
    return "".join(c if c.isprintable() else " " for c in text)[:200]


def _secrets(url: str) -> list[str]:
    parts = urlsplit(url)
    pieces = {url, parts.path, parts.query, parts.username or "", parts.password or ""}
    pieces.update(re.split(r"[/&=;]", f"{parts.path}&{parts.query}"))
    pieces |= {unquote(piece) for piece in pieces}
    return sorted((piece for piece in pieces if len(piece) >= _SHORTEST_SECRET), key=len, reverse=True)


async def patiently(ask: Callable[[], Awaitable[T]], attempts: int, wait_s: float, counters: Counters) -> T:
    """Ask up to `attempts` times while the fault is a passing one; raises `SourceUnavailable` with the last one."""
    backoff = wait_random_exponential(multiplier=wait_s, max=MAX_RETRY_AFTER_S)

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return max(backoff(state), error.retry_after_s if isinstance(error, Passing) else 0.0)

    def count(_: RetryCallState) -> None:
        counters.retries += 1

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(Passing),
        stop=stop_after_attempt(attempts),
        wait=wait,
        before_sleep=count,
        reraise=True,
    )
    try:
        return await retrying(ask)
    except Passing as error:
        lasting = SourceUnavailable(error.node, error.problem)
    raise lasting


def reconnect_pauses() -> Iterator[float]:
    """How long to wait before a connection that ended is made anew, after the first end, the second and so on."""
    yield from _RECONNECT_S
    while True:
        yield _RECONNECT_S[-1]


class Endpoints(Generic[N]):
    """The nodes of one upstream, the first one preferred.

    A node that fails is set aside for `set_aside_s` and the next is asked; those set aside come last, so that a
    question fails only when every node has failed it. Last of all come those at fault: the head of a node on another
    fork, up to which nobody else can read, would hold up the stream for good. `admit` is called before a node's first
    use and again when it returns; it raises `WrongNetwork` for a node that must not be used (decision E10).
    """

    def __init__(
        self,
        nodes: Sequence[N],
        admit: Callable[[N], Awaitable[None]],
        counters: Counters,
        *,
        set_aside_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not nodes:
            raise InputError("no node URL is configured: name at least one")
        self.nodes = tuple(nodes)
        self._admit = admit
        self._counters = counters
        self._set_aside_s = set_aside_s
        self._clock = clock
        self._until: dict[str, float] = {}
        self._at_fault: set[str] = set()
        self._admitted: set[str] = set()

    async def ask(self, question: Callable[[N], Awaitable[T]]) -> T:
        """The first answer. Raises the last error, with all nodes named, when there is none."""
        errors: list[SourceUnavailable | WrongNetwork] = []
        for node in self._order():
            try:
                await self._let_in(node)
                return await question(node)
            except (SourceUnavailable, WrongNetwork) as error:
                self._set_aside(node, error)
                errors.append(error)
        raise _all_failed(errors)

    def is_alone(self, node: N) -> bool:
        """Whether no other node is in use beside this one."""
        return not self._others(node)

    async def ask_another(self, than: N, question: Callable[[N], Awaitable[T]]) -> T | None:
        """The answer of the first other node in use; None when there is none or none can answer.

        An error that names `than` is the answer about that node, and is raised.
        """
        for node in self._others(than):
            try:
                await self._let_in(node)
                return await question(node)
            except (SourceUnavailable, WrongNetwork) as error:
                if isinstance(error, SourceUnavailable) and error.node == than.name:
                    raise
                self._set_aside(node, error)
        return None

    def forget_admissions(self) -> None:
        """Every node must show itself again before its next use."""
        self._admitted.clear()

    def _others(self, than: N) -> list[N]:
        return [node for node in self.nodes if node.name != than.name and self._usable(node)]

    def _usable(self, node: N) -> bool:
        return self._until.get(node.name, 0.0) <= self._clock()

    def _order(self) -> list[N]:
        waiting = [node for node in self.nodes if not self._usable(node)]
        waiting.sort(key=lambda node: (node.name in self._at_fault, self._until[node.name]))
        return [node for node in self.nodes if self._usable(node)] + waiting

    async def _let_in(self, node: N) -> None:
        if node.name not in self._admitted:
            await self._admit(node)
            self._admitted.add(node.name)

    def _set_aside(self, node: N, error: SourceUnavailable | WrongNetwork) -> None:
        event = _count(self._counters, error)
        metrics.node_failure(event)
        problem = error.problem if isinstance(error, SourceUnavailable) else str(error)
        alone = len(self.nodes) == 1
        if not alone:
            self._until[node.name] = self._clock() + self._set_aside_s
            self._at_fault.discard(node.name)
            if isinstance(error, NodeFault):
                self._at_fault.add(node.name)
            self._admitted.discard(node.name)
        _log.warning(event, node=node.name, problem=problem, set_aside_s=0.0 if alone else self._set_aside_s)


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
    told = "; ".join(str(error) for error in errors)
    unavailable = [error for error in errors if isinstance(error, SourceUnavailable)]
    if not unavailable:
        return WrongNetwork(f"no node can be used: {told}")
    return type(unavailable[-1])(f"all {len(errors)} nodes", f"none could answer: {told}")
