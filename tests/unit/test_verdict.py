"""Each rule is broken by facts just beyond its limit and by none at it, and the verdict names the worst condition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaultevents.core.verdict import (
    NOT_THERE,
    RULES,
    SEVERITIES,
    WELL,
    Condition,
    Facts,
    Rule,
    StreamState,
    conditions,
    duration,
    verdict,
)

pytestmark = pytest.mark.unit

Make = Callable[[float], Facts]


def stream(name: str) -> Callable[[StreamState], Facts]:
    return lambda state: Facts(streams={name: state})


# The name of a rule, which of its limits, and facts with a value for it; whole numbers where the fact is one.
CASES: list[tuple[str, int, bool, Make]] = [
    ("VaulteventsBehind", 0, True, lambda n: stream("logs")(StreamState(lag=int(n)))),
    ("VaulteventsBehind", 0, True, lambda n: stream("reports")(StreamState(lag=int(n)))),
    ("VaulteventsBehind", 1, True, lambda n: stream("validators")(StreamState(lag=int(n)))),
    ("VaulteventsBehind", 1, True, lambda n: stream("withdrawals")(StreamState(lag=int(n)))),
    ("VaulteventsStandsStill", 0, False, lambda s: stream("logs")(StreamState(age_s=s))),
    ("VaulteventsStreamHeldUp", 0, False, lambda s: stream("logs")(StreamState(stuck_s=s))),
    ("VaulteventsFinalityStalled", 0, False, lambda s: Facts(finalized_age_s=s)),
    ("VaulteventsNodeContradicts", 0, True, lambda n: Facts(recent_node_failures={"node_fault": int(n)})),
    ("VaulteventsNodeContradicts", 0, True, lambda n: Facts(recent_node_failures={"node_of_wrong_network": int(n)})),
    ("VaulteventsChainDisagreement", 0, True, lambda n: Facts(recent_node_failures={"chain_disagreement": int(n)})),
    ("VaulteventsUpgradeNeeded", 0, True, lambda n: stream("logs")(StreamState(unverified=bool(n)))),
    ("VaulteventsAnchorSilent", 0, True, lambda n: Facts(recent_node_failures={"anchor_silent": int(n)})),
    ("VaulteventsAuditFinds", 0, True, lambda n: Facts(recent_audit_findings={"missing": int(n)})),
    ("VaulteventsNodeUnavailable", 0, True, lambda n: Facts(recent_node_failures={"node_unavailable": int(n)})),
    ("VaulteventsBloomsUnsettled", 0, True, lambda n: Facts(recent_unsettled_blooms=int(n))),
    ("VaulteventsDeliveriesWait", 0, False, lambda s: Facts(oldest_due_s=s)),
    ("VaulteventsBacklog", 0, True, lambda n: Facts(pending=int(n))),
    ("VaulteventsOutboxLarge", 0, True, lambda n: Facts(outbox_rows=int(n))),
    ("VaulteventsFlagChangesWait", 0, False, lambda s: Facts(flag_change_age_s=s)),
    ("VaulteventsLeasesEnd", 0, True, lambda n: Facts(recent_ended_leases=int(n))),
    ("VaulteventsEventsOrphaned", 0, True, lambda n: Facts(orphaned=int(n))),
    ("VaulteventsLogsQuarantined", 0, True, lambda n: Facts(quarantine_open=int(n))),
    ("VaulteventsReportOld", 0, False, lambda s: Facts(report_age_s=s)),
    ("VaulteventsReportPending", 0, False, lambda s: Facts(report_pending_s=s)),
    ("VaulteventsClockOff", 0, False, lambda s: Facts(clock_offset_s=s)),
    ("VaulteventsClockOff", 0, False, lambda s: Facts(clock_offset_s=-s)),
    ("VaulteventsDiskFull", 0, False, lambda share: Facts(disk_free={"data": share})),
    ("VaulteventsWebhookFails", 0, True, lambda n: Facts(recent_notices={"delivery_exhausted": int(n)})),
    ("VaulteventsWebhookParked", 0, True, lambda n: Facts(webhooks={"parked": int(n)})),
    ("VaulteventsWebhookDisabled", 0, True, lambda n: Facts(webhooks={"disabled": int(n)})),
    ("VaulteventsTokenReplayed", 0, True, lambda n: Facts(recent_replayed_tokens=int(n))),
    ("VaulteventsStepUpLocked", 0, True, lambda n: Facts(step_up_locked=int(n))),
]
BELOW = {"VaulteventsDiskFull"}
"""Rules that are broken below their limit."""


def rule(name: str) -> Rule:
    (found,) = (rule for rule in RULES if rule.name == name)
    return found


def raised(facts: Facts | None) -> list[str]:
    return [condition.name for condition in conditions(facts)]


def beyond(name: str, limit: float, whole: bool) -> float:
    """The first value that breaks the rule."""
    if name in BELOW:
        return math.nextafter(limit, -math.inf)
    return limit + 1 if whole else math.nextafter(limit, math.inf)


@pytest.mark.parametrize(("name", "place", "whole", "make"), CASES)
def test_a_rule_is_broken_just_beyond_its_limit(name: str, place: int, whole: bool, make: Make) -> None:
    limit = rule(name).limits[place]
    assert raised(make(limit)) == []
    assert raised(make(beyond(name, limit, whole))) == [name]


@given(st.sampled_from(CASES), st.floats(0, 1e9))
def test_no_value_within_the_limit_breaks_a_rule(case: tuple[str, int, bool, Make], share: float) -> None:
    name, place, _, make = case
    limit = rule(name).limits[place]
    inside = limit + share if name in BELOW else math.floor(min(limit, share))
    assert raised(make(inside)) == []
    outside = limit * min(share, 0.999) if name in BELOW else limit + 1 + math.floor(share)
    assert raised(make(outside)) == ([name] if outside < limit or name not in BELOW else [])


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} | {NOT_THERE.name} == {rule.name for rule in RULES}
    assert {(case[0], case[1]) for case in CASES} == {
        (rule.name, place) for rule in RULES for place in range(len(rule.limits))
    }


def test_nothing_to_report_is_healthy() -> None:
    assert conditions(Facts()) == ()
    assert verdict(()).healthy
    assert verdict(()).sentence == WELL


def test_what_the_process_does_not_know_raises_nothing() -> None:
    assert raised(Facts(streams={"logs": StreamState(lag=None)}, disk_free={}, webhooks={})) == []


def test_a_database_that_does_not_answer_is_a_condition() -> None:
    (condition,) = conditions(None)
    assert (condition.name, condition.severity, condition.runbook) == (
        "VaulteventsNotThere",
        "critical",
        "vaulteventsnotthere",
    )
    assert not verdict([condition]).healthy


def test_the_worst_condition_comes_first_and_is_named() -> None:
    facts = Facts(
        streams={"logs": StreamState(lag=65, age_s=901)},
        webhooks={"disabled": 2},
        disk_free={"data": 0.05, "database": 0.5},
    )
    found = conditions(facts)
    assert [condition.name for condition in found] == [
        "VaulteventsStandsStill",
        "VaulteventsBehind",
        "VaulteventsDiskFull",
        "VaulteventsWebhookDisabled",
    ]
    assert [condition.sentence for condition in found] == [
        "Streams have not moved: logs (15 min).",
        "Streams are behind the head: logs (65 blocks).",
        "Disks are nearly full: data (5.0% free).",
        "Webhooks that the service has switched off: 2.",
    ]
    whole = verdict(found)
    assert (whole.healthy, whole.severity) == (False, "critical")
    assert whole.sentence == ("Not healthy. Streams have not moved: logs (15 min). 3 other conditions need attention.")


def test_what_is_only_worth_knowing_is_healthy() -> None:
    found = conditions(replace(Facts(), webhooks={"parked": 1}))
    assert verdict(found) == replace(
        verdict(()), severity="info", sentence="Healthy. Webhooks that failures have parked: 1."
    )


@given(st.lists(st.sampled_from(RULES), max_size=6))
def test_the_verdict_has_the_worst_severity(rules: list[Rule]) -> None:
    found = [Condition(rule.name, rule.severity, "x.", rule.runbook) for rule in rules]
    severities = [rule.severity for rule in rules]
    worst = next((severity for severity in SEVERITIES if severity in severities), None)
    whole = verdict(found)
    assert whole.severity == worst
    assert whole.healthy == (worst in (None, "info"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (93_601, "26 h"), (3e5, "3 days")],
)
def test_durations_have_one_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
