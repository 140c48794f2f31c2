"""The demo, as somebody runs it who has nothing but this program."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections import Counter
from pathlib import Path

import psutil
import pytest

from command_line import CommandLine
from timeouts import WAIT_TIMEOUT_S
from vaultevents.cli import demo
from vaultevents.core.events import EVENT_TYPES

pytestmark = pytest.mark.e2e

SAMPLE = re.compile(r"--- (\w+): delivered to \S+, verified; sent as (\d+) .*?\n\n(\{\n.*?\n\})\n", re.DOTALL)
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


def repeated(seed: int) -> str:
    """The digest of all events of a short demo, from the ground truth alone."""
    simulation, _ = demo.simulated(seed)
    for _ in range(demo.LIVE_BLOCKS):
        simulation.step()
    return demo.digest((event_id, body) for (_, event_id), body in simulation.expected().items())


async def test_once(shell: CommandLine) -> None:
    """The operator's own settings are nothing to the demo."""
    environment = {"VAULTEVENTS_DATABASE_URL": "postgresql://me@127.0.0.1:1/production", "VAULTEVENTS_CHAIN_ID": "1"}
    done = (await shell.run("demo", "--once", "--json", "--seed", "3", **environment)).ok()
    result = done.json
    assert result["digest"] == repeated(3) != repeated(4), "ids and bodies are those of the seed"
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
    assert "\x1b" not in ended.stdout
    blocks, _, end = ended.stdout.partition("What to do next:")
    assert blocks.startswith("block ")
    samples = re.findall(
        r"--- (\w+): delivered to \S+, verified; sent as (\d+) .*?\n\n(\{\n.*?\n\})\n", blocks, re.DOTALL
    )
    assert Counter(event_type for event_type, _, _ in samples) == Counter(EVENT_TYPES), "each is shown once"
    assert blocks.count("\nwebhook-signature: v1,") == len(EVENT_TYPES)
    for event_type, size, body in samples:
        assert json.loads(body)["event_type"] == event_type
        assert len(json.dumps(json.loads(body), separators=(",", ":"), ensure_ascii=False).encode()) == int(size)
    *next_steps, summary = end.splitlines()
    assert "  vaultevents run " in "\n".join(next_steps)
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
