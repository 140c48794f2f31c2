"""The demo, as somebody runs it who has nothing but this program."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from pathlib import Path

import psutil
import pytest

from command_line import CommandLine
from timeouts import WAIT_TIMEOUT_S

pytestmark = pytest.mark.e2e

LOSING_DEMO = str(Path(__file__).with_name("losing_demo.py"))


@pytest.fixture
def shell(tmp_path: Path) -> CommandLine:
    (tmp_path / "tmp").mkdir()
    return CommandLine.of(tmp_path, TMPDIR=str(tmp_path / "tmp"))


def leftovers(shell: CommandLine) -> list[str]:
    """Files that are left in the home, and processes that still name it."""
    home = str(shell.home)
    processes = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    files = [str(path) for path in shell.home.rglob("*") if path.name != "tmp"]
    return files + [line for line in processes if home in line]


async def test_once(shell: CommandLine) -> None:
    """The operator's own settings are nothing to the demo."""
    environment = {"VAULTEVENTS_DATABASE_URL": "postgresql://me@127.0.0.1:1/production", "VAULTEVENTS_CHAIN_ID": "1"}
    done = (await shell.run("demo", "--once", "--json", **environment)).ok()
    result = done.json
    assert result["event_types"]["funding_received"] >= 3
    assert result["event_types"]["withdrawal_claimed"] >= 2
    assert (result["lost"], result["extra"]) == (0, 0)
    assert result["verified"] == result["deliveries"] > 0
    assert len(done.stdout.splitlines()) == 1
    assert leftovers(shell) == []


async def test_a_demo_that_loses_something_says_so(shell: CommandLine) -> None:
    losing = CommandLine(shell.home, shell.environment, (LOSING_DEMO,))
    done = await losing.run("demo", "--once", "--json")
    assert (done.code, done.words) == (1, [])
    assert done.json["lost"] == 2
    assert done.json["extra"] == 0
    assert done.json["verified"] == done.json["deliveries"] - 1
    assert leftovers(shell) == []


async def test_lines_in_a_pipe_until_sigterm(shell: CommandLine) -> None:
    running = await shell.start("demo")
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while running.stdout_so_far.count("deliveries verified") < 2:
            await asyncio.sleep(0.05)
    ended = (await running.end(signal.SIGTERM)).ok()
    *lines, summary = ended.stdout.splitlines()
    assert all(line.startswith("block ") and "\x1b" not in line for line in lines)
    assert " 0 lost, 0 extra" in summary
    assert leftovers(shell) == []


async def test_a_reader_that_leaves_ends_it(shell: CommandLine) -> None:
    process = await asyncio.create_subprocess_shell(
        f"{sys.executable} -m vaultevents demo | head --lines=1; exit ${{PIPESTATUS[0]}}",
        executable="/bin/bash",
        cwd=shell.home,
        env=shell.environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), WAIT_TIMEOUT_S)
    assert (process.returncode, stdout.count(b"\n")) == (1, 1)
    assert [line for line in stderr.splitlines() if not line.startswith(b"{")] == []
    assert leftovers(shell) == []


async def test_a_table_on_a_terminal_until_ctrl_c(shell: CommandLine) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    os.set_blocking(ours, False)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vaultevents", "demo"),
        cwd=shell.home,
        env=shell.environment | {"TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    screen = bytearray()
    try:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while screen.count(b"withdrawal_claimed") < 4:
                screen += await read(ours)
            process.send_signal(signal.SIGINT)
            while process.returncode is None or screen.count(b" lost, ") == 0:
                screen += await read(ours)
    finally:
        if process.returncode is None:
            process.kill()
        os.close(ours)
    text = screen.decode()
    assert process.returncode == 0, text[-2000:]
    assert "deliveries verified" in text
    assert "tried again" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is hidden and comes back"
    summary = text.split("\x1b[?25h")[-1].strip().splitlines()[-1]
    assert "0 lost, 0 extra" in summary
    assert "Traceback" not in text
    assert leftovers(shell) == []


async def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except BlockingIOError:
        await asyncio.sleep(0.05)
    except OSError:  # the other end is closed
        await asyncio.sleep(0.05)
    return b""
