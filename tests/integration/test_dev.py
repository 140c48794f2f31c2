"""`dev.py X` runs `vaultevents X`, as the README says: its own words, for developers, must not be the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vaultevents.cli import COMMANDS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def test_no_word_of_its_own_hides_a_command() -> None:
    own = set(re.findall(r'if command == "([\w-]+)"', (ROOT / "dev.py").read_text()))
    assert own >= {"test", "bench"}
    assert own & COMMANDS.keys() == set()


def test_the_readme_names_only_commands_that_there_are() -> None:
    named = set(re.findall(r"^\$ python3 dev\.py ([\w-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named >= {"demo", "check", "run"}
    assert named <= COMMANDS.keys() | {"test", "bench", "anvil"}
