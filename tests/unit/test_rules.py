"""Every rule that code or docs cite is stated in `docs/rules.md`, under the one form `rule C9`, and nothing else is.

The checkers are pure functions over `{path: text}`. For each kind of breach a small broken repository shows that its
checker finds it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from vaultevents.api.app import application
from vaultevents.api.documentation import describe
from vaultevents.cli import COMMANDS, build, load

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/rules.md"
SOURCE = "src/vaultevents/"
THIS = Path(__file__).resolve().relative_to(ROOT).as_posix()
FOLDERS = ("bench", "config", "deploy", "docs", "src", "tests")
SUFFIXES = {".md", ".py", ".sql", ".toml", ".yaml", ".yml"}
NOT_READ = {THIS, "pyproject.toml"}  # this file holds breaches on purpose; ruff's codes look like rules

SPACE = r"\s+(?:(?:#|--|>)\s+)?"
CODE = r"[ACDEIPT][1-9][0-9]?"
ANY_CODE = re.compile(rf"(?<!\w){CODE}(?!\w)")
CITATION = re.compile(rf"\b[Rr]ules?{SPACE}{CODE}(?!\w)(?:(?:,{SPACE}|{SPACE}(?:and|or|to){SPACE}){CODE}(?!\w))*")
RANGE = re.compile(rf"({CODE}){SPACE}to{SPACE}({CODE})")
DECISION = re.compile(rf"\b[Dd]ecisions?{SPACE}(\d{{4}})\b")

ELSEWHERE = re.compile(
    r"""\b(?:interface|reliability|onchain|beacon|decisions|architecture)(?:\.md)?\s§   # a section of no page here
    | (?<![\w/.-])(?:interface|reliability|onchain|beacon|decisions|language)\.md\b
    | (?<![\w/.-])(?:spec|design)/\w+\.md\b
    | \breliability\s[A-Z]\d
    """,
    re.VERBOSE,
)
"""Pages that are not part of this repository."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the page."""

    code: str
    text: str
    enforced: tuple[str, ...]
    proved: tuple[str, ...]
    tests: tuple[str, ...]


def rules(page: str) -> list[Rule]:
    """The rows `| code | text | enforced in | proved by |` of all tables."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and re.fullmatch(CODE, cells[0]):
            enforced, proved = (re.findall(r"`([^`]+)`", cell) for cell in cells[2:])
            files = tuple(name for name in proved if "/" in name)
            tests = tuple(name for name in proved if "/" not in name)
            found.append(Rule(cells[0], cells[1], tuple(map(resolved, enforced)), files, tests))
    return found


def resolved(name: str) -> str:
    """Paths of the package are written without `src/vaultevents/`."""
    return f"{SOURCE}{name}" if re.fullmatch(r"[\w/]+\.(?:py|sql)", name) and not name.startswith("tests/") else name


def cited(text: str) -> Iterator[str]:
    """All codes of the citations, with those between the ends of a range."""
    for citation in CITATION.finditer(text):
        yield from ANY_CODE.findall(citation[0])
        for first, last in RANGE.findall(citation[0]):
            yield from (f"{first[0]}{number}" for number in range(int(first[1:]), int(last[1:]) + 1))


def outside_citations(text: str) -> Iterator[tuple[int, str]]:
    """Line and code of every code that is not cited as `rule C9`."""
    for code in ANY_CODE.finditer(CITATION.sub(lambda found: re.sub(r"\S", " ", found[0]), text)):
        yield text.count("\n", 0, code.start()) + 1, code[0]


def literals(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of the string literals that are not docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def undefined(page: str, texts: Mapping[str, str]) -> Iterator[str]:
    """A cited rule is stated on the page."""
    known = {rule.code for rule in rules(page)}
    for path, text in {**texts, PAGE: page}.items():
        yield from (f"{path} cites rule {code}, which {PAGE} does not state" for code in sorted({*cited(text)} - known))


def twice(page: str, _: Mapping[str, str]) -> Iterator[str]:
    """A code stands for one rule."""
    for code, times in Counter(rule.code for rule in rules(page)).items():
        if times > 1:
            yield f"{PAGE} states rule {code} {times} times"


def incomplete(page: str, _: Mapping[str, str]) -> Iterator[str]:
    """A rule has a sentence, a file that enforces it and a test file that proves it."""
    for rule in rules(page):
        if not (rule.text.endswith(".") and rule.enforced and rule.proved):
            yield f"{PAGE} has no text, no enforcing file or no test file for rule {rule.code}"


def missing(page: str, texts: Mapping[str, str]) -> Iterator[str]:
    """Files and tests that the page names exist."""
    for rule in rules(page):
        for path in (*rule.enforced, *rule.proved):
            if path not in texts:
                yield f"{PAGE} names {path} for rule {rule.code}, which does not exist"
        for test in rule.tests:
            if not any(re.search(rf"\bdef {re.escape(test)}\(", texts.get(path, "")) for path in rule.proved):
                yield f"{PAGE} names {test} for rule {rule.code}, which is in none of its test files"


def uncited(page: str, texts: Mapping[str, str]) -> Iterator[str]:
    """At least one of the files that the page names for a rule cites it."""
    for rule in rules(page):
        if rule.code not in {code for path in (*rule.enforced, *rule.proved) for code in cited(texts.get(path, ""))}:
            yield f"no file that {PAGE} names for rule {rule.code} cites it"


def bare(_: str, texts: Mapping[str, str]) -> Iterator[str]:
    """A code is cited as `rule C9`, `rules C9 and D13` or `rules A7 to A14`."""
    for path, text in texts.items():
        yield from (f"{path}:{line} has {code} alone: write 'rule {code}'" for line, code in outside_citations(text))


def foreign(_: str, texts: Mapping[str, str]) -> Iterator[str]:
    """No text points to a page that the repository does not have."""
    for path, text in texts.items():
        for found in ELSEWHERE.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path}:{line} cites '{found[0]}', a page that is not here: cite a rule or a page of docs/"


def unknown_decisions(_: str, texts: Mapping[str, str]) -> Iterator[str]:
    """A cited decision has a record."""
    known = {Path(path).name[:4] for path in texts if path.startswith("docs/decisions/")}
    for path, text in texts.items():
        if path != "docs/decisions/README.md":  # which explains missing numbers
            yield from (f"{path} cites decision {n}, which has no record" for n in {*DECISION.findall(text)} - known)


def shown(_: str, texts: Mapping[str, str]) -> Iterator[str]:
    """Texts that somebody is shown, so all string literals of the package, cite no code."""
    for path, text in texts.items():
        if path.startswith(SOURCE) and path.endswith(".py"):
            for line, literal in literals(text):
                yield from (f"{path}:{line} shows {code}: leave it out" for code in ANY_CODE.findall(literal))


CHECKS: dict[str, Callable[[str, Mapping[str, str]], Iterator[str]]] = {
    check.__name__: check
    for check in (undefined, twice, incomplete, missing, uncited, bare, foreign, unknown_decisions, shown)
}


def breaches(page: str, texts: Mapping[str, str]) -> list[str]:
    """Every breach as `check: where and what`."""
    return [f"{name}: {breach}" for name, check in CHECKS.items() for breach in check(page, texts)]


def repository() -> dict[str, str]:
    """The files of this repository; of those that hold neither code nor prose only the names."""
    files = [*ROOT.glob("*.*"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.*"))]
    paths = {file.relative_to(ROOT).as_posix(): file for file in sorted(files) if file.is_file()}
    read = {name for name, file in paths.items() if file.suffix in SUFFIXES} - NOT_READ
    return {name: file.read_text() if name in read else "" for name, file in paths.items()}


def test_every_citation_has_a_rule_and_every_rule_a_citation() -> None:
    texts = repository()
    page = texts.pop(PAGE)
    assert len(rules(page)) > 70
    assert not (found := breaches(page, texts)), "\n".join(found)


def test_the_description_of_the_api_cites_no_rule() -> None:
    app = application(cast(Any, None))  # nothing of it is used before a request
    document = describe(app).decode()
    assert '"/v1/account/webhooks"' in document
    assert not ANY_CODE.findall(document)


def test_no_help_cites_a_rule() -> None:
    texts = dict(helps(typer.main.get_command(build()), "vaultevents"))
    for name in COMMANDS:
        texts |= helps(load(name), f"vaultevents {name}")
    assert len(texts) > 20
    assert all("Usage: vaultevents" in text for text in texts.values())
    assert {name: found for name, text in texts.items() if (found := ANY_CODE.findall(text))} == {}


def helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """The `--help` of a command and of all below it; the classes are those of click, in whatever package."""
    context = command.make_context(name, [], resilient_parsing=True)
    yield name, command.get_help(context)
    for below in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from helps(command.get_command(context, below), f"{name} {below}")


OUTBOX = "src/vaultevents/store/outbox.py"
LOGS = "src/vaultevents/chain/execution/logs.py"

GOOD_PAGE = """
| Rule | What holds | Enforced in | Proved by |
|---|---|---|---|
| C9 | The cursor moves with the events. | `store/outbox.py` | `tests/test_outbox.py`: `test_both_or_none` |
| C10 | Logs are queried by topic (rule C9). | `chain/execution/logs.py` | `tests/test_logs.py` |
"""
GOOD_TEXTS = {
    OUTBOX: '"""Commit events and the cursor (rule C9; decision 0001)."""\nPARAMETER = "P256"\n',
    LOGS: '"""Query by topic.\n\nFor more see rules\nC9 and C10.\n"""\nE2E = 0xC9\n',
    "tests/test_outbox.py": '"""Rule C9."""\n\ndef test_both_or_none():\n    assert "K1" < "RS256"\n',
    "tests/test_logs.py": '"""Rules C9 to C10."""\n',
    "docs/decisions/0001-lock.md": "# One lock\n",
    "docs/api.md": "See architecture.md and [the beacon chain](../docs/beacon.md).\n",
}


def test_a_repository_in_order_has_no_breach() -> None:
    assert breaches(GOOD_PAGE, GOOD_TEXTS) == []


BROKEN: list[tuple[str, str, dict[str, str], str]] = [
    ("undefined", "", {"src/vaultevents/a.sql": "-- the lock (rules\n-- C9 and C11)\n"}, "a.sql cites rule C11"),
    ("undefined", "| D1 | See rule D2. | `store/outbox.py` | `tests/test_logs.py` |\n", {}, f"{PAGE} cites rule D2"),
    ("twice", "| C9 | Again. | `store/outbox.py` | `tests/test_outbox.py` |\n", {}, "states rule C9 2 times"),
    ("incomplete", "| C11 | No test. | `store/outbox.py` | |\n", {}, "for rule C11"),
    ("incomplete", "| C11 | No code. | | `tests/test_logs.py` |\n", {}, "for rule C11"),
    ("incomplete", "| C11 | | `store/outbox.py` | `tests/test_logs.py` |\n", {}, "for rule C11"),
    ("missing", "| C11 | Gone. | `store/no.py` | `tests/test_logs.py` |\n", {}, "names src/vaultevents/store/no.py"),
    ("missing", "| C11 | Gone. | `store/outbox.py` | `tests/test_no.py` |\n", {}, "names tests/test_no.py"),
    ("missing", "| C11 | Gone. | `store/outbox.py` | `tests/test_logs.py`: `test_no` |\n", {}, "names test_no"),
    ("uncited", "| C11 | Nowhere. | `store/outbox.py` | `tests/test_logs.py` |\n", {}, "for rule C11 cites it"),
    ("bare", "", {"bench/a.py": "# as C9 says\n"}, "bench/a.py:1 has C9 alone"),
    ("bare", "", {"docs/a.md": "\nRule C9, D6 too\nand (C10).\n"}, "docs/a.md:3 has C10 alone"),
    ("bare", "", {"tests/a.py": '"""A claim (rule C9, RFC 7519; C10)."""\n'}, "tests/a.py:1 has C10 alone"),
    ("bare", "", {"tests/a.py": '"""From C9–C10."""\n'}, "tests/a.py:1 has C9 alone"),
    ("foreign", "", {"docs/a.md": "the envelope (interface §2.2)\n"}, "docs/a.md:1 cites 'interface §"),
    ("foreign", "", {"docs/a.md": "as spec/decisions.md says\n"}, "docs/a.md:1 cites 'spec/decisions.md'"),
    ("foreign", "", {"docs/a.md": "after onchain.md\n"}, "docs/a.md:1 cites 'onchain.md'"),
    ("unknown_decisions", "", {"docs/a.md": "by decision 0002\n"}, "docs/a.md cites decision 0002"),
    ("shown", "", {OUTBOX: f'{GOOD_TEXTS[OUTBOX]}TEXT = "refused by rule C9"\n'}, f"{OUTBOX}:3 shows C9"),
    ("shown", "", {OUTBOX: f'{GOOD_TEXTS[OUTBOX]}def f(n):\n    raise ValueError(f"rule C9: {{n}}")\n'}, "shows C9"),
]


@pytest.mark.parametrize(("check", "rows", "texts", "breach"), BROKEN)
def test_each_breach_is_found(check: str, rows: str, texts: dict[str, str], breach: str) -> None:
    found = breaches(GOOD_PAGE + rows, GOOD_TEXTS | texts)
    assert any(text.startswith(f"{check}: ") and breach in text for text in found), found


def test_every_check_has_a_breach_that_it_finds() -> None:
    assert {check for check, *_ in BROKEN} == CHECKS.keys()


def test_a_code_in_a_help_is_found() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command(help="Prune (rule D14).")(lambda: None)
    ((_, text),) = helps(typer.main.get_command(app), "app")
    assert ANY_CODE.findall(text) == ["D14"]


def codes(texts: Collection[str]) -> list[str]:
    return [code for text in texts for code in cited(text)]


def test_what_counts_as_a_citation() -> None:
    assert codes(["rules C9 and D13", "(rule D11)", "Rule A3: x", "rules A1, A2 or A4 to A6"]) == [
        *("C9", "D13", "D11", "A3", "A1", "A2", "A4", "A6", "A4", "A5", "A6")
    ]
    assert codes(["P256, RS256, E2E, 0xC9", "EIP-7251", "M1 F0 P0", "C9"]) == []
