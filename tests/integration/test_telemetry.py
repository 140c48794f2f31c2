"""Logs: what may be in a line, and that writing one never stops the work."""

from __future__ import annotations

import errno
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog

from vaultevents.telemetry import configure_logging, redact

pytestmark = pytest.mark.integration

Form = Literal["auto", "text", "json"]

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = [
        handler for handler in logging.getLogger().handlers if "telemetry" not in type(handler).__module__
    ]
    logging.captureWarnings(False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"the secret {SECRET}, twice: {SECRET}.", "the secret whsec_***, twice: whsec_***."),
        ("whsec_QUJD+/=_- whsec_", "whsec_*** whsec_"),
        ("key=vek_Zm9v-_YmFy;", "key=vek_***;"),
        ("Bearer eyJhbGciOiJSUzI1NiJ9.eyJpYXQiOjF9.c2ln-_, eyJ", "Bearer eyJ***, eyJ"),
        ("at https://node.example/v3/0123abcd now", "at https://node.example now"),
        ("at https://node.example?key=0123abcd", "at https://node.example"),
        ("at https://node.example:8545/x", "at https://node.example:8545"),
        ("at https://[::1]:8545/x", "at https://[::1]:8545"),
        ("at https://me:word@node.example/x", "at https://node.example"),
        ("at HTTPS://me:word@node.example/x", "at HTTPS://node.example"),
        ("at postgresql://me:word@host:5432/db?sslmode=off", "at postgresql://host:5432"),
        ("at postgresql://me:w@rd@host/db", "at postgresql://host"),
        ("at postgresql://me:w/rd@host/db", "at postgresql://***"),
        ("at postgresql://me:12/rd@host/db", "at postgresql://***"),
        ("at postgresql://me:w?rd@host/db", "at postgresql://***"),
        ("at postgresql://me:w#rd@host/db", "at postgresql://***"),
        ("at https://node.example\\key", "at https://node.example"),
        ("at https://node.example#key", "at https://node.example"),
        ("at https://node.example/#1a2b3c4d", "at https://node.example"),
        ("('https://node.example/key', 1)", "('https://node.example', 1)"),
        ('{"url":"https://node.example/key","n":1}', '{"url":"https://node.example","n":1}'),
        ("https://node.example#1a2b3c4d: cannot be reached", "https://node.example#1a2b3c4d: cannot be reached"),
        ("http://127.0.0.1#00ff00ff", "http://127.0.0.1#00ff00ff"),
        ("http://[::1]#00ff00ff; http://b#11111111", "http://[::1]#00ff00ff; http://b#11111111"),
        ("at https://node.example#1a2b3c4d5e", "at https://node.example"),
        ("nothing: to see // here", "nothing: to see // here"),
    ],
)
def test_redaction(text: str, shown: str) -> None:
    assert redact(text) == shown


class Stream(io.StringIO):
    terminal = False

    def isatty(self) -> bool:
        return self.terminal


class Terminal(Stream):
    terminal = True


def stderr(monkeypatch: pytest.MonkeyPatch, stream: Stream | None = None) -> Stream:
    stream = stream or Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def logged(monkeypatch: pytest.MonkeyPatch, form: Form = "json", level: str = "debug", **values: Any) -> str:
    stream = stderr(monkeypatch)
    configure_logging(level, form)
    structlog.get_logger("test").info("it_happened", **values)
    return stream.getvalue()


def test_a_line_is_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    line = logged(monkeypatch, block=5, share=0.5, nothing=None, ok=True, text="two\nlines")
    assert line.count("\n") == 1
    found = json.loads(line)
    assert found.pop("timestamp").endswith("Z")
    assert found == {
        "event": "it_happened",
        "level": "info",
        "block": 5,
        "share": 0.5,
        "nothing": None,
        "ok": True,
        "text": "two\nlines",
    }


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize(
    "value",
    [
        SECRET,
        ["https://host/KEY", SECRET],
        (SECRET,),
        {"inner": {"url": "https://host/KEY", "secret": SECRET}},
        {SECRET: 1},
        {SECRET},
        ValueError(f"no {SECRET} at https://host/KEY"),
        Path("/at", SECRET),
        b"https://host/KEY",
        SECRET.encode(),
    ],
)
def test_no_kind_of_value_carries_a_secret_out(monkeypatch: pytest.MonkeyPatch, form: Form, value: Any) -> None:
    line = logged(monkeypatch, form, value=value)
    assert "it_happened" in line
    assert "MfKQ" not in line
    assert "KEY" not in line


def test_a_traceback_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stderr(monkeypatch)
    configure_logging("info", "json")
    try:
        raise ValueError("https://host/KEY")
    except ValueError:
        structlog.get_logger().exception("failed")
    line = json.loads(stream.getvalue())
    assert "ValueError: https://host" in line["exception"]
    assert "KEY" not in line["exception"].replace("raise ValueError", "").split("ValueError: ")[-1]


def test_the_level_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logged(monkeypatch, level="warning") == ""


def test_auto_is_json_in_a_pipe_and_text_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(logged(monkeypatch, "auto", n=1))["n"] == 1

    stream = stderr(monkeypatch, Terminal())
    configure_logging("info", "auto")
    structlog.get_logger().info("it_happened", n=1)
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize(("value", "coloured"), [("", True), ("1", False)])
def test_no_color_leaves_colours_out_of_a_terminal(monkeypatch: pytest.MonkeyPatch, value: str, coloured: bool) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    stream = stderr(monkeypatch, Terminal())
    configure_logging("info", "auto")
    structlog.get_logger().info("it_happened", n=1)
    assert ("\x1b" in stream.getvalue()) == coloured


def test_what_libraries_log_takes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio's 'Task exception was never retrieved' would otherwise be plain text with whatever is in it."""
    stream = stderr(monkeypatch)
    configure_logging("info", "json")
    configure_logging("info", "json")
    logging.getLogger("asyncio").error("it went wrong at %s", "https://host/KEY")
    logging.getLogger("aiohttp").debug("too quiet")
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["event"], found["level"], found["logger"]) == ("it went wrong at https://host", "error", "asyncio")


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC])
def test_a_log_that_cannot_be_written_stops_nobody(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    class Broken(Stream):
        def write(self, _: str) -> int:
            raise OSError(number, "no")

        def flush(self) -> None:
            raise OSError(number, "no")

    stderr(monkeypatch, Broken())
    configure_logging("info", "json")
    structlog.get_logger().info("it_happened")
