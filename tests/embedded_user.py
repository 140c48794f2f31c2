"""Real user processes of an embedded PostgreSQL, and looks at its server from outside, for the tests of both."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import asyncpg
import psutil  # type: ignore[import-untyped, unused-ignore]

from vaultevents.store.postgres import layout

# Joins, prints the DSN, and holds its claim until its standard input closes.
PROGRAM = """
import sys
from pathlib import Path
from vaultevents.core.errors import DatabaseUnusable
from vaultevents.store.postgres.embedded import EmbeddedPostgres
try:
    with EmbeddedPostgres(Path(sys.argv[1]), major=sys.argv[2], durable=sys.argv[3] == "durable") as address:
        print(address.dsn, flush=True)
        sys.stdin.read()
except DatabaseUnusable as problem:
    print("refused:", problem, flush=True)
"""

# What PROGRAM starts with where the kernel refuses a system call: a seccomp filter, as container engines install them.
# `tests` is a list of (offset in struct seccomp_data, value): when all are equal the answer is EPERM.
_FILTER = """
import ctypes, platform, struct
tests = {tests}
rules = []
for left, (offset, value) in zip(range(len(tests), 0, -1), tests):
    rules += [(0x20, 0, 0, offset), (0x15, 0, 2 * left - 1, value)]  # load, compare: else jump to the last rule
rules += [(0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]  # refuse, allow
code = b"".join(struct.pack("=HBBI", *rule) for rule in rules)
held = ctypes.create_string_buffer(code, len(code))
program = struct.pack("@HP", len(rules), ctypes.addressof(held))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(22, 2, ctypes.create_string_buffer(program, len(program)), 0, 0) == 0, ctypes.get_errno()
"""
_NUMBER, _ARGUMENT_0, _ARGUMENT_1 = 0, 16, 24
_UNSHARE = {"x86_64": 272, "aarch64": 97}.get(platform.machine(), -1)
_PRCTL = {"x86_64": 157, "aarch64": 167}.get(platform.machine(), -1)
NO_NAMESPACES = _FILTER.format(tests=[(_NUMBER, _UNSHARE)])
# postgres asks for a death signal of its own, for its children; only ours, SIGINT, is refused.
NO_DEATH_SIGNAL = _FILTER.format(tests=[(_NUMBER, _PRCTL), (_ARGUMENT_0, 1), (_ARGUMENT_1, int(signal.SIGINT))])


class User:
    """One process that has joined `directory`, or is about to: `dsn()` waits for it."""

    def __init__(
        self, directory: Path, *, major: str = "18", durability: str = "throwaway", before: str = "", **options: Any
    ) -> None:
        command = [options.pop("python", sys.executable), "-c", before + PROGRAM, str(directory), major, durability]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)

    def dsn(self) -> str:
        """Its DSN, or `refused: <sentence>`."""
        said: IO[str] | None = self.process.stdout
        assert said is not None
        return said.readline().strip()

    def leave(self) -> None:
        self.process.communicate()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> User:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.kill()


def kill(*processes: psutil.Process) -> None:
    """`kill -9`; one may have ended by itself, because another has."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def postmaster(directory: Path) -> psutil.Process:
    found = layout.read_postmaster(directory)
    assert found is not None, "no server runs"
    return psutil.Process(found.pid)


def supervisor(directory: Path) -> psutil.Process:
    parent = postmaster(directory).parent()
    assert parent is not None
    assert str(directory.resolve()) in parent.cmdline()
    return parent


def supervisors_of(directory: Path) -> list[psutil.Process]:
    """Found by their command line, since a cluster in the making has no postmaster."""
    wanted = str(directory.resolve())
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if wanted in (process.info["cmdline"] or []) and "-I" in process.info["cmdline"]
    ]


def is_gone(directory: Path) -> bool:
    """No supervisor, and no process of a server: each would hold its lock."""
    paths = (layout.supervisor_lock(directory), layout.server_lock(directory))
    for path in paths:
        lock = layout.try_lock(path, fcntl.LOCK_EX)
        if lock is None:
            return False
        os.close(lock)
    return True


async def ask(dsn: str, query: str, *arguments: object) -> Any:
    """One value, over a connection of its own."""
    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        return await connection.fetchval(query, *arguments)
    finally:
        await connection.close()
