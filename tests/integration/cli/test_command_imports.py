"""A command imports its own module and what that needs, so that the command line starts quickly."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vaultevents.cli import COMMANDS, build, load

pytestmark = pytest.mark.integration

STORAGE = {"asyncpg", "vaultevents.store"}
SERVICE = {"fastapi", "uvicorn", "vaultevents.api", "vaultevents.daemon", "vaultevents.dispatch"}
WEB3 = {"web3", "eth_abi"}
COMMAND_MODULES = {f"vaultevents.cli.{name.replace('-', '_')}" for name in COMMANDS}


def imported_by(code: str) -> set[str]:
    """Every module that a new interpreter has imported after `code`."""
    program = f"import sys\nimport vaultevents.cli as cli\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_begins_its_help(name: str) -> None:
    command = load(name)
    assert command.name == name
    paragraph = " ".join(command.help.split("\n\n")[0].split())
    assert f"{paragraph} ".startswith(f"{COMMANDS[name]} ")


def test_the_command_line_alone_imports_no_command() -> None:
    found = imported_by("cli.build()")
    assert found & (COMMAND_MODULES | STORAGE | SERVICE | {"aiohttp", "vaultevents.config"}) == set()


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("call", STORAGE | SERVICE | {"prometheus_client", "vaultevents.chain", "vaultevents.config"}),
        ("init", STORAGE | SERVICE | {"aiohttp", "vaultevents.chain"}),
        ("vault", SERVICE | WEB3 | {"aiohttp", "vaultevents.chain", "vaultevents.watch"}),
        ("key", SERVICE | {"aiohttp", "vaultevents.chain", "vaultevents.watch"}),
        ("replay", SERVICE),
        ("run", {"vaultevents.devnet"} | WEB3),
    ],
)
def test_a_command_imports_only_what_it_needs(name: str, absent: set[str]) -> None:
    found = imported_by(f"cli.load({name!r})")
    assert found & absent == set()
    assert found & COMMAND_MODULES == {f"vaultevents.cli.{name}"}


def test_a_needless_import_is_seen() -> None:
    assert imported_by("cli.load('run')") >= STORAGE | SERVICE


def test_the_import_of_web3_leaves_deeply_nested_json_refused() -> None:
    """A dependency of web3 raises the recursion limit, and the JSON of a gateway could then overflow the stack."""
    code = """
import json, threading
from vaultevents.chain.execution.contracts import event_topic
before = sys.getrecursionlimit(), sys.setrecursionlimit
uses = [threading.Thread(target=event_topic, args=("VaultHub", "VaultConnected")) for _ in range(3)]
for use in uses: use.start()
for use in uses: use.join()
assert (sys.getrecursionlimit(), sys.setrecursionlimit) == before
try: json.loads("[" * 10**6)
except RecursionError: import wave  # a module that says so
"""
    assert imported_by(code) >= {*WEB3, "py_ecc", "wave"}


def test_the_help_lists_every_command_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build()(["--help"], prog_name="vaultevents")
    listed = capsys.readouterr().out.partition("Commands:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in listed.splitlines()] == list(COMMANDS)
