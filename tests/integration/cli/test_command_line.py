"""What every command has: the version, `-h`, and completion in the shell."""

from __future__ import annotations

import pytest

from vaultevents import __version__
from vaultevents.cli import COMMANDS, build

pytestmark = pytest.mark.integration


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        build()(list(arguments), prog_name="vaultevents")
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == f"vaultevents {__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("status",), ("webhook",), ("webhook", "pause")])
def test_the_short_option_for_help(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    short = run(capsys, *arguments, "-h")
    assert short == run(capsys, *arguments, "--help")
    assert short.startswith(" ".join(("Usage: vaultevents", *arguments)))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    monkeypatch.setenv("_VAULTEVENTS_COMPLETE", f"source_{shell}")
    assert f"_VAULTEVENTS_COMPLETE=complete_{shell}" in run(capsys)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("vaultevents ", [*COMMANDS]),
        ("vaultevents stat", ["status"]),
        ("vaultevents webhook re", ["remove", "resend", "recover"]),
        ("vaultevents status --w", ["--watch"]),
    ],
)
def test_commands_and_options_are_completed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, found: list[str]
) -> None:
    monkeypatch.setenv("_VAULTEVENTS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    assert sorted(run(capsys).split()) == sorted(found)


@pytest.mark.parametrize(
    "arguments",
    [
        ("event", "list", "--type", "sunset"),
        ("event", "list", "--limit", "0"),
        ("delivery", "list", "--state", "lost"),
        ("delivery", "show", "one"),
        ("status", "--watch", "--exit-code"),
    ],
)
def test_wrong_usage_is_code_2(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        build()(list(arguments), prog_name="vaultevents")
    assert ended.value.code == 2
    assert "Usage: vaultevents" in capsys.readouterr().err
