"""A command on a terminal of its own, whose screen the test reads."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import fork_server
from command_line import PROGRAM, CommandLine
from fork_server import ForkedProcess
from timeouts import WAIT_TIMEOUT_S

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A running command and everything that it has written to its terminal, which is its stdout and stderr."""

    def __init__(self, process: ForkedProcess, terminal: int) -> None:
        self.process = process
        self.written = ""
        self._terminal = terminal

    @property
    def text(self) -> str:
        """What was written, without colours and movements of the cursor."""
        return _ESCAPE.sub("", self.written).replace("\r\n", "\n")

    async def shows(self, text: str, times: int = 1) -> None:
        """Wait until the text was written so often; fails when the command ends before."""
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while self.text.count(text) < times:
                assert self.process.returncode is None, f"ended without '{text}': {self.text}"
                await self._read()

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code, when all output was read."""
        self.process.send_signal(number)
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while self.process.returncode is None:
                await self._read()
            while await self._read():
                pass
        return await self.process.wait()

    async def _read(self) -> bool:
        try:
            part = os.read(self._terminal, 65536)
        except (BlockingIOError, OSError):  # nothing yet, or the other end is closed
            await asyncio.sleep(0.02)
            return False
        self.written += part.decode(errors="replace")
        return True


@asynccontextmanager
async def on_terminal(
    shell: CommandLine, *arguments: str, columns: int = 120, lines: int = 60, **environment: str
) -> AsyncIterator[Terminal]:
    """Start a command on a new terminal; it is killed at the end, if it still runs."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    os.set_blocking(ours, False)
    variables = shell.environment | {"TERM": "xterm-256color"} | environment
    try:
        process = await fork_server.start(PROGRAM, arguments, variables, shell.home, theirs)
        terminal = Terminal(process, ours)
        try:
            yield terminal
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    finally:
        os.close(ours)
        os.close(theirs)
