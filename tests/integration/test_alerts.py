"""Alerts, verdict, runbook and dashboard agree: names, limits, metrics; and Prometheus raises and clears each alert."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

import dashboard
from alert_rules import ALERTS, ROOT, Comparison, alerts, comparisons
from metrics_sample import full_text
from vaultevents import metrics
from vaultevents.api import scraping
from vaultevents.api.server import ServerOptions, bind, serve
from vaultevents.cli import COMMANDS
from vaultevents.core.verdict import NOT_THERE, RECENT_S, RULES, WEBHOOK_NOTICES, Rule
from vaultevents.store.pool import Database

pytestmark = pytest.mark.integration

RUNBOOK = ROOT / "docs" / "runbook.md"
OURS = re.compile(r"vaultevents_\w+")
RECENT = re.compile(r"\[(\d+)m\]")
MINUTES = {"": 0, "1m": 1, "2m": 2, "5m": 5, "10m": 10, "15m": 15}

Alert = dict[str, Any]


def differences(text: str, rules: Sequence[Rule] = RULES) -> list[str]:
    """Where the alerts are not those of the rules."""
    found = {alert["alert"]: alert for alert in alerts(text)}
    wrong = sorted(found.keys() ^ {rule.name for rule in rules})
    for rule in rules:
        if (alert := found.get(rule.name)) is None:
            continue
        said = (
            alert["labels"]["severity"],
            tuple(part.limit for part in comparisons(alert)),
            MINUTES[alert.get("for", "")] * 60,
        )
        if said != (rule.severity, tuple(map(float, rule.limits)), rule.hold_s):
            wrong.append(f"{rule.name}: {said}")
    return wrong


def test_the_alerts_have_the_limits_of_the_verdict() -> None:
    text = ALERTS.read_text()
    assert differences(text) == []
    assert {int(minutes) * 60 for minutes in RECENT.findall(text)} == {RECENT_S}
    assert len(alerts(text)) == len(RULES)


@pytest.mark.parametrize(
    ("right", "wrong", "name"),
    [
        ("> 64", "> 65", "VaulteventsBehind"),
        ("severity: critical", "severity: warning", "VaulteventsNotThere"),
        ("for: 10m", "for: 15m", "VaulteventsWebhookParked"),
        ("< 0.1", "< 0.2", "VaulteventsDiskFull"),
        ("alert: VaulteventsClockOff", "alert: VaulteventsClockOf", "VaulteventsClockOf"),
    ],
)
def test_a_difference_is_found(right: str, wrong: str, name: str) -> None:
    assert differences(ALERTS.read_text().replace(right, wrong, 1))[0].startswith(name)


def unknown_metrics(text: str) -> set[str]:
    """What is named and no scrape reports."""
    reported = set(OURS.findall(full_text()))
    return set(OURS.findall(text)) - reported


def test_alerts_and_dashboard_ask_for_metrics_that_exist() -> None:
    asked = "\n".join(alert["expr"] for alert in alerts(ALERTS.read_text()))
    assert unknown_metrics(asked) == set()
    assert unknown_metrics(asked.replace("_lag{", "_leg{")) == {"vaultevents_stream_leg"}  # the control
    assert unknown_metrics("\n".join(asked_by(json.loads(dashboard.BOARD.read_text())))) == set()


def test_the_values_that_alerts_ask_for_are_reported_from_the_start() -> None:
    """Or the first replayed token would be no increase."""
    asked = set(re.findall(r'_total\{(?:kind|code|outcome)=~?"([^"]+)"', ALERTS.read_text()))
    known = {value for counted in metrics.COUNTERS for value in counted.known}
    assert len(asked) > 5
    assert {value for values in asked for value in values.split("|")} <= known
    assert "|".join(WEBHOOK_NOTICES) in asked


def test_each_alert_says_what_happened_and_leads_to_the_runbook() -> None:
    for rule, alert in zip(RULES, alerts(ALERTS.read_text()), strict=True):
        assert set(alert) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert alert["alert"] == rule.name  # in one order
        assert alert["annotations"]["summary"].endswith(".")
        assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{rule.runbook}"


def entries(page: str) -> dict[str, str]:
    _, *parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def heading(rule: Rule) -> str:
    """The line below the title of an entry."""
    limits = ", ".join(f"{limit:,.10g}" for limit in rule.limits)
    named = f" Limit{'s' if len(rule.limits) > 1 else ''}: {limits}." if limits else ""
    held = f" The alert waits {rule.hold_s // 60} min." if rule.hold_s else ""
    return f"Severity: {rule.severity}.{named}{held}"


def test_the_runbook_has_an_entry_for_each_alert() -> None:
    found = entries(RUNBOOK.read_text())
    assert list(found) == [rule.name for rule in RULES]
    for rule in RULES:
        text = found[rule.name]
        assert text.startswith(f"\n\n{heading(rule)}\n\n**Meaning.** "), rule.name
        assert re.search(r"\*\*Check\.\*\*\n\n- .*\*\*Act\.\*\*\n\n- ", text, re.DOTALL), rule.name


def test_the_runbook_names_only_commands_that_there_are() -> None:
    named = set(re.findall(r"`vaultevents ([a-z-]+)", RUNBOOK.read_text()))
    assert named >= {"status", "check", "audit"}
    assert named - {"--only"} <= COMMANDS.keys()


def asked_by(board: Mapping[str, Any]) -> Iterator[str]:
    """The expressions of a dashboard."""
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def invalid(board: Mapping[str, Any]) -> list[str]:
    """Where a dashboard lacks what Grafana needs: keys, unique ids, panels that do not overlap, a known source."""
    wrong = [key for key in ("uid", "title", "schemaVersion", "panels", "templating", "time") if key not in board]
    panels = board["panels"]
    if len({panel["id"] for panel in panels}) != len(panels):
        wrong.append("ids are not unique")
    variables = {f"${{{variable['name']}}}" for variable in board["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        if cells & taken or max(x for x, _ in cells) >= dashboard.COLUMNS:
            wrong.append(f"{panel['title']} overlaps")
        taken |= cells
        if panel["type"] == "row":
            continue
        if panel["datasource"]["uid"] not in variables or not panel["targets"]:
            wrong.append(f"{panel['title']} has no source")
        if len({target["refId"] for target in panel["targets"]}) != len(panel["targets"]):
            wrong.append(f"{panel['title']} has one letter for two expressions")
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        limits = [step["value"] for step in steps[1:]]
        if steps[0]["value"] is not None or limits != sorted(limits):
            wrong.append(f"{panel['title']} has limits out of order")
    return wrong


def test_the_dashboard_is_what_its_script_makes() -> None:
    text = dashboard.BOARD.read_text()
    assert text == dashboard.render(), "write it anew: python3 dev.py dashboard"
    board = json.loads(text)
    assert invalid(board) == []
    board["panels"][2]["gridPos"] = board["panels"][1]["gridPos"]
    board["panels"][3]["id"] = 1
    assert len(invalid(board)) == 2  # the control


def test_the_dashboard_shows_every_metric_and_every_limit() -> None:
    board = json.loads(dashboard.BOARD.read_text())
    exported = set(re.findall(r"^# TYPE (vaultevents_\w+)", full_text(), re.MULTILINE))
    shown = {re.sub(r"_bucket$", "", name) for text in asked_by(board) for name in OURS.findall(text)}
    assert {name.removesuffix("_total") for name in shown} == {name.removesuffix("_total") for name in exported}
    lines = [
        step["value"]
        for panel in board["panels"]
        if "fieldConfig" in panel
        for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]
    ]
    assert sorted(lines) == sorted(limit for rule in RULES for limit in rule.limits)


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not here: install Prometheus (Debian: apt install prometheus)")
    return found


def ran(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def series(part: Comparison) -> str:
    """The name of one series that a comparison looks at."""
    labels = dict(re.findall(r'(\w+)=~?"([^"|]*)', part.selector))
    if part.metric.startswith("vaultevents_stream_"):
        labels.setdefault("stream", "logs")
    if part.metric == "vaultevents_audit_findings_total":
        labels["kind"] = "missing"
    shown = ", ".join(f'{name}="{text}"' for name, text in {**labels, "instance": "one"}.items())
    return f"{part.metric}{{{shown}}}"


def firing(alert: str, minute: int, number: int) -> dict[str, Any]:
    """A test that so many series of an alert fire in this minute."""
    expected = [{"labels": "{}", "value": number}] if number else []
    asked = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    return {"expr": asked, "eval_time": f"{minute}m", "exp_samples": expected}


WITHIN, BEYOND, LATER = 55, 62, 110
"""Minutes: still at the limit; just beyond it (what increased is forgotten after 15 minutes); at it again."""
HELD = BEYOND + 15


def values(part: Comparison) -> str:
    """An hour at the limit, which raises nothing, half an hour beyond it, and at it again."""
    if part.metric.endswith("_total"):  # a little less than at it: Prometheus extrapolates what increased
        at, beyond = max(0, int(part.limit) - 1), int(part.limit) + 1
        return f"0x29 {at}x29 {at + beyond}x59"
    step = -0.01 if part.sign == "<" else max(1.0, part.limit / 10)
    return f"{part.limit}x59 {part.limit + step}x29 {part.limit}x59"


def raised_and_cleared(found: Sequence[Alert]) -> dict[str, Any]:
    """A test of every comparison; one for all, since each one costs a database."""
    parts = {alert["alert"]: tuple(comparisons(alert)) for alert in found}
    up = [{"series": 'vaultevents_database_up{instance="one"}', "values": "1x150"}]
    expected = []
    for name, compared in parts.items():
        late = HELD if compared and not compared[0].metric.endswith("_total") else BEYOND
        expected += [firing(name, WITHIN, 0), firing(name, late, len(compared)), firing(name, LATER, 0)]
    return {
        "interval": "1m",
        "input_series": [
            *up,
            *({"series": series(part), "values": values(part)} for compared in parts.values() for part in compared),
        ],
        "promql_expr_test": expected,
    }


def absent_and_back(alert: Alert) -> dict[str, Any]:
    """Nobody answers for a time, then somebody without the database, then all is well."""
    up = 'vaultevents_database_up{instance="one"}'
    return {
        "interval": "1m",
        "input_series": [{"series": up, "values": "_x19 0x19 1x30"}],
        "promql_expr_test": [
            firing(alert["alert"], 1, 0),
            firing(alert["alert"], 10, 1),
            firing(alert["alert"], 30, 1),
            firing(alert["alert"], 60, 0),
        ],
    }


@asynccontextmanager
async def service(database: Database, port: int = 0) -> AsyncIterator[int]:
    """Serve the metrics of a database; yields the port."""
    options, stop = ServerOptions(port=port), asyncio.Event()
    listener = bind(options)
    serving = asyncio.create_task(serve(scraping.build(database), listener, options, time.time, stop))
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        await serving


async def scraped(port: int, metric: str) -> str:
    """What a scrape has of a metric, as promtool writes it: `_` where nobody answers."""
    try:
        async with aiohttp.request("GET", f"http://127.0.0.1:{port}/metrics") as answer:
            text = await answer.text()
    except aiohttp.ClientConnectorError:
        return "_"
    (sample,) = re.findall(rf"^{metric} (\S+)$", text, re.MULTILINE)
    return f"{float(sample):g}"


async def test_a_service_that_is_stopped_raises_its_alert_until_it_is_started(
    database: Database, tmp_path: Path
) -> None:
    (alert,) = (alert for alert in alerts(ALERTS.read_text()) if alert["alert"] == NOT_THERE.name)
    (metric,) = set(OURS.findall(alert["expr"]))
    async with service(database) as port:
        before = await scraped(port, metric)
    stopped = await scraped(port, metric)
    async with service(database, port):
        after = await scraped(port, metric)
    seen = [before, stopped, after]
    assert seen == ["1", "_", "1"]
    assert alert["expr"] == f"absent({metric}) or max({metric}) == 0"
    assert [_is_not_there(sample) for sample in seen] == [False, True, False]
    if promtool := shutil.which("promtool"):
        test = {
            "interval": "1m",
            "input_series": [
                {"series": f'{metric}{{instance="one"}}', "values": f"{before}x9 {stopped}x19 {after}x29"}
            ],
            "promql_expr_test": [
                firing(alert["alert"], 9, 0),
                firing(alert["alert"], 25, 1),
                firing(alert["alert"], 50, 0),
            ],
        }
        path = tmp_path / "tests.yml"
        path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}))
        code, output = ran(promtool, "test", "rules", str(path))
        assert code == 0, output


def _is_not_there(sample: str) -> bool:
    """The alert's expression for the only instance: no sample, or 0."""
    return sample in ("_", "0")


def test_prometheus_accepts_the_alerts(promtool: str) -> None:
    code, output = ran(promtool, "check", "rules", str(ALERTS))
    assert code == 0, output
    assert f"{len(RULES)} rules found" in output


def test_prometheus_raises_and_clears_each_alert(promtool: str, tmp_path: Path) -> None:
    text = ALERTS.read_text()
    found = alerts(text)
    (absent,) = (alert for alert in found if "absent(" in alert["expr"])
    tests = [raised_and_cleared(found), absent_and_back(absent)]
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    code, output = ran(promtool, "test", "rules", str(path))
    assert code == 0, output
    blind = tmp_path / "alerts.yml"
    blind.write_text(text.replace("> 93600", "> 936000"))
    path.write_text(path.read_text().replace(str(ALERTS), str(blind)))
    code, output = ran(promtool, "test", "rules", str(path))  # the control
    assert code != 0
    assert "VaulteventsReportOld" in output
