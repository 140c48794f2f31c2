"""Lock files pin everything by hash and name no host; what the source imports is in the lock (rule T19)."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
NPM_FOLDERS = [file.parent for file in sorted(ROOT.glob("*/package.json")) + sorted(ROOT.glob("tests/*/package.json"))]

NPMRC = "omit-lockfile-registry-resolved=true\n"
_PIN = re.compile(
    r"(?P<name>[a-z0-9]+(?:-[a-z0-9]+)*)==(?P<version>[0-9][0-9a-z.]*)"
    r"(?: ; [a-z_]+ [^#\\@]+?)?"
    r"(?: --hash=sha256:[0-9a-f]{64})+"
)


def logical_lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines()]


def pins(text: str) -> dict[str, str]:
    """Name -> version of every requirement in a lock."""
    found = (_PIN.fullmatch(line) for line in logical_lines(text))
    return {pin["name"]: pin["version"] for pin in found if pin}


def bad_requirements(text: str) -> list[str]:
    """The logical lines that are anything but one pin, an optional marker and its sha256 hashes."""
    return [line for line in logical_lines(text) if not _PIN.fullmatch(line)]


def bad_manifest(text: str) -> list[str]:
    """What npm writes and a committed file must not hold: hosts, download places."""
    words = ("://", '"resolved"', '"funding"')
    return [word for word in words if word in text]


def without_integrity(text: str) -> list[str]:
    """The packages of a package-lock.json, other than our own, that carry no sha512 integrity."""
    packages = json.loads(text)["packages"]
    return [name for name, of in packages.items() if name and not of.get("integrity", "").startswith("sha512-")]


def bad_npmrc(text: str) -> list[str]:
    return [line for line in text.splitlines() if line != NPMRC.strip()]


def third_party(sources: Iterable[str]) -> set[str]:
    """The first names of all absolute imports that are neither ours nor of the standard library."""
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Import(names=names):
                    found |= {name.name for name in names}
                case ast.ImportFrom(module=str(module), level=0):
                    found.add(module)
    return {name.split(".")[0] for name in found} - sys.stdlib_module_names - {"vaultevents"}


def unlocked(imports: Iterable[str], providers: Mapping[str, Iterable[str]], locked: set[str]) -> list[str]:
    """The imports that no locked distribution provides."""
    return sorted(name for name in imports if not {normal(dist) for dist in providers.get(name, ())} & locked)


def normal(name: str) -> str:
    """A distribution name in the form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: Iterable[str]) -> set[str]:
    """The distribution names of requirement strings."""
    return {normal(re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0]) for text in requirements}


def project() -> tuple[set[str], set[str]]:
    """The names that pyproject.toml asks for: to run, and for the tests."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return declared(config["project"]["dependencies"]), declared(config["dependency-groups"]["test"])


@pytest.mark.parametrize("name", sorted(file.name for file in ROOT.glob("requirements*.lock")))
def test_a_requirements_lock_holds_hashed_pins_and_nothing_else(name: str) -> None:
    text = (ROOT / name).read_text()
    assert bad_requirements(text) == []
    assert "://" not in text
    assert len(pins(text)) > 20


def test_the_locks_follow_the_project_file() -> None:
    core, tests = (pins((ROOT / name).read_text()) for name in ("requirements.lock", "requirements-test.lock"))
    run, test = project()
    assert run - core.keys() == set()
    assert test - tests.keys() == set()
    assert core.items() - tests.items() == set()  # the test environment runs what users run


def test_the_npm_folders_are_found() -> None:
    assert {folder.name for folder in NPM_FOLDERS} == {"contracts", "browser"}


@pytest.mark.parametrize("name", ["package.json", "package-lock.json"])
@pytest.mark.parametrize("folder", NPM_FOLDERS, ids=lambda folder: folder.name)
def test_the_npm_files_name_no_host(folder: Path, name: str) -> None:
    assert bad_manifest((folder / name).read_text()) == []


@pytest.mark.parametrize("folder", NPM_FOLDERS, ids=lambda folder: folder.name)
def test_the_npm_lock_is_hashed_and_follows_its_manifest(folder: Path) -> None:
    text = (folder / "package-lock.json").read_text()
    assert without_integrity(text) == []
    manifest, top = json.loads((folder / "package.json").read_text()), json.loads(text)["packages"][""]
    kinds = ("dependencies", "devDependencies", "optionalDependencies")
    assert any(manifest.get(kind) for kind in kinds)
    for kind in kinds:
        assert top.get(kind) == manifest.get(kind)


@pytest.mark.parametrize("folder", NPM_FOLDERS, ids=lambda folder: folder.name)
def test_the_npm_settings_are_one_line(folder: Path) -> None:
    assert (folder / ".npmrc").read_text() == NPMRC


def test_whatever_the_source_imports_is_locked() -> None:
    imports = third_party(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    assert "msgspec" in imports  # the reader of imports can see
    assert unlocked(imports, packages_distributions(), set(pins((ROOT / "requirements.lock").read_text()))) == []


HASH = f"--hash=sha256:{'ab' * 32}"


@pytest.mark.parametrize(
    "line",
    [
        "# made by a tool",
        "--index-url https://registry.example/simple",
        "-i simple",
        "--extra-index-url simple",
        "--find-links wheels",
        "-f wheels",
        "-r other.lock",
        "-e .",
        "package==1.0",
        f"package>=1.0 {HASH}",
        f"package==1.0 --hash=sha256:{'ab' * 31}",
        f"package==1.0 --hash=md5:{'ab' * 16}",
        f"package==1.0 {HASH} # via other",
        f"package @ https://registry.example/package.whl {HASH}",
        f"package==1.0 ; python_version < '3.12' @ file {HASH}",
    ],
)
def test_a_bad_requirement_is_seen(line: str) -> None:
    good = f"first==1.0 \\\n    {HASH} \\\n    {HASH}\nsecond==2.0.post1 ; sys_platform == 'win32' \\\n    {HASH}\n"
    assert bad_requirements(good) == []
    assert pins(good) == {"first": "1.0", "second": "2.0.post1"}
    assert bad_requirements(f"{good}{line}\n") == [line]


@pytest.mark.parametrize(
    ("check", "text", "seen"),
    [
        (bad_manifest, '{"a": {"resolved": "x"}}', ['"resolved"']),
        (bad_manifest, '{"homepage": "git://host/x"}', ["://"]),
        (bad_manifest, '{"funding": []}', ['"funding"']),
        (bad_manifest, '{"version": "1.0"}', []),
        (bad_npmrc, f"registry=host\n{NPMRC}", ["registry=host"]),
        (bad_npmrc, NPMRC, []),
        (without_integrity, '{"packages": {"": {}, "a": {}, "b": {"integrity": "sha1-x"}}}', ["a", "b"]),
        (without_integrity, '{"packages": {"": {}, "a": {"integrity": "sha512-x"}}}', []),
    ],
)
def test_a_bad_npm_file_is_seen(check: Callable[[str], list[str]], text: str, seen: list[str]) -> None:
    assert check(text) == seen


def test_an_unlocked_import_is_seen() -> None:
    imports = third_party(
        ["import os, aiohttp.web\nfrom . import near", "def f():\n    from yaml import load\nimport vaultevents.core"]
    )
    assert imports == {"aiohttp", "yaml"}
    providers = {"aiohttp": ["aiohttp"], "yaml": ["PyYAML"]}
    assert unlocked(imports, providers, {"aiohttp"}) == ["yaml"]
    assert unlocked(imports, providers, {"aiohttp", "pyyaml"}) == []
    assert unlocked(imports, {}, {"aiohttp", "pyyaml"}) == ["aiohttp", "yaml"]
