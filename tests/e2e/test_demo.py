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
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from command_line import PROGRAM, CommandLine, Ended
from timeouts import WAIT_TIMEOUT_S
from vaultevents.cli import demo
from vaultevents.core.events import EVENT_TYPES

pytestmark = pytest.mark.e2e

SAMPLE = re.compile(r"--- (\w+): delivered to \S+, verified; sent as (\d+) .*?\n\n(\{\n.*?\n\})\n", re.DOTALL)
LOSING_DEMO = str(Path(__file__).with_name("losing_demo.py"))


@dataclass(frozen=True, slots=True)
class Background:
    """A demo that began with the first test of this file: it mostly waits, while other tests run."""

    shell: CommandLine
    process: subprocess.Popen[str]

    @classmethod
    @contextmanager
    def running(
        cls, home: Path, *program: str, arguments: Sequence[str] = (), **environment: str
    ) -> Iterator[Background]:
        shell = shell_of(home, **environment)
        process = subprocess.Popen(
            [sys.executable, *program, "demo", "--once", "--json", *arguments],
            cwd=shell.home,
            env=shell.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield cls(shell, process)
        finally:
            process.kill()
            process.communicate()

    async def ended(self) -> Ended:
        stdout, stderr = await asyncio.to_thread(self.process.communicate, timeout=WAIT_TIMEOUT_S)
        return Ended(self.process.returncode, stdout, stderr)


def shell_of(home: Path, **environment: str) -> CommandLine:
    (home / "tmp").mkdir()
    return CommandLine.of(home, TMPDIR=str(home / "tmp"), **environment)


@pytest.fixture
def shell(tmp_path: Path) -> CommandLine:
    return shell_of(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    settings = {"VAULTEVENTS_DATABASE_URL": "postgresql://me@127.0.0.1:1/production", "VAULTEVENTS_CHAIN_ID": "1"}
    home = tmp_path_factory.mktemp("once")
    with Background.running(home, *PROGRAM, arguments=("--seed", "3"), **settings) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def losing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    with Background.running(tmp_path_factory.mktemp("losing"), LOSING_DEMO) as running:
        yield running


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


async def test_once(once: Background) -> None:
    """The operator's own settings are nothing to the demo."""
    done = (await once.ended()).ok()
    result = done.json
    assert result["digest"] == repeated(3) != repeated(4), "ids and bodies are those of the seed"
    assert result["event_types"]["funding_received"] >= 3
    assert result["event_types"]["withdrawal_claimed"] >= 2
    assert (result["lost"], result["extra"]) == (0, 0)
    assert result["verified"] == result["deliveries"] > 0
    assert len(done.stdout.splitlines()) == 1
    assert leftovers(once.shell) == []


async def test_a_demo_that_loses_something_says_so(losing: Background) -> None:
    done = await losing.ended()
    assert (done.code, done.words) == (1, [])
    assert done.json["lost"] == 2
    assert done.json["extra"] == 0
    assert done.json["verified"] == done.json["deliveries"] - 1
    assert leftovers(losing.shell) == []


async def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except BlockingIOError:
        await asyncio.sleep(0.05)
    except OSError:  # the other end is closed
        await asyncio.sleep(0.05)
    return b""
