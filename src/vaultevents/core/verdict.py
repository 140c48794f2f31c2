"""The conditions that need an operator, by the same limits as the alerts, and one sentence about all of them.

`RULES` has each alert of `deploy/prometheus/alerts.yml` with its severity, its limits and how long it waits. A
condition is raised at once, an alert after `hold_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Severity = Literal["critical", "warning", "info"]
SEVERITIES: Final[tuple[Severity, ...]] = ("critical", "warning", "info")
"""The worst one first. What is only worth knowing (`info`) leaves the service healthy."""

WebhookState = Literal["on", "paused", "parked", "disabled", "off"]
WEBHOOK_STATES: Final[tuple[WebhookState, ...]] = ("on", "paused", "parked", "disabled", "off")
"""`disabled` by the service, `off` by its owner."""

RECENT_S: Final = 900
"""What happened within this time counts as recent; the alerts look back as far."""
LASTING_S: Final = 900
"""An event that is orphaned for longer has not simply moved to the next block."""
EPOCH_STREAMS: Final = ("validators", "withdrawals")
"""Streams whose positions are epochs; those of the others are blocks."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """A live cursor. `lag` is in blocks or epochs, as `position` is; None where the head is not known."""

    lag: int | None = None
    age_s: float = 0.0
    stuck_s: float = 0.0
    unverified: bool = False
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at; the defaults are those of a healthy service.

    `recent_…` are counts of the last `RECENT_S` seconds. Those of nodes, tokens, audits, blooms and leases are of this
    process alone. `orphaned` counts events that were orphaned in the hour that ended `LASTING_S` ago.
    """

    streams: Mapping[str, StreamState] = field(default_factory=dict)
    finalized_age_s: float = 0.0
    oldest_due_s: float = 0.0
    pending: int = 0
    outbox_rows: int = 0
    flag_change_age_s: float = 0.0
    orphaned: int = 0
    quarantine_open: int = 0
    report_age_s: float = 0.0
    report_pending_s: float = 0.0
    clock_offset_s: float = 0.0
    webhooks: Mapping[WebhookState, int] = field(default_factory=dict)
    step_up_locked: int = 0
    disk_free: Mapping[str, float] = field(default_factory=dict)
    recent_notices: Mapping[str, int] = field(default_factory=dict)
    recent_node_failures: Mapping[str, int] = field(default_factory=dict)
    recent_audit_findings: Mapping[str, int] = field(default_factory=dict)
    recent_replayed_tokens: int = 0
    recent_unsettled_blooms: int = 0
    recent_ended_leases: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert: `find` returns a sentence for an operator when the facts are beyond `limits`."""

    name: str
    severity: Severity
    limits: tuple[float, ...]
    find: Callable[[Facts, tuple[float, ...]], str | None]
    hold_s: int = 0

    @property
    def runbook(self) -> str:
        """The anchor of its entry in docs/runbook.md."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Condition:
    """A rule that is broken now. `name` is the alert's, `runbook` its anchor in docs/runbook.md."""

    name: str
    severity: Severity
    sentence: str
    runbook: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence about the service. `severity` is that of the worst condition; None without any."""

    healthy: bool
    severity: Severity | None
    sentence: str


WELL: Final = "Healthy. Every stream follows the chain, and no delivery is overdue."


def conditions(facts: Facts | None) -> tuple[Condition, ...]:
    """Return the broken rules, the worst first; `facts` is None when the database does not answer."""
    if facts is None:
        return (_condition(NOT_THERE, "The database does not answer."),)
    found = [_condition(rule, sentence) for rule in RULES if (sentence := rule.find(facts, rule.limits)) is not None]
    return tuple(sorted(found, key=lambda condition: SEVERITIES.index(condition.severity)))


def verdict(found: Sequence[Condition]) -> Verdict:
    """Sum up conditions: the sentence of the worst one, and how many others there are."""
    if not found:
        return Verdict(True, None, WELL)
    worst = min(found, key=lambda condition: SEVERITIES.index(condition.severity))
    healthy = worst.severity == "info"
    more = len(found) - 1
    others = "" if not more else f" {more} other condition{'s need' if more > 1 else ' needs'} attention."
    return Verdict(healthy, worst.severity, f"{'Healthy' if healthy else 'Not healthy'}. {worst.sentence}{others}")


def duration(seconds: float) -> str:
    """Write a duration in its largest whole unit: 45 s, 12 min, 30 h, 5 days."""
    for unit_s, name, least in ((86_400, "days", 3), (3600, "h", 2), (60, "min", 2)):
        if seconds >= least * unit_s:
            return f"{seconds // unit_s:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def _condition(rule: Rule, sentence: str) -> Condition:
    return Condition(rule.name, rule.severity, sentence, rule.runbook)


def _never(_: Facts, __: tuple[float, ...]) -> None:
    """Facts exist, so the database has answered."""


def _behind(facts: Facts, limits: tuple[float, ...]) -> str | None:
    blocks, epochs = limits
    late = []
    for stream, state in sorted(facts.streams.items()):
        limit, unit = (epochs, "epochs") if stream in EPOCH_STREAMS else (blocks, "blocks")
        if state.lag is not None and state.lag > limit:
            late.append(f"{stream} ({state.lag:,} {unit})")
    return f"Streams are behind the head: {', '.join(late)}." if late else None


def _stalled(facts: Facts, limits: tuple[float, ...]) -> str | None:
    late = [f"{name} ({duration(s.age_s)})" for name, s in sorted(facts.streams.items()) if s.age_s > limits[0]]
    return f"Streams have not moved: {', '.join(late)}." if late else None


def _held_up(facts: Facts, limits: tuple[float, ...]) -> str | None:
    late = [f"{name} ({duration(s.stuck_s)})" for name, s in sorted(facts.streams.items()) if s.stuck_s > limits[0]]
    return f"A problem holds up streams: {', '.join(late)}." if late else None


def _finality(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.finalized_age_s <= limits[0]:
        return None
    return f"No block has become final for {duration(facts.finalized_age_s)}."


def _contradicting(facts: Facts, limits: tuple[float, ...]) -> str | None:
    number = sum(facts.recent_node_failures.get(kind, 0) for kind in ("node_fault", "node_of_wrong_network"))
    if number <= limits[0]:
        return None
    return "A node contradicted itself, another node or the chain, or is of another network."


def _disagreeing(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.recent_node_failures.get("chain_disagreement", 0) <= limits[0]:
        return None
    return "Nodes give different final blocks: nothing is sent until they agree."


def _unverified(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if sum(state.unverified for state in facts.streams.values()) <= limits[0]:
        return None
    return "Blocks have a form that this version does not know: upgrade."


def _anchor(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.recent_node_failures.get("anchor_silent", 0) <= limits[0]:
        return None
    return "The beacon chain does not answer, so finalized blocks rest on execution nodes alone."


def _audit(facts: Facts, limits: tuple[float, ...]) -> str | None:
    kinds = [kind for kind, number in sorted(facts.recent_audit_findings.items()) if number > limits[0]]
    return f"Reading the chain again gave other events than those stored: {', '.join(kinds)}." if kinds else None


def _unavailable(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.recent_node_failures.get("node_unavailable", 0) <= limits[0]:
        return None
    return "Nodes fail again and again."


def _blooms(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.recent_unsettled_blooms <= limits[0]:
        return None
    return "Blocks whose bloom may hold a watched log were not read: the daily budget is used up."


def _due(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.oldest_due_s <= limits[0]:
        return None
    return f"A first attempt has been due for {duration(facts.oldest_due_s)}."


def _backlog(facts: Facts, limits: tuple[float, ...]) -> str | None:
    return f"{facts.pending:,} deliveries are pending." if facts.pending > limits[0] else None


def _outbox(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.outbox_rows <= limits[0]:
        return None
    return f"The outbox holds {facts.outbox_rows:,} events and deliveries: set retention.keep_days or prune."


def _flags(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.flag_change_age_s <= limits[0]:
        return None
    age = duration(facts.flag_change_age_s)
    return f"Pending deliveries of a webhook have not followed its flags for {age}."


def _leases(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.recent_ended_leases <= limits[0]:
        return None
    return f"{facts.recent_ended_leases:,} leases ended before their attempts were settled: a process died or froze."


def _orphaned(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.orphaned <= limits[0]:
        return None
    return f"{facts.orphaned:,} events whose block was reorganised away have not come back."


def _quarantined(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.quarantine_open <= limits[0]:
        return None
    return f"{facts.quarantine_open:,} logs of watched contracts cannot be decoded: their events are withheld."


def _old_report(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.report_age_s <= limits[0]:
        return None
    return f"The newest oracle report is {duration(facts.report_age_s)} old."


def _pending_report(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.report_pending_s <= limits[0]:
        return None
    return f"The file of an oracle report has not been verified for {duration(facts.report_pending_s)}."


def _clock(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if abs(facts.clock_offset_s) <= limits[0]:
        return None
    return f"The clocks of this host and of the database differ by {abs(facts.clock_offset_s):.1f} s."


def _disk(facts: Facts, limits: tuple[float, ...]) -> str | None:
    low = [f"{disk} ({share:.1%} free)" for disk, share in sorted(facts.disk_free.items()) if share < limits[0]]
    return f"Disks are nearly full: {', '.join(low)}." if low else None


def _notices(facts: Facts, limits: tuple[float, ...]) -> str | None:
    kinds = [kind for kind in WEBHOOK_NOTICES if facts.recent_notices.get(kind, 0) > limits[0]]
    return f"Webhooks of customers need attention: {', '.join(kinds)}." if kinds else None


def _webhooks(state: WebhookState, what: str) -> Callable[[Facts, tuple[float, ...]], str | None]:
    def find(facts: Facts, limits: tuple[float, ...]) -> str | None:
        number = facts.webhooks.get(state, 0)
        return f"Webhooks that {what}: {number:,}." if number > limits[0] else None

    return find


def _replayed(facts: Facts, limits: tuple[float, ...]) -> str | None:
    return "A token was presented twice and refused." if facts.recent_replayed_tokens > limits[0] else None


def _locked(facts: Facts, limits: tuple[float, ...]) -> str | None:
    if facts.step_up_locked <= limits[0]:
        return None
    return f"Wrong codes have locked the step-up of accounts: {facts.step_up_locked:,}."


WEBHOOK_NOTICES: Final = ("delivery_exhausted", "webhook_disabled", "webhook_failing")

NOT_THERE: Final = Rule("VaulteventsNotThere", "critical", (), _never, hold_s=120)
RULES: Final = (
    NOT_THERE,
    Rule("VaulteventsBehind", "warning", (64, 2), _behind, hold_s=300),
    Rule("VaulteventsStandsStill", "critical", (900,), _stalled),
    Rule("VaulteventsStreamHeldUp", "warning", (300,), _held_up),
    Rule("VaulteventsFinalityStalled", "warning", (1152,), _finality),
    Rule("VaulteventsNodeContradicts", "critical", (0,), _contradicting),
    Rule("VaulteventsChainDisagreement", "critical", (0,), _disagreeing),
    Rule("VaulteventsUpgradeNeeded", "critical", (0,), _unverified),
    Rule("VaulteventsAnchorSilent", "warning", (3,), _anchor),
    Rule("VaulteventsAuditFinds", "critical", (0,), _audit),
    Rule("VaulteventsNodeUnavailable", "warning", (10,), _unavailable),
    Rule("VaulteventsBloomsUnsettled", "warning", (0,), _blooms),
    Rule("VaulteventsDeliveriesWait", "critical", (600,), _due),
    Rule("VaulteventsBacklog", "warning", (1_000_000,), _backlog, hold_s=900),
    Rule("VaulteventsOutboxLarge", "warning", (50_000_000,), _outbox, hold_s=900),
    Rule("VaulteventsFlagChangesWait", "warning", (900,), _flags),
    Rule("VaulteventsLeasesEnd", "warning", (0,), _leases),
    Rule("VaulteventsEventsOrphaned", "warning", (0,), _orphaned),
    Rule("VaulteventsLogsQuarantined", "warning", (0,), _quarantined),
    Rule("VaulteventsReportOld", "warning", (93_600,), _old_report),
    Rule("VaulteventsReportPending", "warning", (3600,), _pending_report),
    Rule("VaulteventsClockOff", "warning", (2,), _clock, hold_s=300),
    Rule("VaulteventsDiskFull", "warning", (0.1,), _disk, hold_s=60),
    Rule("VaulteventsWebhookFails", "info", (0,), _notices),
    Rule("VaulteventsWebhookParked", "info", (0,), _webhooks("parked", "failures have parked"), hold_s=600),
    Rule("VaulteventsWebhookDisabled", "info", (0,), _webhooks("disabled", "the service has switched off")),
    Rule("VaulteventsTokenReplayed", "warning", (0,), _replayed),
    Rule("VaulteventsStepUpLocked", "warning", (0,), _locked),
)
