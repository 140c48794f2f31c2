"""The documentation wraps at 100 characters, avoids the words below, and its links and paths exist."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
WIDTH: Final = 100
WORDS: Final = ("told", "tells", "mend", "mended", "whoever", "hears")
"""Say instead: reported, returns, shows; fix, correct; any caller; is notified."""

_WORD = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|sql))(?::[^`]*)?`")


def read_pages() -> dict[str, str]:
    """Return the pages of the documentation by their paths."""
    paths = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(paths)}


def read_sources() -> dict[str, str]:
    """Return the sources of the package, SQL included, by their paths."""
    paths = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".sql")]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(paths)}


def is_record(name: str) -> bool:
    """Whether the page is a decision record, which names the code of its time."""
    return re.fullmatch(r"docs/decisions/\d{4}-[a-z0-9-]+\.md", name) is not None


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines outside of code blocks and tables, with their numbers."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith("|"):
            yield number, line


def long_lines(pages: Mapping[str, str]) -> list[str]:
    return [
        f"{name}:{number}: {len(line)} characters"
        for name, text in pages.items()
        for number, line in prose(text)
        if len(line) > WIDTH
    ]


def flagged_words(texts: Mapping[str, str]) -> list[str]:
    return [
        f"{name}:{number}: {match[0]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        for match in _WORD.finditer(line)
    ]


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = [line.lstrip("# ") for _, line in prose(text) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(pages: Mapping[str, str], others: Collection[str]) -> list[str]:
    """Return the relative links to a page, file or heading that does not exist."""
    broken = []
    for name, text in pages.items():
        for target in _LINK.findall(_CODE.sub("", text)):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            page = str((ROOT / name).parent.joinpath(path).resolve().relative_to(ROOT)) if path else name
            if not (page in pages or page in others) or (anchor and anchor not in anchors(pages.get(page, ""))):
                broken.append(f"{name}: {target}")
    return broken


def unknown_paths(pages: Mapping[str, str], files: Collection[str]) -> list[str]:
    """Return the paths of code in the pages with which no file ends."""
    return [
        f"{name}: {path}"
        for name, text in pages.items()
        for path in sorted(set(_PATH.findall(text)))
        if not any(f"/{file}".endswith(f"/{path}") for file in files)
    ]


def test_lines_wrap() -> None:
    assert long_lines(read_pages()) == []
    broken = "Short.\n" + "x" * 101 + "\n| " + "x" * 200 + " |\n```\n" + "x" * 200 + "\n```\n"
    assert long_lines({"new.md": broken}) == ["new.md:2: 101 characters"]


def test_the_documentation_avoids_the_words() -> None:
    assert flagged_words(read_pages()) == []
    assert flagged_words({"new.md": "It works.\nThe log Tells it; nothing foretold."}) == ["new.md:2: Tells"]


def test_the_sources_avoid_the_words() -> None:
    assert flagged_words(read_sources()) == []


def test_links_lead_somewhere() -> None:
    pages = read_pages()
    others = {str(path.relative_to(ROOT)) for path in ROOT.glob("*")}
    others |= {"docs/decisions", "docs/reference"}
    others |= {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "pictures").iterdir()}
    assert broken_links(pages, others) == []
    control = {"docs/a.md": "# One two\n[b](b.md) [c](#one-two) [d](#three) [e](https://example.org)"}
    assert broken_links(control, others) == ["docs/a.md: b.md", "docs/a.md: #three"]


def test_paths_of_code_exist() -> None:
    pages = {name: text for name, text in read_pages().items() if not is_record(name)}
    files = {str(path.relative_to(ROOT)) for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.*")}
    assert unknown_paths(pages, {*files, "dev.py"}) == []
    assert unknown_paths({"new.md": "`core/events.py: encode()` and `core/gone.py`"}, files) == ["new.md: core/gone.py"]


def test_every_decision_record_is_in_the_index() -> None:
    pages = read_pages()
    linked = set(_LINK.findall(pages["docs/decisions/README.md"]))
    records = {Path(name).name for name in pages if is_record(name)}
    assert records - linked == set()
