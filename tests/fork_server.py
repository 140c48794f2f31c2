"""Start commands as forks of a process that has imported everything, so that tests do not import it for each command.

A command is a separate process with its own environment, working directory and output, as if it had been started with
`python -m vaultevents`; only its imports are done. The server is single-threaded and has no event loop, so a fork of it
is safe. `CommandLine.freshly` starts a new interpreter instead, for the tests whose subject is the start itself or a
variable that is read during imports (`SSL_CERT_FILE`, those of Python).
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_REQUEST_BYTES = 1 << 20
_START_LIMIT_S = 60.0


class ForkedProcess:
    """A started command, with what tests use of `asyncio.subprocess.Process`."""

    def __init__(
        self, pid: int, ended: asyncio.StreamReader, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader
    ) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._end = asyncio.create_task(self._ended(ended))

    async def _ended(self, ended: asyncio.StreamReader) -> int:
        status = await ended.read()
        assert status, "the fork server was killed"
        self.returncode = int(status)
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def send_signal(self, number: signal.Signals) -> None:
        """Raises `ProcessLookupError` for a process that has ended, as asyncio does."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def start(
    program: Sequence[str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    output: int | None = None,
) -> ForkedProcess:
    """Start `python *program *arguments`; `output` is a file for stdout and stderr instead of two pipes.

    `program` is `-m` and a module, or the path of a script.
    """
    (ended, end), (stdout, out), (stderr, err) = os.pipe(), os.pipe(), os.pipe()
    try:
        request = {"program": [*program], "arguments": [*arguments], "environment": {**environment}}
        body = json.dumps(request | {"directory": str(directory)}).encode()
        out_and_err = (out, err) if output is None else (output, output)
        pid = _server().fork(body, (end, *out_and_err))
    finally:
        for written in (end, out, err):
            os.close(written)
    readers = [await _reader(pipe) for pipe in (ended, stdout, stderr)]
    return ForkedProcess(pid, *readers)


async def _reader(pipe: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
    )
    return reader


class _Server:
    """The running server, and the socket on which it takes requests."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            other.set_inheritable(True)
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())],
                env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "TZ": "UTC"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        self._control.settimeout(_START_LIMIT_S)

    def fork(self, request: bytes, files: Sequence[int]) -> int:
        socket.send_fds(self._control, [request], files)
        answer = self._control.recv(64)
        assert answer, "the fork server has ended: see its message on stderr"
        return int(answer)

    def stop(self) -> None:
        self._control.close()  # which the server notices
        self._process.wait()


@cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.stop)
    return server


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork a process for each request, report how it ends; return in the forked process, with its request."""
    running: dict[int, int] = {}  # process id -> the pipe that takes its exit code
    woken, wake = os.pipe()
    waiting = control.fileno()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([waiting, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(running)
        if waiting not in ready:
            continue
        request, files, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 3)
        if not request:
            sys.exit()
        for file in files:
            os.set_inheritable(file, False)
        end, out, err = files
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for file in {*files, *running.values(), woken, wake}:
                os.close(file)
            control.close()
            return dict(json.loads(request))
        running[pid] = end
        for file in {out, err}:
            os.close(file)
        control.send(b"%d" % pid)


def _report_ended(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        end = running.pop(pid)
        try:
            os.write(end, b"%d" % os.waitstatus_to_exitcode(status))
        except BrokenPipeError:  # the test does not wait for it any longer
            pass
        finally:
            os.close(end)


def _become(request: Mapping[str, Any]) -> None:
    """Run the program of `request` in this process to its end."""
    coerced = {name: value for name, value in os.environ.items() if name == "LC_CTYPE"}  # by Python itself
    os.environ.clear()
    os.environ.update(coerced | request["environment"])
    time.tzset()
    os.chdir(request["directory"])
    program, arguments = request["program"], request["arguments"]
    if program[0] == "-m":
        sys.path[0] = request["directory"]
        sys.argv = [program[1], *program[2:], *arguments]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).parent)
        sys.argv = [*program, *arguments]
        runpy.run_path(program[0], run_name="__main__")


def _import_all() -> None:
    from vaultevents.cli import COMMANDS

    for name in COMMANDS:
        import_module(f"vaultevents.cli.{name.replace('-', '_')}")
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _control = socket.socket(fileno=int(sys.argv[1]))
    _control.set_inheritable(False)
    _import_all()
    _become(_serve(_control))
