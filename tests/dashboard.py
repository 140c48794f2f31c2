"""Make deploy/grafana/vaultevents.json of the metrics, with the limits of the alerts as lines.

`python3 dev.py dashboard` writes the file. Rows are the sections of docs/reference/metrics.md, panels its metrics in
their order. A metric of which an alert looks at a part has a panel for that part, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from alert_rules import ALERTS, ROOT, Comparison, alerts, comparisons
from metrics_sample import full_text

PAGE: Final = ROOT / "docs" / "reference" / "metrics.md"
BOARD: Final = ROOT / "deploy" / "grafana" / "vaultevents.json"
PREFIX: Final = "vaultevents_"
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
COLOURS: Final = {"critical": "red", "warning": "orange", "info": "blue"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 24
WORST_IS_LEAST: Final = {"vaultevents_disk_free_ratio", "vaultevents_database_up"}

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_CELL = re.compile(r"^\| (`.*?) \|", re.MULTILINE)
_NAME = re.compile(r"`([a-z_]+)[`{]")


Panel = dict[str, Any]


def board() -> dict[str, Any]:
    """Return the dashboard."""
    families = {_exported(family): family for family in text_string_to_metric_families(full_text())}
    parts = [part for rule in alerts(ALERTS.read_text()) for part in comparisons(rule)]
    sections = {"Alerts": [_firing()]}
    for title, names in _sections(PAGE.read_text()):
        sections[title] = [panel for name in names for panel in _panels(name, families[name], parts)]
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "vaultevents",
        "title": "vaultevents",
        "description": "Made by `python3 dev.py dashboard` of the metrics and the limits of the alerts.",
        "tags": ["vaultevents"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "templating": {"list": [source]},
        "annotations": {"list": []},
        "panels": list(_placed(sections)),
    }


def render() -> str:
    """Return the file."""
    return json.dumps(board(), indent=1) + "\n"


def _sections(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the title of each section of the reference with the metrics in the first cells of its table."""
    _, *parts = _SECTION.split(page)
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        names = [name for cell in _CELL.findall(text) for name in _NAME.findall(cell)]
        yield title, [PREFIX + name for name in names]


def _exported(family: Metric) -> str:
    """Return the name as expressions have it: that of a counter ends in `_total`."""
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def _placed(sections: Mapping[str, Sequence[Panel]]) -> Iterator[Panel]:
    """Number the panels, and place them in rows below the title of their section."""
    number, top, in_a_row = 1, 0, COLUMNS // WIDTH
    for title, panels in sections.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        number, top = number + 1, top + 1
        for position, panel in enumerate(panels):
            row, column = divmod(position, in_a_row)
            place = {"x": column * WIDTH, "y": top + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield {"id": number, **panel, "gridPos": place}
            number += 1
        top += -(-len(panels) // in_a_row) * HEIGHT


def _firing() -> Panel:
    asked = 'count by (alertname) (ALERTS{alertname=~"Vaultevents.+", alertstate="firing"})'
    return _panel("Firing alerts", "Alerts of this service that fire now.", {"{{alertname}}": asked}, "short", ())


def _panels(name: str, family: Metric, parts: Sequence[Comparison]) -> Iterator[Panel]:
    """Yield the panel of a metric, and one for each part of it that an alert looks at."""
    looked_at = [part for part in parts if part.metric == name]
    whole = [part for part in looked_at if not part.selector]
    title, unit = name.removeprefix(PREFIX), _unit(name)
    yield _panel(title, family.documentation, _queries(name, family, looked_at), unit, whole)
    for part in looked_at:
        if part.selector:
            yield _panel(f"{title}: {_values(part.selector)}", family.documentation, {"": part.asked}, unit, [part])


def _queries(name: str, family: Metric, looked_at: Sequence[Comparison]) -> dict[str, str]:
    """Return the expressions of a whole metric by their legends."""
    labels = [label for label in family.samples[0].labels if label != "le"]
    if family.type == "histogram":
        rates = f"sum by (le) (rate({name}_bucket[5m]))"
        return {f"p{share * 100:g}": f"histogram_quantile({share}, {rates})" for share in (0.5, 0.9, 0.99)}
    if family.type == "counter":
        change = f"increase({name}[15m])" if looked_at else f"rate({name}[5m])"
        return {_legend(labels): f"sum by ({', '.join(labels)}) ({change})"}
    worst = "min" if name in WORST_IS_LEAST else "max"
    return {_legend(labels): f"{worst} by ({', '.join(labels)}) ({name})" if labels else f"{worst}({name})"}


def _legend(labels: Sequence[str]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


def _values(selector: str) -> str:
    return ", ".join(re.findall(r'"([^"]*)"', selector)).replace("|", ", ")


def _unit(name: str) -> str:
    return "s" if name.endswith("_seconds") else "percentunit" if name.endswith("_ratio") else "short"


def _panel(title: str, description: str, queries: Mapping[str, str], unit: str, limits: Sequence[Comparison]) -> Panel:
    return {
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": asked, "legendFormat": legend or "__auto"}
            for place, (legend, asked) in enumerate(queries.items())
        ],
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "custom": {"thresholdsStyle": {"mode": "line" if limits else "off"}},
                "thresholds": {"mode": "absolute", "steps": _steps(limits)},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _steps(limits: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return the colours from the least value up: of an alert beyond its limit, green within."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    for limit in sorted(limits, key=lambda part: part.limit):
        colour = COLOURS[limit.severity]
        if limit.sign == ">":
            steps.append({"color": colour, "value": limit.limit})
        else:
            steps = [{"color": colour, "value": None}, {"color": "green", "value": limit.limit}]
    return steps


if __name__ == "__main__":
    BOARD.parent.mkdir(exist_ok=True)
    BOARD.write_text(render(), encoding="utf-8")
    print(BOARD)
