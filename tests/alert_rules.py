"""The alerts of deploy/prometheus/alerts.yml, and the comparisons in their expressions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"

_COMPARISON = re.compile(r"(?P<asked>\S.*?) (?P<sign>[<>]) (?P<limit>[\d.e]+)$")
_METRIC = re.compile(r"\b(?P<name>vaultevents_\w+)(?:\{(?P<selector>[^}]*)\})?")


def alerts(text: str) -> list[dict[str, Any]]:
    """Return the rules of the only group."""
    (group,) = yaml.safe_load(text)["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@dataclass(frozen=True, slots=True)
class Comparison:
    """One part of an expression: what is asked for, the metric and the labels in it, and the limit."""

    asked: str
    metric: str
    selector: str
    sign: str
    limit: float
    severity: str


def comparisons(rule: dict[str, Any]) -> Iterator[Comparison]:
    """Yield the parts of an alert's expression that compare a metric with a limit by `<` or `>`."""
    for part in rule["expr"].split(" or "):
        found = _COMPARISON.search(part.strip())
        if found is None:
            continue
        (metric,) = _METRIC.finditer(found["asked"])
        limit = float(found["limit"])
        severity = rule["labels"]["severity"]
        yield Comparison(found["asked"], metric["name"], metric["selector"] or "", found["sign"], limit, severity)
