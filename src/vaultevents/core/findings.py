"""What a check found out about one subject, and the lines and the verdict that report it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Result = Literal["ok", "warning", "failed"]

MARKS: Final[dict[Result, str]] = {"ok": "✓", "warning": "!", "failed": "✗"}
ASCII_MARKS: Final[dict[Result, str]] = {"ok": "ok  ", "warning": "!   ", "failed": "FAIL"}

_ADVICE = re.compile(
    r"[:;] ((?:wait|see|check|correct|name|point|fix|grant|give|make|set|start|install|restore|use|raise|add|"
    r"find out|remove|write|let|choose|end|connect|put|keep|replace)\b.*)$",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried: what it is or what happened in `detail`, and what to do about it in `advice`.

    A warning does not fail the check.
    """

    subject: str
    result: Result
    detail: str
    advice: str = ""

    def payload(self) -> dict[str, Any]:
        """Return the finding as `check --json` prints it."""
        return {
            "what": self.subject,
            "ok": self.result != "failed",
            "detail": self.detail,
            "result": self.result,
            "advice": self.advice,
        }

    def line(self, marks: dict[Result, str] = MARKS) -> str:
        """Return the finding as one line."""
        text = self.detail
        if self.advice:
            text = f"{text}. {self.advice}."
        return f"{marks[self.result]} {self.subject}: {text}"


def passed(subject: str, fact: str) -> Finding:
    """Make the finding that a subject works."""
    return Finding(subject, "ok", fact)


def warned(subject: str, detail: str, advice: str = "") -> Finding:
    """Make the finding that a subject works with a restriction, or could not be tried."""
    return Finding(subject, "warning", *_with_advice(detail, advice))


def failed(subject: str, problem: str, advice: str = "") -> Finding:
    """Make the finding that a subject does not work. `advice` counts where the problem names none."""
    return Finding(subject, "failed", *_with_advice(problem, advice))


def _with_advice(problem: str, advice: str) -> tuple[str, str]:
    """Split the sentence of an error, `what happened: what to do`, into its two parts."""
    problem = " ".join(problem.split()).rstrip(".")
    if found := _ADVICE.search(problem):
        problem, advice = problem[: found.start()], found[1]
    return problem, advice[:1].upper() + advice[1:].rstrip(".")


def verdict(findings: Sequence[Finding]) -> str:
    """Sum up all findings in one sentence."""
    failures = [finding.subject for finding in findings if finding.result == "failed"]
    warnings = sum(finding.result == "warning" for finding in findings)
    more = f" {warnings} {'warning' if warnings == 1 else 'warnings'}." if warnings else ""
    if not failures:
        return f"Everything that is configured works.{more}"
    return f"{len(failures)} of {len(findings)} checks failed: {', '.join(dict.fromkeys(failures))}.{more}"
