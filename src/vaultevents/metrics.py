"""Every metric by its name: what this process counts, what the database knows, and both in Prometheus' text format.

Labels are words of ours from small fixed sets: never a URL, the id of an account or a webhook, or what a stranger sent.
Counting is a few dictionary writes in the event loop's thread; nothing is asked or formatted before a scrape.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, product
from operator import attrgetter
from types import MappingProxyType
from typing import Final, Literal, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from vaultevents.core.nodes import CIRCUIT_STATES, UPSTREAMS, CircuitState, Upstream
from vaultevents.core.verdict import RECENT_S, WEBHOOK_STATES, WebhookState

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True, slots=True)
class Counted:
    """A counter with one label. Its `known` values are exported from the start, so that the first one is an increase.

    (Prometheus sees no increase where a series begins.)
    """

    name: str
    says: str
    label: str
    known: tuple[str, ...] = ()


CLASSES: Final = ("2xx", "3xx", "4xx", "5xx")
ATTEMPTS: Final = Counted(
    "vaultevents_attempts", "Settled attempts by status class, or by what prevented an answer.", "outcome", CLASSES
)
RESENDS: Final = Counted("vaultevents_resends", "Attempts that customers asked for, likewise.", "outcome", CLASSES)
PUT_BACK: Final = Counted(
    "vaultevents_attempts_put_back",
    "Attempts that a fault of this host prevented: due again soon, and charged to no webhook.",
    "fault",
    ("local", "resolver", "proxy_down", "sealed"),
)
NOTICES: Final = Counted(
    "vaultevents_notices",
    "Notices that were logged for the operator.",
    "kind",
    ("webhook_failing", "webhook_disabled", "delivery_exhausted", "webhook_enabled", "logs_quarantined"),
)
REFUSALS: Final = Counted(
    "vaultevents_api_refusals",
    "Requests that ended with a problem, by its code.",
    "code",
    ("token_replayed", "mfa_locked"),
)
NODE_FAILURES: Final = Counted(
    "vaultevents_node_failures",
    "Nodes that could not answer, contradicted themselves or the chain, or were of another network.",
    "kind",
    ("node_unavailable", "node_fault", "node_of_wrong_network", "chain_disagreement", "anchor_silent", "unknown_form"),
)
BLOOMS: Final = Counted(
    "vaultevents_blooms",
    "Blocks that only their bloom made worth reading: settled by their receipts, or left by the daily budget.",
    "outcome",
    ("settled", "unsettled"),
)
RATE_LIMITS: Final = Counted(
    "vaultevents_node_rate_limits",
    "Requests that a node refused because there were too many.",
    "upstream",
    UPSTREAMS,
)
HEDGES: Final = Counted(
    "vaultevents_node_hedges",
    "Questions put to a second node because the first was late, by who answered in the end.",
    "winner",
    ("first", "second"),
)
REWINDS: Final = Counted(
    "vaultevents_rewinds",
    "Reorgs that took a stream back; only where this process watches.",
    "stream",
    ("logs",),
)
AUDIT_FINDINGS: Final = Counted(
    "vaultevents_audit_findings",
    "Events that were missing, differ, or have no log, when what was read was read again.",
    "kind",
    ("missing", "different", "without_log"),
)
QUARANTINED: Final = Counted(
    "vaultevents_quarantined_logs",
    "Logs that could not be decoded and were stored, when they were first read.",
    "stream",
    ("logs", "reports"),
)
LEASES: Final = Counted(
    "vaultevents_leases",
    "Leases that ended before their attempts were settled, and attempts that were settled after that.",
    "outcome",
    ("ended", "lost"),
)
COUNTERS: Final = (
    *(ATTEMPTS, RESENDS, PUT_BACK, NOTICES, REFUSALS, LEASES),
    *(NODE_FAILURES, RATE_LIMITS, HEDGES, BLOOMS, REWINDS, AUDIT_FINDINGS, QUARANTINED),
)
RECENT: Final = {counted.name: counted for counted in (REFUSALS, NODE_FAILURES, BLOOMS, AUDIT_FINDINGS, LEASES)}
"""Counters of which the verdict needs what was counted lately; of their known values alone."""
RECENT_TIMES: Final = 1000
"""So many times of one value are kept at most."""
REQUESTS: Final = "vaultevents_api_requests"
DURATIONS: Final = "vaultevents_attempt_duration_seconds"
BUCKETS_MS: Final = (5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 20_000)

NO_DISKS: Final = MappingProxyType[str, float]({})

Key = tuple[str, ...]
"""The name of a counter and the values of its labels."""


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A live cursor: since when it has not moved, and how long a problem has held it up (0: none does)."""

    position: int
    age_s: float
    stuck_s: float
    unverified: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """What the database knows.

    `oldest_due_s`: for how long a first attempt is due whose webhook may be sent to. `events_orphaned_lately`: in the
    hour that ended a quarter of an hour ago. `unverified` of a stream: its last blocks have an unknown form.
    """

    deliveries: Mapping[str, int]
    oldest_pending_s: float
    oldest_due_s: float
    flag_changes: int
    flag_change_age_s: float
    notices_waiting: int
    reports_pending: int
    report_pending_s: float
    events_orphaned: int
    events_orphaned_lately: int
    quarantine_open: int
    report_age_s: float | None
    clock_offset_s: float
    outbox_rows: int
    step_up_locked: int
    webhooks: Mapping[WebhookState, int]
    streams: Mapping[str, StreamFacts]
    nodes: Mapping[tuple[Upstream, CircuitState], int]


class Attempt(Protocol):
    """One finished attempt: a status, or the error that prevented one."""

    @property
    def status(self) -> int | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def duration_ms(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Head:
    """How far a stream could be read, and since when (monotonic)."""

    position: int
    since_s: float


_uncounted: ContextVar[bool] = ContextVar("uncounted", default=False)
_counts: Counter[Key] = Counter()
_recent: dict[Key, deque[tuple[float, int]]] = {}
_heads: dict[str, _Head] = {}
_FINALIZED: Final = ""
"""Among the heads, of no stream: that of the chain, which a stream may be ahead of (rule C1)."""

_RESULT = attrgetter("status", "error")
_DURATION_MS = attrgetter("duration_ms")


def attempts(batch: Iterable[Attempt]) -> None:
    """Counts the attempts of one settled batch."""
    batch = tuple(batch)
    _count_outcomes(ATTEMPTS, batch)
    for duration_ms, number in Counter(map(_DURATION_MS, batch)).items():
        _counts[DURATIONS, str(bisect_left(BUCKETS_MS, duration_ms))] += number
        _counts[DURATIONS, "sum"] += duration_ms * number


def resends(batch: Iterable[Attempt]) -> None:
    """Counts the attempts of one settled batch that customers asked for."""
    _count_outcomes(RESENDS, batch)


def _count_outcomes(counted: Counted, batch: Iterable[Attempt]) -> None:
    for (status, error), number in Counter(map(_RESULT, batch)).items():
        _counts[counted.name, error or f"{status // 100}xx"] += number


def put_back(faults: Iterable[str]) -> None:
    """Count attempts that a fault of this host prevented."""
    for fault, number in Counter(faults).items():
        _counts[PUT_BACK.name, fault] += number


def notice(kind: str) -> None:
    """Count a notice that was logged."""
    _counts[NOTICES.name, kind] += 1


def request(route: str, status: int) -> None:
    """Counts an answer of the API by the template of its route, never by its path."""
    _counts[REQUESTS, route, f"{status // 100}xx"] += 1


def refusal(code: str) -> None:
    """Counts a request that ended with the problem of this code."""
    _count(REFUSALS.name, code, 1)


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing of what nodes do in this context: a check beside the watcher asks them, too."""
    token = _uncounted.set(True)
    try:
        yield
    finally:
        _uncounted.reset(token)


def node_failure(kind: str) -> None:
    """Counts what was wrong with a node."""
    if not _uncounted.get():
        _count(NODE_FAILURES.name, kind, 1)


def rate_limit(upstream: Upstream) -> None:
    """Counts a request that a node refused for its rate."""
    if not _uncounted.get():
        _counts[RATE_LIMITS.name, upstream] += 1


def hedge(winner: Literal["first", "second"]) -> None:
    """Counts a question that was put to a second node, too."""
    if not _uncounted.get():
        _counts[HEDGES.name, winner] += 1


def blooms(settled: int, unsettled: int) -> None:
    """Counts blocks whose bloom may hold a watched log that no node claims."""
    if not _uncounted.get():
        _count(BLOOMS.name, "settled", settled)
        _count(BLOOMS.name, "unsettled", unsettled)


def rewound(stream: str) -> None:
    """Counts that a stream went back to a common ancestor."""
    _counts[REWINDS.name, stream] += 1


def audit_finding(kind: str, number: int) -> None:
    """Counts what an audit found."""
    _count(AUDIT_FINDINGS.name, kind, number)


def leases(outcome: Literal["ended", "lost"], number: int) -> None:
    """Count leases that ended by their time, or attempts that were settled after theirs had ended."""
    _count(LEASES.name, outcome, number)


def quarantined(stream: str, number: int) -> None:
    """Count logs that cannot be decoded."""
    _counts[QUARANTINED.name, stream] += number


def taken() -> list[tuple[Key, int]]:
    """What was counted since the last call, for another process to tell (`add`); here it is forgotten."""
    counts = list(_counts.items())
    _counts.clear()
    return counts


def add(counts: Iterable[tuple[Iterable[str], int]]) -> None:
    """Counts what another process has counted."""
    for key, number in counts:
        name, *labels = key
        if name in RECENT:
            _count(name, labels[0], number)
        else:
            _counts[name, *labels] += number


def total(counted: Counted, value: str) -> int:
    """Return what was counted of a value since the start."""
    return _counts[counted.name, value]


def recent(counted: Counted) -> dict[str, int]:
    """Return what was counted of each known value within `RECENT_S`."""
    since_s = time.monotonic() - RECENT_S
    return {
        value: sum(number for at_s, number in _recent.get((counted.name, value), ()) if at_s >= since_s)
        for value in counted.known
    }


def _count(name: str, value: str, number: int) -> None:
    """Count, and keep the time where it is asked for later."""
    _counts[name, value] += number
    if number and value in RECENT[name].known:
        times = _recent.setdefault((name, value), deque(maxlen=RECENT_TIMES))
        times.append((time.monotonic(), number))


def head(stream: str, position: int) -> None:
    """Takes note of how far a stream can be read."""
    known = _heads.get(stream)
    if known is None or known.position != position:
        _heads[stream] = _Head(position, time.monotonic())


def finalized(block: int) -> None:
    """Takes note of the finalized block."""
    if not _uncounted.get():
        head(_FINALIZED, block)


def lag(stream: str, position: int) -> int | None:
    """Return how far a position is behind the head of its stream; None where this process does not know the head."""
    known = _heads.get(stream)
    return None if known is None else max(0, known.position - position)


def heads() -> dict[str, int]:
    """Return how far each stream could be read, as this process knows it."""
    return {stream: known.position for stream, known in _heads.items() if stream != _FINALIZED}


def finalized_block() -> int | None:
    """Return the finalized block; None where this process does not read the chain."""
    known = _heads.get(_FINALIZED)
    return None if known is None else known.position


def finalized_age_s() -> float | None:
    """Return for how long no block has become final; None where this process does not read the chain."""
    known = _heads.get(_FINALIZED)
    return None if known is None else time.monotonic() - known.since_s


def text(stored: Stored | None, disk_free: Mapping[str, float] = NO_DISKS) -> bytes:
    """Write all metrics as text; without `stored`, which the database could not give, those of this process.

    `disk_free` has the free share of each disk that this process can see.
    """
    return generate_latest(_Families(_families(_counts, _heads, stored, disk_free)))


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(
    counts: Counter[Key], heads: Mapping[str, _Head], stored: Stored | None, disk_free: Mapping[str, float]
) -> Iterator[Metric]:
    for counted in COUNTERS:
        values = dict.fromkeys(counted.known, 0) | {key[1]: n for key, n in counts.items() if key[0] == counted.name}
        family = CounterMetricFamily(counted.name, counted.says, labels=[counted.label])
        for value, number in values.items():
            family.add_metric([value], number)
        yield family
    requests = CounterMetricFamily(
        REQUESTS, "Answers of the API by route and status class.", labels=["route", "status"]
    )
    for name, *labels in counts:
        if name == REQUESTS:
            requests.add_metric(labels, counts[name, *labels])
    yield requests
    yield _durations(counts)
    yield _gauges(
        "vaultevents_disk_free_ratio",
        "Free share of a disk: that of data_dir, and that of the embedded database.",
        "disk",
        disk_free,
    )
    yield _gauge("vaultevents_database_up", "Whether the database answered this scrape.", int(stored is not None))
    if stored is not None:
        yield from _stored(stored)
        yield from _streams(stored.streams, heads)


def _durations(counts: Counter[Key]) -> Metric:
    ends = [*(str(end_ms / 1000) for end_ms in BUCKETS_MS), "+Inf"]
    below = accumulate(counts[DURATIONS, str(place)] for place in range(len(ends)))
    family = HistogramMetricFamily(DURATIONS, "How long settled attempts took.")
    family.add_metric([], list(zip(ends, map(float, below), strict=True)), counts[DURATIONS, "sum"] / 1000)
    return family


def _stored(stored: Stored) -> Iterator[Metric]:
    yield _gauges(
        "vaultevents_deliveries", "Deliveries by state; estimated where they are many.", "state", stored.deliveries
    )
    yield _gauge("vaultevents_oldest_pending_seconds", "Age of the oldest pending delivery.", stored.oldest_pending_s)
    yield _gauge(
        "vaultevents_oldest_due_seconds",
        "How long a first attempt has been due whose webhook is neither parked nor paused.",
        stored.oldest_due_s,
    )
    yield _gauge(
        "vaultevents_flag_changes",
        "Webhooks that were switched on or off or deleted and whose pending deliveries do not follow yet.",
        stored.flag_changes,
    )
    yield _gauge(
        "vaultevents_flag_change_age_seconds",
        "Age of the oldest of these changes; 0 without.",
        stored.flag_change_age_s,
    )
    yield _gauge("vaultevents_notices_waiting", "Notices that are not logged or posted yet.", stored.notices_waiting)
    yield _gauge(
        "vaultevents_reports_pending", "Oracle reports whose files are not verified yet.", stored.reports_pending
    )
    yield _gauge(
        "vaultevents_reports_pending_seconds", "For how long the oldest of these has waited.", stored.report_pending_s
    )
    yield _gauge("vaultevents_events_orphaned", "Events whose block is no longer on the chain.", stored.events_orphaned)
    yield _gauge(
        "vaultevents_events_orphaned_lately",
        "Those of them that were orphaned in the hour that ended 15 minutes ago.",
        stored.events_orphaned_lately,
    )
    yield _gauge("vaultevents_outbox_rows", "Stored events and deliveries together.", stored.outbox_rows)
    yield _gauges(
        "vaultevents_webhooks",
        "Webhooks by state: disabled by the service, or switched off by their owners.",
        "state",
        {state: stored.webhooks.get(state, 0) for state in WEBHOOK_STATES},
    )
    yield _gauge(
        "vaultevents_step_up_locked", "Accounts whose step-up is locked by wrong codes.", stored.step_up_locked
    )
    yield _gauge(
        "vaultevents_quarantine_open",
        "Logs that cannot be decoded and are neither resolved nor dismissed; at least so many where they are many.",
        stored.quarantine_open,
    )
    if stored.report_age_s is not None:
        yield _gauge("vaultevents_report_age_seconds", "Age of the newest oracle report.", stored.report_age_s)
    nodes = GaugeMetricFamily(
        "vaultevents_nodes", "Configured nodes by the state of their circuit.", labels=["upstream", "state"]
    )
    for upstream, state in product(UPSTREAMS, CIRCUIT_STATES):
        nodes.add_metric([upstream, state], stored.nodes.get((upstream, state), 0))
    yield nodes
    yield _gauge(
        "vaultevents_clock_offset_seconds", "The database's clock minus the one of this host.", stored.clock_offset_s
    )


def _streams(streams: Mapping[str, StreamFacts], heads: Mapping[str, _Head]) -> Iterator[Metric]:
    now_s = time.monotonic()
    positions = {stream: facts.position for stream, facts in streams.items()}
    lags = {stream: found for stream, at in positions.items() if (found := lag(stream, at)) is not None}
    ages = {stream: now_s - head.since_s for stream, head in heads.items()}
    unverified = {stream: int(facts.unverified) for stream, facts in streams.items()}
    final_age_s = ages.pop(_FINALIZED, None)
    for name, says, values in (
        ("position", "The last block or epoch that is committed.", positions),
        ("lag", "Blocks or epochs between that and the head; only where this process watches.", lags),
        ("age_seconds", "Since when the position has not moved.", {one: of.age_s for one, of in streams.items()}),
        ("stuck_seconds", "How long a problem has held it up.", {one: of.stuck_s for one, of in streams.items()}),
        ("unverified", "1: its last blocks have a form that this version does not know.", unverified),
        ("head_age_seconds", "Since when the head has not moved.", ages),
    ):
        yield _gauges(f"vaultevents_stream_{name}", says, "stream", values)
    if final_age_s is not None:
        yield _gauge("vaultevents_finalized_age_seconds", "Since when no block became final.", final_age_s)


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(name, says, value=value)


def _gauges(name: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, says, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
