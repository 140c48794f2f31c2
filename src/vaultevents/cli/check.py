"""check: whether everything that is configured would work."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from vaultevents.cli.options import ConfigOption, JsonOption
from vaultevents.cli.progress import RowProgress
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import complete, put_json, say
from vaultevents.config import Settings
from vaultevents.core.findings import ASCII_MARKS, MARKS, Finding, verdict
from vaultevents.probes.plan import check_all
from vaultevents.telemetry import configure_logging


def check(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """See whether everything that is configured works.

    Nodes, contracts, gateways, database, keys, ports: each is tried by itself, all at the same time. Exit code 1 when
    something does not work; a warning (!) does not count.
    """
    settings = settings_of(config)
    if sys.stderr.isatty() and settings.log.level != "debug":
        configure_logging("error", settings.log.format)  # the findings name every fault, beside the progress bar
    findings = complete(_check(settings))
    failures = sum(finding.result == "failed" for finding in findings)
    if as_json:
        put_json(
            {
                "ok": not failures,
                "verdict": verdict(findings),
                "failed": failures,
                "warnings": sum(finding.result == "warning" for finding in findings),
                "checks": [finding.payload() for finding in findings],
            }
        )
    else:
        _print(findings)
    if failures:
        raise typer.Exit(1)


async def _check(settings: Settings) -> list[Finding]:
    with RowProgress("check", "probes", "probes") as progress:
        return await check_all(settings, progress.advanced)


def _print(findings: Sequence[Finding]) -> None:
    """Print a line for each finding and the verdict, in ASCII where the encoding of stdout has no check mark."""
    encoding = sys.stdout.encoding or "ascii"
    marks = MARKS
    try:
        "".join(MARKS.values()).encode(encoding)
    except UnicodeEncodeError:
        marks = ASCII_MARKS
    for finding in findings:
        say(finding.line(marks).encode(encoding, "replace").decode(encoding))
    say(verdict(findings).encode(encoding, "replace").decode(encoding))
