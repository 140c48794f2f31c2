"""The directory of an embedded PostgreSQL: what lies where, who holds which lock, and whether a server answers.

    <directory>/
    ├── data/             the PostgreSQL data directory; made as `data.new` and renamed when it is whole
    ├── password          of the one role, mode 0600
    ├── run/              the socket, mode 0700 (see `socket_directory` for paths too long for a socket)
    ├── server.log        what the supervisor and postgres say; bounded, the older part is server.log.1
    ├── users.lock        held shared by every process that uses the server; exclusively by a supervisor that leaves
    ├── supervisor.lock   held by the one supervisor
    └── server.lock       inherited by postgres and all its backends: free means that the last of them has ended

All locks are flock(2), so the kernel drops them however their holder dies. Standard library only: the supervisor
imports this module and must start fast.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import stat
import struct
from pathlib import Path
from typing import IO, NamedTuple

from vaultevents.core.errors import DatabaseUnusable

DATABASE = "vaultevents"
USER = "vaultevents"
PORT = 5432  # only names the socket file: no TCP port is opened
SOCKET_FILE = f".s.PGSQL.{PORT}"
THROWAWAY = "throwaway"  # a file in data/: this cluster was made without fsync and is never to hold anything of worth

_SOCKET_PATH_MAX = 103  # sun_path holds 108 bytes on Linux, 104 on macOS, with the closing zero
_PROTOCOL_3 = 196608
_CANNOT_CONNECT_NOW = b"C57P03"  # SQLSTATE of a server that starts up, recovers or shuts down


class Postmaster(NamedTuple):
    """What a postmaster.pid says. It may be stale: after `kill -9` it still says ready."""

    pid: int
    socket_directory: Path
    ready: bool


def server_environment() -> dict[str, str]:
    """Return what the supervisor and postgres may see of this process's environment: no secret of the service.

    Anybody who runs as the same user can read the environment of a process, for as long as it lives.
    """
    return {name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("LC_")}


_PASSED_ON = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"}


def data_directory(directory: Path) -> Path:
    return directory / "data"


def password_file(directory: Path) -> Path:
    return directory / "password"


def log_file(directory: Path) -> Path:
    return directory / "server.log"


def open_log(directory: Path) -> IO[bytes]:
    """For appending; mode 0600, since failed statements are in it."""
    return open(log_file(directory), "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def users_lock(directory: Path) -> Path:
    return directory / "users.lock"


def supervisor_lock(directory: Path) -> Path:
    return directory / "supervisor.lock"


def server_lock(directory: Path) -> Path:
    return directory / "server.lock"


def try_lock(path: Path, kind: int) -> int | None:
    """A descriptor that holds the lock (`kind`: fcntl.LOCK_SH or LOCK_EX) until closed; None if others hold it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_held(path: Path) -> bool:
    """Does another process hold this lock exclusively?"""
    descriptor = try_lock(path, fcntl.LOCK_SH)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def read_postmaster(directory: Path) -> Postmaster | None:
    """postmaster.pid: line 1 is the pid, 5 the socket directory, 8 the status. None while absent or half written."""
    try:
        lines = (data_directory(directory) / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return None
    if len(lines) < 8 or not lines[0].isdigit():
        return None
    return Postmaster(int(lines[0]), Path(lines[4]), lines[7].strip() == "ready")


def answers(socket_directory: Path) -> bool:
    """Does a server open new sessions here? Asked like pg_isready: a start-up message, and no password sent."""
    fields = f"user\0{USER}\0database\0{DATABASE}\0\0".encode()
    message = struct.pack(">ii", 8 + len(fields), _PROTOCOL_3) + fields
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(1.0)
            link.connect(str(socket_directory / SOCKET_FILE))
            link.sendall(message)
            answer = link.recv(1024)
    except OSError:
        return False
    return answer[:1] == b"R" or (answer[:1] == b"E" and _CANNOT_CONNECT_NOW not in answer)


def socket_directory(directory: Path, *, outside: bool = False) -> Path:
    """`<directory>/run`, or a short directory under /tmp: where that is too long for a socket, or if `outside`.

    /tmp and not $TMPDIR, which may itself be long. Its name comes from the directory's, so there is one per cluster.
    """
    inside = directory / "run"
    if not outside and len(os.fsencode(inside / SOCKET_FILE)) <= _SOCKET_PATH_MAX:
        return inside
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    return Path(f"/tmp/vaultevents-{os.geteuid()}-{digest}")  # noqa: S108  owner and mode are checked by make_private


def make_private(folder: Path, uid: int) -> None:
    """Make `folder` with mode 0700, owned by `uid`. One that was there must be ours or that user's, and nobody else's.

    Raises DatabaseUnusable for a folder that another user could have put there.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (uid, os.geteuid()) or found.st_mode & 0o022:
        raise DatabaseUnusable(f"{folder} is not a private directory of this user: remove it and start again")
    folder.chmod(0o700)
    if found.st_uid != uid:
        os.chown(folder, uid, -1)


def sync_folder(folder: Path) -> None:
    """Brings what was renamed or removed in a folder onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unusable(directory: Path, problem: OSError) -> DatabaseUnusable:
    """The operator's sentence for a file operation that failed in `directory`."""
    if problem.errno == errno.ENOSPC:
        return no_space(directory)
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DatabaseUnusable(
            f"cannot write in the database directory {directory} ({problem.strerror}): make this user its owner, "
            "or choose another data directory"
        )
    return DatabaseUnusable(f"the database directory {directory} cannot be used ({problem}): choose another one")


def no_space(directory: Path) -> DatabaseUnusable:
    return DatabaseUnusable(f"no disk space left for the database in {directory}: free some and start again")
